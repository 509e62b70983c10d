"""The executor: it runs the rounds of a call on one rank, with any transports.

Every round has the same steps: make own messages available, copy what stays on this rank, receive
what arrives, add up, and wait until peers have read this rank's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import perf_counter

from reshard.live.copy.gpu import TorchCopies
from reshard.live.copy.host import Bases, HostCopies
from reshard.live.copy.reduce import Arrived, OrderedSum, sums_of
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.rounds import Program, Round
from reshard.live.session.mailbox import Inbox
from reshard.live.transport.base import Transport
from reshard.show.run_report import RoundReport, RunReport
from reshard.text import format_bytes

__all__ = ["Copies", "Exchange", "Wait", "compile_copies"]

Wait = Callable[[Callable[[], Collection[int]], Callable[[int], str]], None]
"""Waits until no peer is missing; the second function says what a peer is waited for."""


Copies = HostCopies | TorchCopies


def compile_copies(copies: CopyList, tensors: Bases) -> Copies:
    """Compile copies for the devices that the tensors of a call are on."""
    return HostCopies(copies.tables()) if tensors.is_host else TorchCopies(copies.tables())


class Exchange:
    """Runs the rounds of one call on one rank."""

    def __init__(
        self,
        program: Program,
        bound: BoundTensors,
        transports: Sequence[Transport],
        inbox: Inbox,
        wait: Wait,
        report: RunReport | None = None,
        after_round: Callable[[Round], None] | None = None,
    ) -> None:
        self.program, self.bound, self.transports = program, bound, transports
        self.inbox, self._wait = inbox, wait
        self.report, self._after_round = report, after_round
        self.number = -1
        self.done = 0
        """Bytes that have been received or copied."""
        self._fused = any(one.fuses_copies for one in transports)
        self._gpu = next((one.gpu for one in transports if one.gpu is not None), None)

    def run(self) -> None:
        """Run all rounds."""
        inbox, transports = self.inbox, self.transports
        for number in range(self.program.num_rounds):
            self.number = number
            round_ = self.program.round(number)
            began, staged = perf_counter(), 0
            arrived: Arrived = {}
            part = None if self.report is None else self.report.begin_round(number, began)
            for transport in transports:
                staged += transport.begin(round_)
            if part is not None:
                part.spent("packing", began)
            if round_.copies and not self._fused:
                self._copy(round_, part)
            sums = self._sums(round_)
            pending = set(round_.receives)
            while pending:
                ready = {peer for peer in pending if (peer, number) in inbox.ready}
                if not ready:
                    self._await_message(round_, pending, part)
                    continue
                began = perf_counter()
                for transport in transports:
                    mine = transport.peers & ready
                    if mine:
                        transport.receive(round_, mine, arrived)
                        if not sums:
                            transport.release(round_, mine)
                pending -= ready
                if part is not None:
                    part.spent("unpacking", began)
            if sums:
                staged += self._add_up(round_, sums, arrived, part)
            self._await_release(round_, part)
            self._finish_round(round_, part, staged)

    def _copy(self, round_: Round, part: RoundReport | None) -> None:
        """Copy what stays on this rank; its own addends wait for the others."""
        began, key = perf_counter(), ("copies", self.bound.is_host)
        copies: Copies | None = round_.kept.get(key)
        if copies is None:
            listed = CopyList()
            for transfer in round_.copies:
                if transfer.addend < 0:
                    listed.add(transfer.width, transfer.source, transfer.destination)
            copies = round_.kept[key] = compile_copies(listed, self.bound)
        copies.run(self.bound)
        if part is not None:
            part.spent("unpacking", began)

    def _sums(self, round_: Round) -> list[OrderedSum]:
        found: list[OrderedSum] | None = round_.kept.get("sums")
        if found is None:
            both = (round_.copies, *round_.receives.values())
            addends = [one for transfers in both for one in transfers if one.addend >= 0]
            found = sums_of(addends, self.program.staging) if addends else []
            round_.kept["sums"] = found
        return found

    def _add_up(
        self,
        round_: Round,
        sums: Sequence[OrderedSum],
        arrived: Arrived,
        part: RoundReport | None,
    ) -> int:
        """Add up, and let go of the messages; gives the bytes of the largest accumulator."""
        began, largest, bound = perf_counter(), 0, self.bound
        for one in sums:
            used = one.run(bound, arrived, self._gpu)
            largest = max(largest, used)
        for transport in self.transports:
            transport.release(round_, transport.peers & round_.receives.keys())
        if part is not None:
            part.spent("unpacking", began)
        return largest

    def _await_message(self, round_: Round, pending: set[int], part: RoundReport | None) -> None:
        """Wait until one of these peers has a message for this rank."""
        began, ready, number = perf_counter(), self.inbox.ready, round_.number

        def missing() -> set[int]:
            return set() if any((peer, number) in ready for peer in pending) else pending

        self._wait(missing, lambda peer: self.program.part_text(round_, peer))
        if part is not None:
            part.spent("waiting", began)

    def _await_release(self, round_: Round, part: RoundReport | None) -> None:
        began = perf_counter()
        if any(transport.unreleased(round_) for transport in self.transports):
            self._wait(
                lambda: [peer for one in self.transports for peer in one.unreleased(round_)],
                lambda peer: f"it to take {self.program.part_text(round_, peer)}",
            )
        if part is not None:
            part.spent("waiting", began)

    def _finish_round(self, round_: Round, part: RoundReport | None, staged: int) -> None:
        for transport in self.transports if self._fused else ():
            transport.end_round(round_)
        sent, received, copied = round_.bytes
        self.done += received + copied
        if part is not None:
            part.bytes_sent, part.bytes_received, part.bytes_copied = sent, received, copied
            part.messages_sent, part.messages_received = len(round_.sends), len(round_.receives)
            part.bytes_staged = staged
            part.seconds = perf_counter() - part.started
        if self._after_round is not None:
            self._after_round(round_)

    def status(self) -> str:
        """How far this rank has come, for errors."""
        program = self.program
        where = program.round_text(self.number) if self.number >= 0 else "no round begun"
        amount = f"{format_bytes(self.done)} of {format_bytes(program.num_bytes)} done"
        return f"on rank {program.rank}: {where}, {amount}"
