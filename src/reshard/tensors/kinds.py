"""Kinds of tensors, recognized without importing modules that the caller has not imported; parts.

``torch.distributed.tensor`` takes a second to import. A DTensor can only exist where that module is
loaded, so a look into ``sys.modules`` is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

NOT_COMPILED = "reshard moves data between processes, which is not a part of a graph"

F = TypeVar("F", bound=Callable[..., Any])


def this_rank() -> int:
    """The global rank of this process; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    plain = type(value) is torch.Tensor
    return not plain and _is_instance(value, "torch.distributed.tensor", "DTensor")


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    module = "torch.distributed._shard.sharded_tensor.api"
    return _is_instance(value, module, "ShardedTensorBase")


def is_own_sharded_tensor(value: object) -> TypeGuard[Any]:
    """Whether this is our own ShardedTensor, whose class is in a package above this one."""
    return _is_instance(value, "reshard.sharded.tensor", "ShardedTensor")


def has_layout(value: object) -> bool:
    """Whether a tensor knows its own layout."""
    if type(value) is torch.Tensor:
        return False
    return is_dtensor(value) or is_sharded_tensor(value) or is_own_sharded_tensor(value)


def _is_instance(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def are_ranks_simulated() -> bool:
    """Whether torch runs all ranks in this process, on stand-ins for tensors and communication."""
    if not torch._C._len_torch_dispatch_stack():
        return False  # no mode is active; torch's own check takes ten times as long
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.enabled_local_tensor_mode() is not None


def wait_ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, once an asynchronous collective that fills it has finished."""
    module = "torch.distributed._functional_collectives"
    if _is_instance(tensor, module, "AsyncCollectiveTensor"):
        result: torch.Tensor = tensor.wait()  # type: ignore[attr-defined]
        return result
    return tensor


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Parts as one local tensor: one as it is, several flattened and joined."""
    if len(parts) > 1:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0] if parts else None


def not_compiled(function: F) -> F:
    """Make torch.compile end the graph at a function and call it, and all it calls, untraced.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes longer than
    everything else that an import of this library does.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = NOT_COMPILED
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return function  # an older torch traces what it can, and runs the rest as it is
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function
