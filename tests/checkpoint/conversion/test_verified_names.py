"""Conversions with names are verified, and parts that no name takes are reported."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard import join, stack, take
from reshard.checkpoint import convert, verify
from reshard.cli import run
from reshard.errors import ArgumentTypeError, NamesError
from reshard.planning.names import Names
from tests.soak import cases


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    """Four experts in one tensor, and others."""
    experts = np.arange(4 * 6, dtype=np.float32).reshape(4, 3, 2)
    return write(tmp_path / "fused", {"experts": experts, "norm": np.ones(3, np.float32)})


def three(count: int = 3) -> Names:
    return {f"expert.{i}": take("experts", index={0: i}) for i in range(count)}


def test_what_no_name_takes_is_listed(fused: Path, tmp_path: Path) -> None:
    report = convert(fused, tmp_path / "out", names=three())
    assert report.left_out == ("experts [3:4, 0:3, 0:2]",)
    assert "left out experts [3:4, 0:3, 0:2]" in str(report)
    assert convert(fused, tmp_path / "all", names=three(4)).left_out == ()
    crops: Names = {
        "top": take("experts", crop={0: (0, 2), 1: (0, 3)}),
        "end": take("experts", crop={0: (2, 4), 1: (1, 3)}),
    }
    report = convert(fused, tmp_path / "crops", names=crops)
    assert report.left_out == ("experts [2:4, 0:1, 0:2]",)
    middle: Names = {"middle": take("experts", crop={0: (1, 2)})}
    report = convert(fused, tmp_path / "middle", names=middle)
    assert report.left_out == ("experts [0:1, 0:3, 0:2] and 1 more box",)
    again: Names = {**three(), "whole": "experts"}
    assert convert(fused, tmp_path / "whole", names=again).left_out == ()


def test_tensors_are_dropped_on_request(fused: Path, tmp_path: Path) -> None:
    report = convert(fused, tmp_path / "out", names=three(), drop=["exp*", "norm"])
    assert report.left_out == ()
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(three())
    assert verify(fused, tmp_path / "out", names=three(), drop=["exp*", "norm"]).ok
    with pytest.raises(NamesError, match='"expert", which matches no tensor: did you mean "exp'):
        convert(fused, tmp_path / "slip", drop=["expert"])
    assert run(["convert", str(fused), str(tmp_path / "none"), "--drop", "*"]) == 2
    assert run(["convert", str(fused), str(tmp_path / "some"), "--drop", "norm"]) == 0
    assert set(load_file(tmp_path / "some" / "model.safetensors")) == {"experts"}
    assert run(["verify", str(fused), str(tmp_path / "some"), "--drop", "norm"]) == 0
    assert run(["verify", str(fused), str(tmp_path / "some")]) == 1


NAMES = """
"qkv" = { join = ["q", "k"], dim = 0 }
"stacked" = { stack = "w.{e}", dim = 1 }
"embed" = { take = "tok", pad = { 0 = 8 }, crop = { 1 = [0, 2] } }
"last" = { take = "tok", index = { 1 = 2 } }
"a" = "b"
"b" = "a"
"""


@pytest.mark.parametrize("checksums", [True, False])
def test_a_renamed_conversion_is_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checksums: bool
) -> None:
    """By the file with which it was made, or by the rules that have these names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (4, 2), "k": (2, 2), "w.0": (2, 2), "w.1": (2, 2), "tok": (5, 3), "a": (3,), "b": (3,),
        "same": (2,),
    }  # fmt: skip
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    convert(write(tmp_path / "in", tensors), tmp_path / "src", checksums=checksums)
    (tmp_path / "names.toml").write_text(NAMES)
    rules = 'axes = ["x"]\n[tensors]\n"*" = "..."\n[names]\n'
    (tmp_path / "rules.toml").write_text(rules + NAMES.strip())
    source, out = str(tmp_path / "src"), str(tmp_path / "out")
    names = ["--names", str(tmp_path / "names.toml")]
    assert run(["convert", source, out, *names, "--format", "distcp"]) == 0
    assert run(["verify", source, out, *names]) == 0
    assert run(["verify", source, out, "--names", str(tmp_path / "rules.toml")]) == 0
    assert run(["verify", source, out]) == 1
    assert run(["verify", source, *names]) == 2
    capsys.readouterr()
    (path,) = Path(out).glob("*.distcp")
    data = bytearray(path.read_bytes())
    at = data.index(tensors["tok"][1, :2].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    (Path(out) / "reshard-checksums.json").unlink()
    assert run(["verify", source, out, *names]) == 1
    assert 'tensor "embed" differs in 1 of 16 elements, all within [1:2, 0:1]' in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("seed", range(cases(10, 200)))
def test_every_element_is_used_listed_or_dropped(tmp_path: Path, seed: int) -> None:
    """Random takes: elements of the output and those that are left out are all there are."""
    rng = Random(seed)
    tensors: dict[str, np.ndarray] = {}
    names: dict[str, Any] = {}
    for number in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        at = sum(array.size for array in tensors.values())
        tensors[f"t{number}"] = np.arange(at, at + np.prod(shape), dtype=np.int64).reshape(shape)
        for part in range(rng.randint(0, 3)):
            crop = {
                dim: tuple(sorted(rng.sample(range(size + 1), 2)))
                for dim, size in enumerate(shape)
                if rng.random() < 0.6
            }
            names[f"n{number}.{part}"] = take(f"t{number}", crop=crop)
    if rng.random() < 0.3:
        names["s"] = stack("t0", "t0")
    if rng.random() < 0.3:
        names["j"] = join("t0", "t0")
    source = write(tmp_path / "in", tensors)
    report = convert(source, tmp_path / "out", names=names)
    found = {
        int(one)
        for array in load_file(tmp_path / "out" / "model.safetensors").values()
        for one in array.reshape(-1)
    }
    lost = {name: set(array.reshape(-1).tolist()) - found for name, array in tensors.items()}
    assert {text.split(" ")[0] for text in report.left_out} == {
        n for n, some in lost.items() if some
    }
    proof = verify(source, tmp_path / "out", names=names)
    assert proof.ok
    assert bool(report.left_out) == any(note.startswith("no name takes") for note in proof.notes)


def test_names_that_are_no_dict_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"a": np.zeros(3)})
    with pytest.raises(ArgumentTypeError, match="names= got a value of type list: give a dict"):
        verify(source, source, names=["a"])  # type: ignore[arg-type]
