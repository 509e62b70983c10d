"""One call of `rs.move`, `plan.run` or `plan.start` on one rank, from its number to its result.

number      the call takes the next number of its session
connect     the first call connects the ranks
bind        check the tensors, make missing destinations
compare     the first call of a plan compares it with the other ranks
handshake   send a Hello to every peer, and wait for theirs
rounds      exchange, round by round (``transport/exchange.py``)
finish      zeros, the commit of an atomic call
close       give back what was taken; the number is used up, whatever happened
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from reshard.errors import LiveError, ReshardError, TensorError
from reshard.live.compiled import CompiledPlan, compiled_plan
from reshard.live.failure.agreement import Signature, check_hellos, compare, join_comparison
from reshard.live.failure.wait_graph import WaitGraph
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import (
    GPU,
    BoundTensors,
    Request,
    Tensors,
    all_on_gpus,
    check_request,
    device_of,
    placement_of,
)
from reshard.live.inputs.finish import Donation, fill_zeros
from reshard.live.options import Options
from reshard.live.program.rounds import Program, Round
from reshard.live.session.cause import Cause
from reshard.live.session.mailbox import Inbox
from reshard.live.session.session import Session, Ticket, session_of
from reshard.live.session.tags import CallAheadError
from reshard.live.transport.base import Transport
from reshard.live.transport.exchange import Exchange, Wait
from reshard.live.transport.gloo import GlooTransport
from reshard.live.transport.gloo_group import GlooGroups
from reshard.live.transport.host import HostTransport
from reshard.live.transport.in_flight import InFlightCall
from reshard.live.transport.nccl import NcclGroups, NcclTransport
from reshard.planning.plans import Plan
from reshard.show.progress import MIN_BYTES, Bar, progress_of
from reshard.show.run_report import RunReport

__all__ = ["GRAD_CODES", "Call", "call_of", "observe_waits"]

GRAD_CODES = {None: 0, False: 1, True: 2}
"""How a Hello says whether gradients are wanted."""

Result = dict[str, torch.Tensor]


class Call:
    """One call: it has its number when it is made, and is done when it has run."""

    watch: Watch | None = None
    session: Session | None = None
    _exchange: Exchange | None = None
    _in_flight: InFlightCall | None = None
    _progress: Bar | None = None
    _key = (b"", "")
    _ok = False
    _is_first = _compares = False
    """Whether to compare with the other ranks. All must decide alike, so it is decided when the
    call takes its number: calls are made in one order, but those in flight go on in any."""

    def __init__(
        self,
        ticket: Ticket,
        plan: Plan,
        request: Request,
        *,
        grad: bool | None = None,
        ask_grad: bool = False,
        report: RunReport | None = None,
    ) -> None:
        """``grad`` is whether this rank's source requires gradients, None where it cannot know;
        ``ask_grad`` whether such ranks are to learn it from others."""
        self.ticket, self.plan, self.request, self.options = ticket, plan, request, request.options
        self.grad, self._ask_grad, self.report = grad, ask_grad, report
        self._transports: list[Transport] = []
        compiled = self.compiled = compiled_plan(plan, request.group)
        if compiled is not None:
            silent = self.options.check == "never" and not compiled.exchanges
            if len(compiled.ranks) > 1 and not silent:
                self._take_number(session_of(request.group, compiled.ranks), compiled.digest)

    def _take_number(self, session: Session, digest: bytes) -> None:
        self.session = session
        session.begin(self.ticket, self.options.tag)
        self._key = digest, self.options.name
        self._is_first = session.must_compare(self.ticket, self._key)
        self._compares = self._is_first or self.options.check == "always"

    def run(self) -> Result:
        """Do the move."""
        self.ticket.undo = self._close
        if self.compiled is None:
            self.ticket.finish()
            return {}
        while True:
            try:
                exchange = self._enter(self.compiled)
                exchange.run()
                result = self._finish(exchange)
                self._ok = True
                break
            except CallAheadError as ahead:
                self._move_up(ahead)
            except ReshardError as error:
                # Everything else that is raised goes to the cleanup thread, which also closes.
                try:
                    if self.watch is not None:
                        self.watch.fail_with(error)
                    raise
                finally:
                    self._close()
        self._close()
        return result

    def _enter(self, compiled: CompiledPlan) -> Exchange:
        """Everything before the first round."""
        began = time.perf_counter()
        together = compiled.exchanges or self._compares or self.options.atomic
        if self._ask_grad and compiled.grad_hellos:
            together = True
        watch = None
        if self.session is not None and together:
            watch = self._connect(self.session, compiled)
        bound = self._bind(compiled, watch)
        program = compiled.program_for(bound)
        if watch is not None:
            self._choose_transports(watch, program, bound)
        wait: Wait = _no_wait if watch is None else watch.wait
        inbox = Inbox() if watch is None else watch.inbox
        after = self._after_round(program, bound)
        exchange = Exchange(program, bound, self._transports, inbox, wait, self.report, after)
        self._exchange = exchange
        if watch is not None:
            watch.status = exchange.status
        if self.report is not None:
            labels = {peer: t.label(peer) for t in self._transports for peer in t.peers}
            self.report.transports = labels
            self.report.setup = time.perf_counter() - began
        if watch is not None and self._transports:
            self._shake_hands(watch, program, bound)
        return exchange

    def _connect(self, session: Session, compiled: CompiledPlan) -> Watch:
        ticket, options = self.ticket, self.options
        connections = session.connections
        if connections is None:
            connections = session.connect(ticket, options.timeout, compiled.what, observe_waits)
        watch = self.watch = Watch(
            session,
            connections,
            ticket.number,
            compiled.digest,
            timeout=options.timeout,
            deadline=options.deadline,
            what=compiled.what,
            tag=ticket.tag,
            grad=GRAD_CODES[self.grad],
        )
        ticket.watch = watch
        groups = connections.existing(NcclGroups)
        if groups is not None:
            try:
                groups.in_flight.check()
            except LiveError as error:
                # It failed on a GPU after its call had returned.
                watch.fail(Cause.of(error, compiled.rank).of_earlier_call())
        return watch

    def _bind(self, compiled: CompiledPlan, watch: Watch | None) -> BoundTensors:
        try:
            return self.request.bind(compiled.locals, compiled.rank)
        except TensorError as error:
            if watch is not None:
                watch.fail(Cause("tensor", str(error)))
            raise

    def _choose_transports(self, watch: Watch, program: Program, bound: BoundTensors) -> None:
        """Which peers are reached how; the first call of a plan compares before."""
        on_gpu = self._compare(watch, bound)
        watch.suspect = lambda: join_comparison(watch, self._signature(bound))
        peers, option, connections = program.peers, self.options.transport, watch.connections
        if self._ask_grad and self.compiled is not None:
            peers |= self.compiled.grad_hellos.get(program.rank, frozenset())
        gloo, common = None, (watch, program, bound)
        if connections.spans_hosts or option == "network":
            # All ranks make the group, also those that have nothing to send.
            gloo = connections.resource(GlooGroups).group(watch)
        if on_gpu:
            self._transports = [NcclTransport(*common, peers, device_of(bound), gloo, self.ticket)]
            return
        near = frozenset() if option == "network" else peers & connections.peers.keys()
        if near:
            self._transports.append(HostTransport(*common, near, option))
        if gloo is not None:
            self._transports.append(GlooTransport(*common, peers - near, gloo))

    def _compare(self, watch: Watch, bound: BoundTensors) -> bool:
        """Compare with the other ranks, unless this plan was compared before.

        Gives whether it goes from GPU to GPU; once compared it does in all calls, or in none.
        """
        session, key = watch.session, self._key
        if self._compares:
            placements = compare(watch, self._signature(bound))
            on_gpu = self.options.transport == "auto" and all_on_gpus(placements)
            session.on_gpus[key] = on_gpu
            session.has_compared(key)
            self._compares = False
        while key not in session.agreed and session.is_comparing(key):
            watch.check()  # a call before this one is comparing
            time.sleep(0.001)
        self.ticket.enqueues = session.on_gpus.get(key, False)
        if not self.ticket.enqueues:
            return False
        where = placement_of(bound, self.request.group)
        rank = watch.connections.rank
        if not all_on_gpus({rank: where, -1: GPU}):
            watch.fail(
                Cause(
                    "tensor",
                    f"the tensors of rank {rank} are on {where} and this plan was found to "
                    "move from GPU to GPU: keep them there, or give "
                    'check="always" on all ranks to compare anew in every call',
                )
            )
        return True

    def _signature(self, bound: BoundTensors) -> Signature:
        where = placement_of(bound, self.request.group)
        grad = GRAD_CODES[self.grad]
        return Signature(self.plan, self.options.shared, where, grad, self.ticket.tag)

    def _shake_hands(self, watch: Watch, program: Program, bound: BoundTensors) -> None:
        for transport in self._transports:
            transport.send_hellos()
        hellos = watch.inbox.hellos
        peers = [peer for transport in self._transports for peer in transport.peers]

        expected = (watch.digest, watch.grad, watch.tag_code)

        def missing() -> list[int]:
            left = []
            for peer in peers:
                hello = hellos.get(peer)
                if hello is None:
                    left.append(peer)
                elif hello[1:4] != expected:
                    check_hellos(watch, lambda: self._signature(bound))
            return left

        watch.wait(missing, lambda peer: f"it to begin the move of {program.first_name(peer)}")
        watch.finish_handshake()

    def _after_round(self, program: Program, bound: BoundTensors) -> Callable[[Round], None] | None:
        """What is done after every round: free donated sources, show progress; None if nothing."""
        donation = Donation(program, bound) if self.options.donate else None
        progress = None
        shown, lowest = self.options.progress, self.plan.parties[0]
        if program.rank == lowest and (shown or (shown is None and program.total >= MIN_BYTES)):
            progress = progress_of(shown, program.total, program.num_rounds)
            self._progress = progress
        if donation is None and progress is None:
            return None

        def after(made: Round) -> None:
            if donation is not None:
                donation.after(made.number)
            if progress is not None:
                progress.advance(sum(made.bytes))

        return after

    def _finish(self, exchange: Exchange) -> Result:
        bound, program = exchange.bound, exchange.program
        if program.part.fills:
            fill_zeros(program, bound)
        if self._progress is not None:
            self._progress.close()
        if self.options.sync or self.options.atomic:
            self.wait_complete()
        if not self.options.atomic:
            return bound.result
        if self.watch is not None:
            self.watch.barrier("complete")
        into = self.request.into
        if into is None:
            return bound.result
        given = {name: tensor for name, tensor in into.items() if tensor is not None}
        for name in given.keys() & bound.result.keys():
            given[name].detach().copy_(bound.result[name])
        return given

    def _move_up(self, ahead: CallAheadError) -> None:
        """This rank left out a call which the others have given up: take the next number."""
        assert self.session is not None
        assert self.watch is not None
        if not self.session.advance(self.ticket):
            error = ahead.cause.error(self._status())
            self._close()
            raise error from None
        self._close_transports()
        self.watch.close()

    def _status(self) -> str:
        if self._exchange is None:
            return f"on rank {dist.get_rank()}: no round begun"
        return self._exchange.status()

    def _close_transports(self) -> None:
        while self._transports:
            self._transports[-1].close(self._ok)
            self._transports.pop()

    def _close(self) -> None:
        """The call is over; if it was the first to be compared and failed, the next one is.

        May be repeated: an exception out of a signal handler may come between any two bytecodes.
        """
        session, watch, in_flight = self.session, self.watch, self.in_flight
        failed = watch is not None and watch.abort.is_over
        if session is not None and self._is_first and (self._compares or failed):
            self._compare_again(session)
        if self._progress is not None:
            self._progress.close()
        self._close_transports()
        if in_flight is not None:
            in_flight.close()
        elif watch is not None:
            watch.close()
        elif session is not None:
            session.close_call(self.ticket.number)
        self.ticket.finish()

    def _compare_again(self, session: Session) -> None:
        """The first call of a plan has failed on this rank, and perhaps not on others.

        So it is compared again. But where nothing is exchanged, ranks on which it did not fail
        would not take part in that, so there only a difference leads to another comparison.
        """
        assert self.compiled is not None
        cause = None if self.watch is None else self.watch.abort.cause
        meets = self.compiled.exchanges or self.options.atomic
        if meets or (cause is not None and cause.kind in ("disagree", "tensor")):
            session.agreed.discard(self._key)
        else:
            session.has_compared(self._key)

    @property
    def in_flight(self) -> InFlightCall | None:
        """What this call has in flight on a GPU."""
        for transport in self._transports:
            if isinstance(transport, NcclTransport):
                self._in_flight = transport.in_flight
        return self._in_flight

    def is_complete(self) -> bool:
        """Whether the GPU is done with what was enqueued, as far as this is known."""
        return self.in_flight is None or self.in_flight.complete.is_set()

    def wait_complete(self) -> None:
        """Wait for that."""
        if self.in_flight is not None:
            self.in_flight.wait()

    @property
    def grad_seen(self) -> bool:
        """Whether a peer said in its Hello that gradients are wanted."""
        hellos = () if self.watch is None else tuple(self.watch.inbox.hellos.values())
        return any(hello.grad == GRAD_CODES[True] for hello in hellos)


def observe_waits(session: Session, number: int, what: str) -> WaitGraph:
    return WaitGraph(session, number, what).observe()


def _no_wait(missing: Callable[[], Collection[int]], what: Callable[[int], str]) -> None:
    """A call without an exchange waits for no peer."""


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
    group = ticket.group or dist.group.WORLD
    if group is None:
        raise LiveError(
            "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
        )
    check_request(tensors, into, ticket.group)
    request = Request(tensors, into, group, options)
    return Call(ticket, plan, request, grad=grad, ask_grad=ask_grad, report=report)
