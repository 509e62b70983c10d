"""A toy transport: ranks are threads of one process, and a message is an array in a dict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from reshard.live.copy.reduce import Arrived
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import Message, Mode, message_of
from reshard.live.program.rounds import Round, Transfer
from reshard.live.session.control import Hello, Ready, Released
from reshard.live.session.mailbox import Inbox
from reshard.live.transport.base import Transport, compile_copies

CALL = 0

Messages = dict[tuple[int, int, int], np.ndarray[Any, Any]]
"""By sender, receiver and round."""


def staged(peer: int, transfers: Iterable[Transfer]) -> Message:
    """All of a message is packed."""
    return message_of(peer, list(transfers), lambda _: Mode.STAGED)


class InProcessTransport(Transport):
    """Exchanges with other threads."""

    def __init__(
        self, rank: int, bound: BoundTensors, inboxes: Mapping[int, Inbox], messages: Messages
    ) -> None:
        self.rank, self.bound, self.inboxes, self.messages = rank, bound, inboxes, messages
        self.peers = frozenset(inboxes) - {rank}

    def label(self, peer: int) -> str:
        return "this process"

    def send_hellos(self) -> None:
        for peer in self.peers:
            self.inboxes[peer].put(self.rank, Hello(CALL))

    def begin(self, round_: Round) -> int:
        for peer, transfers in round_.sends.items():
            message, copies = staged(peer, transfers), CopyList()
            message.pack(copies, 0, self.bound.staging)
            data = np.empty(message.staged_bytes, np.uint8)
            compile_copies(copies, self.bound).run(self.bound, data.ctypes.data, data.nbytes)
            self.messages[self.rank, peer, round_.number] = data
            self.inboxes[peer].put(self.rank, Ready(CALL, round_.number))
        return sum(transfer.num_bytes for one in round_.sends.values() for transfer in one)

    def receive(self, round_: Round, peers: Collection[int], arrived: Arrived) -> None:
        for peer in peers:
            data, copies = self.messages[peer, self.rank, round_.number], CopyList()
            message = staged(peer, round_.receives[peer])
            for transfer, at in message.unpack(copies, 0, self.bound.staging):
                arrived[id(transfer)] = data.ctypes.data + at
            compile_copies(copies, self.bound).run(self.bound, data.ctypes.data, data.nbytes)

    def release(self, round_: Round, peers: Collection[int]) -> None:
        for peer in peers:
            del self.messages[peer, self.rank, round_.number]
            self.inboxes[peer].put(self.rank, Released(CALL, round_.number))

    def unreleased(self, round_: Round) -> Collection[int]:
        released = self.inboxes[self.rank].released
        return [peer for peer in round_.sends if (peer, round_.number) not in released]

    def close(self, ok: bool) -> None:
        """There is nothing to give back."""
