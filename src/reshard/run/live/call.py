"""One move on one rank: greet, exchange round by round, add up, and be done.

Every round is the same few steps: put what others need where they find it, copy what stays, take
what has come, add up, and wait until others have taken theirs. Where a peer is reached (memory of
this host, or the network) is the carrier's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from reshard.bytesize import format_bytes
from reshard.errors import ReshardError
from reshard.run.live.addresses import own_offsets, own_views
from reshard.run.live.agreement import Terms, check_tags, check_words, raise_disagreement
from reshard.run.live.cause import Cause
from reshard.run.live.copying import Copies, Place
from reshard.run.live.faults import Watch
from reshard.run.live.holding import Held
from reshard.run.live.lots import Lot, Program, Round
from reshard.run.live.passage import Passage
from reshard.run.live.report import RoundReport, RunReport
from reshard.run.live.summing import Sum

__all__ = ["Call", "Carrier"]


class Greeter(Protocol):
    """A way to let some peers know that this rank has entered a call."""

    peers: frozenset[int]

    def name(self, peer: int) -> str:
        """How a peer is reached."""

    def greet(self) -> None:
        """Say that this rank has entered the call."""

    def unmet(self) -> list[int]:
        """Peers that have not entered the call."""

    def learn(self) -> None:
        """Take note of what greetings said."""

    def close(self, well: bool) -> None:
        """The call is over, well or badly."""


class Carrier(Greeter, Protocol):
    """A way to exchange messages with some peers."""

    def put(self, number: int, sends: dict[int, list[Lot]]) -> int:
        """Make this rank's messages of a round available; gives bytes staged."""

    def expect(self, number: int, receives: dict[int, list[Lot]]) -> int:
        """Make room for messages of a round; gives bytes staged."""

    def take(
        self, number: int, peer: int, lots: Sequence[Lot], summed: Callable[[Lot, int], None]
    ) -> None:
        """Move a message that is ready into its place."""

    def taken(self, number: int, peer: int, lots: Sequence[Lot]) -> None:
        """A message is not needed any more."""

    def unread(self, number: int, sends: dict[int, list[Lot]]) -> list[int]:
        """Peers that have not taken this rank's messages of a round."""


class Call:
    """One move on one rank."""

    def __init__(
        self,
        program: Program,
        held: tuple[Held, Held],
        watch: Watch | None,
        terms: Terms,
        carriers: Sequence[Carrier],
        report: RunReport,
        after_round: Callable[[int, RoundReport], None],
    ) -> None:
        self.program = program
        self.held = held
        self._watch = watch
        self.terms = terms
        self.carriers = carriers
        self.report = report
        self.after_round = after_round
        self.number = -1
        self.carrier_of = {peer: carrier for carrier in carriers for peer in carrier.peers}
        report.transports = {peer: c.name(peer) for peer, c in self.carrier_of.items()}

    @property
    def watch(self) -> Watch:
        """Who looks after this call; there is none where nothing is exchanged."""
        assert self._watch is not None
        return self._watch

    def run(self) -> None:
        """Do all of it."""
        well = False
        try:
            self._begin()
            self._rounds()
            well = True
        finally:
            self._close(well)

    def go_on(self) -> None:
        """Do what follows once all have met."""
        well = False
        try:
            self._rounds()
            well = True
        finally:
            self._close(well)

    def _close(self, well: bool) -> None:
        for carrier in self.carriers:
            carrier.close(well)

    def _rounds(self) -> None:
        for number in range(self.program.num_rounds):
            self.number = number
            with self.report.round(number) as part:
                self._round(number, self.program.round(number), part)
            self.after_round(number, part)

    def _begin(self) -> None:
        """What happens before the first round."""
        if self.carriers:
            self._meet()

    def status(self) -> str:
        """How far this rank has come, for messages."""
        done = self.report.bytes_received + self.report.bytes_copied
        total = self.program.num_bytes
        where = (
            f"round {self.number + 1} of {self.program.num_rounds}"
            if self.number >= 0
            else "no round begun"
        )
        amount = f"{format_bytes(done)} of {format_bytes(total)} done"
        return f"on rank {self.program.rank}: {where}, {amount}"

    def _meet(self) -> None:
        for carrier in self.carriers:
            carrier.greet()
        self.watch.wait(
            self._unmet, lambda peer: f"it to begin the move of {self._first_name(peer)}"
        )
        self.watch.has_met()
        for carrier in self.carriers:
            carrier.learn()

    def _unmet(self) -> list[int]:
        hellos = dict(self.watch.inbox.hellos)
        check_tags(self.watch, {peer: hello.tag for peer, hello in hellos.items()})
        if any(hello.digest != self.watch.digest for hello in hellos.values()):
            raise_disagreement(self.watch, self.terms)
        self._check_words()
        return [peer for carrier in self.carriers for peer in carrier.unmet()]

    def _check_words(self) -> None:
        words = {peer: hello.round for peer, hello in tuple(self.watch.inbox.hellos.items())}
        check_words(self.watch, {**words, self.program.rank: self.watch.word})

    def _first_name(self, peer: int) -> str:
        for number in range(self.program.num_rounds):
            made = self.program.round(number)
            for lots in (made.receives.get(peer, []), made.sends.get(peer, [])):
                for lot in lots:
                    return f'"{lot.name}"'
        return "nothing"

    def _round(self, number: int, made: Round, part: RoundReport) -> None:
        sums: dict[int, Sum] = {}
        with part.phase("packing"):
            for carrier in self.carriers:
                part.bytes_staged += carrier.expect(number, made.receives)
                part.bytes_staged += carrier.put(number, made.sends)
        part.messages_sent = len(made.sends)
        part.bytes_sent = sum(lot.num_bytes for lots in made.sends.values() for lot in lots)
        with part.phase("unpacking"):
            self._copy(number, made, part, sums)
        if self._watch is not None:
            self._take_all(number, made, part, sums)
        if sums:
            with part.phase("unpacking"):
                self._add_up(number, made, part, sums)
        if self._watch is not None:
            self._wait(
                part,
                lambda: self._unread(number, made),
                lambda peer: self._to_take(made, peer, number),
            )

    def _copy(self, number: int, made: Round, part: RoundReport, sums: dict[int, Sum]) -> None:
        """What stays on this rank; its own addends wait for the others."""
        for lot in made.copies:
            part.bytes_copied += lot.num_bytes
            if lot.addend >= 0:
                sum_of(sums, lot, Sum).own.append(lot)
            else:
                self._copy_lot(lot)

    def _copy_lot(self, lot: Lot) -> None:
        ends = (lot.target, lot.source)
        bases = [self.held[end.side].address[end.tensor] for end in ends]
        if not all(base.all() for base in bases):
            Copies(lot.width, *(own_views(end, lot.width, self.held) for end in ends)).run()
            return
        strided = [side.strided for side in self.held]
        passage: Passage | None = self.program.recall(lot, "copy", strided)
        if passage is None:
            spots = (own_offsets(end, self.held[end.side]) for end in ends)
            passage = Passage(lot.width, *spots)
            self.program.remember(lot, "copy", strided, passage, len(passage))
        passage.run(*bases)

    def _take_all(self, number: int, made: Round, part: RoundReport, sums: dict[int, Sum]) -> None:
        """Take messages in the order in which they come."""
        pending = set(made.receives)
        ready = self.watch.inbox.ready

        def missing() -> set[int]:
            return set() if any((peer, number) in ready for peer in pending) else pending

        while pending:
            self._wait(part, missing, lambda peer: self._its_part(made, peer, number))
            for peer in [peer for peer in pending if (peer, number) in ready]:
                lots, carrier = made.receives[peer], self.carrier_of[peer]
                with part.phase("unpacking"):
                    carrier.take(number, peer, lots, lambda lot, at: _arrive(sums, lot, at))
                if all(lot.addend < 0 for lot in lots):
                    carrier.taken(number, peer, lots)
                part.messages_received += 1
                part.bytes_received += sum(lot.num_bytes for lot in lots)
                pending.remove(peer)

    def _add_up(self, number: int, made: Round, part: RoundReport, sums: dict[int, Sum]) -> None:
        largest = 0
        for one in sums.values():
            largest = max(largest, one.run(self._source_place, self._target_place))
        part.bytes_staged += largest
        for peer, lots in made.receives.items():
            if any(lot.addend >= 0 for lot in lots):
                self.carrier_of[peer].taken(number, peer, lots)

    def _source_place(self, lot: Lot) -> Place:
        return own_views(lot.source, lot.width, self.held)

    def _target_place(self, lot: Lot) -> Place:
        return own_views(lot.target, lot.width, self.held)

    def _unread(self, number: int, made: Round) -> list[int]:
        return [peer for carrier in self.carriers for peer in carrier.unread(number, made.sends)]

    def _wait(
        self,
        part: RoundReport,
        missing: Callable[[], Sequence[int] | set[int]],
        what: Callable[[int], str],
    ) -> None:
        began = time.perf_counter()
        self.watch.wait(missing, what)
        part.spent("waiting", began, time.perf_counter() - began)

    def _its_part(self, made: Round, peer: int, number: int) -> str:
        return f'its part of "{made.receives[peer][0].name}" in {self._which(number)}'

    def _to_take(self, made: Round, peer: int, number: int) -> str:
        return f'it to take its part of "{made.sends[peer][0].name}" in {self._which(number)}'

    def _which(self, number: int) -> str:
        return f"round {number + 1} of {self.program.num_rounds}"


S = TypeVar("S", bound=Sum)


def sum_of(sums: dict[int, S], lot: Lot, kind: type[S]) -> S:
    """The sum that a lot is a part of: all lots of a stack are one."""
    reduce = lot.stack.have.layout.reduce
    return sums.setdefault(id(lot.stack), kind(reduce[0] if reduce else "sum"))


def _arrive(sums: dict[int, Sum], lot: Lot, at: int) -> None:
    sum_of(sums, lot, Sum).arrived.append((lot, at))


class told:  # noqa: N801  # reads as a statement: with told(watch)
    """A failure of the engine inside is told to the other ranks of the call.

    Everything else that is raised, such as an interrupt, goes to the cleanup thread of sessions.
    Not a generator: Python would drop what a signal handler raises while one ends.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = self.watch
        if isinstance(error, ReshardError) and not watch.is_over:
            cause = Cause.of_any(error, watch.team.rank)
            watch.fail(Cause(cause.kind, f"{cause.text}, in {watch.move}"))
