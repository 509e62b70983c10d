"""Paths of modules, parameters and buffers, ties, and children that are swapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reshard as rs
from reshard.nn.paths import (
    Slot,
    find_module,
    find_slot,
    holders,
    is_below,
    is_pattern,
    matching,
    parents,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
        self.table = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Tanh()})
        self.norm = nn.BatchNorm1d(2)
        self.label = "a text"
        self.loose = torch.ones(2)
        self.register_parameter("absent", None)

    @property
    def first(self) -> nn.Module:
        return self.layers[0]


def test_modules_are_found() -> None:
    model = Model()
    assert find_module(model, "") is model
    assert find_module(model, "layers.1.0") is model.layers[1][0]
    assert find_module(model, "first") is model.layers[0]


def test_an_empty_container_is_found() -> None:
    empty = nn.Sequential()
    assert find_module(nn.ModuleDict({"a": empty}), "a") is empty


def test_parameters_and_buffers_are_found() -> None:
    model = Model()
    weight, mean = find_slot(model, "layers.0.weight"), find_slot(model, "norm.running_mean")
    assert weight == Slot(model.layers[0], "weight")
    assert weight.tensor is model.layers[0].weight
    assert mean.tensor is model.norm.running_mean


def test_B9_B90_the_error_has_the_full_path() -> None:
    with pytest.raises(AttributeError, match="has no attribute") as raised:
        find_slot(Model(), "layers.1.0.wieght")
    assert '"layers.1.0.wieght"' in str(raised.value)
    assert "Linear" in str(raised.value)
    assert 'the nearest is "weight"' in str(raised.value)


def test_B90_a_path_that_ends_too_early() -> None:
    with pytest.raises(AttributeError, match="has no attribute") as raised:
        find_slot(Model(), "layers.7.weight")
    assert '"layers.7.weight"' in str(raised.value)
    assert '"layers"' in str(raised.value)


def test_a_parameter_is_no_module() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute.*found Parameter"):
        find_module(Model(), "layers.0.weight")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("label", "str"),
        ("absent", "NoneType"),
        ("loose", "a plain Tensor"),
        ("norm", "BatchNorm1d"),
    ],
)
def test_B10_what_is_no_tensor_is_named(path: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"Model\.{path}.*found {kind}"):
        find_slot(Model(), path)


def test_D22_all_holders_of_a_tied_parameter() -> None:
    model = Model()
    model.layers[1][0].weight = model.layers[0].weight
    found = holders(model)[id(model.layers[0].weight)]
    assert found == (Slot(model.layers[0], "weight"), Slot(model.layers[1][0], "weight"))


def test_D22_a_shared_module_is_listed_once() -> None:
    layer = nn.Linear(2, 2)
    pair = nn.ModuleList([layer, layer])
    assert holders(pair)[id(layer.weight)] == (Slot(layer, "weight"),)
    assert parents(pair, layer) == ((pair, "0"), (pair, "1"))


def test_a_slot_keeps_its_place_in_the_order() -> None:
    layer = nn.Linear(2, 2)
    new = nn.Parameter(torch.ones(2, 2))
    find_slot(layer, "weight").put(new)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.weight is new


@pytest.mark.parametrize(
    ("path", "above", "expected"),
    [
        ("fc1.weight", "fc1", True),
        ("fc10.weight", "fc1", False),
        ("fc1", "fc1", True),
        ("fc1", "fc1.0", False),
        ("a.fc1.weight", "fc1", False),
        ("anything", "", True),
    ],
)
def test_D5_whole_parts_are_compared(path: str, above: str, expected: bool) -> None:
    assert is_below(path, above) is expected


NAMES = ["fc1", "fc1.weight", "fc10.weight", "h.0.b.weight", "h.10.b.weight", "h.x.b.weight"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("fc*.weight", ["fc1.weight", "fc10.weight"]),
        ("fc1*.*", ["fc1.weight", "fc10.weight"]),
        ("h.{i}.b.weight", ["h.0.b.weight", "h.10.b.weight"]),
        ("h.*.weight", ["h.0.b.weight", "h.10.b.weight", "h.x.b.weight"]),
        ("**.weight", NAMES[1:]),
        ("*.b.*", NAMES[3:]),
        ("FC1.*", []),
        ("{i}", []),
    ],
)
def test_B122_patterns_are_those_of_rules_files(pattern: str, expected: list[str]) -> None:
    assert matching(pattern, NAMES) == expected
    assert is_pattern(pattern)
    assert not any(map(is_pattern, NAMES))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("fc?.weight", ["not wildcards", "{i}", "* for any text"]),
        ("fc[0-9].weight", ["not wildcards", "{i}", "* for any text"]),
        ("*", ['"fc1" and', 'also "fc1.weight"', "{i}", "** for any depth"]),
        ("*.weight", ['"fc1.weight" and', 'also "h.0.b.weight"', "{i}", "** for any depth"]),
    ],
)
def test_B122_patterns_of_older_versions_name_the_new_spelling(
    pattern: str, texts: list[str]
) -> None:
    with pytest.raises(rs.ArgumentError) as raised:
        matching(pattern, NAMES)
    assert pattern in str(raised.value)
    for text in texts:
        assert text in str(raised.value)
