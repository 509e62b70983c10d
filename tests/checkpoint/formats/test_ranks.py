"""Files of ranks: any layout is put together again, and what does not fit is named."""

from __future__ import annotations

import io
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from safetensors.torch import save_file

from reshard import Layout, Mesh, Rules
from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.checks import rank_of
from reshard.checkpoint.formats.reader import open_storage, read_catalog
from reshard.checkpoint.formats.safetensors.header import KEY, OwnMetadata, OwnTensor
from reshard.checkpoint.inspection import inspect
from reshard.errors import CheckpointError, DamageError, RulesError, UnsupportedError
from tests import strategies
from tests.cases import Side
from tests.checkpoint.torch_writers import bytes_of, gathered
from tests.soak import cases


@dataclass(frozen=True)
class Fixed:
    """Rules that give every tensor the same layout."""

    given: Layout
    mesh = None

    def fit(self, names: Iterable[str]) -> Fixed:
        return self

    def layouts(self, names: Mapping[str, Sequence[int]], mesh: Mesh) -> dict[str, Layout]:
        return dict.fromkeys(names, self.given)


def read(folder: Path, rules: Any, mesh: Mesh | None) -> tuple[Catalog, dict[str, bytes]]:
    with open_storage(folder) as storage:
        catalog = read_catalog(storage, rules, mesh)
        return catalog, gathered(storage, catalog)


def write_ranks(folder: Path, held: Mapping[int, np.ndarray], as_torch: bool = False) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for rank, local in held.items():
        tensor = torch.from_numpy(np.array(local, dtype=np.int32, order="C"))
        if as_torch:
            view = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
            torch.save({"model": {"w": view}}, folder / f"model_rank_{rank}.pt")
        else:
            save_file({"model.w": tensor}, folder / f"model-rank-{rank}-part-0.safetensors")


@settings(max_examples=cases(30, 4000), deadline=None)
@given(strategies.sides())
def test_any_layout_is_put_together_again(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Side, tuple[int, ...]]
) -> None:
    side, shape = drawn
    assume(side.boxes is None)
    layout = Layout(Mesh.parse(side.mesh), side.layout)
    held = side.held(shape)
    folder = tmp_path_factory.getbasetemp() / "any"
    write_ranks(folder, held, as_torch=len(shape) == 2)
    full = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    if layout.words.flat or layout.reduce or layout.words.without or not held:
        try:
            catalog, found = read(folder, Fixed(layout), layout.mesh)
        except CheckpointError:
            return
        assert catalog.tensors["model.w"].missing() or found == {"model.w": bytes_of(full)}
        return
    catalog, found = read(folder, Fixed(layout), layout.mesh)
    assert catalog.tensors["model.w"].shape == shape
    assert catalog.tensors["model.w"].missing() == ()
    assert found == {"model.w": bytes_of(full)}


@settings(max_examples=cases(35, 2000), deadline=None)
@given(strategies.sides())
def test_our_own_files_need_no_rules(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Side, tuple[int, ...]]
) -> None:
    """Flattened layouts too, because our files say the shape."""
    side, shape = drawn
    assume(side.boxes is None)
    layout = Layout(Mesh.parse(side.mesh), side.layout)
    held = side.held(shape)
    assume(held and not layout.reduce and not layout.words.without)
    folder = tmp_path_factory.getbasetemp() / "own"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, (rank, local) in enumerate(held.items(), 1):
        own = OwnMetadata(number, len(held), side.mesh, rank, {"w": OwnTensor(shape, str(layout))})
        tensor = torch.from_numpy(np.array(local, order="C"))
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file({"w": tensor}, path, {KEY: own.to_text()})
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    catalog, found = read(folder, None, None)
    assert catalog.tensors["w"].shape == shape
    assert found == {"w": bytes_of(full)}
    if len(held) > 1:
        path.unlink()
        with pytest.raises(DamageError, match=rf"shard {len(held)} of {len(held)} is missing"):
            read(folder, None, None)


@pytest.mark.parametrize(
    ("mesh", "layout", "shape", "says"),
    [
        ("tp=2", "tp:1 ...", [1 << 40], "is sharded by .* into 1099511627776 blocks"),
        ("tp=2", "{1099511627776 tp:1}", [1 << 40], "is sharded by .* blocks"),
        ("tp=2 dp=2", "tp:1 dp:1", [2048, 2048], "is sharded by .* into 4194304 blocks"),
        ("tp=2", "tp -", [4], "has 2 words and shape"),
        ("tp=2", "nonsense", [4], 'names axis "nonsense"'),
        ("tp=99999999999", "tp", [4], "tp=99999999999|ranks"),
        ("tp=2", "tp | sum dp", [4], 'names axis "dp"'),
        ("tp=4", "tp", [4], r"has the shape \(2,\) and .* to \(1,\) for rank 0"),
        ("tp=2", None, [4], "has no layout in the file's metadata"),
    ],
)
def test_own_layouts_that_are_lies(
    tmp_path: Path, mesh: str, layout: str | None, shape: list[int], says: str
) -> None:
    own = OwnMetadata(1, 1, mesh, 0, {"w": OwnTensor(tuple(shape), layout)})
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors", {KEY: own.to_text()})
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, None, None)


RULES = """
axes = ["tp", "pp"]
[tensors]
"*.qkv.weight" = "tp{4,2,2} -"
"*.up.weight" = "tp -"
"*.down.weight" = "- tp"
"*.norm" = "-"
"layers.{i}.*" = { on = "pp = i" }
"model.layers.{i}.*" = { on = "pp = i" }
"""


def stage(layer: int, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer as a rank of a tensor-parallel group holds them."""
    qkv, up, down = (full(name, layer) for name in ("qkv", "up", "down"))
    parts = [part.chunk(tp)[rank] for part in qkv.split([4, 2, 2])]
    return {
        f"layers.{layer}.qkv.weight": torch.cat(parts),
        f"layers.{layer}.up.weight": up.chunk(tp)[rank].contiguous(),
        f"layers.{layer}.down.weight": down.chunk(tp, 1)[rank].contiguous(),
        f"layers.{layer}.norm": full("norm", layer),
    }


def full(name: str, layer: int) -> torch.Tensor:
    shape = {"qkv": (8, 3), "up": (6, 3), "down": (3, 6), "norm": (3,)}[name]
    return torch.arange(100).reshape(-1)[: torch.Size(shape).numel()].reshape(shape) + 1000 * layer


def check_layers(found: Mapping[str, bytes], prefix: str = "", layers: int = 2) -> None:
    names = {"qkv": "qkv.weight", "up": "up.weight", "down": "down.weight", "norm": "norm"}
    expected = {
        f"{prefix}layers.{layer}.{ending}": bytes_of(full(name, layer))
        for layer in range(layers)
        for name, ending in names.items()
    }
    assert found == expected


def write_vllm(folder: Path) -> None:
    for rank in range(2):
        for part in range(2):
            tensors = stage(part, 2, rank)
            save_file(tensors, folder / f"model-rank-{rank}-part-{part}.safetensors")
    (folder / "config.json").write_text("{}")


def test_sharded_state_of_vllm(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    rules = Rules.parse(RULES.replace('on = "pp = i"', 'on = "pp = 0"'))
    catalog, found = read(tmp_path, rules, Mesh(tp=2, pp=1))
    check_layers(found)
    assert catalog.layouts["layers.0.up.weight"] == "tp - | on pp=0"
    assert [file.path for file in catalog.others] == ["config.json"]


def write_megatron(folder: Path) -> None:
    for tp in range(2):
        for pp in range(2):
            place = folder / "iter_0000100" / f"mp_rank_{tp:02d}_{pp:03d}"
            place.mkdir(parents=True)
            state = {
                "model": stage(pp, 2, tp),
                "iteration": 100,
                "checkpoint_version": 3.0,
                "args": Namespace(lr=0.1, dtype=torch.bfloat16),
                "rng_state": [{"cuda_rng_state": torch.tensor([tp, pp])}],
            }
            torch.save(state, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


def test_folders_of_megatron(tmp_path: Path) -> None:
    write_megatron(tmp_path)
    catalog, found = read(tmp_path, Rules.parse(RULES), Mesh(pp=2, tp=2))
    check_layers(found, "model.")
    assert catalog.metadata["iteration"] == "100"
    assert catalog.nesting["model.layers.0.norm"] == ("model", "layers.0.norm")
    notes = " ".join(catalog.notes)
    assert "random generators are left out" in notes
    assert '"args" is no tensor and no plain value, and is left out' in notes


def test_a_rank_whose_file_is_missing(tmp_path: Path) -> None:
    write_megatron(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000100" / "mp_rank_01_001")
    with pytest.raises(DamageError, match=r"no file holds its part at tp=1 of dim 0"):
        read(tmp_path, Rules.parse(RULES), Mesh(pp=2, tp=2))


def test_a_rank_that_lacks_a_tensor(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    path = tmp_path / "model-rank-1-part-1.safetensors"
    tensors = stage(1, 2, 1)
    del tensors["layers.1.up.weight"]
    save_file(tensors, path)
    rules = Rules.parse(RULES.replace('on = "pp = i"', 'on = "pp = 0"'))
    with pytest.raises(DamageError, match=r"part-1\.safetensors has no tensor .*up\.weight"):
        read(tmp_path, rules, Mesh(tp=2, pp=1))


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("tp=4 pp=1", r"tp\{4,2,2\} -.* no file holds its part|cuts .* to|no file holds its part"),
        ("tp=1 pp=1", r"is of rank 1, and mesh tp=1 pp=1 has the ranks 0"),
    ],
)
def test_another_mesh_than_the_one_that_wrote_it(tmp_path: Path, mesh: str, says: str) -> None:
    write_vllm(tmp_path)
    rules = Rules.parse(RULES.replace('on = "pp = i"', 'on = "pp = 0"'))
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, rules, Mesh.parse(mesh))


def test_ranks_that_disagree_about_a_shape(tmp_path: Path) -> None:
    rules = Rules.parse('axes = ["tp"]\n[tensors]\n"*" = "tp -"')
    for rank, rows in enumerate((3, 1, 3)):
        save_file({"w": torch.zeros(rows, 2)}, tmp_path / f"model-rank-{rank}-part-0.safetensors")
    with pytest.raises(
        DamageError, match=r'shape \(1, 2\) and "tp -" on mesh tp=3 shards \(7, 2\) to \(3, 2\)'
    ):
        read(tmp_path, rules, Mesh(tp=3))
    save_file({"w": torch.zeros(1, 3)}, tmp_path / "model-rank-2-part-0.safetensors")
    save_file({"w": torch.zeros(3, 2)}, tmp_path / "model-rank-1-part-0.safetensors")
    with pytest.raises(DamageError, match=r"has the shape \(1, 3\) and .* to \(1, 2\) for rank 2"):
        read(tmp_path, rules, Mesh(tp=3))
    save_file({"w": torch.zeros(1, 2).int()}, tmp_path / "model-rank-2-part-0.safetensors")
    with pytest.raises(DamageError, match=r"float32 of \(3, 2\) in .*rank-0.* int32 of \(1, 2\)"):
        read(tmp_path, rules, Mesh(tp=3))


def test_ranks_that_were_written_twice(tmp_path: Path) -> None:
    rules = Rules.parse('axes = ["tp"]\n[tensors]\n"*" = "tp -"')
    for part in range(2):
        save_file({"w": torch.zeros(3, 2)}, tmp_path / f"model-rank-0-part-{part}.safetensors")
    with pytest.raises(UnsupportedError, match=r'"w" is in .*part-0\.safetensors and in .*part-1'):
        read(tmp_path, rules, Mesh(tp=1))


def test_what_rules_need(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    with pytest.raises(CheckpointError, match=r"of 2 ranks .* give --rules and --mesh"):
        read(tmp_path, None, None)
    rules = Rules.parse('axes = ["tp"]\n[tensors]\n"*.norm" = "-"')
    with pytest.raises(CheckpointError, match=r"rules need a mesh.*in convert --from-mesh"):
        read(tmp_path, rules, None)
    with pytest.raises(RulesError, match="names match no rule"):
        read(tmp_path, rules, Mesh(tp=2))
    for path in tmp_path.glob("*.safetensors"):
        path.rename(tmp_path / f"x{len([*tmp_path.iterdir()])}{path.name[-15:]}")
    with pytest.raises(CheckpointError, match="no file has a rank in its name"):
        read(tmp_path, rules, Mesh(tp=2))


def test_a_flattened_tensor_does_not_say_its_shape(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model-rank-0-part-0.safetensors")
    layout = Layout(Mesh(dp=1), "... | flat dp")
    with pytest.raises(CheckpointError, match="flattened tensors do not say their shape"):
        read(tmp_path, Fixed(layout), layout.mesh)


def test_inspect_takes_texts(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    rules = tmp_path.parent / "cut.toml"
    rules.write_text(RULES.replace('on = "pp = i"', 'on = "pp = 0"'))
    report = inspect(tmp_path, rules, "tp=2 pp=1")
    assert report.ok
    assert "tp=2 pp=1: tp{4,2,2} -" in str(report)


@pytest.mark.parametrize(
    ("path", "mesh", "rank"),
    [
        ("model-rank-3-part-0.safetensors", "tp=4", 3),
        ("mp_rank_01/model_optim_rng.pt", "dp=2 tp=2", 1),
        ("mp_rank_01/model_optim_rng.pt", "tp=2 dp=2", 2),
        ("iter_7/mp_rank_01_002/model_optim_rng.pt", "pp=4 tp=2", 5),
        ("mp_rank_01_002_001/x.pt", "pp=4 ep=2 tp=2", 11),
        ("mp_rank_00_model_states.pt", "tp=2", 0),
        ("consolidated.03.pth", "tp=8", 3),
        ("model_rank_9.pt", "tp=2 @ 8-9", 9),
        ("model.safetensors", "tp=2", None),
        ("frank-3.safetensors", "tp=4", None),
        ("rankings.pt", "tp=4", None),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "tp=4", None),
    ],
)
def test_ranks_in_names(path: str, mesh: str, rank: int | None) -> None:
    assert rank_of(path, Mesh.parse(mesh)) == rank


@pytest.mark.parametrize("path", ["mp_rank_02/x.pt", "mp_rank_00_001/x.pt", "rank_4.pt"])
def test_ranks_that_the_mesh_lacks(path: str) -> None:
    with pytest.raises(CheckpointError, match="give the mesh that wrote it"):
        rank_of(path, Mesh(tp=2))


def test_whole_tensors_of_torch_save(tmp_path: Path) -> None:
    storage = torch.arange(20.0)
    state = {
        "model": {"a": storage[3:9].reshape(2, 3), "b": storage[9:], "tied": storage[3:5]},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.5}]},
        "epoch": 3,
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.save({"x": Namespace()}, tmp_path / "training_args.bin")
    catalog, found = read(tmp_path, None, None)
    assert catalog.notes == ('"training_args.bin": its tensors were not read',)
    assert found == {
        "model.a": bytes_of(storage[3:9]), "model.b": bytes_of(storage[9:]),
        "model.tied": bytes_of(storage[3:5]),
        "optimizer.state.0.exp_avg": bytes_of(torch.ones(2)),
    }  # fmt: skip
    assert catalog.metadata == {"optimizer.param_groups.0.lr": "0.5", "epoch": "3"}
    assert catalog.nesting["optimizer.state.0.exp_avg"] == ("optimizer", "state", "0", "exp_avg")


class Tagged(torch.Tensor):
    """A tensor of somebody's own kind."""


class Holder:
    """An object of somebody's own, with a tensor inside."""

    def __init__(self) -> None:
        self.hidden = torch.arange(10)


def test_tensors_of_every_kind_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "buffer": torch.nn.Buffer(torch.arange(4)),
        "subclass": torch.arange(5).as_subclass(Tagged),
    }
    torch.save(state, path)
    assert read(tmp_path, None, None)[1] == {n: bytes_of(t.data) for n, t in state.items()}
    for refused in (torch.ones(3).to_sparse(), torch.empty(2, device="meta")):
        torch.save({"a": torch.ones(1), "w": refused}, path)
        with pytest.raises(UnsupportedError, match=r'"w": a tensor made by \S+ is not supported'):
            read(tmp_path, None, None)


def test_tensors_inside_of_unknown_objects_are_told(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": Holder()}, tmp_path / "model.pt")
    notes = read(tmp_path, None, None)[0].notes
    assert '"x" is no tensor and no plain value, and is left out' in notes[0]
    assert "80 bytes of tensors are parts of objects that are left out" in notes[1]


def test_damaged_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(3000)}, path)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    with pytest.raises(DamageError, match="truncated"):
        read(tmp_path, None, None)
    path.write_bytes(b"x" * 100)
    with pytest.raises(DamageError, match=r"no archive of torch\.save"):
        read(tmp_path, None, None)
    torch.save({"w": torch.arange(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"wrote it before torch 1\.6"):
        read(tmp_path, None, None)
    path.write_bytes(whole[:300] + bytes(200) + whole[500:])
    with pytest.raises(
        DamageError, match=r"there is no member|two members|changed since torch saved"
    ):
        read(tmp_path, None, None)


def test_a_missing_torch_file_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(DamageError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        read(tmp_path, None, None)


@pytest.mark.parametrize("state", [{"w": torch.ones(1)}, {"a": 1}])
def test_a_torch_file_of_several_that_is_named_alone(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    torch.save(state, path)
    assert inspect(path).notes == (
        "pytorch_model-00002-of-00002.bin and other files of the same set were not given",
    )


class Sparse(io.RawIOBase):
    """A file in which long runs are holes; they are taken to be zeros."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self.file.seek(length, 1) if length > 1 << 16 else self.file.write(data)
        return length

    def close(self) -> None:
        if not self.file.closed:
            self.file.truncate()
            self.file.close()


def test_archives_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Their sizes and places stand elsewhere in the directory. Nothing of it is on the disk."""
    size = (1 << 32) + 4096
    zeros = tmp_path / "zeros"
    zeros.touch()
    os.truncate(zeros, size)
    big = torch.from_file(str(zeros), shared=True, size=size, dtype=torch.uint8)
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with closing(Sparse(tmp_path / "model.pt")) as file:
            torch.save({"big": big, "after": torch.arange(5)}, file)
    finally:
        torch.serialization.set_crc32_options(checksums)
    with open_storage(tmp_path / "model.pt") as storage:
        catalog = read_catalog(storage)
        [piece] = catalog.tensors["after"].pieces
        assert piece.offset > 1 << 32
        assert storage.read("model.pt", piece.offset, 40) == bytes_of(torch.arange(5))
    assert catalog.tensors["big"].shape == (size,)


def test_dicts_within_dicts_without_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = {}
    for _ in range(28):
        inner = {"a": inner, "b": inner}
    torch.save(inner, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="nests more than"):
        read(tmp_path, None, None)
    same = {str(number): {"betas": (), "w": torch.zeros(())} for number in range(5000)}
    torch.save(same, tmp_path / "model.pt")
    assert len(read(tmp_path, None, None)[0].tensors) == 5000
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    torch.save(loop, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="nests more than"):
        read(tmp_path, None, None)


def test_reports_are_json(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    rules = Rules.parse(RULES.replace('on = "pp = i"', 'on = "pp = 0"'))
    data = json.loads(inspect(tmp_path, rules, Mesh(tp=2, pp=1)).to_json())
    assert data["ok"]
    assert data["num_tensors"] == 8
    assert data["tensors"][0]["layout"].startswith("tp=2 pp=1: ")
