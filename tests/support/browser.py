"""A browser for tests: headless Chromium, spoken to by the WebDriver protocol over HTTP, with nothing to install.

Debian: apt-get install chromium chromium-driver. `reason_to_skip` says what is missing elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for a reference to an element
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Left": "\ue012", "Right": "\ue014", "Space": " "}
SECONDS_TO_START = 30


def reason_to_skip() -> str:
    """Empty where a browser is there."""
    missing = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None]
    return f"no {' and no '.join(missing)} here; on Debian: apt-get install chromium chromium-driver" if missing else ""


class Browser:
    """One window. Its methods are the few things that tests do."""

    def __init__(self, address: str, profile: str) -> None:
        self._address = address
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}", "--window-size=1280,900"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        started = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{started['sessionId']}"

    def open(self, path: Path) -> float:
        """Load a file from the disk; the seconds until its script was done."""
        start = time.perf_counter()
        self._send("POST", "/url", {"url": path.resolve().as_uri()})
        while self.run("return document.documentElement.dataset.ready") != "true":
            assert time.perf_counter() - start < SECONDS_TO_START, f"the page is not ready: {self.console()}"
            time.sleep(0.01)
        return time.perf_counter() - start

    def run(self, script: str, *arguments):
        """What the JavaScript returns; arguments are `arguments[0]` and so on."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """As a user does: not where something covers it."""
        self._send("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._send("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus: characters, or names of KEYS."""
        steps = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def texts(self, selector: str) -> list[str]:
        """What can be read in each visible element."""
        script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.innerText)"
        return self.run(script, selector)

    def console(self) -> list[str]:
        """What was logged since the last call; warnings and errors alone."""
        entries = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def protocol(self, command: str, **parameters):
        """A command of Chromium's own protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """The page's own size; windows have a least width."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.protocol("Emulation.setDeviceMetricsOverride", **size)

    def emulate(self, media: str = "", **features: str) -> None:
        """`print`, or features such as prefers_color_scheme="dark"."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.protocol("Emulation.setEmulatedMedia", media=media, features=listed)

    def screenshot(self, path: Path, is_whole: bool = False) -> None:
        taken = self.protocol("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._send("DELETE", "", None)

    def _find(self, selector: str) -> str:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _send(self, method: str, path: str, content):
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {json.load(error)['value']['message'][:500]}") from error


@contextlib.contextmanager
def open_browser():
    """A browser with a profile of its own, gone with everything when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quark-browser-", ignore_cleanup_errors=True) as profile:
        command = [str(DRIVER), f"--port={port}", "--log-level=OFF"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(port)
            browser = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(10)


def _wait(port: int) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end, "chromedriver does not answer"
        time.sleep(0.02)
