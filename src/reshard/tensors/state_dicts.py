"""State dicts of DTensors, ShardedTensors and plain tensors: describe them, and run plans on them.

Nested dicts and lists are flattened to dotted names, which are the names of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ReshardError, TensorError
from reshard.layout.spec import TensorSpec
from reshard.live.api import Handle, start_call
from reshard.live.api import release as release  # Plan.release finds it here
from reshard.live.call import Call
from reshard.live.failure.cleanup import with_ticket
from reshard.live.inputs.request import options_from
from reshard.live.session.session import Ticket
from reshard.planning.plans import Plan
from reshard.tensors.kinds import not_compiled, this_rank
from reshard.tensors.local import check_matches, destination_of, local_of, spec_of
from reshard.text import quoted

Tensors = Mapping[str, torch.Tensor | None]
Complete = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
"""What is passed to the engine as it is; a state dict of thousands of these is not walked."""

MAX_DEPTH = 64
"""A dict deeper than this contains itself."""


def describe(state_dict: Mapping[Any, Any]) -> dict[str, TensorSpec]:
    """The spec of every tensor: DTensors, ShardedTensors and plain ones, which are whole here.

    Nested dicts and lists, as optimizers have them, get dotted names: ``state.0.exp_avg``.
    Numbers, strings and None are left out; anything else that is no tensor is an error.
    """
    specs = {}
    for name, tensor in tensors_in(state_dict).items():
        try:
            specs[name] = spec_of(tensor)
        except ReshardError as error:
            raise type(error)(f"{quoted(name)}: {error}") from None
    return specs


def tensors_in(state_dict: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict under the names that `describe` gives them."""
    if not isinstance(state_dict, Mapping | list | tuple):
        raise TensorError(
            f'a {type(state_dict).__name__} is no state dict: give a dict, as {{"weight": tensor}}'
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _walk("", state_dict, 0):
        if name in tensors:
            raise TensorError(
                f"two entries of the state dict are called {quoted(name)}, one of them nested: "
                "rename one"
            )
        tensors[name] = tensor
    return tensors


def _walk(name: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        if depth > MAX_DEPTH:
            raise TensorError(f"{quoted(name)} is nested more than {MAX_DEPTH} deep: flatten it")
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            if not isinstance(key, str | int):
                raise TensorError(
                    f"the key {quoted(key)} in {quoted(name)} is a {type(key).__name__}: "
                    "names are strings or numbers"
                )
            yield from _walk(f"{name}.{key}" if name else str(key), inner, depth + 1)
    elif not (value is None or isinstance(value, Number | str)):
        raise TensorError(
            f"{quoted(name)} is a {type(value).__name__}, which cannot be moved: "
            "take it out of the state dict and carry it yourself"
        )


@not_compiled
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
        sources, destinations, complete = _local_tensors(plan, tensors, into)
        call = Call(ticket, plan, sources, destinations, options_from(options, device))
        return complete(call.run())

    return with_ticket(group, lambda: plan.parties, move)


@not_compiled
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
        sources, destinations, complete = _local_tensors(plan, tensors, into)
        handle = start_call(ticket, plan, sources, destinations, options_from(options, device))
        handle.finish = complete
        return handle

    return with_ticket(group, lambda: plan.parties, begin)


def _local_tensors(
    plan: Plan, tensors: Mapping[Any, Any], into: Mapping[Any, Any] | None
) -> tuple[Tensors, Tensors | None, Complete]:
    """The local tensors of both sides, and what turns the moved ones into the result."""
    for what, side in (("to move", tensors), ("into=", {} if into is None else into)):
        if not isinstance(side, Mapping):
            raise TensorError(
                f"the tensors {what} are a {type(side).__name__}: give a dict of this rank's "
                "tensors by name; rs.move takes one tensor"
            )
    try:
        sources: Tensors = tensors
        if not _is_plain(tensors):
            flat = _flatten(tensors, plan.have, is_source=True)
            sources = {name: local_of(tensor) for name, tensor in flat.items()}
        if into is None or _is_plain(into):
            return sources, into, lambda moved: moved
        result = _flatten(into, plan.want, is_source=False)
        destinations = {name: destination_of(tensor) for name, tensor in result.items()}
    except TensorError as error:
        raise TensorError(f"on rank {this_rank()}: {error}") from None

    def complete(moved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for _, complete_one in destinations.values():
            complete_one()
        return result

    return sources, {name: local for name, (local, _) in destinations.items()}, complete


def _is_plain(tensors: Mapping[Any, Any]) -> bool:
    return set(map(type, tensors.values())) <= PLAIN and set(map(type, tensors)) <= {str}


def _flatten(
    tensors: Mapping[Any, Any], specs: Mapping[str, TensorSpec], is_source: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, if those that know their layout have the planned one."""
    for name, value in tensors.items():
        if name in specs and not (value is None or isinstance(value, torch.Tensor)):
            role = "to move" if is_source else "to move into"
            raise TensorError(f'"{name}" {role} is a {type(value).__name__}: give a tensor')
    flat = tensors_in(tensors)
    for name, tensor in flat.items():
        if name in specs:  # the engine refuses a name that the plan does not have
            check_matches(tensor, specs[name], name, is_source)
    return flat
