"""What a team keeps for moves between GPUs: the wire, the staging room, and the watching thread.

The wire is a NCCL group of all ranks of the team. After a failure it is of no use to anybody, and
the next call makes a new one; all ranks know that by a number in the team's store, which grows.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable

import torch

from reshard.errors import LiveError
from reshard.run.live.c10d import PrefixStore, clone_of
from reshard.run.live.faults import Watch
from reshard.run.live.flights import Flights
from reshard.run.live.nccl import DeviceWire
from reshard.run.live.team import Team

__all__ = ["DeviceWires", "wires_of"]

CLOSE_SECONDS = 2.0
"""How long a process that ends waits for messages that others have not fetched."""

AT_ONCE = 0.05
"""What takes no longer needs nobody to look after it."""


class DeviceWires:
    """One team's way from GPU to GPU."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.flights = Flights()
        self._wire: DeviceWire | None = None
        self._epoch = 0
        self._room: torch.Tensor | None = None
        self._stream = 0
        _known.add(self)

    def wire(self, watch: Watch, device: torch.device) -> DeviceWire:
        """The team's wire, made by all ranks together if there is none, or a call has failed."""
        epoch = self.team.epoch(watch)
        if self._wire is None or self._wire.aborted or self._epoch != epoch:
            self._renew(watch, device, epoch)
        assert self._wire is not None
        return self._wire

    def _renew(self, watch: Watch, device: torch.device, epoch: int) -> None:
        team, key = self.team, f"gpu/{epoch}"
        self.flights.settle()
        team.meet(watch, key, "it to open NCCL")
        # All have come, so nobody has anything under way on the old one.
        if self._wire is not None:
            self._wire.abort()
        others = frozenset(team.ranks) - {team.rank}
        self._wire = DeviceWire(
            PrefixStore(key, clone_of(team.store)),
            team.ranks.index(team.rank),
            len(team.ranks),
            device,
            wait=patience(watch, others, "it to open NCCL"),
        )
        self._epoch = epoch

    def room(self, num_bytes: int, device: torch.device, stream: int) -> torch.Tensor:
        """Memory for messages: the same in every call, as long as all are on one stream.

        What one stream writes there another might still read, so each gets memory of its own.
        """
        room = self._room
        if (
            room is None
            or room.numel() < num_bytes
            or (room.device, self._stream)
            != (
                device,
                stream,
            )
        ):
            self._room = None
            del room
            self._room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._stream = stream
        assert self._room is not None
        return self._room

    def release(self) -> None:
        """Free the room."""
        self._room = None

    def close(self) -> None:
        """Let peers have what is under way to them, then leave."""
        self.release()
        if self._wire is not None and not self._wire.aborted:
            self.flights.settle()
            with contextlib.suppress(LiveError):
                self._wire.close(_briefly)
        self.flights.close()


def patience(watch: Watch, peers: frozenset[int], what: str) -> Callable[[threading.Event], None]:
    """Waits as long as the call may, and looks out for what becomes of its ranks."""

    def wait(done: threading.Event) -> None:
        if not done.wait(AT_ONCE):
            watch.wait(lambda: () if done.is_set() else peers, lambda peer: what, AT_ONCE)

    return wait


def _briefly(done: threading.Event) -> None:
    if not done.wait(CLOSE_SECONDS):
        raise LiveError("NCCL did not close in time")


_known: weakref.WeakSet[DeviceWires] = weakref.WeakSet()


def wires_of(team: Team) -> DeviceWires:
    """What a team keeps for moves between GPUs; made at the first."""
    if team.gpus is None:
        team.gpus = DeviceWires(team)
    return team.gpus


@atexit.register
def _close_all() -> None:
    for wires in list(_known):
        wires.close()
