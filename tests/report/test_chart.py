"""The curves in the page: their data, which names cannot break out of, and the videos beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from synthetic_runs import write_run

from pbrl.report import chart, figures
from pbrl.report.curves import plot
from pbrl.report.runs import load
from pbrl.report.sections import LARGEST_VIDEO, videos

HOSTILE = "</script><script>alert(1)</script>&\u2028"


def data_of(html: str) -> dict[str, object]:
    """What the script reads."""
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    data: dict[str, object] = json.loads(found)
    return data


def test_the_page_has_the_numbers_of_the_figure(tmp_path: Path) -> None:
    runs = [
        load(write_run(tmp_path, [seed + i * 0.123456789 for i in range(500)], agent=agent, seed=seed))
        for agent in ("ncrs", "zpg")
        for seed in range(2)
    ]
    looks = figures.styles(["ncrs", "zpg"])
    html = chart.chart(plot(runs, "iteration"), looks, png=b"png", name="curves")
    (panel,) = data_of(html)["panels"]  # type: ignore[misc]
    assert panel["title"] == "walker_walk"
    line = panel["lines"][0]
    assert (line["agent"], line["colour"], line["dash"]) == ("ncrs", looks["ncrs"]["color"], "-")
    assert len(line["x"]) == chart.MOST_POINTS == line["solid"]
    assert (line["x"][0], line["x"][-1]) == (0, 499)
    np.testing.assert_allclose(line["y"][-1], 0.5 + 499 * 0.123456789, rtol=1e-4)
    assert line["low"][-1] < line["y"][-1] < line["high"][-1]


def test_a_single_seed_has_no_interval_and_null_is_written_for_it(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, [1.0, 2.0]))
    looks = figures.styles(["ncrs"])
    html = chart.chart(plot([run], "iteration"), looks, png=b"", name="c")
    (panel,) = data_of(html)["panels"]  # type: ignore[misc]
    assert panel["lines"][0]["low"] == [None, None]


def test_names_cannot_break_out_of_the_data_or_the_legend() -> None:
    text = chart.in_script({"agent": HOSTILE})
    assert not {"<", ">", "&"} & {*text}
    assert json.loads(text) == {"agent": HOSTILE}
    legend = chart.legend({HOSTILE: {"color": "#000000"}}, [HOSTILE])
    assert "<script>" not in legend
    assert "currentColor" in legend  # black would be invisible at night


def test_the_script_of_the_page_is_the_one_that_may_run() -> None:
    assert "</script" not in chart.SCRIPT
    assert "http://www.w3.org/2000/svg" in chart.SCRIPT
    assert re.findall(r"https?://", chart.SCRIPT) == ["http://"]  # a name space, which nothing fetches
    assert "innerHTML" not in chart.SCRIPT


def test_videos_are_shown_once_for_each_agent_and_task(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, [1.0, 2.0], agent=agent, seed=seed) for agent in ("ncrs", "zpg") for seed in (0, 1)]
    runs = [load(folder) for folder in folders]
    assert videos(runs) == ""
    (folders[1] / "videos").mkdir()
    (folders[1] / "videos" / "iteration_000001.mp4").write_bytes(b"film")
    (folders[1] / "play.gif").write_bytes(b"newer")
    (folders[2] / "play.mp4").write_bytes(b"0" * (LARGEST_VIDEO + 1))
    (folders[3] / "learning.mp4").write_bytes(b"film")
    html = videos(runs)
    assert "walker_walk: ncrs, seed 1" in html
    assert "data:image/gif;base64,bmV3ZXI=" in html
    assert "walker_walk: zpg, seed 1" in html  # seed 0 is too large
    assert html.count("<figure>") == 2
