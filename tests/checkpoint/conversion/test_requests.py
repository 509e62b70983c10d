"""Unusual requests and folders: refused with a message, or done without losing a value."""

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
from safetensors.numpy import save_file

from reshard import checkpoint, cli
from reshard.checkpoint.conversion.names import Outline
from reshard.checkpoint.conversion.request import Parameters, Request, wanted_of
from reshard.checkpoint.formats.reader import open_storage, read_catalog
from reshard.dtypes import ITEMSIZE, check_cast, is_float
from reshard.errors import (
    CheckpointError,
    DtypeError,
)
from tests.checkpoint.making import write_counting

Run = Callable[..., str]


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
    stale = STRAYS - {"consolidated.safetensors", "sub/stray.safetensors"}
    for path in (*OF_TORCH, *stale):
        (folder / path).write_bytes(b"PK")
    return folder


STRAYS = {
    "consolidated.safetensors", "sub/stray.safetensors", "pytorch_model.bin.index.json",
    "pytorch_model-00001-of-00001.bin", "sub/consolidated.00.pth", "tf_model.h5",
}  # fmt: skip
OF_TORCH = {"training_args.bin", "__3_0.distcp.bin", "optimizer.pt"}
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
        {name: Outline((4,), "float32") for name in names},
        Request("src", "dst", dtype=dtype),
        True,
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
        tensors = read_catalog(storage).tensors
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
    here = write_counting(tmp_path / "a", "w")
    assert "dtype" in refusal("convert", here, tmp_path / "b", "--dtype", dtype)
    assert not (tmp_path / "b").exists()


def test_casts_of_single_tensors_are_checked(tmp_path: Path) -> None:
    here = write_counting(tmp_path / "a", "w")
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
    state = {"w": torch.ones(3), "step": 7, "cfg": {"seen": {1, 2}}}
    torch.save(state, tmp_path / "a.pt")
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "b", format="distcp")
    assert report.left_out == ("cfg.seen",)
    assert "cfg.seen" in str(report)


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


@pytest.mark.parametrize("base", ["adapter_model", "diffusion_pytorch_model", "model"])
@pytest.mark.parametrize("size", ["5GB", "40"])
def test_full_files_keep_the_names_by_which_they_are_found(
    tmp_path: Path, base: str, size: str
) -> None:
    """PEFT and diffusers load nothing else; also after a detour over files with other names."""
    here = tmp_path / "here"
    here.mkdir()
    save_file({name: np.ones(8, np.float32) for name in "ab"}, here / f"{base}.safetensors")
    kinds = {"adapter_model": ("adapter_config.json", {}), "model": ("config.json", {})}
    default = ("config.json", {"_diffusers_version": "0.30.0", "_class_name": "AutoencoderKL"})
    name, config = kinds.get(base, default)
    (here / name).write_text(json.dumps(config))
    checkpoint.convert(here, tmp_path / "cut", mesh="x=2", layouts={"*": "x"})
    expected = {f"{base}.safetensors"}
    if size == "40":
        parts = {f"{base}-0000{i}-of-00002.safetensors" for i in (1, 2)}
        expected = {*parts, f"{base}.safetensors.index.json"}
    for at, source in enumerate((here, here / f"{base}.safetensors", tmp_path / "cut")):
        out = tmp_path / f"out{at}"
        checkpoint.convert(source, out, format="full", max_shard_size=size)
        assert expected <= {path.name for path in out.iterdir()}
        assert {path.name for path in out.glob("*.safetensors*")} == expected
        assert checkpoint.verify(here, out).ok


def test_a_dtype_that_leaves_some_floats_alone_says_so(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "v": torch.ones(4)}
    torch.save(state, tmp_path / "model.pt")
    report = checkpoint.convert(tmp_path / "model.pt", tmp_path / "out", dtype="bfloat16")
    assert any('"w" of float8_e4m3fn kept this dtype' in note for note in report.notes)
    assert "kept this dtype" in str(report)
    silent = checkpoint.convert(tmp_path / "model.pt", tmp_path / "same", dtype="float8_e4m3fn")
    assert not any("kept this dtype" in note for note in silent.notes)


def test_files_of_no_bytes_are_refused(tmp_path: Path, refusal: Run) -> None:
    here = write_counting(tmp_path / "here", "w")
    said = refusal("convert", here, tmp_path / "out", "--max-shard-size", "0")
    assert "max_shard_size is 0 bytes" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", ["many", 0, -1, 2.5])
def test_workers_that_are_no_number(workers: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"workers is .*: give a number of at least 1"):
        checkpoint.convert(indexed(tmp_path / "src"), tmp_path / "out", workers=workers)
