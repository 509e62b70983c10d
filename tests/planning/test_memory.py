"""A memory cap holds: what ranks stage, counted round by round, stays under it, values right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import reshard as rs
from tests import moves, oracle
from tests.cases import DTYPES
from tests.checks import same
from tests.soak import soaking

FRACTIONS = (1, 4, 16, 64)
MOST_OVER_SIMULATED = 4.0


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Small whole numbers in a dtype; bfloat16 as the upper half of a float32."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Pair:
    """A move of one tensor, with a cast where dtypes differ and addends where the source has."""

    have: str
    want: str
    shape: tuple[int, ...] = (48, 32)
    dtype: str = "float32"
    cast: str | None = None

    def specs(self) -> tuple[rs.TensorSpec, rs.TensorSpec]:
        sides = []
        for text, dtype in ((self.have, self.dtype), (self.want, self.cast or self.dtype)):
            mesh, _, layout = text.partition(":")
            sides.append(rs.TensorSpec(self.shape, dtype, rs.Layout(rs.Mesh.parse(mesh), layout)))
        return sides[0], sides[1]


PAIRS = {
    "rows to columns": Pair("tp=4: tp -", "tp=4: - tp"),
    "odd rows to columns": Pair("tp=4: tp -", "tp=4: - tp", (43, 31)),
    "rows to columns elsewhere": Pair("tp=4: tp -", "tp=3 @ 4-6: - tp", (43, 31)),
    "FSDP to TP": Pair("dp=2 tp=2: (tp dp) -", "dp=2 tp=2: - tp", (32, 24), "bfloat16"),
    "FSDP to TP replicas elsewhere": Pair("dp=4: dp -", "dp=2 tp=2 @ 8-11: - tp", (36, 24)),
    "all gather": Pair("dp=4: dp -", "dp=4: - -", (32, 18)),
    "one to many": Pair("x=1: -", "dp=3 @ 1-3: -", (512,)),
    "flat": Pair("dp=4: - - | flat dp", "tp=2 @ 2-3: - tp"),
    "flat, ragged": Pair("dp=4: - - | flat dp[0,0,1000,536]", "tp=2: tp -"),
    "block-cyclic": Pair("dp=2: dp:7 -", "tp=2 @ 1-2: - tp:5", (48, 32)),
    "zig-zag": Pair("cp=4: cp~ -", "cp=4: cp -"),
    "packed": Pair("tp=4: tp{24,12,12} -", "tp=2: tp{24,12,12} -"),
    "reduce-scatter": Pair("dp=4: - - | sum dp", "dp=4: dp -", (48, 32)),
    "all-reduce": Pair("dp=3: - - | sum dp", "dp=3: - -", (24, 16)),
    "all-reduce of halves": Pair("dp=3: - - | sum dp", "dp=3: - -", (24, 16), "bfloat16"),
    "sum elsewhere": Pair("dp=2 tp=2: tp - | sum dp", "tp=2 @ 8-9: - tp", (48, 32)),
    "max": Pair("dp=4: - - | max dp", "dp=2: dp -", (48, 16), "int32"),
    "narrowing": Pair("tp=4: tp -", "tp=4: - tp", cast="bfloat16"),
    "widening": Pair("tp=4: tp -", "tp=4: - tp", dtype="bfloat16", cast="float32"),
    "narrowing to replicas": Pair("dp=2: dp -", "dp=3 @ 4-6: - -", (32, 20), cast="bfloat16"),
}  # fmt: skip


def largest_local(plan: rs.Plan) -> int:
    """Bytes of the largest tensor that any rank holds before or after."""
    return max(
        math.prod(spec.layout.local_shape(rank, spec.shape)) * DTYPES[spec.dtype]
        for specs in (plan.have, plan.want)
        for spec in specs.values()
        for rank in spec.layout.ranks
    )


def run(plan: rs.Plan) -> rs.SimulationReport:
    """Simulate with small whole numbers, which every dtype and every sum holds exactly."""
    held: dict[int, dict[str, np.ndarray]] = {}
    wanted: dict[str, np.ndarray] = {}
    for name, spec in plan.have.items():
        layout = str(spec.layout.mesh), str(spec.layout)
        op, addend = oracle.addends(*layout)
        rng = np.random.default_rng(len(name))
        values = rng.integers(0, 30, (oracle.num_addends(*layout), *spec.shape))
        for rank, at in moves.held(spec.layout, spec.shape).items():
            local = values[addend[rank]].reshape(-1)[at]
            held.setdefault(rank, {})[name] = bits(local, spec.dtype)
        wanted[name] = oracle.reduce_addends(op, values) if op else values[0]
    out, report = rs.simulate(plan, held, report=True)
    for name, spec in plan.want.items():
        value = bits(wanted[name], spec.dtype)
        for rank, local in oracle.cut(value, moves.held(spec.layout, spec.shape)).items():
            same(out[rank][name], local, rank)
    return report


def check_memory(plan: rs.Plan, cap: int) -> None:
    plan.check()
    report = run(plan)
    summary = plan.summary()
    peak = max(report.peak_bytes.values(), default=0)
    assert peak <= summary.peak_bytes <= cap, f"{peak} simulated, {summary.peak_bytes} stated"
    assert summary.peak_bytes <= MOST_OVER_SIMULATED * peak, f"{summary.peak_bytes} for {peak}"
    moves.check_counts(plan, report)


CAPS = [
    (kind, fraction)
    for at, kind in enumerate(PAIRS)
    for fraction in (FRACTIONS if soaking() else FRACTIONS[at % 2 :: 2])
]


@pytest.mark.parametrize(("kind", "fraction"), CAPS)
def test_caps(kind: str, fraction: int) -> None:
    have, want = PAIRS[kind].specs()
    cap = largest_local(rs.plan({"w": have}, {"w": want})) // fraction
    check_memory(rs.plan({"w": have}, {"w": want}, memory=cap), cap)


def state_dict() -> tuple[dict[str, rs.TensorSpec], dict[str, rs.TensorSpec]]:
    """Two layers, FSDP over TP to TP replicas: large, small, summed and cast tensors."""
    have, want = {}, {}
    trainer, fleet = rs.Mesh(dp=2, tp=2), rs.Mesh(dp=2, tp=2, ranks=range(2, 6))
    for i in range(2):
        for name, shape, old, new in (
            ("wq", (32, 24), "(tp dp) -", "tp -"),
            ("wo", (24, 16), "dp tp", "- tp"),
            ("norm", (24,), "dp", "-"),
            ("grad", (6, 8), "tp - | sum dp", "- -"),
        ):
            dtype = "bfloat16" if name == "wo" else "float32"
            layouts = rs.Layout(trainer, old), rs.Layout(fleet, new)
            have[f"layers.{i}.{name}"] = rs.TensorSpec(shape, "float32", layouts[0])
            want[f"layers.{i}.{name}"] = rs.TensorSpec(shape, dtype, layouts[1])
    return have, want


HOSTS = [
    (fraction, ranks_per_host)
    for at, fraction in enumerate(FRACTIONS)
    for ranks_per_host in ((None, 2) if soaking() else (None, 2)[at % 2 :][:1])
]


@pytest.mark.parametrize(("fraction", "ranks_per_host"), HOSTS)
def test_caps_of_state_dicts(fraction: int, ranks_per_host: int | None) -> None:
    have, want = state_dict()
    topology = rs.Topology(ranks_per_host=ranks_per_host) if ranks_per_host else None
    cap = largest_local(rs.plan(have, want)) // fraction
    check_memory(rs.plan(have, want, memory=cap, topology=topology), cap)


def test_a_cap_that_is_large_costs_no_rounds() -> None:
    have, want = state_dict()
    plan = rs.plan(have, want)
    assert plan.memory == 256 * 1024 * 1024
    assert plan.num_rounds <= 3
    assert rs.plan(have, want, memory="1GiB").num_rounds == plan.num_rounds


@pytest.mark.parametrize("kind", ["rows to columns", "all gather", "reduce-scatter"])
def test_less_memory_takes_more_rounds_and_the_same_bytes(kind: str) -> None:
    have, want = PAIRS[kind].specs()
    plans = [rs.plan({"w": have}, {"w": want}, memory=cap) for cap in (1 << 20, 4096, 512)]
    rounds = [plan.num_rounds for plan in plans]
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-1]
    assert len({plan.summary().wire_bytes for plan in plans}) == 1
    assert len({plan.summary().busiest_sender_bytes for plan in plans}) == 1


def test_rounds_use_the_memory_they_have() -> None:
    """Not many more rounds than the busiest rank's bytes over the cap would need."""
    have, want = rs.Layout(rs.Mesh(tp=4), "tp -"), rs.Layout(rs.Mesh(tp=4), "- tp")
    shape = (1024, 1024)
    moved = 2 * 1024 * 1024 * 4 // 4 * 3 // 4  # what a rank sends and receives
    for cap in (1 << 20, 1 << 18, 1 << 16):
        plan = rs.plan(have, want, shape=shape, dtype="float32", memory=cap)
        assert plan.num_rounds <= 3 * math.ceil(moved / cap)


def test_real_sizes_state_their_peak() -> None:
    """70B-sized tensors: the cap holds by the plan's own account, in few rounds and rows."""
    have = rs.Layout(rs.Mesh(dp=32, tp=8), "(tp dp) -")
    want = rs.Layout(rs.Mesh(dp=4, tp=8, ranks=range(256, 288)), "tp -")
    for cap in ("256MiB", "16MiB", "1MiB"):
        plan = rs.plan(have, want, shape=(28672, 8192), dtype="bfloat16", memory=cap)
        assert plan.summary().peak_bytes <= plan.memory
        assert plan.summary().wire_bytes == plan.summary().lower_bound_bytes


@pytest.mark.parametrize("memory", [None, 1 << 17])
def test_stages_that_share_rounds_are_passed_on_in_them(memory: int | None) -> None:
    """Only what is on rank 2 goes to both servers and is passed on between them, a round later."""
    length = 1 << 18
    have = {
        name: rs.TensorSpec((length,), "int32", rs.Layout(rs.Mesh(pp=3), f"- | on pp={stage}"))
        for name, stage in (("first", 0), ("last", 2))
    }
    want = {name: rs.TensorSpec((length,), "int32", rs.Layout(rs.Mesh(y=2), "-")) for name in have}
    plan = rs.plan(have, want, memory=memory)
    plan.check()
    assert len(plan.schedule.slots) == 2
    assert {slot.hops for slot in plan.schedule.slots} == {1}
    moves.check_move(plan)
