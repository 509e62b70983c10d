"""What ranks tell each other of their tensors: text that survives, and one answer or one error."""

import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard as rs
from reshard.tensors.merging import merge_specs
from reshard.tensors.reading import whole_on
from reshard.tensors.texts import SCHEMA, specs_from_text, specs_to_text
from tests.cases import Side
from tests.checks import build
from tests.strategies import sides

ROWS = rs.TensorSpec((8, 4), "float32", rs.Layout(rs.Mesh(tp=4), "tp -"))


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
    read = specs_from_text(specs_to_text(specs))
    assert list(read) == list(specs)
    for name, spec in specs.items():
        assert (read[name].shape, read[name].dtype) == (spec.shape, spec.dtype)
        assert read[name].layout == spec.layout


def test_many_tensors_that_share_a_layout_are_a_short_text() -> None:
    names = [f"model.layers.{i // 384}.mlp.experts.{i % 384}.w.weight" for i in range(18_000)]
    specs = dict.fromkeys(names, ROWS)
    started = time.process_time()
    text = specs_to_text(specs)
    read = {rank: specs_from_text(text) for rank in range(8)}
    merged = merge_specs(read)
    seconds = time.process_time() - started
    assert merged == specs
    assert len(text) < sum(map(len, names)) + 8 * len(names)
    assert seconds < 2


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
        specs_from_text(json.dumps(valid() | {key: value}))


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "7", '"x"', "[" * 100_000, '{"schema":1}'])
def test_texts_of_something_else(text: str) -> None:
    with pytest.raises(rs.FormatError):
        specs_from_text(text)


def test_damaged_texts_are_read_or_refused() -> None:
    text = json.dumps(valid())
    chance = random.Random(0)
    for _ in range(2000):
        at = chance.randrange(len(text))
        damaged = (
            text[:at] + chance.choice(['"', "0", "9" * 30, "[", "}", "", "-"]) + text[at + 1 :]
        )
        try:
            assert isinstance(specs_from_text(damaged), dict)
        except rs.FormatError as error:
            said = str(error)
            assert "\n" not in said, said


def test_ranks_that_agree() -> None:
    other_words = replace(ROWS, layout=rs.Layout(rs.Mesh(x=4), "x[2,2,2,2] ..."))
    specs = {0: {"w": ROWS, "b": plain(0)}, 1: {"w": other_words}, 7: {"b": plain(7)}, 9: {}}
    merged = merge_specs(specs)
    assert merged["w"] is ROWS
    assert merged["b"] == rs.TensorSpec((8, 4), "float32", whole_on((0, 7)))
    assert list(merged) == ["w", "b"]
    assert merge_specs({}) == {}
    assert merge_specs({3: {"b": plain(3)}})["b"].layout == whole_on((3,))


def test_the_answer_does_not_depend_on_the_order() -> None:
    specs = {rank: {"b": plain(rank), "w": ROWS} for rank in (5, 2, 9)}
    backwards = dict(reversed(specs.items()))
    assert merge_specs(specs) == merge_specs(backwards)
    assert merge_specs(specs)["b"].layout == whole_on((2, 5, 9))


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (replace(ROWS, shape=(8, 6)), 'float32 (8, 6) "tp -" over "tp=4"'),
        (replace(ROWS, dtype="bfloat16"), 'bfloat16 (8, 4) "tp -" over "tp=4"'),
        (plain(3), "float32 (8, 4) whole"),
    ],
)
def test_ranks_that_differ(odd: rs.TensorSpec, said: str) -> None:
    specs = {rank: {"w": ROWS, "v": ROWS} for rank in range(3)} | {3: {"w": odd, "v": ROWS}}
    with pytest.raises(rs.DisagreementError) as caught:
        merge_specs(specs)
    assert str(caught.value) == (
        f'"w" is float32 (8, 4) "tp -" over "tp=4" on ranks 0-2 and {said} on rank 3: '
        "every rank must describe the same tensor"
    )


def test_plain_tensors_that_differ() -> None:
    specs = {rank: {"w": plain(rank)} for rank in range(3)} | {3: {"w": plain(3, (8, 6))}}
    with pytest.raises(rs.DisagreementError, match=r"\(8, 4\) whole on ranks 0-2 and .*\(8, 6\)"):
        merge_specs(specs)
    # A whole tensor that another rank speaks of is not this rank's own.
    with pytest.raises(rs.DisagreementError, match="on rank 1"):
        merge_specs({0: {"w": plain(0)}, 1: {"w": plain(5)}})


def test_boxes_that_differ_and_many_tensors() -> None:
    one, other = boxes((0, 0, 4), (1, 4, 8)), boxes((0, 0, 5), (1, 5, 8))
    names = [f"w{i}" for i in range(9)]
    with pytest.raises(rs.DisagreementError) as caught:
        merge_specs({0: dict.fromkeys(names, one), 1: dict.fromkeys(names, other)})
    said = str(caught.value)
    assert "Box((0, 0), (4, 4))" in said
    assert "Box((0, 0), (5, 4))" in said
    assert '(and 8 more tensors, such as "w1", "w2", "w3", "w4")' in said


def test_schema_has_a_version() -> None:
    assert json.loads(specs_to_text({}))["schema"] == SCHEMA == "reshard.specs/1"
