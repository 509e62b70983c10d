"""torch.distributed.checkpoint with ShardedTensors of ours, torch's own and DTensors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor as theirs
from torch.distributed._shard.metadata import ShardMetadata as TheirShard
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TheirProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from reshard import Box, Layout, Mesh, checkpoint
from reshard.layout.layout import BoxLayout
from reshard.sharded import (
    EnumerableShardingSpec,
    GridShardingSpec,
    LayoutShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    shard_tensor,
)
from reshard.sharded.content import wrap
from reshard.sharded.files.torch_checkpoint import _chunks_on, _num_elements, install
from tests import generate
from tests.cases import Side
from tests.checks import build
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, box, chunk, group_of, places
from tests.soak import cases, soaking

SHAPE = (7, 10)
KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)


def bits(dtype: torch.dtype, *size: int, seed: int = 0) -> torch.Tensor:
    """Random bits, the same on all ranks: NaNs of all kinds are among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, size, generator=generator).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    flat = torch.randint(0, 256, (torch.Size(size).numel() * width,), generator=generator)
    return flat.to(torch.uint8).view(dtype).reshape(size)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.equal(*(torch.empty(one.shape, dtype=one.dtype).copy_(one).reshape(-1)
                         .view(torch.uint8) for one in (found, wanted)))  # fmt: skip


def test_planners_of_others_are_called_by_keyword() -> None:
    install()
    item = WriteItem(MetadataIndex("lr"), WriteItemType.BYTE_IO)
    stream = DefaultSavePlanner().transform_object(write_item=item, object=0.5)
    stream.seek(0)
    assert torch.load(stream) == 0.5


def words(text: str, **axes: int) -> LayoutShardingSpec:
    return LayoutShardingSpec(Layout(Mesh(**axes), text))


@cache
def specs(num_ranks: int) -> dict[str, ShardingSpec]:
    """Every kind of spec, for a tensor of the usual shape on the first ranks."""
    ranks, last = range(num_ranks), num_ranks - 1
    overlapping = {0: [Box((0, 0), (5, 10))], last: [Box((2, 0), (7, 4)), Box((2, 4), (7, 10))]}
    return {
        "rows": chunk(0, ranks),
        "columns": chunk(1, ranks[::-1]),
        "several": chunk(1, [*ranks, *ranks]),
        "some ranks": chunk(0, [last]),
        "boxes": EnumerableShardingSpec(
            [box([0, 0], [3, 10], last), box([3, 0], [4, 3], 0), box([3, 3], [4, 7], last)]
        ),
        "grid": GridShardingSpec([num_ranks, [4, 6]], places([*ranks, *ranks[::-1]])),
        "ragged": RaggedShardingSpec(0, [0, 6, *[0] * (num_ranks - 2), 1], places([*ranks, 0])),
        "replicated": words("...", dp=num_ranks),
        "half replicated": words("- tp", dp=num_ranks // 2, tp=2),
        "cyclic": words("tp:2 tp2:1", tp=2, tp2=num_ranks // 2),
        "flat": words("- - | flat dp", dp=num_ranks),
        "overlapping": LayoutShardingSpec(Layout.from_boxes(SHAPE, overlapping)),
    }


Maker = Callable[[torch.Tensor, int], torch.Tensor]


def ours(name: str) -> Maker:
    def made(full: torch.Tensor, num_ranks: int) -> ShardedTensor:
        spec, group = specs(num_ranks)[name], pool_group(num_ranks)
        return shard_tensor(full, spec, process_group=group, scatter=False)

    return made


def torchs(dim: int) -> Maker:
    """Chunks of torch's own ShardedTensor, two on each rank."""

    def made(full: torch.Tensor, num_ranks: int) -> torch.Tensor:
        ranks, at, shards, local = [*range(num_ranks)] * 2, 0, [], []
        for rank, part in zip(ranks, full.chunk(len(ranks), dim), strict=False):
            offsets = [at if one == dim else 0 for one in range(full.ndim)]
            shard = TheirShard(offsets, list(part.shape), f"rank:{rank}/cpu")
            at += part.shape[dim]
            shards.append(shard)
            if rank == dist.get_rank():
                local.append(theirs.Shard(part.contiguous(), shard))
        metadata = theirs.ShardedTensorMetadata(
            shards, full.size(), TheirProperties(dtype=full.dtype)
        )
        return theirs.ShardedTensor._init_from_local_shards_and_global_metadata(
            local, metadata, process_group=pool_group(num_ranks)
        )

    return made


def dtensor(*placements: Any) -> Maker:
    def made(full: torch.Tensor, num_ranks: int) -> torch.Tensor:
        return distribute_tensor(full, mesh_of(num_ranks), placements, src_data_rank=None)

    return made


OURS = {f"ours, {name}": ours(name) for name in specs(4)}
OTHERS = {
    "torch's rows": torchs(0),
    "torch's columns": torchs(1),
    "DTensor rows": dtensor(Cut(0)),
    "DTensor columns": dtensor(Cut(1)),
    "DTensor whole": dtensor(Replicate()),
}
MAKERS: dict[str, Maker] = OURS | OTHERS


def value_of(number: int) -> torch.Tensor:
    """The values of the tensor that has this number in a checkpoint."""
    return bits(KINDS[number % len(KINDS)], *SHAPE, seed=number)


def check_values(name: str, found: torch.Tensor, full: torch.Tensor) -> None:
    """This rank's shards of a tensor of any kind have the bits of the whole one."""
    if isinstance(found, DTensor):
        wanted = distribute_tensor(full, found.device_mesh, found.placements, src_data_rank=None)
        assert same_bits(found.to_local(), wanted.to_local()), name
        return
    for shard in found.local_shards():  # type: ignore[attr-defined]
        ends = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        part = full[tuple(slice(at, at + size) for at, size in ends)]
        assert same_bits(shard.tensor, part), name


def save_all(rank: int, path: Path, num_ranks: int) -> None:
    makers = enumerate(MAKERS.items())
    state = {name: made(value_of(number), num_ranks) for number, (name, made) in makers}
    dcp.save(state, checkpoint_id=path, process_group=pool_group(num_ranks))


def sources_of(kind: str) -> Iterable[str]:
    """What is loaded into tensors of a kind: all, or one of each kind beside those of this one."""
    if soaking() or kind in ("ours, boxes", "ours, overlapping"):
        return MAKERS if kind in OURS else OURS
    if kind in OURS:
        return (kind, "ours, several", "torch's columns", "DTensor rows")
    return ("ours, columns", "ours, boxes", "ours, flat", "ours, replicated", "ours, overlapping")


def load_all(rank: int, path: Path, num_ranks: int) -> None:
    """Every tensor of the checkpoint into ours of every kind, and ours into the others."""
    numbers = {name: number for number, name in enumerate(MAKERS)}
    for kind, made in MAKERS.items():
        sources = sources_of(kind)
        state = {
            name: made(torch.zeros_like(value_of(numbers[name])), num_ranks) for name in sources
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's own ShardedTensor
            dcp.load(state, checkpoint_id=path, process_group=pool_group(num_ranks))
        for name, found in state.items():
            check_values(f"{name} into {kind}", found, value_of(numbers[name]))


def check_written_once(path: Path) -> None:
    """Every element of every tensor of ours is in one chunk."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert metadata.keys() == MAKERS.keys()
    for name in OURS:
        chunks = metadata[name].chunks
        count = torch.zeros(SHAPE, dtype=torch.int64)
        for one in chunks:
            ends = zip(one.offsets, one.sizes, strict=True)
            count[tuple(slice(at, at + size) for at, size in ends)] += 1
        assert bool((count == 1).all()), name
        assert len({tuple(one.offsets) for one in chunks}) == len(chunks)
    assert len(metadata["ours, replicated"].chunks) == 1
    assert len(metadata["ours, half replicated"].chunks) == 2
    assert len(metadata["ours, overlapping"].chunks) == 5


def check_converted(path: Path) -> None:
    """torch's own tool makes one file of it, without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, path.with_suffix(".pt"))
    found = torch.load(path.with_suffix(".pt"))
    for number, name in enumerate(MAKERS):
        assert same_bits(found[name], value_of(number)), name


def load_with_reshard(rank: int, path: Path, num_ranks: int) -> None:
    """Our own reader finds the same in a folder that torch has written."""
    wanted = {name: value_of(number) for number, name in enumerate(MAKERS)}
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    checkpoint.load(path, into=state, group=pool_group(num_ranks))
    for name, value in wanted.items():
        assert same_bits(state[name], value), name
    sharded = {name: ours("boxes")(torch.zeros_like(wanted[name]), num_ranks) for name in OURS}
    checkpoint.load(path, into=sharded, group=pool_group(num_ranks))
    for name, found in sharded.items():
        check_values(name, found, wanted[name])


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_any_kind_of_tensor_into_any_other(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    path = tmp_path / "saved"
    pool.run(save_all, path, before, ranks=range(before))
    check_written_once(path)
    check_converted(path)
    pool.run(load_all, path, after, ranks=range(after))
    pool.run(load_with_reshard, path, after, ranks=range(after))


def check_chunks(side: Side, shape: tuple[int, ...]) -> None:
    """All ranks cut a tensor into the same chunks, and each finds them in its own memory."""
    layout, starts = build(side, shape), dict[tuple[int, ...], Box]()
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank, held in side.held(shape).items():
        mine = split(torch.as_tensor(held), layout, rank)
        for start, one in _chunks_on(layout, shape, rank).items():
            assert start == one.box.start
            assert starts.setdefault(start, one.box) == one.box
            assert torch.equal(one.view(mine), cut_out(whole, one.box))
        chunks = [one.box for one in _chunks_on(layout, shape, rank).values()]
        assert sum(one.size for one in chunks) == held.size
    found = [index for one in starts.values() for index in cut_out(whole, one).reshape(-1).tolist()]
    wanted = {index for held in side.held(shape).values() for index in held.reshape(-1).tolist()}
    assert sorted(found) == sorted(wanted)
    assert _num_elements(layout, shape) == len(wanted)


def split(local: torch.Tensor, layout: Layout, rank: int) -> tuple[torch.Tensor, ...]:
    """A local tensor as the parts that a ShardedTensor has: one per box."""
    if not isinstance(layout, BoxLayout):
        return (local,)
    boxes = layout.boxes.get(rank, ())
    flat = local.reshape(-1).split([box.size for box in boxes])
    return tuple(part.view(box.shape) for part, box in zip(flat, boxes, strict=True))


def cut_out(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


@pytest.mark.timeout(1800 if soaking() else 300)
def test_chunks_of_random_layouts_are_the_same_on_all_ranks() -> None:
    rng = random.Random(15)
    for _ in range(cases(200, 20_000)):
        check_chunks(*generate.random_side(rng))


def odd_tensors(rank: int, path: Path) -> None:
    """No elements, no dims, one row; parts with gaps and in another order of dims."""
    group = pool_group(4)
    cyclic, flat = words("tp:1 -", tp=4), words("- - | flat tp:3", tp=4)
    full = bits(torch.float32, *SHAPE)

    def made(value: torch.Tensor, spec: ShardingSpec) -> ShardedTensor:
        return shard_tensor(value, spec, process_group=group, scatter=False)

    def with_gaps(value: torch.Tensor, spec: ShardingSpec) -> ShardedTensor:
        content = made(value, spec)._content
        (part,) = content.parts
        gaps = part.new_zeros(tuple(2 * size for size in part.shape[::-1])).permute(
            *reversed(range(part.ndim))
        )[tuple(slice(0, None, 2) for _ in part.shape)]
        return wrap(content.with_parts([gaps.copy_(part)]))

    kinds: list[tuple[Callable[..., ShardedTensor], torch.Tensor, ShardingSpec]] = [
        (made, torch.zeros(0, 4), chunk(0)),
        (made, torch.tensor(2.5), words("...", dp=4)),
        (made, full[:1], chunk(0)),
        (with_gaps, full, chunk(1)),
        (with_gaps, full, cyclic),
        (with_gaps, full, flat),
    ]
    state = {f"{at}": make(value, spec) for at, (make, value, spec) in enumerate(kinds)}
    dcp.save(state, checkpoint_id=path, process_group=group)
    for one in state.values():
        one.zero_()
    dcp.load(state, checkpoint_id=path, process_group=group)
    for (name, one), (_, value, _) in zip(state.items(), kinds, strict=True):
        check_values(name, one, value)


def test_odd_sizes_and_memory_with_gaps(pool: Pool, tmp_path: Path) -> None:
    pool.run(odd_tensors, tmp_path / "saved", ranks=FOUR)


def on_sub_groups(rank: int, path: Path) -> None:
    """Tensors that only some ranks have, saved by all; loaded by others."""
    full, world = bits(torch.float32, *SHAPE), pool_group(4)
    state: dict[str, Any] = {"plain": full.clone(), "step": 3}
    if rank in (2, 3):
        state["pair"] = shard_tensor(
            full, chunk(0, [3, 2]), process_group=group_of(2, 3), scatter=False
        )
    dcp.save({"model": state}, checkpoint_id=path, process_group=world)
    state = {"step": 0}
    if rank in (0, 1):
        state["pair"] = ours("boxes")(torch.zeros_like(full), 2)
    dcp.load({"model": state}, checkpoint_id=path, process_group=world)
    assert state["step"] == 3
    if rank in (0, 1):
        assert same_bits(state["pair"].full_tensor(), full)


def test_tensors_that_only_some_ranks_have(pool: Pool, tmp_path: Path) -> None:
    pool.run(on_sub_groups, tmp_path / "saved", ranks=FOUR)


def saved_aside(rank: int, path: Path) -> None:
    """What is changed after async_save has returned is not in the checkpoint."""
    group = pool_group(4)
    full = {name: value_of(number) for number, name in enumerate([*specs(4), "parameter"])}
    full["parameter"] = bits(torch.float32, *SHAPE)
    for name, stager in {"default": None, "blocking": BlockingAsyncStager()}.items():
        state = {kind: ours(kind)(full[kind], 4) for kind in specs(4)}
        state["parameter"] = nn.Parameter(ours("boxes")(full["parameter"], 4))
        saving = dcp.async_save(
            state, checkpoint_id=path / name, process_group=group, async_stager=stager
        )
        with torch.no_grad():
            for one in state.values():
                one.zero_()
        saving.result()
        dcp.load(state, checkpoint_id=path / name, process_group=group)
        for kind, one in state.items():
            check_values(f"{kind}, {name}", one.detach(), full[kind])
        assert state["parameter"].requires_grad


def test_async_save_writes_what_was_there_when_it_was_called(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_aside, tmp_path, ranks=FOUR)


def from_meta(rank: int, path: Path) -> None:
    full, group = bits(torch.float32, *SHAPE), pool_group(4)
    dcp.save({"a": ours("rows")(full, 4)}, checkpoint_id=path, process_group=group)
    for name in specs(4):
        state = {"a": ours(name)(torch.zeros(SHAPE), 4).to("meta")}
        assert state["a"].is_meta
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a function that it calls itself
            dcp.load(state, checkpoint_id=path, process_group=group)
        check_values(name, state["a"], full)


def test_tensors_of_the_meta_device_get_memory(pool: Pool, tmp_path: Path) -> None:
    pool.run(from_meta, tmp_path / "saved", ranks=FOUR)


def bad_requests(rank: int, path: Path) -> dict[str, str]:
    """Requests that are wrong, some on one rank only; the text of the error that each gives."""
    group, full = pool_group(4), bits(torch.float32, *SHAPE)
    good = ours("boxes")(full, 4)
    pending = ShardedTensor.from_dtensor(DTensor.from_local(full, mesh_of(4), [Partial()]))
    short = shard_tensor(torch.zeros(7, 9), chunk(0), process_group=group, scatter=False)
    rows = {at: [Box((at, 0), (at + 1, 10))] for at in FOUR}
    lost = ShardedTensor._init_from_local_tensor(
        full[rank : rank + 1],
        LayoutShardingSpec(Layout.from_boxes(SHAPE, rows)),
        *SHAPE,
        process_group=group,
    )
    dcp.save({"a": good}, checkpoint_id=path / "good", process_group=group)
    kept = good.clone()

    def load(**state: Any) -> None:
        dcp.load(state, checkpoint_id=path / "good", process_group=group)

    def save(name: str, value: Any) -> None:
        dcp.save({"a": value}, checkpoint_id=path / name, process_group=group)

    requests: dict[str, Callable[[], None]] = {
        "shape": lambda: load(a=short),
        "shape on one rank": lambda: load(a=torch.zeros(7, 9) if rank == 2 else kept),
        "missing": lambda: load(b=kept),
        "missing on one rank": lambda: load(**{"b" if rank == 1 else "a": kept}),
        "load pending": lambda: load(a=pending),
        "save pending": lambda: save("pending", pending),
        "save meta": lambda: save("meta", kept.to("meta")),
        "save a part": lambda: save("part", lost),
        "save a tuple": lambda: save("tuple", (good, 1)),
    }
    found = {}
    for name, request in requests.items():
        try:
            request()
            found[name] = "no error"
        except BaseException as error:  # torch's own is no Exception
            found[name] = str(error)
    check_values("nothing was loaded", kept, full)
    return found


SAID = {
    "shape": ("Size mismatch", "[7, 10]", "[7, 9]"),
    "shape on one rank": ("Size mismatch", "ranks:dict_keys([2])"),
    "missing": ("Missing key", "b"),
    "missing on one rank": ("Missing key", "ranks:dict_keys([1])"),
    "load pending": ("a sum over its ranks is pending",),
    "save pending": ('saving "a"', "a sum over its ranks is pending"),
    "save meta": ('saving "a"', "meta device"),
    "save a tuple": ("is in a tuple", "put the tensor into a dict"),
    "save a part": ('saving "a"', "40 of 70 elements"),
}


UNSAVED = ("pending", "meta", "part", "tuple")


def test_bad_requests_are_errors_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(bad_requests, tmp_path, ranks=FOUR)
    for name, texts in SAID.items():
        for rank, found in enumerate(told):
            assert all(text in found[name] for text in texts), (name, rank, found[name])
    assert all(not (tmp_path / name / ".metadata").exists() for name in UNSAVED)


def test_without_a_process_group(tmp_path: Path) -> None:
    full = bits(torch.float32, *SHAPE)
    alone = shard_tensor(full, chunk(0, [0, 0]), scatter=False)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": alone}, checkpoint_id=tmp_path / "alone")
    found = shard_tensor(torch.zeros_like(full), chunk(1, [0]), scatter=False)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"a": found}, checkpoint_id=tmp_path / "alone")
    assert same_bits(found.full_tensor(), full)
    part = ShardedTensor._init_from_local_tensor(full[:4], words("tp -", tp=2), *SHAPE)
    with (
        pytest.warns(UserWarning, match="single process"),
        pytest.raises(CheckpointException, match="40 of 70 elements"),
    ):
        dcp.save({"a": part}, checkpoint_id=tmp_path / "part")


def chunks(rank: int) -> list[Any]:
    told = []
    for name in specs(4):
        listed = ours(name)(value_of(0), 4).__create_chunk_list__()
        told.append([(tuple(one.offsets), tuple(one.sizes)) for one in listed])
    several = ours("grid")(value_of(0), 4)
    for shard in several.local_shards():
        found = several.__get_tensor_shard__(MetadataIndex("st", shard.metadata.shard_offsets, 99))
        assert found.data_ptr() == shard.tensor.data_ptr()
    for start, text in ((None, "no offset was provided"), ([1, 1], "Could not find shard")):
        with pytest.raises(ValueError, match=text):
            several.__get_tensor_shard__(MetadataIndex("st", start))
    return told


def test_chunks_cover_the_tensor_and_are_found_by_offset(pool: Pool) -> None:
    for of_ranks in zip(*pool.run(chunks, ranks=FOUR), strict=True):
        distinct = {row for rows in of_ranks for row in rows}
        assert sum(torch.Size(sizes).numel() for _, sizes in distinct) == 70
