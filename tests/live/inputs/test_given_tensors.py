"""What may be given to a move: tied, overlapping, missing, unknown and unfit tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import reshard as rs
from tests.ranks.live import local_of, locals_of, numbered, same_bits
from tests.ranks.pool import Pool

FOUR = range(4)
LINE = rs.Mesh(tp=4)
ROWS, COLUMNS = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
FULL = (8, 8)


def spec(layout: rs.Layout, shape: tuple[int, ...] = FULL, dtype: str = "float32") -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, layout)


def message_of(plan: rs.Plan, given: object, **options: object) -> str:
    with pytest.raises(rs.TensorError) as caught:
        plan.run(given, timeout=20, **options)
    return str(caught.value)


def tied_destinations(rank: int) -> None:
    full = {"a": numbered(FULL), "b": numbered(FULL)}
    have = {name: spec(ROWS) for name in full}
    want = {name: spec(COLUMNS) for name in full}
    plan = rs.plan(have, want)
    mine = locals_of(full, have, rank)
    tied = torch.full((8, 2), -1.0)
    again = tied.view(16).view(8, 2)
    for _ in range(2):
        out = plan.run(mine, into={"a": tied, "b": again})
        assert out["a"] is tied
        assert out["b"] is again
        same_bits(out, locals_of(full, want, rank))
    memory = torch.full((2, 8), -1.0)
    out = plan.run(mine, into={"a": memory.t(), "b": memory.t()}, atomic=True)
    same_bits(out, locals_of(full, want, rank))


def test_tied_destinations_are_one(pool: Pool) -> None:
    pool.run(tied_destinations, ranks=FOUR)


def overlapping_destinations(rank: int) -> list[str]:
    have = {name: spec(ROWS) for name in "ab"}
    want = {name: spec(COLUMNS) for name in "ab"}
    plan = rs.plan(have, want)
    mine = locals_of({"a": numbered(FULL), "b": numbered(FULL)}, have, rank)
    memory = torch.full((40,), -1.0)
    pairs = [
        (memory[:16].view(8, 2), memory[14:30].view(8, 2)),
        (memory[:16].view(8, 2), memory[:16].view(2, 8).t()),
        (memory[:32].view(8, 4)[:, ::2], memory[:32].view(8, 4)[:, :2]),
        (memory[20:21].expand(8, 2), memory[:16].view(8, 2)),
        (memory.as_strided((8, 2), (1, 1)), memory[20:36].view(8, 2)),
    ]
    told = [message_of(plan, mine, into={"a": a, "b": b}) for a, b in pairs]
    one, other = pairs[0][0], pairs[0][0].view(torch.int32)  # the same memory, read otherwise
    casts = rs.plan(have, want | {"b": rs.TensorSpec(FULL, "int32", COLUMNS)})
    told.insert(0, message_of(casts, mine, into={"a": one, "b": other}))
    assert bool((memory == -1).all())
    beside = {"a": memory[:32].view(8, 4)[:, :2], "b": memory[:32].view(8, 4)[:, 2:]}
    out = plan.run(mine, into=beside)
    same_bits(out, locals_of({"a": numbered(FULL), "b": numbered(FULL)}, want, rank))
    return told


def test_overlapping_destinations_are_an_error(pool: Pool) -> None:
    for told in pool.run(overlapping_destinations, ranks=FOUR):
        for message in told:
            assert "overlap" in message
            assert "rank " in message
        for message in told[:3]:
            assert '"a"' in message
            assert '"b"' in message


def destination_over_source(rank: int) -> list[str]:
    plan = rs.plan(ROWS, COLUMNS, shape=FULL)
    memory = torch.arange(64.0)
    source = memory[:16].view(2, 8)
    pairs = [memory[:16].view(8, 2), memory[8:24].view(8, 2), memory[:32].view(8, 4)[:, ::2]]
    told = [message_of(plan, {"tensor": source}, into={"tensor": into}) for into in pairs]
    assert torch.equal(memory, torch.arange(64.0))
    for into in (memory[16:32].view(8, 2), None):
        mine = local_of(numbered(FULL), ROWS, rank)
        source.copy_(mine)
        out = plan.run({"tensor": source}, into=None if into is None else {"tensor": into})
        assert torch.equal(out["tensor"], local_of(numbered(FULL), COLUMNS, rank))
    return told


def test_a_destination_that_overlaps_a_source_is_an_error(pool: Pool) -> None:
    for told in pool.run(destination_over_source, ranks=FOUR):
        assert all("overlaps a source" in message for message in told)


def tied_sources(rank: int) -> None:
    """Sources are only read: they may share memory as they like."""
    have = {"a": spec(ROWS), "b": spec(ROWS), "c": spec(ROWS, (4, 8))}
    want = {"a": spec(COLUMNS), "b": spec(ROWS), "c": spec(COLUMNS, (4, 8))}
    whole = numbered(FULL)
    full = {"a": whole, "b": whole, "c": whole[::2]}
    mine = local_of(whole, ROWS, rank)
    out = rs.plan(have, want).run({"a": mine, "b": mine, "c": mine[:1]})
    same_bits(out, locals_of(full, want, rank))


def test_tied_sources(pool: Pool) -> None:
    pool.run(tied_sources, ranks=FOUR)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, after it was donated."""
    result = tensor.clone()
    result.untyped_storage().resize_(0)
    return result


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([*tensor])


def unfit(rank: int) -> dict[str, str]:
    plan = rs.plan(ROWS, COLUMNS, shape=FULL)
    mine = local_of(numbered(FULL), ROWS, rank)
    into = torch.zeros(8, 2)
    # Without groups: the other ranks of the pool would have to make them too.
    mesh = DeviceMesh("cpu", [*FOUR], _init_backend=False)
    dtensor = DTensor.from_local(mine, mesh, [Replicate()], run_check=False)
    told = {
        "list": message_of(plan, {"tensor": mine.tolist()}),
        "array": message_of(plan, {"tensor": mine.numpy()}),
        "none": message_of(plan, {"tensor": None}),
        "nothing": message_of(plan, {}),
        "unknown": message_of(plan, {"tensor": mine, "other": mine}),
        "shape": message_of(plan, {"tensor": mine.t()}),
        "dtype": message_of(plan, {"tensor": mine.double()}),
        "sparse": message_of(plan, {"tensor": mine.to_sparse()}),
        "meta": message_of(plan, {"tensor": mine.to("meta")}),
        "nested": message_of(plan, {"tensor": nested(mine)}),
        "freed": message_of(plan, {"tensor": freed(mine) if rank == 1 else mine}),
        "into freed": message_of(plan, {"tensor": mine}, into={"tensor": freed(into)}),
        "dtensor": message_of(plan, {"tensor": dtensor}),
        "into list": message_of(plan, {"tensor": mine}, into={"tensor": [0.0]}),
        "into none": message_of(plan, {"tensor": mine}, into={}),
        "into shape": message_of(plan, {"tensor": mine}, into={"tensor": into.t()}),
        "into dtype": message_of(plan, {"tensor": mine}, into={"tensor": into.int()}),
        "into unknown": message_of(plan, {"tensor": mine}, into={"tensor": into, "other": into}),
    }
    assert bool((into == 0).all())
    assert torch.equal(
        plan.run({"tensor": mine})["tensor"], local_of(numbered(FULL), COLUMNS, rank)
    )
    return told


def test_unfit_tensors_are_named_and_nothing_moves(pool: Pool) -> None:
    for told in pool.run(unfit, ranks=FOUR):
        for how, message in told.items():
            assert '"other"' in message if "unknown" in how else '"tensor"' in message, how
            assert "rank " in message, how
        assert "[2, 8]" in told["shape"]
        assert "[8, 2]" in told["shape"]
        assert "float64" in told["dtype"]
        assert "float32" in told["dtype"]
        assert "list" in told["list"]
        assert "ndarray" in told["array"]
        assert "DTensor" in told["dtensor"]
        assert '"tensor" to move on rank 1 has no memory: its storage was freed' in told["freed"]
        assert "into" in told["into freed"]


def unread_sources(rank: int) -> None:
    """A source that no destination wants need not be given."""
    full = {"a": numbered(FULL), "b": numbered(FULL)}
    have = {name: spec(ROWS) for name in full}
    plan = rs.plan(have, {"a": spec(COLUMNS)}, strict=False)
    for names in ("ab", "a"):
        given = {name: local_of(full[name], ROWS, rank) for name in names}
        out = plan.run(given, timeout=20)
        same_bits(out, {"a": local_of(full["a"], COLUMNS, rank)})


def test_sources_that_nobody_wants(pool: Pool) -> None:
    pool.run(unread_sources, ranks=FOUR)


def tensors_of_other_ranks(rank: int) -> None:
    """What is given and of which nothing is here says nothing of the device of results."""
    have = {"a": rs.TensorSpec((8,), "float32", rs.Layout(rs.Mesh(x=1, ranks=[1]), "x"))}
    have["b"] = rs.TensorSpec((8,), "float32", rs.Layout(rs.Mesh(x=1), "x"))
    whole = rs.Layout(rs.Mesh(x=2), "-")
    want = {name: rs.TensorSpec((8,), "float32", whole) for name in have}
    mine = {"b": torch.arange(8.0)} if rank == 0 else {"a": -torch.arange(8.0)}
    other = "a" if rank == 0 else "b"
    out = rs.plan(have, want).run({other: torch.empty(8, device="meta"), **mine}, timeout=20)
    same_bits(out, {"a": -torch.arange(8.0), "b": torch.arange(8.0)})


def test_tensors_of_which_nothing_is_here_do_not_choose_the_device(pool: Pool) -> None:
    pool.run(tensors_of_other_ranks, ranks=range(2))


def mixed_up_arguments(rank: int) -> None:
    have, want, full = {"a": spec(ROWS)}, {"a": spec(COLUMNS)}, {"a": numbered(FULL)}
    plan = rs.plan(have, want)
    mine = locals_of(full, have, rank)["a"]
    assert "give a dict" in message_of(plan, mine)
    assert "give a dict" in message_of(plan, [mine])
    assert "into= are a Tensor" in message_of(plan, {"a": mine}, into=mine)
    for given, words in (
        ({"group": "world"}, "group= is 'world': give a process group"),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, f"rank {rank} .* is not in the group"),
        ({"timeout": 0}, "a timeout of 0: give a number of seconds above 0"),
        ({"colour": 1}, "a move has no option colour="),
    ):
        with pytest.raises(rs.LiveError, match=words):
            plan.run({"a": mine}, **given)
    same_bits(plan.run({"a": mine}), locals_of(full, want, rank))


def test_arguments_that_were_mixed_up_are_named(pool: Pool) -> None:
    pool.run(mixed_up_arguments, ranks=FOUR)
