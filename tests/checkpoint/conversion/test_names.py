"""Names that rename, join or stack: no tensor is lost, and inconsistent names are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from reshard import checkpoint, cli
from reshard.checkpoint.conversion.names import Outline, outlines_of
from reshard.errors import (
    ArgumentTypeError,
    FormatError,
    NamesError,
    PlanError,
    RulesError,
)
from reshard.planning.names import Names, join, stack, take
from reshard.rules import Rules
from tests.checkpoint.making import write_counting

Run = Callable[..., str]


def outlines(*names: str) -> dict[str, Outline]:
    return {name: Outline((4, 2), "float32") for name in names}


@pytest.mark.parametrize(
    "names",
    [
        {"x.{i}": "a.{i}", "x.0": "b.0"},
        {"x.0": "b.0", "x.{i}": "a.{i}"},
        {"x.{i}": "a.{i}", "x.{j}": "b.{j}"},
        {"x.{i}": "a.{i}", "x.0": stack("b.{e}")},
    ],
)
def test_two_keys_that_make_one_name_are_refused(names: Names) -> None:
    with pytest.raises(NamesError, match=r'makes "x.0" twice, as "x'):
        outlines_of(outlines("a.0", "b.0"), names)


@given(st.sets(st.integers(0, 5), min_size=1))
def test_a_stack_has_all_its_numbers(numbers: set[int]) -> None:
    have = outlines(*(f"layers.7.e.{number}.w" for number in numbers))
    names = {"layers.{i}.w": stack("layers.{i}.e.{n}.w")}
    missing = min(set(range(len(numbers))) - numbers, default=None)
    if missing is None:
        assert outlines_of(have, names) == {"layers.7.w": Outline((len(numbers), 4, 2), "float32")}
    else:
        with pytest.raises(NamesError, match=rf'no "layers\.7\.e\.{missing}\.w"'):
            outlines_of(have, names)


def test_each_stack_counts_its_own_numbers() -> None:
    have = outlines("l.0.e.0", "l.0.e.1", "l.1.e.0")
    found = outlines_of(have, {"l.{i}.w": stack("l.{i}.e.{n}")})
    assert {name: outline.shape[0] for name, outline in found.items()} == {"l.0.w": 2, "l.1.w": 1}
    with pytest.raises(NamesError, match=r'has "l.1.e.2" and no "l.1.e.1"'):
        outlines_of({**have, **outlines("l.1.e.2")}, {"l.{i}.w": stack("l.{i}.e.{n}")})


def test_a_stack_without_a_gap_may_be_listed(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "e.1", "e.3")
    checkpoint.convert(here, tmp_path / "b", names={"e": stack("e.1", "e.3")})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert np.array_equal(new["e"], np.stack([old["e.1"], old["e.3"]]))


def test_a_place_may_stand_twice_in_a_source(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "a.0.0", "a.0.1", "a.1.1")
    checkpoint.convert(here, tmp_path / "b", names={"x.{i}": "a.{i}.{i}"})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(new) == {"x.0", "x.1", "a.0.1"}
    assert np.array_equal(new["x.1"], old["a.1.1"])


def test_a_part_of_a_join_may_be_the_same_for_all(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "shared", "a.0", "a.1")
    checkpoint.convert(here, tmp_path / "b", names={"x.{i}": join("shared", "a.{i}")})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(new) == {"x.0", "x.1"}
    assert np.array_equal(new["x.1"], np.concatenate([old["shared"], old["a.1"]]))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ({"x.{i}": "a.0"}, r"has no \{i\}"),
        ({"x": "a.{i}"}, r"without the \{i\}"),
        ({"x.{i}": join("a.{i}", "b.{j}")}, r"without the \{j\}"),
        ({"x": stack("a.{i}.{j}")}, "without the"),
        ({"x": stack()}, "made of nothing"),
        ({"x": take("a.0", pad={0: 10**24})}, "elements can be counted"),
        ({"x": take("a.0", pad={0: 3})}, "padded in dim 0 to 3 and is 4 long"),
        ({"x": take("a.0", pad={0: -3})}, "padded in dim 0 to -3"),
        ({"x": take("a.0", crop={0: (0, 10**24)})}, "stay inside"),
        ({"x": take("a.0", crop={2: (0, 1)})}, "stay inside"),
    ],
)
def test_names_that_cannot_be_meant(names: Names, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        outlines_of(outlines("a.0", "a.1", "b.0"), names)


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ('"x" = { stack = "e.{n}" }', 'no "e.0"'),
        ('"x.{i}" = "a.0"', "has no {i}"),
        ('"x" = { take = "a.0", pad = { 0 = 1000000000000000000000000 } }', "expected dims"),
        ('"x" = { take = "a.0", pad = { 0 = 4000000000000000000 } }', "can be counted"),
        ('"x" = { take = "a.0", crop = { 0 = [0, 1000000000000000000000000] } }', "expected dims"),
        ('"x" = { join = "a.{part}", rows = { 0 = 0, 1 = 1 } }', "rows above 0"),
        ('"x" = { join = "a.{part}", rows = {} }', "rows above 0"),
        ('"x" = { join = "{part}", rows = { dim = 1, source = 1 } }', "is absent"),
        (f'"x" = {{ stack = "a.{{n}}", dim = {"9" * 5000} }}', "is not TOML"),
        (f'"x" = {{ stack = "a.{{n}}", dim = 0x{"f" * 5000} }}', "only dim is known"),
    ],
)
def test_a_file_of_names_is_refused_in_one_line(
    tmp_path: Path, refusal: Run, toml: str, what: str
) -> None:
    here = write_counting(tmp_path / "a", "a.0", "a.1", "e.1", "e.2")
    (tmp_path / "names.toml").write_text(toml)
    said = refusal("convert", here, tmp_path / "b", "--names", tmp_path / "names.toml")
    assert what in said
    assert not (tmp_path / "b").exists()


def test_empty_sources_are_joined_in_groups_of_rows(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "q", "k", shape=(0, 3))
    checkpoint.convert(here, tmp_path / "b", names={"x": join(source="{part}", q=2, k=2)})
    assert load_file(tmp_path / "b" / "model.safetensors")["x"].shape == (0, 3)


def test_a_tensor_that_a_key_would_match_keeps_its_name_without_a_source(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "a.0", "x.5")
    checkpoint.convert(here, tmp_path / "b", names={"x.{i}": "a.{i}"})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(new) == {"x.0", "x.5"}
    assert np.array_equal(new["x.5"], old["x.5"])


@pytest.mark.parametrize("options", [{"names": ["w"]}, {"layouts": ["w"]}])
def test_what_is_no_dict_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"(names|layouts)= got a value of type list: give"):
        checkpoint.convert(write_counting(tmp_path / "a", "w"), tmp_path / "b", **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": "tp=2", "layouts": {5: "tp -"}}, "a name or pattern got 5: give a text"),
        ({"mesh": "tp=2", "layouts": {"a.w": ["tp"]}}, 'the layout of "a.w" got a value of type'),
        ({"dtype": {5: "bfloat16"}}, "a name or pattern got 5: give a text"),
        ({"names": {5: "a.w"}}, "a name in names= got 5: give a dict"),
        ({"drop": [5]}, "a name or pattern got 5: give a text"),
        ({"drop": "a.w"}, "drop= got 'a.w': give a list"),
        ({"drop": None}, "drop= got None: give a list"),
    ],
)
def test_names_that_are_no_texts_are_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    (tmp_path / "a").mkdir()
    save_file({"a.w": np.ones((4, 2), np.float32)}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ArgumentTypeError, match=text):
        checkpoint.convert(tmp_path / "a", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_parts_may_be_called_as_arguments_are(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "l.dim", "l.source")
    (tmp_path / "n.toml").write_text('x = { join = "l.{part}", rows = { dim = 2, source = 2 } }')
    names = ["--names", str(tmp_path / "n.toml"), "--quiet"]
    assert cli.run(["convert", str(here), str(tmp_path / "b"), *names]) == 0
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    pairs = [old[name][at : at + 2] for at in (0, 2) for name in ("l.dim", "l.source")]
    assert np.array_equal(new["x"], np.concatenate(pairs))


RULES = """
axes = ["tp"]
[tensors]
"*.qkv" = "tp -"
"*.experts" = "- tp -"
[names]
"layers.{i}.qkv" = { join = ["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"] }
"layers.{i}.experts" = { stack = "layers.{i}.expert.{e}", dim = 0 }
"""


def test_rules_say_what_is_joined(tmp_path: Path) -> None:
    """One file cuts, renames and joins; names that are given win over its own."""
    parts = [
        f"layers.{i}.{part}" for i in range(2) for part in ("q", "k", "v", "expert.0", "expert.1")
    ]
    tensors = {name: np.full((4, 4), at, np.float32) for at, name in enumerate(parts)}
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    rules = tmp_path / "rules.toml"
    checkpoint.convert(tmp_path / "source", tmp_path / "cut", rules=rules, mesh="tp=2")
    checkpoint.convert(tmp_path / "cut", tmp_path / "whole")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    for i in range(2):
        row = [tensors[f"layers.{i}.{part}"] for part in ("q", "k", "v")]
        assert np.array_equal(found.pop(f"layers.{i}.qkv"), np.concatenate(row))
        experts = [tensors[f"layers.{i}.expert.{e}"] for e in range(2)]
        assert np.array_equal(found.pop(f"layers.{i}.experts"), np.stack(experts))
    assert not found
    checkpoint.convert(tmp_path / "source", tmp_path / "same", rules=rules, names={})
    assert checkpoint.verify(tmp_path / "source", tmp_path / "same").ok


def test_names_in_rules_are_checked(tmp_path: Path) -> None:
    rules = Rules.parse('[names]\n"a" = { glue = "b" }')
    with pytest.raises(FormatError, match='"a" in the names'):
        checkpoint.convert(write_counting(tmp_path / "a", "b"), tmp_path / "c", rules=rules)
    with pytest.raises(RulesError, match='key "names"'):
        Rules.parse("names = 3")
