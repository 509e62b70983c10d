"""The interface of a transport, which carries messages from one rank to another.

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
                  staged and which are copied directly between tensors.
 8. Staging       Memory for packed messages. It counts against the plan's memory limit, so `begin`
                  returns its size.
 9. Inbox         What has arrived for this call. A transport puts a `Ready` there when a message is
                  available, and a `Released` when a peer has read one, from any thread, and then
                  calls ``mailbox.wake()``.
10. Watch         The only way to wait: it detects lost ranks, aborts and timeouts.
11. Cause         Why a call failed; ``watch.fail(cause)`` makes all its ranks raise.
12. Options       What the user asked for; the run report shows `Transport.label` for each peer.

The executor (``exchange.py``) calls a transport in this order, on every rank:

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
from collections.abc import Collection

import torch

from reshard.live.copy.reduce import Arrived
from reshard.live.program.rounds import Round

__all__ = ["Transport"]


class Transport(ABC):
    """Carries the messages of one call between this rank and some of its peers."""

    fuses_copies = False
    """Whether `begin` also makes the copies that stay on this rank."""

    gpu: torch.device | None = None
    """The GPU on which it leaves addends; None: on the host."""

    peers: frozenset[int]
    """The peers that it reaches."""

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

    @abstractmethod
    def release(self, round_: Round, peers: Collection[int]) -> None:
        """Give back the messages of these peers, which have been read."""

    @abstractmethod
    def unreleased(self, round_: Round) -> Collection[int]:
        """The peers that still have to read this rank's messages before the round can end."""

    def end_round(self, round_: Round) -> None:  # noqa: B027 - most have nothing to do
        """Called when no peer has to read this rank's messages of the round any more."""

    @abstractmethod
    def close(self, ok: bool) -> None:
        """End the call; after a failure no peer may access the tensors. May be repeated."""
