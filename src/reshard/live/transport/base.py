"""The interface of a transport: how messages get from one rank to another.

To add a transport, write a class with the methods of `Transport` and let ``call.py`` choose it for
the peers that it reaches. These are all concepts that it needs:

1. **Transport**: carries the messages of one call between this rank and some of its peers. It is
round_
   for one call; what should outlive the call is a `Resource` of the session's connections.
2. **Session** (``watch.session``, ``watch.connections``): the ranks of the call and how this rank
is
   connected to them: a store for all ranks, a mailbox and shared memory for those of its host.
3. **Program** and **Round**: what this rank sends, receives and copies in each round. Both ends of
a
   message derive the same transfers in the same order, so a message has no header.
4. **Transfer**: strided blocks of tensors that go from one rank to another in one round.
5. **CopyBlocks**: the one description of strided copies; bases are numbers, so it is compiled once
   (`Round.kept` keeps what you compile) and run for the addresses of each call.
6. **BoundTensors**: the tensors of this call and their addresses, by base number.
7. **Message** and **Policy**: which transfers of a message are staged and which go straight between
   tensors.
8. **Staging**: memory for packed messages. It counts against the plan's memory cap, so
   `Transport.begin` says how much it used.
9. **Inbox**: what has arrived for this call. A transport adds a `Ready` when a message is there,
and
   marks as released what the peer has read; from any thread, followed by ``mailbox.wake()``.
10. **Watch**: waits and fails. Never wait in another way: ``watch.wait`` is what notices lost
ranks,
    aborts and timeouts.
11. **Cause**: why a call failed; ``watch.fail(cause)`` makes all ranks raise it. 12. **Options and
report**: what the user asked for, and `Transport.label` for what the report shows.

The executor (``exchange.py``) calls the methods in this order on every rank:

    send_hellos            tell every peer that this rank has entered the call
    (wait for all Hellos)
    per round:  begin      make own messages available, prepare to receive
                receive    a peer's message is there: bring it into the tensors
                release    the message is not needed any more
                unreleased own messages that peers have not read yet; the round waits for them
    close                  the call is over, well or badly
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch

from reshard.live.program.rounds import Round

__all__ = ["Transport"]


class Transport(ABC):
    """Carries the messages of one call between this rank and some of its peers."""

    fuses_copies = False
    """Whether `begin` also makes the copies that stay on this rank."""

    staging: torch.Tensor | None = None
    """The staging buffer, if it is on a GPU: sums read messages there."""

    peers: frozenset[int]
    """The ranks that it reaches, of those that this one exchanges something with."""

    @abstractmethod
    def label(self, peer: int) -> str:
        """How a peer is reached, for the report."""

    @abstractmethod
    def send_hellos(self) -> None:
        """Send a `Hello` to every peer; those of peers arrive in the inbox."""

    @abstractmethod
    def begin(self, round_: Round) -> int:
        """Make this rank's messages of a round available, and prepare to receive those of peers.

        Gives the bytes that are staged.
        """

    @abstractmethod
    def receive(self, round_: Round, peers: Collection[int], arrived: dict[int, int]) -> None:
        """Bring the messages of these peers, which are ready, into the tensors.

        Addends are not: ``arrived`` gets where each of their transfers begins, by its ``id``.
        """

    @abstractmethod
    def release(self, round_: Round, peers: Collection[int]) -> None:
        """The messages of these peers are not needed any more."""

    @abstractmethod
    def unreleased(self, round_: Round) -> Collection[int]:
        """The peers that must read this rank's messages before it goes on, and have not."""

    @abstractmethod
    def close(self, ok: bool) -> None:
        """The call is over; after a failure no peer may touch the tensors. May be repeated."""
