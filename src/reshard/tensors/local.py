"""Any tensor: its layout, its spec, and the local tensors that this rank holds of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import add, sub
from typing import TYPE_CHECKING

import numpy as np
import torch

from reshard.errors import LayoutError, TensorError
from reshard.layout.box import Box, Piece
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec, agrees, is_part_of
from reshard.tensors.kinds import (
    has_layout,
    is_dtensor,
    is_own_sharded_tensor,
    is_sharded_tensor,
    joined,
    this_rank,
    wait_ready,
)

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a DTensor, a ShardedTensor or a plain tensor.

    Placements are read as nested shards and compared with the local tensor of this rank; where they
    disagree, the error names both shapes. A plain tensor is whole, and on this rank only.
    """
    if is_dtensor(tensor):
        # Imported here because it imports torch.distributed.tensor, which takes a second.
        from reshard.tensors.dtensor.wrapping import dtensor_layout

        return dtensor_layout(tensor)
    if is_sharded_tensor(tensor):
        return _sharded_layout(tensor)
    if is_own_sharded_tensor(tensor):
        layout: Layout = tensor.cut
        return layout
    if isinstance(tensor, torch.Tensor):
        return whole_on((this_rank(),))
    raise TensorError(
        f"a {type(tensor).__name__} is not a tensor: give a DTensor, a ShardedTensor or a tensor"
    )


@lru_cache(maxsize=64)
def whole_on(ranks: tuple[int, ...]) -> Layout:
    """The whole tensor on each of these ranks."""
    return Layout(Mesh(rank=len(ranks), ranks=ranks), "...")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    layout = layout_of(tensor)
    if is_sharded_tensor(tensor):
        # Asking the tensor itself is an operation on it, and torch warns of every one.
        metadata = tensor.metadata()
        return TensorSpec(tuple(metadata.size), str(metadata.tensor_properties.dtype), layout)
    check_dense(tensor)
    if isinstance(layout, BoxLayout):
        return TensorSpec(tuple(tensor.shape), str(tensor.dtype), layout)
    return _spec(tensor.shape, tensor.dtype, layout)


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not dense or has no shape."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TensorError(f"the tensor is {kind}: only dense tensors can be moved")
    if type(tensor) is not torch.Tensor and torch.nn.parameter.is_lazy(tensor):
        raise TensorError(
            f"the tensor is an {type(tensor).__name__}, which has no shape yet: run its module once"
        )


@lru_cache(maxsize=1024)
def _spec(shape: torch.Size, dtype: torch.dtype, layout: Layout) -> TensorSpec:
    """One object per spec with a layout in words, which is small; a large state dict has few."""
    return TensorSpec(tuple(shape), str(dtype), layout)


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's part as one tensor of the shape that its layout gives it; None if it has none.

    Shares memory with the tensor, except for a ShardedTensor with several shards on this rank:
    they are flattened and joined into a new 1-d tensor; `parts_of` gives them apart.
    """
    return joined(parts_of(tensor))


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's parts, in the order in which its layout lists their boxes; no autograd."""
    if type(tensor) is torch.Tensor:
        return (tensor,)
    if is_dtensor(tensor):
        from reshard.tensors.dtensor.wrapping import dtensor_local

        local = dtensor_local(tensor)
        return () if local is None else (local,)
    if is_sharded_tensor(tensor):
        shape = tuple(tensor.metadata().size)
        shards = sorted(tensor.local_shards(), key=lambda shard: _box(shard.metadata, shape))
        return tuple(shard.tensor for shard in shards)
    if is_own_sharded_tensor(tensor):
        return tuple(tensor._content.parts)
    return (wait_ready(tensor),)


def _sharded_layout(tensor: ShardedTensor) -> Layout:
    """The boxes of all shards, if this rank's local shards are those the metadata gives it."""
    metadata, rank = tensor.metadata(), this_rank()
    shape = tuple(metadata.size)
    boxes: dict[int, list[Box]] = {}
    for shard in metadata.shards_metadata:
        owner = None if shard.placement is None else shard.placement.rank()
        if owner is None:
            raise LayoutError(
                f"the shard at {shard.shard_offsets} has placement {shard.placement}, which names "
                "no rank: use placements such as rank:3/cpu"
            )
        # torch uses global ranks on sub-groups too.
        boxes.setdefault(owner, []).append(_box(shard, shape))
    local = sorted(_box(shard.metadata, shape) for shard in tensor.local_shards())
    if local != sorted(boxes.get(rank, ())):
        both = (local, sorted(boxes.get(rank, ())))
        shards, stated = (", ".join(map(str, listed)) or "none" for listed in both)
        raise LayoutError(
            f"rank {rank} holds shards {shards} and the metadata of the tensor {shape} gives it "
            f"{stated}: make both from one sharding spec"
        )
    return Layout.from_boxes(shape, {one: sorted(boxes[one]) for one in sorted(boxes)})


def _box(shard: ShardMetadata, shape: tuple[int, ...]) -> Box:
    """The box of a shard; torch lets an empty one begin past the end, so it is moved inside."""
    starts, sizes = tuple(shard.shard_offsets), tuple(shard.shard_sizes)
    if not all(sizes):
        starts = tuple(map(min, starts, map(sub, shape, sizes)))
    return Box(starts, tuple(map(add, starts, sizes)))


def check_matches(tensor: torch.Tensor, planned: TensorSpec, name: str, is_source: bool) -> None:
    """Refuse a DTensor or ShardedTensor whose layout is not the planned one on some rank.

    A tensor on a sub-mesh does not know of its replicas, so the plan may have more ranks. Of a
    source it may also have fewer: other replicas are not read. The engine checks plain tensors.
    """
    if not has_layout(tensor):
        return
    role = "to move" if is_source else "to move into"
    try:
        spec = spec_of(tensor)
    except LayoutError as error:
        raise TensorError(f'"{name}" {role}: {error}') from None
    matches = agrees if is_source else is_part_of
    is_same = (spec.shape, spec.dtype) == (planned.shape, planned.dtype)
    if not is_same or not matches(spec.layout, planned.layout, spec.shape):
        raise TensorError(
            f'"{name}" {role} is a {type(tensor).__name__} {_describe(spec)} and the plan says '
            f"{_describe(planned)}: plan with what rs.describe says of the tensors you give, "
            "merged by rs.exchange"
        )


def _describe(spec: TensorSpec) -> str:
    layout = spec.layout
    how = repr(layout) if isinstance(layout, BoxLayout) else f'"{layout}" on mesh {layout.mesh}'
    return f"{spec.dtype}{list(spec.shape)} {how}"


def destination_of(tensor: torch.Tensor) -> tuple[torch.Tensor | None, Callable[[], None]]:
    """What a move into a tensor writes to on this rank, which is a staging tensor if it has several
    parts, and the function that completes the tensor afterwards."""
    parts = parts_of(tensor)
    local = parts[0] if parts else None
    if len(parts) > 1:
        local = parts[0].new_empty(sum(part.numel() for part in parts))

    def complete() -> None:
        if has_layout(tensor):
            # Autograd may have kept the whole tensor, which does not notice writes to its parts.
            torch.autograd.graph.increment_version(tensor)
        if local is not None and len(parts) > 1:
            values = local.split_with_sizes([part.numel() for part in parts])
            for part, value in zip(parts, values, strict=True):
                part.detach().copy_(value.view(part.shape))

    return local, complete


def piece_view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The view of a piece in a local tensor; pieces count elements as if it were contiguous."""
    if local.is_contiguous() or local.ndim == 1:
        # The elements of a 1-d tensor may have gaps between them, all of the same size.
        step = local.stride(0) if local.ndim == 1 else 1
        strides = [stride * step for stride in piece.strides]
        at = local.storage_offset() + piece.offset * step
        return local.as_strided(piece.box.shape, strides, at)
    start = np.unravel_index(piece.offset, tuple(local.shape))
    lengths = zip(start, piece.box.shape, strict=True)
    return local[tuple(slice(int(low), int(low) + length) for low, length in lengths)]


def box_view(tensor: torch.Tensor, outer: Box, box: Box) -> torch.Tensor:
    """The view of a box in a tensor that holds the elements of ``outer``."""
    inner = outer & box
    limits = zip(inner.start, inner.stop, outer.start, strict=True)
    return tensor[tuple(slice(low - at, high - at) for low, high, at in limits)]
