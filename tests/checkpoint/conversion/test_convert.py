"""Conversions between all formats, layouts and dtypes, checked with independent readers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, reject, settings

from reshard import checkpoint
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.errors import (
    CoverageError,
    DamageError,
    DtypeError,
    FormatError,
    LayoutError,
    MemoryCapError,
    NamesError,
    PlanError,
    ReshardError,
    RulesError,
    TargetError,
)
from reshard.layout.box import Box
from reshard.planning.names import join, read_names, stack, take
from tests.checkpoint.converting import (
    Tensors,
    assert_equal,
    random_layouts,
    random_tensors,
    read_full,
    small_windows,
    write_source,
)
from tests.checkpoint.making import random_array, write_counting, write_sharded
from tests.soak import cases
from tests.strategies import drawn_by

CUT = ("sharded", "distcp", "ranks")


@settings(max_examples=cases(12, 1500), deadline=None)
@given(drawn_by(lambda rng: rng))
def test_any_format_and_layout_to_any_other_and_back(rng: Random) -> None:
    tensors = random_tensors(rng)
    with TemporaryDirectory() as folder, small_windows(rng.choice((64, 1000, 1 << 20))):
        here, number = Path(folder) / "0", 0
        write_source(here, tensors, rng, checksums=rng.choice((None, 100)))
        for format in (rng.choice(CUT), rng.choice(CUT), "full"):
            number += 1
            there = Path(folder) / str(number)
            layouts = random_layouts(rng, tensors) if format != "full" else None
            kind = {"checksums": rng.random() < 0.7, "max_shard_size": rng.choice((100, "5GB"))}
            try:
                checkpoint.convert(here, there, layouts=layouts, format=format, **kind)
            except TargetError:  # more boxes on a rank than the format takes
                assert format == "sharded"
                continue
            here = there
            report = checkpoint.verify(Path(folder) / "0", here)
            assert report.ok, report
        if (here / SIDECAR).exists():
            assert checkpoint.verify(here).ok
        if format == "full" and here.name == "3":
            assert_equal(here, tensors)


@settings(max_examples=cases(8, 500), deadline=None)
@given(drawn_by(lambda rng: rng))
def test_torch_reads_what_is_written(rng: Random) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader

    tensors = random_tensors(rng)
    with TemporaryDirectory() as folder, small_windows(rng.choice((64, 1 << 20))):
        here, there = Path(folder) / "a", Path(folder) / "b"
        write_source(here, tensors, rng)
        format = rng.choice(("sharded", "distcp"))
        try:
            checkpoint.convert(here, there, layouts=random_layouts(rng, tensors), format=format)
        except TargetError:
            reject()
        reader = (HuggingFaceStorageReader if format == "sharded" else FileSystemReader)(str(there))
        found = {name: empty_tensor(dtype, array.shape) for name, (dtype, array) in tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=reader, no_dist=True)
        for name, (_, array) in tensors.items():
            bits = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bits == array.tobytes(), name


def empty_tensor(dtype: str, shape: tuple[int, ...]) -> object:
    import torch

    size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
    return torch.full((size,), 0, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Tensors]:
    tensors: Tensors = {
        "model.w": ("float32", np.arange(96, dtype=np.float32).reshape(12, 8)),
        "model.b": ("float32", np.arange(8, dtype=np.float32)),
        "optim.state.model.w.exp_avg": ("float32", random_array("float32", (12, 8)) >> 1),
        "optim.state.model.w.step": ("float32", np.array(7, dtype=np.float32)),
        "ids": ("int64", np.arange(5)),
    }
    cuts = {name: [Box.whole(array.shape)] for name, (_, array) in tensors.items()}
    write_sharded(tmp_path / "src", tensors, cuts)
    (tmp_path / "src" / "config.json").write_text('{"a": 1}')
    (tmp_path / "src" / "tokenizer").mkdir()
    (tmp_path / "src" / "tokenizer" / "vocab.txt").write_text("a b c")
    return tmp_path / "src", tensors


def headers(folder: Path) -> dict[str, dict]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        found[path.name] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


RULES = 'axes = ["tp"]\n[tensors]\n"model.w" = "- tp"\n"model.b" = "tp"\nids = "-"'


def test_states_of_an_optimizer_follow_their_parameters(source: tuple[Path, Tensors]) -> None:
    here, _ = source
    rules = here.parent / "rules.toml"
    rules.write_text(RULES)
    checkpoint.convert(here, here.parent / "out", mesh="tp=2", rules=rules)
    first = headers(here.parent / "out")["shard-00001-model-00001-of-00001.safetensors"]
    assert first["optim.state.model.w.exp_avg"]["shape"] == [12, 4]
    own = json.loads(first["__metadata__"]["reshard"])["tensors"]
    assert own["optim.state.model.w.exp_avg"] == {"shape": [12, 8], "layout": "- tp"}
    whole = [h for h in headers(here.parent / "out").values() if "optim.state.model.w.step" in h]
    assert len(whole) == 1


def test_other_files_and_metadata_survive(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    out = here.parent / "out"
    report = checkpoint.convert(here, out)
    assert (out / "config.json").read_text() == '{"a": 1}'
    assert (out / "tokenizer" / "vocab.txt").read_text() == "a b c"
    assert headers(out)["model.safetensors"]["__metadata__"]["format"] == "pt"
    assert_equal(out, tensors)
    assert report.bytes_written == report.disk_needed
    assert report.amplification < 1.1


def test_an_index_lists_all_files(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    out = here.parent / "out"
    checkpoint.convert(here, out, max_shard_size=400)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {p.name for p in out.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(a.nbytes for _, a in tensors.values())
    assert_equal(out, tensors)


def test_a_cast_is_of_parameters_alone(source: tuple[Path, Tensors]) -> None:
    here, _ = source
    out = here.parent / "out"
    checkpoint.convert(here, out, dtype="bfloat16")
    kinds = {name: entry.get("dtype") for name, entry in headers(out)["model.safetensors"].items()}
    assert kinds["model.w"] == kinds["model.b"] == "BF16"
    assert kinds["optim.state.model.w.exp_avg"] == "F32"
    assert kinds["ids"] == "I64"
    bits = read_full(out)["model.w"][1]
    assert (np.frombuffer(bits, np.uint16).astype(np.uint32) << 16).view(
        np.float32
    ).tolist() == list(range(96))


def test_names_join_stack_and_take(tmp_path: Path) -> None:
    arrays = {f"l.{i}.{p}": random_array("float32", (4, 6), i) for i in range(2) for p in "qk"}
    arrays |= {f"e.{i}": random_array("float32", (3, 2), 9 + i) for i in range(3)}
    arrays |= {"t": random_array("float32", (5, 4), 20), "same": random_array("float32", (2,), 21)}
    tensors = {name: ("float32", array) for name, array in arrays.items()}
    write_source(tmp_path / "src", tensors, Random(3))
    names = {
        "l.{i}.qk": join(dim=0, source="l.{i}.{part}", q=2, k=2),
        "experts": stack("e.{e}", dim=1),
        "padded": take("t", crop={1: (1, 3)}, pad={0: 8}),
    }
    with small_windows(64):
        checkpoint.convert(tmp_path / "src", tmp_path / "out", names=names)
    groups = [arrays[f"l.1.{p}"][2 * g : 2 * g + 2] for g in range(2) for p in "qk"]
    padded = np.zeros((8, 2), dtype=arrays["t"].dtype)
    padded[:5] = arrays["t"][:, 1:3]
    found = read_full(tmp_path / "out")
    assert found["l.1.qk"][1] == np.concatenate(groups).tobytes()
    assert found["experts"][1] == np.stack([arrays[f"e.{i}"] for i in range(3)], axis=1).tobytes()
    assert found["padded"] == ((8, 2), padded.tobytes())
    assert set(found) == {"l.0.qk", "l.1.qk", "experts", "padded", "same"}


def test_entries_that_are_no_tensors_survive_distcp(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"m": {"w": torch.arange(24.0).reshape(6, 4)}, "step": 41, "words": ["a", {"b": 2}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
        checkpoint.convert(
            tmp_path / "src", tmp_path / "out", mesh="x=3", layouts={"*": "x ..."}, format="distcp"
        )
        found = {"m": {"w": torch.zeros(6, 4)}, "step": 0, "words": ["", {"b": 0}]}
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
        dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole.pop("m")["w"], found["m"]["w"])
    assert whole == {"step": 41, "words": ["a", {"b": 2}]}
    assert torch.equal(found.pop("m")["w"], state.pop("m")["w"])
    assert found == state
    report = checkpoint.convert(tmp_path / "out", tmp_path / "full")
    assert report.left_out == ()
    said = checkpoint.inspect(tmp_path / "full").metadata
    assert said == {"format": "pt", "step": "41", "words.0": '"a"', "words.1.b": "2"}


def test_a_dry_run_writes_nothing(source: tuple[Path, Tensors]) -> None:
    here, _ = source
    report = checkpoint.convert(here, here.parent / "deep" / "out", dry_run=True)
    assert sorted(path.name for path in here.parent.iterdir()) == ["src"]
    assert report.dry_run
    assert report.bytes_written == report.disk_needed > 0
    assert report.disk_free
    assert json.loads(report.to_json())["amplification"] >= 1
    assert "would write" in str(report)


def test_without_checksums_the_bytes_are_the_same(source: tuple[Path, Tensors]) -> None:
    here, tensors = source
    for checksums in (True, False):
        checkpoint.convert(here, here.parent / str(checksums), checksums=checksums)
    assert_equal(here.parent / "False", tensors)
    one = (here.parent / "True" / "model.safetensors").read_bytes()
    assert one == (here.parent / "False" / "model.safetensors").read_bytes()
    assert not (here.parent / "False" / SIDECAR).exists()


@pytest.mark.parametrize("format", ["full", "distcp"])
def test_progress_ends_at_its_total(tmp_path: Path, format: str) -> None:
    """Also where small tensors are written with the bytes of the format around them."""
    write_counting(tmp_path / "in", "a", "b")
    seen: list[tuple[int, int]] = []
    options = {"format": format, "progress": lambda *now: seen.append(now)}
    report = checkpoint.convert(tmp_path / "in", tmp_path / "out", **options)
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes_written, report.bytes_written)


def test_windows_of_the_usual_size(tmp_path: Path) -> None:
    array = random_array("bfloat16", (3000, 2048))
    write_source(tmp_path / "src", {"w": ("bfloat16", array)}, Random(2), checksums=1 << 20)
    cut = {"mesh": "x=2 y=2", "layouts": {"w": "x y"}}
    checkpoint.convert(tmp_path / "src", tmp_path / "cut", **cut, format="distcp")
    checkpoint.convert(tmp_path / "cut", tmp_path / "full")
    assert_equal(tmp_path / "full", {"w": ("bfloat16", array)})


NAMES = """
"l.{i}.qk" = { join = "l.{i}.{part}", rows = { q = 2, k = 2 } }
"both" = { join = ["a", "b"], dim = 1 }
"experts" = { stack = "e.{e}", dim = 1 }
"pair" = { stack = ["a", "b"] }
"padded" = { take = "t", crop = { 1 = [1, 3] }, pad = { 0 = 8 } }
"row" = { take = "t", index = { 0 = 3 } }
"new" = "old"
"""


def test_names_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text(NAMES)
    assert read_names(str(tmp_path / "names.toml")) == {
        "l.{i}.qk": join(dim=0, source="l.{i}.{part}", q=2, k=2),
        "both": join("a", "b", dim=1),
        "experts": stack("e.{e}", dim=1),
        "pair": stack("a", "b"),
        "padded": take("t", crop={1: (1, 3)}, pad={0: 8}),
        "row": take("t", index={0: 3}),
        "new": "old",
    }


@pytest.mark.parametrize(
    "text", ["x = 3", "x = {}", 'x = {join = []}', 'x = {join = "a"}', 'x = {stack = "a", at = 1}',
             'x = {take = "a", pad = {a = 1}}', 'x = {take = "a", crop = {0 = 1}}', "x ="]
)  # fmt: skip
def test_names_that_mean_nothing_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.toml").write_text(text)
    with pytest.raises(FormatError, match="names"):
        read_names(str(tmp_path / "names.toml"))


BAD = [
    ({"mesh": "tp=2"}, RulesError, "rules"),
    ({"mesh": "tp=2", "layouts": {"model.w": "tp -"}}, RulesError, "model.b"),
    ({"mesh": "tp=2", "layouts": {"*": "tp -"}}, LayoutError, "words"),
    ({"layouts": {"*": "tp ..."}}, LayoutError, "mesh"),
    ({"format": "ranks"}, ReshardError, "rules"),
    ({"format": "zip"}, ReshardError, "full, sharded"),
    ({"mesh": "tp=2", "layouts": {"*": "... | sum tp"}}, LayoutError, "pending"),
    ({"memory": "100KiB"}, MemoryCapError, "at least"),
    ({"dtype": {"ids": "complex32"}}, DtypeError, "complex32"),
    ({"dtype": "float7"}, DtypeError, "float7"),
    ({"names": {"x": "absent"}}, NamesError, "absent"),
    ({"names": {"model.b": "model.w"}}, NamesError, "model.b"),
    ({"names": {"x": join("model.w", "ids", dim=0)}}, PlanError, "ids"),
    ({"names": {"x": join("model.w", "model.b", dim=3)}}, PlanError, "dim 3"),
]


@pytest.mark.parametrize(("options", "error", "word"), BAD)
def test_what_cannot_be_is_said_before_a_byte_moves(
    source: tuple[Path, Tensors], options: dict, error: type[Exception], word: str
) -> None:
    here, _ = source
    with pytest.raises(error, match=word) as raised:
        checkpoint.convert(here, here.parent / "out", **options)
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in here.parent.iterdir()) == ["src"]


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    array = random_array("float32", (8, 4))
    boxes = [Box((0, 0), (3, 4)), Box((3, 0), (5, 4)), Box((5, 0), (8, 4))]
    for missing in range(3):
        folder = tmp_path / str(missing)
        write_sharded(folder, {"w": ("float32", array)}, {"w": boxes})
        (folder / f"shard-{missing + 1:05d}-model-00001-of-00001.safetensors").unlink()
        with pytest.raises((CoverageError, DamageError)):
            checkpoint.convert(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_replicas_that_disagree_are_an_error(tmp_path: Path) -> None:
    array = random_array("float32", (8, 4))
    boxes = [Box((0, 0), (5, 4)), Box((3, 0), (8, 4))]
    write_sharded(tmp_path / "src", {"w": ("float32", array)}, {"w": boxes})
    second = tmp_path / "src" / "shard-00002-model-00001-of-00001.safetensors"
    data = bytearray(second.read_bytes())
    data[-5 * 16 + 16 + 1] ^= 1  # row 4, which both have
    second.write_bytes(data)
    with pytest.raises(DamageError, match=r'"w" \[4:5, 0:1\].*shard-00001.*shard-00002'):
        checkpoint.convert(tmp_path / "src", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    checkpoint.convert(tmp_path / "src", tmp_path / "out", compare_replicas=False)
    assert_equal(tmp_path / "out", {"w": ("float32", array)})


@settings(max_examples=cases(12, 500), deadline=None)
@given(drawn_by(lambda rng: rng))
def test_a_flipped_bit_of_a_source_with_checksums_is_found(rng: Random) -> None:
    array = random_array("float32", (40, 3), rng.randrange(99))
    with TemporaryDirectory() as folder, small_windows(rng.choice((32, 1 << 20))):
        here = Path(folder) / "src"
        write_source(here, {"w": ("float32", array)}, rng, checksums=rng.choice((50, 100000)))
        path = rng.choice(sorted(here.glob("*.safetensors")))
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[rng.randrange(start, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        cast = rng.choice((None, "bfloat16"))
        with pytest.raises(DamageError, match=path.name):
            checkpoint.convert(here, Path(folder) / "out", dtype=cast)
        assert sorted(p.name for p in Path(folder).iterdir()) == ["src"]


def test_reads_are_unique_and_long(tmp_path: Path) -> None:
    """Rows to columns, the worst case: every byte is read once."""
    array = random_array("float32", (256, 1024))
    boxes = [Box((at, 0), (at + 64, 1024)) for at in range(0, 256, 64)]
    write_sharded(tmp_path / "src", {"w": ("float32", array)}, {"w": boxes})
    with small_windows(1 << 18):
        report = checkpoint.convert(
            tmp_path / "src", tmp_path / "out", mesh="x=4", layouts={"w": "- x"}
        )
        back = checkpoint.convert(
            tmp_path / "out", tmp_path / "back", mesh="x=3", layouts={"w": "x -"}
        )
    assert report.bytes_read == back.bytes_read == array.nbytes
    assert checkpoint.verify(tmp_path / "src", tmp_path / "back").ok


def test_remote_targets_are_committed_last(tmp_path: Path) -> None:
    import fsspec

    tensors = {"w": ("float32", random_array("float32", (8, 4)))}
    write_source(tmp_path / "src", tensors, Random(1))
    address = "memory://remote-targets/out"
    checkpoint.convert(tmp_path / "src", address)
    files = fsspec.filesystem("memory")
    listed = json.loads(files.cat("/remote-targets/out/_RESHARD_COMMITTED"))["files"]
    assert listed["model.safetensors"] == files.size("/remote-targets/out/model.safetensors")
    assert checkpoint.verify(address, tmp_path / "src").ok
    with pytest.raises(TargetError, match="exists"):
        checkpoint.convert(tmp_path / "src", address, overwrite=True)
    checkpoint.convert(address, tmp_path / "back")
    assert_equal(tmp_path / "back", tensors)
