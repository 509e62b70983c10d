"""One call of `rs.move`, `plan.run` or `plan.start` on one rank, from its number to its result.

number      the call takes the next number of its session
connect     the first call of a session connects the ranks
bind        check the tensors, allocate missing destinations
compare     the first call of a plan compares it with the other ranks
handshake   send a Hello to every peer, and wait for theirs
rounds      exchange messages, round by round (``transport/base.py``)
finish      fill zeros, commit an atomic call
close       free resources; the number is used, however the call ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from reshard.errors import ReshardError, TensorError
from reshard.live.compiled import CompiledPlan, compiled_plan
from reshard.live.failure.agreement import (
    GRAD_CODES,
    Signature,
    barrier,
    check_comparison,
    check_hellos,
    compare,
)
from reshard.live.failure.cleanup import fail_and_close
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import (
    GPU,
    BoundTensors,
    Tensors,
    all_on_gpus,
    device_of,
    placement_of,
)
from reshard.live.inputs.memory import Donation, fill_zeros
from reshard.live.inputs.request import Options, bind, has_nccl, home_device
from reshard.live.program.rounds import Program, Round
from reshard.live.session.control import CallAheadError, Cause
from reshard.live.session.session import Key, Session, Ticket
from reshard.live.transport.base import Exchange, Transport, common_ranks
from reshard.live.transport.gloo import GlooTransport
from reshard.live.transport.gloo_group import GlooGroups
from reshard.live.transport.gpu_peer import GpuPeerTransport
from reshard.live.transport.gpu_routes import GpuRoutes, GpuTrials, find_routes
from reshard.live.transport.host import HostTransport
from reshard.live.transport.in_flight import InFlight, InFlightCall, check_earlier_calls
from reshard.live.transport.nccl import NcclTransport
from reshard.planning.plans import Plan
from reshard.show.progress import Bar, progress_of
from reshard.show.run_report import RunReport

Result = dict[str, torch.Tensor]


class Call:
    """One call: it takes its number when it is constructed, and is over when it has run."""

    watch: Watch | None = None
    session: Session | None = None
    _in_flight: InFlightCall | None = None
    _progress: Bar | None = None
    _key: Key = (b"", "", False)
    _bound: BoundTensors | None = None
    _transport = ""
    _transports: Sequence[Transport] = ()
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
        resolves: bool = False,
        report: RunReport | None = None,
    ) -> None:
        """``grad`` is whether this rank's source requires gradients, None if it has no source;
        ``ask_grad`` whether ranks without a source learn it from others; ``resolves`` whether
        sources that are lazy conjugates are resolved instead of refused."""
        self.tensors, self.into = tensors, into
        self.ticket, self.plan, self.options = ticket, plan, options
        self.grad, self._ask_grad, self._resolves, self.report = grad, ask_grad, resolves, report
        compiled, session = compiled_plan(plan, ticket.group)
        self.compiled = compiled
        if (
            compiled is None
            or compiled.is_alone
            or not (compiled.exchanges or options.check != "never")
        ):
            return
        session = self.session = session or compiled.session(ticket.group)
        session.begin(ticket, options.tag)
        self._transport, key = compiled.transport, compiled.key
        if options.transport is not None or options.atomic:
            self._transport = options.transport or compiled.transport
            # No transport carries the calls of a plan without messages.
            carried = self._transport if compiled.exchanges else ""
            key = compiled.digest, carried, options.atomic
        self._key = key
        if key not in session.agreed:
            self._is_first = self._compares = session.must_compare(ticket, key)
        if options.check == "always":
            self._compares = True

    def run(self) -> Result:
        self.ticket.undo = self.close
        if self.compiled is None:
            self.ticket.finish()
            return {}
        while True:
            try:
                result = self._run(self.compiled)
                self._ok = True
                break
            except CallAheadError as ahead:
                self._move_up(ahead)
            except ReshardError as error:
                fail_and_close(self.watch, error, self.close)
        self.close()
        return result

    def _run(self, compiled: CompiledPlan) -> Result:
        options, report, after = self.options, self.report, None
        began = 0.0 if report is None else time.perf_counter()
        watch = self._connect(compiled)
        try:
            bound = self._bound = bind(
                compiled.locals, self.tensors, self.into, self.ticket.group, options, self._resolves
            )
        except TensorError as error:
            if watch is not None:
                watch.fail(Cause("tensor", str(error)))
            raise
        program = compiled.program_for(bound) if bound.strides else compiled.contiguous
        shown = compiled.shows_progress if options.progress is None else options.progress
        if options.donate or shown:
            after = self._after_round(compiled, program, bound)
        exchange = Exchange(program, bound, report, after)
        if watch is not None:
            self._choose_transports(watch, compiled, program, bound)
            if self._is_first:
                compiled.log_transports(self._transports)
            exchange.connect(self._transports, watch.inbox, watch.wait)
            watch.progress = exchange.status
        if report is not None:
            report.transports = {peer: t.label(peer) for t in self._transports for peer in t.peers}
            report.setup = time.perf_counter() - began
        if watch is not None and self._transports:
            self._shake_hands(watch, program)
        if self.into and not options.atomic:
            bound.note_written()
        exchange.run()
        if program.part.fills:
            fill_zeros(program, bound.tensors)
        if options.sync or options.atomic:
            self.wait_complete()
        return self._commit(bound) if options.atomic else bound.result

    def _connect(self, compiled: CompiledPlan) -> Watch | None:
        """Connect the ranks, if they exchange anything."""
        options = self.options
        if self.session is None or not (
            (compiled.exchanges or self._compares or options.atomic)
            or (self._ask_grad and compiled.grad_hellos)
        ):
            return None
        self.session.connect(self.ticket, options.timeout, compiled.what)
        watch = self.watch = Watch(
            self.ticket, compiled.digest, compiled.what, options.timeout, options.deadline,
            GRAD_CODES[self.grad],
        )  # fmt: skip
        if InFlight in watch.connections.resources:
            check_earlier_calls(watch)
        return watch

    def _choose_transports(
        self, watch: Watch, compiled: CompiledPlan, program: Program, bound: BoundTensors
    ) -> None:
        """Choose a transport for every peer; the first call of a plan compares it before."""
        watch.suspect = lambda: check_comparison(watch, self._signature)
        session, key, routes = watch.session, self._key, None
        if self._compares or key not in session.agreed or session.routes.get(key) is not None:
            routes = self._compare(watch, bound)
        self.ticket.enqueues = routes is not None
        peers, option, connections = program.peers, self._transport, watch.connections
        if self._ask_grad and compiled.grad_hellos:
            peers |= compiled.grad_hellos.get(program.rank, frozenset())
        gloo, reason, common, chosen = None, None, (watch, program, bound), list[Transport]()
        self._transports = chosen
        if connections.spans_hosts or option == "network":
            # All ranks make the group, also those that have nothing to send.
            gloo = connections.resource(GlooGroups).group(watch)
        if routes is not None:
            in_flight = InFlightCall(watch, self.ticket)
            self._in_flight, reason = in_flight, partial(routes.reason, program.rank)
            on_gpus = (device_of(bound), in_flight)
            if routes.forced != "nccl":
                read = frozenset(peer for peer in peers if routes.reads(program.rank, peer))
                chosen.append(GpuPeerTransport(*common, read, *on_gpus))
                peers -= read
            if routes.opens_nccl:
                alone = routes.forced == "nccl"
                gathers = alone and compiled.gathers
                chosen.append(NcclTransport(*common, peers, *on_gpus, gloo, alone, gathers, reason))
                return
            option = "auto"
        near = frozenset() if option == "network" else common_ranks(peers, connections.peers.keys())
        if near:
            chosen.append(HostTransport(*common, near, option, reason))
        if gloo is not None:
            chosen.append(GlooTransport(*common, peers - near, gloo))

    def _compare(self, watch: Watch, bound: BoundTensors) -> GpuRoutes | None:
        """Compare the plan with the other ranks, unless this was done before.

        Returns how it moves from GPU to GPU, which is the same in all calls of the plan; None if it
        goes by way of the host.
        """
        session, key = watch.session, self._key
        if self._compares:
            texts = compare(watch, self._signature())
            option, gpu = self._transport, self._gpu(bound)
            on_gpus = option != "auto" or any(text.startswith(GPU) for text in texts.values())
            # None as well, so that routes of an earlier comparison do not count any more.
            session.routes[key] = (
                find_routes(watch, option, self.plan, gpu, texts) if on_gpus else None
            )
            session.has_compared(key)
            self._compares = False
        while key not in session.agreed and session.is_comparing(key):
            watch.check()  # an earlier call is comparing the plan
            time.sleep(0.001)
        routes: GpuRoutes | None = session.routes.get(key)
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

    def _signature(self) -> Signature:
        assert self._bound is not None
        where = placement_of(self._bound)
        if all_on_gpus({0: where, 1: GPU}) and self.watch is not None:
            trials = self.watch.connections.resource(GpuTrials)
            where += "\n" + trials.facts(self._gpu(self._bound), has_nccl(self.ticket.group))
        grad = GRAD_CODES[self.grad]
        atomic, tag = self.options.atomic, self.ticket.tag
        return Signature(self.plan, self._transport, atomic, where, grad, tag)

    def _shake_hands(self, watch: Watch, program: Program) -> None:
        for transport in self._transports:
            transport.send_hellos()
        hellos, peers = watch.inbox.hellos, self._transports[0].peers
        for transport in self._transports[1:]:
            peers |= transport.peers
        watch.wait(
            lambda: peers - hellos.keys(),
            lambda peer: f"it to begin the move of {program.first_name(peer)}",
        )
        expected = (watch.digest, watch.grad, watch.tag_code)
        for peer in peers:
            if hellos[peer][1:4] != expected:
                check_hellos(watch, self._signature)
                break
        watch.finish_handshake()

    def _after_round(
        self, compiled: CompiledPlan, program: Program, bound: BoundTensors
    ) -> Callable[[Round], None]:
        """Frees donated sources and shows progress after every round."""
        donation = Donation(program, bound.tensors) if self.options.donate else None
        if compiled.rank == compiled.ranks[0]:
            shown = self.options.progress
            self._progress = progress_of(shown, program.total, program.num_rounds)

        def after(made: Round) -> None:
            if donation is not None:
                donation.after(made.number)
            if self._progress is not None:
                self._progress.advance(sum(made.bytes))

        return after

    def _commit(self, bound: BoundTensors) -> Result:
        """End an atomic call: when all ranks have their parts, the destinations change."""
        if self.watch is not None:
            barrier(self.watch, "complete")
        if self.into is None:
            return bound.result
        into = {name: one for name, one in self.into.items() if one is not None}
        for name in into.keys() & bound.result.keys():
            into[name].detach().copy_(bound.result[name])
        return into

    def _move_up(self, ahead: CallAheadError) -> None:
        """Take the next number: this rank left out a call that the others have given up."""
        assert self.session is not None
        assert self.watch is not None
        if not self.session.advance(self.ticket):
            error = ahead.cause.error(self.watch.status())
            self.close()
            raise error from None
        self._close_transports()
        self.watch.close()

    def _close_transports(self) -> None:
        for transport in reversed(self._transports):
            transport.close(self._ok)
        self._transports = ()

    def close(self) -> None:
        """End the call.

        May be repeated: an exception of a signal handler may come between any two bytecodes.
        """
        session, watch, in_flight = self.session, self.watch, self._in_flight
        if self._is_first and (self._compares or (watch is not None and watch.cause)):
            self._compare_again()
        if self._progress is not None:
            self._progress.close()
        if self._transports:
            self._close_transports()
        if in_flight is not None and in_flight.any:
            in_flight.close()
        elif watch is not None:
            watch.close()
        elif session is not None:
            session.close_call(self.ticket.number)
        if watch is not None:
            watch.inbox.buffers.clear()  # they would stay mapped as long as the user has the handle
        self.ticket.finish()

    def _compare_again(self) -> None:
        """Let the next call compare the plan: its first call failed here, maybe not elsewhere.

        Where nothing is exchanged, ranks on which it did not fail would not take part in that, so
        there only a difference leads to another comparison.
        """
        session = self.session
        assert session is not None
        assert self.compiled is not None
        cause = None if self.watch is None else self.watch.cause
        exchanges = self.compiled.exchanges or self.options.atomic
        if exchanges or (cause is not None and cause.kind in ("disagree", "tensor")):
            session.agreed.discard(self._key)
        else:
            session.has_compared(self._key)

    def all_tensors(self) -> list[torch.Tensor]:
        both = [*self.tensors.values(), *(self.into or {}).values()]
        return [tensor for tensor in both if tensor is not None]

    def gpus(self) -> set[torch.device]:
        """The GPUs that this call accesses."""
        gpus = {tensor.device for tensor in self.all_tensors() if tensor.is_cuda}
        if self.options.device is not None or not gpus:
            home = home_device(self.ticket.group, self.options)
            gpus |= {home} if home.type == GPU else set()
        return gpus

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
