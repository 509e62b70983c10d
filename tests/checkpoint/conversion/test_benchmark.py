"""The benchmark of conversions runs, at a size that takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "convert.py"


def test_a_small_run(tmp_path: Path) -> None:
    words = ["--size", "32MB", "--rounds", "1", "--no-peers", "--json", "--only", "Shard(1) 4"]
    command = [sys.executable, str(SCRIPT), *words, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert case["bytes"] > 16_000_000
    assert set(case["seconds"]) == {"reshard", "cp -r"}
    assert all(check["holds"] for check in case["checks"]), case["checks"]
    assert len(case["checks"]) == 2
