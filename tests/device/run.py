"""Run the tests of this folder without pytest: ``PYTHONPATH=src python3 -m tests.device.run``.

Words after it choose tests: those with one of them in their name, or in that of their file.
"""

import importlib
import sys
import time
import traceback
import unittest
from inspect import signature
from pathlib import Path


def chosen(file: str, name: str) -> bool:
    words = sys.argv[1:]
    return name.startswith("test_") and (
        not words or any(word in f"{file}.{name}" for word in words)
    )


def main() -> int:
    failed = 0
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.device.{path.stem}")
        for name in [name for name in vars(module) if chosen(path.stem, name)]:
            start = time.perf_counter()
            test = getattr(module, name)
            try:
                if signature(test).parameters:
                    raise unittest.SkipTest("needs a fixture of pytest")
                test()
                outcome = "passed"
            except unittest.SkipTest as skipped:
                outcome = f"skipped: {skipped}"
            except Exception:
                traceback.print_exc()
                outcome, failed = "FAILED", failed + 1
            seconds = time.perf_counter() - start
            print(f"{path.stem}.{name}: {outcome} ({seconds:.1f} s)", flush=True)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
