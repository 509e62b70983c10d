"""Add up the addends of a pending reduction, always in the order of their numbers.

Where all addends have the same blocks, as they mostly do, each block is added up slice by slice,
directly into the destination, so that a slice stays in the processor's cache. Otherwise an
accumulator holds all parts that a rank adds up, one after the other, and every addend is added to
it. float16 and bfloat16 are added up in float32, a mean is divided there, and each sum is rounded
once, when it is written to the destination. A GPU adds the same numbers in the same order, so the
bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from reshard.dtypes import accumulator, storage_dtype
from reshard.layout.columns import Ints
from reshard.live.copy.gpu import WORDS, TensorTable, TorchCopies
from reshard.live.copy.host import (
    FIRST_PAGE,
    MEMORY,
    RAW,
    Array,
    Bases,
    HostCopies,
    array_at,
    as_tensor,
)
from reshard.live.program.blocks import CopyList, Place
from reshard.live.program.rounds import Transfer

HALVES = {"float16", "bfloat16"}
"""Dtypes that are added up in float32."""

DIRECT = {"float32", "float64", "int32", "int64", *HALVES}
"""Dtypes whose addends are added up block by block."""

MIN_BLOCK = 4096
"""Bytes of a block, on average, if there are many: smaller ones are faster in an accumulator."""

FEW_BLOCKS = 64

SLICE_BYTES = 1 << 18
"""Of one addend: a slice of every addend and of the sum should fit into the cache of a core."""

ON_HOST = ("uint16", "uint32", "uint64", "complex32")  # dtypes that torch does not add up on a GPU

OPS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
TORCH_OPS: dict[str, Callable[..., object]] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "max": torch.maximum,
    "min": torch.minimum,
}  # fmt: skip

Arrived = dict[int, int | torch.Tensor]
"""Where transfers that came in messages are, by their ``id``: an address of the host, or bytes on a
GPU. All others are in this rank's own tensors."""


def sums_of(transfers: Sequence[Transfer], staging: int) -> list[OrderedSum]:
    """The sums of a round: one for all addends of a stack."""
    stacks: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        stacks.setdefault(id(transfer.stack), []).append(transfer)
    return [OrderedSum(of_stack, staging) for of_stack in stacks.values()]


class OrderedSum:
    """The addends of one stack in one round, on one rank."""

    def __init__(self, transfers: Sequence[Transfer], staging: int) -> None:
        self._addends = sorted(transfers, key=lambda transfer: transfer.addend)
        first = self._addends[0]
        self._firsts = [one for one in self._addends if one.addend == first.addend]
        reduce, self._dtype = first.stack.have.layout.reduce, first.stack.have.dtype
        self._op = reduce[0] if reduce else "sum"
        self._wide, self._staging = accumulator(self._dtype), staging
        self._num_addends = 1 + self._addends[-1].addend
        self._storage = storage_dtype(self._dtype)
        self._blocks = self._in_same_blocks()
        self._on_host: HostCopies | None = None
        self._with_torch: TorchCopies | None = None

    @cached_property
    def _parts(self) -> tuple[Ints, Ints, int]:
        """All parts that this rank adds up, where each is in the accumulator, and its length."""
        part = np.concatenate([one.part for one in self._firsts])
        size = np.concatenate([one.sizes for one in self._firsts])
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(size[order])
        return part[order], ends - size[order], int(ends[-1])

    def _places(self, transfer: Transfer) -> Ints:
        """Where the blocks of a transfer are in the accumulator; those of a part have the same
        order in all transfers."""
        parts, starts, _ = self._parts
        within = transfer.at - transfer.at[np.searchsorted(transfer.part, transfer.part)]
        places: Ints = starts[np.searchsorted(parts, transfer.part)] + within
        return places

    def _runs(self, transfer: Transfer) -> Iterator[tuple[int, int, int]]:
        """The runs of a packed transfer that are contiguous in the accumulator as well.

        Start and end there, and the start in the transfer, in elements.
        """
        places = self._places(transfer)
        ends = places + transfer.sizes
        new = np.flatnonzero(np.append(True, places[1:] != ends[:-1]))
        last = np.append(new[1:], len(places)) - 1
        columns = (places[new], ends[last], transfer.at[new])
        return zip(*(column.tolist() for column in columns), strict=True)

    def _in_same_blocks(self) -> list[tuple[Sequence[int], list[_Operand]]] | None:
        """Shape, destination and operands of each block, if all addends have the same blocks."""
        addends, first = self._addends, self._addends[0]
        dtype, num_blocks = self._dtype, len(first.width)
        small = first.num_bytes < MIN_BLOCK * num_blocks and num_blocks > FEW_BLOCKS
        cast = not dtype == first.dtype == first.stack.want.dtype
        floored = self._op == "avg" and dtype.startswith("int")
        same = all(
            one.addend == number
            and np.array_equal(one.part, first.part)
            and np.array_equal(one.width, first.width)
            for number, one in enumerate(addends)
        )
        if small or cast or floored or dtype not in DIRECT or len(addends) < 2 or not same:
            return None
        packed = first.in_message(0, self._staging)
        places = [packed, first.destination, *(one.source for one in addends)]
        columns = [_operands(place, first.itemsize, FIRST_PAGE) for place in places]
        rows = zip(first.width.tolist(), *columns, strict=True)
        return [(shape, operands) for shape, *operands in rows]

    def run(self, tensors: Bases, arrived: Arrived, gpu: torch.device | None) -> int:
        """Add up, on a GPU if there is one; returns the bytes that it took beyond the tensors."""
        if gpu is None and tensors.is_host:
            if self._blocks is not None:
                return self._add_blocks(self._blocks, tensors.addresses, arrived)
            total = self._total(tensors, arrived, torch.device("cpu"))
            self._on_host = self._on_host or HostCopies(self._copies())
            self._on_host.run(tensors, total.data_ptr(), total.nbytes)
        else:
            # Whether torch adds up on a GPU as numpy does on the host.
            ordered = self._op not in ("max", "min") or not self._dtype.startswith("complex")
            fits = self._dtype not in ON_HOST and (self._op, self._dtype) != ("avg", "bool")
            device = gpu if gpu is not None and ordered and fits else torch.device("cpu")
            total = self._total(tensors, arrived, device)
            self._with_torch = self._with_torch or TorchCopies(self._copies())
            self._with_torch.launch(TensorTable.of(tensors, total))
        return total.nbytes

    def _add_blocks(
        self,
        blocks: Sequence[tuple[Sequence[int], list[_Operand]]],
        addresses: Sequence[int],
        arrived: Arrived,
    ) -> int:
        """Add up block by block, from the tensors and messages into the destination."""
        array, kind, used = np.ndarray, self._storage, 0
        messages: list[Any] = [arrived.get(id(one)) for one in self._addends]
        for shape, ((_, at, packed), (to, to_offset, to_strides), *own) in blocks:
            # `array_at`, without a call per addend; the offsets count from `MEMORY`.
            total = array(shape, kind, MEMORY, addresses[to] + to_offset, to_strides)
            arrays = [
                array(shape, kind, MEMORY, addresses[base] + offset, strides)
                if message is None
                else array(shape, kind, MEMORY, message + at, packed)
                for message, (base, offset, strides) in zip(messages, own, strict=True)
            ]
            used = max(used, add_up(self._op, self._dtype, total, arrays))
        return used

    def _total(self, tensors: Bases, arrived: Arrived, device: torch.device) -> torch.Tensor:
        """The accumulator with all sums, not rounded yet."""
        total = torch.empty(self._parts[2], dtype=getattr(torch, self._wide), device=device)
        for one in self._addends:
            first, place = one.addend == self._addends[0].addend, arrived.get(id(one))
            if place is not None:
                if isinstance(place, int):
                    place = torch.from_numpy(array_at(place, (one.num_bytes,), RAW[1], (1,)))
                message = place.view(getattr(torch, one.dtype))
                for low, high, at in self._runs(one):
                    self._add(total[low:high], message[at : at + high - low], first)
                continue
            rows = (self._places(one).tolist(), one.sizes.tolist(), one.width.tolist())
            places = _operands(one.source, 1)
            for low, count, shape, (base, offset, strides) in zip(*rows, places, strict=True):
                tensor = tensors.tensors[base].detach()
                begin = tensor.storage_offset() + offset // tensor.itemsize
                block = tensor.as_strided(shape, strides, begin)
                self._add(total[low : low + count].view(shape), block, first)
        if self._op != "avg":
            return total
        whole = not (total.is_floating_point() or total.is_complex() or total.dtype == torch.bool)
        if total.is_cpu:
            divide = np.floor_divide if whole else np.divide
            divide(total.numpy(), self._num_addends, out=total.numpy(), casting="unsafe")
        else:
            # By a tensor: for a number torch would multiply with its rounded inverse.
            count = torch.full((), self._num_addends, dtype=total.dtype, device=total.device)
            total.div_(count, rounding_mode="floor" if whole else None)
        return total

    def _add(self, total: torch.Tensor, addend: torch.Tensor, first: bool) -> None:
        if addend.device != total.device:
            # As plain words: torch does not copy every dtype on every device.
            words = addend.view(WORDS.get(addend.itemsize, addend.dtype))
            addend = words.to(total.device).view(addend.dtype)
        if first:
            total.copy_(addend)
        elif self._dtype == "bool" and self._op in ("sum", "avg"):
            total.logical_or_(addend)
        elif total.is_cpu and total.dtype == addend.dtype:
            array = total.numpy()  # torch lacks sums of some dtypes
            # Not addend.numpy(): that would keep the user's tensor from being resized, and freed.
            strides = [stride * addend.itemsize for stride in addend.stride()]
            other = array_at(addend.data_ptr(), addend.shape, array.dtype, strides)
            with np.errstate(all="ignore"):
                OPS[self._op](array, other, out=array)
        else:
            # torch widens halves as it adds, but knows no sum of a float8 and a float32.
            addend = addend.to(total.dtype) if addend.itemsize == 1 else addend
            TORCH_OPS[self._op](total, addend, out=total)

    def _copies(self) -> CopyList:
        """From the accumulator, in place of the staging buffer, into the destination."""
        copies, size = CopyList(), getattr(torch, self._wide).itemsize
        for one in self._firsts:
            at = self._places(one) * size
            line = Place.in_message(one.width, at, self._staging, self._wide)
            copies.add(one.width, line, one.destination)
        return copies


_Operand = tuple[int, int, Sequence[int]]
"""Base number, offset in bytes and strides in bytes of a block."""


def _operands(place: Place, size: int, origin: int = 0) -> list[_Operand]:
    """The operand of each block; offsets count from the origin."""
    columns = (place.base, place.offset - origin, place.strides * size)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@np.errstate(all="ignore")  # gradients overflow where losses are scaled
def add_up(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """Add up two addends or more in their order, all of the same shape as ``total``.

    Only final sums are ever written to ``total``: a peer may be reading the same sums there, from a
    tied tensor. Returns the bytes that it took besides.

    >>> total = np.zeros(3, "float32")
    >>> add_up("avg", "float32", total, [np.full(3, n, "float32") for n in (1, 2, 6)])
    12
    >>> total.tolist()
    [3.0, 3.0, 3.0]
    """
    if len(addends) == 2 and op != "avg" and dtype not in HALVES:
        # In one pass, so slices and sums of slices are of no use.
        OPS[op](addends[0], addends[1], out=total)
        return 0
    add = _add_halves if dtype in HALVES else _add
    if total.nbytes <= SLICE_BYTES:
        return add(op, dtype, total, addends)
    return max(
        add(op, dtype, total[at], [addend[at] for addend in addends])
        for at in _slices(total.shape, total.itemsize)
    )


def _add(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    sums = np.empty(total.shape, total.dtype)
    OPS[op](addends[0], addends[1], out=sums)
    for addend in addends[2:]:
        OPS[op](sums, addend, out=sums)
    if op == "avg":
        np.divide(sums, len(addends), out=sums)
    total[...] = sums
    return sums.nbytes


def _add_halves(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """The same for dtypes that numpy lacks: their arrays hold the bits."""
    sums = np.empty(total.shape, "float32")
    wide = torch.from_numpy(sums)
    wide.copy_(as_tensor(addends[0], dtype))
    for addend in addends[1:]:
        TORCH_OPS[op](wide, as_tensor(addend, dtype), out=wide)
    if op == "avg":
        np.divide(sums, len(addends), out=sums)
    as_tensor(total, dtype).copy_(wide)
    return sums.nbytes


def _slices(shape: Sequence[int], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Where the slices of an array are: split along the first dims, as far as it takes."""
    dim = next((n for n, size in enumerate(shape) if size > 1), None)
    num_bytes = prod(shape) * itemsize
    if dim is None or num_bytes <= SLICE_BYTES:
        yield (...,)
        return
    step = max(SLICE_BYTES * shape[dim] // num_bytes, 1)
    for first in range(0, shape[dim], step):
        last = min(first + step, shape[dim])
        for rest in _slices((last - first, *shape[dim + 1 :]), itemsize):
            inner = rest[1:] if rest != (...,) else (...,)
            yield (*[slice(None)] * dim, slice(first, last), *inner)
