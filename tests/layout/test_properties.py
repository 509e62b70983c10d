"""Layouts against the oracle: what every rank holds, where it sits, and who holds a box."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from tests import strategies
from tests.cases import Side
from tests.checks import build
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(90, 400), derandomize=True, deadline=None)
Drawn = tuple[Side, tuple[int, ...]]


def assembled(layout: rs.Layout, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """The rank's local tensor of global flat indices, put together from its pieces."""
    local_shape = layout.local_shape(rank, shape)
    local = np.full(math.prod(local_shape), -1, dtype=np.int64)
    everything = np.arange(math.prod(shape)).reshape(shape)
    for piece in layout.pieces(rank, shape):
        box = tuple(slice(lo, hi) for lo, hi in zip(piece.box.start, piece.box.stop, strict=True))
        place = np.full([s.stop - s.start for s in box], piece.offset)
        for dim, stride in enumerate(piece.strides):
            steps = np.arange(place.shape[dim]) * stride
            place += steps.reshape([-1 if d == dim else 1 for d in range(place.ndim)])
        assert (local[place] == -1).all(), f"rank {rank}: {piece} overwrites another piece"
        local[place] = everything[box]
    assert (local != -1).all(), f"rank {rank}: pieces leave holes in the local tensor"
    return local.reshape(local_shape)


@EXAMPLES
@given(strategies.sides())
def test_pieces_local_shapes_and_round_trips(drawn: Drawn) -> None:
    """Each rank holds what the oracle says, others nothing; texts read back as the same layout."""
    side, shape = drawn
    layout, held = build(side, shape), side.held(shape)
    for rank, expected in held.items():
        found = assembled(layout, rank, shape)
        assert found.shape == expected.shape, f"rank {rank}"
        assert (found == expected).all(), f"rank {rank}: {found.tolist()} not {expected.tolist()}"
    ranks = () if side.boxes is not None else rs.Mesh.parse(side.mesh).ranks
    for rank in set(ranks) - set(held):
        assert not layout.pieces(rank, shape)
    names = {"Layout": rs.Layout, "Mesh": rs.Mesh, "Box": rs.Box, "rs": rs}
    again = [eval(repr(layout), names), rs.Layout.from_json(layout.to_json())]
    if side.boxes is None:
        again.append(rs.Layout(layout.mesh, str(layout)))
    for other in again:
        for rank in held:
            assert other.pieces(rank, shape) == layout.pieces(rank, shape)


def test_a_space_before_segments_begins_a_new_word() -> None:
    mesh = rs.Mesh(ep=2, tp=2)
    assert rs.Layout(mesh, "ep {8 tp, 4}").local_shape(0, (4, 12)) == (2, 8)
    assert rs.Layout(mesh, "ep {6,6}").local_shape(0, (4, 12)) == (2, 12)
    assert rs.Layout(mesh, "- ep{6,6}").local_shape(0, (4, 12)) == (4, 6)
    assert rs.Layout(mesh, "- (ep {4 tp, 2})").local_shape(0, (4, 12)) == (4, 4)


@EXAMPLES
@given(strategies.sides(), st.randoms(use_true_random=False))
def test_owners(drawn: Drawn, rng) -> None:
    side, shape = drawn
    layout = build(side, shape)
    spans = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
    everything = np.arange(math.prod(shape)).reshape(shape)
    inside = set(everything[tuple(slice(lo, hi) for lo, hi in spans)].reshape(-1).tolist())
    expected = {index: set() for index in inside}
    for rank, held in side.held(shape).items():
        for index in inside.intersection(held.reshape(-1).tolist()):
            expected[index].add(rank)
    found: dict[int, set[int]] = {}
    box = rs.Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))
    for owners in layout.owners(box, shape):
        part = tuple(slice(a, b) for a, b in zip(owners.box.start, owners.box.stop, strict=True))
        for index in everything[part].reshape(-1).tolist():
            assert index not in found, f"element {index} is in two boxes"
            found[index] = set(owners.ranks)
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}
