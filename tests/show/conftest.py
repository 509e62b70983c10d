"""The browser that the tests of pages share."""

from collections.abc import Iterator

import pytest

from tests.show.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; those that need it are skipped where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip(
            "no Chromium on PATH: install it (Debian: apt-get install chromium) or set "
            "RESHARD_CHROMIUM to run the tests of pages in a browser"
        )
    running = Browser(program)
    yield running
    running.close()
