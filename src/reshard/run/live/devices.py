"""One move between GPUs: ranks greet each other on the host, then only give work to their GPUs.

Every round is one launch that packs and copies (one more for each change of dtype), one exchange,
and one launch that unpacks. All of it is on the caller's stream: sources may be changed and results
be used by what the caller gives to the GPU next. Nobody waits on the host but for the greetings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reshard.errors import LiveError
from reshard.run.live.call import Call, sum_of
from reshard.run.live.cause import Cause
from reshard.run.live.device_rounds import DeviceRound, Packet, among_of, room_bytes
from reshard.run.live.device_sums import DeviceSum
from reshard.run.live.device_wires import DeviceWires, patience
from reshard.run.live.faults import Watch
from reshard.run.live.flights import Flight
from reshard.run.live.holding import Held
from reshard.run.live.lots import Round
from reshard.run.live.mailbox import Kind, Message
from reshard.run.live.nccl import DeviceWire
from reshard.run.live.report import RoundReport

__all__ = ["DeviceCall", "Hellos", "greeting"]

BY_GPU = 1
"""What a greeting of such a move says in its field ``d``; that of another says 0 there."""


def greeting(held: tuple[Held, Held]) -> tuple[int, ...]:
    """The numbers ``a`` to ``d`` of a greeting: whether any tensor has strides of its own."""
    return (int(any(side.strided for side in held)), 0, 0, BY_GPU)


class Hellos:
    """Greets the ranks of this host, and carries nothing."""

    def __init__(self, watch: Watch, peers: frozenset[int], numbers: tuple[int, ...]) -> None:
        self.watch = watch
        self.peers = peers
        self.numbers = numbers

    def name(self, peer: int) -> str:
        """How a peer is reached, for the report."""
        return "NCCL"

    def greet(self) -> None:
        """Say that this rank has entered the call."""
        watch, mailbox = self.watch, self.watch.team.mailbox
        for peer in self.peers:
            numbers = (watch.word, *self.numbers, mailbox.num_over, watch.tag_code)
            mailbox.send(peer, Message(Kind.HELLO, watch.call, watch.digest, *numbers))

    def unmet(self) -> list[int]:
        """Peers that have not entered the call."""
        return [peer for peer in self.peers if peer not in self.watch.inbox.hellos]

    def learn(self) -> None:
        """What greetings said is looked up when it is needed."""

    def close(self, well: bool) -> None:
        """There is nothing to give back."""


class DeviceCall(Call):
    """One move between GPUs, on one rank."""

    def __init__(self, *common: Any, gpus: DeviceWires, device: torch.device) -> None:
        super().__init__(*common)
        self.gpus = gpus
        self.device = device
        self.flight: Flight | None = None
        self.report.transports = dict.fromkeys(self.carrier_of, "NCCL")
        self._wire: DeviceWire | None = None
        self._room: torch.Tensor | None = None
        self._plain: frozenset[int] = frozenset()

    def run(self) -> None:
        """Give all of it to the GPU; on any error everyone is told."""
        try:
            super().run()
        except BaseException as error:
            if self.flight is not None:
                self.flight.raised = True
                self.flight.fail(error if isinstance(error, LiveError) else LiveError(repr(error)))
            raise

    def _begin(self) -> None:
        super()._begin()
        self._check_ways()
        watch = self.watch
        watch.team.turns.wait(watch.call, watch.check)
        self._wire = self.gpus.wire(watch, self.device)
        if self._wire.device != self.device:
            watch.fail(
                Cause(
                    "tensor",
                    f"the tensors of rank {watch.team.rank} are on {self.device} and those of its "
                    f"moves before were on {self._wire.device}: keep to one GPU per rank",
                )
            )
        self.flight = self.gpus.flights.begin(watch, self._wire)
        if not any(side.strided for side in self.held):
            hellos = tuple(watch.inbox.hellos.items())
            self._plain = frozenset(peer for peer, hello in hellos if not hello.a)
        num_bytes = room_bytes(self.program, self._plain)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        number = stream.cuda_stream if stream is not None else 0
        self._room = self.gpus.room(num_bytes, self.device, number)
        self._among = among_of(self.held, self._room)

    def _check_ways(self) -> None:
        hellos = tuple(self.watch.inbox.hellos.items())
        others = [peer for peer, hello in hellos if hello.d != BY_GPU]
        if others:
            self.watch.fail(
                Cause(
                    "disagree",
                    f"rank {self.program.rank} moves from GPU to GPU and ranks {sorted(others)} by "
                    'way of the host: give check="always" to compare anew',
                )
            )

    def _round(self, number: int, made: Round, part: RoundReport) -> None:
        self.watch.check()
        todo = self._todo(made)
        with part.phase("packing"):
            for table in todo.before:
                table.launch_among(self._among)
            self._exchange(number, made, todo)
        with part.phase("unpacking"):
            for table in todo.after:
                table.launch_among(self._among)
            part.bytes_staged = todo.staged + self._add_up_there(made, todo)
        self._count(made, part)

    def _todo(self, made: Round) -> DeviceRound:
        """The tables of a round, kept with it while no strides change."""
        key = (self.held[0].strided, self.held[1].strided, self._plain)
        known, todo = made.kept.get("device", (None, None))
        if todo is None or known != key:
            todo = DeviceRound(made, self.held, self._plain)
            made.kept["device"] = (key, todo)
        assert isinstance(todo, DeviceRound)
        return todo

    def _exchange(self, number: int, made: Round, todo: DeviceRound) -> None:
        assert self._wire is not None
        assert self.flight is not None
        sends, receives = self._messages(todo.sends, True), self._messages(todo.receives, False)
        if not sends and not receives:
            return
        peers = frozenset(made.sends) | frozenset(made.receives)

        def what(peer: int) -> str:
            name = self._its_part if peer in made.receives else self._to_take
            return name(made, peer, number)

        wait = patience(self.watch, peers, f"it to connect for {self._which(number)}")
        try:
            exchange = self._wire.exchange(sends, receives, wait)
        except LiveError as error:
            self.watch.fail(self.gpus.flights.cause_of(self._wire, error))
        self.flight.add(exchange, peers, what)
        exchange.join()

    def _messages(self, packets: Sequence[Packet], sending: bool) -> list[tuple[int, torch.Tensor]]:
        assert self._room is not None
        ranks = self.watch.team.ranks
        return [
            (ranks.index(packet.peer), tensor)
            for packet in packets
            for tensor in packet.tensors(self._room, self.held, sending)
        ]

    def _add_up_there(self, made: Round, todo: DeviceRound) -> int:
        """Add up on the GPU; gives the bytes of the largest accumulator."""
        assert self._room is not None
        sums: dict[int, DeviceSum] = {}
        for lot, place in todo.addends():
            sum_of(sums, lot, DeviceSum).arrived.append((lot, place))
        for lot in made.copies:
            if lot.addend >= 0:
                sum_of(sums, lot, DeviceSum).own.append(lot)
        for one in sums.values():
            one.run_in(self._room, self.held)
        return max((one.num_bytes for one in sums.values()), default=0)

    def _count(self, made: Round, part: RoundReport) -> None:
        part.messages_sent, part.messages_received = len(made.sends), len(made.receives)
        for name, messages in (("sent", made.sends), ("received", made.receives)):
            lots = [lot for lots in messages.values() for lot in lots]
            setattr(part, f"bytes_{name}", sum(lot.num_bytes for lot in lots))
        part.bytes_copied = sum(lot.num_bytes for lot in made.copies)
