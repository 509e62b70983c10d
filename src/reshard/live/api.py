"""Entry points of the live engine: run a plan with the tensors of this rank.

result = run(plan, tensors, group=group)        # {name: local tensor}
handle = start(plan, tensors, into=mine)        # goes on in a thread
result = handle.wait(); print(handle.report)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.live.call import Call
from reshard.live.compiled import CompiledPlan
from reshard.live.failure.cleanup import counted
from reshard.live.failure.wait_graph import WaitGraph
from reshard.live.failure.watch import Watch
from reshard.live.handle import Handle
from reshard.live.inputs.bound import Tensors
from reshard.live.inputs.request import Request, check_request
from reshard.live.options import Options, options_from
from reshard.live.report import RunReport
from reshard.live.session.cause import Cause
from reshard.live.session.session import Session, Ticket, all_connections, session_of
from reshard.live.transport.nccl import NcclGroups
from reshard.planning.plan import Plan

__all__ = [
    "Handle",
    "call_of",
    "check",
    "gather_texts",
    "pass_silently",
    "refuse",
    "release",
    "run",
    "start",
]

MAX_TEXT = 1 << 28
"""Bytes that a text may decompress to: a peer may be broken."""


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

    return counted(group, lambda: plan.parties, move)


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
        return started(ticket, plan, tensors, into, options_from(options, device))

    return counted(group, lambda: plan.parties, begin)


def started(
    ticket: Ticket, plan: Plan, tensors: Tensors, into: Tensors | None, options: Options
) -> Handle:
    """Begin a call for which the caller has a ticket, in a thread."""
    report = RunReport(dist.get_rank() if dist.is_initialized() else -1, -1, plan.digest)
    call = call_of(ticket, plan, tensors, into, options, report=report)
    report.call = ticket.number
    return Handle(call, report)


def call_of(
    ticket: Ticket,
    plan: Plan,
    tensors: Tensors,
    into: Tensors | None,
    options: Options,
    *,
    grad: bool | None = None,
    ask_grad: bool = False,
    report: RunReport | None = None,
) -> Call:
    """The call for which the caller has a ticket; it has its number when this returns."""
    if not dist.is_initialized():
        raise LiveError(
            "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
        )
    check_request(tensors, into, ticket.group)
    group = ticket.group or dist.group.WORLD
    assert group is not None
    request = Request(tensors, into, group, options)
    return Call(ticket, plan, request, grad=grad, ask_grad=ask_grad, report=report)


def refuse(plan: Plan, error: BaseException, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raise an error that was found before the move, here and on the ranks that wait for it."""

    def fail(_: Ticket) -> NoReturn:
        raise error

    counted(group, lambda: plan.parties, fail)


def pass_silently(ticket: Ticket, plan: Plan, options: Mapping[str, Any]) -> bool:
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


def gather_texts(
    text: str, group: dist.ProcessGroup | None, timeout: float, what: str
) -> dict[int, str]:
    """The texts of all ranks of a group, by rank; ``what`` they are about must be the same."""
    group = group or dist.group.WORLD
    return counted(group, None, lambda ticket: _gather(ticket, text, timeout, what))


def _gather(ticket: Ticket, text: str, timeout: float, what: str) -> dict[int, str]:
    assert ticket.group is not None
    session = session_of(ticket.group, sorted(dist.get_process_group_ranks(ticket.group)))
    session.begin(ticket)
    try:
        connections = session.connect(ticket, timeout, what, _observe)
        number = ticket.number
        watch = Watch(session, connections, number, b"", timeout=timeout, what=what)
        ticket.watch = watch
        try:
            mine = zlib.compress(json.dumps([what, text]).encode(), 1).hex()
            found = _exchange_texts(watch, mine)
        except ReshardError as error:
            watch.fail_with(error)
        watch.close()
    except ReshardError:
        if ticket.watch is not None:
            ticket.watch.close()
        ticket.finish()
        raise
    ticket.finish()
    return found


def _observe(session: Session, number: int, what: str) -> WaitGraph:
    return WaitGraph(session, number, what).observe()


def _exchange_texts(watch: Watch, mine: str) -> dict[int, str]:
    connections = watch.connections
    client, rank = connections.client, connections.rank
    keys = {one: f"says/{watch.call}/{one}" for one in connections.ranks}
    client.request(lambda store: store.set(keys[rank], mine))
    watch.wait_keys(keys, lambda peer: f"it to say its part of {watch.what}")
    values = client.request(lambda store: store.multi_get(list(keys.values())))
    found = {one: _decoded(one, value) for one, value in zip(keys, values, strict=True)}
    other = {one: what for one, (what, _) in found.items() if what != watch.what}
    if other:
        one, what = min(other.items())
        text = f"rank {rank} is in {watch.what} and rank {one} in {what}"
        watch.fail(Cause("disagree", f"ranks are in different calls: {text}"))
    # Every rank has read before any goes on, so that the keys can go.
    watch.barrier("heard")
    client.request(lambda store: store.delete_key(keys[rank]))
    return {one: text for one, (_, text) in found.items()}


def _decoded(rank: int, value: bytes) -> tuple[str, str]:
    try:
        data = zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MAX_TEXT)
        what, text = json.loads(data)
        return str(what), str(text)
    except (ValueError, TypeError, zlib.error) as error:
        raise LiveError(f"what rank {rank} sent cannot be read: {error}") from None
