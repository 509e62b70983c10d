"""The transport between GPUs of one host: every rank reads its peers' tensors, in one launch.

A rank tells its peers where its tensors are and that its stream has been asked to signal when they
are ready. Every receiver lets its stream wait for these signals, reads everything that it wants
with one launch of the copy kernel, and signals that it has read; the streams of the senders wait
for that. The host waits for messages of peers only, never for a GPU: what the caller enqueues next
may change sources and use results.

Reads of source tensors do not depend on rounds, so the first launch makes those of all rounds. What
is left for later rounds: sums, and parts that another rank has received before. A rank whose
tensors cannot be exported, or are not contiguous, packs its messages into a buffer that can be.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from reshard.layout.columns import Ints, distinct
from reshard.live.copy.cuda_driver import CudaError, stream_of
from reshard.live.copy.gpu import TensorTable, TorchCopies
from reshard.live.failure.watch import Watch
from reshard.live.inputs.bound import BoundTensors
from reshard.live.program.blocks import CopyList
from reshard.live.program.messages import GRID, Message, lay_out, message_of
from reshard.live.program.rounds import Program, Round
from reshard.live.session.control import Cause, Hello, Ready, Released, encode
from reshard.live.session.shared_memory import DONE, REACHED, CallSignals
from reshard.live.transport.base import Transport
from reshard.live.transport.gpu_memory import GpuMemory, Published, Table
from reshard.live.transport.gpu_pulls import (
    ENTERED,
    GpuWork,
    PeerViews,
    Pull,
    Pulls,
    done_step,
    round_step,
)
from reshard.live.transport.in_flight import TURN_PAUSE, InFlightCall

POLL_SECONDS = 0.001
"""How long to poll for messages of peers before this rank sleeps until they come: within tens of
microseconds, if all ranks call together, and to sleep takes longer than that
(``benchmarks/reports/gpu_move.md``)."""

SIGNALS_ROUND = 1 << 40  # the message that brings a rank's page of signals is a Ready of this round


class GpuPeerTransport(Transport):
    """Reads the tensors of peers whose memory this process can map, from GPU to GPU."""

    fuses_copies = True
    _signals: CallSignals
    """Once the call has signalled that its sources are ready; then `_entered` is set."""
    _entered = False
    _pulls: Pulls  # once the memory of peers is mapped; then `_opened` is set
    _opened = False
    _closed = False
    _packs = False  # whether this rank packs its messages
    _bases: Ints  # the base addresses of all tensors, here and on peers
    _addresses: TensorTable  # the same without tensors
    addends: torch.Tensor | None = None  # the staging buffer, for addends that were read

    def __init__(
        self,
        watch: Watch,
        program: Program,
        bound: BoundTensors,
        peers: Collection[int],
        device: torch.device,
        in_flight: InFlightCall,
    ) -> None:
        super().__init__(watch, program, bound, peers)
        self.device = self.gpu = device
        self._in_flight = in_flight
        self._memory = watch.connections.resource(GpuMemory)
        if self._memory.may_poll:
            watch.poll_seconds = POLL_SECONDS
        self._stream = stream_of(device)
        self._here: dict[int, set[int]] = {}  # by round, the peers whose messages have come
        self._awaited: dict[tuple[int, int], int] = {}
        """The last step for which the stream waits, by peer and kind of signal."""

    def label(self, peer: int) -> str:
        return "GPU peer memory"

    @contextlib.contextmanager
    def _driver_errors(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        """Report errors of the driver, or of these kinds, as the cause of the call's failure."""
        try:
            with self._memory.using(self.device):
                yield
        except (CudaError, *kinds) as error:  # type: ignore[misc]
            here = f"rank {self.watch.connections.rank} cannot {what} ({error})"
            self.watch.fail(Cause("error", f'{here}: give transport="nccl" or "shared"'))

    def send_hellos(self) -> None:
        """Enqueue the signal that sources are ready, and tell peers where they are."""
        watch, memory = self.watch, self._memory
        self._in_flight.await_turn()
        with self._driver_errors("signal other processes from its GPU"):
            own = memory.signals
            while not own.is_free(watch.call):
                watch.check()
                time.sleep(TURN_PAUSE)
            self._signals, self._entered = CallSignals(watch.call, own), True
            self._signals.enqueue(self._stream, writes=[(REACHED, ENTERED)])
            published = self._publish()
        version, buffer, self._packs = published
        page, mailbox = own.page, watch.mailbox
        places = {"signals": page.number, "table_at": version, "buffer": buffer.number}
        hello = watch.hello(on_gpu=1, strided=int(self._packs), **places)
        encoded = encode(hello)
        for peer in self.peers:
            fd = page.fd_for(peer)
            if fd is not None:
                mailbox.send(peer, Ready(watch.call, SIGNALS_ROUND, page.number), fd)
            mailbox.send(peer, encoded, buffer.fd_for(peer))

    def _publish(self) -> Published:
        """Where this rank's tensors are; if they cannot be exported, where it packs messages."""
        bound, memory = self.bound, self._memory
        memory.exports.refresh()
        sent, sizes, pick = self._kept("sent", self._sent)
        places, last = pick(bound.addresses), self._kept("published", list[Any])
        known = last[:]  # calls in flight replace it
        if known[:2] == [places, memory.exports.numbers] and memory.keeps(known[2]):
            return known[2]  # type: ignore[no-any-return]
        starts = np.array(bound.addresses, np.int64)[sent]
        ranges = np.zeros((bound.staging + 1, 2), np.int64)
        packs = bool(bound.strides) and not bound.strides.keys().isdisjoint(sent)
        if not packs:
            ranges[sent, 0], ranges[sent, 1] = starts, starts + sizes
            try:
                memory.exports.of(starts, starts + sizes)
            except CudaError:
                packs = True
        if packs:
            ranges[:] = 0
            size = max(self._packed(one)[1] for one in self._rounds())
            start = memory.packing_buffer(max(size, 1))
            ranges[-1] = start, start + size
        published = memory.publish(ranges, packs)
        # A packing buffer must have its size checked in every call.
        last[:] = () if packs else (places, memory.exports.numbers, published)
        return published

    def _kept(self, name: str, make: Callable[[], Any], *key: object) -> Any:
        """What is compiled once for these peers and kept with the first round."""
        kept = self.program.round(0).kept if self.program.num_rounds else {}
        full = ("gpu peer", name, self.peers, *key)
        if full not in kept:
            kept[full] = make()
        return kept[full]

    def _rounds(self) -> Iterator[Round]:
        return map(self.program.round, range(self.program.num_rounds))

    def _sent(self) -> tuple[list[int], Ints, Callable[[list[int]], object]]:
        """The base numbers of the tensors that peers read, their bytes, and what picks their
        addresses."""
        sends = [one for round_ in self._rounds() for one in round_.sends.items()]
        read = [one.source.base for peer, some in sends if peer in self.peers for one in some]
        numbers = distinct(np.concatenate([np.zeros(0, np.int64), *read])).tolist()
        sizes = [self.bound.tensors[number].nbytes for number in numbers]
        return numbers, np.array(sizes, np.int64), itemgetter(*numbers, self.bound.staging)

    # Packing -----------------------------------------------------------------------------------

    def _packed(self, round_: Round) -> tuple[list[Message], int, TorchCopies]:
        """The messages of a round as this rank packs them, where they end, and what packs them."""
        kept, key = round_.kept, ("gpu peer", "packed", self.peers)
        if key not in kept:
            mine = [one for one in round_.sends.items() if one[0] in self.peers]
            messages, end = lay_out(message_of(*one) for one in mine)
            copies = CopyList()
            for message in messages:
                message.pack(copies, message.offset, self.bound.staging)
            kept[key] = messages, end, TorchCopies(copies)
        return kept[key]  # type: ignore[no-any-return]

    def _pack(self, round_: Round) -> int:
        (messages, num_bytes, copies), memory = self._packed(round_), self._memory
        if not messages:
            return 0
        memory.after_last_call(self._stream)
        buffer = memory.driver.view(memory.packing_buffer(1), num_bytes, self.device)
        copies.launch(TensorTable.of(self.bound, buffer))
        self._announce(round_, {one.peer: one.offset for one in messages})
        return num_bytes

    def _announce(self, round_: Round, offsets: Mapping[int, int]) -> None:
        """Signal that what this rank sends in a round is ready, and tell the receivers."""
        call, number = self.watch.call, round_.number
        self._signals.enqueue(self._stream, writes=[(REACHED, round_step(number))])
        for peer, at in offsets.items():
            self.watch.mailbox.send(peer, Ready(call, number, 0, at))

    # Reading -----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Map the memory of all peers that send, once they have called."""
        hellos, memory = dict(self.watch.inbox.hellos), self._memory
        direct = frozenset(peer for peer in self.peers if not hellos[peer].strided)
        if others := sorted(peer for peer in self.peers if not hellos[peer].signals):
            here = f"rank {self.program.rank} reads from GPU to GPU and ranks {others} do not"
            self.watch.fail(Cause("disagree", f'{here}: give check="always" to compare again'))
        make = partial(Pulls.of, self.program, self.peers, direct)
        pulls = self._pulls = self._kept("pulls", make, direct)
        for peer in self.peers:
            number = hellos[peer].signals
            signals = memory.peers.get(peer)
            if signals is None or signals.page.number != number:
                with self._driver_errors(f"reach the signals of rank {peer}", ValueError, KeyError):
                    signals = memory.map_signals(peer, number)
            self._signals.peers[peer] = signals
        if size := pulls.staging_bytes:
            self.addends = memory.addends.take(size, self.device, self._stream)
        versions = [hellos[peer].table_at for peer in pulls.numbers]
        staging = 0 if self.addends is None else self.addends.data_ptr()
        own = self.bound.addresses, staging, self._stream
        maps, bases = memory.mappings, self._kept("bases", list[Any], direct)
        mapped = self._kept("mapped", list[Any], direct)
        # Copies: calls in flight replace them. Mapping may unmap something: the generation that is
        # kept is the one after it.
        theirs = mapped[:]
        if theirs[:3] != [maps, maps.generation, versions]:
            parts = [self._map(peer, hellos[peer]) for peer in pulls.numbers]
            both = np.concatenate([*parts, np.zeros(0, np.int64)])
            mapped[:] = theirs = [maps, maps.generation, versions, both]
        known = bases[:]
        if known[:1] != [own] or known[1] is not theirs[3]:
            table = np.concatenate([np.array(self.bound.addresses, np.int64), theirs[3]])
            table[self.bound.staging] = staging
            bases[:] = known = [own, theirs[3], TensorTable(table, {}, self.device), table]
        self._addresses, self._bases = known[2:]
        self._opened = True

    def _map(self, peer: int, hello: Hello) -> Ints:
        """Map what a peer has exported; returns the addresses of the tensors that are read."""
        mappings, numbers = self._memory.mappings, self._pulls.numbers[peer]
        with self._driver_errors(f"reach the GPU memory of rank {peer}", ValueError, KeyError):
            table = self._read_table(peer, hello)
            mappings.update(peer, table, self._memory.is_idle)
            return mappings.addresses(peer, table, numbers)
        raise AssertionError  # `_driver_errors` has raised

    def _read_table(self, peer: int, hello: Hello) -> Table:
        buffer = self.watch.inbox.buffers[peer, hello.buffer]
        return Table.read(buffer.address, buffer.num_bytes, self.bound.staging + 1)

    def begin(self, round_: Round) -> int:
        """Make what this rank sends available; in the first round, read all source tensors."""
        if not self._opened:
            self._open()
        self.watch.check()
        staged, number = 0, round_.number
        with self._driver_errors("copy between GPUs"):
            if self._packs:
                staged += self._pack(round_)
            else:
                sends = ((peer, some) for peer, some in round_.sends.items() if peer in self.peers)
                passed_on = [peer for peer, some in sends if any(one.hop for one in some)]
                if passed_on:
                    self._announce(round_, dict.fromkeys(passed_on, 0))
            if not number:
                self._pull(self._pulls.first)
                if self._pulls.num_covered:
                    self._finish_reading(range(self._pulls.num_covered))
            later = self._pulls.later.get(number)
            if later is not None and not self.peers & round_.receives.keys():
                self._pull(later)
        inbox = self.watch.inbox
        for peer in self.peers & round_.receives.keys():
            announced = any(one.hop for one in round_.receives[peer])
            if not announced and not inbox.hellos[peer].strided:
                inbox.ready[peer, number] = Ready(self.watch.call, number)
        return staged + (0 if later is None else later.staging_bytes)

    def receive(self, round_: Round, peers: Collection[int], arrived: dict[int, Any]) -> None:
        """Read what is left of a round, once all messages have come."""
        here = self._here.setdefault(round_.number, set())
        here |= set(peers)
        if here < self.peers & round_.receives.keys():
            return
        if round_.number < self._pulls.num_covered:
            return  # the first pull has read all of it
        later = self._pulls.later.get(round_.number)
        with self._driver_errors("copy between GPUs"):
            if later is not None:
                self._pull(later, round_.number)
            self._finish_reading([round_.number])
        for transfer, at in () if later is None else later.addends:
            assert self.addends is not None
            arrived[id(transfer)] = self.addends[at : at + transfer.num_bytes]

    def _pull(self, pull: Pull, number: int = -1) -> None:
        """Enqueue one launch, after everything that it reads is ready."""
        for peer, step in pull.waits.items():
            self._awaited[peer, REACHED] = max(step, self._awaited.get((peer, REACHED), 0))
        waits = [(peer, REACHED, step) for peer, step in pull.waits.items()]
        self._signals.enqueue(self._stream, waits)
        bases = self._bases
        packed = [peer for peer in pull.waits if self.watch.inbox.hellos[peer].strided]
        if packed:
            bases = bases.copy()
            for peer in packed:
                bases[self._pulls.places[peer]] += self.watch.inbox.ready[peer, number].offset
        views = PeerViews(lambda base: self._view(base, int(bases[base])))
        if bases is self._bases:
            tensors = self._addresses.with_tensors(views)
        else:
            tensors = TensorTable(bases, views, self.device)
        pull.copies.launch(tensors)

    def _finish_reading(self, rounds: Sequence[int]) -> None:
        """Signal that all messages of these rounds were read, and tell the senders."""
        self._signals.enqueue(self._stream, writes=[(DONE, done_step(rounds[-1]))])
        for number in rounds:
            for peer in self.peers & self.program.round(number).receives.keys():
                self.watch.mailbox.send(peer, Released(self.watch.call, number))

    def _view(self, base: int, address: int) -> torch.Tensor:
        """The tensor at a base number; of a peer, what this rank reads of it, as bytes."""
        staging = self.bound.staging
        if base < staging:
            return self.bound.tensors[base]
        if base == staging and self.addends is not None:
            return self.addends
        peer = max((at, peer) for peer, at in self._pulls.places.items() if at <= base)[1]
        number = int(self._pulls.numbers[peer][base - self._pulls.places[peer]])
        start, end = self._read_table(peer, self.watch.inbox.hellos[peer]).ranges[number].tolist()
        skip = address % GRID
        size = end - start + skip - (address - int(self._bases[base]))
        return self._memory.driver.view(address - skip, size, self.device)[skip:]

    # The end of a round ------------------------------------------------------------------------

    def unreleased(self, round_: Round) -> Collection[int]:
        """Peers that have not enqueued their reads of this rank's messages.

        A stream waits only for what is enqueued. Otherwise two calls in two threads could wait for
        each other, as every rank enqueues them in an order of its own.
        """
        released = self.watch.inbox.released
        awaited = self.peers & round_.sends.keys()
        return [peer for peer in awaited if (peer, round_.number) not in released]

    def end_round(self, round_: Round) -> None:
        """Let the stream wait until peers have read this rank's messages."""
        signals, program, step = self._signals, self.program, done_step(round_.number)
        waits = [(peer, DONE, step) for peer in self.peers & round_.sends.keys()]
        for peer, kind, _ in waits:
            self._awaited[peer, kind] = step
        with self._driver_errors("wait for other GPUs"):
            if round_.number < program.num_rounds - 1:
                signals.enqueue(self._stream, waits)
                return
            self._memory.enqueue_end(signals, self._stream, waits)
        awaited = [(peer, kind, last) for (peer, kind), last in self._awaited.items()]
        flags = [peer.flags for peer in self.watch.connections.peers.values()]
        late = "its GPU to come to the move of"
        work = GpuWork(signals, awaited, flags)
        self._in_flight.add(work, self.peers, lambda p: f"{late} {program.first_name(p)}")

    def close(self, ok: bool) -> None:
        """Let the next call enqueue; after a failure release all streams that wait."""
        if self._closed:
            return
        self._in_flight.end_turn()
        if not ok and self._entered:
            self._signals.abort()
            self._in_flight.give_up()
            with self._memory.using(self.device), contextlib.suppress(CudaError):
                self._memory.enqueue_end(self._signals, self._stream)
        self._closed = True  # last: an exception of a signal handler may have come before the abort
