"""`import reshard` is instant, and what only plans never loads torch."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "click", "rich", "jinja2", "fsspec"}
TORCH_FREE = [
    *("errors", "dtypes", "text", "layout.layout", "layout.boxlist", "layout.spec"),
    *("rules", "rules.models", "planning.plans", "simulation", "show", "cli"),
    *("checkpoint", "checkpoint.inspection", "checkpoint.formats.reader"),
    *("checkpoint.conversion.stages", "checkpoint.soundness"),
]
MAX_CPU_SECONDS = 0.15


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    return set(_python(f"import sys; {statement}; print(*sys.modules)").split())


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_reshard_loads_nothing_heavy() -> None:
    assert not loaded_by("import reshard") & HEAVY


@pytest.mark.parametrize("name", sorted(HEAVY - {"torch"}))
def test_the_test_above_can_fail(name: str) -> None:
    assert name in loaded_by(f"import reshard, {name}")


@pytest.mark.parametrize("name", TORCH_FREE)
def test_thinking_needs_no_torch(name: str) -> None:
    assert "torch" not in loaded_by(f"import reshard.{name}")


def test_import_reshard_is_instant() -> None:
    code = "import time; t = time.process_time(); import reshard; print(time.process_time() - t)"
    assert min(float(_python(code)) for _ in range(5)) < MAX_CPU_SECONDS
