"""Plain values beside tensors: from ``.pt`` to ``.distcp`` and on, and nothing lost in silence."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard import checkpoint
from reshard.checkpoint.formats.distcp_writer import pickled
from reshard.checkpoint.formats.torch.unpickler import unpickle


def trained() -> dict[str, Any]:
    """A model and its optimizer after a step, as training scripts save them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 7,
        "best": float("inf"),
        "git": "abc\u00e9",
        "raw": b"\x00\xff",
        "history": [[1, 2.5, None], ["a", True]],
        "big": 1 << 400,
    }


def emptied(value: Any) -> Any:
    """The same, with other values in all places."""
    match value:
        case torch.Tensor():
            return torch.zeros_like(value)
        case dict():
            return {key: emptied(one) for key, one in value.items()}
        case [{}, *_]:
            return [emptied(one) for one in value]
    return "another"


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@pytest.mark.parametrize(
    "layouts", [{}, {"mesh": "dp=2", "layouts": {"model.weight": "dp -", "*": "..."}}]
)
def test_dcp_loads_the_values_of_a_pt(tmp_path: Path, layouts: dict[str, Any]) -> None:
    state = trained()
    torch.save(state, tmp_path / "last.pt")
    report = checkpoint.convert(tmp_path / "last.pt", tmp_path / "dcp", format="distcp", **layouts)
    assert report.left_out == ()
    found = emptied(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    assert same(found, state)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert same(back["optimizer"]["param_groups"], state["optimizer"]["param_groups"])
    assert checkpoint.verify(tmp_path / "dcp").ok
    assert checkpoint.verify(tmp_path / "last.pt", tmp_path / "dcp").ok
    again = checkpoint.convert(tmp_path / "back.pt", tmp_path / "again", format="distcp")
    assert again.left_out == ()
    assert checkpoint.diff(tmp_path / "dcp", tmp_path / "again").equal


def test_values_of_distcp_go_to_the_headers_of_safetensors(tmp_path: Path) -> None:
    """As those of a .pt do; what JSON cannot hold is listed."""
    torch.save(trained(), tmp_path / "last.pt")
    checkpoint.convert(tmp_path / "last.pt", tmp_path / "dcp", format="distcp")
    said = {}
    for source in ("last.pt", "dcp"):
        report = checkpoint.convert(tmp_path / source, tmp_path / f"full-{source}")
        assert set(report.left_out) == {"best", "raw"}
        with safe_open(tmp_path / f"full-{source}" / "model.safetensors", "pt") as file:
            said[source] = file.metadata()
    assert said["last.pt"] == said["dcp"]
    assert said["dcp"]["optimizer.param_groups.0.betas"] == "[0.5, 0.75]"
    assert said["dcp"]["epoch"] == "7"


class Custom:
    pass


def test_what_cannot_be_carried_is_listed(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "x": Custom(), "args": {"set": {1}, "n": 1, "path": Path("a")}}
    torch.save(state, tmp_path / "a.pt")
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "dcp", format="distcp")
    assert set(report.left_out) == {"x", "args.set", "args.path"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2), "x": Custom()}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert checkpoint.convert(tmp_path / "b", tmp_path / "full").left_out == ("x",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_set_does_not_become_a_list(tmp_path: Path, protocol: int) -> None:
    """Newer protocols have instructions for sets and a bytearray, which are no plain values."""
    others = {"set": {1, 2}, "none": set(), "frozen": frozenset({3}), "array": bytearray(b"x")}
    state = {"w": torch.ones(2), **others, "list": [1, 2], "bytes": b"x"}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "out", format="distcp")
    assert sorted(report.left_out) == ["array", "frozen", "none", "set"]
    assert checkpoint.inspect(tmp_path / "out").objects.keys() == {"list", "bytes"}


def test_values_with_names_that_safetensors_files_reserve_are_listed(tmp_path: Path) -> None:
    taken = {"reshard": 3, "DCP_SHARDING_INFO": "x", "DCP_VERSION": 2, "format": "mine"}
    torch.save({"w": torch.ones(2), "step": 4, **taken}, tmp_path / "a.pt")
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "out")
    assert set(report.left_out) == taken.keys()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "4"}


def test_values_of_ranks_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for rank in range(2):
        state = {"w": torch.ones(2, 2), "iteration": 3, "betas": (0.5, 0.75)}
        torch.save(state, source / f"model_rank_{rank}.pt")
    rules = tmp_path / "cut.toml"
    rules.write_text('axes = ["tp"]\n[tensors]\n"w" = "tp -"\n')
    checkpoint.convert(
        source, tmp_path / "dcp", format="distcp", source_rules=rules, source_mesh="tp=2"
    )
    found = {"w": torch.zeros(4, 2), "iteration": 0, "betas": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["iteration"] == 3
    assert found["betas"] == (0.5, 0.75)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(1 << 59), 1 << 59), inner)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_pickles_are_read_by_python_and_by_us(value: Any) -> None:
    data = pickled(value)
    assert same(pickle.loads(data), value)
    assert same(unpickle(data, "x"), value)
    for protocol in (2, 5):
        old = pickle.dumps(value, protocol)
        assert same(unpickle(old, "x"), value)


def test_a_tensor_keeps_an_empty_name_and_one_without_a_name_gets_one(tmp_path: Path) -> None:
    torch.save({"": torch.ones(2), "tensor": torch.ones(3)}, tmp_path / "dict.pt")
    torch.save(torch.ones(4), tmp_path / "alone.pt")
    assert {one.name for one in checkpoint.inspect(tmp_path / "dict.pt").tensors} == {"", "tensor"}
    assert [one.name for one in checkpoint.inspect(tmp_path / "alone.pt").tensors] == ["tensor"]
