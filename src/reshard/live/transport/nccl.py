"""The transport between GPUs, over NCCL: ranks exchange Hellos on the host, then only enqueue work.

Every round is one launch that packs and copies (one more for each change of dtype), one exchange,
and one launch that unpacks, all on the caller's stream: what the caller enqueues next may change
sources and use results. An exchange is one group call of sends and receives. Where every rank sends
the same large message to all others, it is an all-gather: NCCL carries that from rank to rank
instead of sending it to each of them. Sums stay sends, because only these can be added up in the
order of ranks, and an all-to-all is the same sends inside NCCL.

The host waits for the Hellos of peers, because NCCL matches messages by their order only: without
them two ranks in different calls would exchange each other's data. It also makes one request to the
store, while the Hellos are on their way: which NCCL group the call uses. After a failure that is a
new one.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from reshard.errors import LiveError
from reshard.live.copy.cuda_driver import stream_of
from reshard.live.copy.gpu import TensorTable, TorchCopies
from reshard.live.copy.reduce import Arrived
from reshard.live.failure.agreement import await_all
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import NCCL, Message, lay_out, message_of, on_grid
from reshard.live.program.rounds import Program, Round, Transfer
from reshard.live.session.control import Cause, Ready
from reshard.live.session.rendezvous import Connections, Resource
from reshard.live.session.store import PrefixStore, Task, clone_of
from reshard.live.transport.base import Transport
from reshard.live.transport.gloo import GlooHellos, direct_views
from reshard.live.transport.gloo_group import GlooGroup, await_task, begin_epoch, finish_epoch
from reshard.live.transport.gpu_memory import StagingBuffer
from reshard.live.transport.in_flight import InFlight, InFlightCall
from reshard.live.transport.nccl_group import NcclGroup

GATHER_BYTES = 4 << 20
"""Messages from this size on are gathered. Measured on 4 ranks: below it sends take less time,
above it 15 to 25 % more (``benchmarks/reports/gpu_move.md``)."""

CLOSE_SECONDS = 2.0
"""Seconds that an exiting process waits for messages that peers have not received."""

_groups: weakref.WeakSet[NcclGroups] = weakref.WeakSet()


class NcclGroups(Resource):
    """What a session keeps for moves between GPUs: the group, the staging buffer, the watcher.

    After a failure the next call makes a new group.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.staging = StagingBuffer()
        self._group: NcclGroup | None = None
        self._epoch = 0
        _groups.add(self)

    def group(self, watch: Watch, device: torch.device, asked: Task[Any] | None) -> NcclGroup:
        """The group of a call; if there is none, or a call failed, all ranks create it together."""
        decided = finish_epoch(watch, asked)
        epoch = self._epoch if decided is None else decided
        if self._group is not None and not self._group.aborted and self._epoch == epoch:
            return self._group
        connections, key = self._connections, f"gpu/{epoch}"
        connections.resource(InFlight).settle()
        await_all(watch, key, lambda peer: "it to open NCCL")
        # All ranks are here, so nothing is in flight on the old group.
        if self._group is not None:
            self._group.abort()
        others = frozenset(connections.ranks) - {connections.rank}
        group = self._group = NcclGroup(
            PrefixStore(key, clone_of(connections.store)),
            connections.ranks.index(connections.rank),
            len(connections.ranks),
            device,
            wait=partial(await_task, watch, others, "it to open NCCL"),
        )
        self._epoch = epoch
        return group

    def release(self) -> None:
        self.staging.release()

    def close(self) -> None:
        """Wait until peers have received what is in flight to them, then close the group."""
        self.release()
        if self._group is not None and not self._group.aborted:
            self._connections.resource(InFlight).settle()
            with contextlib.suppress(LiveError):
                self._group.close(_close_wait)


@atexit.register
def _close_all() -> None:
    for groups in list(_groups):
        groups.close()


def _close_wait(task: Task[Any]) -> None:
    if not task.wait(CLOSE_SECONDS):
        raise LiveError("NCCL did not close in time")


@dataclass(frozen=True, eq=False, slots=True)
class _NcclRound:
    """The messages of one rank in one round, compiled for tensors of the same strides."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    before: TorchCopies  # packs messages, and copies what stays on this rank
    after: TorchCopies  # unpacks messages
    addends: Sequence[tuple[Transfer, int]]  # where addends are in the staging buffer
    num_bytes: int  # the size of the staging buffer
    gathers: bool = False
    """Whether it is an all-gather of the staging buffer, in which every rank has a slot."""


class NcclTransport(Transport):
    """Exchanges messages with all peers of a call, from GPU to GPU."""

    fuses_copies = True
    _group: NcclGroup
    """With the staging buffer and the table of tensors: once all peers have called."""
    _staging: torch.Tensor
    _tensors: TensorTable | None = None
    _direct: frozenset[int] = frozenset()
    """Peers to and from whose tensors large blocks go without staging."""
    _closed = False

    def __init__(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        peers: Collection[int],
        device: torch.device,
        in_flight: InFlightCall,
        gloo: GlooGroup | None,
        copies: bool,
        gathers: bool,
        reason: Callable[[int], str],
    ) -> None:
        """``gloo`` carries the Hellos to ranks of other hosts.

        ``copies`` says whether it also copies what stays on this rank, ``gathers`` whether all
        ranks reach each other like this and send the same to all, ``reason`` why a peer is not
        reached otherwise.
        """
        super().__init__(watch, program, bound, peers)
        self._copies, self._gathers, self._reason = copies, gathers, reason
        self.in_flight = in_flight
        self.device = self.gpu = device
        self._groups = watch.connections.resource(NcclGroups)
        self._far = None if gloo is None else GlooHellos(watch, gloo)
        near = watch.connections.peers.keys()
        self._near = self.peers & near
        if self._far is not None:
            watch.by_network = self.peers - near
        self._asked = begin_epoch(watch)

    def label(self, peer: int) -> str:
        reason = self._reason(peer)
        return f"NCCL ({reason})" if reason else "NCCL"

    def send_hellos(self) -> None:
        """Send Hellos over the mailbox to ranks of this host, over gloo to others."""
        hello = self.watch.hello(on_gpu=1, strided=int(bool(self.bound.strides)))
        for peer in self._near:
            self.watch.mailbox.send(peer, hello)
        if self._far is not None:
            self._far.exchange(self.peers - self._near, hello)

    def _open(self) -> TensorTable:
        """Get the group and the staging buffer of the call, once all peers have called."""
        watch, hellos = self.watch, dict(self.watch.inbox.hellos)
        others = sorted(peer for peer in self.peers if not hellos[peer].on_gpu)
        if others:
            text = f"rank {self.program.rank} moves from GPU to GPU and ranks {others} by way of "
            watch.fail(Cause("disagree", f'{text}the host: give check="always" to compare again'))
        self.in_flight.await_turn()
        self._group = self._groups.group(watch, self.device, self._asked)
        if self._group.device != self.device:
            text = (
                f"the tensors of rank {watch.connections.rank} are on {self.device} and those of "
                f"its earlier moves were on {self._group.device}: keep to one GPU per rank"
            )
            watch.fail(Cause("tensor", text))
        if not self.bound.strides:
            self._direct = frozenset(peer for peer in self.peers if not hellos[peer].strided)
        # The most that any round stages; kept, as large plans compile rounds in every call.
        kept, key = self.program.round(0).kept, ("nccl staging", self.peers, self._direct)
        if key not in kept:
            rounds = map(self.program.round, range(self.program.num_rounds))
            kept[key] = max(self._round(round_).num_bytes for round_ in rounds)
        stream = stream_of(self.device)
        self._staging = self._groups.staging.take(kept[key], self.device, stream)
        self._tensors = self._table(self._staging, stream)
        return self._tensors

    def _table(self, staging: torch.Tensor, stream: int) -> TensorTable:
        """The tensors of the call; addresses that are those of the last call are not uploaded."""
        kept, key = self.program.round(0).kept, "nccl tensors"
        place = self.bound.addresses, staging.data_ptr(), stream
        known, table = kept.get(key, (None, None))
        if known != place:
            table = TensorTable.of(self.bound, staging)
            kept[key] = place, table.with_tensors({})  # it must not keep tensors alive
            return table
        tensors = {**self.bound.tensors, self.bound.staging: staging}
        return table.with_tensors(tensors)  # type: ignore[no-any-return]

    def begin(self, round_: Round) -> int:
        """Enqueue packing, the exchange and unpacking on the current stream."""
        tensors = self._tensors or self._open()
        self.watch.check()
        todo = self._round(round_)
        todo.before.launch(tensors)
        self._exchange(round_, todo)
        todo.after.launch(tensors)
        inbox = self.watch.inbox
        for peer in self.peers & round_.receives.keys():
            inbox.ready[peer, round_.number] = Ready(self.watch.call, round_.number)
        return sum(message.staged_bytes for message in (*todo.sends, *todo.receives))

    def _exchange(self, round_: Round, todo: _NcclRound) -> None:
        if not todo.sends and not todo.receives:
            return
        peers = self.peers & (round_.sends.keys() | round_.receives.keys())

        def what(peer: int) -> str:
            part = self.program.part_text(round_, peer)
            return part if peer in round_.receives else f"it to take {part}"

        connect = f"it to connect for {self.program.round_text(round_.number)}"
        wait, group = partial(await_task, self.watch, peers, connect), self._group
        try:
            if todo.gathers:
                work = group.all_gather(self._staging[: todo.num_bytes], wait)
            else:
                sends = self._tensors_of(todo.sends, True)
                work = group.exchange(sends, self._tensors_of(todo.receives, False), wait)
        except LiveError as error:
            rank = self.watch.connections.rank
            calls = self.watch.connections.resource(InFlight)
            self.watch.fail(calls.cause_of(group, error, rank))
        self.in_flight.add(work, peers, what)
        work.join()

    def _tensors_of(
        self, messages: Sequence[Message], sending: bool
    ) -> list[tuple[int, torch.Tensor]]:
        """The memory that is sent or received into, in the same order on both ends."""
        ranks, memory = self.watch.connections.ranks, []
        for message in messages:
            index, at = ranks.index(message.peer), message.offset
            if message.staged_bytes:
                memory.append((index, self._staging[at : at + message.staged_bytes]))
            memory += [(index, view) for view in direct_views(message, self.bound, sending)]
        return memory

    def receive(self, round_: Round, peers: Collection[int], arrived: Arrived) -> None:
        """Messages are unpacked already; only addends are still in the staging buffer.

        Nothing has to be released: the stream keeps the order of what is enqueued.
        """
        for transfer, at in self._round(round_).addends:
            arrived[id(transfer)] = self._staging[at : at + transfer.num_bytes]

    def close(self, ok: bool) -> None:
        """Let the next call enqueue; the session's watcher follows what is in flight."""
        if self._closed:
            return
        self.in_flight.end_turn()
        if not ok:
            self.in_flight.give_up()
        self._closed = True  # not before: an exception of a signal handler must not skip the abort
        if self._far is not None:
            self._far.close(ok)

    def _round(self, round_: Round) -> _NcclRound:
        key = ("nccl", self.peers, self._direct, self._copies)
        compiled: _NcclRound | None = round_.kept.get(key)
        if compiled is None:
            compiled = round_.kept[key] = self._compile(round_)
        return compiled

    def _compile(self, round_: Round) -> _NcclRound:
        staging, place = self.bound.staging, self.watch.connections.ranks.index
        slot = self._slot_bytes(round_)
        if slot:
            own, end = slot * place(self.program.rank), slot * (len(self.peers) + 1)
            sends = [replace(message_of(*next(iter(round_.sends.items()))), offset=own)]
            receives = [
                replace(message_of(peer, some), offset=slot * place(peer))
                for peer, some in round_.receives.items()
            ]
        else:
            sends, at = lay_out(self._messages(round_.sends))
            receives, end = lay_out(self._messages(round_.receives), at)
        before, after = CopyList(), CopyList()
        for one in sends:
            one.pack(before, one.offset, staging)
        for transfer in round_.copies if self._copies else ():
            if transfer.addend < 0:
                before.add(transfer.width, transfer.source, transfer.destination)
        addends = [some for one in receives for some in one.unpack(after, one.offset, staging)]
        copies = TorchCopies(before), TorchCopies(after)
        return _NcclRound(sends, receives, *copies, addends, end, bool(slot))

    def _slot_bytes(self, round_: Round) -> int:
        """The size of a slot if the round is an all-gather, else 0.

        Every rank finds the same: each sends one message to all others, so all see all sizes.
        """
        others = len(self.watch.connections.ranks) - 1
        if not self._gathers or not others == len(round_.sends) == len(round_.receives):
            return 0
        messages = [next(iter(round_.sends.values())), *round_.receives.values()]
        sizes = {sum(one.num_bytes for one in transfers) for transfers in messages}
        return on_grid(sizes.pop()) if len(sizes) == 1 and min(sizes) >= GATHER_BYTES else 0

    def _messages(self, side: dict[int, list[Transfer]]) -> Iterator[Message]:
        for peer, transfers in side.items():
            if peer in self.peers:
                yield NCCL.message(peer, transfers, peer in self._direct)
