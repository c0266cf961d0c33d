"""Chromium, driven by Debian's chromedriver through the WebDriver protocol: JSON over HTTP, which needs no package."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "enter": "\ue007", "control": "\ue009"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how the protocol calls one


class BrowserError(RuntimeError):
    """What chromedriver says went wrong."""


class Browser:
    """One window."""

    def __init__(self, driver: str, profile: Path) -> None:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options += ["--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--disable-quic"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": options, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.address = driver
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address = f"{driver}/session/{session['sessionId']}"

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, content, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        self._send("POST", "/url", {"url": address})

    def reload(self) -> None:
        self._send("POST", "/refresh", {})

    def script(self, code: str, *arguments: Any) -> Any:
        return self._send("POST", "/execute/sync", {"script": code, "args": arguments})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own DevTools."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def press(self, *keys: str, hold: int = 0) -> None:
        """Press keys together; hold: how many times the last one repeats."""
        codes = [KEYS.get(key, key) for key in keys]
        down = [{"type": "keyDown", "value": code} for code in codes]
        again = [{"type": "keyDown", "value": codes[-1]}] * hold
        up = [{"type": "keyUp", "value": code} for code in reversed(codes)]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": down + again + up}]})

    def click(self, selector: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/click", {})

    def type(self, selector: str, text: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/clear", {})
        self._send("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def look(self, width: int, height: int, scheme: str) -> None:
        """Be a screen of that size, light or dark."""
        narrow = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=narrow)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the console said."""
        return [f"{each['level']}: {each['message']}" for each in self._send("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """All addresses that pages asked for since the last call, but for the browser's own."""
        events = [
            json.loads(each["message"])["message"] for each in self._send("POST", "/se/log", {"type": "performance"})
        ]
        sent = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith(("about:", "chrome:", "data:"))]

    def wait(self, code: str, *arguments: Any, seconds: float = 120.0) -> Any:
        """Wait until a script returns something true; what it returns."""
        deadline = time.monotonic() + seconds
        while not (found := self.script(f"return {code}", *arguments)):
            if time.monotonic() > deadline:
                said = self.script("return document.body.innerText")
                raise BrowserError(f"{code} did not become true within {seconds:.0f} s; the page says {said!r}")
            time.sleep(0.02)
        return found

    def close(self) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self._send("DELETE", "")


@contextlib.contextmanager
def chromedriver() -> Iterator[str]:
    """The program that drives browsers: its address."""
    program = shutil.which("chromedriver")
    assert program is not None, "this test needs a browser: apt-get install chromium chromium-driver"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/status", timeout=60):
                break
            assert process.poll() is None, "chromedriver has ended"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()
