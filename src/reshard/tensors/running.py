"""Run a plan with tensors as a program has them: DTensors, ShardedTensors, plain local tensors.

Nested state dicts are flattened as `describe` does, so that its names are the names of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import TensorError
from reshard.layout.spec import TensorSpec
from reshard.live.api import Handle, release, start_call
from reshard.live.call import Call
from reshard.live.failure.cleanup import with_ticket
from reshard.live.options import options_from
from reshard.live.session.session import Ticket
from reshard.planning.plans import Plan
from reshard.tensors.compiling import outside_graphs
from reshard.tensors.describe import tensors_in
from reshard.tensors.fitting import check_fits, joined, place_of
from reshard.tensors.meshes import this_rank
from reshard.tensors.reading import parts_of

__all__ = ["release", "run", "start"]

Tensors = Mapping[str, torch.Tensor | None]

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
"""What is handed on as it is; a state dict of thousands of these is not looked through."""


@outside_graphs
def run(
    plan: Plan,
    tensors: Mapping[Any, Any],
    *,
    into: Mapping[Any, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Move this rank's tensors along a plan; gives new local tensors, or those of ``into``."""

    def move(ticket: Ticket) -> dict[str, torch.Tensor]:
        given, to, finish = _flattened(plan, tensors, into)
        call = Call(ticket, plan, given, to, options_from(options, device))
        found = call.run()
        return found if finish is None else finish(found)

    return with_ticket(group, lambda: plan.parties, move)


@outside_graphs
def start(
    plan: Plan,
    tensors: Mapping[Any, Any],
    *,
    into: Mapping[Any, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Handle:
    """Begin to move; the handle's ``wait`` gives the tensors."""

    def begin(ticket: Ticket) -> Handle:
        given, to, finish = _flattened(plan, tensors, into)
        handle = start_call(ticket, plan, given, to, options_from(options, device))
        handle.finish = finish
        return handle

    return with_ticket(group, lambda: plan.parties, begin)


Finish = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _flattened(
    plan: Plan, tensors: Mapping[Any, Any], into: Mapping[Any, Any] | None
) -> tuple[Tensors, Tensors | None, Finish | None]:
    """The local tensors of both sides, and what is done when they have been moved."""
    try:
        given = tensors if _is_plain(tensors) else _sources(plan, tensors)
        if into is None or _is_plain(into):
            return given, into, None
        found = _flat(into, plan.want, is_source=False)
        places = {name: place_of(tensor) for name, tensor in found.items()}
    except TensorError as error:
        raise TensorError(f"on rank {this_rank()}: {error}") from None

    def finish(_: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for place in places.values():
            place.fill()
        return found

    return given, {name: place.local for name, place in places.items()}, finish


def _is_plain(tensors: Mapping[Any, Any]) -> bool:
    if not isinstance(tensors, Mapping):
        return True  # The engine refuses it.
    return set(map(type, tensors.values())) <= PLAIN


def _sources(plan: Plan, tensors: Mapping[Any, Any]) -> dict[str, torch.Tensor | None]:
    """The local tensors of a state dict, under its flattened names."""
    flat = _flat(tensors, plan.have, is_source=True)
    return {name: joined(parts_of(tensor)) for name, tensor in flat.items()}


def _flat(
    tensors: Mapping[Any, Any], specs: Mapping[str, TensorSpec], is_source: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, if those that know how they lie lie as planned."""
    for name, value in tensors.items():
        if name in specs and not (value is None or isinstance(value, torch.Tensor)):
            role = "to move" if is_source else "to move into"
            raise TensorError(f'"{name}" {role} is a {type(value).__name__}: give a tensor')
    found = tensors_in(tensors)
    for name, tensor in found.items():
        # A name that the plan does not have is the engine's to refuse.
        if type(tensor) not in PLAIN and name in specs:
            check_fits(tensor, specs[name], name, is_source)
    return found
