"""How a sharded tensor is saved: its own shards, and where all shards lie, as plain data.

`torch.load(weights_only=True)` accepts it in a process that imported reshard.sharded: what is
called then is one function of ours, with numbers, texts and tensors.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from reshard.layout import Layout
from reshard.sharded.content import Content, layout_of_shards
from reshard.sharded.inference import infer_sharding_spec
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.meshes import this_rank

__all__ = ["foreign", "rebuild_sharded_tensor", "reduced"]

State = dict[str, Any]

foreign: ContextVar[bool] = ContextVar("foreign", default=False)
"""Whether shards that other ranks have saved may be loaded: for whoever puts them together."""


def reduced(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    """What pickle writes."""
    content, spec = tensor._content, None
    if content.stated is None:
        spec = content.layout.to_dict()
    state: State = {
        "shape": list(content.shape),
        "dtype": str(content.dtype).removeprefix("torch."),
        "device": str(content.device),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "layout": spec,
        "shards": [_row(shard) for shard in content.stated or ()],
        "rank": this_rank(),
        "world_size": dist.get_world_size(content.group) if dist.is_initialized() else 1,
    }
    parts = [part.detach() for part in content.parts]
    return rebuild_sharded_tensor, (parts, state)


def _row(shard: ShardMetadata) -> list[Any]:
    place = None if shard.placement is None else str(shard.placement)
    return [list(shard.shard_offsets), list(shard.shard_sizes), place]


def rebuild_sharded_tensor(parts: list[torch.Tensor], state: State) -> ShardedTensor:
    """A sharded tensor that was saved, in the process group that is current."""
    from reshard.sharded.loading import current_process_group

    group = current_process_group() if dist.is_initialized() else None
    if not dist.is_initialized():
        raise RuntimeError(
            "a ShardedTensor is loaded before init_process_group: make the process group first"
        )
    if state["rank"] != this_rank() and not foreign.get():
        raise RuntimeError(
            f"Local rank at save time was {state['rank']}, but at load time was {this_rank()}: "
            "load the file of this rank, or all files with reshard.sharded.load_files"
        )
    shape, shards = tuple(state["shape"]), tuple(ShardMetadata(*row) for row in state["shards"])
    layout = layout_of_shards(shape, shards) if shards else Layout.from_dict(state["layout"])
    dtype = getattr(torch, state["dtype"])
    device = parts[0].device if parts else torch.device(state["device"])
    spec = infer_sharding_spec(shards) if shards else None
    content = Content(layout, shape, dtype, tuple(parts), device, group, spec, shards or None)
    tensor = wrap(content)
    if state["requires_grad"]:
        tensor.requires_grad_()
    if state["parameter"]:
        tensor._is_param = True
    return tensor


torch.serialization.add_safe_globals([rebuild_sharded_tensor])
