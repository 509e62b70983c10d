"""A headless Chromium driven over a pipe, with nothing but the standard library.

Chromium speaks its DevTools protocol over file descriptors 3 and 4: JSON texts that end in a zero
byte, answers by the number of their question. A tab keeps what the page logged and requested.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Tab", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
VARIABLE = "RESHARD_CHROMIUM"
"""The variable of the environment that names a browser of another place."""
SECONDS = 60.0

FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check",
    "--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-default-apps", "--mute-audio", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--font-render-hinting=none", "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>;127.0.0.1;localhost",
)  # fmt: skip
"""Only this machine can be reached: everything else goes to a proxy that is not there."""


def find_chromium() -> str | None:
    """Where the browser is; None where there is none."""
    given = os.environ.get(VARIABLE)
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process; every test has a tab of its own."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="reshard-browser-")
        theirs_in, ours_out = _high_pipe()
        ours_in, theirs_out = _high_pipe()
        self._in, self._out = ours_in, ours_out
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()
        arguments = [program, *FLAGS, *root, f"--user-data-dir={self._profile}", "about:blank"]
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        self._pid = os.posix_spawn(
            program, arguments, dict(os.environ), file_actions=[*null, *pipes], setpgroup=0
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest = 0, b""
        self._messages: list[dict[str, Any]] = []
        self.tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Ask, and wait for the answer; events that come before it go to their tabs."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self.read(lambda found: found.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self, wanted: Callable[[dict[str, Any]], bool], seconds: float = SECONDS) -> Any:
        """Read messages until one is wanted."""
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(text)
                tab = self.tabs.get(message.get("sessionId", ""))
                if tab is not None and "method" in message:
                    tab.hear(message["method"], message["params"])
                if wanted(message):
                    return message
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser did not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._rest += data

    def tab(self, width: int = 1280, height: int = 900, **media: Any) -> Tab:
        """A new tab, of a size and for a scheme of colours."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(self, attached["sessionId"], target)
        self.tabs[tab.session] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height, **media)
        return tab

    def close(self) -> None:
        """End the browser and remove its profile."""
        with suppress(OSError, RuntimeError, TimeoutError, EOFError):
            self.call("Browser.close")
        end = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)


@dataclass
class Tab:
    """A page in the browser, and what it did."""

    browser: Browser
    session: str
    target: str
    errors: list[str] = field(default_factory=list)
    """Exceptions, errors and warnings that the page or the browser logged."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page asked for."""
    loaded: bool = False

    def call(self, method: str, **params: Any) -> Any:
        """Ask the tab."""
        return self.browser.call(method, self.session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Keep what matters of an event."""
        match method:
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))

    def resize(
        self, width: int, height: int, *, dark: bool = False, touch: bool = False, scale: float = 1
    ) -> None:
        """Make the tab as large as a window or a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=touch,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, url: str) -> None:
        """Go to an address and wait until the page has loaded."""
        self.loaded = False
        self.call("Page.navigate", url=url)
        if not self.loaded:
            self.browser.read(lambda _: self.loaded)

    def show(self, path: Path, text: str) -> None:
        """Write a page and open it."""
        path.write_text(text, encoding="utf-8")
        self.open(path.as_uri())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true, and give its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.02)
        return value

    def at(self, selector: str) -> tuple[float, float]:
        """The middle of an element, after scrolling to it and drawing what that changes."""
        chosen = json.dumps(selector)
        self.run(
            f"document.querySelector({chosen})"
            ".scrollIntoView({block: 'center', behavior: 'instant'})"
        )
        self.draw()
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({chosen});"
            "const b = (e.querySelector('.face, .ground') || e).getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def draw(self) -> None:
        """Wait until the page has been drawn with all that has happened."""
        self.run(
            "new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(() => f(1))))"
        )

    def point(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self.at(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.draw()

    def click(self, selector: str) -> None:
        """Press the mouse on an element."""
        x, y = self.at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.draw()

    def tap(self, selector: str) -> None:
        """Touch an element with a finger."""
        x, y = self.at(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.draw()

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field, as a person would."""
        chosen = json.dumps(selector)
        self.run(
            f"(() => {{ const e = document.querySelector({chosen}); e.focus(); e.select(); }})()"
        )
        if text:
            self.call("Input.insertText", text=text)
            self.draw()
        else:
            self.press("Backspace", 8)

    def press(self, key: str, code: int) -> None:
        """Press a key on what has the focus."""
        words = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **words)
        self.draw()

    def screenshot(
        self, kind: str = "png", quality: int | None = None, full: bool = False
    ) -> bytes:
        """What the tab shows, or all of the page."""
        words: dict[str, Any] = {"format": kind, "captureBeyondViewport": full}
        if quality is not None:
            words["quality"] = quality
        return base64.b64decode(self.call("Page.captureScreenshot", **words)["data"])

    def close(self) -> None:
        """Close the tab."""
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.tabs.pop(self.session, None)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 or 4, which the browser gets."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
