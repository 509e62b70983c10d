"""Requests that nobody should make, and folders that nobody should have: refused in words, or done
without losing a tensor, a value or a digit silently.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from reshard import checkpoint, cli, sharded
from reshard.checkpoint.casting import check_cast, is_float
from reshard.checkpoint.cutting import Cut, Parameters, wanted_of
from reshard.checkpoint.formats import read
from reshard.checkpoint.renaming import Outline, outlines_of
from reshard.checkpoint.storage import open_storage
from reshard.dtypes import ITEMSIZE
from reshard.errors import (
    CheckpointError,
    DtypeError,
    FormatError,
    NamesError,
    PlanError,
    RulesError,
)
from reshard.layout import Layout
from reshard.mesh import Mesh
from reshard.planning.names import Names, join, stack, take
from reshard.rules import Rules
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

Run = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must be refused; what it says, in one line."""

    def run(*arguments: object) -> str:
        assert cli.run([str(argument) for argument in arguments]) == 2
        out, said = capsys.readouterr()
        assert out == ""
        assert said.count("\n") == 1, said
        assert "internal error" not in said
        return said

    return run


def write(folder: Path, *names: str, shape: tuple[int, ...] = (4, 2), dtype: str = "f4") -> Path:
    folder.mkdir()
    count = int(np.prod(shape))
    arrays = {
        name: np.arange(count, dtype=dtype).reshape(shape) + at for at, name in enumerate(names)
    }
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
    here = write(tmp_path / "a", "e.1", "e.3")
    checkpoint.convert(here, tmp_path / "b", names={"e": stack("e.1", "e.3")})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert np.array_equal(new["e"], np.stack([old["e.1"], old["e.3"]]))


def test_a_place_may_stand_twice_in_a_source(tmp_path: Path) -> None:
    here = write(tmp_path / "a", "a.0.0", "a.0.1", "a.1.1")
    checkpoint.convert(here, tmp_path / "b", names={"x.{i}": "a.{i}.{i}"})
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(new) == {"x.0", "x.1", "a.0.1"}
    assert np.array_equal(new["x.1"], old["a.1.1"])


def test_a_part_of_a_join_may_be_the_same_for_all(tmp_path: Path) -> None:
    here = write(tmp_path / "a", "shared", "a.0", "a.1")
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
    here = write(tmp_path / "a", "a.0", "a.1", "e.1", "e.2")
    (tmp_path / "names.toml").write_text(toml)
    said = refusal("convert", here, tmp_path / "b", "--names", tmp_path / "names.toml")
    assert what in said
    assert not (tmp_path / "b").exists()


def test_parts_may_be_called_as_arguments_are(tmp_path: Path) -> None:
    here = write(tmp_path / "a", "l.dim", "l.source")
    (tmp_path / "n.toml").write_text('x = { join = "l.{part}", rows = { dim = 2, source = 2 } }')
    names = ["--names", str(tmp_path / "n.toml"), "--quiet"]
    assert cli.run(["convert", str(here), str(tmp_path / "b"), *names]) == 0
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    pairs = [old[name][at : at + 2] for at in (0, 2) for name in ("l.dim", "l.source")]
    assert np.array_equal(new["x"], np.concatenate(pairs))


def indexed(folder: Path) -> Path:
    """Two files with an index, as Hugging Face has them, and others that are none of them."""
    folder.mkdir()
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, path in parts.items():
        save_file({name: np.arange(6.0)}, folder / path, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    save_file({"a": np.zeros(3), "c": np.ones(2)}, folder / "consolidated.safetensors")
    (folder / "sub").mkdir()
    save_file({"d": np.zeros(3)}, folder / "sub" / "stray.safetensors")
    for path in ("old.distcp.txt", "config.json", "sub/notes.md"):
        (folder / path).write_text("{}")
    for path in ("training_args.bin", "__3_0.distcp.bin", "pytorch_model.bin.index.json"):
        (folder / path).write_bytes(b"PK")
    return folder


STRAYS = {"consolidated.safetensors", "sub/stray.safetensors"}
OF_TORCH = {"training_args.bin", "__3_0.distcp.bin", "pytorch_model.bin.index.json"}
"""Beside safetensors or a .metadata nobody takes these for tensors, unless files are of ranks."""


@pytest.mark.parametrize("form", ["full", "sharded", "distcp", "ranks"])
def test_files_of_other_tensors_are_not_copied(tmp_path: Path, form: str) -> None:
    here = indexed(tmp_path / "a")
    cut: dict[str, Any] = {} if form == "full" else {"mesh": "x=2", "layouts": {"*": "x"}}
    report = checkpoint.convert(here, tmp_path / "b", format=form, **cut)
    strays = STRAYS | OF_TORCH if form == "ranks" else STRAYS
    assert set(report.left_out) == strays
    assert "left out" in str(report)
    assert checkpoint.verify(here, tmp_path / "b").ok
    written = {str(p.relative_to(tmp_path / "b")) for p in (tmp_path / "b").rglob("*")}
    assert written >= {"config.json", "sub/notes.md", "old.distcp.txt"}
    assert not written & strays
    assert form == "ranks" or written >= OF_TORCH


def dtypes_of(names: list[str], dtype: str = "bfloat16") -> dict[str, str]:
    found = wanted_of(
        {name: Outline((4,), "float32") for name in names}, Cut.of(None, None, None, dtype), True
    )
    return {name: wanted.dtype for name, wanted in found.items()}


WORDS = st.sampled_from(["layers", "0", "1", "norm", "weight", "bias", "w", "optimal"])


def is_below(name: str, names: set[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


@given(st.sets(st.lists(WORDS, min_size=1, max_size=4).map(".".join), max_size=8))
def test_every_parameter_is_cast_whatever_the_others_are_called(names: set[str]) -> None:
    names = {name for name in names if not is_below(name, names)}
    assert set(dtypes_of(sorted(names)).values()) <= {"bfloat16"}


@given(
    st.sets(st.lists(WORDS, min_size=2, max_size=4).map(".".join), min_size=1, max_size=4),
    st.sampled_from(["optim.state.{}.exp_avg", "optimizer.exp_avg.{}", "{}.exp_avg", "state.{}",
                     "model.state.{}.step", "optim_state_dict.{}", "optimizer_states.0.{}.m"]),
)  # fmt: skip
def test_states_of_optimizers_keep_their_dtype(names: set[str], pattern: str) -> None:
    names = {name for name in names if not is_below(name, names)}
    states = {pattern.format(name) for name in names} - names
    found = dtypes_of(sorted(names | states))
    assert {found[name] for name in names} == {"bfloat16"}
    assert {found[name] for name in states} == {"float32"}


def test_single_numbers_of_an_optimizer_are_not_rounded() -> None:
    params = Parameters({"model.w": (8, 4), "model.state.w": (4,), "other.w": (4,)})
    assert params.is_state("optim.state.model.w.step")
    assert params.is_state("optim.param_groups.0.lr")
    assert not params.is_state("model.state.w")
    assert not params.is_state("optim")


def test_states_in_distcp_follow_their_parameters(tmp_path: Path) -> None:
    names = ("norm.weight", "layers.0.norm.weight")
    states = {name: {"exp_avg": torch.rand(8), "step": torch.tensor(1001.0)} for name in names}
    state = {**{name: torch.rand(8) for name in names}, "optim": {"state": states}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    layouts = {"norm.weight": "x", "layers.*": "x"}
    checkpoint.convert(
        tmp_path / "a", tmp_path / "b", mesh="x=2", layouts=layouts, format="distcp", dtype="bf16"
    )
    with open_storage(tmp_path / "b") as storage:
        tensors = read(storage).tensors
    assert len(tensors) == 6
    for name, tensor in tensors.items():
        assert tensor.dtype == ("bfloat16" if name in names else "float32"), name
        assert len(tensor.pieces) == (1 if name.endswith("step") else 2), name
    step = torch.zeros(())
    into = {"optim": {"state": {"norm.weight": {"step": step}}}}
    checkpoint.load(tmp_path / "b", into=into, strict=False)
    assert step == 1001


@given(st.sampled_from([*ITEMSIZE]), st.sampled_from([*ITEMSIZE]))
def test_casts_keep_what_a_number_means(have: str, want: str) -> None:
    def allowed() -> bool:
        try:
            check_cast(have, want)
        except DtypeError:
            return False
        return True

    kinds = [(is_float(dtype), dtype.startswith("complex")) for dtype in (have, want)]
    if have == want:
        assert allowed()
    elif "complex32" in (have, want) or "float8_e8m0fnu" in (have, want):
        assert not allowed()
    elif kinds[0] == kinds[1] == (False, False):
        assert allowed() == (np.promote_types(have, want) == np.dtype(want))
    else:
        assert allowed() == (
            kinds[0] == kinds[1] or (kinds[0], kinds[1][0]) == ((False,) * 2, True)
        )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "complex64", "int64", "", "float7"])
def test_a_dtype_for_all_is_a_float(tmp_path: Path, refusal: Run, dtype: str) -> None:
    here = write(tmp_path / "a", "w")
    assert "dtype" in refusal("convert", here, tmp_path / "b", "--dtype", dtype)
    assert not (tmp_path / "b").exists()


def test_casts_of_single_tensors_are_checked(tmp_path: Path) -> None:
    here = write(tmp_path / "a", "w")
    with pytest.raises(DtypeError, match=r'tensor "w": float32 cannot be cast to int8: fractions'):
        checkpoint.convert(here, tmp_path / "b", dtype={"*": "int8"})


@pytest.mark.parametrize(
    ("have", "want"),
    [("float32", "uint8"), ("complex64", "float32"), ("float32", "bool"), ("int64", "int8")],
)
def test_load_casts_no_more_than_convert(tmp_path: Path, have: str, want: str) -> None:
    checkpoint.save({"w": torch.ones(3, dtype=getattr(torch, have))}, tmp_path / "a")
    into = {"w": torch.zeros(3, dtype=getattr(torch, want))}
    with pytest.raises(DtypeError, match=f"{have} cannot be cast to {want}"):
        checkpoint.load(tmp_path / "a", into=into, cast=True)
    assert not into["w"].any()


def test_values_without_a_place_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "step": 7, "cfg": {"lr": 0.1}}, tmp_path / "a.pt")
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "b", format="distcp")
    assert set(report.left_out) == {"step", "cfg.lr"}
    assert "step" in str(report)


def test_metadata_without_a_place_is_named(tmp_path: Path) -> None:
    here = tmp_path / "a.safetensors"
    save_file({"w": np.ones(3)}, here, metadata={"format": "pt", "trained by": "us"})
    report = checkpoint.convert(here, tmp_path / "b", format="distcp")
    assert report.left_out == ("trained by",)
    assert checkpoint.convert(here, tmp_path / "c", format="full").left_out == ()


@pytest.mark.parametrize("where", ["name", "metadata"])
def test_lone_surrogates_are_refused(tmp_path: Path, refusal: Run, where: str) -> None:
    here = tmp_path / "a.safetensors"
    name, text = ("w\ud800", "x") if where == "name" else ("w", "\udfff")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"note": text}, name: entry}).encode()
    here.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for form in ("full", "sharded"):
        cut = [] if form == "full" else ["--mesh", "x=1", "--layout", "*=..."]
        said = refusal("convert", here, tmp_path / "b", "--format", form, *cut)
        assert "lone surrogate" in said
    checkpoint.convert(here, tmp_path / "c", format="distcp")
    assert checkpoint.verify(here, tmp_path / "c").ok


def test_a_save_of_nothing_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    checkpoint.save({"w": torch.ones(2)}, path)
    for state in ({}, {"step": 3}, {"deep": {}}):
        with pytest.raises(CheckpointError, match="0 tensors"):
            checkpoint.save(state, path, overwrite=True)
    with pytest.raises(CheckpointError, match="0 tensors"):
        checkpoint.save({}, path, format="distcp", overwrite=True)
    assert checkpoint.verify(path).ok
    assert checkpoint.inspect(path).num_tensors == 1
    checkpoint.save({"step": 3}, path, format="distcp", overwrite=True)
    assert checkpoint.verify(path).ok


def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lone surrogate"):
        checkpoint.save({"\ud800": torch.ones(2)}, tmp_path / "a")
    assert not [*tmp_path.iterdir()]


def save_without(rank: int, path: str, layout: str) -> str:
    """Save a tensor that rank 1 has forgotten."""
    spec = sharded.LayoutShardingSpec(Layout(Mesh(r=4), layout))
    cut = sharded.ones(spec, 8, 2, process_group=pool_group(4))
    state = {"p": torch.ones(3)} if rank == 1 else {"d": cut, "p": torch.ones(3)}
    try:
        checkpoint.save(state, path, group=pool_group(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("layout", ["r -", "- -"])
def test_a_tensor_that_one_rank_lacks(pool: Pool, tmp_path: Path, layout: str) -> None:
    told = pool.run(save_without, str(tmp_path / "a"), layout, ranks=range(4))
    assert len(set(told)) == 1, told
    assert 'rank 1 has no tensor "d", which is cut over it' in told[0]
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes every command raise."""

    def breaks(error: BaseException) -> None:
        def invoke(_: object) -> None:
            raise error

        monkeypatch.setattr(cli.cli, "invoke", invoke)

    return breaks


def test_what_nobody_foresaw_is_one_line(
    broken: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RESHARD_TRACEBACK", raising=False)
    broken(KeyError("a\nb"))
    assert cli.run(["inspect", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("reshard: internal error: KeyError:")
    assert said.count("\n") == 1
    monkeypatch.setenv("RESHARD_TRACEBACK", "1")
    assert cli.run(["inspect", "x"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "internal error" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_stays_one(
    broken: Callable[[BaseException], None], error: BaseException
) -> None:
    broken(error)
    assert cli.run(["inspect", "x"]) == 130


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
        checkpoint.convert(indexed(tmp_path / "a"), tmp_path / "b", rules=rules)
    with pytest.raises(RulesError, match='key "names"'):
        Rules.parse("names = 3")
