"""The door to the live engine: run a plan with the tensors of this rank.

res = plan.run(tensors, group=group)              # {name: local tensor}
handle = plan.start(tensors, into=mine)           # goes on in a thread
res = handle.wait(); print(handle.report)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from reshard.errors import LiveError, ReshardError, TensorError
from reshard.planning.plan import Plan
from reshard.run.live.agreement import Terms, agree, suspect_comparing
from reshard.run.live.binding import Given, check_given
from reshard.run.live.call import Call, Carrier, Greeter, told
from reshard.run.live.cause import Cause
from reshard.run.live.device_wires import wires_of
from reshard.run.live.devices import DeviceCall, Hellos, greeting
from reshard.run.live.faults import Watch
from reshard.run.live.finishing import Donation, fill_zeros
from reshard.run.live.flights import Flight
from reshard.run.live.greeting import Greetings, greetings_of
from reshard.run.live.handle import Handle
from reshard.run.live.holding import (
    Held,
    Tensors,
)
from reshard.run.live.lots import HAVE, WANT
from reshard.run.live.neighbours import Neighbours
from reshard.run.live.network import Network
from reshard.run.live.options import GRAD_CODES, Options, options_of
from reshard.run.live.prepared import find_prepared, prepared_of
from reshard.run.live.progress import progress_of
from reshard.run.live.report import RoundReport, RunReport
from reshard.run.live.routes import (
    GPU,
    all_on_gpus,
    device_of,
    places_of_tensors,
)
from reshard.run.live.session import ABANDONED, Session, Ticket, counted, session_of, teams
from reshard.run.live.tags import AheadError
from reshard.run.live.team import Team

__all__ = ["Handle", "Options", "begin", "check", "refuse", "release", "run"]


def release(plan: Plan) -> None:
    """Free the buffers and tables that are kept for the next call."""
    found = find_prepared(plan)
    if found is not None:
        found.program.forget()
    for team in teams():
        team.arenas.release()
        if team.gpus is not None:
            team.gpus.release()


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise what went wrong in a move between GPUs, if no call has raised it yet.

    Moves between GPUs only give work to them. This does not wait for them: it tells what is known.
    """
    for team in teams(group):
        if team.gpus is not None:
            team.gpus.flights.check()


def run(
    plan: Plan,
    tensors: Tensors,
    *,
    into: Tensors | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Move this rank's tensors along a plan; every rank of the two layouts calls it."""
    return start(plan, tensors, into=into, group=group, thread=False, **options).wait()


def start(
    plan: Plan,
    tensors: Tensors,
    *,
    into: Tensors | None = None,
    group: dist.ProcessGroup | None = None,
    thread: bool = True,
    **options: Any,
) -> Handle:
    """Begin to move; the handle's ``wait`` gives the tensors. All ranks start in one order."""
    return counted(
        group,
        lambda: plan.parties,
        lambda ticket: begin(ticket, plan, tensors, into, options, thread=thread),
    )


def begin(
    ticket: Ticket,
    plan: Plan,
    tensors: Tensors,
    into: Tensors | None,
    options: dict[str, Any],
    *,
    thread: bool,
) -> Handle:
    """Begin a call for which the caller has a ticket; it is done when this returns, or goes on in
    a thread."""
    return Handle(_made(ticket, plan, tensors, into, options), thread)


def refuse(plan: Plan, error: BaseException, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raise an error that was found before the move, here and on the ranks that wait for it."""

    def fail(_: Ticket) -> NoReturn:
        raise error

    counted(group, lambda: plan.parties, fail)


def pass_silently(ticket: Ticket, plan: Plan, options: Mapping[str, Any]) -> bool:
    """Count a call of a plan along which nothing moves, if the ranks have compared it before."""
    prepared, group = find_prepared(plan), ticket.group or dist.group.WORLD
    if prepared is None or not isinstance(group, dist.ProcessGroup):
        return False
    if options.get("check") == "never":
        ticket.finish()
        return True
    if len(prepared.ranks) > 1:
        session = session_of(group, prepared.ranks)
        transport = options.get("transport") or os.environ.get("RESHARD_TRANSPORT", "auto")
        if (prepared.digest, transport) not in session.agreed:
            return False
        session.pass_by(ticket, options.get("tag"))
    ticket.finish()
    return True


def _made(
    ticket: Ticket, plan: Plan, tensors: Tensors, into: Tensors | None, options: dict[str, Any]
) -> Run:
    if not dist.is_initialized():
        raise LiveError(
            "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
        )
    options.setdefault("transport", os.environ.get("RESHARD_TRANSPORT", "auto"))
    check_given(tensors, into, ticket.group)
    group = ticket.group or dist.group.WORLD
    assert group is not None
    return Run(ticket, Given(plan, tensors, into, group, options_of(options)))


class Run:
    """One call of ``run`` or ``start``: numbered when it is made, done when it runs."""

    def __init__(self, ticket: Ticket, given: Given) -> None:
        self.ticket, self.given = ticket, given
        self.plan, self.into, self.options = given.plan, given.into, given.options
        self.rank = dist.get_rank()
        self.began = time.perf_counter()
        self.report = RunReport(self.rank, -1, given.plan.digest, started=self.began)
        self.watch: Watch | None = None
        self.call: Call | None = None
        self.session: Session | None = None
        self.ranks = given.plan.parties
        self.greetings: Greetings = {}
        self.is_first = self.compares = False
        """Whether to compare with the other ranks. All must decide alike, so it is decided here:
        calls are made in one order, but those in flight go on in any."""
        if self.rank in self.ranks:
            given.check_member(self.rank)
            silent = self.options.check == "never" and not prepared_of(given.plan).talks
            if len(self.ranks) > 1 and not silent:
                self.session = session_of(given.group, self.ranks)
                self.report.call = self.session.begin(ticket, self.options.tag)
                self.is_first = self.session.is_new(ticket, self._terms_key())
                self.compares = self.is_first or self.options.check == "always"

    def run(self) -> dict[str, torch.Tensor]:
        """Do the move."""
        self.ticket.undo = self._close
        if self.rank not in self.ranks:
            self.ticket.finish()
            return {}
        prepared = self.prepared = prepared_of(self.plan)
        if self.options.tell_grad and prepared.greetings is None:
            prepared.greetings = greetings_of(self.plan)
        self.greetings = (self.options.tell_grad and prepared.greetings) or {}
        failed: BaseException | None = None
        try:
            together = prepared.talks or self.compares or self.greetings or self.options.atomic
            if self.session is None or not together:
                return self._move(None)
            return self._move_together(self.session)
        except BaseException as error:
            failed = error
            raise
        finally:
            # What else is raised is told to the other ranks by the cleanup thread, which closes.
            if failed is None or isinstance(failed, ReshardError):
                self._close()

    def _move_together(self, session: Session) -> dict[str, torch.Tensor]:
        """Do the move; a rank that left out a call which the others have given up moves up."""
        while True:
            team = session.connect(self.ticket, self.options.timeout, self.prepared.what)
            watch = self.watch = self._new_watch(team)
            self.ticket.watch_of = partial(_itself, watch)
            team.turns.enter(watch.call)
            try:
                with told(watch):
                    self._raise_earlier(watch)
                    return self._move(watch)
            except AheadError as ahead:
                if not session.move_up(self.ticket):
                    raise ahead.cause.error(self._status()) from None
                watch.close()
                team.turns.leave(watch.call)
                self.report.call = self.ticket.number

    def _new_watch(self, team: Team) -> Watch:
        return Watch(
            team,
            self.ticket.number,
            self.prepared.digest,
            timeout=self.options.timeout,
            deadline=self.options.deadline,
            status=self._status,
            word=GRAD_CODES[self.options.grad],
            move=self.prepared.what,
            tag=self.ticket.tag,
        )

    def _status(self) -> str:
        """How far this rank has come, for messages."""
        return self.call.status() if self.call else f"on rank {self.rank}: no round begun"

    def _terms_key(self) -> tuple[bytes, str]:
        return bytes.fromhex(self.plan.digest), self.options.name

    def _close(self) -> None:
        """The call is over; if it was the first to be compared and failed, the next one is."""
        session, watch = self.session, self.watch
        failed = watch is not None and watch.is_over
        if session is not None and self.is_first and (self.compares or failed):
            self._has_not_compared(session)
        if watch is not None:
            watch.team.turns.leave(watch.call)
            if self.flight is None:
                watch.close()
            else:
                self.flight.close()
        elif session is not None:
            session.close(self.ticket.number)
        self.ticket.finish()
        self.report.seconds = time.perf_counter() - self.began

    def _has_not_compared(self, session: Session) -> None:
        """The first call of a plan has failed on this rank, and perhaps not on others.

        So it is compared again. But where nothing is exchanged, ranks on which it did not fail
        would not take part in that, so there only a difference leads to another comparison.
        """
        cause = None if self.watch is None else self.watch.cause
        meets = self.prepared.talks or self.options.atomic
        if meets or (cause is not None and cause.kind in ("disagree", "tensor")):
            session.agreed.discard(self._terms_key())
        else:
            session.has_compared(self._terms_key())

    @property
    def flight(self) -> Flight | None:
        """What this call has under way on a GPU."""
        return self.call.flight if isinstance(self.call, DeviceCall) else None

    def has_landed(self) -> bool:
        """Whether the GPU is done with what it was given, as far as this is known."""
        return self.flight is None or self.flight.landed.is_set()

    def land(self) -> None:
        """Wait for that."""
        if self.flight is not None:
            self.flight.wait()

    def _raise_earlier(self, watch: Watch) -> None:
        """What failed on a GPU after its call had returned, if nobody knows of it yet."""
        if watch.team.gpus is not None:
            try:
                watch.team.gpus.flights.check()
            except LiveError as error:
                watch.fail(Cause.after(error))

    @property
    def grad_seen(self) -> bool:
        """Whether a peer said in its greeting that gradients are wanted."""
        return self.watch is not None and any(
            hello.round == GRAD_CODES[True] for hello in tuple(self.watch.inbox.hellos.values())
        )

    def interrupt(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up."""
        ABANDONED.put((self.ticket, error))
        self.ticket.await_cleanup()

    def _move(self, watch: Watch | None) -> dict[str, torch.Tensor]:
        try:
            held, result = self.given.bind(self.prepared, self.rank)
        except TensorError as error:
            if watch is not None:
                watch.fail(Cause("tensor", str(error)))
            raise
        if watch is not None:
            watch.touched = held
        word, places = GRAD_CODES[self.options.grad], places_of_tensors(held, self.given.group)
        terms = Terms(self.plan, self.options.shared, places, word, self.ticket.tag)
        by_gpu = watch is not None and self._agree(watch, terms)
        if watch is not None:
            watch.suspect = partial(suspect_comparing, watch, terms)
        donation = Donation(self.prepared.program, held[HAVE]) if self.options.donate else None

        def after_round(number: int, part: RoundReport) -> None:
            if donation is not None:
                donation.after(number)
            bar.advance(part.bytes_sent + part.bytes_received + part.bytes_copied)

        common = (self.prepared.program, held, watch, terms)
        if watch is not None and by_gpu:
            greeters = self._greeters(watch, held)
            gpus, device = wires_of(watch.team), device_of(held)
            self.call = DeviceCall(
                *common, greeters, self.report, after_round, gpus=gpus, device=device
            )
        else:
            carriers = [] if watch is None else self._carriers(watch, held)
            self.call = Call(*common, carriers, self.report, after_round)
        self.report.planning = time.perf_counter() - self.began
        watched = self.options.progress if self.rank == self.prepared.ranks[0] else False
        with contextlib.closing(progress_of(watched, self.prepared.program)) as bar:
            self.call.run()
            if self.prepared.program.part.fills:
                fill_zeros(self.prepared.program, held[WANT])
            if self.options.sync or self.options.atomic:
                self.land()
        if not self.options.atomic:
            return result
        if watch is not None:
            watch.barrier("complete")
        return result if self.into is None else self._commit(self.into, result)

    def _agree(self, watch: Watch, terms: Terms) -> bool:
        """Compare with the other ranks, unless this plan was compared before.

        Gives whether it goes from GPU to GPU; once compared it does in all calls, or in none.
        """
        team, session, key = watch.team, self.session, self._terms_key()
        assert session is not None
        if self.compares:
            said = agree(watch, terms)
            session.routes[key] = self.options.transport == "auto" and all_on_gpus(said)
            session.has_compared(key)
            self.compares = False
        while session.is_comparing(key):
            watch.check()  # a call before this one is comparing
            time.sleep(0.001)
        by_gpu = session.routes.get(key, False)
        if not by_gpu:
            team.turns.leave(watch.call)
        elif not all_on_gpus({self.rank: terms.devices, -1: GPU}):
            watch.fail(
                Cause(
                    "tensor",
                    f"the tensors of rank {self.rank} are on {terms.devices} and this plan was "
                    "found to move from GPU to GPU: keep them there, or give "
                    'check="always" on all ranks to compare anew in every call',
                )
            )
        return by_gpu

    def _carriers(self, watch: Watch, held: tuple[Held, Held]) -> list[Carrier]:
        """Who of this rank's peers is reached how."""
        team, program, peers = watch.team, self.prepared.program, self._peers()
        near = frozenset() if self.options.transport == "network" else peers & team.links.keys()
        carriers: list[Carrier] = []
        if near:
            transport = self.options.transport
            carriers.append(Neighbours(watch, program, held, frozenset(near), transport))
        wire = team.wire(watch, self.options.transport == "network")
        if wire is not None:
            carriers.append(Network(watch, program, held, frozenset(peers - near), wire))
        return carriers

    def _greeters(self, watch: Watch, held: tuple[Held, Held]) -> list[Greeter]:
        """How peers are greeted before a move from GPU to GPU."""
        team, numbers, peers = watch.team, greeting(held), self._peers()
        near = frozenset(peers & team.links.keys())
        found: list[Greeter] = [Hellos(watch, near, numbers)] if near else []
        wire = team.wire(watch, False)
        if wire is not None:
            found.append(Network(watch, self.prepared.program, held, peers - near, wire, numbers))
        return found

    def _peers(self) -> frozenset[int]:
        """The ranks that this one greets."""
        program = self.prepared.program
        return program.peers[0] | program.peers[1] | self.greetings.get(self.rank, frozenset())

    def _commit(self, into: Tensors, result: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy into the caller's tensors, now that every rank has all of its part."""
        given = {name: tensor for name, tensor in into.items() if tensor is not None}
        for name in given.keys() & result.keys():
            given[name].detach().copy_(result[name])
        return given


def _itself(watch: Watch) -> Watch:
    return watch
