"""Run a reshard command in this process, and say what it took.

    python benchmarks/checkpoints/ours.py convert SRC DST ...

The last line is JSON: the peak of memory above what the loaded interpreter had, and bytes read.
"""

from __future__ import annotations

import json
import os
import sys


def status(field: str) -> int:
    """A figure of this process in KiB; unlike getrusage, not one of the process that started it."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1])


def read_bytes() -> int:
    """Bytes that went through read calls."""
    with open("/proc/self/io") as file:  # noqa: PTH123
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import numpy  # noqa: F401
    import xxhash  # noqa: F401

    import reshard.checkpoint.conversion.stages  # noqa: F401
    from reshard.cli import run

    before, read = status("VmRSS"), read_bytes()
    code = run(sys.argv[1:])
    figures = {"peak_kib": status("VmHWM") - before, "read_bytes": read_bytes() - read}
    print("\n" + json.dumps(figures), flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
