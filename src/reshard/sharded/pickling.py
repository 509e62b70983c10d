"""How a sharded tensor is saved: its own shards, and where all shards lie, as plain data.

`torch.load(weights_only=True)` accepts it in a process that imported reshard.sharded: what is
called then is one function of ours, with numbers, texts and tensors.
"""

from __future__ import annotations

from contextvars import ContextVar
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import OperationError
from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.sharded.content import Content, Group, layout_of_shards, members
from reshard.sharded.enumerable import check_disjoint, check_tensor
from reshard.sharded.inference import infer_sharding_spec
from reshard.sharded.loading import current_process_group
from reshard.sharded.making import check_members
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.kinds import this_rank

__all__ = ["for_all_ranks", "foreign", "held_by", "marked", "rebuild_sharded_tensor", "reduced"]

State = dict[str, Any]

foreign: ContextVar[bool] = ContextVar("foreign", default=False)
"""Whether shards that other ranks have saved may be loaded: for whoever puts them together."""

for_all_ranks: ContextVar[bool] = ContextVar("for_all_ranks", default=False)
"""Whether the pickle of one rank is written for all of them."""


def reduced(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    """What pickle writes."""
    content = tensor._content
    if for_all_ranks.get():
        _check_has_all(content)
    state: State = {
        "shape": list(content.shape),
        "dtype": str(content.dtype).removeprefix("torch."),
        "device": str(content.device),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "layout": content.layout.to_dict() if content.stated is None else None,
        "shards": [_row(shard) for shard in content.stated or ()],
        "rank": this_rank(),
        **_place(content.group),
    }
    parts = [_alone(part.detach()) for part in content.parts]
    return rebuild_sharded_tensor, (parts, state)


def _place(group: Group) -> dict[str, int]:
    """Where this rank is in a group; -1 for one that is not in it, as torch counts."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return {"local_rank": -1, "world_size": -1}
    known = members(group)
    return {"local_rank": known.index(this_rank()), "world_size": len(known)}


def _check_has_all(content: Content) -> None:
    """Refuse to write the shards of this rank as if they were the tensor."""
    pieces = content.layout.pieces(this_rank(), content.shape)
    found, wanted = sum(piece.box.size for piece in pieces), prod(content.shape)
    if found != wanted:
        raise OperationError(
            f'a ShardedTensor of layout "{content.layout}" and shape {list(content.shape)} stands '
            f"in a tuple or an object, of which one rank writes its pickle: {found} of {wanted} "
            "elements; put the tensor into a dict or a list, which torch looks into"
        )


def _alone(part: torch.Tensor) -> torch.Tensor:
    """A part with memory of its own: a view would be saved with all that it is a view of."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _row(shard: ShardMetadata) -> list[Any]:
    place = None if shard.placement is None else str(shard.placement)
    return [list(shard.shard_offsets), list(shard.shard_sizes), place]


def rebuild_sharded_tensor(parts: list[torch.Tensor], state: State) -> ShardedTensor:
    """A sharded tensor that was saved, in the process group that is current."""
    if not dist.is_initialized():
        raise RuntimeError(
            "Need to initialize default process group before a ShardedTensor is loaded: call "
            "torch.distributed.init_process_group"
        )
    group = current_process_group()
    if not foreign.get():
        _check_place(state, group)
    shape, shards = tuple(state["shape"]), tuple(ShardMetadata(*row) for row in state["shards"])
    layout = layout_of_shards(shape, shards) if shards else Layout.from_dict(state["layout"])
    if not foreign.get():
        check_members(layout, group)
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
    tensor = marked(wrap(content), state["requires_grad"], state["parameter"])
    tensor._saved_rank = state["rank"]  # type: ignore[attr-defined]
    return tensor


def marked(tensor: ShardedTensor, requires_grad: bool, parameter: bool) -> ShardedTensor:
    """A tensor as one that collects gradients, or as a parameter."""
    if requires_grad:
        tensor.requires_grad_()
    if parameter:
        tensor._is_param = True
    return tensor


def held_by(content: Content, rank: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that a rank has of a tensor, and their values in the parts that it has saved."""
    layout, parts = content.layout, content.parts
    if isinstance(layout, BoxLayout):
        return list(zip(layout.boxes.get(rank, ()), parts, strict=True))
    if not parts:
        return []
    pieces = layout.pieces(rank, content.shape)
    flat = parts[0].contiguous()
    return [
        (piece.box, flat.as_strided(piece.box.shape, piece.strides, piece.offset).contiguous())
        for piece in pieces
    ]


def _check_place(state: State, group: Group) -> None:
    """Refuse the shards of other ranks, and those of a group of another size."""
    place = _place(group)
    here = {
        "Local rank": (state["local_rank"], place["local_rank"]),
        "Global rank": (state["rank"], this_rank()),
        "Local world size": (state["world_size"], place["world_size"]),
    }
    for what, (before, now) in here.items():
        if before != now:
            raise RuntimeError(
                f"{what} at save time was {before}, but at load time was {now}: load the file of "
                "this rank, or all files with reshard.sharded.load_files"
            )


def _check_parts(content: Content, rank: int) -> None:
    """Refuse parts that are not what the layout gives the rank that has saved them."""
    layout, shape = content.layout, content.shape
    if layout.reduce is not None:
        raise ValueError(f'the layout "{layout}" has a pending {layout.reduce[0]}: add it up first')
    if isinstance(layout, BoxLayout):
        wanted = [box.shape for box in layout.boxes.get(rank, ())]
    else:
        wanted = [layout.local_shape(rank, shape)] if layout.holds(rank) is not None else []
    found = [tuple(part.shape) for part in content.parts]
    if found != wanted:
        raise ValueError(f"rank {rank} has saved parts {found} and its layout says {wanted}")
    if any(part.dtype != content.dtype for part in content.parts):
        kinds = sorted({str(part.dtype) for part in content.parts})
        raise ValueError(f"rank {rank} has saved parts of {kinds} as {content.dtype}")


torch.serialization.add_safe_globals([rebuild_sharded_tensor])
