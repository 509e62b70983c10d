"""The interface of a transport, and the executor, which runs the rounds of a call on transports.

To add a transport, write a subclass of `Transport` and let ``call.py`` choose it for the peers that
it reaches. It needs these concepts and no others:

 1. Transport     Carries the messages of one call between this rank and some of its peers. State
                  that outlives the call is a resource of the session's connections.
 2. Session       The ranks of the call and this rank's connections to them: a store for all ranks,
                  a mailbox and shared memory for those of its host.
 3. Round         What this rank sends, receives and copies in one step of the plan. Both ends of a
                  message derive the same transfers in the same order, so it has no header.
 4. Transfer      Strided blocks of tensors that go from one rank to another in one round.
 5. CopyBlocks    The description of strided copies. Tensors are numbers in a table of base
                  addresses, so it is compiled once (`Round.kept`) and runs in every call.
 6. BoundTensors  The tensors of this call, and that table.
 7. Message       The transfers to one peer in one round; a `Policy` decides which of them are
                  staged and which are copied directly between tensors. It is compiled once
                  and kept with its round.
 8. Staging       Memory for packed messages. It counts against the plan's memory limit, so `begin`
                  returns its size.
 9. Inbox         What has arrived for this call. A transport puts a `Ready` there when a message is
                  available, and a `Released` when a peer has read one, from any thread, and then
                  calls ``mailbox.wake()``.
10. Watch         The only way to wait: it detects lost ranks, aborts and timeouts.
11. Cause         Why a call failed; ``watch.fail(cause)`` makes all its ranks raise.
12. Options       What the user asked for; the run report shows `Transport.label` for each peer.

The executor (`Exchange`) calls transports in this order, on every rank:

    send_hellos       tell every peer that this rank has entered the call
                      ... wait until the Hellos of all peers have arrived
    in every round:
        begin         make this rank's messages available, prepare to receive
                      ... copy what stays on this rank
        receive       once a peer's message is available: unpack or read it
        release       once it is read, or its addends are added up
        unreleased    ... wait until no peer still has to read this rank's messages
        end_round     the round has ended
    close             the call has ended, or has failed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from time import perf_counter

import torch

from reshard.live.copy.gpu import TorchCopies
from reshard.live.copy.host import Bases, HostCopies
from reshard.live.copy.reduce import Arrived, OrderedSum, sums_of
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import IovecPlan, Message
from reshard.live.program.rounds import Program, Round
from reshard.live.session.mailbox import Inbox
from reshard.show.run_report import RoundReport, RunReport
from reshard.text import format_bytes


class Transport(ABC):
    """Carries the messages of one call between this rank and some of its peers."""

    fuses_copies = False
    """Whether `begin` also makes the copies that stay on this rank."""

    gpu: torch.device | None = None
    """The GPU on which it leaves addends; None: on the host."""

    def __init__(
        self, watch: Watch, program: Program, bound: BoundTensors, peers: Collection[int]
    ) -> None:
        """``peers`` are those that it reaches."""
        self.watch, self.program, self.bound = watch, program, bound
        self.peers = frozenset(peers)

    @abstractmethod
    def label(self, peer: int) -> str:
        """How a peer is reached, for the report."""

    @abstractmethod
    def send_hellos(self) -> None:
        """Send a `Hello` to every peer; those of peers arrive in the inbox."""

    @abstractmethod
    def begin(self, round_: Round) -> int:
        """Make this rank's messages available, and prepare to receive; returns staged bytes."""

    @abstractmethod
    def receive(self, round_: Round, peers: Collection[int], arrived: Arrived) -> None:
        """Copy the available messages of these peers into the tensors.

        Addends stay where they are: ``arrived`` gets the place of each transfer, by its ``id``.
        """

    def release(self, round_: Round, peers: Collection[int]) -> None:  # noqa: B027 - see below
        """Give back the messages of these peers, which have been read."""

    def unreleased(self, round_: Round) -> Collection[int]:
        """The peers that still have to read this rank's messages before the round can end."""
        return ()

    def end_round(self, round_: Round) -> None:  # noqa: B027 - some have nothing to do
        """Called when no peer has to read this rank's messages of the round any more."""

    @abstractmethod
    def close(self, ok: bool) -> None:
        """End the call; after a failure no peer may access the tensors. May be repeated."""


Wait = Callable[[Callable[[], Collection[int]], Callable[[int], str]], None]
"""Waits until no peer is missing; the second function says what a peer is waited for."""


def common_ranks(peers: frozenset[int], others: Set[int]) -> frozenset[int]:
    """The ranks in both; if these are all peers the same object, which look-ups compare fast."""
    return peers if peers <= others else peers & others


Copies = HostCopies | TorchCopies


def compile_copies(copies: CopyList, tensors: Bases) -> Copies:
    """Compile copies for the devices that the tensors of a call are on."""
    return HostCopies(copies) if tensors.is_host else TorchCopies(copies)


def compile_received(message: Message, bound: BoundTensors, awaited: bool = False) -> Message:
    """Compile a message that this rank receives."""
    copies = CopyList()
    addends = message.unpack(copies, 0, bound.staging)
    unpack = compile_copies(copies, bound) if copies else None
    iovecs = IovecPlan(message.reads, False) if message.reads else None
    return replace(message, copies=unpack, addends=addends, iovecs=iovecs, awaited=awaited)


NO_MESSAGES = Inbox()  # the inbox of a call without peers


class Exchange:
    """Runs the rounds of one call on one rank."""

    transports: Sequence[Transport] = ()
    inbox = NO_MESSAGES
    number = -1
    done = 0  # bytes that have been received or copied
    _fused = False
    _gpu: torch.device | None = None
    _part: RoundReport | None = None  # the report of the round, if the caller wants one
    _since = 0.0  # when the last phase of the round ended

    def __init__(
        self,
        program: Program,
        bound: BoundTensors,
        report: RunReport | None = None,
        after_round: Callable[[Round], None] | None = None,
    ) -> None:
        self.program, self.bound = program, bound
        self.report, self._after_round = report, after_round

    def connect(self, transports: Sequence[Transport], inbox: Inbox, wait: Wait) -> None:
        """Exchange messages on these transports; without them nothing is sent or received."""
        self.transports, self.inbox, self._wait = transports, inbox, wait
        for one in transports:
            if one.fuses_copies:
                self._fused = True
            if one.gpu is not None:
                self._gpu = one.gpu

    def run(self) -> None:
        program, bound, transports, report = self.program, self.bound, self.transports, self.report
        key = self._fused, bound.is_host
        for number in range(program.num_rounds):
            self.number, round_ = number, program.round(number)
            if report is not None:
                self._since = perf_counter()
                self._part = report.begin_round(number, self._since)
            arrived: Arrived = {}
            staged = 0
            for transport in transports:
                staged += transport.begin(round_)
            if report is not None:
                self._spent("packing")
            copies, sums = round_.kept.get(key) or self._compile_own(round_, key)
            if copies is not None:
                copies.run(bound)
                if report is not None:
                    self._spent("unpacking")
            if round_.receives:
                self._receive(round_, sums, arrived)
            if sums:
                staged += self._add_up(round_, sums, arrived)
            if transports:
                self._await_release(round_)
            self.done += round_.num_kept_bytes
            if report is not None:
                self._finish_report(round_, staged)
            if self._after_round is not None:
                self._after_round(round_)

    def _spent(self, phase: str) -> None:
        """Count the time since the last phase as time of this one."""
        if self._part is not None:
            now = perf_counter()
            self._part.spent(phase, self._since, now - self._since)
            self._since = now

    def _receive(self, round_: Round, sums: Sequence[OrderedSum], arrived: Arrived) -> None:
        """Receive what comes from peers, in the order in which it comes."""
        available, number = self.inbox.ready, round_.number
        pending = set(round_.receives)
        while pending:
            ready = {peer for peer in pending if (peer, number) in available}
            if not ready:
                self._await_message(round_, pending)
                continue
            for transport in self.transports:
                mine = transport.peers & ready
                if mine:
                    transport.receive(round_, mine, arrived)
                    if not sums:
                        transport.release(round_, mine)
            pending -= ready
            if self._part is not None:
                self._spent("unpacking")

    def _compile_own(self, round_: Round, key: object) -> tuple[Copies | None, list[OrderedSum]]:
        """Copies of what stays on this rank, and sums; own addends are in the sums.

        A transport that fuses copies makes them itself.
        """
        listed, both = CopyList(), (round_.copies, *round_.receives.values())
        for one in () if self._fused else round_.copies:
            if one.addend < 0:
                listed.add(one.width, one.source, one.destination)
        copies = compile_copies(listed, self.bound) if listed else None
        addends = [one for transfers in both for one in transfers if one.addend >= 0]
        sums = sums_of(addends, self.program.staging) if addends else []
        round_.kept[key] = copies, sums
        return copies, sums

    def _add_up(self, round_: Round, sums: Sequence[OrderedSum], arrived: Arrived) -> int:
        """Add up, and let go of the messages; gives the bytes of the largest accumulator."""
        largest = max(one.run(self.bound, arrived, self._gpu) for one in sums)
        for transport in self.transports:
            transport.release(round_, transport.peers & round_.receives.keys())
        self._spent("unpacking")
        return largest

    def _await_message(self, round_: Round, pending: set[int]) -> None:
        """Wait until one of these peers has a message for this rank."""
        ready, number = self.inbox.ready, round_.number

        def missing() -> set[int]:
            return set() if any((peer, number) in ready for peer in pending) else pending

        self._wait(missing, lambda peer: self.program.part_text(round_, peer))
        self._spent("waiting")

    def _await_release(self, round_: Round) -> None:
        for transport in self.transports:
            if transport.unreleased(round_):
                self._wait(
                    lambda: [peer for one in self.transports for peer in one.unreleased(round_)],
                    lambda peer: f"it to take {self.program.part_text(round_, peer)}",
                )
        for transport in self.transports:
            transport.end_round(round_)

    def _finish_report(self, round_: Round, staged: int) -> None:
        part = self._part
        assert part is not None
        if self.transports:
            self._spent("waiting")
        part.bytes_sent, part.bytes_received, part.bytes_copied = round_.bytes
        part.messages_sent, part.messages_received = len(round_.sends), len(round_.receives)
        part.bytes_staged = staged
        part.seconds = perf_counter() - part.started

    def status(self) -> str:
        """How far this rank has come, for errors."""
        program = self.program
        where = program.round_text(self.number) if self.number >= 0 else "no round begun"
        amount = f"{format_bytes(self.done)} of {format_bytes(program.num_bytes)} done"
        return f"on rank {program.rank}: {where}, {amount}"
