"""The progress bar of a long move: shown at a terminal, and nowhere else."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from reshard.show.progress import Bar, progress_of

TOTAL = 3 << 28
LARGE = (TOTAL, 5)
SMALL = (3 << 20, 1)
"""Bytes and rounds of a move."""
ERASE_LINE = "\x1b[2K"


class Terminal:
    """A terminal that remembers what was written to it; `file` is its end for programs."""

    def __init__(self) -> None:
        self._near, far = os.openpty()
        self.file = os.fdopen(far, "w")
        self._read = b""
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        # Reading ends with an error once the other end is closed.
        while part := self._part():
            self._read += part

    def _part(self) -> bytes:
        try:
            return os.read(self._near, 65536)
        except OSError:
            return b""

    @property
    def text(self) -> str:
        return self._read.decode()

    def wait_for(self, word: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while word not in self.text:
            assert time.monotonic() < end, f"no {word!r} in {self.text[-300:]!r}"
            time.sleep(0.01)

    def close(self) -> None:
        self.file.close()
        self._reader.join(10.0)
        os.close(self._near)


@pytest.fixture
def coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a terminal with colours, 100 characters wide."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


@contextmanager
def at_terminal() -> Iterator[Terminal]:
    """Standard error is a terminal; not a fixture, because pytest sets it anew for each phase."""
    terminal = Terminal()
    with redirect_stderr(terminal.file):
        yield terminal
    terminal.close()


def words_of(text: str) -> str:
    """What is written, without colours and the moving of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.usefixtures("coloured")
def test_it_appears_and_disappears() -> None:
    with at_terminal() as terminal:
        bar = progress_of(None, *LARGE)
        terminal.wait_for("0 B of 768.0 MiB, round 1 of 5")
        bar.advance(TOTAL // 4)
        bar.advance(TOTAL // 4)
        terminal.wait_for("384.0 MiB of 768.0 MiB")
        assert re.search(r"\d\.\d GB/s, round 3 of 5, \d+ s left", words_of(terminal.text))
        bar.close()
        terminal.wait_for("\x1b[?25h")  # the cursor is back
        erased = terminal.text.rindex(ERASE_LINE)
        assert words_of(terminal.text[erased:]).strip() == ""


@pytest.mark.usefixtures("coloured")
def test_a_short_move_shows_nothing() -> None:
    with at_terminal() as terminal:
        bar = progress_of(None, *LARGE)
        bar.advance(TOTAL)
        bar.close()
        time.sleep(0.7)
        assert terminal.text == ""


@pytest.mark.usefixtures("coloured")
def test_a_small_move_starts_no_thread() -> None:
    with at_terminal():
        assert progress_of(None, *SMALL) is None


def test_nobody_watches_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert progress_of(None, *LARGE) is None
    monkeypatch.setattr(sys, "stderr", None)
    assert progress_of(None, *LARGE) is None


@pytest.mark.usefixtures("coloured")
def test_it_can_be_refused_and_demanded() -> None:
    with at_terminal() as terminal:
        assert progress_of(False, *LARGE) is None
        bar = progress_of(True, *SMALL)
        terminal.wait_for("0 B of 3.0 MiB, round 1 of 1")
        bar.advance(3 << 20)
        bar.close()
        terminal.wait_for("3.0 MiB of 3.0 MiB")
        assert "0 s left" in words_of(terminal.text.rpartition(ERASE_LINE)[2])


@pytest.mark.usefixtures("coloured")
def test_closing_while_it_appears() -> None:
    with at_terminal():
        for pause in (0.0, 0.001, 0.01):
            bar = Bar(TOTAL, 1, after=pause)
            time.sleep(pause)
            bar.close()
            bar.close()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and "Refresh" in type(thread).__name__:
                thread.join(10.0)
                assert not thread.is_alive()


def test_rich_is_loaded_only_when_shown() -> None:
    code = (
        "import sys\n"
        "from reshard.show.progress import progress_of\n"
        "assert progress_of(None, 1 << 30, 1) is None\n"
        "sys.exit('rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
