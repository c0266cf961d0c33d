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

# What a look at the page finds; appended to a copy of it without the rule that only its own script may run.
LOOK = """<script>
onload = () => {
  const pictures = [...document.images];
  const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
  const at = { clientX: box.right - 12, clientY: box.top + 50, bubbles: true };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.querySelector(".tip");
  const pointed = tip.hidden ? "" : tip.innerText;
  const button = document.querySelector('.legend button[data-agent="ncrs"]');
  button.click();
  const lines = [...document.querySelectorAll('g.line[data-agent="ncrs"]')];
  const others = [...document.querySelectorAll('g.line[data-agent="zpg"]')];
  const off = lines.every(each => each.style.display === "none") && others.every(each => each.style.display === "");
  button.click();
  const on = lines.every(each => each.style.display === "");
  const found = {
    pictures: pictures.length,
    pointed, off, on, pressed: button.getAttribute("aria-pressed"), lines: lines.length,
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
    without_rule = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    looked_at.write_text(without_rule.replace("</body>", f"{LOOK}</body>"))
    headless = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    how = [f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    result = subprocess.run(
        [browser, *headless, *how, looked_at.as_uri()], capture_output=True, text=True, check=True, timeout=300
    )
    seen = re.search("<title>({.*?})</title>", result.stdout)
    assert seen is not None, result.stderr
    found = json.loads(unescape(seen[1]))
    curves = ("curves_", "evaluation_", "teacher_")  # which the script draws
    figures = [path.name for path in (tmp_path / "report" / "figures").glob("*.png")]
    assert found["pictures"] == sum(not name.startswith(curves) for name in figures)
    assert found["lines"] == sum(name.startswith(curves) for name in figures)
    assert found["pointed"].startswith("walker_walk, iteration 1")
    assert "ncrs: 2.5" in found["pointed"]
    assert (found["off"], found["on"], found["pressed"]) == (True, True, "true")
    assert found["unloaded"] == []
    assert found["fetched"] == []
    assert found["width"] <= found["screen"]  # only tables and figures move sideways, by themselves
    assert "CONSOLE" not in result.stderr
