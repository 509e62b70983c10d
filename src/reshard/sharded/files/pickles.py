"""Pickles of sharded tensors, and state dicts that any number of ranks load.

A pickle has the shards of one rank, and the layout as plain data. `torch.load(weights_only=True)`
accepts it in a process that imported reshard.sharded: loading calls one function of ours.

    torch.save(model.state_dict(), f"model.{rank}.pt")       # on 4 ranks
    model.load_state_dict(load_files(paths))                 # on 2, on 3, on 8

Rank r of M reads the files r, r + M, ...; no rank reads all of them. The shards of a loaded tensor
are on the ranks that read them, until it is copied into a tensor with another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os import PathLike, fspath
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, OperationError, StateError
from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.sharded.content import Content, ContentTensor, map_nested, part_shapes, wrap
from reshard.sharded.create import content_of_shards
from reshard.sharded.groups import (
    Group,
    assigned,
    check_members,
    current_process_group,
    is_outside,
    members,
)
from reshard.sharded.specs import ShardMetadata, check_tensor, layout_of_shards
from reshard.sharded.splits import infer_sharding_spec
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import piece_view
from reshard.text import first_line, quoted

State = dict[str, Any]

_from_other_ranks: ContextVar[bool] = ContextVar("_from_other_ranks", default=False)
"""Whether shards that other ranks have saved may be loaded, to be joined afterwards."""

written_for_all: ContextVar[bool] = ContextVar("written_for_all", default=False)
"""Whether one rank writes its pickle for all ranks."""


def reduce(tensor: ContentTensor) -> tuple[Any, tuple[Any, ...]]:
    """The function and the arguments that pickle writes."""
    content = tensor._content
    if written_for_all.get():
        pieces = content.layout.pieces(this_rank(), content.shape)
        own, size = sum(piece.box.size for piece in pieces), prod(content.shape)
        if own != size:
            raise OperationError(
                f'a ShardedTensor of layout "{content.layout}" and shape {list(content.shape)} is '
                f"in a tuple or an object, of which one rank writes its pickle: {own} of {size} "
                "elements; put the tensor into a dict or a list, which torch looks into"
            )
    state: State = {
        "shape": list(content.shape),
        "dtype": str(content.dtype).removeprefix("torch."),
        "device": str(content.device),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "layout": content.layout.to_dict() if content.stated is None else None,
        "shards": [shard.to_row() for shard in content.stated or ()],
        **_place(content.group),
    }
    # Parts with memory of their own: torch saves the whole storage of a view.
    parts = [
        part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
        for part in (one.detach() for one in content.parts)
    ]
    return rebuild_sharded_tensor, (parts, state)


def _place(group: Group) -> dict[str, int]:
    """This rank and the size of its group; -1 outside the group, as in torch."""
    ranks = () if is_outside(group) else members(group)
    local_rank = ranks.index(this_rank()) if ranks else -1
    return {"rank": this_rank(), "local_rank": local_rank, "world_size": len(ranks) or -1}


def rebuild_sharded_tensor(parts: list[torch.Tensor], state: State) -> ContentTensor:
    """Rebuild a ShardedTensor that was saved, in the current process group."""
    if not dist.is_initialized():
        raise StateError(
            "Need to initialize default process group before a ShardedTensor is loaded: call "
            "torch.distributed.init_process_group"
        )
    group = current_process_group()
    is_own = not _from_other_ranks.get()
    names = {"local_rank": "Local rank", "rank": "Global rank", "world_size": "Local world size"}
    now = _place(group)
    for key, name in names.items():
        if is_own and state[key] != now[key]:
            raise StateError(
                f"{name} at save time was {state[key]}, but at load time was {now[key]}: load the "
                "file of this rank, or all files with reshard.sharded.load_files"
            )
    shape, shards = tuple(state["shape"]), tuple(ShardMetadata(*row) for row in state["shards"])
    layout = layout_of_shards(shape, shards) if shards else Layout.from_dict(state["layout"])
    device = parts[0].device if parts else torch.device(state["device"])
    if parts:
        shards = tuple(shard.on(device) for shard in shards)
    spec = infer_sharding_spec(shards) if shards else None  # refuses shards that overlap
    if is_own:
        check_members(layout.ranks, group)
    if is_own and shards:
        check_tensor(shards, shape)
    dtype = getattr(torch, state["dtype"], None)
    content = Content(layout, shape, dtype, tuple(parts), device, group, spec, shards or None)  # type: ignore[arg-type]
    _check_parts(content, state["rank"])
    tensor = wrap(content, state["requires_grad"], state["parameter"])
    tensor._saved_rank = state["rank"]
    return tensor


def _boxes_of(tensor: ContentTensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that the rank that saved a tensor has of it, and their values."""
    content, rank = tensor._content, tensor._saved_rank
    layout, parts = content.layout, content.parts
    if isinstance(layout, BoxLayout):
        return list(zip(layout.boxes.get(rank, ()), parts, strict=True))
    if not parts:
        return []
    flat = parts[0].contiguous()
    pieces = layout.pieces(rank, content.shape)
    return [(piece.box, piece_view(flat, piece).contiguous()) for piece in pieces]


def _check_parts(content: Content, rank: int) -> None:
    """Refuse parts that the layout does not give to the rank that saved them."""
    layout, parts = content.layout, content.parts
    if layout.reduce is not None:
        raise ArgumentError(
            f'the layout "{layout}" has a pending {layout.reduce[0]}: add it up first'
        )
    expected = list(part_shapes(layout, rank, content.shape))
    shapes = [tuple(part.shape) for part in parts]
    if shapes != expected:
        raise ArgumentError(f"rank {rank} has saved parts {shapes} and its layout has {expected}")
    kinds = sorted({str(part.dtype) for part in parts})
    if kinds not in ([], [str(content.dtype)]):
        raise ArgumentError(f"rank {rank} has saved parts of {kinds} as {content.dtype}")


# The name in a pickle: it stays when the module moves.
rebuild_sharded_tensor.__module__ = "reshard.sharded"
torch.serialization.add_safe_globals([rebuild_sharded_tensor])


Path = str | PathLike[str]
Key = tuple[object, ...]
"""The keys and indices of a value in nested dicts and lists."""
Row = tuple[list[Any], list[Any]]
"""One sharded tensor in a file, as JSON: its kind, and its shards on the rank that has read it."""


@dataclass(frozen=True)
class File:
    """The file that one rank saved."""

    path: Path
    state: State
    entries: dict[Key, Any]
    """All values in it that are no dicts and no lists."""

    @cached_property
    def sharded(self) -> list[Key]:
        return [key for key, one in self.entries.items() if isinstance(one, ContentTensor)]


def load_files(
    paths: Sequence[Path],
    process_group: Group = None,
    weights_only: bool = True,
    map_location: Any = None,
) -> dict[str, Any]:
    """The nested dict that ranks have saved, one file for each, in the order of ranks.

    Every ShardedTensor becomes one of the group: its shards are on the ranks that have read them.
    Plain entries are those of the first file, which every rank reads for them; the other files
    must have the same. All ranks of the group call this, and all raise if a file is wrong.
    """
    if not paths:
        raise ArgumentError("no files to load: give one path for each rank that has saved")
    group = current_process_group() if process_group is None else process_group
    ranks = members(group)
    mine = range(ranks.index(this_rank()), len(paths), len(ranks))
    files: dict[int, File] = {}

    def read() -> list[list[Row]]:
        for index in sorted({0, *mine}):
            files[index] = _read(paths[index], weights_only, map_location)
            _check_plain(files[0], files[index])
        return [[_row(files[index].entries[key]) for key in files[0].sharded] for index in mine]

    by_rank = [*Agreement(group, "loading files", error=ArgumentError).run(read).values()]
    by_file = [by_rank[at % len(ranks)][at // len(ranks)] for at in range(len(paths))]
    joined: dict[int, ContentTensor] = {}
    for key, *rows in zip(files[0].sharded, *by_file, strict=True):
        # A tied tensor has several names and stays one.
        tensor, own = files[0].entries[key], [files[index].entries[key] for index in mine]
        if id(tensor) not in joined:
            joined[id(tensor)] = _join(_name(key), rows, own, paths, group)
    state: State = map_nested(lambda one: joined.get(id(one), one), files[0].state, ContentTensor)
    return state


def _read(path: Path, weights_only: bool, map_location: Any) -> File:
    try:
        with assigned(_from_other_ranks, True):
            state = torch.load(path, map_location=map_location, weights_only=weights_only)
    except Exception as error:
        raise _wrong(path, f"cannot be read: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise _wrong(path, f"holds a {type(state).__name__}, not a state dict")
    return File(path, state, dict(_entries(state, ())))


def _wrong(path: Path, why: str) -> ArgumentError:
    return ArgumentError(f"the file {quoted(fspath(path))} {why}")


def _entries(value: Any, key: Key) -> list[tuple[Key, Any]]:
    if not isinstance(value, dict | list | tuple):
        return [(key, value)]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [entry for name, one in inside for entry in _entries(one, (*key, name))]


def _name(key: Key) -> str:
    return ".".join(map(str, key))


def _check_plain(first: File, other: File) -> None:
    """Refuse a file with other names, or other plain entries, than the first one."""
    differing = first.entries.keys() ^ other.entries.keys()
    if differing:
        names = sorted(map(_name, differing))[:4]
        raise _wrong(other.path, f"differs from {quoted(fspath(first.path))} in {names}")
    for key, one in first.entries.items():
        if not _are_equal(one, other.entries[key]):
            raise _wrong(
                other.path,
                f"has another {quoted(_name(key))} than {quoted(fspath(first.path))}: entries "
                "that are not sharded must be the same in all files",
            )


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, ContentTensor) or isinstance(two, ContentTensor):
        return isinstance(one, ContentTensor) and isinstance(two, ContentTensor)
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if one.is_floating_point() and one.itemsize == 1:
            one, two = one.float(), two.float()  # torch compares no float8
        return torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(two) and (one == two or one != one)


def _row(tensor: ContentTensor) -> Row:
    content, place = tensor._content, f"rank:{this_rank()}/{tensor._content.device}"
    shards = [ShardMetadata(box.start, box.shape, place) for box, _ in _boxes_of(tensor)]
    kind = [list(content.shape), str(content.dtype), tensor.requires_grad]
    return kind, [shard.to_row() for shard in shards]


def _join(
    name: str, rows: list[Row], own: list[ContentTensor], paths: Sequence[Path], group: Group
) -> ContentTensor:
    """One tensor of the shards that all files have of it."""
    kinds = [kind for kind, _ in rows]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise _wrong(path, f"has {quoted(name)} as {kind}, the first as {kinds[0]}")
    size, dtype, requires_grad = kinds[0]
    listed = [ShardMetadata(*shard) for _, shards in rows for shard in shards]
    first = {one.box: one for one in reversed(listed)}
    # A box in several files comes from the first of them; boxes without elements all stay.
    joined = tuple(one for one in listed if one.is_empty or first[one.box] is one)
    values = {box: part for one in reversed(own) for box, part in reversed(_boxes_of(one))}
    parts = [values[one.box] for one in joined if one.rank == this_rank()]
    dtype = getattr(torch, dtype.removeprefix("torch."))
    try:
        content = content_of_shards(joined, size, dtype, parts, group)
    except ArgumentError as error:
        raise _wrong(paths[0], f"and the others do not make up {quoted(name)}: {error}") from None
    is_parameter = any(isinstance(one, torch.nn.Parameter) for one in own)
    return wrap(content, requires_grad, is_parameter)
