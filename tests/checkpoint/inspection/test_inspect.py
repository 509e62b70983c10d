"""inspect: its report, speed and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard import checkpoint
from reshard.checkpoint.formats.safetensors.header import (
    KEY,
    SHARDING,
    OwnMetadata,
    OwnTensor,
    build_header,
)
from reshard.checkpoint.integrity.checksums import SIDECAR, Checksums
from reshard.cli import run
from tests.soak import within


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for number in range(2):
        tensors = {f"layers.{i}.w": torch.zeros(2, 4) for i in range(3)}
        named = {name: OwnTensor((4, 4), "tp -") for name in tensors}
        offsets = {name: {"saved_offsets": [2 * number, 0]} for name in tensors}
        own = OwnMetadata(number + 1, 2, "tp=2", None, named)
        metadata = {KEY: own.to_text(), SHARDING: json.dumps(offsets), "format": "pt"}
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        save_file(tensors, folder / name, metadata)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_report(ckpt: Path) -> None:
    report = checkpoint.inspect(ckpt)
    assert (report.num_tensors, report.num_bytes, report.ok) == (3, 192, True)
    first = report.tensors[0]
    assert (first.name, first.shape, first.dtype) == ("layers.0.w", (4, 4), "float32")
    assert (first.layout, first.num_pieces, first.replicated) == ("tp=2: tp -", 2, False)
    assert str(report).splitlines() == [
        f"{ckpt}: sharded-safetensors, 3 tensors of 192 B in 2 files, complete",
        "",
        "tensor          shape  dtype    layout       size",
        "layers.{0-2}.w  4x4    float32  tp=2: tp -  192 B",
        "",
        f"files    2 of {report.files[0].size / 512:.1f} KiB, each {report.files[0].size} B",
        "others   1 without tensors: config.json",
        "metadata format=pt",
    ]


def test_checksums_are_told_of_and_are_no_other_file(ckpt: Path) -> None:
    assert checkpoint.inspect(ckpt).to_dict()["checksums"] is None
    out = ckpt.parent / "out"
    checkpoint.convert(ckpt, out, mesh="tp=2", layouts={"*": "tp -"})
    report = checkpoint.inspect(out)
    sums = load_sums(out)
    chunks = sum(len(file.ends) for file in sums.files.values())
    assert f"checksums: yes ({chunks} chunks, digests of 3 tensors)" in str(report).splitlines()
    assert [file.path for file in report.others] == ["config.json"]
    assert report.to_dict()["checksums"] == {"num_chunks": chunks, "num_digests": 3}
    data = bytearray((out / SIDECAR).read_bytes())
    data[len(data) // 2] ^= 1
    (out / SIDECAR).write_bytes(data)
    damaged = checkpoint.inspect(out)
    assert damaged.checksums is None
    assert not damaged.ok
    assert SIDECAR in damaged.damage[0]


def load_sums(folder: Path) -> Checksums:
    return Checksums.from_bytes((folder / SIDECAR).read_bytes())


def test_the_tree(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(ckpt), "--tree"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("") + 1 :] == [
        "layers  192 B, 3 tensors",
        *(f"  {i}.w  4x4 float32, tp=2: tp -, 64 B" for i in range(3)),
    ]


def test_exit_codes(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(ckpt)]) == 0
    path = ckpt / "shard-00002-model-00001-of-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert run(["inspect", str(ckpt), "--json"]) == 1
    data = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert data["ok"] is False
    assert "is truncated" in data["damage"][0]
    assert run(["inspect", str(ckpt.parent / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (ckpt.parent / "empty").mkdir()
    assert run(["inspect", str(ckpt.parent / "empty")]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


def test_damage_is_listed_and_the_rest_is_shown(ckpt: Path) -> None:
    (ckpt / "shard-00001-model-00001-of-00001.safetensors").unlink()
    report = checkpoint.inspect(ckpt)
    assert len(report.damage) == 4
    assert "shard 1 of 2 is missing" in report.damage[0]
    assert 'no file holds [0:2, 0:4] of tensor "layers.0.w"' in report.damage[1]
    assert "damaged" in str(report).splitlines()[0]
    assert [tensor.complete for tensor in report.tensors] == [False] * 3


def test_names_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[31m\n.b": torch.zeros(1)}, tmp_path / "m.safetensors", {"k\r": "v\x07"})
    report = checkpoint.inspect(tmp_path)
    for text in (str(report), report.tree()):
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def big(folder: Path, num_ranks: int = 4, num_layers: int = 32) -> None:
    """Eight gigabytes that take no room: files with holes."""
    kinds = ("q", "k", "v", "o", "up", "gate", "down", "norm")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(num_layers) for kind in kinds]
    for rank in range(num_ranks):
        tensors = dict.fromkeys(names, ("bfloat16", (1024, 4096)))
        offsets = {name: {"saved_offsets": [1024 * rank, 0]} for name in names}
        built = build_header(tensors, {SHARDING: json.dumps(offsets), "format": "pt"})
        path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        path.write_bytes(built.data)
        os.truncate(path, built.file_size)


def test_eight_gigabytes_in_no_time(tmp_path: Path) -> None:
    big(tmp_path)
    code = (
        "import sys, time; from reshard.cli import run; code = run(sys.argv[1:]);"
        "print(code, time.process_time(), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "inspect", str(tmp_path)]
    seconds = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "8.0 GiB in 4 files, complete" in done.stdout
        last = done.stdout.splitlines()[-1].split()
        assert [last[0], *last[2:]] == ["0", "False", "False"]
        seconds.append(float(last[1]))
    assert min(seconds) < within(0.3)


def test_public_names_load() -> None:
    assert callable(checkpoint.inspect)
    for name in checkpoint.__all__:
        assert getattr(checkpoint, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'inspekt'"):
        checkpoint.inspekt  # noqa: B018
