"""Entry points of the live engine: run a plan with the tensors of this rank.

result = run(plan, tensors, group=group)        # {name: local tensor}
handle = start(plan, tensors, into=mine)        # goes on in a thread
result = handle.wait(); print(handle.report)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from reshard.live.call import call_of
from reshard.live.compiled import CompiledPlan
from reshard.live.failure.cleanup import with_ticket
from reshard.live.handle import Handle
from reshard.live.inputs.bound import Tensors
from reshard.live.options import Options, options_from
from reshard.live.session.session import Ticket, all_connections, session_of
from reshard.live.transport.nccl import NcclGroups
from reshard.planning.plans import Plan
from reshard.show.run_report import RunReport

__all__ = [
    "Handle",
    "check",
    "raise_on_all_ranks",
    "release",
    "run",
    "skip_exchange",
    "start",
    "start_call",
]


def release(plan: Plan) -> None:
    """Free the buffers and tables that are kept for the next call."""
    plan.compiled = None
    for connections in all_connections():
        connections.release()


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise what went wrong in a move between GPUs, if no call has raised it yet.

    Moves between GPUs only enqueue work. This does not wait for it: it raises what is known.
    """
    for connections in all_connections(group):
        groups = connections.existing(NcclGroups)
        if groups is not None:
            groups.in_flight.check()


def run(
    plan: Plan,
    tensors: Tensors,
    *,
    into: Tensors | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Move this rank's tensors along a plan; every rank of the two layouts calls it."""

    def move(ticket: Ticket) -> dict[str, torch.Tensor]:
        return call_of(ticket, plan, tensors, into, options_from(options, device)).run()

    return with_ticket(group, lambda: plan.parties, move)


def start(
    plan: Plan,
    tensors: Tensors,
    *,
    into: Tensors | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Handle:
    """Begin to move; the handle's ``wait`` gives the tensors. All ranks start in one order."""

    def begin(ticket: Ticket) -> Handle:
        return start_call(ticket, plan, tensors, into, options_from(options, device))

    return with_ticket(group, lambda: plan.parties, begin)


def start_call(
    ticket: Ticket, plan: Plan, tensors: Tensors, into: Tensors | None, options: Options
) -> Handle:
    """Begin a call for which the caller has a ticket, in a thread."""
    report = RunReport(dist.get_rank() if dist.is_initialized() else -1, -1, plan.digest)
    call = call_of(ticket, plan, tensors, into, options, report=report)
    report.call = ticket.number
    return Handle(call, report)


def raise_on_all_ranks(
    plan: Plan, error: BaseException, group: dist.ProcessGroup | None = None
) -> NoReturn:
    """Raise an error that was found before the move, here and on the ranks that wait for it."""

    def fail(_: Ticket) -> NoReturn:
        raise error

    with_ticket(group, lambda: plan.parties, fail)


def skip_exchange(ticket: Ticket, plan: Plan, options: Mapping[str, Any]) -> bool:
    """Count a call of a plan along which nothing moves, if the ranks have compared it before."""
    compiled, group = plan.compiled, ticket.group or dist.group.WORLD
    if not isinstance(compiled, CompiledPlan) or not isinstance(group, dist.ProcessGroup):
        return False
    if options.get("check") == "never":
        ticket.finish()
        return True
    if len(compiled.ranks) > 1:
        session = session_of(group, compiled.ranks)
        if (compiled.digest, options_from(options).name) not in session.agreed:
            return False
        session.close_call(session.begin(ticket, options.get("tag")))
    ticket.finish()
    return True
