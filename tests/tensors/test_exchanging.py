"""What ranks tell each other of their tensors is text that survives, or is refused in one line."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as rs
from reshard.tensors.exchanging import SCHEMA, specs_from_texts, specs_to_text
from reshard.tensors.local import whole_on
from tests.cases import Side
from tests.checks import build
from tests.strategies import sides

ROWS = rs.TensorSpec((8, 4), "float32", rs.Layout(rs.Mesh(tp=4), "tp -"))


def read_text(text: str) -> dict[str, rs.TensorSpec]:
    return specs_from_texts({0: text})[0]


def plain(rank: int, shape: tuple[int, ...] = (8, 4), dtype: str = "float32") -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, whole_on((rank,)))


def boxes(*rows: tuple[int, int, int]) -> rs.TensorSpec:
    held = {rank: [rs.Box((low, 0), (high, 4))] for rank, low, high in rows}
    return rs.TensorSpec((8, 4), "float32", rs.Layout.from_boxes((8, 4), held))


@given(st.dictionaries(st.text(max_size=8), sides(), max_size=4))
def test_any_specs_survive_as_text(found: dict[str, tuple[Side, tuple[int, ...]]]) -> None:
    specs = {
        name: rs.TensorSpec(shape, "bfloat16", build(side, shape))
        for name, (side, shape) in found.items()
    }
    read = read_text(specs_to_text(specs))
    assert list(read) == list(specs)
    for name, spec in specs.items():
        assert (read[name].shape, read[name].dtype) == (spec.shape, spec.dtype)
        assert read[name].layout == spec.layout


def valid() -> dict[str, object]:
    specs = {"a": ROWS, "b": plain(3), "c": boxes((0, 0, 8)), "d": ROWS}
    data: dict[str, object] = json.loads(specs_to_text(specs))
    return data


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("schema", "reshard.plan/1", 'this is "reshard.plan/1"'),
        ("layouts", None, "this is"),
        ("layouts", [], r"a kind is \[shape, dtype, layout\]"),
        ("layouts", [{"mesh": "tp=", "layout": "-"}] * 3, "cannot be read"),
        ("layouts", [{"mesh": "tp=2", "layout": "(("}] * 3, "cannot be read"),
        ("layouts", [{"mesh": "tp=2"}] * 3, "a layout is"),
        ("layouts", [7, 7, 7], "a layout is"),
        ("kinds", [[[8, 4], "float32"]] * 3, "a kind is"),
        ("kinds", [[[8, -4], "float32", 0]] * 3, "a kind is"),
        ("kinds", [[[8, True], "float32", 0]] * 3, "a kind is"),
        ("kinds", [[[8, 4.5], "float32", 0]] * 3, "a kind is"),
        ("kinds", [[[8, 4], "float32", -1]] * 3, "a kind is"),
        ("kinds", [[[8, 4], "float32", 9]] * 3, "a kind is"),
        ("kinds", [[[8, 4], "float33", 0]] * 3, "is not a dtype"),
        ("kinds", [[[8, 4, 2], "float32", 0]] * 3, "has 3 dims"),
        ("kinds", [[[1] * 99, "float32", 1]] * 3, "a kind is"),
        ("kinds", [[[1 << 60, 4], "float32", 1]] * 3, "elements"),
        ("kind_of", [0, 1, 2], "4 names and 3 kinds"),
        ("kind_of", [0, 1, 2, 3], "a number below 3"),
        ("kind_of", [0, 1, 2, -1], "a number below 3"),
        ("kind_of", [0, 1, 2, True], "a number below 3"),
        ("names", ["a", "b", "c", "a"], "4 names, of which 3 are distinct"),
        ("names", ["a", "b", "c", 4], "expected a name"),
        ("names", ["a", "b", "c", None], "expected a name"),
    ],
)
def test_broken_texts_are_named(key: str, value: object, named: str) -> None:
    with pytest.raises(rs.FormatError, match=named):
        read_text(json.dumps(valid() | {key: value}))


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "7", '"x"', "[" * 100_000, '{"schema":1}'])
def test_texts_of_something_else(text: str) -> None:
    with pytest.raises(rs.FormatError):
        read_text(text)


def test_damaged_texts_are_read_or_refused() -> None:
    text = json.dumps(valid())
    chance = random.Random(0)
    for _ in range(2000):
        at = chance.randrange(len(text))
        damaged = (
            text[:at] + chance.choice(['"', "0", "9" * 30, "[", "}", "", "-"]) + text[at + 1 :]
        )
        try:
            assert isinstance(read_text(damaged), dict)
        except rs.FormatError as error:
            said = str(error)
            assert "\n" not in said, said


def test_schema_has_a_version() -> None:
    assert json.loads(specs_to_text({}))["schema"] == SCHEMA == "reshard.specs/1"
