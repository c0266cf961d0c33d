"""The page's server: what it says to the page, and what it refuses to everybody else."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import TOKEN, Server, ask, serving

from pbrl.label import __main__ as program
from pbrl.label import desk as desks
from pbrl.label.server import LARGEST_BODY, is_loopback
from pbrl.run.questions import AnswerLog, read_page, read_round

RUN = Path("walker_walk", "ncrs", "human", "seed_0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("secret: of the run\n")
    ask(folder)
    return folder


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(one_server: Server, run: Path, tmp_path: Path) -> Server:
    assert run.is_relative_to(tmp_path / "runs")
    one_server.serve(tmp_path / "runs")
    return one_server


def saved(run: Path) -> AnswerLog:
    log = AnswerLog(run)
    log.refresh()
    return log


# What the page is told


def test_a_question_says_nothing_about_the_run(server: Server, run: Path) -> None:
    status, reply = server.post("/next", annotator="ann")
    assert status == 200
    first, ahead = reply["questions"]
    assert {*first} == {"run", "question", "text", "levels", "seconds", "left", "right"}
    assert [first["question"], ahead["question"]] == read_round(run).questions[:2]
    assert first["text"] == "Which walks better?"
    assert not re.search("ncrs|seed|swapped|reward|iteration|trajectory", json.dumps(reply["questions"]))
    status, headers, content = server.send("GET", first["left"])
    assert (status, headers["content-type"]) == (200, "image/webp")
    assert content == b"picture"


def test_from_the_first_question_to_the_last(server: Server, run: Path) -> None:
    seen = []
    while questions := server.questions():
        seen.append(questions[0]["question"])
        status, reply = server.answer(questions[0])
        assert (status, [each["question"] for each in reply["questions"]][:1]) == (200, [
            each["question"] for each in questions[1:]
        ])  # fmt: skip
    assert seen == read_round(run).questions
    log = saved(run)
    assert [each.question for each in log.answers.values()] == seen
    assert {(each.verdict, each.confidence, each.seconds) for each in log.answers.values()} == {("left", 4, 1.5)}
    assert log.open(read_round(run)) == []
    progress = server.post("/next", annotator="ann")[1]["progress"]
    assert progress == {"answered": 3, "of": 3, "run_answered": 3, "run_of": 6, "seconds": 1.5}


def test_a_page_that_is_loaded_again_shows_the_same_question(server: Server) -> None:
    assert server.questions() == server.questions()


def test_an_answer_sent_again_is_saved_once(server: Server, run: Path) -> None:
    question, request = server.questions()[0], secrets.token_hex(16)
    replies = [server.answer(question, id=request) for _ in range(3)]
    assert [(status, reply["saved"]) for status, reply in replies] == [(200, request)] * 3
    assert len(saved(run).answers) == 1


def test_undo_shows_the_question_again(server: Server, run: Path) -> None:
    for _ in range(2):
        server.answer(server.questions()[0])
    names = read_round(run).questions
    request = secrets.token_hex(16)
    for _ in range(2):  # the page did not hear the first reply
        status, reply = server.post("/undo", id=request, annotator="ann")
        assert (status, reply["undone"]["question"]) == (200, names[1])
    assert [each["question"] for each in reply["questions"]] == names[1:]
    status, reply = server.post("/undo", id=secrets.token_hex(16), annotator="ann")
    assert reply["undone"]["question"] == names[0]
    status, reply = server.post("/undo", id=secrets.token_hex(16), annotator="ann")
    assert (status, reply["error"]) == (409, "there is nothing to undo: the run has taken up your answers so far")
    assert server.post("/undo", id=secrets.token_hex(16), annotator="bob")[0] == 409


def test_what_the_run_has_taken_up_stays(server: Server, run: Path) -> None:
    questions = []
    while found := server.questions():
        questions.append(found[0])
        server.answer(found[0])
    assert saved(run).take(read_round(run))
    assert server.post("/undo", id=secrets.token_hex(16), annotator="ann")[0] == 409
    status, reply = server.answer(questions[0], annotator="bob")
    assert (status, reply["error"]) == (409, "the run has already taken up the answers to this question")


def test_two_people_get_different_questions(server: Server, run: Path) -> None:
    ask(run, questions=6)
    names = read_round(run).questions
    assert [each["question"] for each in server.questions("ann")] == names[:2]
    assert [each["question"] for each in server.questions("bob")] == names[2:4]
    assert [each["question"] for each in server.questions("ann")] == names[:2]


def test_a_lease_ends(server: Server, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(run, questions=2)
    assert len(server.questions("ann")) == 2
    assert server.questions("bob") == []
    later = desks.time.monotonic() + 121.0
    assert server.questions("bob") == []  # ann has looked again
    monkeypatch.setattr(desks, "time", SimpleNamespace(monotonic=lambda: later))
    assert len(server.questions("ann")) == 2  # still, but they are not hers alone any more
    assert len(server.questions("bob")) == 2
    assert server.questions("ann") == []
    assert server.answer({"run": run_key(server), "question": read_round(run).questions[0]})[0] == 200  # ann, late


def run_key(server: Server) -> str:
    (found,) = server.desk.runs()
    return found.key


def test_a_panel_answers_the_same_questions(server: Server, run: Path) -> None:
    ask(run, questions=1, answers=2)
    for name in ("ann", "bob"):
        (question,) = server.questions(name)
        assert server.answer(question, annotator=name)[0] == 200
        assert server.questions(name) == []
    assert server.questions("carl") == []
    assert saved(run).take(read_round(run))


def test_a_question_whose_clips_are_not_drawn_waits(server: Server, run: Path) -> None:
    first, second, third = read_round(run).questions
    (run / "questions" / f"{first}.json").unlink()
    assert [each["question"] for each in server.questions()] == [second, third]


def test_runs_are_found_below_the_folder_and_told_where_the_page_is(server: Server, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "walker_walk" / "zpg" / "human" / "seed_1"
    ask(other)
    ask(other.with_name("seed_1~1"))  # kept aside: nobody waits for it
    server.desk._scanned = -10.0
    assert [each.folder for each in server.desk.runs()] == [run, other]
    assert read_page(other) == f"http://127.0.0.1:{server.port}/"
    while questions := server.questions():
        server.answer(questions[0])
    assert len(saved(run).answers) == len(saved(other).answers) == 3
    server.post("/undo", id=secrets.token_hex(16), annotator="ann")  # of the run that was answered last
    assert len(saved(other).undone) == 1


@pytest.mark.parametrize("file", ["answers.jsonl", "questions/round.json"])
def test_a_spoilt_run_does_not_stop_the_others(
    server: Server, run: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt = tmp_path / "runs" / "a" / "seed_0"
    ask(spoilt)
    (spoilt / file).write_text("garbage\n")
    server.desk._scanned = -10.0
    assert [each["question"] for each in server.questions()] == read_round(run).questions[:2]
    server.questions()
    assert len(caplog.records) == 1
    assert file in caplog.text


# What is refused


def refused(server: Server, run: Path, code: int, *request: object) -> str:
    """Send what must be refused; the reason."""
    status, headers, content = server.send(*request)  # type: ignore[arg-type]
    assert status == code, content
    assert "set-cookie" not in headers
    assert b"secret" not in content
    for name, value in {"x-content-type-options": "nosniff", "cache-control": "no-store"}.items():
        assert headers[name] == value
    assert not (run / "answers.jsonl").exists()
    return content.decode()


NO_TOKEN = [{"Cookie": None}, {"Cookie": "pbrl_label_1=x"}, {"Cookie": "pbrl_label_{port}=wrong"}, {"Cookie": "é" * 3}]


@pytest.mark.parametrize("headers", NO_TOKEN)
def test_nothing_without_the_token(server: Server, run: Path, headers: dict[str, str | None]) -> None:
    headers = {name: value and value.format(port=server.port) for name, value in headers.items()}
    clip = server.questions()[0]["left"]
    for method, path in (("GET", "/"), ("GET", clip), ("GET", "/?token=wrong"), ("POST", "/next"), ("POST", "/answer")):
        assert "token" in refused(server, run, 403, method, path, b"{}", headers)


def test_the_address_with_the_token_opens_the_page(server: Server) -> None:
    status, headers, content = server.send("GET", f"/?token={TOKEN}", headers={"Cookie": None})
    assert status == 200
    assert b"<h1" in content
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"pbrl_label_{server.port}={TOKEN}; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*cookie.split("; ")}
    assert TOKEN.encode() not in content


def test_the_page_allows_nothing_from_elsewhere(server: Server) -> None:
    _, headers, content = server.send("GET", "/")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not any("unsafe" in value or "http" in value or "*" in value for value in policy.values())
    assert not re.search(rb"https?://|//[a-z]+\.|@import|<link|src=", content.replace(b"http://www.w3.org", b""))
    assert not re.search(rb' on\w+="| style="', content)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:{port}",
        "",
        ":{port}",
        "169.254.1.1:{port}",
        "localhost",
        "user@127.0.0.1:{port}",
    ],
)
def test_a_foreign_host_is_refused(server: Server, run: Path, host: str) -> None:
    headers = {"Host": host.format(port=server.port)}
    for method, path in (("GET", f"/?token={TOKEN}"), ("POST", "/next")):
        refused(server, run, 421, method, path, b"{}", headers)


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LOCALHOST:{port}"])
def test_our_own_names_are_fine(server: Server, host: str) -> None:
    name = host.format(port=server.port)
    assert server.send("GET", "/", headers={"Host": name})[0] == 200
    headers = {"Host": name, "Origin": f"http://{name}"}
    assert server.send("POST", "/next", b'{"annotator": "ann"}', headers)[0] == 200


def test_a_request_without_a_host_is_refused(server: Server) -> None:
    assert server.send("GET", "/", headers={"Host": None})[0] in (400, 421)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", None, "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://localhost:{port}"]
)  # fmt: skip
def test_a_request_from_another_page_is_refused(server: Server, run: Path, origin: str | None) -> None:
    headers = {"Origin": origin and origin.format(port=server.port)}
    for path in ("/next", "/answer", "/undo"):
        assert "another page" in refused(server, run, 403, "POST", path, b"{}", headers)
    clip = server.questions()[0]["left"]
    if origin:
        refused(server, run, 403, "GET", clip, None, headers)
    for site in ("cross-site", "same-site"):
        refused(server, run, 403, "GET", clip, None, {"Sec-Fetch-Site": site})


CLIMBING = [
    "/clips/{run}/../../config.yaml",
    "/clips/{run}/..%2f..%2fconfig.yaml",
    "/clips/{run}/%2e%2e%2f%2e%2e%2fconfig.yaml",
    "/clips/{run}/%252e%252e%252fconfig.yaml",
    "/clips/{run}/..\\..\\config.yaml",
    "/clips/{run}//etc/passwd",
    "/clips/{run}/%2fetc%2fpasswd",
    "/clips/../config.yaml",
    "/clips/{run}/round.json",
    "/clips/{run}/{question}.json",
    "/clips/{run}/{missing}.webp",
    "/clips/{run}/{link}.webp",
    "/clips/{run}/{clip}.webp%00.json",
    "/clips/{other}/{clip}.webp",
    "/../config.yaml",
    "/config.yaml",
    "/answers.jsonl",
    "/.label_token",
    "/static/page.html",
]


@pytest.mark.parametrize("path", CLIMBING)
def test_only_clips_are_served(server: Server, run: Path, path: str) -> None:
    question = server.questions()[0]
    names = {"run": question["run"], "question": question["question"], "missing": "0" * 32, "link": "1" * 32}
    names |= {"other": "2" * 32, "clip": Path(question["left"]).stem}
    (run / "questions" / f"{names['link']}.webp").symlink_to(run / "config.yaml")
    refused(server, run, 404, "GET", path.format(**names))


def test_a_folder_of_questions_that_is_a_link_serves_nothing(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    ask(elsewhere)
    run = tmp_path / "runs" / "seed_0"
    run.mkdir(parents=True)
    (run / "questions").symlink_to(elsewhere / "questions")
    with serving(tmp_path / "runs") as server:
        for question in server.questions():
            assert server.send("GET", question["left"])[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    for path in ("/next", "/answer"):
        assert server.send(method, path, b"")[0] == 405


GARBAGE = [b"", b"[]", b"null", b"1", b"{", b"\xff\xfe", b"[" * 4000, b'{"annotator": 1}', b'{"annotator": ""}']
GARBAGE += [b'{"annotator": "<b>"}', b'{"annotator": "ann", "more": 1}', b'{"annotator": "' + b"x" * 41 + b'"}']


@pytest.mark.parametrize("body", GARBAGE)
def test_garbage_is_refused(server: Server, run: Path, body: bytes) -> None:
    for path in ("/next", "/answer", "/undo"):
        assert "makes no sense" in refused(server, run, 400, "POST", path, body)
    refused(server, run, 400, "POST", "/next", b'{"annotator": "ann"}', {"Content-Type": "text/plain"})


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "both"}, {"verdict": None}, {"verdict": "equal"}, {"verdict": "skip"}, {"confidence": None},
        {"confidence": 0}, {"confidence": 2.5}, {"confidence": True}, {"confidence": "5"}, {"confidence": 10**30},
        {"seconds": -1}, {"seconds": "1"}, {"seconds": 1e300}, {"id": "x"}, {"id": None}, {"id": "A" * 32},
        {"question": "../x"}, {"annotator": "a\nb"}, {"annotator": None}, {"at": "yesterday"}, {"event": "taken"},
        {"replays": -1}, {"speed": 0}, {"timed_out": True}, {"timed_out": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_refused(server: Server, run: Path, change: dict[str, object]) -> None:
    status, reply = server.answer(server.questions()[0], **change)
    assert status == 400, reply
    assert not (run / "answers.jsonl").exists()


@pytest.mark.parametrize("change", [{"run": "0" * 32}, {"run": None}, {"question": "0" * 32}, {"confidence": 6}])
def test_an_answer_to_what_is_not_asked_is_refused(server: Server, run: Path, change: dict[str, object]) -> None:
    assert server.answer(server.questions()[0], **change)[0] == 409
    assert not saved(run).answers


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entries = st.sampled_from(["id", "run", "question", "annotator", "verdict", "confidence", "seconds", "speed", "at"])


@pytest.mark.slow
@given(path=st.sampled_from(["/next", "/answer", "/undo"]), body=st.dictionaries(entries, json_values))
@settings(max_examples=150, suppress_health_check=[*HealthCheck])
def test_no_json_at_all_breaks_it(server: Server, run: Path, path: str, body: dict[str, object]) -> None:
    assert server.send("POST", path, json.dumps(body).encode())[0] in (200, 400, 409)
    assert not saved(run).answers


def test_a_large_body_is_refused(server: Server, run: Path) -> None:
    body = json.dumps({"annotator": "x" * LARGEST_BODY}).encode()
    assert "at most 4096 bytes" in refused(server, run, 413, "POST", "/answer", body)
    chunks = b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
    headers = {"Transfer-Encoding": "chunked", "Content-Length": None}
    assert "at most 4096 bytes" in refused(server, run, 413, "POST", "/answer", chunks, headers)


def test_a_disk_that_fails_is_no_saved_answer(server: Server, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = server.questions()[0]

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        status, reply = server.answer(question)
    assert (status, "No space left" in reply["error"]) == (500, True)
    assert not saved(run).answers
    assert server.answer(question)[0] == 200
    assert len(saved(run).answers) == 1


@pytest.mark.slow
def test_a_thousand_at_once(server: Server, run: Path) -> None:
    names = ask(run, questions=50, answers=10)
    key = run_key(server)

    def request(number: int) -> tuple[str, int]:
        kind = number * 2654435761 % 2**32 // 2**30  # one of four, as if by chance
        if kind == 0:
            status, reply = server.answer({"run": key, "question": names[number % 50]}, annotator=f"p{number // 50}")
            return reply.get("saved", ""), status
        if kind == 1:
            return "", server.send("POST", "/answer", b"garbage")[0]
        if kind == 2:
            return "", server.send("GET", "/", headers={"Cookie": None})[0]
        return "", server.post("/next", annotator=f"p{number % 7}")[0]

    with ThreadPoolExecutor(200) as pool:
        replies = [*pool.map(request, range(1000))]
    assert {status for _, status in replies} == {200, 400, 403}
    called_saved = Counter(each for each, status in replies if each)
    assert len(called_saved) > 200
    lines = [json.loads(line)["id"] for line in (run / "answers.jsonl").read_text().splitlines()]
    assert Counter(lines) == called_saved
    assert server.send("GET", "/")[0] == 200


# The program


def test_the_token_is_kept_for_the_next_time_and_for_its_owner_alone(tmp_path: Path) -> None:
    token = program.token_of(tmp_path)
    path = tmp_path / program.TOKEN_FILE
    assert len(token) == 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert program.token_of(tmp_path) == token
    path.chmod(0o644)  # others may have read it
    assert program.token_of(tmp_path) != token


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Start the program without serving: what it prints, and where it listens."""
    import uvicorn

    def start(*arguments: str) -> tuple[str, tuple[str, int]]:
        listening = []
        monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: listening.append(sockets[0].getsockname()))
        program.main([str(tmp_path), "--port", "0", "--no-browser", *arguments])
        return capsys.readouterr().out, listening[0]

    return start


def test_only_this_machine_is_served(started, tmp_path: Path) -> None:
    printed, (host, port) = started()
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}/?token={program.token_of(tmp_path)}" in printed
    assert "encrypted" not in printed


def test_another_interface_needs_a_setting_and_says_what_that_means(started) -> None:
    printed, (host, port) = started("--host", "0.0.0.0")
    assert host == "0.0.0.0"
    assert "Anyone who can reach 0.0.0.0" in printed
    assert "nothing is encrypted" in printed
    assert f"http://{socket.gethostname()}:{port}/" in printed


def test_names_of_a_server_for_others(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as server:
        for name, status in (("192.168.1.7", 200), (socket.gethostname(), 200), ("evil.example", 421)):
            assert server.send("GET", "/", headers={"Host": f"{name}:{server.port}"})[0] == status


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_what_goes_wrong_is_said_in_a_sentence(tmp_path: Path, started) -> None:
    with pytest.raises(SystemExit, match="nowhere is not a folder: name one with runs below it"):
        program.main([str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="--annotator takes 1 to 40 letters"):
        program.main([str(tmp_path), "--annotator", "<b>"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match=r"cannot listen at 127.0.0.1, port .* try another --port"):
            started("--port", str(taken.getsockname()[1]))
