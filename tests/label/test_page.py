"""The page in a real Chromium, with a person at the keyboard, and a run on the other side that learns from them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import Browser, chromedriver
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from page_person import LevelledTeacher, Prompter, answer_all, label, open_page, say, shown
from PIL import Image
from safetensors.numpy import load_file
from serving import TOKEN, Server, ask, serving
from teachers import RATIONAL

from pbrl.label.draw import animated_webp
from pbrl.run import loop
from pbrl.run.folder import prepare
from pbrl.run.preference_log import read
from pbrl.run.questions import AnswerLog, read_question
from pbrl.run.training import TrainingRun

pytestmark = pytest.mark.slow  # a browser, and physics


@pytest.fixture(scope="module")
def driver() -> Iterator[str]:
    with chromedriver() as address:
        yield address


@pytest.fixture
def browse(driver: str, tmp_path: Path) -> Iterator[Callable[[], Browser]]:
    """Makes browsers. In the end their consoles must be silent, and all their requests were to this machine."""
    browsers: list[Browser] = []

    def start() -> Browser:
        browsers.append(Browser(driver, tmp_path / f"profile_{len(browsers)}"))
        browsers[-1].look(1280, 800, "light")
        return browsers[-1]

    yield start
    try:
        for browser in browsers:
            assert browser.complaints() == []
            assert {urlsplit(address).hostname for address in browser.requests()} <= {"127.0.0.1"}
    finally:
        for browser in browsers:
            browser.close()


def given(run: Path) -> list[tuple[str, str, int | None]]:
    """What counts: who answered what, how surely, in the order of answering."""
    log = AnswerLog(run)
    log.refresh()
    valid = {answer.id for answers in log.valid().values() for answer in answers}
    return [(each.annotator, each.verdict, each.confidence) for each in log.answers.values() if each.id in valid]


# The page alone


def clip(shade: int, frames: int = 10) -> bytes:
    """A clip of a second, in which a bar moves to the right."""
    pictures = [Image.new("RGB", (64, 48), (shade, 0, 0)) for _ in range(frames)]
    for number, picture in enumerate(pictures):
        picture.paste((255, 255, 255), (6 * number, 0, 6 * number + 6, 48))
    return animated_webp(pictures, 0.1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "seed_0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with serving(run.parent) as server:
        yield server


def page(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/?token={TOKEN}"


def test_all_ways_to_answer(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    ask(run, questions=12, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")

    def do(*acts: Callable[[], object]) -> None:
        """Do something to the question on the screen that answers it."""
        question = shown(browser)
        for act in acts:
            act()
        browser.wait("!outbox.length && current && current.question !== arguments[0]", question)

    do(lambda: browser.press("left"), lambda: browser.press("2"))
    do(lambda: browser.press("right"), lambda: browser.press("right"))  # once more: as surely as the last time
    do(lambda: browser.press("5"), lambda: browser.press("left", hold=2))  # held
    do(lambda: browser.press("down"))
    do(lambda: browser.press("s"))
    do(lambda: browser.click("#left"), lambda: browser.click("#scale button:nth-child(4)"))
    do(lambda: browser.click("#right"), lambda: browser.click("#right"))
    do(lambda: browser.click("#equal"))
    do(lambda: browser.click("#skip"))
    do(lambda: browser.press("right"), lambda: browser.press("left"), lambda: browser.press("1"))  # second thoughts
    said = [("left", 2), ("right", 2), ("left", 5), ("equal", None), ("skip", None), ("left", 4), ("right", 4)]
    said += [("equal", None), ("skip", None), ("left", 1)]
    assert given(run) == [("ann", *each) for each in said]
    assert "10 of 12" in browser.script("return $('round_text').textContent")


def test_undo_goes_back_as_far_as_one_likes(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    names = ask(run, questions=5, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")
    for _ in range(3):
        say(browser, "left", 3)
    for number, way in enumerate([("u",), ("control", "z"), None]):
        if way is None:
            browser.click("#undo")
        else:
            browser.press(*way)
        browser.wait("!outbox.length && current && current.question === arguments[0]", names[2 - number])
    assert given(run) == []
    browser.press("u")
    browser.wait("$('status').textContent.includes('nothing to undo')")
    for _ in range(5):
        say(browser, "right", 1)
    assert given(run) == [("ann", "right", 1)] * 5
    browser.wait("$('status').textContent === \"waiting for the run's next questions\"")
    assert "409" in browser.complaints()[0]  # of the one refusal


def test_a_reload_changes_nothing(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    names = ask(run, questions=3, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")
    say(browser, "left", 5)
    assert shown(browser) == names[1]
    browser.press("right")
    browser.reload()
    assert shown(browser) == names[1]  # without the introduction, and without the token in the address
    assert browser.script("return location.search + location.pathname") == "/"
    browser.press("down")
    browser.reload()  # whether it was sent or not
    for _ in range(1 + (len(given(run)) < 2)):
        shown(browser)
        if len(given(run)) < 3:
            say(browser, "skip", None)
    assert [verdict for _, verdict, _ in given(run)] == ["left", "equal", "skip"]


def test_two_people_at_once(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    names = ask(run, questions=4, picture=clip)
    ann, bob = browse(), browse()
    open_page(ann, page(server), "ann")
    assert shown(ann) == names[0]
    open_page(bob, page(server), "bob")
    assert shown(bob) == names[2]
    for _ in range(2):
        say(ann, "left", 2)
        say(bob, "right", 4)
    assert sorted(given(run)) == [("ann", "left", 2)] * 2 + [("bob", "right", 4)] * 2


def test_nothing_is_lost_while_the_program_is_away(tmp_path: Path, run: Path, driver: str) -> None:
    ask(run, questions=3, picture=clip)
    browser = Browser(driver, tmp_path / "profile")
    server = Server()
    server.serve(run.parent)
    server.start()
    open_page(browser, page(server), "ann")
    shown(browser)
    server.stop()
    browser.press("left")
    browser.press("5")
    browser.wait("$('status').textContent.startsWith('not saved yet')")
    assert given(run) == []
    again = Server(port=server.port)
    again.serve(run.parent)
    again.start()
    try:
        browser.wait("!outbox.length")
        assert given(run) == [("ann", "left", 5)]
    finally:
        browser.close()
        again.stop()


def test_clips_play_in_step(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    ask(run, questions=1, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")
    shown(browser)
    look = """return player.clips.map(clip => {
        const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        copy.drawImage(clip.element, 0, 0);
        const data = copy.getImageData(0, 24, 64, 1).data;
        let at = 0; while (at < 64 && data[4 * at + 1] < 128) at += 1;
        return Math.round(at / 6); })"""
    browser.press(" ")  # pause
    for moment in (0.0, 0.25, 0.75):
        browser.script("$('scrubber').value = arguments[0]; $('scrubber').oninput({target: $('scrubber')})", moment)
        wanted = int(moment * 10)
        browser.wait("player.clips.every(clip => clip.shown === arguments[0])", wanted)
        assert browser.script(look) == [wanted, wanted]
    assert browser.script("return $('pause').textContent") == "Play"
    browser.press("r")
    assert browser.script("return player.playing")
    browser.wait("player.clips.every(clip => clip.shown > 2)")
    for key, speed in ((".", 2), (".", 4), (".", 4), (",", 2), (",", 1), (",", 0.5), (",", 0.25), (",", 0.25)):
        browser.press(key)
        assert browser.script("return [player.speed, Number($('speed').value)]") == [speed, speed]


def test_a_control_with_the_focus_keeps_its_keys(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    ask(run, questions=2, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")
    question = shown(browser)
    browser.script("$('speed').focus()")
    browser.press("down")
    browser.script("$('scrubber').focus()")
    browser.press("left")
    assert browser.script("return [current.question, chosen]") == [question, None]
    browser.script("$('equal').focus()")
    browser.press(" ")  # as those do who see no pictures, or have no mouse
    browser.wait("!outbox.length")
    assert given(run) == [("ann", "equal", None)]


def test_a_time_limit_skips(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    ask(run, questions=4, picture=clip, seconds=0.5)
    browser = browse()
    open_page(browser, page(server), "ann")
    browser.wait("$('absent').open")
    log = AnswerLog(run)
    browser.wait("!outbox.length")
    log.refresh()
    assert [(each.verdict, each.timed_out) for each in log.answers.values()] == [("skip", True)] * 3
    browser.click("#present")
    say(browser, "skip", None)


def test_on_a_telephone(server: Server, run: Path, browse: Callable[[], Browser]) -> None:
    ask(run, questions=3, picture=clip)
    browser = browse()
    browser.look(390, 844, "dark")
    open_page(browser, page(server), "ann")
    shown(browser)
    assert browser.script("return document.documentElement.scrollWidth") == 390
    for begin, end, side in ((300, 100, "left"), (100, 300, "right")):
        question = shown(browser)
        for kind, points in (
            ("touchStart", [{"x": begin, "y": 150}]),
            ("touchMove", [{"x": end, "y": 155}]),
            ("touchEnd", []),
        ):
            browser.command("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        browser.wait("chosen === arguments[0]", side)
        browser.click("#scale button:nth-child(2)")
        browser.wait("!outbox.length && current && current.question !== arguments[0]", question)
    assert given(run) == [("ann", "left", 2), ("ann", "right", 2)]


def test_a_screen_reader_finds_a_name_for_every_control(
    server: Server, run: Path, browse: Callable[[], Browser]
) -> None:
    ask(run, questions=1, picture=clip)
    browser = browse()
    open_page(browser, page(server), "ann")
    shown(browser)
    for opened in (False, True):
        if opened:
            browser.click("#help")
        nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
        controls = [
            (each["role"]["value"], each.get("name", {}).get("value", ""))
            for each in nodes
            if not each.get("ignored")
            and each.get("role", {}).get("value")
            in ("button", "radio", "slider", "combobox", "textbox", "progressbar", "dialog", "radiogroup")
        ]
        assert len(controls) >= (3 if opened else 17)
        assert [role for role, name in controls if not name] == []


# With a run on the other side


def settings_of(folder: Path, *overrides: str) -> dict[str, object]:
    """Of a short run with physics."""
    small = ["agent.policy.hidden=[16]", "env=cheetah_run", "env.steps=40", "trajectories=8", "pairs=4", "iterations=2"]
    small += ["evaluation.trajectories=2", "wandb.mode=disabled", "threads=1", f"folder={folder}", "name=run"]
    with initialize_config_module("conf"):
        cfg = compose("train", [*small, *overrides], return_hydra_config=True)
        with open_dict(cfg):
            cfg.choices = {"agent": "ncrs", "env": "cheetah_run", "oracle": "human"}
            del cfg["hydra"]
    return dict(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]


HUMAN = ["oracle=human", "oracle.confidence=[0.6,0.7,0.8,0.9,1.0]", "oracle.undo_seconds=0"]


def go(run: TrainingRun, settings: dict[str, object]) -> None:
    prepare(settings)
    loop.run(run, iterations=run.iterations, checkpoint_every=1, mirrors=lambda _: [], progress_bar=False)
    run.ledger.close()


def record(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / loop.RECORD).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds_")} for line in lines]


def teacher(seed: int) -> LevelledTeacher:
    """One with all that a teacher may do: skip, call equal, be mistaken and unsure."""
    traits = {"tau": 0.05, "eps_mistake": 0.2, "eps_skip": 0.5, "eps_equal": 1.0, "gamma": 0.99}
    return LevelledTeacher(RATIONAL(rng=np.random.default_rng(seed), **traits), [0.6, 0.7, 0.8, 0.9, 1.0])


def test_a_teacher_at_the_page_gives_the_run_of_the_same_teacher_asked_directly(
    tmp_path: Path, browse: Callable[[], Browser]
) -> None:
    plain = settings_of(tmp_path / "direct")
    direct = TrainingRun(plain)
    direct.ledger.oracle = teacher(0)
    go(direct, plain)

    settings = settings_of(tmp_path / "runs" / "asked", *HUMAN)
    asked = TrainingRun(settings)
    prompter = Prompter(asked.ledger.oracle, teacher(0), asked.ledger)  # type: ignore[arg-type]
    over = threading.Event()

    def to_the_end() -> None:
        try:
            go(asked, settings)
        finally:
            over.set()

    (tmp_path / "runs").mkdir()
    with label(tmp_path / "runs") as address:
        learning = threading.Thread(target=to_the_end)
        learning.start()
        browser = browse()
        open_page(browser, address, "ann")
        answer_all(browser, prompter, over)
        learning.join()
        browser.wait("$('status').textContent === 'the run has all its answers: thank you'")
        browser.open("about:blank")

    folders = [tmp_path / "direct", tmp_path / "runs" / "asked"]
    assert record(folders[0]) == record(folders[1])
    assert record(folders[0])[-1]["pairs_asked"] == 8
    states = [load_file(max((folder / loop.CHECKPOINT).iterdir()) / "arrays.safetensors") for folder in folders]
    assert {name for name in states[0] if "ledger" not in name} == {name for name in states[1] if "ledger" not in name}
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name])
    logs = [read(folder / "preferences").drop_columns(["tau"]) for folder in folders]
    assert logs[0].equals(logs[1])
    assert {*logs[0]["reason"].to_pylist()} > {"skipped", "equal"}  # so that all of it was put to the test


def test_people_take_a_run_through_two_iterations(tmp_path: Path, browse: Callable[[], Browser]) -> None:
    """The programs as they are, two people, keys and buttons, undo and reload; with pictures of the screen."""
    folder = tmp_path / "runs" / "cheetah_run" / "ncrs" / "human" / "seed_0"
    command = [sys.executable, "-m", "pbrl.train", "agent.policy.hidden=[16]", "env=cheetah_run", "env.steps=40"]
    command += ["trajectories=12", "pairs=6", "iterations=2", "oracle=human", "evaluation.trajectories=2"]
    command += ["wandb.mode=disabled", f"folder={folder}"]
    (tmp_path / "runs").mkdir()
    with (
        label(tmp_path / "runs") as address,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as training,
    ):
        ann, bob = browse(), browse()
        open_page(ann, address, "ann")
        shown(ann, seconds=300)
        open_page(bob, address, "bob")
        for width, height in ((1280, 800), (390, 844)):
            for scheme in ("light", "dark"):
                ann.look(width, height, scheme)
                ann.picture(tmp_path / f"page_{width}_{scheme}.png")
                assert ann.script("return document.documentElement.scrollWidth") == width
        ann.look(1280, 800, "light")
        said = [("left", 2), ("equal", None), ("right", 5)]
        for verdict, level in said:
            say(ann, verdict, level)
        ann.press("u")
        ann.wait("!outbox.length && current")
        ann.reload()
        say(ann, "left", 1)
        while training.poll() is None:
            for browser in (ann, bob):
                if browser.script("return current && !showing"):
                    browser.click("#right")
                    browser.click("#scale button:nth-child(3)")
                    browser.wait("!outbox.length")
        printed = training.communicate()[0]
        for browser in (ann, bob):
            browser.open("about:blank")
    assert training.returncode == 0, printed
    assert "questions are open" in printed
    assert len(record(folder)) == 2
    everything = given(folder)
    assert everything[:3] == [("ann", "left", 2), ("ann", "equal", None), ("ann", "left", 1)]
    assert {who for who, *_ in everything} == {"ann", "bob"}
    taken = AnswerLog(folder)
    taken.refresh()
    assert len(taken.taken) == record(folder)[-1]["pairs_asked"] == 12
    for row in read(folder / "preferences").to_pylist():
        (question,) = [
            each
            for each in [read_question(folder, name) for name in taken.taken]
            if each and (each.first, each.second) == (row["first"], row["second"])
        ]
        (answer,) = [taken.answers[each] for each in taken.taken[question.name]]
        level = [0.5, 0.6, 0.7, 0.8, 0.9, 0.99][answer.confidence or 0]
        second = (answer.verdict == "right") != question.swapped
        assert row["probability"] == pytest.approx(level if second else 1.0 - level)
