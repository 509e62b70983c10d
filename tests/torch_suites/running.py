"""Runs a file of PyTorch's tests in a process of its own, and reads the outcome of each test."""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.torch_suites.adapting import HELPERS, for_cpu, for_reshard

__all__ = ["CONTENDERS", "Suite", "adapted", "run", "suites_in"]

CONTENDERS = ("torch", "reshard")
HELPERS_HERE = "shard_helpers"
SECONDS = 1800
BLOCKED = "blocked"
"""What became of a test that was not run because the one before it failed."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """A file of tests, relative to the folder ``test/distributed``."""

    path: str

    @property
    def is_sharded(self) -> bool:
        """Whether it tests ``torch.distributed._shard``; else DTensor."""
        return self.path.startswith("_shard/")

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", "_")


@dataclass
class Outcome:
    """What came out of each test of a file: passed, skipped, failed, and the first line of why."""

    tests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        return sum(found == kind for found in self.tests.values())


def suites_in(folder: Path, word: str = "") -> list[Suite]:
    """The files below ``test/distributed`` whose path has a word."""
    found = [*folder.glob("_shard/**/test_*.py"), *folder.glob("tensor/test_*.py")]
    paths = sorted(str(path.relative_to(folder)) for path in found)
    return [Suite(path) for path in paths if word in path]


def adapted(folder: Path, into: Path, contender: str) -> None:
    """Write all files as one contender runs them, and the helpers of the installed torch."""
    into.mkdir(parents=True)
    for name in ("cpu_only", "by_moves"):
        shutil.copy(HERE / f"{name}.py", into / f"{name}.py")
    spec = find_spec(HELPERS)
    assert spec is not None
    assert spec.origin is not None
    helpers = Path(spec.origin).parent
    for path in helpers.glob("**/*.py"):
        target = into / HELPERS_HERE / path.relative_to(helpers)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_changed(path.read_text(), contender, "cpu_only"))
    for suite in suites_in(folder):
        moves = contender == "reshard" and not suite.is_sharded
        text = (folder / suite.path).read_text()
        first = "by_moves" if moves else "cpu_only"
        (into / f"{suite.name}.py").write_text(_changed(text, contender, first))


def _changed(text: str, contender: str, first: str) -> str:
    text = for_cpu(text.replace(HELPERS, HELPERS_HERE), first)
    return for_reshard(text) if contender == "reshard" else text


def run(suite: Suite, folder: Path, only: str = "") -> Outcome:
    """Run one adapted file with pytest; tests that it never came to are failed.

    Some classes run all their tests on the same processes, and skip what follows a failure. Those
    tests are run again, without the one that failed.
    """
    file = str(folder / f"{suite.name}.py")
    found = _run_once(suite, folder, [file, *(("-k", only) if only else ())])
    while blocked := [test for test, kind in found.tests.items() if kind == BLOCKED]:
        nodes = [f"{file}::{test.replace('.', '::', 1)}" for test in blocked]
        again = _run_once(suite, folder, nodes)
        if blocked[0] not in again.tests or again.tests[blocked[0]] == BLOCKED:
            return again
        found.tests |= again.tests
        found.reasons |= again.reasons
    return found


def _run_once(suite: Suite, folder: Path, what: list[str]) -> Outcome:
    report = folder / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("-o", "addopts=", "--rootdir", str(folder), f"--junitxml={report}", *what),
    ]
    path = f"{folder}:{HERE.parents[1] / 'src'}"
    with (folder / f"{suite.name}.log").open("a") as log:
        try:
            subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome({suite.path: "failed"}, {suite.path: f"not done in {SECONDS} s"})
    if not report.exists():
        return Outcome({suite.path: "failed"}, {suite.path: "pytest wrote no report"})
    return _outcome(report)


def _outcome(report: Path) -> Outcome:
    found = Outcome()
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        if bad is not None:
            found.tests[name] = "failed"
            found.reasons[name] = _reason(bad)
        elif "skipped" in kinds:
            why = kinds["skipped"].get("message", "")
            found.tests[name] = BLOCKED if why.startswith("Previous test failed") else "skipped"
        else:
            found.tests[name] = "passed"
    return found


def _reason(failure: ET.Element) -> str:
    """The line that says most: the last error of the first rank that failed."""
    text = failure.text or failure.get("message", "")
    lines = [line.strip().removeprefix("E ").strip() for line in text.splitlines()]
    errors = [line for line in lines if _is_error(line)]
    return (errors[0] if errors else failure.get("message", "").splitlines()[0])[:300]


def _is_error(line: str) -> bool:
    name = line.partition(":")[0]
    told = name.rpartition(".")[2].endswith(("Error", "Exception")) and " " not in name
    echo = "exited with error code" in line or "Connection closed by peer" in line
    return told and not echo
