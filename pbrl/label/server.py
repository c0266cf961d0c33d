"""The page's server: who may ask it for what.

It answers nobody without the token, no page of another site, and nothing but the page, the clips and three requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import ipaddress
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pbrl.label.desk import Desk
from pbrl.run.questions import ANNOTATOR, CLIP, NAME, Answer, QuestionsError, RefusedError, build

Result = TypeVar("Result")

LARGEST_BODY = 4096  # bytes; an answer has some 300
COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class TooLargeError(ValueError):
    """A request's body is too large."""


def application(desk: Desk, *, token: str, host: str, port: int, annotator: str) -> ASGIApp:
    """The server's side of the page."""
    page, policy = the_page(annotator)
    lock = threading.Lock()

    async def alone(do: Callable[..., Result], *arguments: Any) -> Result:
        """Do something in a thread, because it waits for the disk, and nothing else at the same time."""

        def locked() -> Result:
            with lock:
                return do(*arguments)

        return await run_in_threadpool(locked)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def clip(request: Request) -> Response:
        key, file = request.path_params["run"], request.path_params["file"]
        path = await alone(desk.clip, key, file) if NAME.fullmatch(key) and CLIP.fullmatch(file) else None
        if path is None:
            return refusal(404, "there is no such clip")
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}  # its name is a digest of it
        return FileResponse(path, media_type="image/webp", headers=headers)

    def reply(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
        """What responds to a request with JSON."""

        async def respond(request: Request) -> Response:
            try:
                return JSONResponse(await alone(handle, await body_of(request)))
            except RefusedError as error:
                return refusal(409, str(error))
            except TooLargeError as error:
                return refusal(413, str(error))
            except ValueError as error:
                return refusal(400, f"this request makes no sense: {error}")
            except (QuestionsError, OSError) as error:
                return refusal(500, str(error))

        return respond

    def next_questions(given: dict[str, Any]) -> dict[str, Any]:
        name = only(given, "annotator")["annotator"]
        return desk.next(None if name is None else checked_name(name))

    def answer(given: dict[str, Any]) -> dict[str, Any]:
        key = given.pop("run", None)
        if "at" in given:
            raise ValueError("the server says when an answer was saved")
        build(Answer, {**given, "at": ""})
        return desk.answer(key, **given)

    def undo(given: dict[str, Any]) -> dict[str, Any]:
        request = only(given, "id", "annotator")["id"]
        if not isinstance(request, str) or not NAME.fullmatch(request):
            raise ValueError("id makes no sense")
        return desk.undo(request, checked_name(given["annotator"]))

    routes = [
        Route("/", show_page, methods=["GET"]),
        Route("/favicon.ico", lambda _: Response(status_code=204), methods=["GET"]),
        Route("/clips/{run}/{file}", clip, methods=["GET"]),
        Route("/next", reply(next_questions), methods=["POST"]),
        Route("/answer", reply(answer), methods=["POST"]),
        Route("/undo", reply(undo), methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), token=token, host=host, port=port)


def the_page(annotator: str) -> tuple[str, str]:
    """The page, and the policy that lets a browser run its own script and style and nothing else."""
    page = files("pbrl.label").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.replace("{{annotator}}", html.escape(annotator, quote=True)), policy


async def body_of(request: Request) -> dict[str, Any]:
    """A request's JSON object, as long as it is small."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ValueError("it is not JSON")
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > LARGEST_BODY:
            raise TooLargeError(f"a request has at most {LARGEST_BODY} bytes")
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def only(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same, if it has these entries and no others."""
    if {*given} != {*names}:
        raise ValueError(f"it must have {' and '.join(names)}, and nothing else")
    return given


def checked_name(name: Any) -> str:
    """A person's name."""
    if not isinstance(name, str) or not ANNOTATOR.fullmatch(name):
        raise ValueError("a name has 1 to 40 letters, digits, spaces and . @ + - _")
    return name


def refusal(code: int, why: str) -> JSONResponse:
    """Why a request is refused, in a sentence."""
    return JSONResponse({"error": why}, code)


class Guard:
    """Lets a request through if it is addressed to this server, comes from its own page, and has the token."""

    def __init__(self, app: ASGIApp, *, token: str, host: str, port: int) -> None:
        self.app, self.token, self.host, self.port = app, token, host, port
        self.cookie = f"pbrl_label_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; every response gets the common headers."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        authorised_by_address = secrets.compare_digest(
            request.query_params.get("token", "").encode(), self.token.encode()
        )
        authorised = authorised_by_address or secrets.compare_digest(
            request.cookies.get(self.cookie, "").encode(), self.token.encode()
        )
        if not self.is_own_name(request.headers):
            response: ASGIApp = refusal(421, "this server is not known by that name")
        elif not self.is_own_page(request):
            response = refusal(403, "this request comes from another page")
        elif not authorised:
            response = PlainTextResponse("Open the address that python -m pbrl.label printed: it has the token.", 403)
        else:
            response = self.app

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in COMMON_HEADERS.items():
                    headers.setdefault(name, value)
                if authorised_by_address and response is self.app:
                    cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=31536000"
                    headers.append("Set-Cookie", cookie)
            await send(message)

        await response(scope, receive, send_with_headers)

    def is_own_name(self, headers: Headers) -> bool:
        """Whether the request was sent to a name of this server, not to one that another site pointed here."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        name, _, port = hosts[0].rpartition(":")
        if port != str(self.port):
            return False
        name = name.strip("[]").lower()
        if name in (
            "localhost",
            self.host.lower(),
            *((socket.gethostname().lower(),) if not is_loopback(self.host) else ()),
        ):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self.host)

    def is_own_page(self, request: Request) -> bool:
        """Whether no other site sent the request: browsers say where a request comes from."""
        origins, own = request.headers.getlist("origin"), f"http://{request.headers.get('host')}"
        if request.method == "POST":
            return origins == [own]
        if request.headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
            return all(each == own for each in origins)
        return request.url.path == "/" and not origins  # a link to the page, which needs the token


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
