"""ShardedTensor: one tensor of which every rank holds some shards.

spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
st = zeros(spec, 10, 4)                      # this rank's shard: 5 x 4
st.local_tensor()                            # differentiable, as everything here
st.reshard(other_spec)                       # another ShardedTensor, along one plan
st + 2 * other                               # shard by shard
torch.nn.functional.linear(x, st)            # through DTensor, where that can say the layout
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from reshard.errors import OperationError
from reshard.layout import Layout
from reshard.sharded.content import Content, Group
from reshard.sharded.dcp import (
    ChunkAttribute,
    chunk_list,
    chunk_offsets,
    chunk_sizes,
    tensor_shard,
    write_items,
)
from reshard.sharded.metadata import ShardedTensorMetadata, TensorProperties
from reshard.sharded.shard import Shard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.utils.hooks import RemovableHandle

    from reshard.sharded.spec import ShardingSpec

__all__ = ["ShardedTensor", "wrap"]


class ShardedTensor(torch.Tensor):
    """One tensor of which every rank holds some shards."""

    _content: Content
    _hook: RemovableHandle | None = None
    """Lays gradients out as the tensor is."""
    global_shape = ChunkAttribute(lambda content: content.shape)
    global_offsets = ChunkAttribute(chunk_offsets)
    # A place in the tensor itself: its size is that of the whole one.
    local_offsets = ChunkAttribute(chunk_offsets)
    local_sizes = ChunkAttribute(chunk_sizes)

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Shards with values that nobody has set yet."""
        from reshard.sharded.factories import made
        from reshard.sharded.making import check_no_rrefs

        check_no_rrefs(init_rrefs)
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        return made(sharding_spec, size, properties, process_group, torch.empty)

    def __init__(self, *_: object, **__: object) -> None:
        """Everything is done by ``__new__``."""

    @property
    def cut(self) -> Layout:
        """How it is cut over ranks."""
        return self._content.layout

    def local_shards(self) -> list[Shard]:
        """This rank's shards; their tensors are its memory, and gradients flow back from them.

        What is written into that memory is not seen by autograd's check of saved tensors.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return list(self._content.shards)
        from reshard.sharded.gradients import to_parts

        return list(replace(self._content, parts=to_parts(self)).shards)

    def local_tensor(self) -> torch.Tensor:
        """The tensor of this rank's only shard; gradients flow back."""
        shards = self._content.shards
        if len(shards) != 1 and len(self._content.parts) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported, and this rank has {len(shards)}: use "
                "local_shards()"
            )
        from reshard.sharded.gradients import to_local

        return to_local(self)

    def metadata(self) -> ShardedTensorMetadata:
        """All shards on all ranks, and what they have in common."""
        content, pinned = self._content, self.is_pinned()
        common = TensorProperties(
            content.dtype, requires_grad=self.requires_grad, pin_memory=pinned
        )
        return ShardedTensorMetadata(content.shards_metadata, torch.Size(content.shape), common)

    def sharding_spec(self) -> ShardingSpec:
        """The spec it was made by, or one that says where its shards lie."""
        content = self._content
        if content.spec is not None:
            return content.spec
        from reshard.sharded.by_layout import LayoutShardingSpec

        return LayoutShardingSpec(content.layout)

    @property
    def process_group(self) -> Group:
        """The group of the ranks that hold shards; None is the default one."""
        return self._content.group

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """The same tensor, cut in another way; itself where nothing changes."""
        from reshard.sharded.resharding import resharded

        return resharded(self, resharding_spec)

    def reshard_(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut this very tensor in another way; not one that gradients are collected in."""
        if self.requires_grad:
            raise RuntimeError(
                "reshard_ would change a tensor that requires gradients under autograd's feet: use "
                "reshard(), or call it before requires_grad_()"
            )
        self._content = self.reshard(resharding_spec)._content
        return self

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank of the group; gradients flow back."""
        from reshard.sharded.gradients import to_whole

        return to_whole(self)

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """The whole tensor on rank ``dst`` of the group, in ``out`` if given; None on the others.

        Values keep their dtype, unless ``dtype`` or that of ``out`` is another one; nothing is left
        for ``enforce_dtype`` to do.
        """
        from reshard.sharded.gathering import gathered

        return gathered(self, dst, out, dtype)

    def to_dtensor(self, device_mesh: DeviceMesh | None = None) -> DTensor:
        """The same memory as a DTensor, where placements can say the layout."""
        from reshard.sharded.gradients import to_dtensor

        return to_dtensor(self, device_mesh)

    @staticmethod
    def from_dtensor(tensor: DTensor, process_group: Group = None) -> ShardedTensor:
        """A DTensor's memory as a ShardedTensor."""
        from reshard.sharded.gradients import from_dtensor

        return from_dtensor(tensor, process_group)

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: int | Sequence[int] | None,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of the shards that each rank has; ranks tell each other which these are."""
        from reshard.sharded.from_local import init_from_local_shards as made

        return made(local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of which each rank has the shard that a spec gives it; nobody communicates."""
        from reshard.sharded.from_local import init_from_local_tensor as made
        from reshard.sharded.making import check_no_rrefs

        check_no_rrefs(init_rrefs)
        return made(local_tensor, sharding_spec, *global_size, process_group=process_group)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Group = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor of local shards and of what is known of all; nobody communicates."""
        from reshard.sharded.from_local import init_from_metadata as made
        from reshard.sharded.making import check_no_rrefs

        check_no_rrefs(init_rrefs)
        return made(local_shards, sharded_tensor_metadata, sharding_spec, process_group)

    def remote_shards(self) -> dict[int, list[Any]]:
        """References to the shards of other ranks, by RPC."""
        raise RuntimeError(
            "RPC references to remote shards were not made: there is no init_rrefs here, because "
            "shards of other ranks are reached by reshard() and gather()"
        )

    def is_pinned(self) -> bool:  # type: ignore[override]
        """Whether all of this rank's parts are in pinned memory."""
        parts = self._content.parts
        return bool(parts) and all(part.is_pinned() for part in parts)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are collected; assigning it is ``requires_grad_``."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Collect gradients, or not; the tensors of ``local_shards`` say the same."""
        collects = requires_grad and not self.requires_grad and self.is_leaf
        super().requires_grad_(requires_grad)
        if collects:
            from reshard.sharded.gradients import like

            if self._hook is not None:
                self._hook.remove()
            self._hook = cast(Any, self).register_hook(like(self._content))
        return self

    def tolist(self) -> Any:
        """All values, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: an array is memory of this rank, and others hold the rest."""
        raise OperationError(
            f"numpy() of a ShardedTensor {list(self.shape)}, of which this rank has a part: take "
            "full_tensor().numpy() or local_tensor().numpy()"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __copy__(self) -> ShardedTensor:
        made = wrap(self._content)
        if self.requires_grad:
            made.requires_grad_()
        if getattr(self, "_is_param", False):
            made._is_param = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return cast(ShardedTensor, memo[id(self)])
        with torch.no_grad():
            made = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return cast(ShardedTensor, made)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        content = self._content
        where = f'"{content.layout}"'
        return f"ShardedTensor({list(content.shape)}, {content.dtype}, {where}, {content.parts})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        from reshard.sharded.pickling import reduced

        return reduced(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
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
    ) -> ShardedTensor:
        return wrap(content.with_parts(tuple(inner.values())))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from reshard.sharded.functions import called

        return called(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from reshard.sharded.dispatch import dispatched

        return dispatched(func, args, kwargs or {})


def wrap(content: Content, requires_grad: bool = False) -> ShardedTensor:
    """A ShardedTensor of what a rank has."""
    _teach_torch()
    made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
        ShardedTensor,
        content.shape,
        strides=content.stride,
        dtype=content.dtype,
        device=content.device,
        requires_grad=requires_grad,
    )
    made._content = content
    return made


@cache
def _teach_torch() -> None:
    """Have torch's functions on state dicts know ShardedTensors, once there is one."""
    from reshard.sharded.state_dicts import install

    install()
