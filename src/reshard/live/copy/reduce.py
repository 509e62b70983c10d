"""Add up the addends of a pending reduction, in the order of the addends, always.

Where every addend comes in the same blocks, as it does most of the time, blocks are added up slice
by slice, straight into the destination, so that a slice stays in the processor's cache. Otherwise
the parts that a rank adds up are put one after the other on a line, and every addend is added to
that line. Halves are added up in float32; a mean is divided there; everything is rounded once, when
it goes into the destination. A GPU adds the same numbers in the same order, so it gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from reshard.dtypes import accumulator, itemsize, storage_dtype
from reshard.layout.columns import Ints
from reshard.live.copy.gpu import CopyTable, TensorTable
from reshard.live.copy.host import Bases, HostCopies, as_tensor
from reshard.live.program.copies import CopyList, Place
from reshard.live.program.rounds import Transfer
from reshard.live.program.runs import RAW, Array, array_at

__all__ = ["OrderedSum", "add_up", "sums_of"]

DIRECT = {"float32", "float64", "int32", "int64", "float16", "bfloat16"}
"""Dtypes whose addends are added up block by block."""

MIN_BLOCK = 4096
"""Bytes of a block, on average, if there are many: smaller ones are quicker along a line."""

FEW_BLOCKS = 64

SLICE_BYTES = 1 << 18
"""Of one addend: all that is added at a time, and the sum, should fit into a cache of a core."""

ON_HOST = ("uint16", "uint32", "uint64", "complex32")
"""Dtypes that torch does not add up on a GPU."""

OPS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
TORCH_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda total, addend: total.add_(addend),
    "avg": lambda total, addend: total.add_(addend),
    "prod": lambda total, addend: total.mul_(addend),
    "max": lambda total, addend: torch.maximum(total, addend, out=total),
    "min": lambda total, addend: torch.minimum(total, addend, out=total),
}

Arrived = Mapping[int, int]
"""Where transfers that came in messages begin, by their identity: an address, or an offset in the
staging buffer of a GPU. What is not in it is in this rank's own tensors."""


def sums_of(transfers: Sequence[Transfer], staging: int) -> list[OrderedSum]:
    """The sums of a round: all addends of a stack are one."""
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
        self._op, self._dtype = first.op, first.stack.have.dtype
        self._wide, self._want = accumulator(self._dtype), first.stack.want.dtype
        self._num_addends = 1 + self._addends[-1].addend
        self._staging = staging
        self._blocks = self._in_same_blocks()
        self._line = None if self._blocks is not None else _Line(self._firsts)
        self._out: HostCopies | list[CopyTable] | None = None

    def _in_same_blocks(self) -> list[tuple[Sequence[int], list[_Operand]]] | None:
        """Shape, destination and operands of each block, if every addend comes in the same ones."""
        addends, first = self._addends, self._addends[0]
        small = first.num_bytes < MIN_BLOCK * len(first.width) and len(first.width) > FEW_BLOCKS
        alike = self._dtype == first.dtype == self._want and self._dtype in DIRECT
        if small or not alike or len(addends) < 2:
            return None
        if self._op == "avg" and self._dtype.startswith("int"):
            return None
        for n, one in enumerate(addends):
            same = np.array_equal(one.part, first.part) and np.array_equal(one.width, first.width)
            if one.addend != n or not same:
                return None
        places = [first.destination, *(one.source for one in addends)]
        columns = [_operands(place, first.itemsize) for place in places]
        packed = _operands(first.in_message(0, self._staging), first.itemsize)
        rows = zip(first.width.tolist(), packed, *columns, strict=True)
        return [(shape, list(operands)) for shape, *operands in rows]

    def run(self, tensors: Bases, arrived: Arrived) -> int:
        """Add up on the host; gives the bytes that it took beyond the tensors."""
        addresses = tensors.addresses
        if self._blocks is None:
            total = self._total(addresses, arrived)
            if not isinstance(self._out, HostCopies):
                self._out = HostCopies(self._copies().tables())
            self._out.run(tensors, int(total.ctypes.data), total.nbytes)
            return total.nbytes
        kind, places, used = storage_dtype(self._dtype), self._places(arrived), 0
        for shape, (packed, into, *own) in self._blocks:
            total = array_at(addresses[into[0]] + into[1], shape, kind, into[2])
            arrays = []
            for place, (base, offset, strides) in zip(places, own, strict=True):
                if place is None:
                    arrays.append(array_at(addresses[base] + offset, shape, kind, strides))
                else:
                    arrays.append(array_at(place + packed[1], shape, kind, packed[2]))
            used = max(used, add_up(self._op, self._dtype, total, arrays))
        return used

    def _places(self, arrived: Arrived) -> list[int | None]:
        return [arrived.get(id(one)) for one in self._addends]

    def _total(self, addresses: Sequence[int], arrived: Arrived) -> Array:
        """The sums on the line, not rounded yet."""
        line = self._line = self._line or _Line(self._firsts)
        total = np.empty(line.length, storage_dtype(self._wide))
        size, raw = itemsize(self._dtype), RAW[itemsize(self._dtype)]
        for one, place in zip(self._addends, self._places(arrived), strict=True):
            first = one.addend == self._addends[0].addend
            if place is not None:
                for low, high, at in line.stretches(one):
                    addend = array_at(place + at * size, (high - low,), raw, (size,))
                    self._add(total[low:high], addend, first)
                continue
            rows = (line.places(one).tolist(), one.sizes.tolist(), one.width.tolist())
            own = _operands(one.source, size)
            for low, count, shape, (base, offset, strides) in zip(*rows, own, strict=True):
                addend = array_at(addresses[base] + offset, shape, raw, strides)
                self._add(total[low : low + count].reshape(shape), addend, first)
        if self._op == "avg":
            whole = np.issubdtype(total.dtype, np.integer)
            divide = np.floor_divide if whole else np.divide
            divide(total, self._num_addends, out=total, casting="unsafe")
        return total

    def _add(self, total: Array, addend: Array, first: bool) -> None:
        """Add an addend, of which the array has only the bits."""
        value = as_tensor(addend, self._dtype)
        if first:
            torch.from_numpy(total).copy_(value)
        elif self._wide != self._dtype:
            # torch widens halves as it adds, but knows no sum of a float8 and a float32.
            wide = value.to(getattr(torch, self._wide)) if value.itemsize == 1 else value
            TORCH_OPS[self._op](torch.from_numpy(total), wide)
        else:
            any_of = total.dtype == bool and self._op in ("sum", "avg")
            op = np.logical_or if any_of else OPS[self._op]
            with np.errstate(all="ignore"):
                op(total, addend.view(total.dtype), out=total)

    def _copies(self) -> CopyList:
        """From the line, which takes the place of the staging buffer, into the destination."""
        assert self._line is not None
        copies, size = CopyList(), itemsize(self._wide)
        for one in self._firsts:
            at = self._line.places(one) * size
            line = Place.in_message(one.width, at, self._staging, self._wide)
            copies.add(one.width, line, one.destination)
        return copies

    def run_with_torch(
        self, tensors: Mapping[int, torch.Tensor], staging: torch.Tensor | None, arrived: Arrived
    ) -> int:
        """Add up tensors on any devices.

        With a staging buffer all is on its GPU, and ``arrived`` counts from its start. Without one,
        messages are at addresses of the host, and so are the sums.
        """
        if staging is not None and self._fits_gpu:
            total = self._total_on_gpu(tensors, staging, arrived)
        else:
            kept, places = [], dict(arrived) if staging is None else {}
            for one, place in zip(self._addends, self._places(arrived), strict=True):
                if id(one) not in places:
                    packed = self._packed(one, tensors, staging, place)
                    kept.append(packed)
                    places[id(one)] = packed.data_ptr()
            total = as_tensor(self._total((), places), self._wide)
        if not isinstance(self._out, list):
            self._out = [CopyTable(blocks) for blocks in self._copies().tables()]
        uniform = staging is not None and total.device == staging.device
        _launch_all(self._out, tensors, self._staging, total, uniform)
        return total.nbytes

    def _packed(
        self,
        one: Transfer,
        tensors: Mapping[int, torch.Tensor],
        staging: torch.Tensor | None,
        place: int | None,
    ) -> torch.Tensor:
        """An addend in the memory of the host, its blocks one after the other."""
        if place is not None and staging is not None:
            return staging[place : place + one.num_bytes].cpu()
        copies = CopyList()
        copies.add(one.width, one.source, one.in_message(0, self._staging))
        tables = [CopyTable(blocks) for blocks in copies.tables()]
        packed = torch.empty(one.num_bytes, dtype=torch.uint8)
        _launch_all(tables, tensors, self._staging, packed, False)
        return packed

    def _total_on_gpu(
        self, tensors: Mapping[int, torch.Tensor], staging: torch.Tensor, arrived: Arrived
    ) -> torch.Tensor:
        """The sums on the line, on the current stream of the GPU."""
        line = self._line = self._line or _Line(self._firsts)
        kind: torch.dtype = getattr(torch, self._dtype)
        wide: torch.dtype = getattr(torch, self._wide)
        total = torch.empty(line.length, dtype=wide, device=staging.device)
        for one, place in zip(self._addends, self._places(arrived), strict=True):
            first = one.addend == self._addends[0].addend
            if place is not None:
                message = staging[place : place + one.num_bytes].view(kind)
                for low, high, at in line.stretches(one):
                    self._add_on_gpu(total[low:high], message[at : at + high - low], first)
                continue
            rows = (line.places(one).tolist(), one.sizes.tolist(), one.width.tolist())
            own = _operands(one.source, 1)
            for low, count, shape, (base, offset, strides) in zip(*rows, own, strict=True):
                tensor = tensors[base].detach()
                start = int(tensor.storage_offset()) + offset // kind.itemsize
                addend = tensor.as_strided(shape, strides, start)
                self._add_on_gpu(total[low : low + count].view(shape), addend, first)
        if self._op == "avg":
            whole = not (wide.is_floating_point or wide.is_complex)
            # As a tensor: by a number torch would multiply with its rounded inverse.
            count_there = torch.full((), self._num_addends, dtype=wide, device=total.device)
            total.div_(count_there, rounding_mode="floor" if whole else None)
        return total

    def _add_on_gpu(self, total: torch.Tensor, addend: torch.Tensor, first: bool) -> None:
        if first:
            total.copy_(addend)
        elif self._dtype == "bool" and self._op in ("sum", "avg"):
            total.logical_or_(addend)
        else:
            TORCH_OPS[self._op](total, addend.to(total.dtype) if addend.itemsize == 1 else addend)

    @property
    def _fits_gpu(self) -> bool:
        """Whether torch adds up on a GPU as numpy does on the host."""
        ordered = self._op not in ("max", "min") or not self._dtype.startswith("complex")
        return self._dtype not in ON_HOST and ordered and (self._op, self._dtype) != ("avg", "bool")


def _launch_all(
    tables: Sequence[CopyTable],
    tensors: Mapping[int, torch.Tensor],
    number: int,
    staging: torch.Tensor,
    uniform: bool,
) -> None:
    """Copy with torch or on a GPU; the staging buffer has this number."""
    used = {**tensors, number: staging}
    addresses = np.zeros(number + 1, dtype=np.int64)
    addresses[list(used)] = [tensor.data_ptr() for tensor in used.values()]
    for table in tables:
        table.launch(TensorTable(addresses, used, staging.device), uniform)


_Operand = tuple[int, int, Sequence[int]]
"""Base number, offset in bytes and strides in bytes of a block."""


def _operands(place: Place, size: int) -> list[_Operand]:
    columns = (place.base, place.offset, place.strides * size)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class _Line:
    """Where each part is on the line of all parts that a rank adds up."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        part = np.concatenate([one.part for one in transfers])
        size = np.concatenate([one.sizes for one in transfers])
        order = np.argsort(part, kind="stable")
        self.parts = part[order]
        ends = np.cumsum(size[order])
        self.starts = ends - size[order]
        self.length = int(ends[-1])

    def places(self, transfer: Transfer) -> Ints:
        """Where its blocks are; the blocks of a part come in the same order everywhere."""
        first_of_part = np.searchsorted(transfer.part, transfer.part)
        within = transfer.at - transfer.at[first_of_part]
        found: Ints = self.starts[np.searchsorted(self.parts, transfer.part)] + within
        return found

    def stretches(self, transfer: Transfer) -> Iterator[tuple[int, int, int]]:
        """What of a packed transfer is one run on the line as well.

        From and to there, and where in the transfer, in elements.
        """
        places = self.places(transfer)
        ends = places + transfer.sizes
        new = np.flatnonzero(np.concatenate([[True], places[1:] != ends[:-1]]))
        last = np.append(new[1:], len(places)) - 1
        columns = (places[new], ends[last], transfer.at[new])
        yield from zip(*(column.tolist() for column in columns), strict=True)


def add_up(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """Add up two addends or more in their order, all of the same shape as ``total``.

    Nothing but final sums is ever written to ``total``: others may be reading the same sums there,
    from a tied tensor. Gives the bytes that it took besides.

    >>> total = np.zeros(3, "float32")
    >>> add_up("avg", "float32", total, [np.full(3, n, "float32") for n in (1, 2, 6)])
    12
    >>> total.tolist()
    [3.0, 3.0, 3.0]
    """
    add, used = _add if accumulator(dtype) == dtype else _add_halves, 0
    with np.errstate(all="ignore"):  # infinite gradients are no news to those who scale losses
        for at in _slices(total.shape, total.itemsize):
            used = max(used, add(op, dtype, total[at], [addend[at] for addend in addends]))
    return used


def _add(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    if len(addends) == 2 and op != "avg":
        OPS[op](addends[0], addends[1], out=total)
        return 0
    sums = np.empty(total.shape, total.dtype)
    OPS[op](addends[0], addends[1], out=sums)
    for addend in addends[2:]:
        OPS[op](sums, addend, out=sums)
    if op == "avg":
        np.divide(sums, len(addends), out=sums)
    total[...] = sums
    return sums.nbytes


def _add_halves(op: str, dtype: str, total: Array, addends: Sequence[Array]) -> int:
    """The same for dtypes that numpy may not know, of which arrays have only the bits."""
    sums = np.empty(total.shape, "float32")
    wide = torch.from_numpy(sums)
    wide.copy_(as_tensor(addends[0], dtype))
    for addend in addends[1:]:
        TORCH_OPS[op](wide, as_tensor(addend, dtype))
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
