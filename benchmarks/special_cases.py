"""What each special case of the live engine gains on its own: the same move with it on and off.

    python benchmarks/special_cases.py [--ranks 4] [--repeat 9] [--quick] [--json] [--only WORD]

Every case runs both variants in turn, again and again, on the same ranks of one host. A figure is
the median over repetitions of the slowest rank, and of the CPU seconds of all ranks. A special case
that gains less than a tenth in both should be deleted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from side_by_side import arguments, run_ranks, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard as rs
from reshard.live.copy import host as host_copy
from reshard.live.copy import reduce
from reshard.live.inputs import bound
from reshard.live.program import messages, rounds
from reshard.live.program.messages import Policy
from reshard.live.transport import gloo, host
from reshard.tensors import agreement
from reshard.tensors.dtensor import redistribution

GAIN = 1.1

Run = Callable[[], object]
Patch = Callable[[], AbstractContextManager[object]]


@dataclass
class Case:
    """A move with a special case switched on and off."""

    name: str
    on: Run
    off: Run
    patch: Patch
    """Switches the special case off; entered before the time is taken."""
    burst: int


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    args = parser.parse_args()
    run_ranks(args.ranks, on_a_rank, args)


def on_a_rank(rank: int, args: argparse.Namespace) -> None:
    cases = (case for make in CASES for case in make(args.ranks, args.quick))
    repeat = 3 if args.quick else args.repeat
    tell((measured(case, repeat) for case in cases if args.only in case.name), rank, args.json)


def measured(case: Case, repeat: int) -> dict[str, Any]:
    runs_by = {"on": (case.on, nullcontext), "off": (case.off, case.patch)}
    seconds: dict[str, list[float]] = {name: [] for name in runs_by}
    cpu: dict[str, list[float]] = {name: [] for name in runs_by}
    for turn in range(repeat + 2):
        for name in sorted(runs_by, reverse=turn % 2 == 0):
            run, patch = runs_by[name]
            with patch():
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                for _ in range(case.burst):
                    run()
                took = torch.tensor((time.perf_counter() - began) / case.burst)
                used = torch.tensor((time.process_time() - spent) / case.burst)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(used)
            if turn > 1:
                seconds[name].append(float(took))
                cpu[name].append(float(used))
    medians, spent_by = (
        {name: statistics.median(times) for name, times in all_times.items()}
        for all_times in (seconds, cpu)
    )
    gains = {"time": medians["off"] / medians["on"], "CPU time": spent_by["off"] / spent_by["on"]}
    best = max(gains.values())
    checks = [{"what": f"{what}, off / on", "is": gain, "holds": best >= GAIN}
              for what, gain in gains.items()]  # fmt: skip
    return {"name": case.name, "seconds": medians, "cpu_seconds": spent_by, "checks": checks}


def case_of(
    name: str,
    make: Callable[[], rs.Plan],
    tensors: Any,
    into: Any,
    patch: Patch,
    burst: int,
    **options: Any,
) -> Case:
    """Two equal plans, each with what is compiled for it, on tensors of their own."""
    on, off = make(), make()
    copies = [
        {key: tensor.clone() for key, tensor in side.items()} if side else None
        for side in (tensors, into)
    ]
    return Case(
        name,
        lambda: on.run(tensors, into=into, **options),
        lambda: off.run(copies[0], into=copies[1], **options),
        patch,
        burst,
    )


def patched(target: object, name: str, value: object) -> Patch:
    return lambda: mock.patch.object(target, name, value, create=True)


def layouts(num: int) -> tuple[rs.Layout, ...]:
    mesh = rs.Mesh(x=num)
    return tuple(rs.Layout(mesh, words) for words in ("x -", "- x", "- -"))


def square(num: int, side: int) -> tuple[Callable[[], rs.Plan], dict[str, Any], dict[str, Any]]:
    """A square tensor from rows to columns."""
    rows, columns, _ = layouts(num)
    return (
        lambda: rs.plan(rows, columns, shape=(side, side), dtype="float32"),
        {"tensor": torch.randn(side // num, side)},
        {"tensor": torch.empty(side, side // num)},
    )


def many(num: int, count: int) -> tuple[Callable[[], rs.Plan], dict[str, Any], dict[str, Any]]:
    """Many small tensors from rows to columns."""
    rows, columns, _ = layouts(num)
    sides = [
        {f"t{n}": rs.TensorSpec((64, 64), "float32", layout) for n in range(count)}
        for layout in (rows, columns)
    ]
    return (
        lambda: rs.plan(*sides),
        {name: torch.randn(64 // num, 64) for name in sides[0]},
        {name: torch.empty(64, 64 // num) for name in sides[0]},
    )


def large(num: int, quick: bool) -> Iterator[Case]:
    side = 1024 if quick else 4096
    off = patched(bound, "are_huge_pages_on_request", lambda: False)
    yield case_of("huge pages: 64 MiB into=", *square(num, side), off, 4)
    rows, columns = rs.Layout(rs.Mesh(x=num), "x -"), rs.Layout(rs.Mesh(x=num), "x~ -")

    def make() -> rs.Plan:
        return rs.plan(rows, columns, shape=(side, side), dtype="float32")

    tensors, into = ({"tensor": torch.randn(side // num, side)} for _ in range(2))
    off = patched(gloo, "GLOO", Policy(eager_bytes=1 << 60))
    name = "large blocks over gloo without staging: 64 MiB"
    yield case_of(name, make, tensors, into, off, 2, transport="network")


def small(num: int, quick: bool) -> Iterator[Case]:
    make, tensors, _ = square(num, 64)
    off = patched(rounds, "MAX_DEFERRED_BYTES", 0)
    name = "eager messages whose sender does not wait: 16 KiB"
    yield case_of(name, make, tensors, None, off, 50)
    off = patched(messages.Message, "is_eager", property(lambda _: False))
    yield case_of("eager messages with the Hello: 16 KiB", make, tensors, None, off, 50)
    off = patched(host_copy, "FEW_BLOCKS", 0)
    name = "few blocks copied in a loop over plain numbers: 16 KiB"
    yield case_of(name, make, tensors, None, off, 50)
    off = patched(host, "HOST", Policy(eager_bytes=-1))
    yield case_of("eager messages instead of rendezvous: 16 KiB", make, tensors, None, off, 50)


def equal_messages(num: int, quick: bool) -> Iterator[Case]:
    """Rows to whole tensors: every rank sends the same to all others."""
    rows, _, whole = layouts(num)
    off = patched(messages.Message, "content", property(lambda _: object()))
    for side in (512, 1024, 1792):

        def make(side: int = side) -> rs.Plan:
            return rs.plan(rows, whole, shape=(side, side), dtype="float32")

        tensors = {"tensor": torch.randn(side // num, side)}
        name = f"equal messages to several peers packed once: {side}x{side}"
        yield case_of(name, make, tensors, None, off, 20)


def many_blocks(num: int, quick: bool) -> Iterator[Case]:
    for count in (100, 400):
        move = many(num, count)
        off = patched(host_copy, "MAX_KEPT", 0)
        yield case_of(f"arrays of strided blocks kept: {count} x 16 KiB", *move, off, 5)
    off = patched(bound.Locals, "disjoint", property(lambda _: None, lambda _, value: None))
    yield case_of("overlaps checked once: 400 x 16 KiB", *move, off, 5)
    off = patched(bound.AcceptedTensors, "bind", lambda *_: False)
    yield case_of("tensors accepted like those before: 400 x 16 KiB", *move, off, 5)

    def allocator_on(device: torch.device) -> Any:
        return lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )

    off = patched(bound, "_allocator_on", allocator_on)
    name = "tensors allocated as compiled code does: 400 x 16 KiB"
    yield case_of(name, move[0], move[1], None, off, 5)


def strided(num: int, quick: bool) -> Iterator[Case]:
    """A large tensor, and a small one that is not contiguous."""
    rows, columns, _ = layouts(num)
    side = 1024 if quick else 4096
    shapes = {"large": (side, side), "small": (64, 64)}
    sides = [
        {name: rs.TensorSpec(shape, "float32", layout) for name, shape in shapes.items()}
        for layout in (rows, columns)
    ]
    tensors = {"large": torch.randn(side // num, side), "small": torch.randn(64, 64 // num).t()}
    into = {"large": torch.empty(side, side // num), "small": torch.empty(64 // num, 64).t()}

    def all_or_nothing(self: Any, peer: int, base: Any, masked: bool, own: bool) -> bool:
        if own:
            return bool(self.bound.is_plain)
        return not (masked and self.watch.inbox.hellos[peer].strided)

    off = patched(host.HostTransport, "_may_touch", all_or_nothing)
    name = "plain tensors beside one that is not contiguous read directly: 64 MiB"
    yield case_of(name, lambda: rs.plan(*sides), tensors, into, off, 4)


def without_a_plan(num: int, quick: bool) -> Iterator[Case]:
    """Calls besides those of `plan.run`: repeated moves of DTensors, and agreements."""
    mesh = init_device_mesh("cpu", (num,))
    local = torch.randn(32, 32)
    off = patched(redistribution, "repeat", lambda *_: None)
    for have, want in ((Replicate(), Shard(0)), (Shard(0), Shard(1))):
        tensor = DTensor.from_local(local, mesh, [have])
        run = partial(rs.move, tensor, to=(mesh, [want]))
        yield Case(f"moves of DTensors kept: 32 x 32, {have} to {want}", run, run, off, 50)
    run = partial(agreement.Agreement(None, "a benchmark").gather, [1, 2, 3])
    off = patched(agreement, "gather_bytes", lambda *_, **__: None)
    yield Case("agreement on one host without a plan: 7 bytes", run, run, off, 50)


def tiny_runs(num: int, quick: bool) -> Iterator[Case]:
    rows, columns, _ = layouts(num)
    side = 1 << 22
    shape = (side, num)

    def make() -> rs.Plan:
        return rs.plan(rows, columns, shape=shape, dtype="float32")

    tensors, into = {"tensor": torch.randn(side // num, num)}, {"tensor": torch.empty(side, 1)}
    off = patched(messages, "NS_PER_LOOPED_RUN", 1 << 30)
    yield case_of("runs of 4 bytes staged instead of read: 64 MiB", make, tensors, into, off, 2)


def sums(num: int, quick: bool) -> Iterator[Case]:
    side = 512 if quick else 2048
    meshes = rs.Mesh(x=num), rs.Mesh(x=2, y=num // 2)
    have, want = rs.Layout(meshes[0], "- - | sum x"), rs.Layout(meshes[0], "x -")
    pair = rs.Layout(meshes[1], "- y | sum x"), rs.Layout(meshes[1], "x y")

    def line() -> AbstractContextManager[object]:
        return mock.patch.multiple(reduce, MIN_BLOCK=1 << 60, FEW_BLOCKS=0)

    for dtype in ("float32", "bfloat16"):
        kind = getattr(torch, dtype)
        tensors = {"tensor": torch.randn(side, side).to(kind)}
        into = {"tensor": torch.empty(side // num, side, dtype=kind)}
        move = (lambda t=dtype: rs.plan(have, want, shape=(side, side), dtype=t)), tensors, into
        yield case_of(f"sums block by block: {dtype} {side}x{side}", *move, line, 4)
        off = patched(reduce, "SLICE_BYTES", 1 << 40)
        yield case_of(f"sums in slices: {dtype} {side}x{side}", *move, off, 4)
    tensors = {"tensor": torch.randn(side, 2 * side // num)}
    into = {"tensor": torch.empty(side // 2, 2 * side // num)}

    def plain(op: str, dtype: str, total: Any, addends: Any) -> int:
        both = reduce.np.empty(total.shape, total.dtype)
        reduce.OPS[op](addends[0], addends[1], out=both)
        total[...] = both
        return both.nbytes

    def make() -> rs.Plan:
        return rs.plan(*pair, shape=(side, side), dtype="float32")

    off = patched(reduce, "add_up", plain)
    yield case_of("two addends without an accumulator: 16 MiB", make, tensors, into, off, 4)


CASES = (large, small, equal_messages, many_blocks, strided, without_a_plan, tiny_runs, sums)


if __name__ == "__main__":
    main()
