"""Contents whose shards every rank fills by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.sharded.content import Content, part_shapes
from reshard.sharded.groups import Group
from reshard.sharded.metadata import TensorProperties
from reshard.sharded.specs.base import ShardingSpec
from reshard.sharded.specs.lowering import content_for, size_of
from reshard.tensors.kinds import this_rank

__all__ = ["Fill", "Size", "filled"]

Size = int | Sequence[int]
Fill = Callable[..., torch.Tensor]
"""A factory of torch such as ``torch.zeros``."""


def filled(
    spec: ShardingSpec,
    size: Sequence[Size],
    properties: TensorProperties,
    group: Group,
    fill: Fill,
) -> Content:
    """A tensor of this size of which every rank fills its own shards."""
    content = content_for(spec, size_of(size), properties, group)
    options: dict[str, Any] = {"dtype": properties.dtype, "device": content.device}
    if properties.pin_memory:
        options["pin_memory"] = True
    shapes = part_shapes(content.layout, this_rank(), content.shape)
    return content.with_parts([fill(shape, **options) for shape in shapes])
