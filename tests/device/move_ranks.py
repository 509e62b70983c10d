"""One rank of a test of moves between GPUs; see `test_nccl_moves`.

    RANK=0 PORT=... BACKEND=nccl python -m tests.device.move_ranks pairs sums ...

Four ranks share one GPU: NCCL takes them for 4 hosts because each has a ``NCCL_HOSTID`` of its own.
RESHARD_TRANSPORT is the transport; with STAND_IN=1 there is no GPU at all.
"""

import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live import call
from reshard.live.call import Call
from reshard.live.failure.cleanup import with_ticket
from reshard.live.inputs.request import options_from
from reshard.live.session.shared_memory import LAST_STEP, REACHED
from reshard.live.transport import nccl
from reshard.live.transport.gpu_peer import GpuPeerTransport
from reshard.live.transport.gpu_pulls import GpuWork
from reshard.live.transport.nccl import NcclTransport
from reshard.show.run_report import RunReport
from tests import checks, generate, moves, soak, state_cases
from tests.device import stand_in
from tests.tensors import adjoint

SIZE = 4
RANK = int(os.environ.get("RANK", "0"))
BACKEND = os.environ.get("BACKEND", "nccl")
STAND_IN = bool(os.environ.get("STAND_IN"))
PEER_MEMORY = os.environ.get("RESHARD_TRANSPORT") == "gpu_peer"
BY_GPU = STAND_IN or os.environ.get("RESHARD_TRANSPORT") in ("gpu_peer", "nccl")
DEVICE = torch.device("cpu") if STAND_IN else torch.device("cuda", 0)
NUM_CASES = int(os.environ.get("NUM_CASES", "130"))
GRID, LINE = rs.Mesh(dp=2, tp=2), rs.Mesh(tp=4)
HALF, REST = rs.Mesh(tp=2, ranks=[0, 1]), rs.Mesh(tp=2, ranks=[2, 3])


def on_gpu(array: np.ndarray, dtype: str, device: torch.device = DEVICE) -> torch.Tensor:
    """An array of the simulator as a tensor on the device."""
    kind: torch.dtype = getattr(torch, dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=kind, device=device)
    return torch.from_numpy(np.array(array, order="C")).view(kind).to(device)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(found: Any, wanted: Any, hint: object = "") -> None:
    """Tensors are what the simulator says, to the last bit."""
    assert found.keys() == wanted.keys(), (hint, sorted(found), sorted(wanted))
    for name, array in wanted.items():
        assert tuple(found[name].shape) == array.shape, (hint, name)
        assert bits(found[name]) == array.tobytes(), (hint, name, found[name], array)


def specs_of(full: dict[str, np.ndarray], layout: rs.Layout, dtypes: Any) -> Any:
    return {
        name: rs.TensorSpec(
            array.shape, dtypes if isinstance(dtypes, str) else dtypes[name], layout
        )
        for name, array in full.items()
    }


def check_group() -> None:
    """The caller's group works as before."""
    ones = torch.ones(1, device=DEVICE)
    dist.all_reduce(ones)
    assert ones.item() == SIZE


def meet(name: str) -> None:
    """All ranks have come this far."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"test/{name}/{RANK}", "here")
    store.wait([f"test/{name}/{rank}" for rank in range(SIZE)])


@contextmanager
def fails(kind: type[Exception], *words: str, within: float = 30) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except kind as error:
        found: Exception | None = error
    else:
        found = None
    assert found is not None, f"{kind.__name__} was not raised"
    missing = [word for word in words if word not in str(found)]
    assert not missing, f"{missing} not in: {found}"
    # The stand-in runs beside other tests, on a machine that may be busy.
    limit = soak.within(within) if STAND_IN else within
    assert time.monotonic() - start < limit, time.monotonic() - start


def case_of(seed: int, states: bool) -> Any:
    """A plan, what every rank gives, and what it must get; None where planning is an error."""
    rng = Random(seed)
    if states:
        case = state_cases.random_state(rng, range(SIZE))
        options = {} if case.memory is None else {"memory": case.memory}
        have, want = state_cases.specs(case.have), state_cases.specs(case.want)
        plan = rs.plan(have, want, names=state_cases.names_argument(case), **options)
        given = moves.given(plan.have, state_cases.values(case))
    else:
        case = generate.random_case(rng, within=range(SIZE))
        if case.error is not None:
            return None
        plan = checks.plan_case(case)
        local = checks.arrays(case.have, case.shape, checks.source_values(case))
        given = {rank: {"tensor": array} for rank, array in local.items()}
    return plan, given, rs.simulate(plan, given)


def run_cases(num: int, states: bool) -> None:
    count = 0
    for seed in range(num):
        made = case_of(seed, states)
        if made is None or RANK not in made[0].ranks:
            continue
        plan, given, expected = made
        tensors = {
            name: on_gpu(array, plan.have[name].dtype)
            for name, array in given.get(RANK, {}).items()
        }
        if seed % 5 == 0:
            handle = plan.start(tensors, timeout=20, device=DEVICE)
            out, report = handle.wait(), handle.report
        else:
            out, report = run_with_report(plan, tensors)
        same(out, expected.get(RANK, {}), (seed, states))
        assert report.peak_staging <= plan.memory, seed
        if seed % 3 == 0:  # again, with what is kept, into tensors of other strides
            into = {
                name: strided(on_gpu(array, plan.want[name].dtype))
                for name, array in expected.get(RANK, {}).items()
            }
            same(plan.run(tensors, into=into, timeout=20), expected.get(RANK, {}), (seed, "into"))
        count += 1
    print(f"{count} {'states' if states else 'pairs'} on rank {RANK}")


def run_with_report(plan: rs.Plan, tensors: Any) -> tuple[dict[str, torch.Tensor], RunReport]:
    """`plan.run`, in this thread, and the report that a handle would have."""
    report, options = RunReport(RANK, -1, plan.digest), options_from({"timeout": 20}, DEVICE)

    def move(ticket: Any) -> dict[str, torch.Tensor]:
        return Call(ticket, plan, tensors, None, options, report=report).run()

    return with_ticket(None, lambda: plan.parties, move), report


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape, with other strides."""
    sizes = [1 + size * 2 for size in tensor.shape]
    memory = torch.zeros(sizes, dtype=tensor.dtype, device=tensor.device)
    return memory[tuple(slice(1, None, 2) for _ in sizes)]


def pairs() -> None:
    """Random pairs of layouts, sums and boxes among them, equal what the simulator gives."""
    run_cases(NUM_CASES, states=False)


def states() -> None:
    """State dicts with joined, stacked, padded and cast tensors equal the simulator."""
    run_cases(NUM_CASES // 3, states=True)


def casts() -> None:
    """A state dict whose dtypes change; what replicas pass on has been cast already."""
    pairs_ = [
        *[("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")],
        *[("float64", "float32"), ("int64", "int32"), ("float32", "float8_e4m3fn")],
        *[("bool", "int32"), ("uint8", "float16"), ("complex64", "float32"), ("int32", "int64")],
    ]
    for text in ("- tp", "- -", "tp:2 -"):
        full, have, want = {}, {}, {}
        for source, target in pairs_:
            name = f"{source} to {target}"
            full[name] = (torch.arange(66) % 13).reshape(6, 11).to(getattr(torch, source))
            have[name] = rs.TensorSpec((6, 11), source, rs.Layout(GRID, "(dp tp) -"))
            want[name] = rs.TensorSpec((6, 11), target, rs.Layout(LINE, text))
        plan = rs.plan(have, want)
        given = {name: local(tensor, have[name].layout) for name, tensor in full.items()}
        out = plan.run({name: tensor.to(DEVICE) for name, tensor in given.items()})
        for name, tensor in full.items():
            kind = getattr(torch, want[name].dtype)
            real = tensor.real if tensor.is_complex() and not kind.is_complex else tensor
            assert bits(out[name]) == bits(local(real.to(kind), want[name].layout)), (name, text)


def local(full: torch.Tensor, layout: rs.Layout, rank: int = RANK) -> torch.Tensor:
    """What a rank holds of a tensor, by the oracle."""
    at = torch.from_numpy(moves.held(layout, tuple(full.shape))[rank])
    return full.reshape(-1)[at.reshape(-1)].reshape(at.shape)


def sums() -> None:
    """Every operation and dtype, added up in the order of addends, as the simulator does."""
    rng = np.random.default_rng(7)
    ops = ("sum", "avg", "max", "min", "prod")
    kinds = [*("float32", "float64", "int32", "int64", "uint8", "int16"), *("uint16", "uint32")]
    wants = (rs.Layout(LINE, "tp -"), rs.Layout(GRID, "- -"), rs.Layout(REST, "tp -"))
    # Over a stand-in every operation has some of the dtypes, and every dtype some operation.
    every = 1 if soak.soaking() or not STAND_IN else 4
    for turn, op in enumerate(ops):
        for number, kind in enumerate([*kinds, *(["bool"] if op != "avg" else [])]):
            if (number - turn) % every:
                continue
            have, want = rs.Layout(GRID, f"- tp | {op} dp"), wants[(turn + number) % 3]
            plan = rs.plan(have, want, shape=(6, 10), dtype=kind)
            draw = rng.random((4, 6, 5)) * (2 if kind == "bool" else 9)
            given = {rank: {"tensor": draw[rank].astype(kind)} for rank in range(4)}
            expected = rs.simulate(plan, given).get(RANK, {})
            tensors = {"tensor": on_gpu(given[RANK]["tensor"], kind)}
            same(plan.run(tensors), expected, (op, kind, str(want)))
    halves(rng)


def halves(rng: np.random.Generator) -> None:
    """bfloat16 and float16 are added up in float32, and rounded once."""
    for kind in (torch.bfloat16, torch.float16):
        name = str(kind).removeprefix("torch.")
        addends = [torch.from_numpy(rng.standard_normal((8, 12))).to(kind) for _ in range(4)]
        total = addends[0].float()
        for addend in addends[1:]:
            total += addend.float()
        for target in (kind, torch.float32):
            spec = rs.TensorSpec((8, 12), name, rs.Layout(LINE, "- - | sum tp"))
            to = rs.TensorSpec((8, 12), str(target), rs.Layout(LINE, "tp -"))
            out = rs.plan({"w": spec}, {"w": to}).run({"w": addends[RANK].to(DEVICE)})["w"]
            assert bits(out) == bits(local(total.to(target), to.layout)), (kind, target)


def large() -> None:
    """Blocks that go straight, and memory within the cap."""
    full = torch.arange(8 << 20, dtype=torch.int32).reshape(2048, 4096)
    rows, columns = full.chunk(4, 0)[RANK], full.chunk(4, 1)[RANK]
    halves_, swapped = [*full.chunk(2, 0), None, None][RANK], full.chunk(4, 0)[[0, 2, 1, 3][RANK]]
    line, grid = rs.Layout(LINE, "tp -"), rs.Layout(GRID, "(tp dp) -")
    sum_ = rs.Layout(LINE, "- - | sum tp")
    peaks = []
    for have, want, mine, right, memory in (
        (line, rs.Layout(LINE, "- tp"), rows, columns, 4 << 20),
        (line, rs.Layout(LINE, "- -"), rows, full, 4 << 20),
        (line, rs.Layout(HALF, "tp -"), rows, halves_, 4 << 20),
        (rs.Layout(LINE, "- tp"), grid, columns, swapped, 16 << 20),
        (sum_, line, full, rows * 4, 8 << 20),
    ):
        plan = rs.plan(have, want, shape=(2048, 4096), dtype="int32", memory=memory)
        given = {"tensor": mine.contiguous().to(DEVICE)}
        into = {} if right is None else {"tensor": torch.zeros_like(right, device=DEVICE)}
        for _ in range(2):
            peak = measured(plan, given, into)
            if right is not None:
                assert torch.equal(into["tensor"].cpu(), right), str(want)
                into["tensor"].zero_()
        peaks.append((peak, memory))
    print(f"rank {RANK}: peak bytes and caps {peaks}")
    assert all(peak <= cap for peak, cap in peaks), peaks


def measured(plan: rs.Plan, given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> int:
    """The most bytes of GPU memory that a move asked for besides what there was.

    Not what the allocator gave: out of its cache that may be a block up to 1 MiB larger.
    """
    plan.release()
    if STAND_IN:
        plan.run(given, into=into, sync=True)
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    plan.run(given, into=into, sync=True)
    peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return peak - before


def gathers() -> None:
    """Where all ranks send the same to all others, it is an all-gather: values to the last bit."""
    if os.environ["RESHARD_TRANSPORT"] != "nccl":
        return
    before, nccl.GATHER_BYTES = nccl.GATHER_BYTES, 0
    cut = [rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp"), rs.Layout(GRID, "(tp dp) -")]
    full = torch.arange(48.0 * 64).reshape(48, 64)
    whole = rs.Layout(GRID, "- -")
    for memory in ("256MiB", "16KiB"):
        have = {f"w{n}": rs.TensorSpec((48, 64), "float32", one) for n, one in enumerate(cut)}
        want = {
            name: rs.TensorSpec((48, 64), kind, whole)
            for name, kind in zip(have, ("float32", "bfloat16", "float32"), strict=True)
        }
        plan = rs.plan(have, want, memory=memory)
        given = {n: (local(full, one.layout) + len(n)).to(DEVICE) for n, one in have.items()}
        given["w1"] = given["w1"].t().contiguous().t()  # strided on this side
        before_, rounds = stand_in.StandInGroup.num_gathers, plan.num_rounds
        for _ in range(3):
            out = plan.run(given)
            for name, spec in want.items():
                kind = getattr(torch, spec.dtype)
                assert torch.equal(out[name].cpu(), (full + 2).to(kind)), (name, memory)
        assert (rounds > 3) == (memory == "16KiB"), rounds
        assert not STAND_IN or stand_in.StandInGroup.num_gathers == before_ + 3 * rounds
    nccl.GATHER_BYTES = before
    large = torch.arange(6 << 20, dtype=torch.int32).reshape(4096, 1536)
    rows = large.chunk(4, 0)
    parts = (rows[RANK], large.chunk(4, 1)[RANK].contiguous(), rows[[0, 2, 1, 3][RANK]])
    for have_, mine in zip(cut, parts, strict=True):  # 6 MiB per rank
        plan = rs.plan(have_, whole, shape=large.shape, dtype="int32")
        out = plan.run({"tensor": mine.to(DEVICE)}, sync=True)["tensor"]
        assert torch.equal(out.cpu(), large), str(have_)


def given_ways() -> None:
    """into=, atomic, donate, strides, tied destinations, padding, tensors without dims."""
    full = torch.arange(48.0).reshape(8, 6)
    have, want = rs.Layout(GRID, "dp tp"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 6), dtype="float32")
    mine, expected = local(full, have), local(full, want)
    for source in (mine.to(DEVICE), mine.t().contiguous().t().to(DEVICE)):
        for options in ({}, {"atomic": True}, {"check": "always"}):
            into = strided(expected.to(DEVICE))
            out = plan.run({"tensor": source}, into={"tensor": into}, **options)
            assert out["tensor"] is into
            assert torch.equal(into.cpu(), expected)
    given = mine.clone().to(DEVICE)
    out = plan.run({"tensor": given}, donate=True)["tensor"]
    assert torch.equal(out.cpu(), expected)
    assert given.untyped_storage().nbytes() == 0
    with fails(rs.TensorError, "overlap"):
        one = torch.zeros(1, device=DEVICE).expand(expected.shape)
        plan.run({"tensor": mine.to(DEVICE)}, into={"tensor": one})
    names = {"w": rs.take("v", pad={0: 13})}
    spec = rs.TensorSpec((8, 6), "float32", have)
    to = rs.TensorSpec((13, 6), "float32", rs.Layout(LINE, "tp -"))
    padded = torch.nn.functional.pad(full, (0, 0, 0, 5))
    out = rs.plan({"v": spec}, {"w": to}, names=names).run({"v": mine.to(DEVICE)})["w"]
    assert torch.equal(out.cpu(), local(padded, to.layout))
    one = rs.plan(rs.Layout(LINE, "... | on tp=2"), rs.Layout(GRID, "..."), shape=(), dtype="int64")
    for _ in range(3):  # what is kept for the next call keeps no tensor alive
        source = mine.clone().to(DEVICE)
        gone = weakref.ref(source)
        assert torch.equal(plan.run({"tensor": source}, sync=True)["tensor"].cpu(), expected)
        del source
        end = time.monotonic() + 5
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.01)  # the thread that watches GPU work has just seen that it is done
        assert gone() is None
    seven = torch.tensor(7, device=DEVICE)
    assert one.run({"tensor": seven} if RANK == 2 else {}, device=DEVICE)["tensor"].item() == 7


def disjoint() -> None:
    """From some ranks to others, who hold nothing."""
    full = torch.arange(60.0).reshape(10, 6)
    have, want = rs.Layout(HALF, "tp -"), rs.Layout(REST, "- tp")
    for _ in range(3):
        mine = local(full, have).to(DEVICE) if RANK < 2 else None
        device = None if BACKEND == "nccl" and not STAND_IN else DEVICE
        out = rs.move(mine, have, want, shape=(10, 6), dtype="float32", device=device)
        assert (out is None) == (RANK < 2)
        if out is not None:
            assert out.device.type == DEVICE.type
            assert torch.equal(out.cpu(), local(full, want))


def in_flight() -> None:
    """Many moves at the same time, and some that do not wait for them."""
    full = torch.arange(4096.0).reshape(64, 64)
    layouts = [rs.Layout(LINE, text) for text in ("tp -", "- tp", "tp:2 -", "- -")]
    plans = [
        rs.plan(have, want, shape=(64, 64), dtype="float32")
        for have in layouts[:3]
        for want in layouts
        if have is not want
    ]
    handles = []
    for number, plan in enumerate([*plans, *plans]):
        mine = (local(full, plan.have["tensor"].layout) + number).to(DEVICE)
        handles.append((number, plan, plan.start({"tensor": mine})))
        if number % 4 == 3:
            out = plan.run({"tensor": mine})["tensor"]
            assert torch.equal(out.cpu(), local(full + number, plan.want["tensor"].layout))
    for number, plan, handle in reversed(handles):
        out = handle.wait()["tensor"]
        assert torch.equal(out.cpu(), local(full + number, plan.want["tensor"].layout)), number
        assert handle.done()
    rs.check()


def overtaken() -> None:
    """A call whose thread is late on one rank: the next call must not enqueue before it there."""
    full = torch.arange(64.0).reshape(8, 8)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plans = [
        rs.plan(by, to, shape=(8, 8), dtype="float32") for by, to in ((have, want), (want, have))
    ]
    given = [
        {"tensor": (local(full, plan.have["tensor"].layout) + n).to(DEVICE)}
        for n, plan in enumerate(plans)
    ]
    for plan, tensors in zip(plans, given, strict=True):
        plan.run(tensors, sync=True)
    meet("overtaken")
    run = Call._run

    def run_late(call: Call, compiled: Any) -> Any:
        if RANK == 3 and call.plan is plans[0]:
            time.sleep(0.5)
        return run(call, compiled)

    Call._run = run_late  # type: ignore[method-assign]
    handles = [plan.start(tensors) for plan, tensors in zip(plans, given, strict=True)]
    for n, (plan, handle) in enumerate(zip(plans, handles, strict=True)):
        out = handle.wait()["tensor"]
        assert torch.equal(out.cpu(), local(full, plan.want["tensor"].layout) + n), n
    Call._run = run  # type: ignore[method-assign]


def crossed() -> None:
    """Moves of two sets of ranks at once: each rank enqueues them in an order of its own."""
    full = torch.arange(64.0).reshape(8, 8)
    half = HALF if RANK < 2 else REST
    plans = [
        rs.plan(rs.Layout(mesh, "tp -"), rs.Layout(mesh, "- tp"), shape=(8, 8), dtype="float32")
        for mesh in (LINE, half)
    ]
    for number in range(30):
        handles = []
        for plan in plans:
            mine = local(full, plan.have["tensor"].layout) + number
            handles.append(plan.start({"tensor": mine.to(DEVICE)}, timeout=10))
        for plan, handle in zip(plans, handles, strict=True):
            right = local(full, plan.want["tensor"].layout) + number
            assert torch.equal(handle.wait()["tensor"].cpu(), right), number


def streams() -> None:
    """Work before and after a move keeps its place, on any stream, and the host waits for none."""
    if STAND_IN or not BY_GPU:
        return
    side = 1024
    plan = rs.plan(
        rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp"), shape=(side, side), dtype="float32"
    )
    mine = torch.zeros(side // 4, side, device=DEVICE)
    into = torch.zeros(side, side // 4, device=DEVICE)
    full = torch.arange(float(side * side), device=DEVICE).reshape(side, side)
    plan.run({"tensor": mine}, into={"tensor": into}, sync=True)
    meet("warm")
    hosts = []
    for number, stream in enumerate([torch.cuda.current_stream(), torch.cuda.Stream()] * 2):
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            mine.copy_(full[RANK * side // 4 : (RANK + 1) * side // 4] + number)
            start = time.perf_counter()
            plan.run({"tensor": mine}, into={"tensor": into})
            hosts.append(time.perf_counter() - start)
            mine.fill_(-1)  # the source may be changed
            found = into.clone()
            into.fill_(-2)
            right = full[:, RANK * side // 4 : (RANK + 1) * side // 4] + number
            assert torch.equal(found, right), number
        torch.cuda.synchronize()
        meet(f"stream {number}")
    handle = None
    for number in range(3):
        torch.cuda._sleep(100_000_000)
        mine.copy_(full[RANK * side // 4 : (RANK + 1) * side // 4] + number)
        handle = plan.start({"tensor": mine})
        out = handle.wait()["tensor"]
        assert torch.equal(out, full[:, RANK * side // 4 : (RANK + 1) * side // 4] + number)
    print(f"rank {RANK}: seconds on the host {[f'{s:.4f}' for s in hosts]}")
    assert min(hosts) < 0.05, hosts


def dtensors() -> None:
    """rs.move of DTensors equals redistribute, on meshes of the device, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    line = init_device_mesh(DEVICE.type, (4,))
    grid = init_device_mesh(DEVICE.type, (2, 2))
    full = torch.arange(1, 97.0, device=DEVICE).reshape(8, 12)
    ways = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    grids = [
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(1), Replicate()]),
    ]
    for group in (ways, grids):
        for mesh, placements in group:
            for _, other in group:
                tensor = distribute_tensor(full, mesh, placements)
                moved = rs.move(tensor, to=(mesh, other))
                right = tensor.redistribute(mesh, other)
                assert torch.equal(moved.to_local(), right.to_local()), (placements, other)
    moved = rs.move(distribute_tensor(full, line, [Shard(0)]), to=(grid, [Shard(1), Shard(0)]))
    assert torch.equal(moved.full_tensor(), full)
    leaf = distribute_tensor(full, line, [Shard(0)]).requires_grad_()
    out = rs.move(leaf, to=(line, [Shard(1)]))
    (out * out).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), 2 * full)
    assert leaf.grad.placements == (Shard(0),)
    partial = rs.move(
        torch.distributed.tensor.DTensor.from_local(full * (RANK + 1), line, [Partial()]),
        to=(line, [Shard(0)]),
    )
    assert torch.equal(partial.full_tensor(), full * 10)


def gradients() -> None:
    """The loss is the sum of all ranks' losses: gradients of all replicas are added up."""
    full = torch.arange(24.0).reshape(4, 6)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(GRID, "- tp")
    leaf = local(full, have).to(DEVICE).requires_grad_()
    out = rs.move(leaf, have, want, shape=(4, 6))
    (out * (RANK + 1)).sum().backward()
    # Columns of the first half are on ranks 0 and 2, of the second on ranks 1 and 3.
    right = torch.tensor([4.0, 4, 4, 6, 6, 6]).expand(4, 6)
    assert torch.equal(leaf.grad.cpu(), local(right, have))


def adjoints() -> None:
    """The backward of random pairs is their adjoint, by both rules for replicas."""
    count = 0
    for seed in range(NUM_CASES):
        one = adjoint.expected(seed, SIZE)
        for rule in ("sum", "replicated") if one else ():
            adjoint.run_case(RANK, one, rule, DEVICE)
        count += one is not None
    assert count > NUM_CASES // 2, count
    print(f"gradients of {count} pairs on rank {RANK}")


def refusals() -> None:
    """What ranks were given differs: everybody says so, and the next call works."""
    full = torch.arange(64.0).reshape(8, 8)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 8), dtype="float32")
    other = rs.plan(have, rs.Layout(LINE, "tp:1 -"), shape=(8, 8), dtype="float32")
    mine = local(full, have).to(DEVICE)

    def works() -> None:
        out = plan.run({"tensor": mine}, sync=True)["tensor"]
        assert torch.equal(out.cpu(), local(full, want))

    works()
    with fails(rs.DisagreementError, "different moves"):
        (other if RANK == 1 else plan).run({"tensor": mine}, timeout=10, check="always")
    works()
    with fails(rs.TensorError, "rank 2"):
        plan.run({"tensor": mine[:1] if RANK == 2 else mine}, timeout=10)
    works()
    with fails(rs.DisagreementError, "different moves"):
        (other if RANK == 1 else plan).run({"tensor": mine}, timeout=10)
    works()
    if BY_GPU and not STAND_IN:
        with fails(rs.TensorError, "rank 3", "GPU to GPU"):
            plan.run({"tensor": mine.cpu() if RANK == 3 else mine}, timeout=10)
        works()
        both = {"tensor": mine.cpu() if RANK == 3 else mine}
        out = plan.run(both, timeout=10, check="always", transport="auto")["tensor"]
        assert out.device == both["tensor"].device
        assert torch.equal(out.cpu(), local(full, want))
    if PEER_MEMORY:
        anew: Any = {"timeout": 10, "check": "always", "transport": "auto"}
        plan.run({"tensor": mine}, sync=True, **anew)
        placed = mock.patch.object(call, "placement_of", return_value="cpu")
        with placed if STAND_IN else nullcontext():
            out = plan.run({"tensor": mine.cpu()}, **anew)["tensor"]  # on no GPU any more
        assert torch.equal(out, local(full, want))
    check_group()


def absent() -> None:
    """A rank does not call: found on the host, nothing is given to a GPU."""
    full = torch.arange(128.0).reshape(8, 16)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 16), dtype="float32")
    mine = local(full, have).to(DEVICE)
    plan.run({"tensor": mine})
    patience = 0.6 if STAND_IN else 1.0
    if RANK == 3:
        time.sleep(1.5 if STAND_IN else 3)
        with fails(rs.MoveTimeoutError, "rank 3"):
            plan.run({"tensor": mine}, timeout=patience)
    else:
        with fails(rs.MoveTimeoutError, "rank 3 has not called", within=3):
            plan.run({"tensor": mine}, timeout=patience)
    meet("absent")
    check_group()
    out = plan.run({"tensor": mine}, sync=True)["tensor"]
    assert torch.equal(out.cpu(), local(full, want))


def behind() -> None:
    """A rank calls, but its GPU comes too late: raised by the next call, or by rs.check."""
    full = torch.arange(96.0).reshape(8, 12)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 12), dtype="float32")
    mine = local(full, have).to(DEVICE)

    def works() -> None:
        out = plan.run({"tensor": mine}, sync=True)["tensor"]
        assert torch.equal(out.cpu(), local(full, want))

    given = {"tensors": {"tensor": mine}, "into": {"tensor": local(full, want).to(DEVICE)}}
    if not STAND_IN:
        torch.cuda._sleep(1)  # a kernel that is new would wait for those that run
    for number, raised in enumerate((by_check, by_next_call, by_sync, by_handle)):
        works()
        meet(f"behind {number}")
        raised(plan, given)
        meet(f"behind {number}, raised")
        works()
        check_group()


def released() -> None:
    """The GPU of rank 3 fails when all calls have returned. That releases the streams of the other
    ranks: these must not take it for the end of their reads.
    """
    full = torch.arange(96.0).reshape(8, 12)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 12), dtype="float32")
    given = {"tensor": local(full, have).to(DEVICE)}
    plan.run(given, sync=True)
    meet("released")
    done = GpuWork.done

    def done_when_released(work: GpuWork) -> bool:
        if RANK == 3:
            raise RuntimeError("an error of CUDA")
        while not work.group.own.has_come(REACHED, work.group.call, LAST_STEP):
            time.sleep(0.001)
        return done(work)

    with mock.patch.object(GpuWork, "done", done_when_released):
        handle = plan.start(given)
        with fails(rs.LiveError, "rank 3", "an error of CUDA"):
            handle.wait()
    meet("released, raised")
    out = plan.run(given, sync=True)["tensor"]
    assert torch.equal(out.cpu(), local(full, want))


def gives_up() -> None:
    """Rank 3 fails after the handshake, in a first or a later round: all ranks raise its error."""
    full, pending = torch.arange(256.0).reshape(16, 16), rs.Layout(LINE, "- - | sum tp")
    columns = rs.Layout(LINE, "- tp")
    rows = rs.plan(rs.Layout(LINE, "tp -"), columns, shape=(16, 16), dtype="float32")
    sums_ = rs.plan(pending, columns, shape=(16, 16), dtype="float32", memory=256)
    assert sums_.num_rounds > 2
    finish = GpuPeerTransport._finish_reading

    def finish_one(transport: GpuPeerTransport, rounds: Any) -> None:
        if RANK == 3 and rounds[0] == last:
            raise rs.LiveError("rank 3 gives up")
        finish(transport, rounds)

    for plan, last in ((rows, 0), (sums_, 1)):
        mine = full.clone() if plan is sums_ else local(full, plan.have["tensor"].layout)
        given, right = {"tensor": mine.to(DEVICE)}, local(full, columns) * (4 if last else 1)
        assert torch.equal(plan.run(given, sync=True)["tensor"].cpu(), right)
        meet(f"gives up in round {last}")
        if not STAND_IN:
            torch.cuda._sleep(500_000_000 if RANK == 3 else 1_500_000_000)
        with mock.patch.object(GpuPeerTransport, "_finish_reading", finish_one):
            with fails(rs.LiveError, "rank 3 gives up", within=10):
                plan.run(given, timeout=20)
            synchronize()
        meet(f"gave up in round {last}")
        assert torch.equal(plan.run(given, sync=True)["tensor"].cpu(), right)


PATIENCE = 0.6 if STAND_IN else 1.5
"""Seconds that the others wait for the GPU of rank 3."""


def busy() -> None:
    """Keep the GPU of rank 3 busy for some 4 seconds, or 1.6 if it is none."""
    if STAND_IN:
        stand_in.StandInGroup.lag = 1.6 if RANK == 3 else 0.0
    elif RANK == 3:
        torch.cuda._sleep(8_000_000_000)


def synchronize() -> None:
    if not STAND_IN:
        torch.cuda.synchronize()


LATE = (rs.LiveError, "rank 3 stopped answering")


def by_check(plan: rs.Plan, given: Any) -> None:
    busy()
    plan.run(**given, timeout=PATIENCE)
    if not STAND_IN:
        rs.check()
    stop = time.monotonic() + 5
    with fails(*LATE):
        while time.monotonic() < stop:
            rs.check()
            time.sleep(0.05)
    rs.check()


def by_next_call(plan: rs.Plan, given: Any) -> None:
    busy()
    plan.run(**given, timeout=PATIENCE)
    time.sleep(1.1 if STAND_IN else 5)
    with fails(*LATE, "before it failed", within=3):
        plan.run(**given, timeout=20)


def by_sync(plan: rs.Plan, given: Any) -> None:
    busy()
    with fails(*LATE, within=5):
        plan.run(**given, timeout=PATIENCE, sync=True)
    synchronize()
    rs.check()


def by_handle(plan: rs.Plan, given: Any) -> None:
    busy()
    handle = plan.start(**given, timeout=PATIENCE)
    with fails(*LATE, within=5):
        handle.wait()
    synchronize()
    rs.check()


def killed() -> None:
    """A rank sends its Hellos and dies: the others name it, live on, and move among themselves."""
    full = torch.arange(64.0).reshape(8, 8)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(8, 8), dtype="float32")
    mine = local(full, have).to(DEVICE)
    plan.run({"tensor": mine}, sync=True)
    meet("killed")
    if RANK == 3:
        NcclTransport._exchange = die  # type: ignore[method-assign]
        GpuPeerTransport._finish_reading = die  # type: ignore[method-assign]
    with fails(rs.PeerLostError, "rank 3 is gone", within=5):
        plan.run({"tensor": mine}, timeout=20)
        time.sleep(2)
        rs.check()
    three = rs.Mesh(tp=3)
    plan = rs.plan(rs.Layout(three, "tp -"), rs.Layout(three, "- tp"), shape=(9, 9), dtype="int64")
    full = torch.arange(81).reshape(9, 9)
    mine = local(full, plan.have["tensor"].layout).to(DEVICE)
    out = plan.run({"tensor": mine}, sync=True)["tensor"]
    assert torch.equal(out.cpu(), local(full, plan.want["tensor"].layout))
    if not STAND_IN:
        time.sleep(3)  # torch's watchdog would have ended the process by now


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mixed() -> None:
    """Some tensors on the host and some on the GPU, by way of the host."""
    full = {name: torch.arange(120.0).reshape(12, 10) + n for n, name in enumerate("abcd")}
    have = {name: rs.TensorSpec((12, 10), "float32", rs.Layout(GRID, "dp tp")) for name in full}
    have["d"] = rs.TensorSpec((12, 10), "float32", rs.Layout(LINE, "- - | sum tp"))
    want = {name: rs.TensorSpec((12, 10), "float32", rs.Layout(LINE, "- tp")) for name in full}
    want["b"] = rs.TensorSpec((12, 10), "bfloat16", rs.Layout(LINE, "- -"))
    plan = rs.plan(have, want)
    homes = [torch.device("cpu"), DEVICE]
    for turn in range(3):
        tensors, into = {}, {}
        for n, name in enumerate(full):
            mine = local(full[name], have[name].layout)
            tensors[name] = mine.to(homes[(n + RANK + turn) % 2])
            kind = getattr(torch, want[name].dtype)
            empty = torch.zeros_like(local(full[name], want[name].layout), dtype=kind)
            into[name] = empty.to(homes[(n + RANK // 2) % 2])
        for out in (plan.run(tensors), plan.run(tensors, into=into)):
            for name in full:
                value = full[name] * (4 if name == "d" else 1)
                right = local(value.to(out[name].dtype), want[name].layout)
                assert torch.equal(out[name].cpu(), right), (name, turn)


def leave() -> None:
    """The last move is under way when a process ends the usual way."""
    full = torch.arange(float(4 << 20)).reshape(1024, 4096)
    have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
    plan = rs.plan(have, want, shape=(1024, 4096), dtype="float32")
    mine = full.chunk(4, 0)[RANK].contiguous().to(DEVICE)
    for transport in ("nccl", "gpu_peer") if STAND_IN else (os.environ["RESHARD_TRANSPORT"],):
        for _ in range(3):
            out = plan.run({"tensor": mine}, transport=transport)["tensor"]
    time.sleep(RANK * 0.3)
    if RANK % 2:
        assert torch.equal(out.cpu(), full.chunk(4, 1)[RANK])
    if "destroy" in sys.argv:
        dist.destroy_process_group()


SCENARIOS = {
    function.__name__: function
    for function in (
        *(
            pairs,
            states,
            casts,
            sums,
            large,
            gathers,
            given_ways,
            disjoint,
            in_flight,
            crossed,
            released,
            gives_up,
            streams,
            dtensors,
        ),
        *(gradients, adjoints, overtaken, refusals, absent, behind, killed, mixed, leave),
    )
}


def scenarios_of_modules() -> dict[str, partial[None]]:
    """Scenarios above moves of tensors; their imports take as long as torch itself."""
    from tests.device import activation_ranks, checkpoint_ranks, sharded_ranks

    found = sharded_ranks.SCENARIOS | activation_ranks.SCENARIOS | checkpoint_ranks.SCENARIOS
    return {name: partial(one, RANK) for name, one in found.items()}


def main() -> None:
    if STAND_IN:
        stand_in.use(PEER_MEMORY)
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(DEVICE)
    address = f"tcp://127.0.0.1:{os.environ['PORT']}"
    dist.init_process_group(BACKEND, rank=RANK, world_size=SIZE, init_method=address)
    check_group()
    names = [name for name in sys.argv[1:] if name != "destroy"]
    known = SCENARIOS if SCENARIOS.keys() >= {*names} else {**SCENARIOS, **scenarios_of_modules()}
    for name in names:
        start = time.perf_counter()
        known[name]()
        print(f"rank {RANK}: {name} is fine, {time.perf_counter() - start:.1f} s", flush=True)
        if name == "leave":
            return
        if name != "killed":
            meet(f"after {name}")
    if RANK == 0:
        time.sleep(1)  # it serves the store
    # Leaving the usual way would wait for groups that were broken on purpose.
    os._exit(0)


if __name__ == "__main__":
    main()
