"""A plan as one HTML page; and a plan as a file of any kind.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=2), "- tp")
>>> page = render(plan(have, want, shape=(8, 8), dtype="float32"))
>>> page.startswith("<!doctype html>"), "http:" in page
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import FormatError
from reshard.layout.layout import Layout
from reshard.show.holdings import holdings
from reshard.show.matrix import Ends, traffic_ends
from reshard.show.name_patterns import named_pairs
from reshard.show.page.colours import Colours
from reshard.show.page.document import (
    Card,
    Document,
    Footer,
    Lane,
    LaneBar,
    Move,
    Side,
    clean,
    render_page,
)
from reshard.show.page.drawings import Tick, drawing_of, table_of
from reshard.show.page.links import links_of
from reshard.show.page.measured import check_reports, run_of
from reshard.show.picture import picture_of, sharded_dims
from reshard.show.plan_text import (
    StackRow,
    headline,
    link_imbalance,
    reasons,
    relay_imbalance,
    stack_rows,
)
from reshard.show.terminal import table
from reshard.show.trace import to_trace
from reshard.text import count, format_bytes, shorten

if TYPE_CHECKING:
    from reshard.planning.classes import Stack
    from reshard.planning.plans import Plan
    from reshard.show.run_report import RunReport

__all__ = [
    "cards_of", "document_of", "kinds_of", "legend_of", "moves_of", "render", "save", "side_of",
    "two_dims",
]  # fmt: skip

KINDS = (".html", ".json", ".trace")
MAX_GROUPS = 16
MAX_CELLS = (32, 24)
"""Rows and columns of a drawing; more are merged."""
MAX_DRAWN = 12
"""Stacks that are drawn; the first of them without asking."""
MAX_OPEN = 3
MAX_LANES = 24
MAX_LISTED = 50_000
"""Groups that are listed with their tensors."""


def render(
    plan: Plan,
    *,
    reports: Sequence[RunReport] = (),
    notes: Sequence[str] = (),
    footer: Footer | None = None,
) -> str:
    """The page as text; with the reports of a run of the plan it says how long that took."""
    return render_page(document_of(plan, reports, notes), footer or Footer())


def document_of(
    plan: Plan, reports: Sequence[RunReport] = (), notes: Sequence[str] = ()
) -> Document:
    """All that the page of a plan shows."""
    check_reports(reports, plan.digest)
    rows = stack_rows(plan)
    drawn = kinds_of(rows)
    ends = traffic_ends(plan, MAX_GROUPS)
    colours = Colours()
    shown = [row for row, _ in drawn[:MAX_DRAWN]]
    moves = moves_of(shown, colours)
    return Document(
        headline(plan, rows),
        list(cards_of(plan)),
        _data(plan, rows, drawn, moves, ends),
        digest=plan.digest,
        reasons=[*reasons(plan), *notes],
        moves=moves,
        max_open=MAX_OPEN,
        legend=legend_of(colours, moves, len(drawn), len(rows)),
        table=table_of(ends.matrix) if ends.matrix.num_bytes.size else None,
        lanes=_lanes(rows, plan.num_rounds),
        scale=_scale(plan.num_rounds),
        rounds_note=f"{count(plan.num_rounds, 'round')}; a round is one exchange, in which no rank "
        "stages more than the cap.",
        run=run_of(reports),
        groups=len(rows),
        groups_title="Tensors that move alike",
    )


def _data(
    plan: Plan,
    rows: Sequence[StackRow],
    drawn: Sequence[tuple[StackRow, list[StackRow]]],
    moves: Sequence[Move],
    ends: Ends,
) -> dict[str, Any]:
    """What the script of the page works with."""
    number = {id(row): at for at, (_, same) in enumerate(drawn[:MAX_DRAWN]) for row in same}
    firsts = {id(row) for row, _ in drawn[:MAX_DRAWN]}
    listed = _largest(rows, MAX_LISTED)
    return {
        "moves": [
            {"links": _links(plan, row, move, ends)}
            for (row, _), move in zip(drawn, moves, strict=False)
        ],
        "matrix": {"sources": ends.matrix.sources, "destinations": ends.matrix.destinations},
        "groups": [
            [*_group(row, number.get(id(row), -1)), int(id(row) in firsts)] for row in listed
        ],
        "names": [[clean(name) for _, name in row.stack.names] for row in listed],
        "stored": False,
    }


def _links(plan: Plan, row: StackRow, move: Move, ends: Ends) -> list[Any]:
    if move.want is None or move.have.drawing is None or move.want.drawing is None:
        return []
    links = links_of(plan, row.stack, move.have.drawing, move.want.drawing, ends)
    return [[link.have, link.want, link.entries] for link in links]


def _group(row: StackRow, move: int) -> list[Any]:
    """A row of the list; the script knows what stands where."""
    have, want = row.stack.have.layout, row.stack.want.layout
    return [
        _name(row), row.shape, row.dtype, shorten(str(have), 80), shorten(str(want), 80),
        format_bytes(row.num_bytes), row.num_bytes, format_bytes(row.wire_bytes), row.wire_bytes,
        row.rounds, move, len(row.stack.names),
    ]  # fmt: skip


def _name(row: StackRow) -> str:
    """The names of a stack as patterns; with the source's where these differ."""
    return named_pairs([(clean(have), clean(want)) for have, want in row.stack.names])


def _largest(rows: Sequence[StackRow], most: int) -> list[StackRow]:
    """The stacks with the most bytes, the largest first."""
    return sorted(rows, key=lambda row: -row.num_bytes)[:most]


def kinds_of(rows: Sequence[StackRow]) -> list[tuple[StackRow, list[StackRow]]]:
    """The largest stack of each kind, and all that differ from it only in where they are."""
    kinds: dict[object, list[StackRow]] = {}
    for row in _largest(rows, len(rows)):
        sides = (row.stack.have, row.stack.want)
        key = tuple((s.shape, str(s.layout).partition("|")[0]) for s in sides)
        kinds.setdefault(key, []).append(row)
    return [(same[0], same) for same in kinds.values()]


def legend_of(colours: Colours, moves: Sequence[Move], num_kinds: int, num_rows: int) -> str:
    """How to read the pictures."""
    text = (
        "The numbers in a cell are the ranks that hold it; cells of the same colour and texture "
        "are held by exactly the same ranks."
    )
    drawings = [side.drawing for move in moves for side in (move.have, move.want) if side]
    if any(rect.merged for drawing in drawings if drawing for rect in drawing.rects):
        text += " Dotted cells, a..b, are parts on ranks a to b, too small to draw one by one."
    if colours.num_left_out:
        text += f" Grey cells are {colours.num_left_out:,} more sets of ranks: read their numbers."
    if num_rows > len(moves):
        text += f" Drawn: {len(moves)} of {count(num_kinds, 'kind')} of {count(num_rows, 'group')}."
    return text


def cards_of(plan: Plan) -> Iterator[Card]:
    """The large figures of a plan."""
    found = plan.summary()
    least = "the least possible"
    if found.wire_bytes != found.lower_bound_bytes:
        least = f"{format_bytes(found.lower_bound_bytes)} at least"
    yield Card("On the wire", format_bytes(found.wire_bytes), least)
    yield Card("Messages", f"{found.num_messages:,}", f"in {count(found.num_rounds, 'round')}")
    part = min(found.peak_bytes / plan.memory, 1.0) if plan.memory else None
    cap = f"cap {format_bytes(plan.memory)}"
    yield Card("Peak staging", format_bytes(found.peak_bytes), cap, part)
    if found.mean_sender_bytes:
        ratio = f"{found.busiest_sender_bytes / found.mean_sender_bytes:.2f} x the mean"
        yield Card("Busiest source sends", format_bytes(found.busiest_sender_bytes), ratio)
    if found.busiest_relay_bytes:
        relayed, marks = format_bytes(found.busiest_relay_bytes), relay_imbalance(found)
        yield Card("Passed on by a rank", relayed, ", ".join(["at most", *marks]), bad=bool(marks))
    if found.copied_bytes:
        yield Card("Stays on its rank", format_bytes(found.copied_bytes), "copied in place")
    yield from _host_cards(plan)


def _host_cards(plan: Plan) -> Iterator[Card]:
    found = plan.summary()
    if found.seconds is None or found.between_hosts_bytes is None:
        return
    least, note = found.between_hosts_lower_bound_bytes, ""
    if least is not None:
        is_least = found.between_hosts_bytes == least
        note = "the least possible" if is_least else f"{format_bytes(least)} at least"
    yield Card("Between hosts", format_bytes(found.between_hosts_bytes), note)
    marks = link_imbalance(found)
    note = ", ".join([f"bottleneck: {found.bottleneck}", *marks])
    yield Card("Predicted", f"{found.seconds:.3g} s", note, bad=bool(marks))


def moves_of(rows: Sequence[StackRow], colours: Colours) -> list[Move]:
    """Both sides of some stacks, with one colour for each set of ranks."""
    moves = []
    for row in rows:
        sides, dims = (row.stack.have, row.stack.want), _drawn_dims(row.stack)
        have, want = (side_of(side.layout, side.shape, colours, dims) for side in sides)
        note = f"{row.shape} {row.dtype}, {format_bytes(row.num_bytes)}"
        moves.append(Move(_name(row), note, have, want))
    return moves


def _drawn_dims(stack: Stack) -> tuple[int, ...] | None:
    """The dims to draw of a tensor with more than two, where both sides shard at most two."""
    shapes = stack.have.shape, stack.want.shape
    if len(shapes[0]) < 3 or shapes[0] != shapes[1] or stack.feed.moves:
        return None
    return two_dims(shapes[0], (stack.have.layout, stack.want.layout))


def two_dims(shape: tuple[int, ...], layouts: Sequence[Layout]) -> tuple[int, ...] | None:
    """The two dims that layouts shard, and the last ones where they shard fewer."""
    found: set[int] = set()
    for layout in layouts:
        sharded = sharded_dims(layout, shape)
        if sharded is None:
            return None
        found |= sharded
    rest = [dim for dim in reversed(range(len(shape))) if dim not in found]
    return tuple(sorted([*found, *rest[: 2 - len(found)]])) if len(found) <= 2 else None


def side_of(
    layout: Layout,
    shape: tuple[int, ...],
    colours: Colours,
    dims: tuple[int, ...] | None = None,
) -> Side:
    """A layout as a drawing, or as a table where there can be none."""
    mesh, text = str(layout.mesh), shorten(str(layout), 80)
    picture = picture_of(layout, shape, MAX_CELLS, dims)
    if picture is not None:
        drawn = f", dims {dims[0]} and {dims[1]}" if dims else ""
        return Side(mesh + drawn, text, drawing_of(picture, colours), ())
    return Side(mesh, text, None, table(holdings(layout, shape, 12), 64))


def _lanes(rows: Sequence[StackRow], num_rounds: int) -> list[Lane]:
    """When each of the largest stacks moves: one bar from its first to its last round."""
    if not num_rounds:
        return []
    largest = sorted(range(len(rows)), key=lambda i: -rows[i].wire_bytes)[:MAX_LANES]
    lanes = []
    for row in (rows[i] for i in sorted(largest)):
        left = 100 * row.first_round / num_rounds
        width = 100 * (row.last_round + 1 - row.first_round) / num_rounds
        which = f"round{'s' * (row.last_round > row.first_round)} {row.rounds}"
        note = f"{which}, {format_bytes(row.wire_bytes)}"
        lanes.append(Lane(_name(row), [LaneBar(round(left, 3), round(width, 3))], note))
    return lanes


def _scale(num_rounds: int) -> list[Tick]:
    """Marks at every quarter or so; the last one is the number of rounds."""
    step = max(-(-num_rounds // 4), 1)
    edges = [edge for edge in range(0, num_rounds, step) if num_rounds - edge > step / 2]
    return [
        Tick(round(100 * edge / max(num_rounds, 1), 3), f"{edge:,}")
        for edge in (*edges, num_rounds)
    ]


def save(plan: Plan, path: str | Path, *, reports: Sequence[RunReport] = ()) -> None:
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
    if reports and path.suffix != ".html":
        raise FormatError(f'"{path}" cannot hold run reports: only an .html page shows them')
    if path.suffix == ".json":
        text = plan.to_json(indent=1)
    else:
        text = render(plan, reports=reports) if path.suffix == ".html" else to_trace(plan)
    path.write_text(text, encoding="utf-8")
