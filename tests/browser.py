"""Headless Chromium for tests of pages: what it complains of, what it asks for, keys and pictures.

The hard problem: a page that is broken looks like one that is empty. So everything that the browser
says of it is kept: errors of scripts and of the console, and each request that is not for the page
itself. It is driven over two pipes, in the DevTools protocol, so that nothing has to be installed but
Chromium: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0

#: Virtual key codes of the keys that tests press by name.
_CODES = {
    "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
    "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


def found() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    found() is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)


class Browser:
    """One browser with one page."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        program = found()
        assert program is not None
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", f"--user-data-dir={self._folder}",
        ]  # fmt: skip

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            os.dup2(to_browser, 13)
            os.dup2(from_browser, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    # ---- pages

    def open(self, path: Path, *, dark: bool = False, width: int = 1300, height: int = 820) -> None:
        """Show a file, in dark or light."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")
        self.settle()
        self.requests[:] = [url for url in self.requests if url != path.resolve().as_uri()]

    def settle(self) -> None:
        """Let two frames be drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(script):
            assert time.monotonic() < end, f"{script} did not come true"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys as a person does; names are those of `KeyboardEvent.key`."""
        for key in keys:
            values: dict[str, Any] = {"key": key}
            if len(key) == 1:
                values["text"] = key
            else:
                values["windowsVirtualKeyCode"] = _CODES[key]
                if key == "Enter":
                    values["text"] = "\r"
            self.call("Input.dispatchKeyEvent", type="keyDown", **values)
            values.pop("text", None)
            self.call("Input.dispatchKeyEvent", type="keyUp", **values)
        self.settle()

    def picture(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    # ---- the protocol

    def call(self, method: str, **parameters: Any) -> Any:
        """One command, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self, end: float) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(json.dumps(values["args"])[:500])
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(values["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def close(self) -> None:
        """End it and take away what it wrote."""
        try:
            self._session = None
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        finally:
            self._process.wait(20)
            os.close(self._out)
            os.close(self._in)
            shutil.rmtree(self._folder, ignore_errors=True)
