"""ShardedTensor: one tensor of which every rank holds some shards.

spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
st = zeros(spec, 10, 4)                      # this rank's shard: 5 x 4
st.local_tensor()                            # differentiable, as everything here
st.reshard(other_spec)                       # this tensor in another way, along one plan
st.resharded(other_spec)                     # a new one
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
from reshard.layout.layout import Layout
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
    _remote: dict[int, list[Any]] | None = None
    """RPC references to the shards of other ranks, where they were asked for."""
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
        from reshard.sharded.rpc import check_rrefs

        check_rrefs(init_rrefs)
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        tensor = made(sharding_spec, size, properties, process_group, torch.empty)
        return tensor.refer_to_others(init_rrefs)

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
        shards = self._content.shards
        return [Shard.of(self, number, shard) for number, shard in enumerate(shards)]

    def shard_tensor(self, number: int) -> torch.Tensor:
        """The tensor of one of this rank's shards; gradients flow back."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._content.shards[number].tensor
        from reshard.sharded.gradients import to_parts

        return replace(self._content, parts=to_parts(self)).shards[number].tensor

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

    def _for_move(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """This rank's parts as a move takes them; where it has none, a leaf for gradients."""
        from reshard.sharded.gradients import to_joined

        return to_joined(self)

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
    def _metadata(self) -> ShardedTensorMetadata:
        """The metadata with a list of shards, which code written for torch may sort."""
        metadata = self.metadata()
        object.__setattr__(metadata, "shards_metadata", list(metadata.shards_metadata))
        return metadata

    @property
    def _local_shards(self) -> list[Shard]:
        return self.local_shards()

    @property
    def _process_group(self) -> Group:
        return self._content.group

    @property
    def _sharding_spec(self) -> ShardingSpec:
        return self.sharding_spec()

    @_sharding_spec.setter
    def _sharding_spec(self, spec: ShardingSpec) -> None:
        self._content = replace(self._content, spec=spec)

    @property
    def process_group(self) -> Group:
        """The group of the ranks that hold shards; None is the default one."""
        return self._content.group

    def resharded(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """The same values cut in another way, as a new tensor; itself where nothing changes."""
        from reshard.sharded.resharding import resharded

        return resharded(self, resharding_spec)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut this very tensor in another way, as torch does, and return it.

        Autograd follows. A leaf that collects gradients is refused: ``resharded`` gives a new one.
        """
        from reshard.sharded.resharding import reshard_in_place

        return reshard_in_place(self, resharding_spec)

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
        from reshard.sharded.rpc import check_rrefs

        check_rrefs(init_rrefs)
        tensor = made(local_tensor, sharding_spec, *global_size, process_group=process_group)
        return tensor.refer_to_others(init_rrefs)

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
        from reshard.sharded.rpc import check_rrefs

        check_rrefs(init_rrefs)
        tensor = made(local_shards, sharded_tensor_metadata, sharding_spec, process_group)
        return tensor.refer_to_others(init_rrefs)

    def refer_to_others(self, init_rrefs: bool = True) -> ShardedTensor:
        """Exchange RPC references to all shards; every worker of RPC calls this."""
        if init_rrefs:
            from reshard.sharded.rpc import exchanged_rrefs

            self._remote = exchanged_rrefs(self._content.shards)
        return self

    def remote_shards(self) -> dict[int, list[Any]]:
        """References to the shards of other ranks, by rank."""
        if self._remote is None:
            raise RuntimeError(
                "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available: "
                "give init_rrefs=True, or reach them by reshard() and gather()"
            )
        return self._remote

    def cpu(
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Group = None,
    ) -> ShardedTensor:
        """The same tensor in host memory, and of another group if one is given."""
        return self._of_group(super().cpu(memory_format=memory_format), process_group)

    def cuda(self, *args: Any, process_group: Group = None, **kwargs: Any) -> ShardedTensor:
        """The same tensor on GPUs, and of another group if one is given."""
        return self._of_group(super().cuda(*args, **kwargs), process_group)

    def to(self, *args: Any, process_group: Group = None, **kwargs: Any) -> ShardedTensor:
        """The same tensor on another device or of another dtype, and of another group if given."""
        return self._of_group(super().to(*args, **kwargs), process_group)

    def _of_group(self, tensor: Any, group: Group) -> ShardedTensor:
        if group is None or group is tensor._content.group:
            return cast(ShardedTensor, tensor)
        made: Any = tensor.detach() if tensor is self else tensor
        made._content = replace(made._content, group=group)
        return cast(ShardedTensor, made)

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
