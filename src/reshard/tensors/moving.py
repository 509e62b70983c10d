"""`rs.move`: move one tensor from the layout it has to the layout it should have.

out = rs.move(local, have, want, shape=(8192, 4096))            # local tensors in and out
out = rs.move(dtensor, to=want)                                 # this rank's local tensor out
out = rs.move(dtensor, to=(device_mesh, [Shard(1)]))            # DTensor out, on any mesh
out = rs.move(None, have, want, shape=..., dtype="bfloat16")    # on a rank that holds nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, overload

import torch
import torch.distributed as dist

from reshard.dtypes import canonical_dtype
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
    is_sharded_tensor,
    not_compiled,
)
from reshard.tensors.local import (
    check_dense,
    check_matches,
    destination_of,
    layout_of,
    local_of,
    spec_of,
)
from reshard.tensors.tensor_move import (
    NO_OPTIONS,
    USUAL_MEMORY,
    Grad,
    TensorMove,
    holders,
    move_between,
)
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    OnMesh = tuple[DeviceMesh, Sequence[Placement]]


T = TypeVar("T", bound=torch.Tensor)
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
        and (len(to) == 2 and to[0] is tensor._spec.mesh and async_op is False and grad == "sum")
        and (have is None and want is None and into is None and group is None and cast_to is None)
        and (shape is None and dtype is None and device is None and memory is None and not options)
        and (forward_dtype is None and backward_dtype is None and not num_modes())
    ):
        return with_ticket(None, _named_ranks, _repeat_or_move, tensor, to)
    request = Request(
        tensor, to, have, want, shape, dtype, cast_to, device, memory, into,
        forward_dtype, backward_dtype, grad, async_op, options,
    )  # fmt: skip
    if are_ranks_simulated():
        raise TensorError(
            "LocalTensorMode runs all ranks in this process, and a move is between processes: run "
            "it in a job of several ranks, or use DTensor.redistribute"
        )
    if have is None and is_dtensor(tensor) and not request.is_on_own_mesh():
        placements = _redistribution().expressible(tensor)
        if placements is not None:
            # In a call of its own: a layout cannot express the placements of the tensor.
            on_mesh = (tensor.device_mesh, placements)
            request = request._replace(tensor=move(tensor, to=on_mesh, group=group, **options))
    return with_ticket(group, _ranks_of, _move, request)


def _ranks_of(request: Request) -> set[int]:
    return _named_ranks(request.tensor, request.have, request.want, request.to)


def _named_ranks(*arguments: Any) -> set[int]:
    """The ranks that the arguments of a move name, as far as they can be understood."""
    ranks: set[int] = set()
    for argument in arguments:
        layout = argument
        if is_dtensor(argument):
            ranks |= set(argument.device_mesh.mesh.flatten().tolist())
        elif isinstance(argument, tuple | list) and argument and hasattr(argument[0], "mesh"):
            ranks |= set(argument[0].mesh.flatten().tolist())
        elif has_layout(argument):
            layout = layout_of(argument)
        elif isinstance(argument, str):
            with suppress(ReshardError):
                layout = Layout.parse(argument)
        if isinstance(layout, Layout):
            ranks |= holders(layout)
    return ranks


class Request(NamedTuple):
    """The arguments of one `rs.move`."""

    tensor: Any
    to: Any
    have: Layout | str | None = None
    want: Layout | str | None = None
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
        is_pair = isinstance(target, tuple | list) and len(target) == 2
        if not is_pair or self.have is not None or not is_dtensor(self.tensor):
            return False
        # Comparing takes longer than looking whether it is the same one.
        mesh = self.tensor.device_mesh
        return target[0] is mesh or bool(target[0] == mesh)

    def check(self) -> Any:
        """The destination; refuses one that cannot be understood, and settings that do not work."""
        target = self.target
        if target is None or (self.want is not None and self.to is not None):
            raise TensorError("a move needs one destination: give want=layout, or to=")
        if isinstance(target, str):
            target = Layout.parse(target)
        if not isinstance(target, Layout | tuple | list):
            raise TensorError(f"{_show(target)} is no destination: {DESTINATIONS}")
        if self.grad not in ("sum", "replicated"):
            raise TensorError(f'grad="{self.grad}": it is "sum" or "replicated"')
        if self.async_op is not False and self.async_op is not True:
            raise TensorError(f"async_op={_show(self.async_op)}: give True or False")
        casts = ("forward_dtype", self.forward_dtype), ("backward_dtype", self.backward_dtype)
        for name, kind in casts:
            if kind is not None and not isinstance(kind, torch.dtype):
                raise TensorError(f"{name}={_show(kind)}: give a dtype, as torch.bfloat16")
            if kind is not None and not self.is_on_own_mesh():
                raise TensorError(
                    f"{name}={kind} is for a DTensor that gets other placements on its own mesh: "
                    "give cast_to= for the dtype of the result"
                )
        if self.forward_dtype is not None and self.cast_to is not None:
            raise TensorError(
                "cast_to= and forward_dtype= both set the dtype of the result: give one of them"
            )
        return target


num_modes = torch._C._len_torch_dispatch_stack

_dtensors: Any = None


def _redistribution() -> Any:
    """The module for DTensors, imported when needed: torch.distributed.tensor takes a second."""
    global _dtensors
    if _dtensors is None:
        from reshard.tensors.dtensor import redistribution

        _dtensors = redistribution
    return _dtensors


def _repeat_or_move(ticket: Ticket, tensor: DTensor, to: OnMesh) -> Any:
    """Move a DTensor on its mesh, with nothing else asked for."""
    moved = _dtensors.repeat(ticket, tensor, to)
    return _move(ticket, Request(tensor, to)) if moved is None else moved


def _move(ticket: Ticket, request: Request) -> Any:
    tensor, into = request.tensor, request.into
    one, how = _prepare(ticket, request, request.check())
    memory, complete = None, None
    if into is not None:
        if not isinstance(into, torch.Tensor):
            raise TensorError(f"into= is {_show(into)}: give a tensor")
        check_matches(into, one.plan.want[ONE], ONE, is_source=False)
        memory, complete = destination_of(into)
    if how is None:
        source = _local_source(tensor)
        moved = one.run(ticket, source, memory, request.device, request.grad, request.options)
    elif is_dtensor(tensor) and tensor.device_mesh == how.mesh:
        moved = _dtensors.redistribute(ticket, tensor, how, memory)
        if request.have is None and into is None and not moved.requires_grad:
            _dtensors.remember(tensor, request.target[1], how, moved)
    else:
        source, device = _local_source(tensor), request.device or how.mesh.device_type
        # Replicas of a DTensor have one gradient.
        local = one.run(ticket, source, memory, device, "replicated", request.options)
        moved = _dtensors.wrap_moved(local, how, tensor.stride() if is_dtensor(tensor) else None)
    if complete is None:
        return moved
    complete()
    return into


def _prepare(ticket: Ticket, request: Request, target: Any) -> tuple[TensorMove, Any]:
    """The move between layouts, and the `Redistribution` that has it if a DTensor comes out."""
    memory = USUAL_MEMORY if request.memory is None else parse_bytes(request.memory)
    cast = None if request.cast_to is None else canonical_dtype(request.cast_to)
    if isinstance(target, Layout):
        have, shape, dtype = _source(request)
        return move_between(have, target, shape, dtype, cast, memory), None
    module, tensor = _redistribution(), request.tensor
    if len(target) != 2 or not isinstance(target[0], module.DeviceMesh):
        raise TensorError(f"{_show(target)} is no destination: {DESTINATIONS}")
    mesh, placements = target
    settings = module.Settings(memory, ticket.group, request.options, request.backward_dtype)
    if not request.is_on_own_mesh():
        have, shape, dtype = _source(request)
        placed = module.placed_on(mesh, placements, shape)
        one = move_between(have, placed.layout(shape), shape, dtype, cast, memory)
        return one, module.Redistribution(one, mesh, placed, settings)
    _check_shape(tuple(tensor.shape), request.shape)
    placed = module.placed_on(mesh, placements, tensor.shape)
    how = module.redistribution(tensor, mesh, placed, settings, cast, request.forward_dtype)
    if request.into is not None and not how.is_plain:
        text = f"to {list(placed.placements)} the result is computed from what was moved"
        raise TensorError(f"{text}: leave out into=")
    return how.move, how


def _source(request: Request) -> tuple[Layout, tuple[int, ...], str]:
    """The layout of the source, the shape of the whole tensor, and its dtype."""
    tensor, shape = request.tensor, request.shape
    have = Layout.parse(request.have) if isinstance(request.have, str) else request.have
    if have is not None and not isinstance(have, Layout):
        raise TensorError(f"have={_show(have)} is no layout: write rs.Layout(mesh, words)")
    if has_layout(tensor):
        spec = spec_of(tensor)
        _check_shape(spec.shape, shape)
        if have is not None and not is_part_of(spec.layout, have, spec.shape):
            raise TensorError(
                f'have="{have}" on mesh {have.mesh} and the tensor itself says "{spec.layout}" on '
                f"mesh {spec.layout.mesh}: leave out have=, or name with it replicas on other ranks"
            )
        return have or spec.layout, spec.shape, spec.dtype
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
    if tensor is not None:
        check_dense(tensor)
    elif request.dtype is None:
        raise TensorError("on a rank without a local tensor a move needs dtype=")
    return have, sizes, canonical_dtype(request.dtype if tensor is None else tensor.dtype)


def _local_source(tensor: Any) -> Any:
    """This rank's local tensor, with its gradients; None if it has none."""
    if not has_layout(tensor):
        return tensor
    # torch's own ShardedTensor warns of questions for attributes.
    if torch.is_grad_enabled() and not is_sharded_tensor(tensor) and tensor.requires_grad:
        is_own = is_own_sharded_tensor(tensor)
        return tensor._for_move() if is_own else _redistribution().dtensor_local(tensor, True)
    return local_of(tensor)


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
