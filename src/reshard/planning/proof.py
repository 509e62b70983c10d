"""Why a plan is right: every wanted element is written exactly once, by a rank that holds it.

The proof looks at each rank's rows as they are, not at how they were found. For one rank and one
tensor the boxes that are written must lie in what the layout says it wants, must not overlap, and
must have as many elements as are wanted; then none is missing. A row that is sent first-hand must
lie in what its sender holds, and a row that is passed on in what its sender got one hop before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from reshard.box import Box, flat_range, uncovered
from reshard.errors import ProofError
from reshard.listed import join_boxes
from reshard.planning.rank import RankPlan, Rows
from reshard.regions import Ints
from reshard.spec import TensorSpec

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

__all__ = ["check_plan", "check_rank"]


def check_plan(plan: Plan) -> None:
    """Prove a plan for every rank, or raise an error that names the box that is wrong."""
    sent: dict[tuple[int, int], list[bytes]] = {}
    received: dict[tuple[int, int], list[bytes]] = {}
    for rank in plan.ranks:
        mine = plan.for_rank(rank)
        check_rank(plan, mine)
        for rows in mine.sends.rows:
            _note(sent, rows, rows.transfers.destination, rank, first=True)
        for rows in mine.receives.rows:
            _note(received, rows, rows.transfers.source, rank, first=False)
    _check_matching(sent, received)


def check_rank(plan: Plan, mine: RankPlan) -> None:
    """Prove the rows of one rank."""
    written = _written(plan, mine)
    for name, spec in plan.want.items():
        parts = written.get(name, [])
        if spec.layout.holds(mine.rank) is None:
            if parts:
                raise ProofError(f'rank {mine.rank} writes "{name}", which it does not want')
            continue
        if name in plan.fed:
            _check_written(name, spec, mine.rank, parts)
    for rows in [*mine.sends.rows, *mine.copies.rows]:
        _check_held(plan, rows, mine.rank)
    _check_passed_on(mine)


@dataclass(frozen=True, eq=False, slots=True)
class _Written:
    """Runs of cells that are written to some tensors of a stack, seen in the destination."""

    low: Ints
    width: Ints
    start: Ints
    stop: Ints


def _written(plan: Plan, mine: RankPlan) -> dict[str, list[_Written]]:
    """What is written to each destination tensor; of many addends the first stands for all."""
    found: dict[str, list[_Written]] = {}
    for rows in [*mine.receives.rows, *mine.copies.rows]:
        if rows.transfers.addend > 0:
            continue
        for name, part in _by_tensor(rows):
            found.setdefault(name, []).append(part)
    for fill in mine.fills:
        for piece in fill.spec.layout.pieces(mine.rank, fill.spec.shape):
            common = piece.box & fill.box
            if common.size:
                found.setdefault(fill.name, []).append(_of_box(common))
    return found


def _of_box(box: Box) -> _Written:
    low, width = np.array([box.start]), np.array([box.shape])
    return _Written(
        low.reshape(1, -1), width.reshape(1, -1), np.zeros(1, np.int64), np.array([box.size])
    )


def _by_tensor(rows: Rows) -> Iterator[tuple[str, _Written]]:
    """The runs of rows, cut where one tensor of the stack ends and the next begins."""
    transfers, stack = rows.transfers, rows.flow.stack
    cells, runs = transfers.cells, transfers.runs
    size = cells.size[runs.cell]
    first, last = runs.start // size, (runs.stop - 1) // size
    keep = [d for d in range(cells.width.shape[1]) if d not in stack.feed.want_insert]
    low, width = cells.want_low[:, keep], cells.width[:, keep]
    for tensor in range(int(first.min()), int(last.max()) + 1):
        at = np.flatnonzero((first <= tensor) & (tensor <= last))
        if len(at):
            cell, base = runs.cell[at], tensor * size[at]
            start = np.maximum(runs.start[at] - base, 0)
            stop = np.minimum(runs.stop[at] - base, size[at])
            yield stack.names[tensor][1], _Written(low[cell], width[cell], start, stop)


def _check_written(name: str, spec: TensorSpec, rank: int, parts: Sequence[_Written]) -> None:
    """All runs lie in wanted pieces, do not overlap, and are as many elements as are wanted."""
    pieces = [piece.box for piece in spec.layout.pieces(rank, spec.shape)]
    wanted = sum(box.size for box in pieces)
    num_dims = len(spec.shape)
    low = _joined([part.low for part in parts], num_dims)
    width = _joined([part.width for part in parts], num_dims)
    start = np.concatenate([np.zeros(0, np.int64), *(part.start for part in parts)])
    stop = np.concatenate([np.zeros(0, np.int64), *(part.stop for part in parts)])
    _check_inside(name, rank, low, width, pieces)
    _check_apart(name, rank, low, width, start, stop)
    count = int((stop - start).sum())
    if count != wanted:
        done = [box for row in range(len(low)) for box in _boxes(low, width, start, stop, row)]
        missing = next((m for box in pieces for m in uncovered(box, done)), None)
        raise ProofError(
            f'rank {rank} wants {wanted} elements of "{name}" and gets {count}: '
            f"box {missing} is missing"
        )


def _joined(columns: Sequence[Ints], num_dims: int) -> Ints:
    return np.concatenate([np.zeros((0, num_dims), np.int64), *columns])


def _check_inside(name: str, rank: int, low: Ints, width: Ints, pieces: Sequence[Box]) -> None:
    dims = low.shape[1]
    starts = np.array([box.start for box in pieces], dtype=np.int64).reshape(len(pieces), dims)
    stops = np.array([box.stop for box in pieces], dtype=np.int64).reshape(len(pieces), dims)
    mine, piece = join_boxes(low, low + width, starts, stops)
    inside = (low[mine] >= starts[piece]) & (low[mine] + width[mine] <= stops[piece])
    good = np.zeros(len(low), dtype=bool)
    good[mine[inside.all(axis=1)]] = True
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise ProofError(
            f"rank {rank} writes box {Box(tuple(low[row]), tuple(low[row] + width[row]))} of "
            f'"{name}", which is not inside a piece it wants'
        )


def _check_apart(name: str, rank: int, low: Ints, width: Ints, start: Ints, stop: Ints) -> None:
    """Runs of one cell follow each other; different cells have nothing in common."""
    cells, of_run = np.unique(np.concatenate([low, width], axis=1), axis=0, return_inverse=True)
    of_run = of_run.reshape(-1)
    order = np.lexsort([start, of_run])
    for one, two in pairwise(order.tolist()):
        if of_run[one] == of_run[two] and start[two] < stop[one]:
            box = next(_boxes(low, width, start, stop, two))
            raise ProofError(f'rank {rank} writes box {box} of "{name}" twice')
    dims = low.shape[1]
    lows, highs = cells[:, :dims], cells[:, :dims] + cells[:, dims:]
    one, two = join_boxes(lows, highs, lows, highs)
    crossing = np.flatnonzero(one < two)
    if len(crossing):
        a, b = one[crossing[0]], two[crossing[0]]
        box = Box(tuple(lows[a]), tuple(highs[a])) & Box(tuple(lows[b]), tuple(highs[b]))
        raise ProofError(f'rank {rank} writes box {box} of "{name}" twice')


def _boxes(low: Ints, width: Ints, start: Ints, stop: Ints, row: int) -> Iterator[Box]:
    for box in flat_range(tuple(width[row].tolist()), int(start[row]), int(stop[row])):
        yield box.shift(low[row].tolist())


def _check_held(plan: Plan, rows: Rows, rank: int) -> None:
    """What is read from a source tensor lies in what the rank holds of it."""
    if rows.transfers.hop:
        return
    cells, feed = rows.transfers.cells, rows.flow.stack.feed
    spec = rows.flow.stack.have
    used = np.unique(rows.transfers.runs.cell)
    keep = [d for d in range(cells.width.shape[1]) if d not in feed.have_insert]
    low, width = cells.have_low[used][:, keep], cells.width[used][:, keep]
    pieces = [piece.box for piece in spec.layout.pieces(rank, spec.shape)]
    if sum(box.size for box in pieces) == prod(spec.shape) and len(pieces) == 1:
        return
    try:
        _check_inside(rows.flow.stack.names[0][0], rank, low, width, pieces)
    except ProofError as error:
        raise ProofError(
            str(error).replace("writes", "sends").replace("it wants", "it holds")
        ) from None


def _check_passed_on(mine: RankPlan) -> None:
    """What a rank passes on it has received, one hop and at least one round before."""
    got: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rows in mine.receives.rows:
        got.setdefault((id(rows.flow), rows.transfers.hop), set()).update(_identities(rows))
    for rows in mine.copies.rows:
        if rows.transfers.addend >= 0:
            got.setdefault((id(rows.flow), 0), set()).update(_identities(rows))
    for rows in mine.sends.rows:
        hop = rows.transfers.hop
        if hop == 0:
            continue
        before = got.get((id(rows.flow), hop - 1), set())
        for key in _identities(rows):
            if not any(_contains(other, key) for other in _same_cell(before, key)):
                raise ProofError(
                    f"rank {mine.rank} passes on elements {key[-2]} to {key[-1]} of a cell of "
                    f"{rows.flow.stack.label} that it has not received before"
                )


def _identities(rows: Rows) -> set[tuple[int, ...]]:
    """Cells by their place in the destination, and the run of each row."""
    cells, runs = rows.transfers.cells, rows.transfers.runs
    low = cells.want_low[runs.cell]
    table = np.concatenate([low, runs.start[:, None], runs.stop[:, None]], axis=1)
    return set(map(tuple, table.tolist()))


def _same_cell(keys: set[tuple[int, ...]], key: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if key in keys:
        yield key
        return
    yield from (other for other in keys if other[:-2] == key[:-2])


def _contains(other: tuple[int, ...], key: tuple[int, ...]) -> bool:
    return other[-2] <= key[-2] and key[-1] <= other[-1]


def _note(
    found: dict[tuple[int, int], list[bytes]], rows: Rows, peers: Ints, rank: int, first: bool
) -> None:
    """Remember what a rank says it exchanges with each peer, row by row."""
    cells, runs = rows.transfers.cells, rows.transfers.runs
    extra = np.full(len(runs.cell), rows.transfers.hop * 4096 + rows.transfers.addend)
    low, width = cells.want_low[runs.cell], cells.width[runs.cell]
    table = np.column_stack([low, width, runs.start, runs.stop, extra])
    for peer in np.unique(peers).tolist():
        pair = (rank, peer) if first else (peer, rank)
        found.setdefault(pair, []).append(np.ascontiguousarray(table[peers == peer]).tobytes())


def _check_matching(
    sent: dict[tuple[int, int], list[bytes]], received: dict[tuple[int, int], list[bytes]]
) -> None:
    """Both ends of every pair list the same rows in the same order."""
    for pair in sorted({*sent, *received}):
        if sent.get(pair) != received.get(pair):
            raise ProofError(
                f"rank {pair[0]} sends {len(sent.get(pair, []))} lists of rows to rank {pair[1]}, "
                f"which expects {len(received.get(pair, []))} or others: the two disagree"
            )
