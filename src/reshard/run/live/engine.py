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

from reshard.errors import LiveError, TensorError
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
from reshard.run.live.prepared import Prepared, find_prepared, prepared_of
from reshard.run.live.progress import progress_of
from reshard.run.live.report import RoundReport, RunReport
from reshard.run.live.routes import (
    GPU,
    all_on_gpus,
    device_of,
    places_of_tensors,
)
from reshard.run.live.team import Team
from reshard.run.live.teams import team_of, teams

__all__ = ["Handle", "Options", "check", "release", "run", "start"]


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
    return start(plan, tensors, into=into, group=group, _thread=False, **options).wait()


def start(
    plan: Plan,
    tensors: Tensors,
    *,
    into: Tensors | None = None,
    group: dist.ProcessGroup | None = None,
    _thread: bool = True,
    **options: Any,
) -> Handle:
    """Begin to move; the handle's ``wait`` gives the tensors. All ranks start in one order."""
    try:
        return Handle(_made(plan, tensors, into, group, options), _thread)
    except KeyboardInterrupt:
        for team in teams(group or dist.group.WORLD):
            team.note_interrupt(team.num_calls - 1)
        raise


def refuse(
    plan: Plan, error: TensorError, *, group: dist.ProcessGroup | None = None, **options: Any
) -> NoReturn:
    """Raise an error that was found before the move, here and on the ranks that wait for it."""
    _made(plan, {}, None, group, options).refuse(error)


def _made(
    plan: Plan,
    tensors: Tensors,
    into: Tensors | None,
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
) -> Run:
    if not dist.is_initialized():
        raise LiveError(
            "a live move needs torch.distributed: call init_process_group first, or rs.simulate"
        )
    options.setdefault("transport", os.environ.get("RESHARD_TRANSPORT", "auto"))
    check_given(tensors, into, group)
    group = group or dist.group.WORLD
    assert group is not None
    return Run(Given(plan, tensors, into, group, options_of(options)))


class Run:
    """One call of ``run`` or ``start``: numbered when it is made, done when it runs."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.plan, self.into, self.options = given.plan, given.into, given.options
        plan, options, group = given.plan, given.options, given.group
        self.rank = dist.get_rank()
        self.began = time.perf_counter()
        self.report = RunReport(self.rank, -1, plan.digest, started=self.began)
        self.watch: Watch | None = None
        self.call: Call | None = None
        self.prepared: Prepared | None = None
        self.team: Team | None = None
        self.is_first = self.compares = False
        """Whether to compare with the other ranks. All must decide alike, so it is decided here:
        calls are made in one order, but those in flight go on in any."""
        prepared = prepared_of(plan)
        if self.rank not in prepared.ranks:
            return
        given.check_member(self.rank)
        self.prepared = prepared
        if options.tell_grad and prepared.greetings is None:
            prepared.greetings = greetings_of(plan)
        self.greetings: Greetings = (options.tell_grad and prepared.greetings) or {}
        if prepared.talks or options.check == "always" or self.greetings:
            self.team = team_of(group, prepared.ranks, options.timeout, prepared.what)
            self.report.call = self.team.next_call()
            self.team.turns.enter(self.report.call)
            self.is_first = self.team.is_new(self._terms_key())
            self.compares = self.is_first or options.check == "always"
            self.watch = Watch(
                self.team,
                self.report.call,
                self.prepared.digest,
                timeout=options.timeout,
                deadline=options.deadline,
                status=self._status,
                word=GRAD_CODES[options.grad],
                move=prepared.what,
            )

    def run(self) -> dict[str, torch.Tensor]:
        """Do the move."""
        if self.prepared is None:
            return {}
        try:
            if self.watch is None:
                return self._move(None)
            with told(self.watch):
                self._raise_earlier(self.watch)
                return self._move(self.watch)
        finally:
            if self.watch is not None:
                self._close(self.watch)
            self.report.seconds = time.perf_counter() - self.began

    def _status(self) -> str:
        """How far this rank has come, for messages."""
        return self.call.status() if self.call else f"on rank {self.rank}: no round begun"

    def _terms_key(self) -> tuple[bytes, str]:
        assert self.prepared is not None
        return self.prepared.digest, self.options.transport

    def _close(self, watch: Watch) -> None:
        """The call is over; if it was the first to be compared and failed, the next one is."""
        if self.is_first and (self.compares or watch.is_over):
            watch.team.agreed.discard(self._terms_key())
        watch.team.turns.leave(watch.call)
        if self.flight is None:
            watch.close()
        else:
            self.flight.close()

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
            hello.round == GRAD_CODES[True] for hello in self.watch.inbox.hellos.values()
        )

    def refuse(self, error: TensorError) -> NoReturn:
        """Give up before the move has begun, and say why."""
        if self.watch is not None:
            try:
                self.watch.fail(Cause("tensor", str(error)))
            finally:
                self._close(self.watch)
        raise error

    def interrupt(self) -> None:
        """Tell the other ranks that this one gives up."""
        if self.watch is not None:
            self.watch.interrupt()

    def _move(self, watch: Watch | None) -> dict[str, torch.Tensor]:
        assert self.prepared is not None
        try:
            held, result = self.given.bind(self.prepared, self.rank)
        except TensorError as error:
            if watch is not None:
                watch.fail(Cause("tensor", str(error)))
            raise
        if watch is not None:
            watch.touched = held
        options, word = {"transport": self.options.transport}, GRAD_CODES[self.options.grad]
        terms = Terms(self.plan, options, places_of_tensors(held, self.given.group), word)
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
        if self.options.atomic and self.into is not None:
            self._commit(watch, result)
            return {name: tensor for name, tensor in self.into.items() if tensor is not None}
        return result

    def _agree(self, watch: Watch, terms: Terms) -> bool:
        """Compare with the other ranks, unless this plan was compared before.

        Gives whether it goes from GPU to GPU; once compared it does in all calls, or in none.
        """
        team, key = watch.team, self._terms_key()
        if self.compares:
            said = agree(watch, terms)
            team.routes[key] = self.options.transport == "auto" and all_on_gpus(said)
            self.compares = False
        while key not in team.routes and key in team.agreed:
            watch.check()  # a call before this one is comparing
            time.sleep(0.001)
        by_gpu = team.routes.get(key, False)
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
        assert self.prepared is not None
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
        assert self.prepared is not None
        team, numbers, peers = watch.team, greeting(held), self._peers()
        near = frozenset(peers & team.links.keys())
        found: list[Greeter] = [Hellos(watch, near, numbers)] if near else []
        wire = team.wire(watch, False)
        if wire is not None:
            found.append(Network(watch, self.prepared.program, held, peers - near, wire, numbers))
        return found

    def _peers(self) -> frozenset[int]:
        """The ranks that this one greets."""
        assert self.prepared is not None
        program = self.prepared.program
        return program.peers[0] | program.peers[1] | self.greetings.get(self.rank, frozenset())

    def _commit(self, watch: Watch | None, result: Mapping[str, torch.Tensor]) -> None:
        """Every rank has all of its part: only now does anybody change its tensors."""
        if watch is not None:
            watch.barrier("complete")
        assert self.into is not None
        for name, tensor in result.items():
            mine = self.into.get(name)
            if mine is not None:
                mine.detach().copy_(tensor)
