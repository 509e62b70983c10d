"""How much to test: enough for every change, or as much as the promises say (`make soak`)."""

import os
import time
from functools import lru_cache

__all__ = ["cases", "soaking", "within"]

SLOWNESS_SECONDS = 10
"""How long a measurement of the machine's speed counts."""


def soaking() -> bool:
    """Whether the long tests run, with all their cases."""
    return bool(os.environ.get("RESHARD_SOAK"))


def cases(few: int, many: int) -> int:
    """How many random cases to run."""
    return many if soaking() else few


def within(seconds: float) -> float:
    """A limit of time: as promised when soaking, which runs alone; else with others beside it."""
    if soaking():
        return seconds
    return (2 * seconds + 1) * slowness(int(time.monotonic() / SLOWNESS_SECONDS))


@lru_cache(maxsize=1)
def slowness(when: int) -> float:
    """How much slower this machine is, now that others use it as well, than one that counts to a
    million in 0.05 s; from 1 to 4. It is measured again every few seconds: ``when`` tells.
    """
    began = time.perf_counter()
    sum(1 for _ in range(1_000_000))
    return min(max((time.perf_counter() - began) / 0.05, 1.0), 4.0)
