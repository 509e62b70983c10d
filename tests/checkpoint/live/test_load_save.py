"""Loading and saving in a job: random layouts on both sides, all kinds of tensors, failures."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard import checkpoint, sharded
from reshard.checkpoint.catalog import StoredPiece
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.live.direct_reads import MappedFiles, ReadRequest
from reshard.checkpoint.live.entries import entries_of
from reshard.checkpoint.live.shared_reads import Limits, batches_of
from reshard.checkpoint.piece_table import PieceTable
from reshard.checkpoint.storage.local import LocalStorage
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.errors import (
    CheckpointError,
    CoverageError,
    DamageError,
    MemoryCapError,
    TargetError,
    TensorError,
)
from reshard.layout.box import row_major
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.tensors.state_dicts import tensors_in
from tests import generate
from tests.checkpoint.converting import random_cuts, random_tensors
from tests.ranks.live import local_of, tensor_of
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases
from tests.strategies import drawn_by

State = dict[str, Any]


@settings(max_examples=cases(25, 3000), deadline=None)
@given(drawn_by(lambda rng: rng))
def test_every_byte_is_read_once_and_by_ranks_evenly(rng: Random) -> None:
    num_ranks, size = rng.randint(1, 6), rng.choice((1, 2, 4))
    mesh = Mesh(r=num_ranks)
    limits = Limits(share=4000, cell=500, batch=num_ranks * 3500)
    requests, offset = {}, 0
    for number in range(rng.randint(1, 5)):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.randint(0, 3)))
        pieces = []
        for box in random_cuts(rng, shape):
            pieces.append(StoredPiece(box, rng.randint(0, 2), offset, row_major(box.shape)))
            offset += box.size * size
        have = PieceTable.of(pieces, len(shape), size)
        dtype = {1: "uint8", 2: "bfloat16", 4: "float32"}[size]
        word = " ".join(rng.sample(["r", *["-"] * max(len(shape) - 1, 0)], len(shape)))
        layout = Layout(mesh, rng.choice((word, "...")) if shape else "...")
        transfer = Transfer(str(number), shape, dtype, dtype, have, None, have[:0])
        requests[str(number)] = ReadRequest(transfer, layout, rng.random() < 0.5)
    seen = {name: np.zeros(wish.transfer.shape, int) for name, wish in requests.items()}
    finished: list[str] = []
    for batch in batches_of(requests, range(num_ranks), limits):
        loads = [0] * num_ranks
        for share in batch:
            assert share.name not in finished
            for rank, boxes in share.boxes.items():
                for box in boxes:
                    assert box in share.window
                    assert box.size * size <= limits.cell
                    loads[rank] += box.size * size
                    seen[share.name][tuple(map(slice, box.start, box.stop))] += 1
        finished += [share.name for share in batch if share.is_last]
        assert max(loads) <= limits.share
        assert max(loads) <= sum(loads) / num_ranks * 1.1 + limits.cell
    assert all((counts == 1).all() for counts in seen.values())
    assert sorted(finished) == sorted(requests)


def test_names_are_those_of_describe() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    state = {"m": {"a": a, "b": [b, {"c": a}]}, "lr": 0.1, "betas": [0.9, 0.99], 3: {"x": b}}
    entries = entries_of(state)
    assert [*entries.tensors] == [*tensors_in(state)] == ["m.a", "m.b.0", "m.b.1.c", "3.x"]
    assert entries.others == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert entries.keys["m.b.1.c"] == ("m", "b", 1, "c")


_groups: dict[int, Any] = {}


def group_of(size: int) -> Any:
    """The group of the first ranks; every rank of the pool calls it."""
    if size in (2, 4):
        return pool_group(size)
    if size not in _groups:
        _groups[size] = dist.new_group(range(size))
        if size < dist.get_world_size():
            # torch names groups by how many a rank has: the others get one more as well.
            _groups[-size] = dist.new_group(range(size, dist.get_world_size()))
    return _groups[size]


def random_state(rng: Random, tensors: dict, size: int, rank: int, fill: bool) -> State:
    """The tensors as sharded ones of random layouts, or plain ones."""
    state: State = {"step": 3}
    for name, (dtype, array) in tensors.items():
        full = tensor_of(array, dtype)
        if rng.random() < 0.2:
            state[name] = full.clone() if fill else torch.zeros_like(full)
            continue
        on = generate.mesh(rng, range(size))
        layout = Layout(Mesh.parse(str(on)), generate.layout(rng, on, array.shape))
        if rng.random() < 0.2:
            boxes = dict.fromkeys(range(size), ())
            for box in random_cuts(rng, array.shape):
                where = rng.randrange(size)
                boxes[where] = (*boxes[where], box)
            layout = Layout.from_boxes(array.shape, {r: b for r, b in boxes.items() if b})
        spec = sharded.LayoutShardingSpec(layout)
        made = sharded.zeros(spec, *array.shape, dtype=full.dtype, process_group=group_of(size))
        local = local_of(full, layout, rank)
        if fill and local is not None:
            at = 0
            for part in made._content.parts:
                part.copy_(local.reshape(-1)[at : at + part.numel()].view(part.shape))
                at += part.numel()
        state[name] = made
    return state


def check_state(state: State, tensors: dict, rank: int) -> None:
    for name, (dtype, array) in tensors.items():
        full, found = tensor_of(array, dtype), state[name]
        if isinstance(found, sharded.ShardedTensor):
            want = local_of(full, found.cut, rank)
            have = [part.reshape(-1) for part in found._content.parts]
            assert (want is None) == (not have)
            if want is None:
                continue
            full, found = want.reshape(-1), torch.cat(have)
        same = found.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, full.contiguous().view(-1).view(torch.uint8)), name


def random_journeys(rank: int, folder: str, seeds: range) -> list[float]:
    """Save on some ranks, load on others."""
    found = []
    for seed in seeds:
        rng = Random(seed)
        tensors, path = random_tensors(rng), f"{folder}/{seed}"
        have, want = rng.choice((2, 4, 8)), rng.choice((2, 3, 8))
        form, memory = rng.choice(("sharded", "distcp")), rng.choice(("4MiB", "256MiB"))
        state = random_state(rng, tensors, have, rank, fill=True) if rank < have else None
        groups = group_of(have), group_of(want)
        if state is not None:
            try:
                report = checkpoint.save(state, path, group=groups[0], format=form)
            except TargetError:  # many boxes of a tensor, each of which would be a file
                report = checkpoint.save(state, path, group=groups[0], format="distcp")
            assert report.left_out == (() if report.format == "distcp" else ("step",))
        dist.barrier()
        rng = Random(seed + 1)
        if rank < want:
            state = random_state(rng, tensors, want, rank, fill=False)
            loaded = checkpoint.load(path, into=state, group=groups[1], memory=memory)
            assert loaded.checked
            assert loaded.left_alone == ("step",)
            check_state(state, tensors, rank)
            found.append(loaded.amplification)
        dist.barrier()
    return found


@pytest.mark.parametrize("first", range(0, cases(10, 300), 10))
def test_random_cuts_saved_on_some_ranks_load_on_others(
    pool: Pool, tmp_path: Path, first: int
) -> None:
    seeds = range(first, first + 10)
    told = pool.run(random_journeys, str(tmp_path), seeds)
    assert all(one == 1.0 for ranks in told for one in ranks)
    for seed in seeds[:3]:
        assert checkpoint.verify(tmp_path / str(seed)).ok


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(48, 96)
        self.down = torch.nn.Linear(96, 48)
        self.norm = torch.nn.LayerNorm(48)


def parallel_block(mesh: DeviceMesh) -> State:
    block = Block()
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return block.state_dict()


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Every byte that this process reads, or copies from mapped pages, of files of a checkpoint."""
    counted, pread, preadv, copy = [0], os.pread, os.preadv, MappedFiles.copy

    def one(descriptor: int, length: int, offset: int) -> bytes:
        data = pread(descriptor, length, offset)
        counted[0] += len(data)
        return data

    def many(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = preadv(descriptor, buffers, offset, flags)
        if flags & os.RWF_NOWAIT:  # asks whether a page is in memory: one byte that nobody uses
            assert count == 1
        else:
            counted[0] += count
        return count

    def mapped(files: MappedFiles, path: str, task: Any) -> None:
        copy(files, path, task)
        counted[0] += task.into.numel() * task.into.element_size()

    with (
        patch.object(os, "pread", one),
        patch.object(os, "preadv", many),
        patch.object(MappedFiles, "copy", mapped),
    ):
        yield counted


def save_fsdp_and_tp(rank: int, folder: str) -> None:
    """FSDP2 over tensor parallelism on eight ranks, in both formats."""
    block = Block()
    mesh = mesh_of(2, 4)
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    state = {"model": block.state_dict(), "step": 7, "betas": [0.9, 0.99]}
    for form in ("sharded", "distcp"):
        report = checkpoint.save(state, f"{folder}/{form}", format=form)
        assert report.unique_bytes == sum(p.numel() * 4 for p in Block().parameters())
        assert report.busiest_bytes < report.bytes_written / 4


def load_block(rank: int, folder: str, form: str) -> tuple[int, int]:
    """Into tensor-parallel DTensors on four ranks, and whole on each of them."""
    whole = {name: torch.zeros_like(one) for name, one in Block().state_dict().items()}
    cut = parallel_block(mesh_of(4))
    for one in cut.values():
        (one.to_local() if isinstance(one, DTensor) else one).zero_()
    with bytes_read() as counted:
        checkpoint.load(f"{folder}/{form}", into={"model": cut}, group=pool_group(4))
    report = checkpoint.load(f"{folder}/{form}", into={"model": whole}, group=pool_group(4))
    for name, expected in Block().state_dict().items():
        assert torch.equal(whole[name], expected), name
        assert torch.equal(full(cut[name]), expected), name
    return counted[0], report.unique_bytes


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_fsdp_and_tensor_parallel_to_tensor_parallel(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_fsdp_and_tp, str(tmp_path))
    for form in ("sharded", "distcp"):
        assert checkpoint.verify(tmp_path / form).ok
        pool.run(load_block, str(tmp_path), form, ranks=range(4))
    assert checkpoint.verify(tmp_path / "sharded", tmp_path / "distcp").ok
    check_torch_reads(tmp_path)


def check_torch_reads(folder: Path) -> None:
    """What torch's own readers make of it, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of loading without a process group
        _check_torch_reads(folder)


def _check_torch_reads(folder: Path) -> None:
    expected = Block().state_dict()
    state = {"model": {name: torch.zeros_like(one) for name, one in expected.items()}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "sharded")), no_dist=True)
    state |= {"step": 0, "betas": [0]}
    for name, one in expected.items():
        assert torch.equal(state["model"][name], one)
        state["model"][name].zero_()
    dcp.load(state, checkpoint_id=folder / "distcp", no_dist=True)
    assert state["step"] == 7
    assert state["betas"] == [0.9, 0.99]
    for name, one in expected.items():
        assert torch.equal(state["model"][name], one)


SIZE = (1024, 512)


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(SIZE, dtype=np.float32))


def load_whole_files(rank: int, folder: str) -> list[tuple[int, int]]:
    """A Hugging Face checkpoint, into columns and into replicas: how much each rank reads."""
    mesh, found = mesh_of(2, 4), []
    for places in ([Replicate(), Shard(1)], [Replicate(), Replicate()], [Shard(0), Shard(1)]):
        into = {
            name: distribute_tensor(torch.zeros(SIZE), mesh, places, src_data_rank=None)
            for name in ("a", "b")
        }
        with bytes_read() as counted:
            report = checkpoint.load(folder, into=into)
        for seed, name in enumerate(("a", "b")):
            assert torch.equal(into[name].full_tensor(), numbers(seed))
        found.append((counted[0], report.unique_bytes))
    return found


def test_each_byte_is_read_once_in_the_whole_job(pool: Pool, tmp_path: Path) -> None:
    save_file({"a": numbers(0), "b": numbers(1)}, tmp_path / "model.safetensors")
    told = pool.run(load_whole_files, str(tmp_path))
    for calls in zip(*told, strict=True):
        read, unique = [count for count, _ in calls], calls[0][1]
        assert unique == 2 * 4 * prod(SIZE)
        assert unique <= sum(read) <= 1.02 * unique
        assert max(read) <= 1.3 * unique / 8


def pipeline(rank: int, folder: str) -> None:
    """Each rank has its own layer, and the last two an expert between them."""
    group = pool_group(4)
    state = {f"layers.{rank}": numbers(rank), "step": torch.tensor(rank // 4)}
    spec = sharded.LayoutShardingSpec(Layout(Mesh(r=2, ranks=[2, 3]), "r -"))
    state["expert"] = sharded.zeros(spec, *SIZE, process_group=group)
    for part in state["expert"]._content.parts:
        part.copy_(numbers(9).chunk(2)[rank - 2])
    checkpoint.save(state, folder, group=group)
    other = 3 - rank
    into = {f"layers.{other}": torch.zeros(SIZE), "step": torch.tensor(5)}
    into["expert"] = torch.zeros(SIZE)
    report = checkpoint.load(folder, into=into, group=group)
    assert report.bytes_read == report.unique_bytes
    assert torch.equal(into[f"layers.{other}"], numbers(other))
    assert torch.equal(into["expert"], numbers(9))
    assert into["step"] == 0


def test_ranks_may_have_different_tensors(pool: Pool, tmp_path: Path) -> None:
    pool.run(pipeline, str(tmp_path / "ckpt"), ranks=range(4))
    found = checkpoint.inspect(tmp_path / "ckpt")
    assert found.ok
    assert found.num_tensors == 6


def into_of(*names: str, dtype: torch.dtype = torch.float32) -> State:
    return {name: torch.full(SIZE, -1, dtype=dtype) for name in names}


def try_load(rank: int, path: str, names: tuple[str, ...], options: State, broken: bool) -> str:
    """The error of a load, if every tensor is as it was."""
    dtype = options.pop("dtype", torch.float32)
    shape = options.pop("shape", SIZE)
    into = {name: torch.full(shape, -1, dtype=dtype) for name in names}
    real = LocalStorage.read_into

    def fails(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    broken_read = fails if broken and rank == 2 else real
    try:
        with patch.object(LocalStorage, "read_into", broken_read):
            checkpoint.load(path, into=into, group=pool_group(4), **options)
    except Exception as error:
        assert all((one == -1).all() for one in into.values())
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_what_is_wrong_is_told_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    checkpoint.save({"a": numbers(0), "b": numbers(1)}, path)

    def error(names: str, broken: bool = False, where: Path = path, **options: Any) -> str:
        args = (str(where), tuple(names), options, broken)
        told = pool.run(try_load, *args, ranks=range(4))
        assert len(set(told)) == 1, told
        return told[0]

    assert error("ab") == "loaded"
    assert error("a", strict=False) == "loaded"
    assert "NamesError" in error("abc")
    assert 'lacks "c": strict=False' in error("abc")
    assert error("a") == "loaded"
    assert 'holds "b", which the state dict lacks' in error("a", strict="exact")
    assert "(1024, 512)" in error("ab", shape=(4, 4))
    assert "cast=True" in error("ab", dtype=torch.bfloat16)
    assert error("ab", dtype=torch.bfloat16, cast=True) == "loaded"
    assert "does not exist" in error("ab", where=tmp_path / "none")
    assert error("ab", broken=True) == "CheckpointError: on rank 2: [Errno 5] Input/output error"
    damage(path)
    assert error("ab").startswith("DamageError")
    assert "changed since" in error("ab")
    assert error("ab", check=False) == "loaded"
    torch.save({"a": numbers(0), "b": numbers(1)}, tmp_path / "model.pt")
    assert error("ab", where=tmp_path / "model.pt") == "loaded"
    damage(tmp_path, "*.pt")
    assert error("ab", where=tmp_path / "model.pt").startswith("DamageError")
    assert "changed since torch saved them" in error("ab", where=tmp_path / "model.pt")
    assert error("ab", where=tmp_path / "model.pt", check=False) == "loaded"


def damage(path: Path, pattern: str = "*.safetensors") -> None:
    (file,) = path.glob(pattern)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def try_save(rank: int, path: str, fails: bool, options: State) -> str:
    """Save with a rank that cannot write."""
    real = OutputFiles.write

    def write(self: OutputFiles, file: int, offset: int, data: memoryview) -> None:
        if fails and rank == 1:
            raise OSError(28, "No space left on device")
        real(self, file, offset, data)

    spec = sharded.LayoutShardingSpec(Layout(Mesh(r=4), "r -"))
    state = {"a": sharded.ones(spec, *SIZE, process_group=pool_group(4))}
    try:
        with patch.object(OutputFiles, "write", write):
            checkpoint.save(state, path, group=pool_group(4), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_save_that_fails_publishes_nothing(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    checkpoint.save({"a": numbers()}, path)

    def outcome(fails: bool = False, **options: Any) -> str:
        told = pool.run(try_save, str(path), fails, options, ranks=range(4))
        assert len(set(told)) == 1, told
        return told[0]

    def kept() -> bool:
        into = into_of("a")
        checkpoint.load(path, into=into)
        return torch.equal(into["a"], numbers()) and [*tmp_path.iterdir()] == [path]

    assert "exists" in outcome()
    told = outcome(fails=True, overwrite=True)
    assert told.startswith("TargetError: on rank 1: [Errno 28]")
    assert f"saving to {path} failed" in told
    assert "no format" in outcome(format="full")
    assert kept()
    assert outcome(overwrite=True) == "saved"
    into = into_of("a")
    report = checkpoint.load(path, into=into)
    assert (into["a"] == 1).all()
    assert report.checked
    assert [*tmp_path.iterdir()] == [path]


def state_of() -> State:
    return {
        "w": torch.arange(600.0).reshape(20, 30).t(),
        "n": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "nested": {"list": [torch.ones(3, dtype=torch.bfloat16)], "lr": 0.1},
    }


@pytest.mark.parametrize("form", ["sharded", "distcp"])
def test_one_process_needs_no_group(tmp_path: Path, form: str) -> None:
    saved = checkpoint.save(state_of(), tmp_path / "a", format=form)
    assert saved.num_tensors == 4
    assert str(saved).startswith("saved 4 tensors")
    into = state_of()
    for one in tensors_in(into).values():
        one.zero_()
    report = checkpoint.load(tmp_path / "a", into=into, memory="4MiB")
    for name, one in tensors_in(state_of()).items():
        assert torch.equal(tensors_in(into)[name], one), name
    assert report.left_alone == ("nested.lr",)
    assert report.bytes_read == report.unique_bytes == 600 * 4 + 8 + 6
    assert '"amplification": 1.0' in report.to_json()
    assert "checked" in str(report)


def test_parameters_are_loaded_in_place(tmp_path: Path) -> None:
    block = Block()
    checkpoint.save(block.state_dict(), tmp_path / "a")
    other = Block()
    for one in other.parameters():
        one.detach().zero_()
    checkpoint.load(tmp_path / "a", into=dict(other.named_parameters()))
    for one, two in zip(block.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.requires_grad


def test_large_tensors_are_read_in_parts(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.arange(4 << 20), "b": torch.ones(3)}, tmp_path / "a")
    into = {"a": torch.zeros(4 << 20, dtype=torch.int64), "b": torch.zeros(3)}
    report = checkpoint.load(tmp_path / "a", into=into, memory="4MiB")
    assert report.checked
    assert torch.equal(into["a"], torch.arange(4 << 20))
    damage(tmp_path / "a")
    with pytest.raises(DamageError, match=r"bytes .* changed since"):
        checkpoint.load(tmp_path / "a", into=into, memory="4MiB")


def test_what_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    checkpoint.save({"a": torch.ones(3)}, tmp_path / "a")
    checkpoint.convert(tmp_path / "a", cut, mesh="r=3", layouts={"*": "r"})
    for path in [*cut.glob("shard-00002*"), cut / SIDECAR]:
        path.unlink()
    into = {"a": torch.zeros(3)}
    with pytest.raises((CoverageError, DamageError)):
        checkpoint.load(cut, into=into)
    with pytest.raises(MemoryCapError, match="at least"):
        checkpoint.load(tmp_path / "a", into=into, memory="1MiB")
    with pytest.raises(TensorError, match="meta device"):
        checkpoint.load(tmp_path / "a", into={"a": torch.zeros(3, device="meta")})
    with pytest.raises(TensorError, match="no state dict"):
        checkpoint.save([torch.ones(3)], tmp_path / "b")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="no folder of this machine"):
        checkpoint.save({"a": torch.ones(3)}, "s3://bucket/a")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        checkpoint.save({"f": lambda: 0}, tmp_path / "b", format="distcp")
    assert (into["a"] == 0).all()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("bad", "words"), [("", "the path of a checkpoint is empty"), (None, "None is no path")]
)
def test_what_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, words: str
) -> None:
    """An empty one, of an unset variable, would be the working directory."""
    state = {"a": torch.ones(3)}
    checkpoint.save(state, tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    for call in (
        lambda: checkpoint.save(state, bad, overwrite=True),
        lambda: checkpoint.load(bad, into=state),
        lambda: checkpoint.inspect(bad),
        lambda: checkpoint.convert(bad, tmp_path / "b"),
        lambda: checkpoint.convert(tmp_path / "a", bad),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for method in ("allocate", "write", "sync_folders"):
        failing = patch.object(OutputFiles, method, side_effect=full)
        with (
            failing,
            pytest.raises(TargetError, match=r"No space left on device: .* is there room"),
        ):
            checkpoint.save({"a": torch.ones(3)}, tmp_path / "a")
        assert not [*tmp_path.iterdir()]


def test_a_save_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    target = tmp_path / "a"
    left = tmp_path / ".a.reshard-partial"

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    killed = patch.object(shutil, "rmtree"), patch.object(OutputFiles, "sync_file", dies)
    with killed[0], killed[1], pytest.raises(KeyboardInterrupt):
        checkpoint.save({"a": torch.ones(3)}, target)
    assert [path.name.startswith(".a.reshard-gone-") for path in tmp_path.iterdir()] == [True]
    checkpoint.save({"a": torch.ones(3)}, target)
    assert list(tmp_path.iterdir()) == [target]
    left.mkdir()
    (left / "request.json").write_text('{"fingerprint": "x"}')
    with pytest.raises(TargetError, match="unfinished conversion"):
        checkpoint.save({"a": torch.ones(3)}, target, overwrite=True)


def load_with_default_device(rank: int, folder: str) -> int:
    """torch.set_default_device is for the caller's tensors; buffers are in the host's memory."""
    mesh, full = mesh_of(4), torch.arange(48.0).reshape(8, 6)
    with torch.device("meta"):
        checkpoint.save(
            {"w": distribute_tensor(full, mesh, [Shard(0)])}, folder, group=pool_group(4)
        )
        dist.barrier(pool_group(4))
        number = 0
        for placement in (Shard(0), Shard(1), Replicate()):
            for kind in (torch.float32, torch.float64):
                into = distribute_tensor(torch.zeros_like(full, dtype=kind), mesh, [placement])
                checkpoint.load(folder, into={"w": into}, cast=True, group=pool_group(4))
                found = into.redistribute(placements=[Replicate()]).to_local()
                assert torch.equal(found, full.to(kind)), (placement, kind)
                number += 1
    return number


def test_a_default_device(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(load_with_default_device, str(tmp_path / "saved"), ranks=range(4))
    assert found == [6] * 4
