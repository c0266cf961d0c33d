"""The page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from synthetic_runs import write_run

from pbrl.report.__main__ import main

# What a look at the page finds; appended to a copy of it, which has no script itself.
LOOK = """<script>
onload = () => {
  const pictures = [...document.images];
  const found = {
    pictures: pictures.length,
    unloaded: pictures.filter(each => !(each.complete && each.naturalWidth > 0)).map(each => each.alt),
    width: document.documentElement.scrollWidth,
    screen: innerWidth,
    fetched: performance.getEntriesByType("resource").map(each => each.name),
  };
  document.title = JSON.stringify(found);
};
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])  # a window of Chromium is no narrower
def test_the_page_is_whole_and_loads_nothing_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    assert browser is not None, f"this test needs one of {', '.join(names)}: apt-get install chromium"
    for agent in ("ncrs", "zpg", "dpo", "ppo_rlhf", "random"):
        for seed in range(2):
            write_run(tmp_path / "runs", [1.0, 2.0 + seed], agent=agent, seed=seed, oracle="rational")
            write_run(tmp_path / "runs", [1.0, 2.0 + seed], agent=agent, seed=seed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pbrl.report", "--resamples", "50", "runs"])
    main()
    page = tmp_path / "report" / "index.html"
    looked_at = page.with_name("looked_at.html")
    looked_at.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    headless = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    how = [f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    result = subprocess.run(
        [browser, *headless, *how, looked_at.as_uri()], capture_output=True, text=True, check=True, timeout=300
    )
    seen = re.search("<title>({.*?})</title>", result.stdout)
    assert seen is not None, result.stderr
    found = json.loads(unescape(seen[1]))
    assert found["pictures"] == len(list((tmp_path / "report" / "figures").glob("*.png")))
    assert found["unloaded"] == []
    assert found["fetched"] == []
    assert found["width"] <= found["screen"]  # only tables and figures move sideways, by themselves
    assert "CONSOLE" not in result.stderr
