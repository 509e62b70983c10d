"""After losses: what is left rebuilds the destination, or the error names what is gone."""

from __future__ import annotations

import itertools
import math
import re
from random import Random

import numpy as np
import pytest

import reshard as rs
from tests import bounds, moves

SHAPE = (24, 10)


def lost_elements(have: rs.Layout, want: rs.Layout, shape: tuple[int, ...]) -> set[int]:
    """Elements that somebody wants and nobody holds any more."""
    size = math.prod(shape)
    wanted = bounds.masks(moves.held(want, shape), size)
    held = bounds.masks(moves.held(have, shape), size)
    return set(np.flatnonzero((wanted != 0) & (held == 0)).tolist())


def named_box(message: str) -> tuple[slice, ...]:
    """The box that an error names."""
    spans = re.search(r"wants box \[([\d:, ]*)\]", message)[1]
    return tuple(slice(*map(int, span.split(":"))) for span in spans.split(", "))


def check_losses(have: rs.Layout, want: rs.Layout, lost: list[int]) -> bool:
    """Plan without the lost ranks; True if it could be done."""
    left = have.without(lost)
    gone = lost_elements(left, want, SHAPE)
    specs = [{"layers.0.w": rs.TensorSpec(SHAPE, "int32", layout)} for layout in (left, want)]
    if not gone:
        plan = rs.plan(*specs)
        moves.check_move(plan)
        assert plan.summary().wire_bytes == moves.needed_bytes(plan)
        senders = {step.source for r in plan.ranks for step in plan.for_rank(r).sends}
        assert not {r for r, sent in moves.first_hand(plan).items() if sent} & set(lost)
        assert senders <= set(plan.ranks)
        return True
    with pytest.raises(rs.CoverageError) as caught:
        rs.plan(*specs)
    message = str(caught.value)
    assert "layers.0.w" in message
    box = np.arange(math.prod(SHAPE)).reshape(SHAPE)[named_box(message)]
    assert box.size
    assert set(box.reshape(-1).tolist()) <= gone, f"{message}: some of this is not lost"
    return False


HAVE = [
    ("dp=4", "- -"),
    ("dp=2 tp=4", "tp -"),
    ("dp=4 tp=2", "- tp:3"),
    ("dp=2 ep=2 tp=2", "(tp ep) -"),
    ("dp=3 tp=2", "tp*4 - | flat dp"),
    ("pp=2 dp=2 tp=2", "- tp | on pp=1"),
]
WANT = [
    ("tp=3", "- tp"),
    ("dp=2 tp=2 @ 8-11", "tp -"),
    ("x=5 @ 3-7", "- -"),
]


@pytest.mark.parametrize(("want_mesh", "want_text"), WANT)
@pytest.mark.parametrize(("mesh", "text"), HAVE)
def test_random_losses(mesh: str, text: str, want_mesh: str, want_text: str) -> None:
    have = rs.Layout(rs.Mesh.parse(mesh), text)
    want = rs.Layout(rs.Mesh.parse(want_mesh), want_text)
    rng = Random(f"{mesh} {text} {want_mesh}")
    done = [
        check_losses(have, want, rng.sample(list(have.ranks), rng.randint(1, len(have.ranks))))
        for _ in range(6)
    ]
    assert check_losses(have, want, []), "without losses"
    assert not check_losses(have, want, list(have.ranks)), "nobody is left"
    assert len(done) == 6


def test_every_loss_of_up_to_three_ranks() -> None:
    """dp=2 tp=3: all is there as long as no pair of replicas is lost together."""
    have, want = rs.Layout(rs.Mesh(dp=2, tp=3), "tp -"), rs.Layout(rs.Mesh(x=2), "- x")
    for count in range(4):
        for lost in itertools.combinations(range(6), count):
            pairs = any(rank in lost and rank + 3 in lost for rank in range(3))
            assert check_losses(have, want, list(lost)) == (not pairs)


def test_losses_of_boxes() -> None:
    boxes = {
        0: [rs.Box((0, 0), (16, 10))],
        1: [rs.Box((8, 0), (24, 10))],
        2: [rs.Box((0, 0), (8, 10)), rs.Box((20, 0), (24, 5))],
    }
    have, want = rs.Layout.from_boxes(SHAPE, boxes), rs.Layout(rs.Mesh(x=2, ranks=[5, 6]), "x -")
    assert [check_losses(have, want, [lost]) for lost in range(3)] == [True, False, True]
    assert not check_losses(have, want, [0, 2])


def test_the_lost_rank_may_come_back_empty() -> None:
    """The rank that lost its memory is a destination again: it gets all of its shard."""
    have = rs.Layout(rs.Mesh(dp=2, tp=2), "tp -")
    plan = rs.plan(have.without([3]), have, shape=SHAPE, dtype="int32")
    moves.check_move(plan)
    assert plan.summary().wire_bytes == SHAPE[0] * SHAPE[1] * 4 // 2
    assert [rank for rank in plan.ranks if len(plan.for_rank(rank).receives)] == [3]


def test_losses_in_the_destination() -> None:
    have, want = rs.Layout(rs.Mesh(tp=4), "tp -"), rs.Layout(rs.Mesh(x=3, ranks=[5, 6, 7]), "x -")
    plan = rs.plan(have, want.without([6]), shape=SHAPE, dtype="int32")
    moves.check_move(plan)
    assert not len(plan.for_rank(6).receives)


def test_survivors_share_the_work() -> None:
    """Three of four replicas are left: each sends a third."""
    have = rs.Layout(rs.Mesh(dp=4), "- -").without([2])
    want = rs.Layout(rs.Mesh(x=1, ranks=[9]), "- -")
    plan = rs.plan(have, want, shape=(4096, 1024), dtype="float32")
    assert plan.summary().busiest_sender_bytes <= 1.02 * 4096 * 1024 * 4 / 3


def test_lost_addends_cannot_be_rebuilt() -> None:
    """A sum needs every addend; replicas of an addend may be lost."""
    have = rs.Layout(rs.Mesh(dp=2, tp=2), "- - | sum dp")
    want = rs.Layout(rs.Mesh(x=1, ranks=[7]), "- -")
    plan = rs.plan(have.without([1, 2]), want, shape=SHAPE, dtype="int32")
    ones = {rank: {"tensor": np.full(SHAPE, rank + 1, np.int32)} for rank in (0, 3)}
    assert (rs.simulate(plan, ones)[7]["tensor"] == 5).all()
    with pytest.raises(rs.CoverageError, match=r'"tensor".*addend 1.*lost'):
        rs.plan(have.without([2, 3]), want, shape=SHAPE, dtype="int32")


def test_a_state_dict_names_the_tensor_that_is_lost() -> None:
    mesh = rs.Mesh(pp=2, dp=2)
    have = {
        "layers.0.w": rs.TensorSpec(SHAPE, "int32", rs.Layout(mesh, "- - | on pp=0")),
        "layers.1.w": rs.TensorSpec(SHAPE, "int32", rs.Layout(mesh, "- - | on pp=1")),
    }
    want = {n: rs.TensorSpec(SHAPE, "int32", rs.Layout(rs.Mesh(x=2), "x -")) for n in have}

    def without(ranks: list[int]) -> dict[str, rs.TensorSpec]:
        return {
            name: rs.TensorSpec(spec.shape, spec.dtype, spec.layout.without(ranks))
            for name, spec in have.items()
        }

    moves.check_move(rs.plan(without([0, 3]), want))
    with pytest.raises(rs.CoverageError, match=r"layers.1.w.*\[0:12, 0:10\].*\[2, 3\] are lost"):
        rs.plan(without([2, 3]), want)
