"""A plan as one HTML page without scripts, fonts or requests; and a plan as a file of any kind.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=2), "- tp")
>>> page = render(plan(have, want, shape=(8, 8), dtype="float32"))
>>> page.startswith("<!doctype html>"), "http" in page.replace("http://www.w3.org/2000/svg", "")
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import FormatError
from reshard.layout.layout import Layout
from reshard.show.holdings import holdings
from reshard.show.ink import hues
from reshard.show.matrix import traffic_matrix
from reshard.show.picture import Picture, picture_of
from reshard.show.plan_text import StackRow, headline, reasons, stack_rows
from reshard.show.svg import Drawing, bars_of, drawing_of, matrix_of
from reshard.show.terminal import table
from reshard.show.trace import to_trace
from reshard.text import format_bytes, shorten

if TYPE_CHECKING:
    from jinja2 import Template

    from reshard.planning.plans import Plan

__all__ = ["render", "save"]

KINDS = (".html", ".json", ".trace")
MAX_GROUPS = 16
MAX_CELLS = (32, 24)
"""Rows and columns of a drawing; more are merged."""
MAX_DRAWN = 12
"""Stacks that are drawn; the first of them without asking."""
MAX_OPEN = 3
MAX_LISTED = 200


@dataclass(frozen=True, slots=True)
class Card:
    """One large figure."""

    label: str
    value: str
    note: str
    part: float | None = None
    """How full a bar below the figure is, where there is one."""


@dataclass(frozen=True, slots=True)
class Side:
    """A layout, as a drawing where there can be one, else as a table."""

    mesh: str
    layout: str
    drawing: Drawing | None
    lines: Sequence[str]
    is_merged: bool


@dataclass(frozen=True, slots=True)
class Move:
    """One stack with both its sides."""

    row: StackRow
    have: Side
    want: Side


def render(plan: Plan) -> str:
    """The page as text."""
    rows = stack_rows(plan)
    matrix = traffic_matrix(plan, MAX_GROUPS)
    return _template().render(
        headline=headline(plan, rows),
        digest=plan.digest,
        cards=list(_cards(plan)),
        reasons=reasons(plan),
        moves=[_move(row) for row in _kinds(rows)[:MAX_DRAWN]],
        max_open=MAX_OPEN,
        matrix=matrix_of(matrix) if matrix.num_bytes.size else None,
        kind=matrix.kind,
        bars=bars_of(rows, plan.num_rounds) if plan.num_rounds else None,
        num_rounds=plan.num_rounds,
        rows=_largest(rows, MAX_LISTED),
        num_rows=len(rows),
        format_bytes=format_bytes,
        shorten=shorten,
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("reshard.show").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(source)


def _largest(rows: Sequence[StackRow], most: int) -> list[StackRow]:
    """The stacks with the most bytes, the largest first."""
    return sorted(rows, key=lambda row: -row.num_bytes)[:most]


def _kinds(rows: Sequence[StackRow]) -> list[StackRow]:
    """The largest stack of each kind: of those that differ only in where they are, one."""
    kinds: dict[object, StackRow] = {}
    for row in _largest(rows, len(rows)):
        sides = (row.stack.have, row.stack.want)
        kinds.setdefault(tuple((s.shape, str(s.layout).partition("|")[0]) for s in sides), row)
    return list(kinds.values())


def _cards(plan: Plan) -> Iterator[Card]:
    found = plan.summary()
    least = "the least possible"
    if found.wire_bytes != found.lower_bound_bytes:
        least = f"{format_bytes(found.lower_bound_bytes)} at least"
    yield Card("On the wire", format_bytes(found.wire_bytes), least)
    rounds = f"in {found.num_rounds:,} round{'s' * (found.num_rounds != 1)}"
    yield Card("Messages", f"{found.num_messages:,}", rounds)
    part = min(found.peak_bytes / plan.memory, 1.0) if plan.memory else None
    cap = f"at most, cap {format_bytes(plan.memory)}"
    yield Card("Staged by a rank", format_bytes(found.peak_bytes), cap, part)
    if found.mean_sender_bytes:
        ratio = f"{found.busiest_sender_bytes / found.mean_sender_bytes:.2f} x the mean"
        yield Card("Busiest source sends", format_bytes(found.busiest_sender_bytes), ratio)
    if found.busiest_relay_bytes:
        relayed = format_bytes(found.busiest_relay_bytes)
        yield Card("Passed on by a rank", relayed, "at most")
    if found.copied_bytes:
        yield Card("Stays on its rank", format_bytes(found.copied_bytes), "copied in place")
    yield from _host_cards(plan)


def _host_cards(plan: Plan) -> Iterator[Card]:
    found = plan.summary()
    if found.seconds is None or found.between_hosts_bytes is None:
        return
    least = format_bytes(found.between_hosts_lower_bound_bytes or 0)
    is_least = found.between_hosts_bytes == found.between_hosts_lower_bound_bytes
    note = "the least possible" if is_least else f"{least} at least"
    yield Card("Between hosts", format_bytes(found.between_hosts_bytes), note)
    yield Card("Predicted", f"{found.seconds:.3g} s", f"bottleneck: {found.bottleneck}")


def _move(row: StackRow) -> Move:
    sides = (row.stack.have, row.stack.want)
    pictures = [picture_of(side.layout, side.shape, MAX_CELLS) for side in sides]
    holders = [picture.holders() if picture else [] for picture in pictures]
    together = hues(ranks for held in holders for ranks in held)
    have, want = (
        _side(side.layout, side.shape, picture, together if len(together) <= 20 else hues(held))
        for side, picture, held in zip(sides, pictures, holders, strict=True)
    )
    return Move(row, have, want)


def _side(
    layout: Layout,
    shape: tuple[int, ...],
    picture: Picture | None,
    colours: dict[tuple[int, ...], int],
) -> Side:
    mesh, text = str(layout.mesh), shorten(str(layout), 80)
    if picture is not None:
        return Side(mesh, text, drawing_of(picture, colours), (), picture.is_merged)
    return Side(mesh, text, None, table(holdings(layout, shape, 12), 64), False)


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
    if path.suffix == ".json":
        text = plan.to_json(indent=1)
    else:
        text = render(plan) if path.suffix == ".html" else to_trace(plan)
    path.write_text(text, encoding="utf-8")
