"""This rank's connections to the other ranks of a session: its store, and sockets on this host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from reshard.live.session.control import Retired
from reshard.live.session.listener import HostPeer
from reshard.live.session.mailbox import Mailbox
from reshard.live.session.shared_memory import AbortFlags, BufferPool, SharedBuffer
from reshard.live.session.store import StoreClient, TCPStore

__all__ = ["Connections", "Resource"]


class Resource(Protocol):
    """What a transport keeps for a session between calls, such as a process group."""

    def release(self) -> None:
        """Free the buffers that are kept for the next call."""

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""

    def end_threads(self) -> None:
        """Let all threads end that wait for work."""

    def close(self) -> None:
        """The session is over."""


R = TypeVar("R", bound=Resource)


@dataclass(eq=False)
class Connections:
    """The connected ranks of a session, as one of them sees them."""

    rank: int
    ranks: tuple[int, ...]
    store: TCPStore
    client: StoreClient
    """Makes requests to the store."""
    hosts: dict[int, str]
    """The host identity of each rank."""
    flags: AbortFlags
    peers: dict[int, HostPeer]
    """The other ranks of this host."""
    first_call: int
    """The call that connected them."""
    last_failed: int = -1
    """The last call that this rank knows to have failed."""
    quarantine: list[object] = field(default_factory=list)
    """Tensors of failed calls that a stopped process might still write into."""

    def __post_init__(self) -> None:
        sockets = {rank: peer.socket for rank, peer in self.peers.items()}
        self.mailbox = Mailbox(sockets, self.first_call)
        leader, lost = self.leader, self.mailbox.lost
        self.client.has_ended = lambda: leader in lost
        self.buffers = BufferPool(self._retire)
        self._resources: dict[object, Resource] = {}

    @property
    def leader(self) -> int:
        """The rank that serves the store."""
        return self.ranks[0]

    @property
    def spans_hosts(self) -> bool:
        """Whether any two ranks can only talk over the network."""
        return len(set(self.hosts.values())) > 1

    def resource(self, make: Callable[[Connections], R]) -> R:
        """What a transport keeps for this session; made when it is first asked for."""
        found = self._resources.get(make)
        if found is None:
            found = self._resources.setdefault(make, make(self))
        return cast(R, found)

    def existing(self, make: Callable[[Connections], R]) -> R | None:
        """The same, if it was ever made."""
        return cast("R | None", self._resources.get(make))

    def release(self) -> None:
        """Free all buffers that are kept for the next call."""
        self.buffers.release()
        for resource in tuple(self._resources.values()):
            resource.release()

    def release_for(self, thread: int | None) -> None:
        """Release the locks of a thread that an exception has taken out of its call."""
        self.mailbox.release_for(thread)
        self.buffers.lock.release_for(thread)
        for resource in tuple(self._resources.values()):
            resource.release_for(thread)

    def _retire(self, buffer: SharedBuffer) -> None:
        for peer in buffer.known_to:
            self.mailbox.send(peer, Retired(0, buffer.number))
        buffer.close()

    def end_threads(self) -> None:
        """Let all threads end that wait for work."""
        for resource in tuple(self._resources.values()):
            resource.end_threads()
        self.client.close()

    def close(self) -> None:
        """Close sockets and free memory."""
        for resource in tuple(self._resources.values()):
            resource.close()
        self.mailbox.shut()
        self.buffers.release()
        self.end_threads()
