"""One call of `rs.move`, `plan.run` or `plan.start` on one rank, from its number to its result.

number      the call takes the next number of its session
connect     the first call of a session connects the ranks
bind        check the tensors, allocate missing destinations
compare     the first call of a plan compares it with the other ranks
handshake   send a Hello to every peer, and wait for theirs
rounds      exchange messages, round by round (``transport/exchange.py``)
finish      fill zeros, commit an atomic call
close       free resources; the number is used, however the call ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from reshard.errors import LiveError, ReshardError, TensorError
from reshard.live.compiled import CompiledPlan, compiled_plan
from reshard.live.failure.agreement import (
    GRAD_CODES,
    Signature,
    barrier,
    check_hellos,
    compare,
    join_comparison,
)
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import (
    GPU,
    BoundTensors,
    Tensors,
    all_on_gpus,
    device_of,
    has_nccl,
    placement_of,
)
from reshard.live.inputs.finish import Donation, fill_zeros
from reshard.live.inputs.request import Options, Request, check_request
from reshard.live.program.rounds import Program, Round
from reshard.live.session.cause import CallAheadError, Cause
from reshard.live.session.mailbox import Inbox
from reshard.live.session.session import Session, Ticket, session_of
from reshard.live.transport.base import Transport
from reshard.live.transport.exchange import Exchange, Wait
from reshard.live.transport.gloo import GlooTransport
from reshard.live.transport.gloo_group import GlooGroup, GlooGroups
from reshard.live.transport.gpu_peer import GpuPeerTransport
from reshard.live.transport.gpu_routes import GpuRoutes, GpuTrials, find_routes
from reshard.live.transport.host import HostTransport
from reshard.live.transport.in_flight import InFlight, InFlightCall
from reshard.live.transport.nccl import NcclTransport
from reshard.planning.plans import Plan
from reshard.show.progress import MIN_BYTES, Bar, progress_of
from reshard.show.run_report import RunReport

__all__ = ["Call"]

Result = dict[str, torch.Tensor]


class Call:
    """One call: it takes its number when it is constructed, and is over when it has run."""

    watch: Watch | None = None
    session: Session | None = None
    _exchange: Exchange | None = None
    _in_flight: InFlightCall | None = None
    _progress: Bar | None = None
    _key = (b"", "")
    _ok = False
    _is_first = _compares = False
    """Whether to compare with the other ranks. All ranks must decide alike, so it is decided with
    the call's number: calls are made in one order, but calls in flight proceed in any order."""

    def __init__(
        self,
        ticket: Ticket,
        plan: Plan,
        tensors: Tensors,
        into: Tensors | None,
        options: Options,
        *,
        grad: bool | None = None,
        ask_grad: bool = False,
        report: RunReport | None = None,
    ) -> None:
        """``grad`` is whether this rank's source requires gradients, None if it has no source;
        ``ask_grad`` whether ranks without a source learn it from others."""
        group = ticket.group or dist.group.WORLD
        if group is None:
            raise LiveError(
                "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
            )
        check_request(tensors, into, ticket.group)
        self.request = Request(tensors, into, group, options)
        self.ticket, self.plan, self.options = ticket, plan, options
        self.grad, self._ask_grad, self.report = grad, ask_grad, report
        self._transports: list[Transport] = []
        compiled = self.compiled = compiled_plan(plan, group)
        if compiled is not None:
            silent = options.check == "never" and not compiled.exchanges
            if len(compiled.ranks) > 1 and not silent:
                self._take_number(session_of(group, compiled.ranks), compiled.digest)

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
                # After any other exception the cleanup thread closes the call.
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
            connections = session.connect(ticket, options.timeout, compiled.what)
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
        calls = connections.existing(InFlight)
        if calls is not None:
            try:
                calls.check()
            except LiveError as error:
                # An earlier call failed on a GPU after it had returned.
                watch.fail(Cause.of(error, compiled.rank).of_earlier_call())
        return watch

    def _bind(self, compiled: CompiledPlan, watch: Watch | None) -> BoundTensors:
        try:
            return self.request.bind(compiled.locals)
        except TensorError as error:
            if watch is not None:
                watch.fail(Cause("tensor", str(error)))
            raise

    def _choose_transports(self, watch: Watch, program: Program, bound: BoundTensors) -> None:
        """Choose a transport for every peer; the first call of a plan compares it before."""
        routes = self._compare(watch, bound)
        watch.suspect = lambda: join_comparison(watch, self._signature(bound))
        peers, option, connections = program.peers, self.options.transport, watch.connections
        if self._ask_grad and self.compiled is not None:
            peers |= self.compiled.grad_hellos.get(program.rank, frozenset())
        gloo, common = None, (watch, program, bound)
        if connections.spans_hosts or option == "network":
            # All ranks make the group, also those that have nothing to send.
            gloo = connections.resource(GlooGroups).group(watch)
        if routes is not None:
            peers -= self._choose_gpu_transports(watch, program, bound, routes, peers, gloo)
            if routes.opens_nccl:
                return
            option = "auto"
        near = frozenset() if option == "network" else peers & connections.peers.keys()
        if near:
            reasons = {peer: self._reason(routes, peer) for peer in near}
            self._transports.append(HostTransport(*common, near, option, reasons))
        if gloo is not None:
            self._transports.append(GlooTransport(*common, peers - near, gloo))

    def _choose_gpu_transports(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        routes: GpuRoutes,
        peers: frozenset[int],
        gloo: GlooGroup | None,
    ) -> frozenset[int]:
        """Choose transports for the peers that are reached from GPU to GPU; returns those."""
        rank, device = program.rank, device_of(bound)
        in_flight = self._in_flight = InFlightCall(watch.connections.resource(InFlight), watch)
        common = (watch, program, bound)
        read = frozenset(peer for peer in peers if routes.reads(rank, peer))
        if routes.forced != "nccl":
            self._transports.append(GpuPeerTransport(*common, read, device, self.ticket, in_flight))
        if not routes.opens_nccl:
            return read
        reasons = {peer: self._reason(routes, peer) for peer in peers - read}
        alone = routes.forced == "nccl"
        more = (self.ticket, in_flight)
        self._transports.append(
            NcclTransport(*common, peers - read, device, gloo, *more, copies=alone, reasons=reasons)
        )
        return peers

    def _reason(self, routes: GpuRoutes | None, peer: int) -> str:
        assert self.compiled is not None
        return "" if routes is None else routes.reason(self.compiled.rank, peer)

    def _compare(self, watch: Watch, bound: BoundTensors) -> GpuRoutes | None:
        """Compare the plan with the other ranks, unless this was done before.

        Returns how it moves from GPU to GPU, which is the same in all calls of the plan; None if it
        goes by way of the host.
        """
        session, key = watch.session, self._key
        if self._compares:
            texts = compare(watch, self._signature(bound))
            option, gpu = self.options.transport, self._gpu(bound)
            if option != "auto" or any(text.startswith(GPU) for text in texts.values()):
                session.routes[key] = find_routes(watch, option, self.plan, gpu, texts)
            session.has_compared(key)
            self._compares = False
        while key not in session.agreed and session.is_comparing(key):
            watch.check()  # an earlier call is comparing the plan
            time.sleep(0.001)
        routes: GpuRoutes | None = session.routes.get(key)
        self.ticket.enqueues = routes is not None
        if routes is None:
            return None
        where = placement_of(bound)
        rank = watch.connections.rank
        if not all_on_gpus({rank: where, -1: GPU}):
            text = (
                f"the tensors of rank {rank} are on {where} and this plan was found to move from "
                'GPU to GPU: keep them there, or give check="always" on all ranks to compare anew '
                "in every call"
            )
            watch.fail(Cause("tensor", text))
        return routes

    def _gpu(self, bound: BoundTensors) -> torch.device | None:
        """The GPU that this rank's tensors are on; None if it has none."""
        return device_of(bound) if placement_of(bound) == GPU else None

    def _signature(self, bound: BoundTensors) -> Signature:
        where = placement_of(bound)
        if all_on_gpus({0: where, 1: GPU}) and self.watch is not None:
            trials = self.watch.connections.resource(GpuTrials)
            where += "\n" + trials.facts(self._gpu(bound), has_nccl(self.request.group))
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
        """Frees donated sources and shows progress after every round; None if neither is needed."""
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
            barrier(self.watch, "complete")
        if self.request.into is None:
            return bound.result
        into = {name: one for name, one in self.request.into.items() if one is not None}
        for name in into.keys() & bound.result.keys():
            into[name].detach().copy_(bound.result[name])
        return into

    def _move_up(self, ahead: CallAheadError) -> None:
        """Take the next number: this rank left out a call that the others have given up."""
        assert self.session is not None
        assert self.watch is not None
        if not self.session.advance(self.ticket):
            error = ahead.cause.error(self.watch.status())
            self._close()
            raise error from None
        self._close_transports()
        self.watch.close()

    def _close_transports(self) -> None:
        while self._transports:
            self._transports[-1].close(self._ok)
            self._transports.pop()

    def _close(self) -> None:
        """End the call.

        May be repeated: an exception of a signal handler may come between any two bytecodes.
        """
        session, watch, in_flight = self.session, self.watch, self.in_flight
        failed = watch is not None and watch.failed
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
        """Let the next call compare the plan: its first call failed here, maybe not elsewhere.

        Where nothing is exchanged, ranks on which it did not fail would not take part in that, so
        there only a difference leads to another comparison.
        """
        assert self.compiled is not None
        cause = None if self.watch is None else self.watch.cause
        exchanges = self.compiled.exchanges or self.options.atomic
        if exchanges or (cause is not None and cause.kind in ("disagree", "tensor")):
            session.agreed.discard(self._key)
        else:
            session.has_compared(self._key)

    @property
    def in_flight(self) -> InFlightCall | None:
        """The GPU work that this call has enqueued; None if there is none."""
        used = self._in_flight is not None and self._in_flight.any
        return self._in_flight if used else None

    def wait_complete(self) -> None:
        """Wait until the GPU has done the work that this call has enqueued."""
        if self.in_flight is not None:
            self.in_flight.wait()

    @property
    def grad_seen(self) -> bool:
        """Whether the Hello of a peer says that the source requires gradients."""
        hellos = () if self.watch is None else tuple(self.watch.inbox.hellos.values())
        return any(hello.grad == GRAD_CODES[True] for hello in hellos)


def _no_wait(missing: Callable[[], Collection[int]], what: Callable[[int], str]) -> None:
    """A call without an exchange waits for no peer."""
