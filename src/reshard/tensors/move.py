"""Move one tensor from the layout it has to the layout it should have.

out = rs.move(local, have, want, shape=(8192, 4096))            # local tensors in and out
out = rs.move(dtensor, to=want)                                 # this rank's local tensor out
out = rs.move(dtensor, to=(device_mesh, [Shard(1)]))            # DTensor out, on any mesh
out = rs.move(None, have, want, shape=..., dtype="bfloat16")    # on a rank that holds nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
from reshard.errors import TensorError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec, is_part_of
from reshard.live.failure.cleanup import with_ticket
from reshard.live.session.session import Ticket
from reshard.planning.plans import DEFAULT_MEMORY
from reshard.tensors.compiling import outside_graphs
from reshard.tensors.describe import spec_of
from reshard.tensors.fitting import NOWHERE
from reshard.tensors.kinds import is_dtensor, is_laid_out, knows_layout, ready
from reshard.tensors.motion import Grad, Motion
from reshard.tensors.reading import local_of
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    Target = Layout | tuple[DeviceMesh, Sequence[Placement]]
    Source = Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]

__all__ = ["backward", "move"]

DESTINATIONS = "give want=rs.Layout(mesh, words), or to=(device_mesh, [Shard(0), ...])"


@outside_graphs
def move(
    tensor: torch.Tensor | None,
    have: Layout | None = None,
    want: Layout | None = None,
    *,
    to: Target | None = None,
    shape: Sequence[int] | None = None,
    dtype: object = None,
    cast_to: object = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    memory: int | str | None = None,
    into: torch.Tensor | None = None,
    grad: Grad = "sum",
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Move a tensor; every rank of the two layouts calls it, and gets its part or None.

    ``have`` and ``shape`` say what a plain local tensor is a part of; DTensors and ShardedTensors
    say so themselves, and need ``have`` only if ranks outside their mesh have replicas (FSDP2 over
    tensor parallelism). ``want`` (or ``to``) is where it should go: a layout, for local tensors
    out, or a mesh and placements, for a DTensor. ``cast_to`` changes the dtype on the way. Where
    nothing has to move the result shares the source's memory. Gradients flow back: see the docs.
    ``async_op``, ``forward_dtype`` and ``backward_dtype`` are those of ``DTensor.redistribute``.
    Further options: ``timeout`` (60 s without a sign of life), ``deadline``, ``transport``,
    ``check``.
    """
    kinds = Kinds(cast_to, forward_dtype, backward_dtype, async_op)
    target = want if to is None else to
    if is_dtensor(tensor) and have is None and not _is_on_mesh_of(tensor, target):
        tensor = _settled(tensor, group, options)
    given = (tensor, have, want, to, shape, dtype, kinds, device, memory, into, grad, options)
    return with_ticket(
        group,
        lambda: _ranks_of(tensor, have, want, to),
        _move,
        *given,
    )


class Kinds(NamedTuple):
    """What is asked for of dtypes, and whether the result may still be on its way."""

    cast_to: object
    forward: torch.dtype | None
    backward: torch.dtype | None
    async_op: bool

    def check(self, is_redistribution: bool) -> None:
        """Refuse what is no dtype, and what only a DTensor on its own mesh has."""
        for name, kind in (("forward_dtype", self.forward), ("backward_dtype", self.backward)):
            if kind is None:
                continue
            if not isinstance(kind, torch.dtype):
                raise TensorError(f"{name}={_quoted(kind)}: give a dtype, as torch.bfloat16")
            if not is_redistribution:
                raise TensorError(
                    f"{name}={kind} is for a DTensor that gets other placements on its own mesh: "
                    "give cast_to= for the dtype of the result"
                )
        if not isinstance(self.async_op, bool):
            raise TensorError(f"async_op={_quoted(self.async_op)}: give True or False")
        if self.forward is not None and self.cast_to is not None:
            raise TensorError("cast_to= and forward_dtype= both say a dtype: give one of them")

    @property
    def is_usual(self) -> bool:
        """Whether nothing is asked for."""
        return self.cast_to is None and self.forward is None and self.backward is None


def _is_on_mesh_of(tensor: DTensor, target: object) -> bool:
    if not isinstance(target, tuple | list) or not target:
        return False
    # Comparing takes longer than asking for the same one.
    return target[0] is tensor.device_mesh or bool(target[0] == tensor.device_mesh)


def _settled(tensor: DTensor, group: dist.ProcessGroup | None, options: dict[str, Any]) -> Any:
    """A DTensor with placements that a layout says, in a call of its own where it has others."""
    from reshard.tensors.redistributing import settled

    placements = settled(tensor)
    if placements is None:
        return tensor
    return move(tensor, to=(tensor.device_mesh, placements), group=group, **options)


def _move(
    ticket: Ticket,
    tensor: torch.Tensor | None,
    have: Layout | None,
    want: Layout | None,
    to: Target | None,
    shape: Sequence[int] | None,
    dtype: object,
    kinds: Kinds,
    device: torch.device | str | None,
    memory: int | str | None,
    into: torch.Tensor | None,
    grad: Grad,
    options: dict[str, Any],
) -> Any:
    group = ticket.group
    target = want if to is None else to
    if target is None or (want is not None and to is not None):
        raise TensorError("a move needs one destination: give want=layout, or to=")
    if not isinstance(target, Layout | tuple | list):
        raise TensorError(f"{_quoted(target)} is no destination: {DESTINATIONS}")
    if grad not in ("sum", "replicated"):
        raise TensorError(f'grad="{grad}": it is "sum" or "replicated"')
    usual = to is not None and have is None and shape is None and dtype is None and into is None
    usual = usual and kinds.is_usual and device is None and group is None and memory is None
    if usual and not options:
        quick = _repeated(ticket, tensor, target)
        if quick is not None:
            return quick
    if not isinstance(memory, int | str | None):
        parse_bytes(memory)  # says what is wrong with it
    on_mesh = have is None and is_dtensor(tensor) and _is_on_mesh_of(tensor, target)
    kinds.check(on_mesh)
    if on_mesh and (kinds.forward or kinds.backward or _is_special(tensor, target)):
        return _redistributed(ticket, tensor, target, shape, kinds, memory, into, options)
    cast_dtype = None if kinds.cast_to is None else canonical_dtype(kinds.cast_to)
    source, have, sizes, kind = _source(tensor, have, shape, dtype)
    if isinstance(target, Layout):
        motion = _motion(have, target, sizes, kind, cast_dtype, memory, grad)
    else:
        # Replicas of a DTensor have one gradient.
        layout = _layout(target, sizes)
        motion = _motion(have, layout, sizes, kind, cast_dtype, memory, "replicated")
    if options or group is not None:
        motion = replace(motion, group=group, options=options)
    place = NOWHERE if into is None else motion.place(into)
    if isinstance(target, Layout):
        moved = motion.run(ticket, *source(), place.local, device)
    else:
        moved = _as_dtensor(ticket, tensor, source, motion, target, place.local, device)
    if into is None:
        return moved
    place.fill()
    return into


def _is_special(tensor: Any, target: Any) -> bool:
    from reshard.tensors.redistributing import is_special

    return len(target) == 2 and is_special(tensor, target[1])


def _redistributed(
    ticket: Ticket,
    tensor: Any,
    target: Any,
    shape: Sequence[int] | None,
    kinds: Kinds,
    memory: int | str | None,
    into: torch.Tensor | None,
    options: dict[str, Any],
) -> Any:
    """A DTensor on the same mesh with placements, or casts, that need more than a layout says."""
    from reshard.tensors.redistributing import Settings, redistribute, redistribution

    _check_shape(tuple(tensor.shape), shape)
    cap = parse_bytes(DEFAULT_MEMORY if memory is None else memory)
    settings = Settings(cap, ticket.group, options, kinds.backward)
    cast_dtype = None if kinds.cast_to is None else canonical_dtype(kinds.cast_to)
    how = redistribution(tensor, target, settings, cast_dtype, kinds.forward)
    if into is None:
        return redistribute(ticket, tensor, how)
    how.check_into()
    place = how.motion.place(into)
    redistribute(ticket, tensor, how, place.local)
    place.fill()
    return into


def _ranks_of(*given: Any) -> set[int]:
    """The ranks that the arguments of a move name, as far as they can be understood."""
    found: set[int] = set()
    for one in given:
        if isinstance(one, Layout):
            found |= {rank for rank in one.ranks if one.holds(rank) is not None}
        elif is_dtensor(one):
            found |= set(map(int, one.device_mesh.mesh.flatten().tolist()))
        elif knows_layout(one):
            layout = spec_of(one).layout
            found |= {rank for rank in layout.ranks if layout.holds(rank) is not None}
        elif isinstance(one, tuple | list) and one and hasattr(one[0], "mesh"):
            found |= set(map(int, one[0].mesh.flatten().tolist()))
    return found


def _repeated(ticket: Ticket, tensor: torch.Tensor | None, target: Target) -> DTensor | None:
    """The result of a move of a DTensor that was made before, without gradients."""
    if not is_dtensor(tensor) or isinstance(target, Layout):
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return None
    from reshard.tensors.repeated import repeated

    return repeated(ticket, tensor, target)


@outside_graphs
def backward(moved: Any) -> None:
    """Take part in the backward of a move whose result this rank does not use.

    A rank that brought a part of the tensor and got none, or the other way round, has no loss of
    its own, but others wait for its part of the gradients. A rank that had no part in the move got
    None, and does nothing here either.
    """
    if moved is None:
        return
    if not moved.requires_grad:
        raise TensorError("this result carries no gradients: nothing that was moved requires them")
    torch.autograd.backward(moved, torch.zeros_like(moved))


@lru_cache(maxsize=4096, typed=True)
def _motion(
    have: Layout,
    want: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype | str,
    cast_to: str | None,
    memory: int | str | None,
    grad: Grad,
) -> Motion:
    """The move itself; kept as its plan is, because training makes the same in every step."""
    kind = canonical_dtype(dtype)
    cast = kind if cast_to is None else cast_to
    cap = parse_bytes(DEFAULT_MEMORY if memory is None else memory)
    return Motion(have, want, shape, kind, cast, cap, grad)


def _source(
    tensor: torch.Tensor | None, have: Layout | None, shape: Sequence[int] | None, dtype: object
) -> tuple[Source, Layout, tuple[int, ...], torch.dtype | str]:
    """The local tensor, or a leaf in its place, when asked for, and what it is a part of."""
    if not isinstance(have, Layout | None):
        raise TensorError(f"have={_quoted(have)} is no layout: write rs.Layout(mesh, words)")
    if knows_layout(tensor):
        spec = spec_of(cast(torch.Tensor, tensor))
        _check_known(spec, have, shape)
        return _parts_with_grad(tensor), have or spec.layout, spec.shape, spec.dtype
    if have is None or shape is None:
        raise TensorError("a plain tensor needs have=layout and the whole tensor's shape=")
    sizes = _sizes(shape)
    if tensor is None:
        if dtype is None:
            raise TensorError("on a rank without a local tensor a move needs dtype=")
        return lambda: (None, None), have, sizes, canonical_dtype(dtype)
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"a {type(tensor).__name__} cannot be moved: give a tensor or None")
    return lambda: (tensor, None), have, sizes, tensor.dtype


def _check_known(spec: TensorSpec, have: Layout | None, shape: Sequence[int] | None) -> None:
    """Refuse a description that differs from what the tensor says itself."""
    _check_shape(spec.shape, shape)
    if have is not None and not is_part_of(spec.layout, have, spec.shape):
        raise TensorError(
            f'have="{have}" on mesh {have.mesh} and the tensor itself says "{spec.layout}" on mesh '
            f"{spec.layout.mesh}: leave out have=, or name with it replicas on other ranks"
        )


def _check_shape(known: tuple[int, ...], shape: Sequence[int] | None) -> None:
    if shape is not None and _sizes(shape) != known:
        raise TensorError(
            f"shape={_sizes(shape)} and the tensor itself says {known}: leave out shape="
        )


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        if isinstance(shape, str):
            raise TypeError
        return tuple(map(index, shape))
    except TypeError:
        raise TensorError(
            f"shape={_quoted(shape)}: give the sizes of the whole tensor, as (8192, 4096)"
        ) from None


def _quoted(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def _parts_with_grad(tensor: Any) -> Source:
    """The parts of a tensor that knows its layout such that gradients find their way back."""
    if is_laid_out(tensor):
        return tensor._for_move
    return lambda: (_local_with_grad(tensor), None)


def _local_with_grad(tensor: Any) -> torch.Tensor | None:
    if not is_dtensor(tensor) or not (tensor.requires_grad and torch.is_grad_enabled()):
        return local_of(tensor)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    placements = [_gradient_of(placement) for placement in tensor.placements]
    local: torch.Tensor = ready(tensor.to_local(grad_placements=placements))
    # Where there is nothing to hold its shape may differ from the layout's.
    return local if local.numel() else local.reshape(_empty_shape(tensor))


def _empty_shape(tensor: DTensor) -> tuple[int, ...]:
    local = local_of(tensor)
    return (0,) if local is None else tuple(local.shape)


def _gradient_of(placement: Placement) -> Placement:
    """The gradient of a sum is the same for every addend."""
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def _layout(target: tuple[DeviceMesh, Sequence[Placement]], shape: tuple[int, ...]) -> Layout:
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.tensors.placements import layout_from

    if len(target) != 2 or not isinstance(target[0], DeviceMesh):
        raise TensorError(f"{_quoted(target)} is no destination: {DESTINATIONS}")
    return layout_from(target[0], target[1], shape)


def _as_dtensor(
    ticket: Ticket,
    tensor: torch.Tensor | None,
    source: Source,
    motion: Motion,
    target: tuple[DeviceMesh, Sequence[Placement]],
    into: torch.Tensor | None,
    device: torch.device | str | None,
) -> Any:
    """Move to a mesh: by DTensor's rule for gradients on the same one, as local tensors else."""
    from reshard.tensors.redistributing import Redistribution, redistribute, wrapped
    from reshard.tensors.repeated import remember

    if is_dtensor(tensor) and tensor.device_mesh == target[0]:
        moved = redistribute(ticket, tensor, Redistribution(motion, target), into)
        if into is None and not moved.requires_grad:
            remember(tensor, target, motion, moved)
        return moved
    moved = motion.run(ticket, *source(), into, device or target[0].device_type)
    return wrapped(moved, motion, target, tensor.stride() if is_dtensor(tensor) else None)
