"""Refuse destinations that overlap one another or a source; equal ones are tied and fine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from reshard.errors import TensorError
from reshard.layout.columns import Ints
from reshard.live.copy.host import array_at

__all__ = ["check_overlaps"]

Names = tuple[Mapping[str, object], Mapping[str, object]]
"""The names of source and destination tensors."""
Tensors = Mapping[int, torch.Tensor]
"""By base number: sources first."""


def check_overlaps(tensors: Tensors, names: Names, rank: int) -> None:
    """Refuse destinations that overlap one another, a source or themselves."""
    listed, num_have = [*names[0], *names[1]], len(names[0])
    for number, tensor in tensors.items():
        plain = tensor.is_cpu and tensor.is_contiguous()
        if number >= num_have and not plain and _overlaps_itself(tensor):
            raise TensorError(
                f'on rank {rank} elements of the destination "{listed[number]}" overlap one '
                "another in memory: give memory of its own for every element, as clone() does"
            )
    spans = [
        (*_span(tensor), number)
        for number, tensor in tensors.items()
        if tensor.device.type in ("cpu", "cuda") and tensor.numel()
    ]
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
    tied = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    if (not any(sources) and tied) or not _share_memory(a, b):
        return
    first, second = (f'"{names[number]}"' for number in numbers)
    if not any(sources):
        raise TensorError(
            f"on rank {rank} the destinations {first} and {second} overlap in memory: tied tensors "
            "have the same memory, shape and strides; give others memory of their own"
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


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; True where that is too hard to compute."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    arrays = [
        array_at(
            t.data_ptr(),
            tuple(t.shape),
            np.dtype(f"V{t.element_size()}"),
            [stride * t.element_size() for stride in t.stride()],
        )
        for t in (one, other)
    ]
    try:
        # Exact, but bounded: the general problem is hard.
        first, second = arrays
        return bool(np.shares_memory(first, second, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
