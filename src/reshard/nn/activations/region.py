"""The memory of saved tensors, and what autograd holds in their place.

Saved views of one input share one region:

    x            [rows, hidden]        the input of a module
    x.view(-1)   saved by one operation      \\
    x.t()        saved by another             >  one region: the bytes of x, kept once
    x            saved by a third            /
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from reshard.errors import StateError
from reshard.tensors.dtensor.wrapping import dtensor_of
from reshard.text import Report, format_bytes

NUM_SAMPLES = 32
"""Bytes of a region that are compared across ranks to tell regions apart; a multiple of 8."""


@dataclass(slots=True)
class Stats(Report):
    """Counters of resharded activations; memory that several saved tensors share counts once.

    >>> print(Stats(bytes_seen=4 << 20, bytes_kept=1 << 20, restores=4, collectives=2))
    kept 1.0 MiB of 4.0 MiB, saved 3.0 MiB; 4 restores in 2 collectives, 0.000 s waiting
    """

    bytes_seen: int = 0
    """Bytes of the saved tensors that were considered."""
    bytes_kept: int = 0
    """Bytes of them that stayed in the memory of this rank's device."""
    bytes_offloaded: int = 0
    """Bytes of them that were copied to the host."""
    restores: int = 0
    """Tensors that were restored."""
    collectives: int = 0
    """Exchanges between ranks that restored them."""
    seconds_waiting: float = 0.0
    """Seconds for which backward waited for restores."""

    @property
    def bytes_saved(self) -> int:
        """Bytes that this rank's device did not have to keep."""
        return self.bytes_seen - self.bytes_kept

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data."""
        return {**Report.to_dict(self), "bytes_saved": self.bytes_saved}

    def __str__(self) -> str:
        kept, seen = format_bytes(self.bytes_kept), format_bytes(self.bytes_seen)
        return (
            f"kept {kept} of {seen}, saved {format_bytes(self.bytes_saved)}; {self.restores} "
            f"restores in {self.collectives} collectives, {self.seconds_waiting:.3f} s waiting"
        )


def share_of(num_bytes: int, unit: int, index: int, num_ranks: int) -> tuple[int, int]:
    """Start and stop of one rank's bytes: whole elements, split as torch.chunk does.

    >>> [share_of(40, 4, index, 4) for index in range(4)]
    [(0, 12), (12, 24), (24, 36), (36, 40)]
    """
    count = num_bytes // unit
    chunk = -(-count // num_ranks)
    return min(index * chunk, count) * unit, min((index + 1) * chunk, count) * unit


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where the elements of a tensor are in memory, and their version, without keeping them.

    >>> x = torch.zeros(6, 4)
    >>> dense, gapped = TensorLocation.of(x.t(), "x"), TensorLocation.of(x[:, :2], "x")
    >>> (dense.start, dense.stop, dense.is_dense), (gapped.start, gapped.stop, gapped.is_dense)
    ((0, 96, True), (0, 88, False))
    >>> gapped.elements == TensorLocation.of(x[:, :2].t().unsqueeze(0), "x").elements
    True
    """

    label: str
    storage: StorageWeakRef
    """As long as this exists, torch gives the address of the storage to no other one: memory can be
    found by its address even after it was freed."""
    version: int
    start: int
    """First byte in the storage."""
    stop: int
    is_dense: bool
    """Whether every byte from start to stop belongs to the tensor."""
    elements: tuple[tuple[int, int], ...]
    """Strides and sizes, sorted: which elements, whatever the order of dims."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, label: str) -> TensorLocation:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        (start, stop), elements = _byte_range(tensor), _elements(tensor)
        where = (tensor._version, start, stop, _is_dense(elements), elements)
        return cls(label, storage, *where, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def address(self) -> int:
        return int(self.storage.cdata)

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of this memory, of which a tensor is a view; a copy if it has gaps."""
        if not self.is_dense:
            offset = self.start // tensor.element_size()
            elements = tensor.detach().as_strided(self.size, self.stride, offset)
            return elements.contiguous().reshape(-1).view(torch.uint8)
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        size = self.stop - self.start
        memory: torch.Tensor = view.set_(tensor.untyped_storage(), self.start, (size,), (1,))
        return memory

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the same storage and version has only elements of this one."""
        if tensor._version != self.version:
            return False
        start, stop = _byte_range(tensor)
        if self.is_dense:
            return self.start <= start and stop <= self.stop
        # The gaps may hold values that differ between ranks: accept exactly the same elements only.
        return (tensor.dtype, start, _elements(tensor)) == (self.dtype, self.start, self.elements)


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    unit, start = tensor.element_size(), int(tensor.storage_offset())
    last = sum((size - 1) * stride for stride, size in _elements(tensor))
    return start * unit, (start + last + 1) * unit


def _elements(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(sorted((stride, size) for stride, size in dims if size > 1 and stride))


def _is_dense(elements: tuple[tuple[int, int], ...]) -> bool:
    expected = accumulate((size for _, size in elements), mul, initial=1)
    return all(stride == one for (stride, _), one in zip(elements, expected, strict=False))


class Region:
    """Memory of saved tensors: whole or this rank's share, on its device or on the host."""

    def __init__(
        self,
        label: str,
        source: TensorLocation,
        tensor: torch.Tensor,
        is_replicated: bool,
        stats: Stats,
    ) -> None:
        self.label, self.source, self.is_replicated = label, source, is_replicated
        memory, size = source.bytes_of(tensor), tensor.element_size()
        self.memory = memory
        # A share is whole elements, unless a view with larger elements was saved first.
        self.unit = size if memory.numel() % size == 0 else 1
        self.num_bytes, self.device = memory.numel(), memory.device
        self.is_share = self.is_offloaded = False
        self.whole: torch.Tensor | None = None
        """All bytes, while restored."""
        self.views: set[int] = set()
        """Ids of the saved tensors that backward may still need; several threads remove them."""
        self.number = 0
        """Position in the order of saving on this group; the same on all ranks."""
        self._sample: torch.Tensor | None = None
        self.stats = stats
        stats.bytes_seen += self.num_bytes
        stats.bytes_kept += self.num_bytes

    @property
    def identity(self) -> list[int]:
        """Numbers that are equal on all ranks, and differ between regions.

        They include a sample of the bytes, because threads may number regions in any order.
        """
        assert self._sample is not None  # only shares are compared
        return [self.number, *self._sample.tolist()]

    def keep_share(self, index: int, num_ranks: int) -> None:
        start, stop = share_of(self.num_bytes, self.unit, index, num_ranks)
        spread = torch.arange(NUM_SAMPLES, device=self.device) * (self.num_bytes - 1)
        self._sample = self.memory[spread // (NUM_SAMPLES - 1)].view(torch.int64)
        self.memory, self.is_share = self.memory[start:stop].clone(), True
        self.stats.bytes_kept += stop - start - self.num_bytes

    def offload(self) -> None:
        """Copy the bytes to the host on a side stream, and free them on the device."""
        memory, size = self.memory, self.memory.numel()
        host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host.copy_(memory, non_blocking=True)
        # The allocator must not reuse this memory before the copy is done.
        memory.record_stream(stream)
        self.memory, self.is_offloaded = host, True
        self.stats.bytes_kept -= size
        self.stats.bytes_offloaded += size

    def copy_from_host(self) -> torch.Tensor:
        """The offloaded bytes, on the device."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(_side_stream(self.device))  # the copy to the host may still run
        self.stats.restores += 1
        return self.memory.to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        return f"Region({self.label}, {self.num_bytes} bytes, number {self.number})"


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _check_version(tensor: torch.Tensor, expected: int, description: str) -> None:
    """Raise as autograd does if a saved tensor was changed in place."""
    if tensor._version != expected:
        raise StateError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{description}] is at version {tensor._version}; expected version "
            f"{expected} instead"
        )


class SavedTensor:
    """A saved tensor that is kept unchanged; in-place changes are still detected."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an operation that saves its own result would otherwise keep itself alive.
        self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def __call__(self) -> torch.Tensor:
        """The tensor, unless it was changed in place."""
        if self._version is not None:
            _check_version(self._tensor, self._version, _describe(self._tensor))
        return self._tensor


class SavedView:
    """A saved tensor, or the local tensor of a DTensor, as a strided view of a region's bytes."""

    def __init__(
        self,
        region: Region,
        restore: Callable[[Region], torch.Tensor],
        saved: torch.Tensor,
        local: torch.Tensor,
    ) -> None:
        self.region, self._restore = region, restore
        self._dtype, self._size, self._stride = local.dtype, tuple(local.shape), local.stride()
        self._start = int(local.storage_offset()) * local.element_size() - region.source.start
        self._version, self._description = saved._version, _describe(saved)
        self._alias = _alias_without_memory(saved)
        self._wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
        if isinstance(saved, DTensor):
            mesh, placements, stride = saved.device_mesh, saved.placements, tuple(saved.stride())
            shape = tuple(saved.shape)
            self._wrap = lambda local: dtensor_of(local, mesh, placements, shape, stride=stride)
        region.views.add(id(self))

    def __call__(self) -> torch.Tensor:
        """The tensor, restored; raises if the original was changed in place."""
        _check_version(self._alias, self._version, self._description)
        memory, unit = self._restore(self.region)[self._start :], self._dtype.itemsize
        # A view may have larger elements than the input that the region keeps.
        memory = memory[: memory.numel() // unit * unit]
        aligned = memory.clone() if memory.storage_offset() % unit else memory
        flat = aligned.view(self._dtype)
        source = self.region.source
        if not source.is_dense:  # the region keeps its elements without the gaps
            size, stride = source.size, source.stride
            original = torch.empty_strided(size, stride, dtype=self._dtype, device=flat.device)
            flat = original.copy_(flat.view(size))
        local = flat.as_strided(self._size, self._stride, flat.storage_offset())
        return local if self._wrap is None else self._wrap(local)

    def __del__(self) -> None:
        self.region.views.discard(id(self))
        if not self.region.views:
            self.region.whole = None


def _describe(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} {list(tensor.shape)} of {tensor.dtype}"


def _alias_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of another one, but not its memory."""
    alias = tensor.detach()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    if isinstance(alias, DTensor):
        alias._local_tensor = empty
    else:
        alias.data = empty.to(tensor.device)
    return alias
