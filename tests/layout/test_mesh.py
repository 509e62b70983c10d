"""Meshes: which rank sits where, and texts that read back as they were written."""

from __future__ import annotations

import itertools
import math
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from tests import oracle, strategies
from tests.generate import Mesh as Drawn
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(100, 200), derandomize=True, deadline=None)
MAX_SECONDS = 10.0


@EXAMPLES
@given(strategies.meshes())
def test_coordinates(drawn: Drawn) -> None:
    mesh = rs.Mesh(**drawn.axes, ranks=drawn.ranks)
    assert (dict(mesh.axes), tuple(mesh.ranks)) == (drawn.axes, drawn.ranks)
    assert mesh.num_ranks == math.prod(drawn.axes.values())
    for place, (rank, at) in enumerate(oracle.coordinates(str(drawn))):
        assert mesh.coords(rank) == at
        assert mesh.index(rank) == place
        assert place == sum(at[axis] * mesh.stride(axis) for axis in at)
    assert mesh.index(99) is None


@EXAMPLES
@given(strategies.meshes())
def test_round_trips(drawn: Drawn) -> None:
    mesh = rs.Mesh(**drawn.axes, ranks=drawn.ranks)
    assert str(mesh) == str(drawn)
    for again in (
        rs.Mesh.parse(str(mesh)),
        rs.Mesh.parse(f"  {str(mesh).replace(' ', '   ').replace(',', ' , ')} "),
        eval(repr(mesh), {"Mesh": rs.Mesh}),
        pickle.loads(pickle.dumps(mesh)),
    ):
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert str(again) == str(mesh)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (rs.Mesh(dp=2, tp=4), "dp=2 tp=4"),
        (rs.Mesh(tp=2, ranks=[8, 9]), "tp=2 @ 8-9"),
        (rs.Mesh(dp=2, tp=4, ranks=[8, 9, 10, 11, 16, 17, 18, 19]), "dp=2 tp=4 @ 8-11,16-19"),
        (rs.Mesh(tp=4, ranks=range(0, 8, 2)), "tp=4 @ 0,2,4,6"),
        (rs.Mesh(tp=3, ranks=(2, 1, 0)), "tp=3 @ 2,1,0"),
        (rs.Mesh(tp=1), "tp=1"),
        (rs.Mesh(_a1=2, B=1), "_a1=2 B=1"),
    ],
)
def test_texts(mesh: rs.Mesh, text: str) -> None:
    assert str(mesh) == text
    assert rs.Mesh.parse(text) == mesh


def test_any_identifier_names_an_axis() -> None:
    for name in ("self", "cls", "more", "axes", "text"):
        mesh = rs.Mesh.parse(f"{name}=2")
        assert mesh == rs.Mesh(**{name: 2}) == pickle.loads(pickle.dumps(mesh))
        assert rs.Layout(mesh, f"{name} -").local_shape(1, (4, 2)) == (2, 2)


def test_equality_is_of_axes_and_ranks() -> None:
    mesh = rs.Mesh(dp=2, tp=2)
    assert mesh == rs.Mesh(dp=2, tp=2, ranks=[0, 1, 2, 3])
    different = [rs.Mesh(tp=2, dp=2), rs.Mesh(dp=4), rs.Mesh(dp=2, tp=2, ranks=[0, 2, 1, 3])]
    assert all(mesh != other for other in different)
    assert mesh != "dp=2 tp=2"
    assert len({mesh, *different, rs.Mesh(dp=2, tp=2)}) == 4


def test_a_mesh_cannot_be_changed_by_its_axes() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        rs.Mesh(dp=2).axes["dp"] = 3  # type: ignore[index]


def test_large_meshes_cost_nothing() -> None:
    start = time.process_time()
    mesh = rs.Mesh(dp=2048, tp=8, ranks=range(100, 100 + 16384))
    assert mesh.coords(100 + 16383) == {"dp": 2047, "tp": 7}
    assert str(mesh) == "dp=2048 tp=8 @ 100-16483"
    assert len(pickle.dumps(mesh)) < 1000
    assert time.process_time() - start < 0.1


HUGE = 1 << 20
HOSTILE = {
    "one long word": "x" * HUGE,
    "many equal axes": "a=1 " * (HUGE // 4),
    "a long number": "tp=" + "9" * HUGE,
    "a large axis": "tp=999999999999",
    "a product of many": " ".join(f"a{i}=99999999999" for i in range(1000)),
    "commas": "tp=2 @ " + "," * HUGE,
    "many long ranges": "tp=2 @ " + ",".join(["0-9999999"] * 1000),
    "ranks twice": "tp=200000 @ 0-99999,0-99999",
    "a rank that is a long number": "tp=1 @ " + "9" * HUGE,
    "a long range": "tp=2 @ 0-16777215",
    "a range that is longer": "tp=2 @ 0-999999999999",
    "other digits": "tp=\u0664",
    "superscripts": "tp=\u00b2",
    "nothing": "",
    "ats": "@" * 300,
    "zero byte": "tp=2\0",
    "a sign": "tp=+2",
    "underscores": "tp=1_0",
    "backwards": "tp=2 @ 9-8",
}


@pytest.mark.timeout(60, method="signal")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_texts_are_refused_quickly(kind: str) -> None:
    start = time.process_time()
    with pytest.raises(rs.ReshardError) as caught:
        rs.Mesh.parse(HOSTILE[kind])
    assert time.process_time() - start < MAX_SECONDS
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000, f"a message of {len(message)} characters"


@EXAMPLES
@given(st.text(alphabet="dt=p12@-, \n*\0\u0661", max_size=20))
def test_any_text_is_a_mesh_or_one_error(text: str) -> None:
    mesh, message = None, ""
    try:
        mesh = rs.Mesh.parse(text)
    except rs.ReshardError as error:
        message = str(error)
    assert "\n" not in message
    assert mesh is None or rs.Mesh.parse(str(mesh)) == mesh


def test_a_mesh_of_too_many_axes_is_named() -> None:
    text = " ".join(f"a{number}=1" for number in range(33))
    message = 'mesh "a0=1 a1=1 .* has 33 axes: at most 32 work; use fewer'
    with pytest.raises(rs.MeshError, match=message):
        rs.Mesh.parse(text)


def test_places_without_axes() -> None:
    """No axis at all is one place: what a 0-d mesh of one rank would be."""
    mesh = rs.Mesh()
    assert (mesh.num_ranks, list(mesh.ranks)) == (1, [0])
    assert rs.Mesh.parse(str(mesh)) == eval(repr(mesh), {"Mesh": rs.Mesh}) == mesh
    assert mesh.coords(0) == {}
    assert list(itertools.islice(rs.Mesh(ranks=[5]).ranks, 2)) == [5]


def test_falling_ranks_are_the_same_however_they_are_given() -> None:
    falling = rs.Mesh(tp=3, ranks=range(2, -1, -1))
    assert falling == rs.Mesh(tp=3, ranks=[2, 1, 0]) == rs.Mesh.parse(str(falling))
