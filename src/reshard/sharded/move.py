"""Moves: contents in other layouts, whole tensors, and conversions that autograd follows.

A move is a plan of the live engine; without a process group it runs inside this process. A gradient
of a ShardedTensor is a ShardedTensor, with a layout of its own. Ranks that hold the same plain
tensor get the same gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.errors import ArgumentError, CoverageError, OperationError, TensorError, require_type
from reshard.layout.box import Box
from reshard.layout.columns import SizedCache
from reshard.layout.coverage import missing_boxes
from reshard.layout.layout import BoxLayout, Layout
from reshard.live import api
from reshard.live.failure.cleanup import with_ticket
from reshard.live.session.session import Ticket
from reshard.planning.adjoint import unreduced
from reshard.sharded.content import Content, ContentTensor, part_shapes, strides_like, wrap
from reshard.sharded.create import content_for
from reshard.sharded.groups import Group, members
from reshard.sharded.specs import Shard, ShardingSpec, TensorProperties
from reshard.tensors.autograd import Linear, linear
from reshard.tensors.kinds import joined, this_rank
from reshard.tensors.local import box_view, piece_view, whole_on
from reshard.tensors.tensor_move import move_between

Function = Callable[..., Any]


def move_to(content: Content, layout: Layout) -> Content:
    """The same tensor in another layout; shares memory if nothing has to move."""
    parts = _moved_parts(content, layout)
    return Content(layout, content.shape, content.dtype, parts, content.device, content.group)


def move_like(content: Content, target: Content) -> Content:
    """The same tensor in the layout and on the device of another content."""
    parts = tuple(part.to(target.device) for part in _moved_parts(content, target.layout))
    return replace(target, dtype=content.dtype, parts=parts, mesh=None, stated_stride=None)


def reduced(content: Content) -> Content:
    """The same tensor without a pending sum."""
    if content.layout.reduce is None:
        return content
    return move_to(content, unreduced(content.layout))


def whole(content: Content) -> torch.Tensor:
    """The whole tensor, on every rank of the group."""
    full = _moved(content, whole_on(members(content.group)))
    assert full is not None
    return full


def replicated_content(tensor: torch.Tensor, group: Group) -> Content:
    """The content of a plain tensor that is the same on all ranks of a group."""
    layout, part = whole_on(members(group)), tensor.detach()
    shape = tuple(part.shape)
    stride = strides_like(shape, tuple(part.stride()))
    return Content(layout, shape, part.dtype, (part,), part.device, group, stated_stride=stride)


def copy_into(target: Content, source: Content) -> None:
    """Write a tensor into the parts of another one of the same shape."""
    for part, values in zip(target.parts, move_to(source, target.layout).parts, strict=True):
        part.copy_(values)


def _moved_parts(content: Content, layout: Layout) -> tuple[torch.Tensor, ...]:
    local = _moved(content, layout)
    return () if local is None else split_parts(local, layout)


def _moved(content: Content, want: Layout) -> torch.Tensor | None:
    """This rank's local tensor in another layout."""
    have, shape, local = content.layout, content.shape, content.local
    if not dist.is_initialized():
        return _moved_in_process(local, have, want, shape)

    def move(ticket: Ticket) -> torch.Tensor | None:
        one = move_between(have, want, shape, canonical_dtype(content.dtype))
        return one.values(ticket, local, None, content.device)

    return with_ticket(content.group, lambda: {*have.ranks, *want.ranks}, move)


def split_parts(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """A local tensor as parts: views of it, one per box of a layout of boxes."""
    if not isinstance(layout, BoxLayout):
        return (local,)
    boxes = layout.boxes.get(this_rank(), ())
    if len(boxes) == 1:
        return (local.view(boxes[0].shape),)
    flat = torch.split(local.reshape(-1), [box.size for box in boxes])
    return tuple(part.view(box.shape) for part, box in zip(flat, boxes, strict=True))


def local_part(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's local tensor, copied out of the whole one."""
    shape = tuple(tensor.shape)
    local = tensor.new_empty(layout.local_shape(this_rank(), shape))
    for piece in layout.pieces(this_rank(), shape):
        piece_view(local, piece).copy_(box_view(tensor, Box.whole(shape), piece.box))
    return local


def _moved_in_process(
    local: torch.Tensor | None, have: Layout, want: Layout, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """A move without a process group: all elements must be in this process."""
    rank = this_rank()
    if want.holds(rank) is None:
        return None
    pieces = have.pieces(rank, shape)
    boxes = [piece.box for piece in pieces]
    missing = [gap for one in want.pieces(rank, shape) for gap in missing_boxes(one.box, boxes)]
    if missing:
        raise CoverageError(
            f"{missing[0]} of a tensor {list(shape)} is on another rank, and there is no process "
            "group to ask: call torch.distributed.init_process_group first"
        )
    if local is None:
        raise CoverageError(f"this process has no shard of a tensor {list(shape)}: give it one")
    local, full = local.contiguous(), local.new_empty(shape)
    for piece in pieces:
        box_view(full, Box.whole(shape), piece.box).copy_(piece_view(local, piece))
    return local_part(full, want)


def gather(
    tensor: ContentTensor,
    dst: int = 0,
    out: torch.Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """The whole tensor on rank ``dst`` of the group, in ``out`` if given; None on the others.

    Values keep their dtype, unless ``dtype`` or that of ``out`` is another one;
    ``enforce_dtype`` has no effect.
    """
    content = tensor._content
    ranks, problem = members(content.group), None
    rank, shape = ranks[dst if dst in range(len(ranks)) else 0], list(content.shape)
    if dst not in range(len(ranks)):
        problem = f"dst={dst} is no rank of a group of {len(ranks)}: give 0 to {len(ranks) - 1}"
    elif this_rank() == rank and out is not None:
        if not isinstance(out, torch.Tensor):
            problem = f"out is of type {type(out).__name__}: give a tensor"
        elif list(out.shape) != shape:
            sizes = f"out has shape {list(out.shape)} and the tensor {shape}"
            problem = f"{sizes}: give room for the whole tensor"
    if problem is not None:  # raise here and on the ranks that wait for this one
        dtype_name = canonical_dtype(content.dtype)
        move = move_between(content.layout, whole_on((rank,)), content.shape, dtype_name)
        api.raise_on_all_ranks(move.plan, TensorError(problem), content.group)
    full = gather_on(content, [rank])
    if full is None:
        return None
    with torch.no_grad():
        full = full if dtype is None else full.to(dtype)
        return full if out is None else out.copy_(full)


def gather_on(content: Content, ranks: Sequence[int]) -> torch.Tensor | None:
    """The whole tensor on some ranks of its group, in memory of its own; None on the others."""
    with torch.no_grad():
        full = _moved(content, whole_on(tuple(ranks))) if ranks else None
        if full is None or this_rank() not in ranks:
            return None
        memory = full.untyped_storage().data_ptr()
        shared = any(part.untyped_storage().data_ptr() == memory for part in content.parts)
        return full.clone() if shared else full


MAX_TARGET_BYTES, SHARD_BYTES = 16 << 20, 512
"""Bytes of the targets that are kept per group, and about what the metadata of one shard takes."""

Target = tuple[Content, ShardingSpec, tuple[object, ...]]
_targets: WeakKeyDictionary[object, SizedCache[tuple[object, ...], Target]] = WeakKeyDictionary()
"""The contents that specs give this rank, by group: training reshards to them in every step."""


def reshard_target(content: Content, spec: ShardingSpec) -> Content | None:
    """The content that a spec gives this rank, without parts; None if the tensor has it already."""
    require_type(spec, ShardingSpec, "reshard", "give a ShardingSpec")
    group = content.group or dist.group.WORLD or Content  # a key for a process without a group
    targets = _targets.setdefault(group, SizedCache(MAX_TARGET_BYTES))
    # The fields of a spec may be assigned; they are other objects then. The entry keeps the spec
    # and its fields: while they live, no other objects have their ids.
    fields = tuple(vars(spec).values())
    key = (id(spec), *map(id, fields), content.shape, content.dtype)
    entry = targets.get(key)
    if entry is None:
        target = content_for(spec, content.shape, TensorProperties(content.dtype), content.group)
        # Without the group: the value of a weak key must not refer to it.
        entry = replace(target, group=None), spec, fields
        # A field that is a list or a dict may have other values next time.
        if all(isinstance(one, Hashable) for one in fields):
            targets.put(key, entry, SHARD_BYTES * (1 + len(target.stated or ())))
    target = replace(entry[0], group=content.group)
    same = target.is_like(content) and target.shards_metadata == content.shards_metadata
    return None if same else target


class _LinearInPlace(Linear):
    @staticmethod
    def forward(ctx: Any, compute: Function, adjoint: Function, *tensors: torch.Tensor) -> Any:
        ctx.mark_dirty(*tensors)
        return Linear.forward(ctx, compute, adjoint, *tensors)


def to_layout(tensor: ContentTensor, target: Content) -> ContentTensor:
    content = tensor._content
    return linear(lambda: wrap(move_like(content, target)), _gradient_for(content), tensor)


def to_layout_in_place(tensor: ContentTensor, target: Content) -> None:
    """Move the tensor itself to the layout of another content, on the same devices."""
    content, collects = tensor._content, tensor.requires_grad
    if collects and tensor.is_leaf:
        raise OperationError(
            "reshard() changes a tensor in place, and this one is a leaf that collects gradients: "
            "use resharded(), which gives a new tensor, or reshard it before requires_grad_()"
        )
    if target.device.type != content.device.type:
        raise ArgumentError(
            f"reshard() keeps a tensor on its devices, which are {content.device.type}, and the "
            f"spec is for {target.device.type}: move it with to(), or use resharded()"
        )

    def move() -> ContentTensor:
        tensor._content = move_like(content, target)
        return tensor

    if collects and torch.is_grad_enabled():
        _LinearInPlace.apply(move, _gradient_for(content), tensor)  # type: ignore[no-untyped-call]
    else:
        move()


def to_whole(tensor: ContentTensor) -> torch.Tensor:
    """The whole tensor, on every rank of the group; its gradient, the same on all, flows back."""
    content = tensor._content

    def gather() -> torch.Tensor:
        full = whole(content)
        return full.clone() if full is content.local else full

    return linear(gather, _gradient_for(content), tensor)


def replicated(tensor: torch.Tensor, group: Group) -> ContentTensor:
    """The ShardedTensor of a plain tensor that is the same on all ranks of a group."""

    def gather(gradient: torch.Tensor) -> torch.Tensor:
        return to_whole(gradient) if isinstance(gradient, ContentTensor) else gradient

    return linear(lambda: wrap(replicated_content(tensor, group)), gather, tensor)


def _to_parts(tensor: ContentTensor) -> tuple[torch.Tensor, ...]:
    """This rank's parts; one empty tensor if it has none, so that it takes part in backward."""
    content, source = tensor._content, tensor._content.without_parts()

    def take() -> tuple[torch.Tensor, ...]:
        # Views: writing into them writes into the shards.
        views = tuple(part.detach() for part in content.parts)
        return views or (torch.zeros(0, dtype=content.dtype, device=content.device),)

    def join(*gradients: torch.Tensor) -> ContentTensor:
        # Clones: autograd may give the same gradient to others, and accumulate into each.
        return from_parts(source, *(one.clone() for one in gradients))

    return linear(take, join, tensor)


def from_parts(content: Content, *parts: torch.Tensor) -> ContentTensor:
    """The ShardedTensor of a content with these parts of this rank; gradients flow back to them."""
    source = content.without_parts()

    def join() -> ContentTensor:
        has_parts = part_shapes(source.layout, this_rank(), source.shape)
        return wrap(source.with_parts([part.detach() for part in parts]) if has_parts else source)

    return linear(join, lambda one: _to_parts(lay_out_gradient(source, one)), *parts)


def to_local(tensor: ContentTensor) -> torch.Tensor:
    """This rank's only part; its gradient is the part of the gradient."""
    (part,) = _to_parts(tensor) if tensor._content.parts else ()
    return part


def to_move_input(tensor: ContentTensor) -> torch.Tensor | None:
    """This rank's local tensor for a move, with gradients; an empty leaf on a rank without parts,
    so that it takes part in backward."""
    return joined(_to_parts(tensor))


class OwnedShard(Shard):
    """A shard that follows its sharded tensor, and of which assignments change that tensor."""

    __slots__ = ("_number", "_owner", "_seen")

    def __init__(self, owner: ContentTensor, number: int) -> None:
        self._owner, self._number = owner, number
        self._seen: tuple[Content, bool, torch.Tensor] | None = None
        self.metadata = owner._content.shards[number].metadata

    @property
    def tensor(self) -> torch.Tensor:
        """The values: memory of the sharded tensor; gradients flow back."""
        owner, seen = self._owner, self._seen
        content, collects = owner._content, owner.requires_grad and torch.is_grad_enabled()
        if seen is None or seen[0] is not content or seen[1] != collects:
            source = replace(content, parts=_to_parts(owner)) if collects else content
            seen = self._seen = (content, collects, source.shards[self._number].tensor)
        return seen[2]

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        owner, number, content = self._owner, self._number, self._owner._content
        self.check(tensor)
        if tensor.dtype != content.dtype:
            raise ArgumentError(
                f"a shard of {tensor.dtype} is assigned to a ShardedTensor of {content.dtype}: "
                "cast one to the other"
            )
        if len(content.parts) == len(content.shards):
            parts = list(content.parts)
            parts[number] = tensor.detach()
            owner._content = replace(content, parts=tuple(parts))
        else:  # several boxes in one part
            with torch.no_grad():
                content.shards[number].tensor.copy_(tensor)
        if tensor.requires_grad and not owner.requires_grad:
            owner.requires_grad_()


def lay_out_gradients(tensor: ContentTensor) -> None:
    """Lay the gradients of a leaf out like it, so that optimizers need not move them."""
    if tensor._hook is not None:
        tensor._hook.remove()
    source = tensor._content.without_parts()

    def lay_out(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # an operation gave none
            return None
        own = lay_out_gradient(source, gradient)
        expanded = any(0 in part.stride() and part.numel() > 1 for part in own._content.parts)
        # Autograd cannot accumulate into an expanded tensor.
        return own.clone() if expanded else own

    tensor._hook = cast(Any, tensor).register_hook(lay_out)


def _gradient_for(content: Content) -> Function:
    return partial(lay_out_gradient, content.without_parts())


def lay_out_gradient(source: Content, gradient: torch.Tensor) -> ContentTensor:
    """Any gradient in the layout of the tensor that it belongs to."""
    if not isinstance(gradient, ContentTensor):
        gradient = replicated(gradient, source.group)
    # Every addend of a pending sum has the gradient of the sum.
    return to_layout(gradient, replace(source, layout=unreduced(source.layout)))
