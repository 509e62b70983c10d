"""Why a plan is right: every wanted element is written exactly once, by a rank that holds it.

For all ranks together, line by line (a line is a set of ranks that hold, or want, the same boxes):

1. the parts of every cell make up the whole cell, for all tensors of the stack, without a gap and
   without an overlap; the sender and the relay of a part are on the lines of its cell;
2. every cell is inside a piece of each rank that holds it, and of each rank that wants it, by the
   layouts; cells that one rank wants do not overlap;
3. what each rank gets, copies and fills with zeros is as many elements as its pieces have; so none
   is missing.

Then single ranks are looked at row by row, in ``row_proof``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reshard.errors import MemoryCapError, ProofError
from reshard.layout.box import Box
from reshard.layout.boxlist import piece_columns
from reshard.layout.columns import Ints, SizedCache, blocks, offsets
from reshard.layout.coverage import first_overlapping_rows
from reshard.layout.spec import TensorSpec
from reshard.planning.flows import Flow
from reshard.planning.plans import Plan
from reshard.planning.row_proof import (
    MAX_ROWS,
    ROW_BYTES,
    TensorGroup,
    check_ranks,
    clipped,
    first_outside,
    num_elements,
    tensor_groups,
    without_dims,
    wrong_runs,
)
from reshard.planning.sharing import LineSet, repeated
from reshard.text import format_bytes

AT_ONCE = 1 << 16  # cells of variants that are compared with pieces at once
PiecesOf = Callable[[TensorSpec, int], tuple[Ints, Ints]]


def check_plan(plan: Plan, memory: int) -> None:
    """Prove a plan within so many bytes, or raise an error that names the box that is wrong."""
    needed = _bytes_needed(plan)
    if needed > memory:
        raise MemoryCapError(
            f"the proof of this plan needs about {format_bytes(needed)} and memory= gives it "
            f"{format_bytes(memory)}: raise memory="
        )
    groups, pieces_of = list(tensor_groups(plan)), _pieces_within(memory - needed)
    written = {id(stack): np.zeros(len(plan.world), dtype=np.int64) for stack in plan.stacks}
    for flow in plan.flows:
        _check_parts(flow)
        _check_cells(flow, pieces_of)
        written[id(flow.stack)] += _written(flow, plan.world)
    for group in groups:
        _check_totals(plan, group, written, pieces_of)
    check_ranks(plan, groups)


def _pieces_within(memory: int) -> PiecesOf:
    """The pieces of ranks by spec; as many as fit are kept for stacks with the same layouts."""
    kept: SizedCache[tuple[int, tuple[int, ...], int], tuple[Ints, Ints]] = SizedCache(memory)

    def pieces_of(spec: TensorSpec, rank: int) -> tuple[Ints, Ints]:
        key = (id(spec.layout), spec.shape, rank)
        pieces = kept.get(key)
        if pieces is None:
            pieces = piece_columns(spec.layout, rank, spec.shape)[:2]
            kept.put(key, pieces, 600 + pieces[0].nbytes + pieces[1].nbytes)
        return pieces

    return pieces_of


def _bytes_needed(plan: Plan) -> int:
    """About how much memory the proof takes: the largest flow, and ranks row by row."""
    largest = rows = 0
    for flow in plan.flows:
        cells, members = flow.geometry.num_cells(), len(flow.geometry.wanting.members)
        largest = max(largest, cells * 64 * (len(flow.stack.want.shape) + 4) + 64 * members)
        rows += (cells + members) * flow.most
    return largest + ROW_BYTES * min(rows, MAX_ROWS)


def _check_parts(flow: Flow) -> None:
    """Parts make up their cells, and go from ranks that hold them to ranks that want them."""
    parts, label = flow.parts(), flow.stack.label
    runs = parts.runs.take(np.lexsort((parts.runs.start, parts.runs.cell)))
    new = np.append(True, runs.cell[1:] != runs.cell[:-1])[: len(runs.cell)]
    size = parts.cells.size[runs.cell] * len(flow.stack.names)
    wrong, expected = wrong_runs(new, runs.start, runs.stop, size)
    absent = np.flatnonzero(np.bincount(runs.cell, minlength=len(parts.cells.size)) == 0)
    if len(wrong) or len(absent):
        twice = len(wrong) and runs.start[wrong[0]] < expected[wrong[0]]
        box = parts.cells.box(runs.cell[wrong[0]] if len(wrong) else absent[0])
        raise ProofError(
            f"a part of box {box} of {label} is {'written twice' if twice else 'missing'}"
        )
    lines = [(flow.geometry.receivers, parts.line, parts.destination, "pass on")]
    if not flow.stack.adds:
        lines.append((flow.geometry.senders, parts.send_line, parts.source, "send"))
    for members, line, rank, what in lines:
        stray = np.flatnonzero(members.find(line, rank) < 0)
        if len(stray):
            box = parts.cells.box(parts.runs.cell[stray[0]])
            raise ProofError(
                f"rank {rank[stray[0]]} is to {what} a part of box {box} of {label}, "
                "which is not on its line"
            )


def _check_cells(flow: Flow, pieces_of: PiecesOf) -> None:
    """Every cell is inside a piece of each rank of its two lines, and overlaps no other of them."""
    geometry, stack, feed = flow.geometry, flow.stack, flow.stack.feed
    cells = geometry.all()
    sides = (
        (stack.have, feed.have_insert, cells.send_line, cells.have_low, geometry.senders),
        (stack.want, feed.want_insert, cells.receive_line, cells.want_low, geometry.wanting),
    )
    for spec, insert, line, low, lines in sides:
        low, width = (without_dims(one, insert) for one in (low, cells.width))
        _check_inside(flow, spec, line, low, width, lines, pieces_of)
    line = cells.receive_line[:, None]
    low = np.concatenate([line, cells.want_low], axis=1)
    high = np.concatenate([line + 1, cells.want_low + cells.width], axis=1)
    crossing = first_overlapping_rows(low, high)
    if crossing is not None:
        raise ProofError(f"box {cells.box(crossing[0])} of {stack.label} is written twice")


def _check_inside(
    flow: Flow,
    spec: TensorSpec,
    line: Ints,
    low: Ints,
    width: Ints,
    lines: LineSet,
    pieces_of: PiecesOf,
) -> None:
    """Cells are inside pieces of all ranks of their lines; equal pieces are looked at once."""
    used = np.bincount(line, minlength=len(lines.counts)) > 0
    variants: dict[tuple[int, bytes], tuple[int, Ints, Ints]] = {}
    for at, rank in zip(lines.line_of.tolist(), lines.members.tolist(), strict=True):
        if used[at]:
            starts, stops = pieces_of(spec, rank)
            variants.setdefault((at, starts.tobytes() + stops.tobytes()), (rank, starts, stops))
    if not variants:
        return
    first = offsets(np.bincount([at for at, _ in variants], minlength=len(used)))
    ranks, *boxes = zip(*variants.values(), strict=True)
    number = np.repeat(np.arange(len(ranks)), [len(one) for one in boxes[0]])[:, None]
    starts = np.concatenate([number, np.concatenate(boxes[0])], axis=1)
    stops = np.concatenate([number + 1, np.concatenate(boxes[1])], axis=1)
    # One more dim keeps variants apart; a cell is looked at once for each variant of its line.
    for some in blocks(np.diff(first)[line], AT_ONCE):
        row, variant = repeated(first, line[some.start : some.stop])
        row += some.start
        lows = np.concatenate([variant[:, None], low[row]], axis=1)
        widths = np.concatenate([np.ones_like(variant)[:, None], width[row]], axis=1)
        outside = first_outside(lows, widths, starts, stops)
        if outside is not None:
            rank, box = ranks[outside.start[0]], Box(outside.start[1:], outside.stop[1:])
            what = "holds" if spec is flow.stack.have else "wants"
            raise ProofError(
                f"no piece that rank {rank} {what} contains box {box} of {flow.stack.label}"
            )


def _written(flow: Flow, world: Ints) -> Ints:
    """Elements of all tensors of a stack that each rank gets or copies."""
    total = np.zeros(len(world), dtype=np.int64)
    ranks, elements = flow.geometry.copied_elements()
    counted = [(ranks, elements * len(flow.stack.names))]
    if flow.stack.adds:
        parts = flow.accumulated()
        counted = [(parts.destination, parts.sizes)]
    for stream in flow.streams():
        if stream.rows.hop or not flow.stack.adds:
            counted.append(stream.received(stream.rows.sizes))
    for ranks, elements in counted:
        np.add.at(total, np.searchsorted(world, ranks), elements)
    return total


def _check_totals(
    plan: Plan, group: TensorGroup, written: dict[int, Ints], pieces_of: PiecesOf
) -> None:
    """Every rank writes as many elements of a tensor as it wants."""
    total = np.zeros(len(plan.world), dtype=np.int64)
    for stack in plan.stacks:
        if id(stack) in group.stacks:
            total += written[id(stack)] // len(stack.names)
    for rank, count in zip(plan.world.tolist(), total.tolist(), strict=True):
        starts, stops = pieces_of(group.spec, rank)
        wanted = num_elements(stops - starts)
        count += sum(num_elements(clipped(starts, stops, box)[1]) for box in group.fills)
        if count != wanted:
            raise ProofError(
                f'rank {rank} wants {wanted} elements of "{group.name}" and gets {count}'
            )
