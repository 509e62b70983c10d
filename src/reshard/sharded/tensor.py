"""ShardedTensor: one tensor of which every rank holds some shards.

spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
st = zeros(spec, 10, 4)                      # this rank's shard: 5 x 4
st.local_tensor()                            # differentiable, as everything here
st.reshard(other_spec)                       # this tensor moved to another layout, along one plan
st.resharded(other_spec)                     # a new one
st + 2 * other                               # shard by shard
torch.nn.functional.linear(x, st)            # through DTensor, if it can express the layout
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, Self, TypedDict, Unpack, cast

import torch
from torch.distributed.tensor import DTensor

from reshard.errors import OperationError, StateError
from reshard.layout.layout import Layout
from reshard.sharded import create, move
from reshard.sharded.content import Content, ContentTensor, part_shapes, wrap
from reshard.sharded.files.pickles import reduce
from reshard.sharded.files.torch_checkpoint import CheckpointTensor, install
from reshard.sharded.groups import Group, exchange_rrefs
from reshard.sharded.ops import dtensor
from reshard.sharded.ops.dispatch import dispatch
from reshard.sharded.ops.dtensor import Args, Kwargs, Op
from reshard.sharded.ops.functions import call
from reshard.sharded.specs import (
    LayoutShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    TensorProperties,
)
from reshard.tensors.kinds import this_rank

Size = int | Sequence[int]


class Options(TypedDict, total=False):
    """The keyword arguments of all factories."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Group
    init_rrefs: bool


class SeveralShardsError(OperationError, NotImplementedError):
    """A rank has several shards, or none, where one is needed."""


class ShardedTensor(CheckpointTensor):
    """One tensor of which every rank holds some shards."""

    _remote: dict[int, list[Any]] | None = None
    """RPC references to the shards of other ranks, with ``init_rrefs``."""

    def __new__(
        cls, sharding_spec: ShardingSpec, *size: Size, **options: Unpack[Options]
    ) -> ShardedTensor:
        """Shards with uninitialized values."""
        return filled_tensor(torch.empty, sharding_spec, size, **options)

    def __init__(self, *_: object, **__: object) -> None:
        """``__new__`` does everything."""

    @property
    def cut(self) -> Layout:
        """The layout."""
        return self._content.layout

    def local_shards(self) -> list[Shard]:
        """This rank's shards; their tensors are its memory, and gradients flow back from them.

        Autograd's check of saved tensors does not see writes into that memory.
        """
        return [move.OwnedShard(self, at) for at in range(len(self._content.shards))]

    def local_tensor(self) -> torch.Tensor:
        """The tensor of this rank's only shard; gradients flow back."""
        if len(self._content.parts) != 1 and len(self._content.shards) != 1:
            raise SeveralShardsError(
                f"Only single local shard is supported, and this rank has "
                f"{len(self._content.shards)}: use local_shards()"
            )
        return move.to_local(self)

    _for_move = move.to_move_input
    """This rank's local tensor for ``rs.move``; if it has none, a leaf for gradients."""

    def metadata(self) -> ShardedTensorMetadata:
        """All shards on all ranks, and their common properties."""
        grad, pinned = self.requires_grad, self.is_pinned()
        common = TensorProperties(self._content.dtype, requires_grad=grad, pin_memory=pinned)
        return ShardedTensorMetadata(self._content.shards_metadata, self.shape, common)

    def sharding_spec(self) -> ShardingSpec:
        """The spec it was made by, or one with its layout."""
        spec = self._content.spec
        return LayoutShardingSpec(self.cut) if spec is None else spec

    @property
    def _metadata(self) -> ShardedTensorMetadata:
        """The metadata with a list of shards, which code written for torch may sort."""
        metadata = self.metadata()
        object.__setattr__(metadata, "shards_metadata", list(metadata.shards_metadata))
        return metadata

    def _set_spec(self, spec: ShardingSpec) -> None:
        self._content = replace(self._content, spec=spec)

    @property
    def process_group(self) -> Group:
        """The group of the ranks that hold shards; None is the default one."""
        return self._content.group

    _process_group = process_group
    _local_shards = property(local_shards)
    _sharding_spec = property(sharding_spec, _set_spec)  # code written for torch assigns it

    def resharded(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """The same values in the layout of another spec; the tensor itself if nothing changes."""
        target = move.reshard_target(self._content, resharding_spec)
        if target is None:
            return self
        if self.requires_grad and torch.is_grad_enabled():
            return cast(ShardedTensor, move.to_layout(self, target))
        return tensor_of(move.move_like(self._content, target))

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Move this tensor itself to the layout of another spec, as torch does, and return it.

        Autograd follows. A leaf that collects gradients is refused: ``resharded`` gives a new one.
        """
        target = move.reshard_target(self._content, resharding_spec)
        if target is not None:
            move.to_layout_in_place(self, target)
        return self

    full_tensor = move.to_whole

    gather = move.gather  # type: ignore[assignment]
    to_dtensor = dtensor.to_dtensor

    @staticmethod
    def from_dtensor(tensor: DTensor, process_group: Group = None) -> ShardedTensor:
        """The ShardedTensor with the memory of a DTensor."""
        return cast(ShardedTensor, dtensor.from_dtensor(tensor, process_group))

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: int | Sequence[int] | None,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from the shards of each rank; ranks exchange their metadata.

        With ``None`` as the size, or as its first number, shards follow each other along dim 0 in
        the order of ranks.
        """
        created = create.from_local_shards(local_shards, global_size, process_group, init_rrefs)
        return tensor_of(*created, init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from the one shard that a spec gives each rank; nothing is communicated."""
        content = create.from_local_tensor(local_tensor, sharding_spec, global_size, process_group)
        return tensor_of(content, local_tensor.requires_grad, init_rrefs)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Group = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor from local shards and the metadata of all shards; nothing is communicated."""
        metadata = sharded_tensor_metadata
        content = create.from_metadata(local_shards, metadata, sharding_spec, process_group)
        requires_grad = metadata.tensor_properties.requires_grad
        return tensor_of(content, requires_grad, init_rrefs)

    def remote_shards(self) -> dict[int, list[Any]]:
        """References to the shards of other ranks, by rank."""
        if self._remote is None:
            raise StateError(
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

    def _of_group(self, tensor: torch.Tensor, group: Group) -> ShardedTensor:
        sharded = cast(ShardedTensor, tensor)
        if group is not None and group is not sharded._content.group:
            sharded = cast(ShardedTensor, sharded.detach()) if sharded is self else sharded
            sharded._content = replace(sharded._content, group=group)
        return sharded

    def is_pinned(self) -> bool:  # type: ignore[override]
        """Whether all of this rank's parts are in pinned memory."""
        parts = self._content.parts
        return bool(parts) and all(part.is_pinned() for part in parts)

    def share_memory_(self) -> Self:
        """Move this rank's parts to memory that processes share; torch would crash."""
        for part in self._content.parts:
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are collected; assigning it is ``requires_grad_``."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Collect gradients, or not; the tensors of ``local_shards`` follow."""
        collects = requires_grad and not self.requires_grad and self.is_leaf
        super().requires_grad_(requires_grad)
        if collects:
            move.lay_out_gradients(self)
        return self

    def tolist(self) -> Any:
        """All values, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *_: object, **__: object) -> NoReturn:
        """Refused: an array is memory of this rank, and other ranks hold the rest."""
        raise OperationError(
            f"numpy() of a ShardedTensor {list(self.shape)}, of which this rank has a part: take "
            "full_tensor().numpy() or local_tensor().numpy()"
        )

    __array__ = numpy

    # What Python and torch call to copy, save and compute with the tensor.

    def __copy__(self) -> Self:
        # A content of its own: an operation finds the tensor of a content by its identity.
        return self._with_content(replace(self._content))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            with torch.no_grad():
                clone = cast(Self, self.detach().clone())
            memo[id(self)] = twin = self._with_content(clone._content)
            twin.grad = copy.deepcopy(self.grad, memo)
        return cast(Self, memo[id(self)])

    def _with_content(self, content: Content) -> Self:
        return cast(Self, wrap(content, self.requires_grad, isinstance(self, torch.nn.Parameter)))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        shape, dtype = list(self._content.shape), self._content.dtype
        return f'ShardedTensor({shape}, {dtype}, "{self.cut}", {self._content.parts})'

    def __reduce_ex__(self, protocol: object) -> Any:
        return reduce(self)

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


ContentTensor.facade = ShardedTensor
ContentTensor.prepare_torch = cache(install)


def tensor_of(
    content: Content, requires_grad: bool = False, init_rrefs: bool = False
) -> ShardedTensor:
    """The ShardedTensor of a content; with ``init_rrefs`` every worker of RPC calls this."""
    tensor = cast(ShardedTensor, wrap(content, requires_grad))
    if init_rrefs:
        tensor._remote = exchange_rrefs(content.shards)
    return tensor


def filled_tensor(
    fill: Callable[..., torch.Tensor],
    spec: ShardingSpec,
    size: Sequence[Size],
    process_group: Group = None,
    init_rrefs: bool = False,
    **options: Any,
) -> ShardedTensor:
    """A tensor of which every rank fills its own shards; the options are tensor properties."""
    common = TensorProperties(**{key: one for key, one in options.items() if one is not None})
    content = create.content_for(spec, create.size_of(size), common, process_group)
    pinned = {"pin_memory": True} if common.pin_memory else {}
    shapes = part_shapes(content.layout, this_rank(), content.shape)
    parts = [fill(one, dtype=common.dtype, device=content.device, **pinned) for one in shapes]
    return tensor_of(content.with_parts(parts), common.requires_grad, init_rrefs)
