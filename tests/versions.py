"""The tests on other versions of Python and torch, as far as they are there.

    python -m tests.versions [--torch 2.11.0] [--python 3.12] [--keep DIR]

Every Python from 3.11 to 3.13 that is found runs the tests that need no torch, in an environment
without it. Every version of torch of which the package index has a CPU build runs all tests. What
could not be run is listed with the reason: a version that is not there is not a version that works.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.15.0")
TOOLS = ("pytest>=9.0", "pytest-xdist>=3.6", "pytest-timeout>=2.3", "hypothesis>=6.100")
PLAIN = (*TOOLS, "scipy>=1.12", "aiohttp>=3.9")
NEEDS_OTHERS = {"torch", "safetensors", "transformers"}


@cache
def imported(path: Path) -> frozenset[str]:
    """Top-level packages that a test file imports, itself or through other files of the tests."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found.add(name.partition(".")[0])
            file = ROOT / Path(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and file.is_file() and file != path:
                found |= imported(file)
    return frozenset(found)


def without_torch() -> list[str]:
    """The test files that neither import torch nor what is there only for comparing with it."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    needing = re.compile(r"reshard\.(live|tensors|nn|sharded|compat)\b|rs\.(move|describe|check)\(")
    return [
        str(path.relative_to(ROOT))
        for path in files
        if not imported(path) & NEEDS_OTHERS and not needing.search(path.read_text())
        if "/docs/" not in str(path) and "/examples/" not in str(path)
    ]


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or among those of pyenv."""
    found = shutil.which(f"python{version}")
    if (
        found
        and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0
    ):
        return found
    root = Path.home() / ".pyenv" / "versions"
    return next((str(path) for path in sorted(root.glob(f"{version}.*/bin/python"))), None)


def environment(python: str, folder: Path, *packages: str) -> Path | str:
    """A new environment with reshard and some packages; or why there is none."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *packages, "-e", "."]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return folder / "bin/python" if done.returncode == 0 else (lines or ["pip failed"])[-1]


def has_cpu_build(python: str, version: str) -> str | None:
    """Why torch of this version cannot be installed without CUDA; None if it can."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", report.name, f"torch=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return "the package index has no such version"
        plan = json.loads(Path(report.name).read_text())
    names = [one["metadata"]["name"] for one in plan["install"]]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    return f"it comes with CUDA ({len(cuda)} packages)" if cuda else None


def run_tests(python: Path, files: list[str], jobs: int) -> str:
    """The last line of pytest."""
    command = [str(python), "-m", "pytest", "-q", "-n", str(jobs), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n    ".join([(lines or ["no output"])[-1], *failures[:20]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="instead of 3.11, 3.12 and 3.13")
    parser.add_argument("--torch", action="append", help="instead of 2.11.0 and 2.15.0")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for version in args.python or PYTHONS:
            python = find_python(version)
            if python is None:
                print(f"Python {version}: not run, it is not on this machine", flush=True)
                continue
            made = environment(python, Path(folder) / version, *PLAIN)
            outcome = (
                run_tests(made, without_torch(), args.jobs) if isinstance(made, Path) else made
            )
            failed |= "failed" in outcome or "error" in outcome.lower()
            print(f"Python {version}, without torch: {outcome}", flush=True)
        for version in args.torch or TORCHES:
            reason = has_cpu_build(sys.executable, version)
            if reason is not None:
                print(f"torch {version}: not run, {reason}", flush=True)
                continue
            packages = (f"torch=={version}", *PLAIN, "expecttest", "safetensors", "transformers")
            made = environment(sys.executable, Path(folder) / f"torch{version}", *packages)
            outcome = run_tests(made, ["tests"], args.jobs) if isinstance(made, Path) else made
            failed |= "failed" in outcome or "error" in outcome.lower()
            print(f"torch {version}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
