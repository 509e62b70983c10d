"""Pickles of sharded tensors: the shards of this rank, and the layout as plain data.

`torch.load(weights_only=True)` accepts them in a process that imported reshard.sharded: loading
calls one function of ours, with numbers, texts and tensors.
"""

from __future__ import annotations

from contextvars import ContextVar
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, OperationError, StateError
from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.sharded.content import Content, ContentTensor, part_shapes, wrap
from reshard.sharded.groups import (
    Group,
    check_members,
    current_process_group,
    is_outside,
    members,
)
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.specs.base import layout_of_shards
from reshard.sharded.specs.coverage import check_disjoint, check_tensor
from reshard.sharded.specs.listed import infer_sharding_spec
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import piece_view

__all__ = [
    "boxes_of",
    "from_other_ranks",
    "rebuild_sharded_tensor",
    "reduce",
    "restore_flags",
    "written_for_all",
]

State = dict[str, Any]

from_other_ranks: ContextVar[bool] = ContextVar("from_other_ranks", default=False)
"""Whether shards that other ranks have saved may be loaded, to be joined afterwards."""

written_for_all: ContextVar[bool] = ContextVar("written_for_all", default=False)
"""Whether one rank writes its pickle for all ranks."""


def reduce(tensor: ContentTensor) -> tuple[Any, tuple[Any, ...]]:
    """The function and the arguments that pickle writes."""
    content = tensor._content
    if written_for_all.get():
        _check_is_whole(content)
    state: State = {
        "shape": list(content.shape),
        "dtype": str(content.dtype).removeprefix("torch."),
        "device": str(content.device),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "layout": content.layout.to_dict() if content.stated is None else None,
        "shards": [shard.to_row() for shard in content.stated or ()],
        "rank": this_rank(),
        **_place(content.group),
    }
    parts = [_unshared(part.detach()) for part in content.parts]
    return rebuild_sharded_tensor, (parts, state)


def _place(group: Group) -> dict[str, int]:
    """This rank and the size of its group; -1 outside the group, as in torch."""
    if is_outside(group):
        return {"local_rank": -1, "world_size": -1}
    known = members(group)
    return {"local_rank": known.index(this_rank()), "world_size": len(known)}


def _check_is_whole(content: Content) -> None:
    """Refuse to write the shards of this rank as if they were the whole tensor."""
    pieces = content.layout.pieces(this_rank(), content.shape)
    own, wanted = sum(piece.box.size for piece in pieces), prod(content.shape)
    if own != wanted:
        raise OperationError(
            f'a ShardedTensor of layout "{content.layout}" and shape {list(content.shape)} is '
            f"in a tuple or an object, of which one rank writes its pickle: {own} of {wanted} "
            "elements; put the tensor into a dict or a list, which torch looks into"
        )


def _unshared(part: torch.Tensor) -> torch.Tensor:
    """A part with memory of its own: torch saves the whole storage of a view."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def rebuild_sharded_tensor(parts: list[torch.Tensor], state: State) -> ContentTensor:
    """Rebuild a ShardedTensor that was saved, in the current process group."""
    if not dist.is_initialized():
        raise StateError(
            "Need to initialize default process group before a ShardedTensor is loaded: call "
            "torch.distributed.init_process_group"
        )
    group = current_process_group()
    own = not from_other_ranks.get()
    if own:
        _check_place(state, group)
    shape, shards = tuple(state["shape"]), tuple(ShardMetadata(*row) for row in state["shards"])
    layout = layout_of_shards(shape, shards) if shards else Layout.from_dict(state["layout"])
    if own:
        check_members(layout.ranks, group)
        if shards:
            check_disjoint(shards)
            check_tensor(shards, shape)
    dtype = getattr(torch, state["dtype"], None)
    device = parts[0].device if parts else torch.device(state["device"])
    if shards and parts:
        shards = tuple(shard.on(device) for shard in shards)
    spec = infer_sharding_spec(shards) if shards else None
    content = Content(layout, shape, dtype, tuple(parts), device, group, spec, shards or None)  # type: ignore[arg-type]
    _check_parts(content, state["rank"])
    tensor = restore_flags(wrap(content), state["requires_grad"], state["parameter"])
    tensor._saved_rank = state["rank"]
    return tensor


def restore_flags(tensor: ContentTensor, requires_grad: bool, parameter: bool) -> ContentTensor:
    """The tensor with ``requires_grad``, or as a parameter, as it was saved."""
    if requires_grad:
        tensor.requires_grad_()
    if parameter:
        tensor._is_param = True
    return tensor


def boxes_of(content: Content, rank: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that a rank has of a tensor, and their values in the parts that it saved."""
    layout, parts = content.layout, content.parts
    if isinstance(layout, BoxLayout):
        return list(zip(layout.boxes.get(rank, ()), parts, strict=True))
    if not parts:
        return []
    flat = parts[0].contiguous()
    pieces = layout.pieces(rank, content.shape)
    return [(piece.box, piece_view(flat, piece).contiguous()) for piece in pieces]


def _check_place(state: State, group: Group) -> None:
    """Refuse shards of other ranks, and of a group of another size."""
    place = _place(group)
    compared = {
        "Local rank": (state["local_rank"], place["local_rank"]),
        "Global rank": (state["rank"], this_rank()),
        "Local world size": (state["world_size"], place["world_size"]),
    }
    for what, (before, now) in compared.items():
        if before != now:
            raise StateError(
                f"{what} at save time was {before}, but at load time was {now}: load the file of "
                "this rank, or all files with reshard.sharded.load_files"
            )


def _check_parts(content: Content, rank: int) -> None:
    """Refuse parts that the layout does not give to the rank that saved them."""
    layout = content.layout
    if layout.reduce is not None:
        raise ArgumentError(
            f'the layout "{layout}" has a pending {layout.reduce[0]}: add it up first'
        )
    wanted = list(part_shapes(layout, rank, content.shape))
    shapes = [tuple(part.shape) for part in content.parts]
    if shapes != wanted:
        raise ArgumentError(f"rank {rank} has saved parts {shapes} and its layout says {wanted}")
    if any(part.dtype != content.dtype for part in content.parts):
        kinds = sorted({str(part.dtype) for part in content.parts})
        raise ArgumentError(f"rank {rank} has saved parts of {kinds} as {content.dtype}")


# The name in a pickle: it stays when the module moves.
rebuild_sharded_tensor.__module__ = "reshard.sharded"
torch.serialization.add_safe_globals([rebuild_sharded_tensor])
