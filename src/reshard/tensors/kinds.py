"""What kind of tensor is this? Asked without loading what the caller has not loaded.

``torch.distributed.tensor`` takes a second to import. A DTensor can only exist where somebody
imported it, so looking among the loaded modules is enough.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Protocol, TypeGuard

    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

    from reshard.layout.layout import Layout

    class Content(Protocol):
        """What a rank has of it."""

        parts: tuple[torch.Tensor, ...]

    class LaidOut(Protocol):
        """A tensor of ours: this module is below the one that has its class."""

        cut: Layout
        _content: Content

        def _for_move(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            """This rank's parts, with gradients; where it has none, a leaf for them."""


__all__ = [
    "computed",
    "is_dtensor",
    "is_laid_out",
    "is_sharded_tensor",
    "knows_layout",
    "ready",
]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is torch's DTensor."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Whether this is torch's ShardedTensor."""
    return _is("torch.distributed._shard.sharded_tensor.api", "ShardedTensorBase", value)


def is_laid_out(value: object) -> TypeGuard[LaidOut]:
    """Whether this is our own ShardedTensor, which has a layout and parts."""
    return _is("reshard.sharded.tensor", "ShardedTensor", value)


def knows_layout(value: object) -> bool:
    """Whether a tensor says itself how it is cut."""
    if type(value) is torch.Tensor:
        return False
    return is_dtensor(value) or is_sharded_tensor(value) or is_laid_out(value)


def _is(module: str, name: str, value: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself once a collective that is still filling it has finished."""
    if _is("torch.distributed._functional_collectives", "AsyncCollectiveTensor", tensor):
        waited: torch.Tensor = tensor.wait()  # type: ignore[attr-defined]
        return waited
    return tensor


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory: a lazy conjugate or negative has others there."""
    return tensor.resolve_conj().resolve_neg()
