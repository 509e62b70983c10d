"""How much to test: enough for every change, or as much as the promises say (`make soak`)."""

import os

__all__ = ["cases", "soaking"]


def soaking() -> bool:
    """Whether the long tests run, with all their cases."""
    return bool(os.environ.get("RESHARD_SOAK"))


def cases(few: int, many: int) -> int:
    """How many random cases to run."""
    return many if soaking() else few
