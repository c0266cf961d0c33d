"""Requests to the labelling page that no browser of ours sends: none is let in, none reads a file, none breaks it."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutations import NASTY, mutate
from tally import Clock, Tally
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1] / "label"))
from serving import TOKEN, Server, ask, serving

from pbrl.run.questions import AnswerLog

SECRET = "known to the run alone"
QUESTIONS = 6
PATIENCE = 60.0  # seconds
ALIVE = 50  # after so many requests, an honest one must be answered as ever
STRANGE = [
    None,
    True,
    -1,
    0,
    2.5,
    10**30,
    1e308,
    "",
    "x",
    "../x",
    "<b>",
    "a\nb",
    "\x00",
    "é" * 50,
    [],
    {},
    [[]],
    {"a": 1},
]
HOSTS = ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "user@127.0.0.1:{port}", "[::", "\xff"]
ORIGINS = ["http://evil.example", "null", "", "https://127.0.0.1:{port}", "http://localhost:{port}", "file://"]
COOKIES = ["", "pbrl_label_1=x", "pbrl_label_{port}=wrong", "pbrl_label_{port}=", "é" * 3, ";" * 100, "=" * 2000]
METHODS = ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "PRI", "GE\x00T", "X" * 5000]
PATHS = [
    "/clips/{run}/../../config.yaml",
    "/clips/{run}/..%2f..%2fconfig.yaml",
    "/clips/{run}/%2e%2e%2f%2e%2e%2fconfig.yaml",
    "/clips/{run}/%252e%252e%252fconfig.yaml",
    "/clips/{run}/..\\..\\config.yaml",
    "/clips/{run}//etc/passwd",
    "/clips/{run}/round.json",
    "/clips/{run}/{question}.json",
    "/clips/{run}/{link}.webp",
    "/clips/../config.yaml",
    "/../config.yaml",
    "/config.yaml",
    "/answers.jsonl",
    "/.label_token",
    "/%ff%fe",
    "/%00",
    "/?token=%ff",
    "/?token[]=x",
    "//evil.example/",
    "http://evil.example/",
    "*",
    "/" + "a" * 70_000,
]


def hostile_requests(attempts: int, seed: int, clock: Clock, folder: Path, _: object = None) -> Tally:
    """So many requests. Most must be refused. Of those with bytes changed anywhere it is not known: of these only what
    no request may do is looked at, which is to fail, to read a file, or to undo another person's answer."""
    tally, draw = Tally("hostile requests to the page"), random.Random(seed)
    run = folder / "runs/seed_0"
    with serving() as server:
        server.serve(folder / "runs")
        for turn in tqdm(range(attempts), desc=tally.part):
            if clock.over:
                break
            if turn % ALIVE == 0:
                names = _new_questions(server, run)
                honest = _answer_honestly(server)
            name, must_be_refused, message = _request(draw, server, names)
            status, response = exchange(server.port, message, PATIENCE if must_be_refused else 0.2)
            tally.attempts += 1
            tally.refused += 400 <= status < 500
            what = f"seed {seed}, turn {turn}, {message[:300]!r}: {response[:200]!r}"
            if status >= 500:
                tally.fail("tracebacks", what)
            if SECRET.encode() in response or TOKEN.encode() in response or (must_be_refused and 200 <= status < 400):
                tally.fail("executions", what)
            answers = _answers(run)
            if honest not in answers:
                tally.fail("lost iterations", what)
            if must_be_refused and name in answers:
                tally.fail("wrong states", what)
            if turn % ALIVE == ALIVE - 1 and len(answers) < QUESTIONS and _answer_honestly(server) not in _answers(run):
                tally.fail("lost iterations", f"seed {seed}, after turn {turn}: an honest answer is not saved")
    return tally


def _new_questions(server: Server, run: Path) -> dict[str, str]:
    """A run with questions that nobody has answered; names for paths."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(SECRET)
    ask(run, QUESTIONS)
    (run / "questions" / f"{'1' * 32}.webp").symlink_to(run / "config.yaml")
    server.serve(run.parent)
    question = server.questions("mallory")[0]
    return {"run": question["run"], "question": question["question"], "link": "1" * 32}


def _answer_honestly(server: Server) -> str:
    """Answer the next question, as the page does; the answer's id, or nothing if it was not saved."""
    for question in server.questions("honest"):
        status, reply = server.answer(question, annotator="honest")
        return reply["saved"] if status == 200 else ""
    return ""


def _answers(run: Path) -> dict[str, Any]:
    if not (run / "answers.jsonl").exists():
        return {}
    log = AnswerLog(run)
    log.refresh()
    return dict(log.answers)


def _request(draw: random.Random, server: Server, names: Mapping[str, str]) -> tuple[str, bool, bytes]:
    """Its id, whether it must be refused, and its bytes: what the page sends, with one thing changed, or any bytes."""
    answer = {"id": f"{draw.getrandbits(128):032x}", "run": names["run"], "question": names["question"]}
    answer |= {"annotator": "mallory", "verdict": "left", "confidence": 4, "seconds": 1.5}
    body: Any = draw.choice([answer, answer, {"annotator": "mallory"}, {"id": answer["id"], "annotator": "mallory"}])
    path = {7: "/answer", 1: "/next", 2: "/undo"}[len(body)]
    own, method = f"127.0.0.1:{server.port}", "POST"
    headers = {"Host": own, "Origin": f"http://{own}", "Cookie": f"pbrl_label_{server.port}={TOKEN}"}
    headers |= {"Content-Type": "application/json", "Connection": "close"}
    content, refused = json.dumps(body).encode(), True
    match draw.randrange(11):
        case 0:
            headers["Cookie"] = draw.choice(COOKIES).format(port=server.port)
        case 1:
            headers["Host"] = draw.choice(HOSTS).format(port=server.port)
        case 2:
            headers["Origin"] = draw.choice(ORIGINS).format(port=server.port)
        case 3:
            method, path = draw.choice(["GET", "POST"]), draw.choice(PATHS).format(**names)
            refused = "token" not in path and not path.startswith(("http:", "//"))  # those may be the page itself
        case 4:
            method = draw.choice(METHODS)
        case 5:
            del headers[draw.choice(["Host", "Origin", "Cookie", "Content-Type"])]
        case 6:
            content = json.dumps(
                {**answer, draw.choice([*answer, "at", "event", "more"]): draw.choice(STRANGE)}
            ).encode()
            path, refused = "/answer", False  # another number of seconds is an answer
        case 7:
            content = draw.choice([*NASTY, b"[" * 4000, b"{" + b'"a":' * 900, b'"' + b"x" * 10_000, b"\xed\xa0\x80"])
        case 8:
            headers |= {f"X-{number}": "x" * draw.choice((10, 9000)) for number in range(draw.choice((1, 200)))}
            headers |= {"Transfer-Encoding": draw.choice(["chunked", "gzip", "chunked, chunked", "\x0b"])}
            refused = False  # a chunked request is one
        case 9:
            mutated = mutate(draw, content)
            content, refused = mutated, False
        case _:
            refused = False
    length = [] if "Transfer-Encoding" in headers else [f"Content-Length: {len(content)}"]
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), *length, "", ""]
    message = "\r\n".join(lines).encode("latin-1", "replace") + content
    if not refused and draw.random() < 0.7:
        message = mutate(draw, message)
    return answer["id"], refused, message


def exchange(port: int, message: bytes, patience: float) -> tuple[int, bytes]:
    """Send bytes and hear what comes back: a status (0 if it is none) and all of it.

    patience: seconds after which the server is told that nothing follows, which it takes for a page that was closed.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        try:
            connection.sendall(message)
            with contextlib.suppress(TimeoutError):
                while part := connection.recv(65536):
                    received += part
            connection.settimeout(PATIENCE)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            return 504, b"no answer"
        except OSError:  # the connection was closed before all was sent
            pass
    first = received.split(b" ", 2)
    return int(first[1]) if len(first) > 1 and first[1].isdigit() else 0, received
