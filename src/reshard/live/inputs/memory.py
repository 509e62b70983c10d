"""The memory of tensors beside their copies: overlaps are refused, padding is filled with zeros,
donated sources are freed, large tensors get huge pages.

Large tensors that peers access repeatedly get huge pages. The kernel copies between two processes
page by page: with pages of 2 MiB instead of 4 KiB a move of 64 MiB takes a third less time
(``benchmarks/reports/special_cases.md``). They are not requested where the system gives huge pages
to every process or to none, nor for new memory, where a huge page may take long to get.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from reshard.errors import TensorError
from reshard.layout.columns import Ints
from reshard.live.copy.host import array_at
from reshard.live.program.rounds import HAVE, Program, as_strided

MADV_COLLAPSE = 25
"""Not in Python's mmap: since Linux 6.1."""

Names = tuple[Mapping[str, object], Mapping[str, object]]
"""The names of source and destination tensors."""
Tensors = Mapping[int, torch.Tensor]
"""By base number: sources first."""


def check_overlaps(tensors: Tensors, names: Names, rank: int) -> None:
    """Refuse destinations that overlap one another, a source or themselves."""
    listed, num_have = [*names[0], *names[1]], len(names[0])
    spans = []
    """The first byte of each tensor, the one after its last, and its number."""
    for number, tensor in tensors.items():
        plain = tensor.is_cpu and tensor.is_contiguous()
        if number >= num_have and not plain and _overlaps_itself(tensor):
            raise TensorError(
                f'on rank {rank} elements of the destination "{listed[number]}" overlap one '
                "another in memory: give memory of its own for every element, as clone() does"
            )
        if tensor.device.type in ("cpu", "cuda") and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            spans.append((start, start + length * tensor.element_size(), number))
    if not spans:
        return
    table = np.array(spans, dtype=np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    # Only where the furthest end so far reaches into the next span can two overlap.
    reach = np.maximum.accumulate(table[:, 1])
    for at in np.flatnonzero(reach[:-1] > table[1:, 0]) + 1:
        for before in range(at - 1, -1, -1):
            if reach[before] <= table[at, 0]:
                break
            _check_pair(tensors, num_have, listed, (table[before], table[at]), rank)


def _check_pair(
    tensors: Tensors, num_have: int, names: list[str], spans: tuple[Ints, Ints], rank: int
) -> None:
    one, other = spans
    numbers = sorted((int(one[2]), int(other[2])))
    sources = [number < num_have for number in numbers]
    if all(sources) or one[1] <= other[0]:
        return
    a, b = (tensors[number] for number in numbers)
    alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    tied = alike and a.data_ptr() == b.data_ptr()
    if (not any(sources) and tied) or not _share_memory(a, b):
        return
    first, second = (f'"{names[number]}"' for number in numbers)
    if not any(sources):
        raise TensorError(
            f"on rank {rank} the destinations {first} and {second} overlap in memory: tied tensors "
            "have the same memory, dtype, shape and strides; give others memory of their own"
        )
    raise TensorError(
        f"on rank {rank} a destination overlaps a source in memory ({first} and {second}): the "
        "source is read while the destination is written; give other memory, or leave out into="
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: a dim's stride is within the reach of inner dims."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; True where that is too hard to compute."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    first, second = (
        array_at(
            tensor.data_ptr(),
            tuple(tensor.shape),
            np.dtype(f"V{tensor.element_size()}"),
            [stride * tensor.element_size() for stride in tensor.stride()],
        )
        for tensor in (one, other)
    )
    try:
        # Exact, but bounded: the general problem is hard.
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def fill_zeros(program: Program, tensors: Tensors) -> None:
    """Fill the boxes of destination tensors that no source reaches (padding)."""
    numbers = {name: number for number, name in enumerate(program.names[1], program.num_have)}
    for fill in program.part.fills:
        tensor = tensors.get(numbers[fill.name])
        if tensor is None:
            continue
        tensor = tensor.detach()
        for piece in fill.spec.layout.pieces(program.rank, fill.spec.shape):
            inside = piece.box & fill.box
            if inside.size:
                lows = zip(inside.start, piece.box.start, piece.strides, strict=True)
                offset = piece.offset + sum((low - start) * step for low, start, step in lows)
                # Offset and strides in a contiguous tensor, as those in this one.
                at = np.array([offset, *piece.strides], dtype=np.int64)
                first, *strides = as_strided(at, tuple(tensor.shape), tensor.stride()).tolist()
                view = tensor.as_strided(inside.shape, strides, tensor.storage_offset() + first)
                view.zero_()


class Donation:
    """Source tensors that are freed as soon as their last element has been read."""

    def __init__(self, program: Program, tensors: Tensors) -> None:
        last: dict[int, int] = {}
        steps = (program.part.sends, program.part.copies)
        for rows in (rows for one in steps for rows in one.rows if rows.transfers.hop == 0):
            end = max(n for n in rows.rounds() if rows.slot.turn(n, 0) is not None)
            for number in program.numbers_of(rows.flow.stack, HAVE).tolist():
                last[number] = max(last.get(number, 0), end)
        tied: dict[int, list[int]] = {}
        """Sources by the address of their storage: they are freed after the last round of any."""
        for number, tensor in tensors.items():
            if number < program.num_have:
                tied.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
        self._after: dict[int, list[torch.Tensor]] = {}
        for numbers in tied.values():
            end = max(last.get(number, 0) for number in numbers)
            self._after.setdefault(end, []).extend(tensors[number] for number in numbers)

    def after(self, number: int) -> None:
        """Free what no later round reads; memory shared with tensors not given here stays."""
        for tensor in self._after.pop(number, []):
            storage = tensor.untyped_storage()
            whole = storage.nbytes() == tensor.numel() * tensor.element_size()
            if whole and storage.resizable():
                storage.resize_(0)


def collapse(tensor: torch.Tensor) -> None:
    """Move a tensor that is in use to huge pages; its values and its address stay.

    Costs about as much as to copy it. Where memory is short the kernel leaves it as it is.
    """
    if tensor.is_cpu and tensor.is_contiguous():
        page, start = mmap.PAGESIZE, tensor.data_ptr()
        first, last = -(-start // page) * page, (start + tensor.nbytes) // page * page
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call(first, last - first, MADV_COLLAPSE)


@lru_cache(maxsize=1)
def are_huge_pages_on_request() -> bool:
    """Whether this system gives huge pages to processes that request them."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[madvise]" in setting
