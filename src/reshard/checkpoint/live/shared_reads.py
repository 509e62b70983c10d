"""Reads tensors that several ranks need: every rank reads its share of a batch, each byte once.

A batch has *windows*, boxes that fit into the memory of all ranks together. A window is read in
*cells*, boxes of one stored piece, in equal shares. A cell is read by a rank that needs it, if that
keeps the shares equal: what a rank reads for itself is not sent. Every rank computes the same
shares, and one move for each batch brings what was read to the ranks that need it.

    file 0, file 1       cells                    reader
    +-------------+      +-------------+
    |             |      |      a      |   rank 0, which needs these rows
    |      0      |      +-------------+
    |             |  ->  |      b      |   rank 1
    +-------------+      +-------------+
    |      1      |      |      c      |   rank 2
    +-------------+      +-------------+

Where there is no digest, a rank also reads and compares the elements that are stored a second time;
they are part of one share as well. Small replicated tensors, such as norms and biases of tensor
parallel models, are read by the first rank and sent with the last agreement of the load: a move for
some KiB would take a plan, a handshake and another round, a third of the time of such a load.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from reshard.checkpoint.catalog import StoredTensor
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.crcs import Part
from reshard.checkpoint.live.direct_reads import ReadRequest, common_parts
from reshard.checkpoint.live.entries import RankBoxes, RankTensor, View, part_of
from reshard.checkpoint.transfer.packing import Pack, batches, within
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.checkpoint.transfer.windows import (
    Buffers,
    Source,
    compare,
    fill,
    in_order,
)
from reshard.dtypes import itemsize
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import Ints
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan
from reshard.planning.sharing import LeastLoaded
from reshard.tensors.agreement import Agreement

LARGEST_CELL = 16 << 20
SMALLEST_CELL = 64 << 10
WORTH_SPLITTING = 256 << 10
"""Pieces of fewer bytes are not split by the boxes of the ranks."""
SLACK = 0.1
"""How far a rank may exceed its fair share to read what it needs itself."""
LOCAL_WORKERS = 2
REMOTE_WORKERS = 16
SCRATCH = 1 << 20
"""Bytes that a worker has for replicas, and for pieces not stored in row-major order."""
MOST_SMALL = 512 << 10
"""The most bytes of all tensors that are sent with an agreement."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of a batch with which every rank keeps to its memory.

    >>> Limits.of(128 << 20, num_ranks=4)
    Limits(share=134217728, cell=16777216, batch=469762048)
    """

    share: int
    """The most bytes that a rank reads in a batch."""
    cell: int
    batch: int
    """The most bytes of all ranks together: the least loaded rank always has room for a cell."""

    @classmethod
    def of(cls, share: int, num_ranks: int) -> Limits:
        """The limits for ranks that read at most ``share`` bytes at a time."""
        cell = min(max(share // 8, SMALLEST_CELL), LARGEST_CELL)
        return cls(share, cell, num_ranks * (share - cell))


@dataclass(frozen=True, slots=True)
class Share:
    """A window, and the boxes of it that each rank reads, in the order of its buffer."""

    request: ReadRequest
    window: Box
    is_last: bool
    """Whether it is the last window of its tensor."""
    boxes: Mapping[int, Sequence[Box]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.request.transfer.name

    @property
    def num_bytes(self) -> int:
        return self.window.size * itemsize(self.request.transfer.have)


def batches_of(
    requests: Mapping[str, ReadRequest], ranks: Sequence[int], limits: Limits
) -> Iterator[list[Share]]:
    """The windows of all requests in batches, in the order of the files."""
    for windows in batches(_windows(requests, limits), attrgetter("num_bytes"), limits.batch):
        yield [*_shares(windows, ranks, limits)]


def _windows(requests: Mapping[str, ReadRequest], limits: Limits) -> Iterator[Share]:
    for request in sorted(requests.values(), key=_place):
        origin = (0,) * len(request.transfer.shape)
        windows = [*request.windows(limits.batch)] or [Box(origin, origin)]
        for number, window in enumerate(windows, 1):
            yield Share(request, window, number == len(windows))


def _place(request: ReadRequest) -> tuple[int, int, str]:
    source = request.transfer.source
    if not len(source):
        return 0, 0, request.transfer.name
    first = np.lexsort((source.offsets, source.files))[0]
    return int(source.files[first]), int(source.offsets[first]), request.transfer.name


def _shares(windows: Sequence[Share], ranks: Sequence[int], limits: Limits) -> Iterator[Share]:
    total = sum(window.num_bytes for window in windows)
    limit = min(limits.cell, max(total // len(ranks) // 8, SMALLEST_CELL))
    fair = min(total / len(ranks) * (1 + SLACK), limits.share - limits.cell)
    readers = LeastLoaded(ranks)
    for share in windows:
        size = itemsize(share.request.transfer.have)
        boxes: dict[int, list[Box]] = {}
        for box, candidates in _cells(share.request, share.window, limit):
            reader = readers.choose(candidates.tolist(), box.size * size, fair)
            boxes.setdefault(reader, []).append(box)
        yield replace(share, boxes=boxes)


def _cells(request: ReadRequest, window: Box, limit: int) -> Iterator[tuple[Box, Ints]]:
    """The cells of a window, each with the ranks that need it."""
    size = itemsize(request.transfer.have)
    listed = listed_of(request.layout, request.transfer.shape)
    pieces = request.transfer.source.within(window)
    rows, boxes, parts = common_parts(pieces, listed)
    first = np.searchsorted(rows, np.arange(len(pieces) + 1)).tolist()
    for piece, (start, stop) in enumerate(pairwise(first)):
        some, num_bytes = slice(start, stop), int(pieces.num_bytes[piece])
        holders = [listed.of(box) for box in boxes[some].tolist()]
        # A piece is read by the boxes of the ranks if they are long runs, and all of it.
        is_worth = len(holders) == 1 or 0 < WORTH_SPLITTING * len(holders) <= num_bytes
        is_all = int(parts.num_bytes[some].sum()) == num_bytes
        if is_worth and is_all and parts.is_run[some].all():
            chosen = [*zip(map(parts.box, range(start, stop)), holders, strict=True)]
        else:
            ranks = np.unique(np.concatenate([*holders, np.zeros(0, dtype=np.int64)]))
            chosen = [(pieces.box(piece), ranks)]
        for box, ranks in chosen:
            yield from ((slab, ranks) for slab in box.slabs(max(limit // size, 1)))


class SharedReads:
    """Reads this rank's share of what several ranks need, and moves it into the tensors of all."""

    def __init__(
        self,
        source: Source,
        requests: Mapping[str, ReadRequest],
        digests: Mapping[str, str],
        agreement: Agreement,
        local: Mapping[str, RankTensor],
        memory: int,
    ) -> None:
        self._source, self._digests = source, digests
        self._agreement, self._memory = agreement, memory
        self._boxes = RankBoxes()
        self._data: list[torch.Tensor] = []
        """What this rank has read of each window of a batch: its boxes, flattened and joined."""
        self.bytes_moved = 0
        self.views: Mapping[str, Sequence[View]] = {
            name: self._boxes.views(local[name], agreement.rank)
            for name in requests
            if name in local
        }

    def read(self, batch: Sequence[Share]) -> tuple[dict[str, int], list[Part]]:
        """Read this rank's share of a batch.

        Returns what it adds to the digest value of each tensor, and the CRC-32 of what was read.
        """
        self._data, crcs = [], list[Part]()
        for share in batch:
            size = sum(box.size for box in share.boxes.get(self._agreement.rank, ()))
            dtype: torch.dtype = getattr(torch, share.request.transfer.have)
            self._data.append(torch.empty(size, dtype=dtype, device="cpu"))
        tasks = [(share, *part) for share, parts in self._parts(batch) for part in parts]
        workers = LOCAL_WORKERS if self._source.storage.is_local else REMOTE_WORKERS
        values = Counter[str]()
        read = partial(self._read, crcs)
        done = in_order(read, tasks, workers, lambda: np.empty(SCRATCH, dtype=np.uint8))
        for (share, box, _), array in done:
            transfer = share.request.transfer
            if share.name in self._digests:
                values[share.name] += digest.part(array, box, transfer.shape, transfer.have)
        return values, crcs

    def _parts(self, batch: Sequence[Share]) -> Iterator[tuple[Share, list[View]]]:
        """What this rank has read of each window: its boxes, and the elements of each."""
        for share, data in zip(batch, self._data, strict=True):
            boxes = share.boxes.get(self._agreement.rank, ())
            parts = torch.split(data, [box.size for box in boxes]) if boxes else ()
            yield share, [(box, p.view(box.shape)) for box, p in zip(boxes, parts, strict=True)]

    def _read(
        self, crcs: list[Part], task: tuple[Share, Box, torch.Tensor], scratch: Array
    ) -> Array:
        share, box, part = task
        transfer = share.request.transfer
        window = part.reshape(-1).view(torch.uint8).numpy()
        place = Buffers(len(scratch), window, scratch, window)
        read = partial(self._source.read_into, crcs=crcs)
        array = fill(transfer, box, place, read)
        if transfer.replicas:  # compared in parts that fit into the scratch buffer
            for some in box.slabs(len(scratch) // array.itemsize):
                inner = array[within(some.start, some.stop, box.start)]
                compare(transfer, some, inner, place, read, self._source.name)
        return array

    def move(self, batch: Sequence[Share]) -> None:
        """Write a batch that was read into the tensors of all ranks."""
        if len(self._agreement.ranks) == 1:
            for share, parts in self._parts(batch):
                _copy(parts, self.views.get(share.name, ()))
            return
        have: dict[str, TensorSpec] = {}
        want: dict[str, TensorSpec] = {}
        tensors: dict[str, torch.Tensor] = {}
        into: dict[str, torch.Tensor] = {}
        for share, data in zip(batch, self._data, strict=True):
            source = self._readers(share, is_first=not have)
            boxes = share.boxes.get(self._agreement.rank, ())
            for number, destination in self._destinations(share):
                name = f"{share.name} {share.window}" + f" part {number}" * (number > 0)
                have[name], want[name] = source, destination
                if boxes:  # in the shape of a local tensor with a layout of boxes
                    tensors[name] = data.view(boxes[0].shape) if len(boxes) == 1 else data
                views = self.views.get(share.name, [])[number : number + 1]
                if views and (views[0][0] & share.window).size:
                    into[name] = part_of(views[0], share.window)
        if have:
            scatter = plan(have, want, memory=self._memory)
            self.bytes_moved += scatter.summary().wire_bytes
            group, timeout = self._agreement.group, self._agreement.timeout
            scatter.run(tensors, into=into, group=group, timeout=timeout, progress=False, sync=True)

    def _readers(self, share: Share, is_first: bool) -> TensorSpec:
        """The boxes that ranks have read; the first tensor lists all ranks: each move has these."""
        transfer = share.request.transfer
        ranks = self._agreement.ranks if is_first else share.boxes
        boxes = {rank: share.boxes.get(rank, ()) for rank in ranks}
        return TensorSpec(transfer.shape, transfer.have, Layout.from_boxes(transfer.shape, boxes))

    def _destinations(self, share: Share) -> Iterator[tuple[int, TensorSpec]]:
        """The parts of a window on the ranks: their first boxes in it, their second, and so on.

        A rank has at most one box in each, so that the box is a view of its tensor.
        """
        layout, transfer = share.request.layout, share.request.transfer
        shape, dtype = transfer.shape, transfer.want
        inside = {
            rank: [box & share.window for box in boxes]
            for rank, boxes in self._boxes.of(layout, shape).items()
        }
        for number in range(max(map(len, inside.values()), default=0)):
            boxes = {
                rank: (parts[number],)
                for rank, parts in inside.items()
                if number < len(parts) and parts[number].size
            }
            if boxes:
                yield number, TensorSpec(shape, dtype, Layout.from_boxes(shape, boxes))


def are_small(requests: Mapping[str, ReadRequest]) -> bool:
    """Whether these can be sent with an agreement: small, and nothing is to be compared first."""
    total = 0
    for request in requests.values():
        if request.is_whole or request.transfer.replicas:
            return False
        total += _num_stored(request.transfer)
    return total <= MOST_SMALL


def _num_stored(transfer: Transfer) -> int:
    """Bytes from the first to the last of each stored piece: with gaps if it is a strided view."""
    return int(np.maximum(transfer.source.spans, transfer.source.num_bytes).sum())


def read_small(requests: Mapping[str, ReadRequest], source: Source) -> str:
    """The bytes of small tensors, one after the other, in base64."""
    transfers = [request.transfer for request in requests.values()]
    small = [StoredTensor(t.name, t.shape, t.have, tuple(t.source.pieces())) for t in transfers]
    pack = Pack(small, np.empty(sum(one.num_bytes for one in small), dtype=np.uint8))
    # With room for no more, hardly any bytes between the tensors are read with them.
    pack.read(np.empty(sum(map(_num_stored, transfers)), dtype=np.uint8), source.read_into)
    return b64encode(pack.buffer.data).decode()


def copy_small(
    requests: Mapping[str, ReadRequest], text: str, views: Mapping[str, Sequence[View]]
) -> None:
    data = torch.frombuffer(bytearray(b64decode(text)) or bytearray(1), dtype=torch.uint8)
    at = 0
    for name, request in requests.items():
        transfer, start = request.transfer, at
        at += transfer.source_bytes
        # A copy, because elements of a file need not be aligned to their size.
        part = data[start:at].clone().view(getattr(torch, transfer.have)).reshape(transfer.shape)
        _copy([(Box.whole(transfer.shape), part)], views.get(name, ()))


def _copy(parts: Iterable[View], views: Sequence[View]) -> None:
    """Copy what was read into this rank's tensors."""
    for box, part in parts:
        for view in views:
            common: Box = view[0] & box
            if common.size:
                part_of(view, box).copy_(part_of((box, part), common))
