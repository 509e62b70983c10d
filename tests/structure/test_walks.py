"""How many files a request runs through, as ``benchmarks/walk.py`` counts them.

Not those of `rs.move`: a rank that waits for long, on a busy machine, enters more.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WALK = Path(__file__).parents[2] / "benchmarks" / "walk.py"


@pytest.mark.skipif(find_spec("torch") is None, reason="activations need torch")
def test_requests_run_through_few_files() -> None:
    command = [sys.executable, str(WALK), "plan", "convert", "activations"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    marks = [line.split()[0] for line in done.stdout.splitlines() if " (at most " in line]
    assert marks == ["ok"] * 4, done.stdout  # of input_reshard the depth of objects as well
