"""What autograd holds instead of saved tensors, and who decides how each is kept."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.nn.activations.budget import Budget
from reshard.nn.activations.host import brought_back, offload
from reshard.nn.activations.known import Known, Source, is_simple
from reshard.nn.activations.region import Region, bytes_between, share_of
from reshard.nn.activations.restoring import Restorer
from reshard.nn.activations.stats import Stats
from reshard.nn.activations.witness import Witness, check_version
from reshard.tensors.dtensors import dtensor_of
from reshard.tensors.kinds import ready

__all__ = ["Keeper", "Options", "SavedTensor", "SavedView"]


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
    """Whether ranks compare what they take to be equal, once for each module."""


class SavedTensor:
    """A saved tensor that stays as it is; a change in place is still noticed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not the tensor itself: an operation would keep its own result alive, for ever.
        self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def tensor(self) -> torch.Tensor:
        """The tensor, unless it was changed."""
        if self._version is not None:
            kind = f"{type(self._tensor).__name__} {list(self._tensor.shape)}"
            check_version(self._tensor._version, self._version, kind)
        return self._tensor


@dataclass(frozen=True, slots=True)
class Lie:
    """How a saved tensor lies in the memory of its region."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements before its first one."""
    gaps: Source | None = None
    """The source, if it has gaps: its elements are kept without them, in its order."""

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in these bytes."""
        flat = memory.view(self.dtype)
        if self.gaps is not None:
            source = torch.empty_strided(
                self.gaps.size, self.gaps.stride, dtype=self.dtype, device=memory.device
            )
            flat = source.copy_(flat.view(self.gaps.size))
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class SavedView:
    """A saved tensor whose memory is kept in a region."""

    def __init__(
        self, region: Region, lie: Lie, saved: torch.Tensor, bring: Callable[[Region], torch.Tensor]
    ) -> None:
        self.region, self._lie, self._bring = region, lie, bring
        self._witness = Witness(saved)
        self._rebuild = _rebuilder(saved) if isinstance(saved, DTensor) else None
        region.views.add(id(self))

    def tensor(self) -> torch.Tensor:
        """The tensor, made whole."""
        self._witness.check()
        found = self._lie.tensor(self._bring(self.region))
        return found if self._rebuild is None else self._rebuild(found)

    def __del__(self) -> None:
        self.region.drop_view(id(self))


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
        self._regions: weakref.WeakValueDictionary[Any, Region] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        limit = self.options.budget
        self.budget = None if limit is None else Budget(limit)

    def kept(self, saved: torch.Tensor, known: Known, label: str, call: int) -> SavedView | None:
        """A saved tensor in a region; None if it stays as it is.

        Regions are shared within one call: later the same memory may hold something else.
        """
        local = ready(saved._local_tensor) if isinstance(saved, DTensor) else saved
        if not is_simple(local) or not local.numel() or not self._is_worth_it(local):
            return None
        if isinstance(saved, DTensor):
            is_equal, source = known.is_replicated(saved), None
            what = f"DTensor {list(saved.shape)}"
        else:
            source = known.source(saved)
            is_equal = source is not None
            what = f"saved {list(saved.shape)}" if source is None else source.label
        if not is_equal and self.budget is None:
            return None
        if source is None and known.is_owned(saved):
            return None
        with self._lock:
            region, lie = self._region(local, source, f"{label}, {what}", is_equal, call)
            return SavedView(region, lie, saved, self._bring)

    def _is_worth_it(self, local: torch.Tensor) -> bool:
        small = local.numel() * local.element_size() < self.options.min_bytes
        return not small and local.numel() >= len(self.restorer.ranks)

    def _region(
        self, local: torch.Tensor, source: Source | None, label: str, is_equal: bool, call: int
    ) -> tuple[Region, Lie]:
        """The region that a tensor is of, and how it lies there."""
        unit = local.element_size()
        if source is None:
            source = Source.of(local, label)
        extent = source.extent
        size, stride = tuple(local.shape), local.stride()
        start = int(local.storage_offset()) - extent.start // unit
        key: tuple[Any, ...] = (source.address, extent, local._version, call)
        if not extent.is_full:
            lie = Lie(local.dtype, size, stride, start, source)
            key = (*key, source.lattice)
        else:
            lie = Lie(local.dtype, size, stride, start)
        found = self._regions.get(key)
        if found is None:
            memory = _memory_of(local, lie, extent.start, extent.stop)
            unit = _unit_of(memory, unit)
            found = Region(label, memory, unit, source.storage, is_equal, self.stats)
            self._regions[key] = found
            self._choose(found)
        return found, lie

    def _choose(self, region: Region) -> None:
        """Cut a region, or let a budget decide."""
        if not region.is_equal:
            assert self.budget is not None
            if self.budget.goes_away(region.num_bytes, region.device.type == "cuda"):
                offload(region)
            return
        self.restorer.keep(region)
        ranks = len(self.restorer.ranks)
        if self.budget is not None:
            low, high = share_of(region.num_bytes, region.unit, 0, ranks)
            if self.budget.stays_whole(region.num_bytes, high - low):
                return
        region.cut(self.restorer.place, ranks)

    def _bring(self, region: Region) -> torch.Tensor:
        if self.budget is not None:
            self._learn(self.budget, region.is_equal)
        if region.is_here:
            return region.memory
        if not region.is_cut:
            region.stats.restores += 1
            return brought_back(region)
        room = None if self.budget is None else self.budget.room
        return self.restorer.whole(region, self.options.timeout, room)

    def _learn(self, budget: Budget, is_equal: bool) -> None:
        """At the first equal tensor of a backward: what do ranks keep beside?"""
        budget.is_counted = True
        if budget.is_in_backward or not is_equal:
            return
        words = [budget.beside, budget.signature]
        told = self.restorer.tell(words, self.options.timeout)
        alike = len({signature for _, signature in told}) == 1
        budget.learn(max(beside for beside, _ in told), alike)

    def begin(self) -> None:
        """Before a call: what was saved for no backward, and is gone, does not count."""
        if self.budget is not None and self.budget.is_first and not len(self._regions):
            self.budget.forget()

    def finish(self) -> None:
        """After a call: in the first forward, is the budget enough, on all ranks?"""
        if self.budget is not None and self.budget.is_first:
            told = self.restorer.tell([self.budget.needed], self.options.timeout)
            self.budget.check(max(words[0] for words in told))


def _memory_of(local: torch.Tensor, lie: Lie, start: int, stop: int) -> torch.Tensor:
    if lie.gaps is None:
        return bytes_between(local, start, stop)
    gaps = lie.gaps
    offset = gaps.extent.start // local.element_size()
    source = local.detach().as_strided(gaps.size, gaps.stride, offset)
    return source.contiguous().reshape(-1).view(torch.uint8)


def _unit_of(memory: torch.Tensor, unit: int) -> int:
    """What is never cut apart: an element, unless a view of other elements was saved first."""
    return unit if memory.numel() % unit == 0 else 1
