"""The page's server in a thread, and a run's questions for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from pbrl.label.__main__ import listen
from pbrl.label.desk import Desk
from pbrl.label.server import application
from pbrl.run.questions import Round, ShownQuestion, digest, write_question, write_round

TOKEN = secrets.token_urlsafe(32)


def ask(
    run: Path, questions: int = 3, picture: Callable[[int], bytes] = lambda _: b"picture", **changes: Any
) -> list[str]:
    """Put questions into a run's folder, as a run does; their names."""
    names = [digest(str(run), str(number)) for number in range(questions)]
    asked = Round(
        iteration=0, iterations=2, text="Which walks better?", answers=1, levels=5, lease_seconds=120.0, seconds=None,
        questions=names,
    )  # fmt: skip
    write_round(run, replace(asked, **changes))
    for name in names:
        clips = [digest(name, side) for side in ("left", "right")]
        write_question(
            run,
            ShownQuestion(
                name=name, iteration=0, first=1, second=2, first_step=0, second_step=0, steps=5, swapped=True,
                repeats=None, left=clips[0], right=clips[1],
            ),
        )  # fmt: skip
        for number, clip in enumerate(clips):
            (run / "questions" / f"{clip}.webp").write_bytes(picture(100 * number))
    return names


class Server:
    """Requests to a server, as a browser sends them unless a test says otherwise."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.socket = host, listen(host, port)
        self.port = self.socket.getsockname()[1]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

        config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_level="critical")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def serve(self, folder: Path) -> None:
        """Serve the runs below a folder from now on."""
        self.desk = Desk(folder, secret=TOKEN, address=f"http://127.0.0.1:{self.port}/")
        self.app = application(self.desk, token=TOKEN, host=self.host, port=self.port, annotator="")

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.socket.close()

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str | None] = {},
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the response; a header that is None is left out."""
        usual = {"Host": f"127.0.0.1:{self.port}", "Cookie": f"pbrl_label_{self.port}={TOKEN}"}
        if method == "POST":
            usual |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**usual, "Content-Length": str(len(body or b"")), **headers}.items():
            if value is not None:
                connection.putheader(name, value)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent
            connection.endheaders(body)
        try:
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        status, _, content = self.send("POST", path, json.dumps(body).encode())
        return status, json.loads(content)

    def answer(
        self, question: Mapping[str, Any], /, annotator: str = "ann", **changes: Any
    ) -> tuple[int, dict[str, Any]]:
        body = {"id": secrets.token_hex(16), "run": question["run"], "question": question["question"]}
        body |= {"annotator": annotator, "verdict": "left", "confidence": 4, "seconds": 1.5}
        return self.post("/answer", **{**body, **changes})

    def questions(self, annotator: str = "ann") -> list[dict[str, Any]]:
        return list(self.post("/next", annotator=annotator)[1]["questions"])


@contextlib.contextmanager
def serving(folder: Path | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server, for the runs below a folder."""
    server = Server(host)
    if folder is not None:
        server.serve(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
