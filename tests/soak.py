"""How much to test: enough for every change, or as much as the promises say (`make soak`)."""

import os

__all__ = ["cases", "soaking", "within"]


def soaking() -> bool:
    """Whether the long tests run, with all their cases."""
    return bool(os.environ.get("RESHARD_SOAK"))


def cases(few: int, many: int) -> int:
    """How many random cases to run."""
    return many if soaking() else few


def within(seconds: float) -> float:
    """A limit of time: as promised when soaking, which runs alone; else with others beside it."""
    return seconds if soaking() else 4 * seconds + 2
