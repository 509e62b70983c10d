"""Contents moved to other layouts, whole tensors on chosen ranks, and comparison on all ranks.

A move is a plan of the live engine; without a process group it runs inside this process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
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
from reshard.planning.plans import ONE
from reshard.sharded.content import Content, strides_like
from reshard.sharded.create import content_for
from reshard.sharded.groups import Group, is_outside, members
from reshard.sharded.specs import ShardingSpec, TensorProperties
from reshard.tensors.kinds import this_rank
from reshard.tensors.local import box_view, piece_view, whole_on
from reshard.tensors.tensor_move import move_between


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
        unmoved = one.unmoved(ticket, local)
        if unmoved is not None:
            return unmoved
        return one.call(ticket, local, None, content.device).run().get(ONE)

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


def gather_to(
    content: Content, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """The whole tensor on rank ``dst`` of the group; None on the others."""
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


class MixedOperandError(OperationError, TypeError):
    """A sharded tensor is compared with a tensor that is not sharded."""


def all_agree(
    one: object, other: object, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    """Whether two tensors have equal layouts and ``same`` holds for their parts on all ranks."""
    one, other = getattr(one, "_content", one), getattr(other, "_content", other)
    if not isinstance(one, Content) or not isinstance(other, Content):
        plain = other if isinstance(one, Content) else one
        raise MixedOperandError(
            f"a ShardedTensor is compared with a {type(plain).__name__}: both must be "
            "ShardedTensors; compare full_tensor() with a plain one"
        )
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if is_outside(one.group) or is_outside(other.group):
        return one.group is other.group and one.layout == other.layout  # this rank has no parts
    if not one.is_like(other):
        return False
    agrees, problem = 0, None
    try:
        agrees = int(all(map(same, one.parts, other.parts)))
    except Exception as error:  # a rank without parts has none, and waits for this one
        agrees, problem = -1, error
    if dist.is_initialized():
        everywhere = torch.tensor([agrees], device=one.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=one.group)
        agrees = int(everywhere.item())
    if problem is not None:
        raise problem
    if agrees < 0:
        raise OperationError(
            f"two ShardedTensors {list(one.shape)} of {one.dtype} cannot be compared: another rank "
            "raises why; give what torch can compare"
        )
    return bool(agrees)


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


def check_in_place(content: Content, target: Content, is_leaf: bool) -> None:
    """Refuse to reshard in place what cannot be: a leaf that collects gradients, other devices."""
    if is_leaf:
        raise OperationError(
            "reshard() changes a tensor in place, and this one is a leaf that collects gradients: "
            "use resharded(), which gives a new tensor, or reshard it before requires_grad_()"
        )
    if target.device.type != content.device.type:
        raise ArgumentError(
            f"reshard() keeps a tensor on its devices, which are {content.device.type}, and the "
            f"spec is for {target.device.type}: move it with to(), or use resharded()"
        )
