"""The methods through which Python and torch copy, save and compute with a ShardedTensor."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from reshard.sharded.content import Content, ContentTensor, wrap
from reshard.sharded.files.pickles import reduce
from reshard.sharded.files.state_dicts import install
from reshard.sharded.files.torch_checkpoint import (
    ChunkAttribute,
    chunk_list,
    chunk_offsets,
    chunk_sizes,
    tensor_shard,
    write_items,
)
from reshard.sharded.ops.arguments import Args, Kwargs, Op
from reshard.sharded.ops.dispatch import dispatch
from reshard.sharded.ops.functions import call

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["TorchProtocols"]


class TorchProtocols(ContentTensor):
    """A tensor with a content that Python and torch can copy, save and compute with."""

    global_shape = ChunkAttribute(lambda content: content.shape)
    global_offsets = ChunkAttribute(chunk_offsets)
    # Offsets in the tensor itself, whose size is that of the whole tensor.
    local_offsets = ChunkAttribute(chunk_offsets)
    local_sizes = ChunkAttribute(chunk_sizes)

    @classmethod
    @cache
    def prepare_torch(cls) -> None:
        """Let torch's functions on state dicts know ShardedTensors, once there is one."""
        install()

    def __copy__(self) -> Self:
        # A content of its own: an operation finds the tensor of a content by its identity.
        twin = cast(Self, wrap(replace(self._content)))
        twin.requires_grad_(self.requires_grad)
        return self._mark_parameter(twin)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return cast(Self, memo[id(self)])
        with torch.no_grad():
            clone = cast(Self, self.detach().clone())
            clone.requires_grad_(self.requires_grad)
            twin = self._mark_parameter(clone)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin

    def _mark_parameter(self, twin: Self) -> Self:
        if getattr(self, "_is_param", False):
            twin._is_param = True
        return twin

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        content = self._content
        where = f'"{content.layout}"'
        return f"ShardedTensor({list(content.shape)}, {content.dtype}, {where}, {content.parts})"

    def __reduce_ex__(self, protocol: object) -> Any:
        return reduce(self)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunk_list(self._content)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return tensor_shard(self._content, index)

    def __tensor_flatten__(self) -> tuple[list[str], Content]:
        names = [f"_part{number}" for number in range(len(self._content.parts))]
        return names, self._content

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> torch.Tensor:
            number = name.removeprefix("_part")
            if number != name and number.isdecimal():
                return self._content.parts[int(number)]
            raise AttributeError(f"a ShardedTensor has no attribute {name}")

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], content: Content, size: object, stride: object
    ) -> ContentTensor:
        return wrap(content.with_parts(tuple(inner.values())))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return call(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})
