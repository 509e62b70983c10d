"""A plan as a file; the suffix says of which kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import FormatError

if TYPE_CHECKING:
    from reshard.planning.plans import Plan

__all__ = ["KINDS", "save"]

KINDS = (".html", ".json", ".trace")


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan as a page (.html), as data (.json) or as a timeline (.trace).

    >>> save(None, "move.pdf")
    Traceback (most recent call last):
    reshard.errors.FormatError: cannot save a plan as "move.pdf": the suffix must be .html, .json \
or .trace
    """
    path = Path(path)
    if path.suffix not in KINDS:
        raise FormatError(
            f'cannot save a plan as "{path}": the suffix must be .html, .json or .trace'
        )
    path.write_text(_text(plan, path.suffix), encoding="utf-8")


def _text(plan: Plan, suffix: str) -> str:
    if suffix == ".json":
        return plan.to_json(indent=1)
    if suffix == ".html":
        from reshard.show.page import render

        return render(plan)
    from reshard.show.trace import to_trace

    return to_trace(plan)
