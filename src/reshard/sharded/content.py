"""Content: the layout of a sharded tensor, which all ranks share, and the parts of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache, partial, wraps
from operator import setitem
from typing import Any, ClassVar, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from reshard.layout.box import row_major
from reshard.layout.layout import BoxLayout, Layout
from reshard.live.inputs.bound import materialize
from reshard.sharded.groups import Group, members
from reshard.sharded.specs import Shard, ShardingSpec, ShardMetadata, shards_of_layout
from reshard.tensors.kinds import joined, this_rank
from reshard.tensors.local import piece_view

T = TypeVar("T")
Args = TypeVarTuple("Args")


def per_layout(function: Callable[[Layout, *Args], T]) -> Callable[[Layout, *Args], T]:
    """Cache the results of a function of a layout for as long as that layout lives."""
    caches: WeakKeyDictionary[Layout, dict[object, T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(layout: Layout, *args: *Args) -> T:
        results = caches.setdefault(layout, {})
        if args not in results:
            results[args] = function(layout, *args)
        return results[args]

    return cached


LEAVES = torch.Tensor | int | float | str | bytes | torch.dtype | None
"""Most values without values inside: a quick check in front of the others."""


def map_nested(function: Callable[[Any], Any], value: Any, kind: Any) -> Any:
    """A value with a function applied to all of a kind inside it; itself if nothing changes.

    Values are looked for in tuples, lists, dicts and dataclasses, which are copied if they change.

    >>> map_nested(str, ([1, None], {"a": (3,)}), int)
    (['1', None], {'a': ('3',)})
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, tuple | list):
        items = [map_nested(function, item, kind) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(items)
    pairs: Iterable[tuple[Any, Any]] = ()
    assign: Callable[[Any, Any, Any], None] = setitem
    # Before dataclasses: the outputs of transformers are both, and keep the two consistent.
    if isinstance(value, dict | Mapping):
        pairs = value.items()
    elif is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if hasattr(value, one.name)]
        pairs, assign = [(name, getattr(value, name)) for name in names], object.__setattr__
    mapped = [(key, item, map_nested(function, item, kind)) for key, item in pairs]
    changed = [(key, new) for key, old, new in mapped if new is not old]
    copied = copy(value) if changed else value
    for key, new in changed:
        assign(copied, key, new)  # also of a frozen dataclass
    return copied


@dataclass(frozen=True, eq=False)
class Content:
    """The layout of a sharded tensor and this rank's parts of it."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[torch.Tensor, ...]
    """This rank's tensors: one per box of a layout of boxes, one for a layout in words."""
    device: torch.device
    group: Group = None
    spec: ShardingSpec | None = None
    """What gave the layout, if a spec did."""
    stated: tuple[ShardMetadata, ...] | None = None
    """The metadata of all shards, in the order of the spec or of the user."""
    mesh: DeviceMesh | None = None
    """The DeviceMesh that the layout was read from, if it was."""
    stated_stride: tuple[int, ...] | None = None
    """The strides of the whole tensor, the same on all ranks, if they are not row-major.

    They do not follow from the parts: a part with a single row has the strides of its transpose.
    """

    def __post_init__(self) -> None:
        """Resolve lazy conjugates, negatives and zeros: a move reads the memory of the parts."""
        if any(one.is_conj() or one.is_neg() or one._is_zerotensor() for one in self.parts):
            object.__setattr__(self, "parts", tuple(map(materialize, self.parts)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def local(self) -> torch.Tensor | None:
        """The local tensor of a move: one part as it is, several flattened and concatenated."""
        return joined(self.parts)

    def with_parts(
        self, parts: Sequence[torch.Tensor], like: torch.Tensor | None = None
    ) -> Content:
        """The same shards with other values; without any, the dtype and device are of ``like``."""
        like = parts[0] if parts else like
        if like is None:
            return self.without_parts()
        stated, device = self.stated, like.device
        if stated is not None and device != self.device:
            stated = tuple(shard.on(_device_on(shard.rank, device)) for shard in stated)
        return replace(self, parts=tuple(parts), dtype=like.dtype, device=device, stated=stated)

    def without_parts(self) -> Content:
        """The same layout without values: what autograd keeps for backward."""
        return replace(self, parts=())

    @property
    def stride(self) -> tuple[int, ...]:
        return row_major(self.shape) if self.stated_stride is None else self.stated_stride

    def is_like(self, other: Content) -> bool:
        """Whether every rank holds the same elements of both, in the same order."""
        one, two = self.layout, other.layout
        if one is two or self.shape != other.shape:
            return self.shape == other.shape
        is_same_group = members(self.group) == members(other.group)
        return is_same_group and (one == two or _is_same(one, two, self.shape))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Copies have copies of the parts, perhaps on another device; all else is shared."""
        return self.without_parts().with_parts, (self.parts,)

    @cached_property
    def shards_metadata(self) -> tuple[ShardMetadata, ...]:
        """The metadata of all shards on all ranks; replicas are listed once per rank."""
        if self.stated is not None:
            return self.stated
        device_of = partial(_device_on, device=self.device)
        return shards_of_layout(self.layout, self.shape, device_of)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """This rank's shards; views of its part if that part consists of several boxes."""
        rank, tensors, own = this_rank(), self.parts, self.shards_metadata
        # Without a group, all shards may be in this process.
        if dist.is_initialized() or len(tensors) != len(own):
            own = tuple(shard for shard in own if shard.rank == rank)
        are_shards = [tuple(one.shape) for one in tensors] == [one.shard_sizes for one in own]
        if not are_shards and not isinstance(self.layout, BoxLayout):
            pieces = self.layout.pieces(rank, self.shape) if tensors else ()
            tensors = tuple(piece_view(tensors[0], piece) for piece in pieces)
        return tuple(Shard(tensor, one) for tensor, one in zip(tensors, own, strict=True))


def part_shapes(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if isinstance(layout, BoxLayout):
        return tuple(box.shape for box in layout.boxes.get(rank, ()))
    return () if layout.holds(rank) is None else (layout.local_shape(rank, shape),)


@per_layout
def _is_same(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether two layouts are the same on all ranks, so that no rank has to move anything."""
    # Empty tensors are the same in any layout, and their parts may still have different shapes.
    return one.same_as(other, shape) and all(
        part_shapes(one, rank, shape) == part_shapes(other, rank, shape)
        for rank in {*one.ranks, *other.ranks}
    )


def _device_on(rank: int | None, device: torch.device) -> torch.device:
    """The device of a rank; of other ranks only the device type is known."""
    return device if rank == this_rank() else torch.device(device.type)


@lru_cache(maxsize=4096)
def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for a shape whose dims have the order of these strides.

    >>> strides_like((4, 6), (1, 2)), strides_like((4, 6), (6, 1))
    ((1, 4), (6, 1))
    """
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    dense, step = [0] * len(shape), 1
    for dim in order:
        dense[dim] = step
        step *= max(shape[dim], 1)
    return tuple(dense)


class ContentTensor(torch.Tensor):
    """The base class of ShardedTensor, for the modules that ShardedTensor itself imports."""

    facade: ClassVar[type[ContentTensor]]
    """ShardedTensor: the class of every tensor that ``wrap`` makes."""
    _content: Content
    _hook: RemovableHandle | None = None
    """The hook that lays gradients out like the tensor."""
    _is_view_copy: bool = False
    """Whether it is a view whose elements were copied: a write would not reach the tensor."""
    _is_param: bool
    _saved_rank: int
    """The rank that saved the file it was loaded from."""
    prepare_torch: ClassVar[Callable[[], None]]
    """Lets torch's functions on state dicts know ShardedTensors, once there is one."""


def wrap(
    content: Content, requires_grad: bool = False, is_parameter: bool = False
) -> ContentTensor:
    facade = ContentTensor.facade
    facade.prepare_torch()
    tensor: ContentTensor = torch.Tensor._make_wrapper_subclass(
        facade, content.shape, strides=content.stride, dtype=content.dtype, device=content.device
    )
    tensor._content = content
    if requires_grad:
        tensor.requires_grad_()
    if is_parameter:
        tensor._is_param = True
    return tensor
