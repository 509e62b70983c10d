"""Sound files that are not read: refused as unsupported, with an exit code and words of their own.

A script that sees "damaged" restores from a backup, which does not help here.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard as rs
from reshard import checkpoint
from reshard.cli import run
from reshard.errors import CheckpointError, DamageError, UnsupportedError

UNSUPPORTED = 4


def zero_model_states(stage: int) -> dict[str, Any]:
    """What DeepSpeed saves of a module; from stage 3 on parameters are placeholders."""
    shape = (4, 3)
    return {
        "module": OrderedDict(w=torch.zeros(0) if stage == 3 else torch.ones(shape)),
        "param_shapes": [OrderedDict(w=torch.Size(shape))],
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.15.4",
    }


def zero_optim_states(stage: int) -> dict[str, Any]:
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    states = {"zero_stage": stage, "partition_count": 2, flat: [torch.ones(6)]}
    return {"optimizer_state_dict": states, "ds_version": "0.15.4"}


def zero_folder(folder: Path, stage: int) -> Path:
    step = folder / "global_step10"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    if stage < 3:
        torch.save(zero_model_states(stage), step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3:
            torch.save(zero_model_states(3), step / f"{name}_model_states.pt")
        torch.save(zero_optim_states(stage), step / f"bf16_{name}_optim_states.pt")
    return folder


def universal_folder(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.ones(2)}, folder / "zero" / name / "fp32.pt")
    return folder


def one_file(state: Any) -> Callable[[Path], Path]:
    """Something that saves a file under a name that does not tell what it is."""

    def save(folder: Path) -> Path:
        folder.mkdir()
        torch.save(state, folder / "renamed.pt")
        return folder / "renamed.pt"

    return save


def torchscript(folder: Path) -> Path:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(folder / "model.pt"))
    return folder


def linked(folder: Path) -> Path:
    folder.mkdir()
    outside = folder.parent / "outside.safetensors"
    save_file({"w": torch.ones(2)}, outside)
    (folder / "model.safetensors").symlink_to(outside)
    return folder


def variants(folder: Path, save: Callable[..., None], *names: str) -> Path:
    folder.mkdir()
    for name in names:
        save({"w": torch.ones(2)}, folder / name)
    return folder


def compressed(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"w": torch.ones(100)}, folder / "plain")
    with (
        zipfile.ZipFile(folder / "plain") as source,
        zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    (folder / "plain").unlink()
    return folder


def other_zip(folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "model.pt", "w") as file:
        file.writestr("notes.txt", "no tensors")
    return folder


def tarred(folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "model.pth.tar", "w") as file:
        file.addfile(tarfile.TarInfo("x"))
    return folder


def legacy(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"w": torch.ones(2)}, folder / "model.ckpt", _use_new_zipfile_serialization=False)
    return folder


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "ZeRO-1": (lambda folder: zero_folder(folder, 1), "zero_to_fp32.py"),
    "ZeRO-3": (lambda folder: zero_folder(folder, 3), "zero_to_fp32.py"),
    "ZeRO-3, model file": (one_file(zero_model_states(3)), "zero_to_fp32.py"),
    "ZeRO-2, optimizer file": (one_file(zero_optim_states(2)), "zero_to_fp32.py"),
    "ZeRO-3, optimizer file": (one_file(zero_optim_states(3)), "zero_to_fp32.py"),
    "ZeRO, universal": (universal_folder, "zero_to_fp32.py"),
    "TorchScript": (torchscript, r"torch\.jit\.load"),
    "links": (linked, "copy the file"),
    "two variants of safetensors": (
        lambda folder: variants(folder, save_file, "model.safetensors", "model.fp16.safetensors"),
        "name one of the files",
    ),
    "two torch files": (
        lambda folder: variants(folder, torch.save, "a.ckpt", "b.ckpt"), "name one of the files",
    ),
    "compressed": (compressed, "compressed"),
    "a zip of something else": (other_zip, "data.pkl"),
    "a tar": (tarred, "tar archive"),
    "before torch 1.6": (legacy, r"before torch 1\.6"),
    "a name of the standard library": (one_file({"w": torch.ones(2), "x": Evil()}), "nothing was"),
    "a sparse tensor": (one_file({"w": torch.eye(2).to_sparse()}), "sparse"),
    "far expanded": (one_file({"w": torch.zeros(1).expand(1 << 20)}), r"expand\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_unsupported_is_not_damaged(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, says = CASES[case]
    path, good = make(tmp_path / "ckpt"), tmp_path / "good.safetensors"
    save_file({"w": torch.ones(2)}, good)
    with pytest.raises(UnsupportedError, match=says) as error:
        checkpoint.convert(path, tmp_path / "out")
    assert not isinstance(error.value, DamageError)
    assert run(["convert", str(path), "out"]) == UNSUPPORTED
    assert run(["diff", str(path), str(good)]) == UNSUPPORTED
    assert run(["diff", str(good), str(path)]) == UNSUPPORTED
    capsys.readouterr()
    assert run(["inspect", str(path), "--json"]) == UNSUPPORTED
    report = json.loads(capsys.readouterr().out)
    assert report["damage"] == []
    assert not report["ok"]
    assert len(report["unsupported"]) == 1
    assert run(["verify", str(path), "--json"]) == UNSUPPORTED
    kinds = [problem["kind"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert kinds == ["unsupported"]
    assert run(["inspect", str(path)]) == run(["verify", str(path)]) == UNSUPPORTED
    said = capsys.readouterr().out.replace(str(tmp_path), "")
    assert "unsupported" in said
    assert "damage" not in said
    assert not Path("pwned").exists()
    assert not Path("out").exists()


def test_the_error_is_one_that_callers_know() -> None:
    assert issubclass(rs.UnsupportedError, CheckpointError)
    assert issubclass(rs.UnsupportedError, NotImplementedError)


def test_damage_wins_over_unsupported(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"v": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    cut = tmp_path / "pytorch_model-00002-of-00002.bin"
    os.truncate(cut, cut.stat().st_size - 10)
    assert run(["inspect", str(tmp_path)]) == run(["verify", str(tmp_path)]) == 1
    with pytest.raises(DamageError):
        checkpoint.convert(tmp_path, tmp_path / "out")


def test_whole_weights_of_zero_1_and_2_are_read_from_their_file(tmp_path: Path) -> None:
    zero_folder(tmp_path / "run", 2)
    file = tmp_path / "run" / "global_step10" / "mp_rank_00_model_states.pt"
    report = checkpoint.inspect(file)
    assert report.ok
    assert [(tensor.name, tensor.shape) for tensor in report.tensors] == [("module.w", (4, 3))]


def test_whole_weights_beside_zero_are_read(tmp_path: Path) -> None:
    """As ``zero_to_fp32.py`` and the trainer of transformers leave them."""
    zero_folder(tmp_path / "run", 3)
    torch.save({"w": torch.ones(4, 3)}, tmp_path / "run" / "pytorch_model.bin")
    assert [tensor.name for tensor in checkpoint.inspect(tmp_path / "run").tensors] == ["w"]


@pytest.mark.parametrize("below", ["old/model.pt", "old/model.safetensors", "mp_rank_00/a.pt"])
def test_files_in_subfolders_count_only_if_the_folder_has_no_tensors(
    tmp_path: Path, below: str
) -> None:
    other = tmp_path / below
    other.parent.mkdir()
    (save_file if below.endswith(".safetensors") else torch.save)({"v": torch.ones(2)}, other)
    torch.save({"step": 3}, tmp_path / "args.pt")
    if below.endswith(".safetensors"):
        with pytest.raises(CheckpointError, match='in the folder "old": name one folder'):
            checkpoint.verify(tmp_path)
    else:
        assert [tensor.name for tensor in checkpoint.inspect(tmp_path).tensors] == ["v"]
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert [tensor.name for tensor in checkpoint.inspect(tmp_path).tensors] == ["w"]


def test_an_index_of_torch_files_that_names_absent_files_and_tensors_is_damage(
    tmp_path: Path,
) -> None:
    part, index = "pytorch_model-00001-of-00001.bin", tmp_path / "pytorch_model.bin.index.json"
    torch.save({"w": torch.ones(2)}, tmp_path / part)
    index.write_text(json.dumps({"weight_map": {"w": part}}))
    assert checkpoint.verify(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": part, "lost": part, "v": "gone.bin"}}))
    first, second = checkpoint.inspect(tmp_path).damage
    assert "gone.bin is missing" in first
    assert f'puts tensor "lost" into {part}' in second


@pytest.mark.parametrize("name", ["last.ckpt", "model.pth.tar", "weights", "state.safe"])
def test_files_are_known_by_their_content(tmp_path: Path, name: str) -> None:
    """Also a folder in which no other file has a usual name."""
    save = save_file if name == "state.safe" else torch.save
    save({"w": torch.arange(4.0)}, tmp_path / name)
    (tmp_path / "notes.txt").write_text("PK")
    for path in (tmp_path / name, tmp_path):
        assert [tensor.name for tensor in checkpoint.inspect(path).tensors] == ["w"]
    checkpoint.convert(tmp_path, tmp_path.parent / f"out-{name}")
    assert checkpoint.verify(tmp_path / name, tmp_path.parent / f"out-{name}").ok


def test_other_files_are_still_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("a/data.txt", "x")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        checkpoint.inspect(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 2


@pytest.mark.parametrize("value", [defaultdict(int, a=1), range(3), str, int])
def test_names_of_python_2_that_torch_save_writes_are_read(tmp_path: Path, value: Any) -> None:
    """Protocol 2, the default of torch.save, calls int, range and str long, xrange and unicode."""
    torch.save({"w": torch.ones(2), "x": value}, tmp_path / "model.pt")
    report = checkpoint.inspect(tmp_path / "model.pt")
    assert report.ok
    is_read = isinstance(value, dict)
    assert report.metadata == ({"x.a": "1"} if is_read else {})
    assert ('"x" is no tensor' in str(report.notes)) != is_read


def test_values_of_the_standard_library_are_left_out_and_listed(tmp_path: Path) -> None:
    state = {
        "w": torch.arange(3.0), "raw": b"\x00\xff", "buffer": io.BytesIO(b"abc"),
        "when": datetime.date(2026, 1, 2), "at": datetime.datetime(2026, 1, 2, 3, 4),
        "lasted": datetime.timedelta(seconds=3), "time": datetime.time(1, 2),
    }  # fmt: skip
    torch.save(state, tmp_path / "model.pt")
    assert run(["inspect", str(tmp_path)]) == 0
    report = checkpoint.convert(tmp_path, tmp_path.parent / "full")
    assert set(report.left_out) == state.keys() - {"w"}
    report = checkpoint.convert(tmp_path, tmp_path.parent / "dcp", format="distcp")
    assert set(report.left_out) == state.keys() - {"w", "raw"}


def save_alone(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """What ``dcp.save(use_collectives=False)`` writes on a rank."""
    writer, planner = dcp.FileSystemWriter(folder), dcp.DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the next rank finds the metadata of the one before
        plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan(plans)
    done = writer.write_data(planner.finish_plan(plan), planner).value()
    writer.finish(metadata, [done])


def test_ranks_that_saved_without_each_other(tmp_path: Path) -> None:
    """``use_collectives=False``: each rank has metadata and local tensors of its own."""
    whole = torch.arange(12.0).reshape(4, 3)
    for rank in range(2):
        save_alone(tmp_path / "ckpt", rank, {"w": whole[2 * rank : 2 * rank + 2], "step": 3})
    assert (tmp_path / "ckpt" / "__1.metadata").exists()
    assert run(["inspect", str(tmp_path / "ckpt")]) == 2  # the same names: how are they cut?
    rules = tmp_path / "cut.toml"
    rules.write_text('axes = ["tp"]\n[tensors]\n"w" = "tp -"\n')
    checkpoint.convert(tmp_path / "ckpt", tmp_path / "full", source_rules=rules, source_mesh="tp=2")
    save_file({"w": whole}, tmp_path / "whole.safetensors")
    assert checkpoint.verify(tmp_path / "whole.safetensors", tmp_path / "full").ok


def test_ranks_that_saved_different_names_without_each_other(tmp_path: Path) -> None:
    for rank in range(2):
        save_alone(tmp_path / "ckpt", rank, {f"w{rank}": torch.ones(2) * rank})
    assert sorted(t.name for t in checkpoint.inspect(tmp_path / "ckpt").tensors) == ["w0", "w1"]
    assert checkpoint.verify(tmp_path / "ckpt").ok
    with pytest.raises(CheckpointError, match="mesh tp=2 is for files of ranks: give --rules too"):
        checkpoint.inspect(tmp_path / "ckpt", mesh="tp=2")
    shutil.copytree(tmp_path / "ckpt", tmp_path / "out")
    (tmp_path / "ckpt" / "__0.metadata").unlink()
    assert run(["inspect", str(tmp_path / "ckpt")]) == 1
    save_file({"w": torch.ones(3)}, tmp_path / "new.safetensors")
    checkpoint.convert(tmp_path / "new.safetensors", tmp_path / "out", overwrite=True)
    assert checkpoint.verify(tmp_path / "new.safetensors", tmp_path / "out").ok


def test_a_link_that_leads_elsewhere_is_unsupported_in_convert(tmp_path: Path) -> None:
    """It is found while files are copied: nothing is kept to be resumed, and the error stays."""
    (tmp_path / "src").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "src" / "model.safetensors")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "src" / "notes.txt").symlink_to(tmp_path / "notes.txt")
    with pytest.raises(UnsupportedError, match="outside of its checkpoint"):
        checkpoint.convert(tmp_path / "src", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "src"]


def test_pickles_of_old_protocols_are_unsupported(tmp_path: Path) -> None:
    data = pickle.dumps({"w": [1, 2]}, protocol=0)
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("archive/data.pkl", data)
    with pytest.raises(UnsupportedError, match="pickle instruction"):
        checkpoint.convert(tmp_path, tmp_path.parent / "out")
