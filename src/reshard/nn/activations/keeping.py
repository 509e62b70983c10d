"""What autograd holds instead of saved tensors, and who decides how each is kept."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from reshard.nn.activations.host import offload
from reshard.nn.activations.known import Known, Source
from reshard.nn.activations.ledger import SHARE, Entry, Ledger
from reshard.nn.activations.region import Form, Region, Span, bytes_of, span_of
from reshard.nn.activations.restoring import Restorer
from reshard.nn.activations.stats import Stats
from reshard.nn.activations.witness import Witness, check_version
from reshard.tensors.dtensors import dtensor_of
from reshard.tensors.kinds import ready

__all__ = ["Keeper", "Options", "SavedTensor", "SavedView"]

Key = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """How activations are kept."""

    min_bytes: int = 0
    """Smaller tensors stay whole."""
    timeout: float = 60.0
    """Seconds without a sign of life from a rank whose share is needed."""
    budget: int | None = None
    """Bytes that all saved tensors together may take; None: everything that can be is cut."""
    check: bool = False
    """Whether ranks compare what they take to be equal, once for each input of a module."""


class SavedTensor:
    """A saved tensor that stays as it is; a change in place is still noticed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not the tensor itself: an operation would keep its own result alive, for ever.
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        """The tensor, unless it was changed."""
        kind = f"{type(self._tensor).__name__} {list(self._tensor.shape)}"
        check_version(self._tensor._version, self._version, kind)
        return self._tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """How a saved tensor lies in its region."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in these bytes."""
        flat = memory.view(self.dtype)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class SavedView:
    """A saved tensor whose memory is kept in a region."""

    def __init__(
        self,
        region: Region,
        shape: Shape,
        saved: torch.Tensor,
        bring: Callable[[Region], torch.Tensor],
    ) -> None:
        self._region, self._shape, self._bring = region, shape, bring
        self.label, self.is_equal = region.label, region.is_equal
        self._witness = Witness(saved)
        self._rebuild = _rebuilder(saved) if isinstance(saved, DTensor) else None
        region.uses[id(self)] = False

    def tensor(self) -> torch.Tensor:
        """The tensor, made whole."""
        self._witness.check()
        found = self._shape.of(self._bring(self._region))
        self._region.used(id(self))
        return found if self._rebuild is None else self._rebuild(found)

    def __del__(self) -> None:
        self._region.dropped(id(self))


def _rebuilder(saved: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    mesh, placements, shape = saved.device_mesh, saved.placements, tuple(saved.shape)
    stride, dtype = tuple(saved.stride()), saved.dtype
    return lambda local: dtensor_of(local, mesh, placements, shape, stride=stride, dtype=dtype)


@dataclass(eq=False)
class Keeper:
    """Decides how saved tensors are kept, for all calls of the modules of one handle."""

    restorer: Restorer
    options: Options
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self._regions: weakref.WeakValueDictionary[Key, Region] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        budget, ranks = self.options.budget, self.restorer.ranks
        self.ledger = None if budget is None else Ledger(budget, len(ranks))
        self._entries: weakref.WeakKeyDictionary[Region, Entry] = weakref.WeakKeyDictionary()

    def kept(self, saved: torch.Tensor, known: Known, label: str) -> SavedView | None:
        """A saved tensor in a region of its own, or of the tensor it is a view of; else None."""
        if isinstance(saved, DTensor):
            if not known.is_replicated(saved):
                return None
            local = ready(saved._local_tensor)
            return self._view(saved, local, None, f"{label}, DTensor {list(saved.shape)}", True)
        if not _is_simple(saved):
            return None
        source = known.source(saved)
        if source is not None:
            return self._view(saved, saved, source, f"{label}, {source.label}", True)
        if self.ledger is None or known.is_owned(saved):
            return None
        return self._view(saved, saved, None, f"{label}, saved {list(saved.shape)}", False)

    def _view(
        self,
        saved: torch.Tensor,
        local: torch.Tensor,
        source: Source | None,
        label: str,
        is_equal: bool,
    ) -> SavedView | None:
        if not _is_simple(local) or not self._is_worth_it(local):
            return None
        with self._lock:
            span = _region_span(local, source)
            region = self._region(local, span, label, is_equal)
            inside = span_of(local)
            if span is None or inside is None:
                stride = torch.empty(local.shape, device="meta").stride()
                shape = Shape(local.dtype, tuple(local.shape), stride, 0)
            else:
                offset = inside.start - span.start
                shape = Shape(local.dtype, tuple(local.shape), local.stride(), offset)
            return SavedView(region, shape, saved, self._bring)

    def _is_worth_it(self, local: torch.Tensor) -> bool:
        small = local.numel() * local.element_size() < self.options.min_bytes
        return not small and local.numel() >= len(self.restorer.ranks)

    def _region(self, local: torch.Tensor, span: Span | None, label: str, equal: bool) -> Region:
        lies = (local.shape, local.stride(), local.storage_offset())
        place = (span.start, span.length) if span else (-1, hash(lies))
        key = (local.untyped_storage()._cdata, *place, local.element_size(), local._version)
        found = self._regions.get(key)
        if found is None:
            memory, unit = bytes_of(local, span), local.element_size()
            found = Region(label, memory, unit, local, equal, self.stats)
            self._regions[key] = found
            self._choose(found)
            self.restorer.keep(found)
        return found

    def _choose(self, region: Region) -> None:
        """Cut a region, or let it and others give way to a budget."""
        if self.ledger is None:
            self._cut(region)
            return
        entry = Entry(region.num_bytes, region.is_equal, region.device.type == "cuda")
        self._entries[region] = entry
        weakref.finalize(region, self.ledger.remove, entry).atexit = False
        moved = set(map(id, self.ledger.add(entry)))
        for one, known in list(self._entries.items()):
            if id(known) in moved:
                self._put(one, known)

    def _put(self, region: Region, entry: Entry) -> None:
        if entry.is_equal and region.form is Form.WHOLE:
            self._cut(region)
        if entry.place != SHARE:
            offload(region)

    def _cut(self, region: Region) -> None:
        region.cut(self.restorer.place, len(self.restorer.ranks))

    def _bring(self, region: Region) -> torch.Tensor:
        if region.form is Form.WHOLE:
            return region.memory
        room = None if self.ledger is None else self.ledger.room
        return self.restorer.whole(region, self.options.timeout, room)


def _region_span(local: torch.Tensor, source: Source | None) -> Span | None:
    """The memory to keep: that of the input a tensor is a view of, or its own."""
    own = span_of(local)
    if own is None or source is None or source.span is None:
        return own
    return source.span if own in source.span and source.unit == local.element_size() else own


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but bytes with strides."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return not tensor.is_conj() and not tensor.is_neg()
