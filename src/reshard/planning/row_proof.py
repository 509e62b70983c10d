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

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from reshard.errors import ProofError
from reshard.layout.box import Box
from reshard.layout.boxlist import piece_columns
from reshard.layout.columns import Ints, contained, distinct, distinct_first
from reshard.layout.coverage import first_overlapping_rows, missing_boxes, overlapping_pairs
from reshard.layout.grid import addend_of
from reshard.layout.spec import TensorSpec
from reshard.planning.cells.transfers import Transfers
from reshard.planning.plans import Plan
from reshard.planning.rank import RankPlan, Rows
from reshard.planning.sharing import Mask

MAX_ROWS = 1 << 18  # rows that are looked at one by one
PER_FLOW = 100  # as how many rows a rank counts for each flow, because it takes as long
ROW_BYTES = 400  # about what a row takes while its rank is looked at


def check_ranks(plan: Plan, groups: Sequence[TensorGroup]) -> None:
    exchanges, num_rows = _Exchanges(plan), 0
    for rank in _in_turn(plan):
        mine = plan.for_rank(rank)
        written: dict[int, dict[int, list[Rows]]] = defaultdict(lambda: defaultdict(list))
        for rows in [*mine.receives.rows, *mine.copies.rows]:
            written[id(rows.flow.stack)][rows.transfers.addend].append(rows)
        cells = {stack: _whole_cells(rank, addends) for stack, addends in written.items()}
        for group in groups:
            _check_group(group, mine, [cells[stack] for stack in group.stacks if stack in cells])
        for rows in [*mine.sends.rows, *mine.copies.rows]:
            _check_held(rows, rank)
        _check_passed_on(mine)
        _check_turns(mine, plan.num_rounds)
        exchanges.add(mine)
        num_rows += mine.sends.num_rows + mine.receives.num_rows + mine.copies.num_rows
        num_rows += PER_FLOW * len(plan.flows)
        if num_rows > MAX_ROWS:
            break
    exchanges.check()


class _Exchanges:
    """What pairs of ranks exchange, as hashes of rows in their order: the sum of a pair is 0 if its
    two ranks list the same."""

    def __init__(self, plan: Plan) -> None:
        self._world, self._ranks = plan.world, set[int]()
        self._span = int(plan.world.max(initial=0)) + 1
        self._sums = defaultdict[int, int](int)  # by source * span + destination

    def add(self, mine: RankPlan) -> None:
        """Add the rows that a rank sends, and subtract those that it receives."""
        self._ranks.add(mine.rank)
        for sign, side in ((1, mine.sends), (-1, mine.receives)):
            for rows in side.rows:
                transfers = rows.transfers
                for ends in (transfers.source, transfers.destination):
                    outside = ends[~contained(ends, self._world)]
                    if len(outside):
                        raise ProofError(f"rows name rank {outside[0]}, which is not in the plan")
                pair = transfers.source * self._span + transfers.destination
                order = np.argsort(pair, kind="stable")
                low = transfers.cells.have_low[transfers.runs.cell]
                table = np.column_stack([_table(transfers), low])[order]
                pairs, first = distinct_first(pair[order])
                kind = (transfers.hop, transfers.addend, rows.slot)
                for number, part in zip(pairs.tolist(), np.split(table, first)[1:], strict=True):
                    self._sums[number] += sign * hash((kind, part.tobytes()))

    def check(self) -> None:
        """Raise if two of the ranks that were added do not list the same."""
        for pair in sorted(pair for pair, total in self._sums.items() if total):
            source, destination = divmod(pair, self._span)
            if {source, destination} <= self._ranks:
                raise ProofError(
                    f"what rank {source} sends to rank {destination} is not what rank "
                    f"{destination} expects"
                )


def _in_turn(plan: Plan) -> list[int]:
    """All ranks: one of each role first, then the others; neighbours in no order."""
    role, rng = np.zeros(len(plan.world), dtype=np.uint64), np.random.default_rng(0)
    for flow in plan.flows:
        for lines in (flow.geometry.senders, flow.geometry.wanting):
            of_line = rng.integers(1 << 63, size=len(lines.counts), dtype=np.uint64)
            np.add.at(role, np.searchsorted(plan.world, lines.members), of_line[lines.line_of])
    shuffled = rng.permutation(len(plan.world))
    first = np.sort(distinct_first(role[shuffled].view(np.int64))[1])
    order = np.concatenate([shuffled[first], np.delete(shuffled, first)])
    return [int(rank) for rank in plan.world[order]]


@dataclass(frozen=True, eq=False, slots=True)
class TensorGroup:
    """Destination tensors that are fed by the same stacks and filled in the same boxes."""

    name: str  # the first of them
    spec: TensorSpec
    stacks: set[int]  # the ids of the stacks
    fills: Sequence[Box]


def tensor_groups(plan: Plan) -> Iterator[TensorGroup]:
    fed: dict[str, list[int]] = defaultdict(list)
    for number, stack in enumerate(plan.stacks):
        for _, name in stack.names:
            fed[name].append(number)
    filled: dict[str, list[Box]] = defaultdict(list)
    for fill in plan.fills:
        filled[fill.name].append(fill.box)
    seen: set[tuple[object, ...]] = set()
    for name, numbers in fed.items():
        spec, boxes = plan.want[name], filled[name]
        key = (*numbers, None, *boxes, spec.shape, id(spec.layout))
        if key not in seen:
            seen.add(key)
            yield TensorGroup(name, spec, {id(plan.stacks[n]) for n in numbers}, boxes)


def without_dims(columns: Ints, inserted: Sequence[int]) -> Ints:
    return np.delete(columns, inserted, axis=1) if inserted else columns


def _check_turns(mine: RankPlan, num_rounds: int) -> None:
    """Every slice of every row moves in some round; hops follow each other."""
    for rows in [*mine.sends.rows, *mine.receives.rows, *mine.copies.rows]:
        slot = rows.slot
        numbers = (number for number in rows.rounds() if number < num_rounds)
        turns = [turn for n in numbers if (turn := slot.turn(n, rows.transfers.hop))]
        expected = [*product(range(slot.phases), range(slot.slices))]
        if turns != expected or slot.first < 0:
            raise ProofError(
                f"rank {mine.rank}: some of {len(expected)} slices of {rows.flow.stack.label} "
                f"have no turn in the {num_rounds} rounds of the plan"
            )


def _whole_cells(rank: int, addends: dict[int, list[Rows]]) -> tuple[Ints, Ints]:
    """The low corner and the width of every cell of a stack that a rank writes.

    Every addend has the same rows, and they make up whole cells. Rows of addend -1 are values.
    """
    flow = next(iter(addends.values()))[0].flow
    stack, inserted = flow.stack, flow.stack.feed.want_insert
    dims = len(stack.want.shape) + len(inserted)
    none = np.zeros((0, 2 * dims + 2), dtype=np.int64)
    tables = {-1: none} | dict.fromkeys(range(flow.geometry.num_addends), none)
    for number, lists in addends.items():
        table = np.concatenate([_table(rows.transfers) for rows in lists])
        tables[number] = table[np.lexsort(table.T[::-1])]
    for number in range(1, flow.geometry.num_addends):
        if not np.array_equal(tables[number], tables[0]):
            raise ProofError(
                f"rank {rank} does not add up the same parts of {stack.label} for addend "
                f"{number} as for addend 0"
            )
    table = np.concatenate([tables[0], tables[-1]])
    table = table[np.lexsort(table[:, :-1].T[::-1])]
    start, stop = table[:, -2], table[:, -1]
    new = np.append(True, (table[1:, :-2] != table[:-1, :-2]).any(axis=1))
    low, width = table[:, :dims], table[:, dims : 2 * dims]
    wrong, expected = wrong_runs(new, start, stop, width.prod(axis=1) * len(stack.names))
    if len(wrong):
        row = int(wrong[0])
        at = min(start[row], expected[row]) if start[row] != expected[row] else stop[row]
        tensor = min(int(at) // max(int(width[row].prod()), 1), len(stack.names) - 1)
        what = "is written twice" if start[row] < expected[row] else "is missing"
        raise ProofError(
            f"rank {rank}: a part of box {as_box(low[row], width[row])} of "
            f'"{stack.names[tensor][1]}" {what}'
        )
    return without_dims(low[new], inserted), without_dims(width[new], inserted)


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


def _check_group(group: TensorGroup, mine: RankPlan, cells: Sequence[tuple[Ints, Ints]]) -> None:
    spec, rank = group.spec, mine.rank
    starts, stops, *_ = piece_columns(spec.layout, rank, spec.shape)
    fills = {fill.box for fill in mine.fills if fill.name == group.name} & {*group.fills}
    boxes = [(starts[:0], stops[:0]), *(clipped(starts, stops, box) for box in fills), *cells]
    low, width = map(np.concatenate, zip(*boxes, strict=True))
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
    wanted, count = num_elements(stops - starts), num_elements(width)
    if count != wanted:
        pieces = [piece.box for piece in spec.layout.pieces(rank, spec.shape)]
        done = [*map(as_box, low, width)]
        missing = next((gap for box in pieces for gap in missing_boxes(box, done)), None)
        raise ProofError(
            f'rank {rank} wants {wanted} elements of "{group.name}" and gets {count}: '
            f"box {missing} is missing"
        )


def clipped(starts: Ints, stops: Ints, box: Box) -> tuple[Ints, Ints]:
    """What pieces have in common with a box: low corners and widths."""
    low = np.maximum(starts, np.array(box.start, dtype=np.int64))
    width = np.minimum(stops, np.array(box.stop, dtype=np.int64)) - low
    some = np.flatnonzero((width > 0).all(axis=1))
    return low[some], width[some]


def num_elements(width: Ints) -> int:
    return int(width.prod(axis=1).sum())


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
    arrived: dict[tuple[int, int], set[bytes]] = {}
    for rows in [*mine.receives.rows, *mine.copies.rows]:
        parts = arrived.setdefault((id(rows.flow), rows.transfers.hop), set())
        parts.update(row.tobytes() for row in _table(rows.transfers))
    for rows in mine.sends.rows:
        before = arrived.get((id(rows.flow), rows.transfers.hop - 1), set())
        if rows.transfers.hop and any(
            row.tobytes() not in before for row in _table(rows.transfers)
        ):
            raise ProofError(
                f"rank {mine.rank} passes on a part of {rows.flow.stack.label} "
                "that it has not received before"
            )
