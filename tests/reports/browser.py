"""Drives a headless Chromium over a pipe with the DevTools protocol, without any library.

Source: chromedevtools.github.io/devtools-protocol; messages end with a zero byte.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--no-first-run"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"),
)
PATIENCE_S = 60


def chromium() -> str | None:
    """The path of a Chromium; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium; `events` are the received events in order."""

    def __init__(self, profile: Path, *, width: int = 1240, height: int = 900) -> None:
        path = chromium()
        assert path is not None
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        shell = f'exec "$@" 3<&{commands} 4>&{answers}'
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", path, *flags, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.events: list[dict[str, Any]] = []
        self._buffer, self._number, self._session = b"", 0, None

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # Several browsers run at once, and the clipboard is only for a page with focus.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def visit(self, path: Path, until: str) -> None:
        """Opens a file and waits until the expression is true."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE_S
        while not self.ask(until):
            assert time.monotonic() < end, f"'{until}' did not become true"
            time.sleep(0.05)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key; `modifiers` is 8 for Shift."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key, ord(key) if len(key) == 1 else 0)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                modifiers=modifiers,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    @property
    def requested(self) -> list[str]:
        """The URLs that the page requested."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Console messages and exceptions."""
        methods = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event["params"] for event in self.events if event["method"] in methods]
