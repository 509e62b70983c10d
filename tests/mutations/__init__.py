"""Mistakes that can be planted in a copy of the source, and whether the usual tests notice them.

Each changes one operator, condition or constant. A mistake counts as noticed if the tests of the
folders in which one would look for it fail.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mistakes.toml")
SECONDS = 900


class Mutation(NamedTuple):
    """A mistake in a file of the library, and the tests that should notice."""

    file: str
    before: str
    """What stands there, once."""
    after: str
    tests: str
    """Folders and files below tests/."""


def mutations() -> dict[str, Mutation]:
    """All mistakes by room and number: live.1, live.2, ..."""
    rooms = tomllib.loads(TABLE.read_text())
    return {
        f"{room}.{number}": Mutation(**one)
        for room, listed in rooms.items()
        for number, one in enumerate(listed, 1)
    }


def noticed_by(mutation: Mutation) -> str:
    """The first test that fails with the mistake; empty if none does."""
    with tempfile.TemporaryDirectory(prefix="reshard-mutation-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        file = source / "reshard" / mutation.file
        text = file.read_text()
        if text.count(mutation.before) != 1:
            raise ValueError(f"{mutation.file}: not once in it: {mutation.before!r}")
        file.write_text(text.replace(mutation.before, mutation.after))
        tests = [f"tests/{one}" for one in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    lines = ended.stdout.splitlines()
    failed = [
        line.partition(" ")[2].partition(" - ")[0]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if ended.returncode not in (0, 1) and not failed:
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
    return failed[0] if failed else ""
