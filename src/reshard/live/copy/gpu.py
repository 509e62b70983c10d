"""Copy blocks between tensors on any device: on a GPU in one kernel launch.

    table = CopyTable(blocks)       # once per plan
    table.launch(tensors)           # every call; addresses are uploaded once for many tables

Packing (blocks of tensors into a message) and unpacking (a message into blocks of tensors) are both
such a copy. Without Triton, where it lacks a cast, and between devices, torch copies the blocks one
by one: the same bytes, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from reshard.dtypes import itemsize
from reshard.layout.columns import Ints, drop_oldest
from reshard.live.copy.cuda_driver import stream_of
from reshard.live.copy.gpu_table import Cast, LaunchTable, Strided, compile_table, merged_blocks
from reshard.live.copy.host import RAW, Bases, array_at
from reshard.live.program.blocks import CopyBlocks, CopyList

MAX_KEPT = 8  # launch tables that are kept for tensors that are aligned differently

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = ("float16", "bfloat16", "float32", "float64")
E4M3 = "float8_e4m3fn"


class TensorTable:
    """The tensors of a call by base number, and their addresses.

    On a GPU it belongs to one stream: the addresses on the device are read in its order.
    """

    def __init__(
        self, addresses: Ints, tensors: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        """On a GPU all tensors are on ``device``; on the host they may be anywhere."""
        self.tensors, self.device = tensors, device
        self.phases = addresses % 16
        self.key = self.phases.astype(np.uint8).tobytes()
        self._addresses = addresses
        self._uploaded: list[torch.Tensor] = []

    @classmethod
    def of(cls, bases: Bases, staging: torch.Tensor) -> TensorTable:
        """The tensors of a call, and last this staging buffer."""
        addresses = bases.table.copy()
        addresses[-1] = staging.data_ptr()
        tensors = {**bases.tensors, len(addresses) - 1: staging}
        return cls(addresses, tensors, staging.device)

    def with_tensors(self, tensors: Mapping[int, torch.Tensor]) -> TensorTable:
        """The same addresses, which are uploaded once, of tensors that were bound again."""
        table = TensorTable.__new__(TensorTable)
        table.__dict__ |= self.__dict__
        table.tensors = tensors
        return table

    def uploaded(self) -> torch.Tensor:
        """The addresses on the device; the upload is enqueued."""
        if not self._uploaded:
            pinned = torch.from_numpy(self._addresses).pin_memory()
            self._uploaded.append(pinned.to(self.device, non_blocking=True))
        return self._uploaded[0]


class CopyTable:
    """Blocks to copy, compiled for one kernel launch.

    Tensors may change between launches, the blocks may not.
    """

    def __init__(self, blocks: CopyBlocks) -> None:
        self.blocks = blocks
        self._sizes = None if blocks.cast is None else Cast(*map(itemsize, blocks.cast))
        self._compiled: dict[bytes, _Compiled] = {}

    def launch(self, tensors: TensorTable) -> None:
        """Copy all blocks on the current stream."""
        compiled = self._compiled.get(tensors.key) or self._compile(tensors)
        if not len(compiled.blocks):
            return
        cast, device = self.blocks.cast, tensors.device
        if device.type != "cuda" or not compiled.aligned or not _kernel_casts(cast):
            _copy_one_by_one(compiled.blocks, tensors.tensors, cast)
            return
        is_current = device.index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(device):
            there = compiled.uploaded.get(device)
            if there is None:
                there = compiled.uploaded[device] = _OnDevice(compiled.table, cast, device)
            there.launch(tensors.uploaded())

    @property
    def device_bytes(self) -> int:
        """Bytes that the kept tables take up on devices."""
        kept = [one for compiled in self._compiled.values() for one in compiled.uploaded.values()]
        return sum(one.memory.nbytes for one in kept)

    def _compile(self, tensors: TensorTable) -> _Compiled:
        sizes, phases = self._sizes, tensors.phases
        blocks = merged_blocks(self.blocks, phases, sizes)
        # Casts load whole elements: a pointer to a float32 must be a multiple of 4.
        aligned = sizes is None or not (blocks.addresses(phases) % sizes.itemsizes).any()
        drop_oldest(self._compiled, MAX_KEPT - 1)
        table = compile_table(blocks, sizes)
        compiled = self._compiled[tensors.key] = _Compiled(blocks, table, aligned, {})
        return compiled


class TorchCopies:
    """Tables of copies between tensors on any devices and a staging buffer."""

    def __init__(self, copies: CopyList) -> None:
        self._tables = [CopyTable(blocks) for blocks in copies.tables()]

    def run(self, tensors: Bases, staging: int = 0, num_bytes: int = 0) -> None:
        """Copy; the staging buffer has this address of the host and so many bytes."""
        array = array_at(staging, (num_bytes,), RAW[1], (1,)) if num_bytes else np.zeros(0, "u1")
        self.launch(TensorTable.of(tensors, torch.from_numpy(array)))

    def launch(self, tensors: TensorTable) -> None:
        for one in self._tables:
            one.launch(tensors)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A launch table for tensors of one alignment, and its copies on devices."""

    blocks: Strided
    table: LaunchTable
    aligned: bool  # whether every element that is cast is at a multiple of its size
    uploaded: dict[torch.device, _OnDevice]


class _OnDevice:
    """A launch table on one device, and the kernel that Triton has compiled for it."""

    def __init__(
        self, table: LaunchTable, cast: tuple[str, str] | None, device: torch.device
    ) -> None:
        num_rows = table.rows.size
        tiles = np.zeros(-(-len(table.tiles) // 2) * 2, dtype=np.int32)
        tiles[: len(table.tiles)] = table.tiles
        both = np.concatenate([table.rows.reshape(-1), tiles.view(np.int64)])
        self.memory = torch.from_numpy(both).to(device)  # rows and tiles in one tensor
        self._arguments = self.memory[:num_rows], self.memory[num_rows:].view(torch.int32)
        self._grid, self._num_warps = (len(table.tiles), 1, 1), table.num_warps
        shape = (table.lanes, table.num_dims, table.wide)
        if cast is None:
            self._constants = (*shape, table.units[0] if len(table.units) == 1 else 0)
        else:
            import triton.language as tl

            together = Cast(*map(itemsize, cast)).num_together
            kinds = (tl.float8e4nv if one == E4M3 else getattr(tl, one) for one in cast)
            self._constants = (*shape, together, *kinds)
        self._function = "copy_tiles" if cast is None else "cast_tiles"
        self._kernel: Callable[..., None] | None = None
        self._streams: set[int] = set()
        """Streams that have read the table: its memory must not be used again before they are
        done."""

    def launch(self, bases: torch.Tensor) -> None:
        """Launch the kernel on the current stream.

        Triton finds out in 12 us which kernel to launch. The alignment of addresses, on which that
        depends, is the same in every launch, so the kernel of the first one is launched again; it
        takes addresses in less time than tensors, of which it asks the driver where they are.
        """
        stream = stream_of(self.memory.device)
        if stream not in self._streams:
            self._streams.add(stream)
            self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
        arguments = *self._arguments, bases
        if self._kernel is not None:
            try:
                self._kernel(*map(torch.Tensor.data_ptr, arguments), *self._constants)
                return
            except TypeError:  # a Triton whose kernels take other arguments
                self._kernel = None
        from reshard.live.copy import gpu_kernel

        function = getattr(gpu_kernel, self._function)
        kernel = function[self._grid](*arguments, *self._constants, num_warps=self._num_warps)
        self._kernel = kernel[self._grid] if hasattr(kernel, "__getitem__") else None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernel_casts(cast: tuple[str, str] | None) -> bool:
    """Whether the kernel gives torch's own result for this cast."""
    if not _has_triton():
        return False
    if cast is None:
        return True
    have, want = cast
    small = want == E4M3 and have in FLOATS, have == E4M3 and want in FLOATS[:3]
    return (have in FLOATS and want in FLOATS) or any(small)


def _copy_one_by_one(
    blocks: Strided, tensors: Mapping[int, torch.Tensor], cast: tuple[str, str] | None
) -> None:
    """What the kernel does, block by block with torch."""
    dtypes: Any = [getattr(torch, dtype) for dtype in cast or ()]
    for row in range(len(blocks)):
        sides = []
        for base, offset, strides in zip(blocks.base, blocks.offset, blocks.strides, strict=True):
            tensor = tensors[int(base[row])]
            start = tensor.data_ptr() - tensor.untyped_storage().data_ptr() + int(offset[row])
            sides.append((tensor, start, strides[row].tolist()))
        widths, unit = blocks.widths[row].tolist(), int(blocks.unit[row])
        if cast is None:
            word = math.gcd(8, unit, *(n for _, start, strides in sides for n in (start, *strides)))
            source, destination = (_words(*side, widths, unit, word) for side in sides)
            destination.copy_(source)
            continue
        # Cast by way of contiguous copies: those may be viewed as any dtype.
        (have, want), views = dtypes, []
        for (tensor, start, strides), dtype in zip(sides, dtypes, strict=True):
            steps, size = [*strides, dtype.itemsize], dtype.itemsize
            word = math.gcd(8, start, *steps)
            views.append(_words(tensor, start, steps, [*widths, unit], size, word))
        value = views[0].contiguous().view(have)
        if have.is_complex and not (want.is_complex or want is torch.bool):
            value = value.real  # torch would warn that the imaginary part is lost
        views[1].copy_(value.to(want).contiguous().view(views[1].dtype))


def _words(
    tensor: torch.Tensor, start: int, strides: list[int], widths: list[int], size: int, word: int
) -> torch.Tensor:
    """A block as words, with one more dim over the words of a unit of ``size`` bytes.

    Its start in the tensor's storage, its strides and its unit are multiples of a word, in bytes.
    """
    empty = torch.empty(0, dtype=WORDS[word], device=tensor.device)
    steps = [*(stride // word for stride in strides), 1]
    return empty.set_(tensor.untyped_storage(), start // word, [*widths, size // word], steps)
