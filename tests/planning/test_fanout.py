"""Replicas share the receiving and pass on: sources send one copy, and hosts are entered once."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

import reshard as rs
from tests import generate, moves
from tests.cases import DTYPES, Case
from tests.checks import arrays, build, expected, same, source_values, wire_bounds
from tests.oracle import Held
from tests.soak import cases

MOST_OVER_SHARE = 1.02


def entering(have: Held, want: Held, size: int, hosts: dict[int, int]) -> int:
    """Elements that must enter a host: some rank of it wants them and none of it holds them."""
    total = 0
    for host in set(hosts.values()):
        wanted, held = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for mask, side in ((wanted, want), (held, have)):
            for rank, at in side.items():
                if hosts[rank] == host:
                    mask[at.reshape(-1)] = True
        total += int(np.count_nonzero(wanted & ~held))
    return total


def between_hosts(plan: rs.Plan, hosts: dict[int, int]) -> int:
    """The least bytes between hosts for all tensors of a plan, by brute force."""
    total = 0
    for name, want in plan.want.items():
        have = plan.have[name]
        sides = moves.held(have.layout, have.shape), moves.held(want.layout, want.shape)
        elements = entering(*sides, math.prod(want.shape), hosts)
        total += elements * min(DTYPES[have.dtype], DTYPES[want.dtype])
    return total


def per_host(ranks_per_host: int) -> dict[int, int]:
    return {rank: rank // ranks_per_host for rank in range(64)}


PAIRS = [("tp -", "tp -"), ("tp -", "- tp"), ("- tp", "tp -"), ("tp*128 -", "tp{3072,512,512} -")]


@pytest.mark.parametrize(("have", "want"), PAIRS)
@pytest.mark.parametrize("shape", [(4096, 1024), (4096, 1021)])
def test_trainer_to_eight_replicas(have: str, want: str, shape: tuple[int, int]) -> None:
    """tp=4 to 8 replicas of tp=2: every source sends its quarter of one copy, once."""
    source = rs.Layout(rs.Mesh(tp=4), have)
    replicas = rs.Layout(rs.Mesh(dp=8, tp=2, ranks=range(8, 24)), want)
    plan = rs.plan(source, replicas, shape=shape, dtype="bfloat16")
    summary = plan.summary()
    one_copy = math.prod(shape) * 2
    assert summary.wire_bytes == summary.lower_bound_bytes == 8 * one_copy
    share = one_copy / 4 * (1 if shape[1] % 4 == 0 or have != "- tp" else 1024 / 1021)
    assert summary.busiest_sender_bytes <= MOST_OVER_SHARE * share
    assert summary.busiest_sender_bytes == max(moves.first_hand(plan).values())
    half = one_copy / 2 * (1 if shape[1] % 2 == 0 or want != "- tp" else 1024 / 1021)
    assert summary.busiest_relay_bytes <= MOST_OVER_SHARE * half * 7 / 8


def test_a_model_to_eight_replicas() -> None:
    """The same for a small model: one copy of all of it leaves the trainer."""
    trainer, fleet = rs.Mesh(tp=4), rs.Mesh(dp=8, tp=2, ranks=range(4, 20))
    have, want = {}, {}
    for i in range(4):
        for name, shape, old, new in (
            ("wqkv", (384, 128), "tp{256,64,64} -", "tp{256,64,64} -"),
            ("wo", (128, 256), "- tp", "- tp"),
            ("norm", (128,), "-", "-"),
            ("w2", (128, 344), "- tp", "tp -"),
        ):
            have[f"layers.{i}.{name}"] = rs.TensorSpec(shape, "bfloat16", rs.Layout(trainer, old))
            want[f"layers.{i}.{name}"] = rs.TensorSpec(shape, "bfloat16", rs.Layout(fleet, new))
    plan = rs.plan(have, want)
    summary = plan.summary()
    one_copy = sum(spec.num_bytes for spec in have.values())
    assert summary.busiest_sender_bytes <= MOST_OVER_SHARE * one_copy / 4
    assert sum(moves.first_hand(plan).values()) == one_copy
    assert summary.wire_bytes == moves.needed_bytes(plan)
    moves.check_move(plan)


@pytest.mark.parametrize(("have", "want"), [("tp -", "tp -"), ("tp -", "- tp"), ("- tp", "tp -")])
@pytest.mark.parametrize("memory", [None, 16_000, 2_000])
def test_replicas_on_two_hosts(have: str, want: str, memory: int | None) -> None:
    """8 replicas of tp=2 on two hosts: each host is entered by one copy of what it wants."""
    shape = (96, 40)
    source = rs.Layout(rs.Mesh(tp=4), have)
    replicas = rs.Layout(rs.Mesh(dp=8, tp=2, ranks=range(8, 24)), want)
    topology = rs.Topology(ranks_per_host=8)
    plan = rs.plan(source, replicas, shape=shape, dtype="float32", topology=topology, memory=memory)
    summary = plan.summary()
    one_copy = math.prod(shape) * 4
    assert between_hosts(plan, per_host(8)) == 2 * one_copy
    assert summary.between_hosts_bytes == summary.between_hosts_lower_bound_bytes == 2 * one_copy
    assert summary.wire_bytes == summary.lower_bound_bytes == 8 * one_copy
    assert summary.busiest_sender_bytes <= MOST_OVER_SHARE * one_copy / 4
    moves.check_move(plan)


def test_one_byte_at_a_time_to_further_hosts() -> None:
    """What is passed on to a further host has been received there, also when cut very small.

    One rank of host 1 feeds two of host 2, each of which gets a half; the rounds of the halves are
    not the rounds of the whole.
    """
    want = rs.Layout.from_boxes((8,), {rank: [rs.Box((0,), (8,))] for rank in (2, 4, 5)})
    topology = rs.Topology(ranks_per_host=2)
    have = rs.Layout(rs.Mesh(x=1), "-")
    plan = rs.plan(have, want, shape=(8,), dtype="int32", topology=topology, memory=16)
    moves.check_move(plan)
    assert plan.summary().between_hosts_bytes == 2 * 32


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("dp=4 tp=4: tp -", "x=16: - x"),  # every host has all of it
        ("dp=4 tp=4: tp -", "x=4 @ 0,4,8,12: - -"),
        ("dp=16: - -", "x=32: x -"),  # ranks 16 to 31 have hosts of their own
        ("dp=2 tp=8: (tp dp) -", "x=16: - -"),
    ],
)
def test_hosts_that_hold_it_are_served_from_inside(have: str, want: str) -> None:
    shape = (64, 32)
    sides = [rs.Layout(rs.Mesh.parse(mesh), text) for mesh, text in _pairs(have, want)]
    plan = rs.plan(*sides, shape=shape, dtype="float32", topology=rs.Topology(ranks_per_host=4))
    summary = plan.summary()
    least = between_hosts(plan, per_host(4))
    assert summary.between_hosts_bytes == summary.between_hosts_lower_bound_bytes == least
    if have.startswith("dp=4"):
        assert least == 0
    moves.check_move(plan)


def _pairs(*texts: str) -> list[tuple[str, str]]:
    return [tuple(map(str.strip, text.split(":", 1))) for text in texts]


@pytest.mark.parametrize("want", ["dp=3 tp=2 @ 2-7: tp -", "dp=2 tp=4: - tp", "dp=8 @ 3-10: - -"])
@pytest.mark.parametrize("topology", [None, 2, 3, 4])
def test_overlapping_ranks(want: str, topology: int | None) -> None:
    """Ranks that hold some of what they want get only the rest, and help to pass it on."""
    shape = (48, 20)
    sides = [rs.Layout(rs.Mesh.parse(mesh), text) for mesh, text in _pairs("tp=4: tp -", want)]
    hosts = rs.Topology(ranks_per_host=topology) if topology else None
    plan = rs.plan(*sides, shape=shape, dtype="float32", topology=hosts)
    moves.check_move(plan)
    summary = plan.summary()
    assert summary.wire_bytes == moves.needed_bytes(plan)
    if topology is None:
        assert summary.busiest_sender_bytes <= MOST_OVER_SHARE * 48 * 20 * 4 / 4
    else:
        assert summary.between_hosts_bytes == between_hosts(plan, per_host(topology))


def test_hosts_by_name() -> None:
    """Hosts as lists of ranks mean the same as hosts that count up."""
    have = rs.Layout(rs.Mesh(tp=2), "tp -")
    want = rs.Layout(rs.Mesh(dp=3, tp=2, ranks=range(2, 8)), "- tp")
    listed = rs.Topology(hosts=((0, 1), (2, 3), (4, 5), (6, 7)))
    counted = rs.Topology(ranks_per_host=2)
    plans = [
        rs.plan(have, want, shape=(8, 6), dtype="float32", topology=hosts)
        for hosts in (listed, counted)
    ]
    assert plans[0].summary() == plans[1].summary()
    mixed = rs.Topology(hosts=((7, 0), (5, 1), (3, 2, 4, 6)))
    plan = rs.plan(have, want, shape=(8, 6), dtype="float32", topology=mixed)
    moves.check_move(plan)
    where = {rank: host for host, ranks in enumerate(mixed.hosts) for rank in ranks}
    assert plan.summary().between_hosts_bytes == between_hosts(plan, where)


def random_topology(rng: Random) -> tuple[rs.Topology, dict[int, int]]:
    """Hosts of equal size, or any ranks on any host."""
    if rng.random() < 0.5:
        size = rng.choice((1, 2, 3, 4, 5, 8))
        return rs.Topology(ranks_per_host=size), per_host(size)
    hosts: list[list[int]] = [[] for _ in range(rng.randint(1, 6))]
    for rank in rng.sample(generate.RANK_IDS, len(generate.RANK_IDS)):
        rng.choice(hosts).append(rank)
    where = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    return rs.Topology(hosts=tuple(map(tuple, hosts))), where


def check_with_topology(case: Case, topology: rs.Topology, hosts: dict[int, int]) -> None:
    have, want = build(case.have, case.shape), build(case.want, case.shape)
    options = {"shape": case.shape, "dtype": case.dtype, "memory": case.memory}
    plan = rs.plan(have, want, topology=topology, **options)
    plan.check()
    values = source_values(case)
    held = {r: {"tensor": part} for r, part in arrays(case.have, case.shape, values).items()}
    out, report = rs.simulate(plan, held, report=True)
    for rank, wanted in expected(case, values).items():
        same(out[rank]["tensor"], wanted, rank)
    moves.check_counts(plan, report)
    summary = plan.summary()
    least, _ = wire_bounds(case)
    assert summary.wire_bytes == summary.lower_bound_bytes == least
    size = math.prod(case.shape)
    sides = case.have.held(case.shape), case.want.held(case.shape)
    enter = entering(*sides, size, hosts) * DTYPES[case.dtype]
    assert summary.between_hosts_lower_bound_bytes == enter
    assert summary.between_hosts_bytes == enter


@pytest.mark.parametrize("first", range(0, cases(80, 160), 40))
def test_random_topologies(first: int) -> None:
    """Values are right, and bytes in all and between hosts are the least there can be."""
    failed = []
    for number in range(first, first + 40):
        rng = Random(number)
        case = generate.random_case(rng, sums=False)
        topology, hosts = random_topology(rng)
        if case.error is None:
            try:
                check_with_topology(case, topology, hosts)
            except Exception as error:
                failed.append(f"case {number}: {type(error).__name__} {error}\n{case.snippet()}")
    assert not failed, f"{len(failed)} cases, the shortest: {min(failed, key=len)}"


def test_seconds_and_the_bottleneck() -> None:
    """Bytes over bandwidth plus latencies, of the link that takes longest."""
    have, want = rs.Layout(rs.Mesh(a=1), "-"), rs.Layout(rs.Mesh(b=1, ranks=[8]), "-")
    slow = rs.Topology.from_dict({"between": {"bandwidth": "1MB", "latency": 0.5}})
    summary = rs.plan(have, want, shape=(500_000,), dtype="int8", topology=slow).summary()
    assert summary.seconds == pytest.approx(1.0)
    assert "host" in summary.bottleneck
    assert rs.plan(have, want, shape=(4,), dtype="int8").summary().seconds is None
    near = rs.Layout(rs.Mesh(b=1, ranks=[1]), "-")
    inside = rs.plan(have, near, shape=(500_000,), dtype="int8", topology=slow).summary()
    assert inside.seconds < 0.001
    assert "inside" in inside.bottleneck
    nothing = rs.plan(have, have, shape=(500_000,), dtype="int8", topology=slow).summary()
    assert nothing.seconds == 0.0


@pytest.mark.parametrize(("num_addends", "slots"), [(2, 1), (4, 4)])
def test_two_addends_are_added_up_as_a_whole(num_addends: int, slots: int) -> None:
    """By both ranks, each of which has one: more addends are added up slot by slot."""
    mesh = rs.Mesh(dp=num_addends)
    have, want = rs.Layout(mesh, "- - | sum dp"), rs.Layout(mesh, "- -")
    plan = rs.plan(have, want, shape=(32, 32), dtype="float32")
    assert plan.num_rounds == (1 if slots == 1 else 2)
    boxes = {str(step.box) for rank in plan.ranks for step in plan.for_rank(rank).sends}
    assert len(boxes) == slots
