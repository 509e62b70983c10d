"""What a rank copies in a call between GPUs that read each other's memory, compiled once per plan.

Reads of source tensors do not depend on rounds, so one launch makes those of all rounds. What is
left for later rounds: addends, which go to a staging buffer, parts that the sender has received
itself, and messages that the sender packs. The table of base addresses has the tensors of this rank
first, then the staging buffer, then what it reads of each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from reshard.errors import LiveError
from reshard.layout.columns import Ints, distinct
from reshard.live.copy.gpu import TorchCopies
from reshard.live.program.blocks import CopyList, Place
from reshard.live.program.messages import message_of, on_grid
from reshard.live.program.rounds import Program, Transfer
from reshard.live.session.shared_memory import REACHED, AbortFlags, CallSignals

ENTERED = 1  # the step at which a stream has reached the call, so that its source tensors are ready


def round_step(number: int) -> int:
    """The step at which what a rank sends in a round is ready, if it was not from the start."""
    return ENTERED + 1 + number


def done_step(number: int) -> int:
    """The step at which a rank has read all messages up to a round."""
    return 1 + number


class Pull:
    """What a rank copies in one go: a launch for each change of dtype."""

    def __init__(self, staging: int) -> None:
        self.waits: dict[int, int] = {}  # the step that each peer must have reached before
        self.addends: list[tuple[Transfer, int]] = []  # where addends are put in the staging buffer
        self.staging_bytes, self._staging, self.listed = 0, staging, CopyList()

    def add(self, transfer: Transfer, source: Place, peer: int = -1, step: int = 0) -> None:
        """Copy into the destination, or an addend into the staging buffer.

        What is read from a peer must be ready there: it is after this step.
        """
        destination = transfer.destination
        if step:
            self.waits[peer] = max(step, self.waits.get(peer, 0))
        if transfer.addend >= 0:
            destination = transfer.in_message(self.staging_bytes, self._staging)
            self.addends.append((transfer, self.staging_bytes))
            self.staging_bytes += on_grid(transfer.num_bytes)
        self.listed.add(transfer.width, source, destination)

    @cached_property
    def copies(self) -> TorchCopies:
        return TorchCopies(self.listed)


@dataclass(frozen=True, eq=False)
class Pulls:
    """Everything that a rank copies in a call."""

    first: Pull  # what it reads of source tensors, in all rounds
    later: Mapping[int, Pull]  # what is left of a round, by its number
    num_covered: int  # so many first rounds are complete after the first pull
    numbers: Mapping[int, Ints]
    """The base numbers of the tensors that are read from each peer, on that peer."""
    places: Mapping[int, int]  # where these begin in the table of base addresses

    @cached_property
    def staging_bytes(self) -> int:
        """The most that any round stages."""
        return max((pull.staging_bytes for pull in self.later.values()), default=0)

    @classmethod
    def of(cls, program: Program, peers: Collection[int], direct: Collection[int]) -> Pulls:
        """Compile what a rank reads of these peers; only some can be read directly."""
        rounds = [program.round(number) for number in range(program.num_rounds)]
        senders = {peer for round_ in rounds for peer in round_.receives}
        numbers, places = dict[int, Ints](), dict[int, int]()
        at = program.staging + 1
        for peer in sorted(senders & set(peers)):
            transfers = [one for round_ in rounds for one in round_.receives.get(peer, ())]
            read = distinct(np.concatenate([one.source.base for one in transfers]))
            numbers[peer] = read if peer in direct else np.array([program.staging])
            places[peer] = at
            at += len(numbers[peer])
        first, later = Pull(program.staging), {}
        for round_ in rounds:
            rest, step = Pull(program.staging), round_step(round_.number)
            for transfer in round_.copies:
                if transfer.addend < 0:  # sums read addends of this rank where they are
                    (rest if transfer.hop else first).add(transfer, transfer.source)
            for peer in (peer for peer in places if peer in round_.receives):
                for transfer, offset in message_of(peer, round_.receives[peer]).staged:
                    if peer not in direct:
                        source = transfer.in_message(offset, places[peer])
                        rest.add(transfer, source, peer, step)
                        continue
                    base = places[peer] + np.searchsorted(numbers[peer], transfer.source.base)
                    place = replace(transfer.source, base=base)
                    part = rest if transfer.hop or transfer.addend >= 0 else first
                    part.add(transfer, place, peer, step if transfer.hop else ENTERED)
            if rest.listed:
                later[round_.number] = rest
        return cls(first, later, min(later, default=len(rounds)), numbers, places)


class PeerViews(dict[int, torch.Tensor]):
    """Tensors by base number, for copies without a kernel; they are made as needed."""

    def __init__(self, view: Callable[[int], torch.Tensor]) -> None:
        self._view = view

    def __missing__(self, base: int) -> torch.Tensor:
        return self._view(base)


class GpuWork:
    """The GPU work of one call, for the thread that watches it.

    A call of the driver may block this process until a stream that waits is released, as freeing
    memory does, and any other call of the driver then waits for its lock. So the thread that
    releases the streams never calls the driver: it only reads signals.
    """

    def __init__(
        self,
        group: CallSignals,
        waits: Sequence[tuple[int, int, int]],
        flags: Sequence[AbortFlags],
    ) -> None:
        """``waits`` says for which peer's signal, of which kind and step, this rank's stream waits;
        ``flags`` are those of the other ranks."""
        self.group, self._waits, self._flags = group, waits, flags

    def begun(self) -> bool:
        return self.group.own.has_come(REACHED, self.group.call, ENTERED)

    def done(self) -> bool:
        """Whether everything was copied, here and by the peers that read from this rank."""
        # In this order: an abort, also that of a peer, lets everything pass. A peer marks the call
        # as failed before it releases the streams.
        call = self.group.call
        is_over = self.group.own.is_over(call)
        if self.group.aborted or (is_over and any(one.has_failed(call) for one in self._flags)):
            raise LiveError("a move between GPUs was aborted")
        return is_over

    def _missing(self) -> set[int]:
        """The peers whose signals have not come."""
        of, call = self.group.peers, self.group.call
        return {p for p, kind, step in self._waits if not of[p].has_come(kind, call, step)}

    def late(self, peers: Collection[int]) -> list[int]:
        """Those of the peers whose signals have not come; the others may have exited."""
        return sorted(self._missing() & set(peers))
