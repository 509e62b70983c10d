"""`rs.move`: move one tensor from the layout it has to the layout it should have.

out = rs.move(local, have, want, shape=(8192, 4096))            # local tensors in and out
out = rs.move(dtensor, to=want)                                 # this rank's local tensor out
out = rs.move(dtensor, to=(device_mesh, [Shard(1)]))            # DTensor out, on any mesh
out = rs.move(None, have, want, shape=..., dtype="bfloat16")    # on a rank that holds nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast, overload

import torch
import torch.distributed as dist

from reshard.dtypes import ITEMSIZE, canonical_dtype
from reshard.errors import ReshardError, TensorError
from reshard.layout.layout import Layout
from reshard.layout.spec import is_part_of
from reshard.live.failure.cleanup import with_ticket
from reshard.live.session.session import Ticket
from reshard.planning.plans import ONE, RunOptions
from reshard.tensors.kinds import (
    are_ranks_simulated,
    has_layout,
    is_dtensor,
    is_own_sharded_tensor,
    not_compiled,
)
from reshard.tensors.local import (
    Destination,
    check_dense,
    check_matches,
    destination_of,
    local_of,
    spec_of,
)
from reshard.tensors.tensor_move import NO_OPTIONS, USUAL_MEMORY, Grad, TensorMove, move_between
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    OnMesh = tuple[DeviceMesh, Sequence[Placement]]


T = TypeVar("T", bound=torch.Tensor)
Source = Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]
"""Gives the local tensor, or a leaf that stands for it in backward."""

DTYPE_NAMES = {getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)}
DESTINATION_TYPES = (Layout, tuple, list)
DESTINATIONS = "give want=rs.Layout(mesh, words), or to=(device_mesh, [Shard(0), ...])"


class MoveOptions(RunOptions, total=False):
    """The keyword arguments of every form of `rs.move`, besides those of `plan.run`."""

    shape: Sequence[int] | None
    dtype: torch.dtype | str | None
    cast_to: torch.dtype | str | None
    memory: int | str | None
    grad: Grad
    async_op: bool
    forward_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None


@overload
def move(
    tensor: torch.Tensor | None,
    have: Layout | str | None = None,
    want: None = None,
    *,
    to: OnMesh,
    into: DTensor | None = None,
    **options: Unpack[MoveOptions],
) -> DTensor: ...


@overload
def move(
    tensor: torch.Tensor | None,
    have: Layout | str | None = None,
    want: Layout | str | None = None,
    *,
    to: Layout | str | None = None,
    into: T,
    **options: Unpack[MoveOptions],
) -> T: ...


@overload
def move(
    tensor: torch.Tensor | None,
    have: Layout | str | None = None,
    want: Layout | str | None = None,
    *,
    to: Layout | str | None = None,
    into: None = None,
    **options: Unpack[MoveOptions],
) -> torch.Tensor | None: ...


@not_compiled
def move(
    tensor: Any,
    have: Layout | str | None = None,
    want: Layout | str | None = None,
    *,
    to: Layout | str | OnMesh | None = None,
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

    ``have`` and ``shape`` describe the whole of a plain local tensor; DTensors and ShardedTensors
    know both, and need ``have`` only if ranks outside their mesh have replicas (FSDP2 over
    tensor parallelism). ``want`` (or ``to``) is the destination: a layout, for local tensors out,
    or a mesh and placements, for a DTensor. ``cast_to`` changes the dtype on the way. Where nothing
    has to move the result shares the source's memory. Gradients flow back: see the docs.
    ``async_op``, ``forward_dtype`` and ``backward_dtype`` are those of ``DTensor.redistribute``.
    ``options`` are those of `plan.run`, such as ``timeout``: 60 s without a heartbeat.
    """
    if (
        # A DTensor gets other placements on its own mesh, and nothing else is asked for.
        (type(to) is tuple and _dtensors is not None and type(tensor) is _dtensors.DTensor)
        and (len(to) == 2 and to[0] is tensor.device_mesh and async_op is False and grad == "sum")
        and (have is None and want is None and into is None and group is None and cast_to is None)
        and (shape is None and dtype is None and device is None and memory is None and not options)
        and (forward_dtype is None and backward_dtype is None and not num_modes())
    ):
        ranks = partial(_named_ranks, (tensor,))
        return with_ticket(None, ranks, _dtensors.repeat, tensor, to, _move_by_default)
    source: Any = _read(have) if isinstance(have, str) else have
    destination: Any = _read(want) if isinstance(want, str) else want
    target: Any = _read(to) if isinstance(to, str) else to
    request = Request(
        tensor, target, source, destination, shape, dtype, cast_to, device, memory, into,
        forward_dtype, backward_dtype, grad, async_op, options,
    )  # fmt: skip
    if are_ranks_simulated():
        raise TensorError(
            "LocalTensorMode runs all ranks in this process, and a move is between processes: run "
            "it in a job of several ranks, or use DTensor.redistribute"
        )
    on_own_mesh = have is None and is_dtensor(tensor) and request.is_on_own_mesh()
    if have is None and is_dtensor(tensor):
        placements = None if on_own_mesh else _redistribution().expressible(tensor)
        if placements is not None:
            # In a call of its own: a layout cannot express the placements of the tensor.
            to = (tensor.device_mesh, placements)
            request = request._replace(tensor=move(tensor, to=to, group=group, **options))
    ranks = partial(_named_ranks, (tensor, source, destination, target))
    return with_ticket(group, ranks, _move, request, on_own_mesh)


def _move_by_default(ticket: Ticket, tensor: DTensor, to: OnMesh) -> Any:
    """Move a DTensor on its mesh, with nothing else asked for."""
    return _move(ticket, Request(tensor, to), True)


def _named_ranks(arguments: Iterable[Any]) -> set[int]:
    """The ranks that the arguments of a move name, as far as they can be understood."""
    found: set[int] = set()
    for one in arguments:
        layout = one
        if is_dtensor(one):
            found |= set(one.device_mesh.mesh.flatten().tolist())
        elif has_layout(one):
            layout = spec_of(cast(torch.Tensor, one)).layout
        elif isinstance(one, tuple | list) and one and hasattr(one[0], "mesh"):
            found |= set(one[0].mesh.flatten().tolist())
        if isinstance(layout, Layout):
            found |= {rank for rank in layout.ranks if layout.holds(rank) is not None}
    return found


def _read(text: str) -> Any:
    """The layout that a text describes; a wrong text is left, for all ranks to hear of at once."""
    try:
        return Layout.parse(text)
    except ReshardError:
        return text


class Request(NamedTuple):
    """The arguments of one `rs.move`."""

    tensor: Any
    to: Any
    have: Layout | None = None
    want: Layout | None = None
    shape: Sequence[int] | None = None
    dtype: object = None
    cast_to: object = None
    device: torch.device | str | None = None
    memory: int | str | None = None
    into: torch.Tensor | None = None
    forward_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None
    grad: Grad = "sum"
    async_op: bool = False
    options: Mapping[str, Any] = NO_OPTIONS

    @property
    def target(self) -> Any:
        return self.want if self.to is None else self.to

    def is_on_own_mesh(self) -> bool:
        """Whether a DTensor gets other placements on its own mesh."""
        target = self.target
        if not isinstance(target, tuple | list) or len(target) != 2:
            return False
        # Comparing takes longer than looking whether it is the same one.
        mesh = self.tensor.device_mesh
        return target[0] is mesh or bool(target[0] == mesh)

    def check(self) -> Any:
        """The destination; refuses one that cannot be understood, and such settings."""
        target = self.target
        if target is None or (self.want is not None and self.to is not None):
            raise TensorError("a move needs one destination: give want=layout, or to=")
        if not isinstance(target, DESTINATION_TYPES):
            if isinstance(target, str):
                Layout.parse(target)  # which says what is wrong with it
            raise TensorError(f"{_show(target)} is no destination: {DESTINATIONS}")
        if self.grad not in ("sum", "replicated"):
            raise TensorError(f'grad="{self.grad}": it is "sum" or "replicated"')
        if self.async_op is not False and self.async_op is not True:
            raise TensorError(f"async_op={_show(self.async_op)}: give True or False")
        return target

    def check_dtypes(self, is_on_own_mesh: bool) -> None:
        """Refuse what is no dtype, and what only a DTensor on its own mesh has."""
        for name in ("forward_dtype", "backward_dtype"):
            kind = getattr(self, name)
            if kind is None:
                continue
            if not isinstance(kind, torch.dtype):
                raise TensorError(f"{name}={_show(kind)}: give a dtype, as torch.bfloat16")
            if not is_on_own_mesh:
                raise TensorError(
                    f"{name}={kind} is for a DTensor that gets other placements on its own mesh: "
                    "give cast_to= for the dtype of the result"
                )
        if self.forward_dtype is not None and self.cast_to is not None:
            raise TensorError(
                "cast_to= and forward_dtype= both set the dtype of the result: give one of them"
            )

    @property
    def cast(self) -> str | None:
        """The dtype of the result, if it is not that of the source."""
        return None if self.cast_to is None else canonical_dtype(self.cast_to)


num_modes = torch._C._len_torch_dispatch_stack

_dtensors: Any = None
"""The module for DTensors, once it was needed: it imports torch.distributed.tensor, which takes a
second."""


def _redistribution() -> Any:
    """The module for DTensors."""
    global _dtensors
    if _dtensors is None:
        from reshard.tensors.dtensor import redistribution

        _dtensors = redistribution
    return _dtensors


def _move(ticket: Ticket, request: Request, on_own_mesh: bool) -> Any:
    """Move; ``on_own_mesh`` is whether a DTensor gets other placements on its own mesh."""
    tensor = request.tensor
    target = request.check()
    to_layout = isinstance(target, Layout)
    memory = USUAL_MEMORY if request.memory is None else parse_bytes(request.memory)
    casts = request.forward_dtype or request.backward_dtype
    if casts is not None:
        request.check_dtypes(on_own_mesh)
    if on_own_mesh and (casts or _redistribution().is_special(tensor, target)):
        return _redistribute(ticket, request, memory)
    source, have, shape, dtype = _source(request)
    want = target if to_layout else _layout_on_mesh(target, shape)
    dtype = DTYPE_NAMES.get(dtype) or canonical_dtype(dtype)
    one = move_between(have, want, shape, dtype, request.cast, memory)
    destination = None if request.into is None else _destination(request.into, one)
    into = None if destination is None else destination.local
    if to_layout:
        moved = one.run(ticket, *source(), into, request.device, request.grad, request.options)
    else:
        moved = _move_to_mesh(ticket, request, source, one, into)
    if destination is None:
        return moved
    destination.complete()
    return request.into


def _redistribute(ticket: Ticket, request: Request, memory: int) -> Any:
    """Give a DTensor placements on its mesh, or casts, that a layout alone does not express."""
    module, tensor = _redistribution(), request.tensor
    _check_shape(tuple(tensor.shape), request.shape)
    settings = module.Settings(memory, ticket.group, request.options, request.backward_dtype)
    how = module.redistribution(
        tensor, request.target, settings, request.cast, request.forward_dtype
    )
    if request.into is None:
        return module.redistribute(ticket, tensor, how)
    if not how.is_plain:
        raise TensorError(
            f"to {list(how.target[1])} the result is computed from what was moved: leave out into="
        )
    destination = _destination(request.into, how.move)
    module.redistribute(ticket, tensor, how, destination.local)
    destination.complete()
    return request.into


def _move_to_mesh(
    ticket: Ticket, request: Request, source: Source, one: TensorMove, into: torch.Tensor | None
) -> Any:
    """A DTensor on a mesh: by DTensor's rule for gradients if it is the tensor's own mesh."""
    module, tensor, target = _redistribution(), request.tensor, request.target
    how = module.Redistribution(
        one, target, module.Settings(one.memory, ticket.group, request.options)
    )
    if is_dtensor(tensor) and tensor.device_mesh == target[0]:
        moved = module.redistribute(ticket, tensor, how, into)
        # A repeated move has no have=, which may name ranks outside the mesh.
        if request.have is None and request.into is None and not moved.requires_grad:
            module.remember(tensor, how, moved)
        return moved
    device = request.device or target[0].device_type
    # Replicas of a DTensor have one gradient.
    local = one.run(ticket, *source(), into, device, "replicated", request.options)
    return module.wrap_moved(local, how, tensor.stride() if is_dtensor(tensor) else None)


def _layout_on_mesh(target: OnMesh, shape: tuple[int, ...]) -> Layout:
    from torch.distributed.device_mesh import DeviceMesh

    if len(target) != 2 or not isinstance(target[0], DeviceMesh):
        raise TensorError(f"{_show(target)} is no destination: {DESTINATIONS}")
    layout: Layout = _redistribution().layout_from(target[0], target[1], shape)
    return layout


def _destination(into: torch.Tensor, one: TensorMove) -> Destination:
    if not isinstance(into, torch.Tensor):
        raise TensorError(f"into= is {_show(into)}: give a tensor")
    check_matches(into, one.plan.want[ONE], ONE, is_source=False)
    return destination_of(into)


def _source(request: Request) -> tuple[Source, Layout, tuple[int, ...], torch.dtype | str]:
    """The local tensor, its layout, the shape of the whole tensor, and its dtype."""
    tensor, have, shape = request.tensor, request.have, request.shape
    if have is not None and not isinstance(have, Layout):
        if isinstance(have, str):
            Layout.parse(have)  # which says what is wrong with it
        raise TensorError(f"have={_show(have)} is no layout: write rs.Layout(mesh, words)")
    if has_layout(tensor):
        spec = spec_of(cast(torch.Tensor, tensor))
        _check_shape(spec.shape, shape)
        if have is not None and not is_part_of(spec.layout, have, spec.shape):
            raise TensorError(
                f'have="{have}" on mesh {have.mesh} and the tensor itself says "{spec.layout}" on '
                f"mesh {spec.layout.mesh}: leave out have=, or name with it replicas on other ranks"
            )
        parts: Source = lambda: (local_of(tensor), None)  # noqa: E731
        if is_own_sharded_tensor(tensor):
            parts = tensor._for_move
        elif is_dtensor(tensor) and tensor.requires_grad and torch.is_grad_enabled():
            parts = lambda: (_redistribution().differentiable_local(tensor), None)  # noqa: E731
        return parts, have or spec.layout, spec.shape, spec.dtype
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TensorError(f"a {type(tensor).__name__} cannot be moved: give a tensor or None")
    if have is None or shape is None:
        missing = ["have="] * (have is None) + ["shape="] * (shape is None)
        local = "" if tensor is None else f", of which this rank has {list(tensor.shape)}"
        raise TensorError(
            f"a plain tensor comes without {' and '.join(missing)}: have= is its layout, shape= "
            f"that of the whole tensor{local}"
        )
    sizes = _sizes(shape)
    if tensor is None:
        if request.dtype is None:
            raise TensorError("on a rank without a local tensor a move needs dtype=")
        return lambda: (None, None), have, sizes, canonical_dtype(request.dtype)
    check_dense(tensor)
    return lambda: (tensor, None), have, sizes, tensor.dtype


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
            f"shape={_show(shape)}: give the sizes of the whole tensor, as (8192, 4096)"
        ) from None


def _show(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


@not_compiled
def backward(moved: torch.Tensor | None) -> None:
    """Take part in the backward of a move whose result this rank does not use.

    A rank that has a part of the source and none of the result, or the other way round, has no loss
    of its own, but others wait for its part of the gradients. A rank that had no part in the move
    got None, and does nothing here either.
    """
    if moved is None:
        return
    if not moved.requires_grad:
        raise TensorError("this result carries no gradients: nothing that was moved requires them")
    torch.autograd.backward(moved, torch.zeros_like(moved))
