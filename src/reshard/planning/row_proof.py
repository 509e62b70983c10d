"""The proof of single ranks: their rows, one by one, as each rank derives them.

All ranks of a plan with up to `MAX_ROWS` rows; of larger plans one rank of each role, then others:

1. what a rank writes covers its pieces exactly, and every addend is the same parts;
2. what is sent or copied first-hand is inside the pieces that the sender holds, is the same
   elements in the source as in the destination, and is the addend that the sender holds;
3. what is passed on was received one hop before;
4. both ends of every pair of ranks list the same rows in the same order;
5. every row has its turn in a round of the plan, what is passed on after it was received.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import ProofError
from reshard.layout.box import Box
from reshard.layout.boxlist import piece_columns
from reshard.layout.columns import Ints, contained, distinct, distinct_first, mixed, numbered
from reshard.layout.coverage import first_overlapping_rows, missing_boxes, overlapping_pairs
from reshard.layout.grid import addend_of
from reshard.layout.spec import TensorSpec
from reshard.planning.cells.transfers import Mask, Transfers
from reshard.planning.plans import Plan
from reshard.planning.rank import RankPlan, Rows

MAX_ROWS = 1 << 18  # rows that are looked at one by one
PER_FLOW = 100  # as how many rows a rank counts for each flow, because it takes as long
ROW_BYTES = 400  # about what a row takes while its rank is looked at


def check_ranks(plan: Plan, groups: Sequence[TensorGroup]) -> None:
    exchanges = _Exchanges(plan)
    seen: list[int] = []
    rows = 0
    for rank in _in_turn(plan):
        mine = plan.for_rank(rank)
        written: dict[int, dict[int, list[Rows]]] = {}
        for one in [*mine.receives.rows, *mine.copies.rows]:
            addends = written.setdefault(id(one.flow.stack), {})
            addends.setdefault(one.transfers.addend, []).append(one)
        cells = {stack: _same_cells(rank, addends) for stack, addends in written.items()}
        for group in groups:
            _check_group(group, mine, [cells[stack] for stack in group.stacks if stack in cells])
        for one in [*mine.sends.rows, *mine.copies.rows]:
            _check_held(one, rank)
        _check_passed_on(mine)
        _check_turns(mine, plan.num_rounds)
        exchanges.add(mine.sends.rows, 1)
        exchanges.add(mine.receives.rows, -1)
        seen.append(rank)
        rows += mine.sends.num_rows + mine.receives.num_rows + mine.copies.num_rows
        rows += PER_FLOW * len(plan.flows)
        if rows > MAX_ROWS:
            break
    pair = exchanges.first_unequal(np.array(seen, dtype=np.int64))
    if pair is not None:
        raise ProofError(
            f"what rank {pair[0]} sends to rank {pair[1]} is not what rank {pair[1]} expects"
        )


class _Exchanges:
    """What pairs of ranks exchange, as hashes of rows in their order: a pair's sum is 0 if its two
    ranks list the same."""

    def __init__(self, plan: Plan) -> None:
        self._world = plan.world
        self._span = int(plan.world.max(initial=0)) + 1
        self._pairs: list[Ints] = [np.zeros(0, np.int64)]
        self._hashes: list[Ints] = [np.zeros(0, np.int64)]

    def add(self, lists: Iterable[Rows], sign: int) -> None:
        """Add rows that one rank sends (1), or receives (-1)."""
        for rows in lists:
            transfers = rows.transfers
            for ends in (transfers.source, transfers.destination):
                if not contained(ends, self._world).all():
                    outside = ends[~contained(ends, self._world)][0]
                    raise ProofError(f"rows name rank {outside}, which is not in the plan")
            low = transfers.cells.have_low[transfers.runs.cell]
            table = np.column_stack([_table(transfers), low]).view(np.uint64)
            pair = transfers.source * self._span + transfers.destination
            order = np.argsort(pair, kind="stable")
            pairs, first = distinct_first(pair[order])
            kind = repr((transfers.hop, transfers.addend, rows.slot)).encode()
            place = np.arange(len(pair)) - np.repeat(first, np.diff(np.append(first, len(pair))))
            value = place.view(np.uint64) + np.uint64(zlib.crc32(kind) << 32)
            for column in table[order].T:
                value = mixed(mixed(value) ^ column)
            self._pairs.append(pairs)
            self._hashes.append(np.add.reduceat(value, first).view(np.int64) * sign)

    def first_unequal(self, ranks: Ints) -> tuple[int, int] | None:
        """The first pair of these ranks of which one sends what the other does not expect."""
        pairs = np.concatenate(self._pairs)
        known = contained(pairs // self._span, ranks) & contained(pairs % self._span, ranks)
        found, number = numbered(pairs[known])
        total = np.zeros(len(found), dtype=np.int64)
        np.add.at(total, number, np.concatenate(self._hashes)[known])
        unequal = found[total != 0]
        return divmod(int(unequal[0]), self._span) if len(unequal) else None


def _in_turn(plan: Plan) -> list[int]:
    """All ranks: one of each role first, then the others; neighbours in no order."""
    role = np.zeros(len(plan.world), dtype=np.uint64)
    rng = np.random.default_rng(0)
    for flow in plan.flows:
        for lines in (flow.geometry.senders, flow.geometry.wanting):
            of_line = rng.integers(1 << 63, size=len(lines.counts), dtype=np.uint64)
            place = np.searchsorted(plan.world, lines.members)
            np.add.at(role, place, np.repeat(of_line, lines.counts))
    mixed = rng.permutation(len(plan.world))
    _, first = distinct_first(role[mixed].view(np.int64))
    later = np.ones(len(mixed), dtype=bool)
    later[first] = False
    order = np.concatenate([mixed[np.sort(first)], mixed[later]])
    return [int(rank) for rank in plan.world[order]]


@dataclass(frozen=True, eq=False, slots=True)
class TensorGroup:
    """Destination tensors that are fed by the same stacks and filled in the same boxes."""

    name: str  # the first of them
    spec: TensorSpec
    stacks: set[int]  # the ids of the stacks
    fills: Sequence[Box]


def tensor_groups(plan: Plan) -> Iterator[TensorGroup]:
    fed: dict[str, list[int]] = {}
    for number, stack in enumerate(plan.stacks):
        for _, name in stack.names:
            fed.setdefault(name, []).append(number)
    filled: dict[str, list[Box]] = {}
    for fill in plan.fills:
        filled.setdefault(fill.name, []).append(fill.box)
    seen: set[tuple[object, ...]] = set()
    for name, numbers in fed.items():
        spec, boxes = plan.want[name], filled.get(name, [])
        key = (*numbers, None, *boxes, spec.shape, id(spec.layout))
        if key not in seen:
            seen.add(key)
            yield TensorGroup(name, spec, {id(plan.stacks[n]) for n in numbers}, boxes)


def without_dims(columns: Ints, inserted: Sequence[int]) -> Ints:
    return np.delete(columns, inserted, axis=1) if inserted else columns


def _check_turns(mine: RankPlan, num_rounds: int) -> None:
    """Every slice of every row moves in some round; hops follow each other."""
    for rows in [*mine.sends.rows, *mine.receives.rows, *mine.copies.rows]:
        slot, hop = rows.slot, rows.transfers.hop
        turns = [slot.turn(number, hop) for number in rows.rounds() if number < num_rounds]
        expected = [(p, s) for p in range(slot.phases) for s in range(slot.slices)]
        if [turn for turn in turns if turn] != expected or slot.first < 0:
            raise ProofError(
                f"rank {mine.rank}: some of {len(expected)} slices of {rows.flow.stack.label} "
                f"have no turn in the {num_rounds} rounds of the plan"
            )


def _same_cells(rank: int, addends: dict[int, list[Rows]]) -> tuple[Ints, Ints]:
    """The cells of a stack that a rank writes: every addend has the same, proven whole.

    Rows of addend -1 carry the value itself.
    """
    flow = next(iter(addends.values()))[0].flow
    num_dims = len(flow.stack.want.shape) + len(flow.stack.feed.want_insert)
    none = np.zeros((0, 2 * num_dims + 2), dtype=np.int64)
    own = [addends.get(number, []) for number in range(flow.geometry.num_addends)]
    tables = [np.concatenate([none, *(_table(one.transfers) for one in some)]) for some in own]
    tables = [table[np.lexsort(table.T[::-1])] for table in tables]
    lacking = [n for n, table in enumerate(tables) if not np.array_equal(table, tables[0])]
    if lacking:
        raise ProofError(
            f"rank {rank} does not add up the same parts of {flow.stack.label} for addend "
            f"{lacking[0]} as for addend 0"
        )
    return _whole_cells(rank, [*own[0], *addends.get(-1, [])])


def _whole_cells(rank: int, written: Sequence[Rows]) -> tuple[Ints, Ints]:
    """The low corner and the width of every cell of a stack that a rank writes, proven whole."""
    stack = written[0].flow.stack
    table = np.concatenate([_table(rows.transfers) for rows in written])
    dims = (table.shape[1] - 2) // 2
    table = table[np.lexsort(table[:, :-1].T[::-1])]
    start, stop = table[:, -2], table[:, -1]
    new = np.append(True, (table[1:, :-2] != table[:-1, :-2]).any(axis=1))
    size = table[:, dims : 2 * dims].prod(axis=1) * len(stack.names)
    wrong, expected = wrong_runs(new, start, stop, size)
    if len(wrong):
        row = int(wrong[0])
        at = min(start[row], expected[row]) if start[row] != expected[row] else stop[row]
        low, width = table[row, :dims], table[row, dims : 2 * dims]
        tensor = min(int(at) // max(int(width.prod()), 1), len(stack.names) - 1)
        what = "is written twice" if start[row] < expected[row] else "is missing"
        raise ProofError(
            f'rank {rank}: a part of box {as_box(low, width)} of "{stack.names[tensor][1]}" {what}'
        )
    low, width = np.split(table[new, : 2 * dims], 2, axis=1)
    inserted = stack.feed.want_insert
    return without_dims(low, inserted), without_dims(width, inserted)


def wrong_runs(new: Mask, start: Ints, stop: Ints, size: Ints) -> tuple[Ints, Ints]:
    """The runs that do not make up whole cells, and where each run should start.

    Runs of a cell follow each other in rising order; ``new`` says where those of the next begin.
    """
    expected = np.where(new, 0, np.append(0, stop[:-1])[: len(new)])
    last = np.append(new[1:], True)[: len(new)]
    wrong = (start != expected) | (last & (stop != size)) | (start >= stop)
    return np.flatnonzero(wrong), expected


def _table(transfers: Transfers) -> Ints:
    """Where each row lands: the cell's low corner and width, and the run's start and stop."""
    cells, runs = transfers.cells, transfers.runs
    corner, width = cells.want_low[runs.cell], cells.width[runs.cell]
    return np.column_stack([corner, width, runs.start, runs.stop])


def _check_group(group: TensorGroup, mine: RankPlan, found: Sequence[tuple[Ints, Ints]]) -> None:
    spec, rank = group.spec, mine.rank
    starts, stops, *_ = piece_columns(spec.layout, rank, spec.shape)
    lows, widths = [starts[:0]], [starts[:0]]
    for box in {fill.box for fill in mine.fills if fill.name == group.name} & {*group.fills}:
        low = np.maximum(starts, np.array(box.start, dtype=np.int64))
        width = np.minimum(stops, np.array(box.stop, dtype=np.int64)) - low
        some = np.flatnonzero((width > 0).all(axis=1))
        lows.append(low[some])
        widths.append(width[some])
    low = np.concatenate([*lows, *(one for one, _ in found)])
    width = np.concatenate([*widths, *(one for _, one in found)])
    outside = first_outside(low, width, starts, stops)
    if outside is not None:
        raise ProofError(
            f'rank {rank} writes box {outside} of "{group.name}", which is not inside a piece '
            "it wants"
        )
    crossing = first_overlapping_rows(low, low + width)
    if crossing is not None:
        a, b = (as_box(low[row], width[row]) for row in crossing)
        raise ProofError(f'rank {rank} writes box {a & b} of "{group.name}" twice')
    wanted, count = int((stops - starts).prod(axis=1).sum()), int(width.prod(axis=1).sum())
    if count != wanted:
        pieces = [piece.box for piece in spec.layout.pieces(rank, spec.shape)]
        done = [*map(as_box, low, width)]
        missing = next((gap for box in pieces for gap in missing_boxes(box, done)), None)
        raise ProofError(
            f'rank {rank} wants {wanted} elements of "{group.name}" and gets {count}: '
            f"box {missing} is missing"
        )


def first_outside(low: Ints, width: Ints, starts: Ints, stops: Ints) -> Box | None:
    """The first box that is inside none of the pieces that start and stop there."""
    mine, piece = overlapping_pairs(low, low + width, starts, stops)
    inside = (low[mine] >= starts[piece]) & (low[mine] + width[mine] <= stops[piece])
    good = np.zeros(len(low), dtype=bool)
    good[mine[inside.all(axis=1)]] = True
    if good.all():
        return None
    row = int(np.flatnonzero(~good)[0])
    return as_box(low[row], width[row])


def as_box(low: Ints, width: Ints) -> Box:
    return Box(tuple(low.tolist()), tuple((low + width).tolist()))


def _check_held(rows: Rows, rank: int) -> None:
    """What is read from a source tensor is the right addend and box, and the rank holds it."""
    if rows.transfers.hop:
        return
    cells, stack, number = rows.transfers.cells, rows.flow.stack, rows.transfers.addend
    addend = addend_of(stack.have.layout).get(rank)
    if number >= 0 and addend != rows.flow.geometry.addends[number]:
        raise ProofError(
            f"rank {rank} sends addend {number} of {stack.label} and holds addend {addend}"
        )
    used = distinct(rows.transfers.runs.cell)
    have, want, width = cells.have_low[used], cells.want_low[used], cells.width[used]
    right = have == want
    for dim, segments in enumerate(stack.feed.moves):
        runs = np.array(segments, dtype=np.int64).reshape(-1, 3)
        inside = have[:, dim, None] - runs[:, 0] == want[:, dim, None] - runs[:, 1]
        inside &= have[:, dim, None] >= runs[:, 0]
        inside &= (have + width)[:, dim, None] <= runs[:, 0] + runs[:, 2]
        right[:, dim] = inside.any(axis=1)
    if not right.all():
        row = int(np.flatnonzero(~right.all(axis=1))[0])
        raise ProofError(
            f"rank {rank} reads {have[row].tolist()} of {stack.label} for "
            f"{want[row].tolist()}, which are other elements"
        )
    low, width = (without_dims(one, stack.feed.have_insert) for one in (have, width))
    starts, stops, *_ = piece_columns(stack.have.layout, rank, stack.have.shape)
    outside = first_outside(low, width, starts, stops)
    if outside is not None:
        raise ProofError(
            f'rank {rank} sends box {outside} of "{stack.names[0][0]}", which it does not hold'
        )


def _check_passed_on(mine: RankPlan) -> None:
    """What a rank passes on it has received, or added up, one hop before."""
    got: dict[tuple[int, int], list[Ints]] = {}
    for rows in [*mine.receives.rows, *mine.copies.rows]:
        key = (id(rows.flow), rows.transfers.hop)
        got.setdefault(key, []).append(_table(rows.transfers))
    for rows in mine.sends.rows:
        hop = rows.transfers.hop
        if hop == 0:
            continue
        passed = _table(rows.transfers)
        before = got.get((id(rows.flow), hop - 1), [passed[:0]])
        if not _all_within(np.unique(passed, axis=0), np.unique(np.concatenate(before), axis=0)):
            raise ProofError(
                f"rank {mine.rank} passes on a part of {rows.flow.stack.label} "
                "that it has not received before"
            )


def _all_within(rows: Ints, others: Ints) -> bool:
    """Whether each run is inside a run of the same cell among the others."""
    exact = {row.tobytes() for row in others}
    rest = [row for row in rows if row.tobytes() not in exact]
    by_cell: dict[bytes, list[Ints]] = {}
    for row in others if rest else ():
        by_cell.setdefault(row[:-2].tobytes(), []).append(row)
    return all(
        any(o[-2] <= row[-2] and row[-1] <= o[-1] for o in by_cell.get(row[:-2].tobytes(), []))
        for row in rest
    )
