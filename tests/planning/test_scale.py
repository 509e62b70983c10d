"""Many ranks and many small blocks: what is counted by lines is what listing every row gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

import reshard as rs
from reshard.layout.boxlist import piece_columns
from reshard.planning import flows
from reshard.text import parse_bytes
from tests import moves


def layout(mesh: str, text: str) -> rs.Layout:
    return rs.Layout(rs.Mesh.parse(mesh), text)


def dicts(num_ranks: int) -> tuple[dict[str, rs.TensorSpec], dict[str, rs.TensorSpec]]:
    """FSDP to two groups of tensor parallel ranks, with norms that all ranks want."""
    names = {"w": (260, 4), "norm": (140,), "o": (4, 260)}
    texts = {"w": "tp -", "norm": "-", "o": "- tp"}
    have, want = {}, {}
    for name, shape in names.items():
        rows = "dp" + " -" * (len(shape) - 1)
        have[name] = rs.TensorSpec(shape, "int32", layout(f"dp={num_ranks}", rows))
        mesh = f"replica={num_ranks // 2} tp=2"
        want[name] = rs.TensorSpec(shape, "int32", layout(mesh, texts[name]))
    return have, want


@pytest.mark.parametrize("memory", [None, 20_000])
def test_lines_of_many_ranks_are_counted_exactly(memory: int | None) -> None:
    """Several lines of 70 and 140 ranks share rounds, and some members hold what others lack."""
    plan = rs.plan(*dicts(140), memory=memory)
    sent: dict[tuple[int, int, int], int] = {}
    for rank in plan.ranks:
        for step in plan.for_rank(rank).sends:
            key = (step.round, step.source, step.destination)
            sent[key] = sent.get(key, 0) + step.num_bytes
    summary = plan.summary()
    assert summary.num_messages == len(sent)
    assert summary.wire_bytes == sum(sent.values()) == summary.lower_bound_bytes
    total, first = plan.traffic.between(plan.world // 20, plan.world // 35)
    by_hand = np.zeros_like(total)
    for (_, source, destination), num_bytes in sent.items():
        by_hand[source // 20, destination // 35] += num_bytes
    assert (total == by_hand).all()
    assert (first <= total).all()
    ends = zip(plan.traffic.source.tolist(), plan.traffic.destination.tolist(), strict=True)
    assert sorted(ends) == sorted({(source, destination) for _, source, destination in sent})
    plan.check()


def test_thousands_of_ranks_are_planned_by_lines() -> None:
    """2,048 ranks that all want what each has a part of: rows grow with ranks, not with pairs."""
    have, want = layout("dp=2048", "dp -"), layout("x=2048", "- -")
    plan = rs.plan(have, want, shape=(4096, 64), dtype="bfloat16")
    assert sum(len(flow.parts()) for flow in plan.flows) <= 3 * 2048
    assert plan.summary().wire_bytes == plan.summary().lower_bound_bytes
    assert plan.for_rank(77).receives.num_rows <= 3 * 2048
    plan.check()


@pytest.mark.parametrize("at_once", [5, 30])
@pytest.mark.parametrize("memory", [None, 3_000])
def test_rows_of_all_pairs_are_counted_in_blocks(
    at_once: int, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rows to columns every pair of ranks exchanges something: not all of it is listed at
    once, and the figures are the same."""
    sides = layout("x=8", "x -"), layout("r=2 y=6 @ 8-19", "- y")
    options = {"shape": (48, 60), "dtype": "int32", "memory": memory}
    whole = rs.plan(*sides, **options).summary()
    monkeypatch.setattr(flows, "AT_ONCE", at_once)
    plan = rs.plan(*sides, **options)
    assert len([*plan.flows[0].streams()]) > 2
    assert plan.summary() == whole
    moves.check_move(plan)


def test_a_rank_that_holds_a_line_does_not_relay_it() -> None:
    """Two of eight ranks have all of it: each sends a half once, the others pass on."""
    shape = (4096, 64)
    plan = rs.plan(layout("x=2", "- -"), layout("x=8", "- -"), shape=shape, dtype="float32")
    summary = plan.summary()
    whole = shape[0] * shape[1] * 4
    assert summary.wire_bytes == 6 * whole
    assert summary.busiest_sender_bytes <= 1.02 * whole / 2
    assert summary.busiest_relay_bytes <= 1.02 * whole * 5 / 6


@pytest.mark.parametrize("want", ["tp -", "- tp", "- - | flat tp:3", "tp:1 -", "- tp:5"])
@pytest.mark.parametrize("block", [1, 16])
def test_small_blocks(block: int, want: str) -> None:
    have = layout("pp=2", f"- - | flat pp:{block}")
    plan = rs.plan(have, layout("tp=2", want), shape=(40, 24), dtype="int32")
    moves.check_move(plan)
    assert plan.summary().wire_bytes == plan.summary().lower_bound_bytes


def test_blocks_of_one_element_are_listed_once() -> None:
    """2 MiB dealt element by element: as many rows as elements, not pairs of them."""
    have, want = layout("pp=2", "- - | flat pp:1"), layout("tp=2", "tp -")
    plan = rs.plan(have, want, shape=(1024, 512), dtype="int32")
    assert plan.for_rank(0).receives.num_rows == 1024 * 512 // 4
    assert plan.summary().wire_bytes == 1024 * 512 * 4 // 2


TEXTS = ["- - - | flat x:1", "- y - | flat x:3", "y:2 - - | flat x", "- - y:1 | flat x:2"]


@pytest.mark.parametrize("text", TEXTS)
def test_columns_of_pieces_are_the_pieces(text: str) -> None:
    rng = Random(text)
    for _ in range(5):
        shape = tuple(rng.randint(5, 12) for _ in range(3))
        one = layout("x=2 y=2", text)
        for rank in one.ranks:
            starts, stops, strides, offsets = piece_columns(one, rank, shape)
            pieces = one.pieces(rank, shape)
            assert [piece.offset for piece in pieces] == offsets.tolist()
            assert [list(piece.box.start) for piece in pieces] == starts.tolist()
            assert [list(piece.box.stop) for piece in pieces] == stops.tolist()
            assert [list(piece.strides) for piece in pieces] == strides.tolist()


def test_a_proof_says_how_much_memory_it_needs() -> None:
    plan = rs.plan(*dicts(16))
    with pytest.raises(rs.MemoryCapError, match=r"needs about .* and memory= gives it 1.0 KiB"):
        plan.check(memory="1KiB")
    plan.check(memory="64MiB")


def test_a_proof_keeps_only_what_fits() -> None:
    """The least memory that is enough leaves no room to keep pieces of ranks."""
    plan = rs.plan(*dicts(16))
    with pytest.raises(rs.MemoryCapError) as error:
        plan.check(memory=1)
    needed = str(error.value).split("about ")[1].split(" and")[0].replace(" ", "")
    plan.check(memory=int(1.1 * parse_bytes(needed)))


BAD_TOPOLOGIES = {
    "a rank on no host": ({"hosts": [[0, 1], [2]]}, "rank 3 is on no host .* 3 ranks on 2 hosts"),
    "no bandwidth": ({"between": {"bandwidth": 0}}, r"\[between\] has a bandwidth of 0"),
    "no bandwidth inside": ({"inside": {"bandwidth": "0GB"}}, r"\[inside\] has a bandwidth of 0"),
    "a bandwidth beyond floats": (
        {"inside": {"bandwidth": 10**400}},
        r"\[inside\]: .*too large",
    ),
    "a negative latency": ({"inside": {"latency": -1}}, r"\[inside\] .* latency of -1"),
    "a truth value": ({"hosts": [[0, True], [2, 3]]}, "hosts a list of rank lists"),
    "a rank twice": ({"hosts": [[0, 1], [1, 2, 3]]}, "rank 1 is on two hosts"),
}


@pytest.mark.parametrize("kind", BAD_TOPOLOGIES)
def test_bad_topologies(kind: str) -> None:
    data, message = BAD_TOPOLOGIES[kind]
    with pytest.raises(rs.TopologyError, match=message):
        rs.plan(
            layout("a=4", "a -"),
            layout("a=4", "- a"),
            shape=(4, 4),
            topology=rs.Topology.from_dict(data),
        )


def test_a_file_that_does_not_match_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("hosts = [[0, 1, 2]]\n")
    sides = layout("a=4", "a -"), layout("a=4", "- a")
    with pytest.raises(rs.TopologyError, match=r"rank 3 is on no host .* on 1 host and"):
        rs.plan(*sides, shape=(4, 4), topology=path)
    path.write_text(f"ranks_per_host = {'9' * 5000}\n")
    with pytest.raises(rs.TopologyError, match=r"cannot be read: .* expected a TOML file"):
        rs.plan(*sides, shape=(4, 4), topology=path)
    path.write_text("hosts = [[0, 1, 2, 3]]\n")
    assert rs.plan(*sides, shape=(4, 4), topology=str(path)).summary().between_hosts_bytes == 0
    with pytest.raises(rs.TopologyError, match="5 is no topology"):
        rs.plan(*sides, shape=(4, 4), topology=5)  # type: ignore[arg-type]
