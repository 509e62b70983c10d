"""Sharded tensors in ``torch.distributed.checkpoint``, and in state dicts of modules.

torch's planners ask a tensor for its chunks if it has the three methods of DTensor
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). torch writes a
chunk that several ranks have once, and identifies chunks by the name of the tensor and their
offsets. So all ranks must split a tensor into the same chunks:

    rank 0   [0:6)                 [0:4) of rank 0
    rank 1      [4:9)      ->      [4:6) of both, written by one of them
                                   [6:9) of rank 1

With ``full_state_dict=True``, ``get_model_state_dict`` and the functions beside it gather DTensors
and torch's own ShardedTensors only: shards of others would pass for whole tensors. torch has no
registry for tensor classes there, so the functions that gather and scatter are replaced, when the
first ShardedTensor is made, by functions that handle our tensors and call the original ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from reshard.errors import ArgumentError, DisagreementError, OperationError, TensorError
from reshard.layout.box import Box, Piece, row_major
from reshard.layout.boxlist import listed_of
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.words import Packed
from reshard.sharded.content import Content, ContentTensor, map_nested, per_layout, wrap
from reshard.sharded.files.pickles import written_for_all
from reshard.sharded.groups import assigned, members
from reshard.sharded.move import gather_on, local_part, split_parts
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import box_view, piece_view
from reshard.text import quoted

Tensors = dict[str, Any]
Function = Callable[..., Any]
LOADING = "loading a full state dict (with broadcast_from_rank0=True rank 0 alone may have it)"


class Chunk(NamedTuple):
    """A box of a tensor, and the number of this rank's part and the piece that contain it."""

    box: Box
    part: int
    piece: Piece

    def view(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Its memory: writing there changes the tensor."""
        outer = piece_view(parts[self.part].detach(), self.piece)
        return outer if self.box == self.piece.box else box_view(outer, self.piece.box, self.box)


class CheckpointTensor(ContentTensor):
    """What torch's checkpoints ask of a tensor: the base class of ShardedTensor."""

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """The chunks that this rank can write."""
        content = self._content
        _check_saved(fqn, content)
        size, common = torch.Size(content.shape), TensorProperties.create_from_tensor(self)
        # A tensor without elements is written too, as one chunk: its name must not be missing.
        empty = [_stored(Box.whole(content.shape))] if 0 in content.shape else []
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, common, size),
            )
            for chunk in [_stored(one.box) for one in _chunks(content).values()] or empty
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that this rank reads."""
        # Not a ReshardError: torch takes a ValueError here for something else, and hides it.
        _check_values("loading it", self._content, RuntimeError)
        return [_stored(chunk.box) for chunk in _chunks(self._content).values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the chunk that an index names, to be written to a file or read into."""
        content = self._content
        chunks = _chunks(content)
        if index.offset is None and len(chunks) > 1:
            raise ArgumentError(
                f"Cannot lookup {quoted(index.fqn)}: this rank has {len(chunks)} chunks of it, and "
                "no offset was provided: give the offset of one"
            )
        start = next(iter(chunks), ()) if index.offset is None else tuple(index.offset)
        if start in chunks:
            return chunks[start].view(content.parts)
        if 0 in content.shape and not any(start):
            return torch.empty(content.shape, dtype=content.dtype, device=content.device)
        boxes = ", ".join(str(chunk.box) for chunk in chunks.values()) or "none"
        raise ArgumentError(
            f"Could not find shard of {quoted(index.fqn)} at {list(start)}: rank {this_rank()} has "
            f"{boxes}; make a plan for the tensor as it is sharded now"
        )


def _stored(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))


def _check_saved(name: str, content: Content) -> None:
    """Refuse tensors without values of their own, or without all of them."""
    what = f"saving {quoted(name)}"
    _check_values(what, content)
    if any(part.is_meta for part in content.parts):
        why = "it is on the meta device; give a tensor with memory of its own"
        raise OperationError(_refusal(what, content, why))
    if dist.is_initialized():
        available = _num_elements(content.layout, content.shape)
    else:  # the elements of this process
        available = sum(chunk.box.size for chunk in _chunks(content).values())
    if available != prod(content.shape):
        why = (
            f"its shards have {available} of {prod(content.shape)} elements, and the others would "
            "be missing; reshard the tensor so that every element is on some rank of a process "
            "group"
        )
        raise OperationError(_refusal(what, content, why))


def _check_values(what: str, content: Content, error: type[RuntimeError] = OperationError) -> None:
    if content.layout.reduce is not None:
        why = (
            f"a {content.layout.reduce[0]} over its ranks is pending, and a checkpoint holds "
            "values; reshard the tensor first"
        )
        raise error(_refusal(what, content, why))


def _refusal(what: str, content: Content, why: str) -> str:
    return (
        f"{what} with torch.distributed.checkpoint is not supported for ShardedTensor of layout "
        f'"{content.layout}" and shape {list(content.shape)}: {why}'
    )


def _chunks(content: Content) -> Mapping[tuple[int, ...], Chunk]:
    """The chunks of this rank by offsets, which differ between the chunks of a tensor."""
    return _chunks_on(content.layout, content.shape, this_rank())


@per_layout
def _chunks_on(
    layout: Layout, shape: tuple[int, ...], rank: int
) -> Mapping[tuple[int, ...], Chunk]:
    if isinstance(layout, BoxLayout):
        parts = enumerate(layout.boxes.get(rank, ()))
        pieces = {
            box: (part, Piece(box, 0, row_major(box.shape))) for part, box in parts if box.size
        }
    else:
        pieces = {piece.box: (0, piece) for piece in layout.pieces(rank, shape)}
    flat = layout.words.flat
    if flat and not any(layout.words.dims) and not any(isinstance(part, Packed) for part in flat):
        # Ranges of a flattened tensor are equal or disjoint: no need to list those of all ranks.
        boxes = [box for box in pieces if box.size]
    else:
        listed = listed_of(layout, shape)
        places = np.flatnonzero(listed.holders == rank)
        rows = np.searchsorted(listed.first, places, side="right") - 1
        corners = zip(listed.starts[rows].tolist(), listed.stops[rows].tolist(), strict=True)
        boxes = [box for box in (Box(tuple(low), tuple(high)) for low, high in corners) if box.size]
    # Boxes of other ranks split those of this one only if they overlap and are not equal.
    outer = [box if box in pieces else next(one for one in pieces if box in one) for box in boxes]
    return {box.start: Chunk(box, *pieces[one]) for box, one in zip(boxes, outer, strict=True)}


@per_layout
def _num_elements(layout: Layout, shape: tuple[int, ...]) -> int:
    if not isinstance(layout, BoxLayout) and not layout.words.without:
        return prod(shape)
    listed = listed_of(layout, shape)
    return int((listed.stops - listed.starts).prod(axis=1).sum())


def install() -> None:
    """Replace the functions of torch that gather and scatter the tensors of a state dict."""
    state_dicts = sys.modules.get("torch.distributed.checkpoint.state_dict")
    for owner, name in product((DefaultSavePlanner, _state_dict_utils, state_dicts), REPLACEMENTS):
        if hasattr(owner, name):
            setattr(owner, name, _replaced(getattr(owner, name), REPLACEMENTS[name]))


def _replaced(original: Function, replacement: Function) -> Function:
    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    return call


def _transform_object(original: Function, *args: object, **options: object) -> Any:
    """One rank pickles objects that are no tensors."""
    with assigned(written_for_all, True):
        return original(*args, **options)


def _gather_state_dict(original: Function, state_dict: object, **options: Any) -> Any:
    """ShardedTensors become whole tensors."""
    ranks = options.get("ranks_only") or ()

    def whole_of(tensor: ContentTensor) -> torch.Tensor | None:
        group = members(tensor._content.group)
        whole = gather_on(tensor._content, [one for one in group if not ranks or one in ranks])
        # One by one: the whole tensors of a model may not fit on the device together.
        return whole.cpu() if whole is not None and options.get("cpu_offload") else whole

    return original(map_nested(whole_of, state_dict, ContentTensor), **options)


def _distribute_state_dict(
    original: Function, full: Tensors, local: Tensors, *args: object, **options: object
) -> None:
    """Every rank has whole tensors and takes its own parts."""
    _check_same_names(_contents(local, [*full]))
    for name, value in full.items():
        with _taking_parts(local, [name]):
            original({name: value}, local, *args, **options)


def _broadcast(
    original: Function, full: Tensors, local: Tensors, *args: object, **options: object
) -> None:
    """Every rank gets whole tensors of rank 0, of some names or all, and takes its own parts."""
    names = args[0] if args and isinstance(args[0], list) else [*local]
    with _taking_parts(local, names):
        original(full, local, *args, **options)


REPLACEMENTS: Mapping[str, Function] = {
    "transform_object": _transform_object,
    "_gather_state_dict": _gather_state_dict,
    "_distribute_state_dict": _distribute_state_dict,
    "_broadcast_tensors": _broadcast,
    "_broadcast_state_dict": _broadcast,
}


def _check_same_names(wanted: Mapping[str, Content]) -> None:
    """Wait for the other ranks, which must load the same names; other shards would not change."""
    groups = {members(content.group): content.group for content in wanted.values()}
    for ranks, group in sorted(groups.items(), key=lambda pair: pair[0]):
        if len(ranks) == 1:
            continue
        own = sorted(name for name, one in wanted.items() if members(one.group) == ranks)
        gathered = Agreement(group, LOADING).gather(own)
        (first, names), *others = sorted((rank, set(one)) for rank, one in gathered.items())
        for rank, other in others:
            if other != names:
                name = min(other ^ names)
                has, lacks = (first, rank) if name in names else (rank, first)
                raise DisagreementError(
                    f"rank {has} has {quoted(name)} in its full state dict and rank {lacks} has "
                    "not: give the same to all ranks, or to rank 0 with broadcast_from_rank0=True"
                )


def _contents(local: Tensors, names: Sequence[str]) -> dict[str, Content]:
    pairs = ((name, local.get(name)) for name in names)
    return {name: one._content for name, one in pairs if isinstance(one, ContentTensor)}


@contextmanager
def _taking_parts(local: Tensors, names: Sequence[str]) -> Iterator[None]:
    """Replace whole tensors that torch stores inside the block by this rank's parts of them."""
    contents = _contents(local, names)
    yield
    for name, like in contents.items():
        full: Any = local.get(name)
        if type(full) not in (torch.Tensor, nn.Parameter):
            continue
        if tuple(full.shape) != like.shape:
            raise TensorError(
                f"{quoted(name)} has shape {list(full.shape)} in the state dict and the "
                f"ShardedTensor has {list(like.shape)}: load the state dict of a model of the same "
                "sizes"
            )
        if like.layout.reduce is not None:
            raise OperationError(
                f"{quoted(name)} is loaded into a ShardedTensor of layout {quoted(like.layout)}, "
                "of which a sum is pending: reshard it first"
            )
        parts: tuple[torch.Tensor, ...] = ()
        if like.layout.holds(this_rank()) is not None:
            parts = split_parts(local_part(full.detach(), like.layout), like.layout)
        local[name] = wrap(like.with_parts(parts, full))


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Add ShardedTensors that are plain attributes to the state dict of a module.

    For ``module._register_state_dict_hook``; parameters do not need it.
    """
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if isinstance(value, ContentTensor):
                destination[prefix + f"{path}.{name}".removeprefix(".")] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set plain attributes to the ShardedTensors that a state dict has for them.

    For ``module._register_load_state_dict_pre_hook`` with ``with_module=True``.
    """
    for path, one in module.named_modules():
        for name in vars(one):
            value = state_dict.get(prefix + f"{path}.{name}".removeprefix("."))
            if isinstance(value, ContentTensor):
                setattr(one, name, value)
