"""A plan, and what a run of it measured, as one HTML page; and a plan as a file of any kind.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> from reshard.planning.plans import plan
>>> have, want = Layout(Mesh(dp=2), "dp -"), Layout(Mesh(tp=2), "- tp")
>>> page = render(plan(have, want, shape=(8, 8), dtype="float32"))
>>> page.startswith("<!doctype html>"), "http:" in page
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import FormatError
from reshard.layout.layout import Layout
from reshard.planning.plans import Plan
from reshard.show.holdings import holdings, picture_of, two_dims
from reshard.show.name_patterns import named_pairs
from reshard.show.page.document import (
    Document,
    Footer,
    Lane,
    Move,
    Run,
    Side,
    clean,
    render_page,
)
from reshard.show.page.drawings import (
    Colours,
    Tick,
    drawing_of,
    links_of,
    rank_list,
    table_of,
)
from reshard.show.plan_text import Figure, StackRow, figures, headline, reasons, stack_rows
from reshard.show.run_report import RoundReport, RunReport, format_seconds
from reshard.show.terminal import table
from reshard.show.traffic import Matrix, to_trace, traffic_matrix
from reshard.text import count, format_bytes, shorten

MAX_GROUPS = 16
MAX_CELLS = (32, 24)
"""Rows and columns of a drawing; more are merged."""
MAX_DRAWN = 12
"""Kinds of stacks that are drawn; the first of them without asking."""
MAX_LANES = 24
MAX_LISTED = 50_000
"""Groups that are listed with their tensors."""
MAX_ROUNDS = 32
PHASES = ("packing", "waiting", "unpacking")


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
    plan: Plan,
    reports: Sequence[RunReport] = (),
    notes: Sequence[str] = (),
    *,
    most_drawn: int = MAX_DRAWN,
    is_page: bool = True,
) -> Document:
    """What a page shows of a plan; a cell of a notebook has no script, no rounds and no list."""
    for report in reports:
        if report.digest != plan.digest:
            raise FormatError(
                f"the report of rank {report.rank} is of plan {shorten(report.digest, 40)} and "
                f"this plan is {plan.digest}: give the reports of a run of this plan"
            )
    rows, colours, matrix = stack_rows(plan), Colours(), traffic_matrix(plan, MAX_GROUPS)
    kinds = kinds_of(rows)
    moves = moves_of([kind[0] for kind in kinds[:most_drawn]], colours)
    return Document(
        headline(plan, rows),
        list(figures(plan)),
        _data(plan, rows, kinds[:most_drawn], moves, matrix) if is_page else {},
        digest=plan.digest,
        reasons=[*reasons(plan), *notes],
        moves=moves,
        legend=legend_of(colours, moves, len(kinds), len(rows)),
        table=table_of(matrix) if matrix.num_bytes.size else None,
        lanes=_lanes(rows, plan.num_rounds) if is_page else (),
        scale=_scale(plan.num_rounds),
        rounds_note=f"{count(plan.num_rounds, 'round')}; a round is one exchange, in which no rank "
        "stages more than the cap.",
        run=run_of(reports),
    )


def _data(
    plan: Plan,
    rows: Sequence[StackRow],
    drawn: Sequence[Sequence[StackRow]],
    moves: Sequence[Move],
    matrix: Matrix,
) -> dict[str, Any]:
    """What the script of the page works with."""
    place = {id(row): (at, row is kind[0]) for at, kind in enumerate(drawn) for row in kind}
    listed, links, groups = sorted(rows, key=_by_size)[:MAX_LISTED], [], []
    for kind, move in zip(drawn, moves, strict=True):
        have, want = (side.drawing if side else None for side in (move.have, move.want))
        lit = links_of(plan, kind[0].stack, have, want, matrix) if have and want else []
        links.append({"links": lit})
    for row in listed:  # the script knows what stands where
        layouts = (row.stack.have.layout, row.stack.want.layout)
        number, is_drawn = place.get(id(row), (-1, False))
        groups.append([
            _name(row), row.shape, row.dtype, *(shorten(str(layout), 80) for layout in layouts),
            format_bytes(row.num_bytes), row.num_bytes, format_bytes(row.wire_bytes),
            row.wire_bytes, row.rounds, number, len(row.stack.names), int(is_drawn),
        ])  # fmt: skip
    return {
        "moves": links,
        "matrix": {"sources": matrix.sources, "destinations": matrix.destinations},
        "groups": groups,
        "names": [[clean(name) for _, name in row.stack.names] for row in listed],
        "stored": False,
    }


def _name(row: StackRow) -> str:
    """The names of a stack as patterns; with the source's where these differ."""
    return named_pairs([(clean(have), clean(want)) for have, want in row.stack.names])


def _by_size(row: StackRow) -> int:
    return -row.num_bytes


def kinds_of(rows: Sequence[StackRow]) -> list[list[StackRow]]:
    """Stacks that differ only in where they are; of each kind, and of all kinds, largest first."""
    kinds: dict[object, list[StackRow]] = {}
    for row in sorted(rows, key=_by_size):
        sides = (row.stack.have, row.stack.want)
        key = tuple((s.shape, str(s.layout).partition("|")[0]) for s in sides)
        kinds.setdefault(key, []).append(row)
    return list(kinds.values())


def legend_of(colours: Colours, moves: Sequence[Move], num_kinds: int, num_rows: int) -> str:
    """How to read the drawings, and how many there are; empty where there are none."""
    if not moves:
        return ""
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


def moves_of(rows: Sequence[StackRow], colours: Colours) -> list[Move]:
    moves = []
    for row in rows:
        have, want, dims = row.stack.have, row.stack.want, None
        if have.shape == want.shape and not row.stack.feed.moves:
            dims = two_dims(have.shape, (have.layout, want.layout))
        sides = (side_of(side.layout, side.shape, colours, dims) for side in (have, want))
        note = f"{row.shape} {row.dtype}, {format_bytes(row.num_bytes)}"
        moves.append(Move(_name(row), note, *sides))
    return moves


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
        several = row.last_round - row.first_round
        left, width = (round(100 * at / num_rounds, 3) for at in (row.first_round, several + 1))
        note = f"round{'s' * (several > 0)} {row.rounds}, {format_bytes(row.wire_bytes)}"
        lanes.append(Lane(_name(row), [(left, width, "")], note))
    return lanes


def _scale(num_rounds: int) -> list[Tick]:
    """Marks at every quarter or so; the last one is the number of rounds."""
    step = max(-(-num_rounds // 4), 1)
    edges = [edge for edge in range(0, num_rounds, step) if num_rounds - edge > step / 2]
    return [Tick(round(100 * at / max(num_rounds, 1), 3), f"{at:,}") for at in (*edges, num_rounds)]


def run_of(reports: Sequence[RunReport]) -> Run | None:
    """What was measured; None where there are no reports."""
    if not reports:
        return None
    rounds: dict[int, tuple[int, RoundReport]] = {}
    for report in reports:  # every round on the rank that took longest for it
        for part in report.rounds:
            if part.round not in rounds or part.seconds > rounds[part.round][1].seconds:
                rounds[part.round] = report.rank, part
    shown = sorted(rounds.values(), key=lambda pair: -pair[1].seconds)[:MAX_ROUNDS]
    longest = max((part.seconds for _, part in shown), default=0.0)
    lanes = [_lane(*pair, longest) for pair in sorted(shown, key=lambda pair: pair[1].round)]
    scale = [Tick(0, "0"), Tick(100, format_seconds(longest))] if longest else []
    note = f"Reports of {rank_list(sorted({report.rank for report in reports}))}."
    if len(rounds) > len(shown):
        note += f" The {len(shown)} slowest of {len(rounds):,} rounds."
    slowest = max(reports, key=lambda report: report.seconds)
    of = f", the slowest of {len(reports)}" if len(reports) > 1 else ""
    waited = max(reports, key=lambda report: report.waiting)
    before = slowest.setup + slowest.handshake
    parts = f"setup {format_seconds(slowest.setup)}, handshake {format_seconds(slowest.handshake)}"
    sent = sum(report.bytes_sent for report in reports)
    rate = max(report.bytes_per_second for report in reports)
    peak = max(report.peak_staging for report in reports)
    cards = [
        Figure("Measured", format_seconds(slowest.seconds), f"on rank {slowest.rank}{of}"),
        Figure("Before the first round", format_seconds(before), parts),
        Figure("Sent", format_bytes(sent), f"by {count(len(reports), 'rank')} with a report"),
        Figure("Fastest rank", f"{rate / 1e9:.2f} GB/s", "sent or received, and kept"),
        Figure("Longest wait", format_seconds(waited.waiting), f"on rank {waited.rank}"),
        Figure("Staged", format_bytes(peak), "at most on a rank"),
    ]
    return Run(cards, lanes, scale, note)


def _lane(rank: int, part: RoundReport, longest: float) -> Lane:
    bars, at = [], 0.0
    spent = [(phase, getattr(part, phase)) for phase in PHASES]
    spent.append(("rest", max(part.seconds - sum(seconds for _, seconds in spent), 0.0)))
    for kind, seconds in spent:
        width = round(100 * seconds / longest, 2) if longest else 0.0
        width = min(width, round(100 - at, 2))
        if width > 0:
            bars.append((round(at, 2), width, kind))
        at += width
    moved = format_bytes(max(part.bytes_sent, part.bytes_received))
    note = f"{format_seconds(part.seconds)} on rank {rank}, {moved}"
    return Lane(f"round {part.round}", bars, note)


def save(plan: Plan, path: str | Path, *, reports: Sequence[RunReport] = ()) -> None:
    """Write a plan as a page (.html), as data (.json) or as a timeline (.trace).

    >>> save(None, "move.pdf")
    Traceback (most recent call last):
    reshard.errors.FormatError: cannot save a plan as "move.pdf": the suffix must be .html, .json \
or .trace
    """
    path = Path(path)
    writers: dict[str, Callable[[], str]] = {
        ".html": lambda: render(plan, reports=reports),
        ".json": lambda: plan.to_json(indent=1),
        ".trace": lambda: to_trace(plan),
    }
    if path.suffix not in writers:
        raise FormatError(
            f'cannot save a plan as "{path}": the suffix must be .html, .json or .trace'
        )
    if reports and path.suffix != ".html":
        raise FormatError(f'"{path}" cannot hold run reports: only an .html page shows them')
    path.write_text(writers[path.suffix](), encoding="utf-8")
