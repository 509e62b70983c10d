"""A rank reads its share of a batch into memory, and sums what it read for the digests.

Where there is no digest it reads what is stored a second time too, and compares. Each element is
in one rank's share, so that also is read once in the whole job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.crcs import Crcs, Part
from reshard.checkpoint.live.read_shares import Batch, Share, Wish
from reshard.checkpoint.piece_table import slabs
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.transfer.copying import CheckedReads, SourceFiles
from reshard.checkpoint.transfer.reading import in_order
from reshard.checkpoint.transfer.transfers import Transfer
from reshard.checkpoint.transfer.windows import Buffers, compare, fill
from reshard.layout.box import Box

__all__ = ["Fetched", "Fetcher"]

LOCAL_WORKERS = 2
REMOTE_WORKERS = 16
SCRATCH = 1 << 20
"""Bytes that a worker has for replicas, and for pieces not stored in row-major order."""

Array = np.ndarray[Any, Any]


class _Place(Buffers):
    """A part of a rank's memory as what a window is read into."""

    def __init__(self, window: Array, scratch: Array) -> None:
        self.window = self.cast = window
        self.scratch, self.num_bytes = scratch, len(scratch)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a rank has of a window: its boxes, flattened and joined."""

    share: Share
    boxes: tuple[Box, ...]
    local: torch.Tensor

    def parts(self) -> list[tuple[Box, torch.Tensor]]:
        """The boxes one by one."""
        found, at = [], 0
        for box in self.boxes:
            found.append((box, self.local[at : at + box.size].view(box.shape)))
            at += box.size
        return found


@dataclass(slots=True)
class Fetcher:
    """Reads what falls to one rank."""

    storage: Storage
    catalog: Catalog
    wishes: Mapping[str, Wish]
    rank: int
    digests: Mapping[str, str]
    """Tensors whose digests are to be known."""
    crcs: Crcs | None = None
    """What torch wrote down of the files."""
    source: SourceFiles = field(init=False)
    reads: CheckedReads = field(init=False)

    def __post_init__(self) -> None:
        self.source = SourceFiles(self.storage, self.catalog, crcs=self.crcs)
        self.reads = CheckedReads(self.source, [])

    @property
    def num_bytes(self) -> int:
        """How much was read so far."""
        return self.source.num_bytes

    def fetch(self, batch: Batch) -> tuple[list[Fetched], dict[str, int]]:
        """This rank's share of a batch, and what it adds to the digest of each tensor."""
        found = [self._room(share) for share in batch.shares if self.rank in share.boxes]
        tasks = [(one, box, part) for one in found for box, part in one.parts()]
        workers = LOCAL_WORKERS if self.storage.is_local else REMOTE_WORKERS
        values: dict[str, int] = {}
        done = in_order(self._read, tasks, workers, lambda: np.empty(SCRATCH, dtype=np.uint8))
        for (one, box, _), array in done:
            name = one.share.name
            if name in self.digests:
                transfer = self.wishes[name].transfer
                value = digest.part(array, box, transfer.shape, transfer.have)
                values[name] = (values.get(name, 0) + value) % digest.MODULUS
        return found, values

    def crc_parts(self) -> list[Part]:
        """The CRC-32 of what was read since this was asked last."""
        parts, self.reads.crcs = self.reads.crcs, []
        return parts

    def _room(self, share: Share) -> Fetched:
        boxes = tuple(share.boxes[self.rank])
        kind: torch.dtype = getattr(torch, self.wishes[share.name].transfer.have)
        local = torch.empty(sum(box.size for box in boxes), dtype=kind)
        return Fetched(share, boxes, local)

    def _read(self, task: tuple[Fetched, Box, torch.Tensor], scratch: Array) -> Array:
        one, box, part = task
        transfer = self.wishes[one.share.name].transfer
        place = _Place(part.reshape(-1).view(torch.uint8).numpy(), scratch)
        array = fill(transfer, box, place, self.reads)
        if len(transfer.replicas):
            self._compare(transfer, box, array, place)
        return array

    def _compare(self, transfer: Transfer, box: Box, array: Array, place: _Place) -> None:
        """Refuse what is stored again and differs, in parts that fit into the scratch buffer."""
        for part in slabs(box, len(place.scratch) // array.itemsize):
            limits = zip(part.start, part.stop, box.start, strict=True)
            here: Any = (*(slice(low - at, high - at) for low, high, at in limits), ...)
            compare(transfer, part, array[here], place, self.reads)
