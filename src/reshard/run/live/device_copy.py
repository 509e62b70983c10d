"""Copy many strided blocks on a GPU in one kernel launch.

    table = CopyTable(blocks)               # once per plan
    table.launch(sources, destinations)     # every call; sends addresses only if they changed
    bound = table.bind(sources, destinations); bound.launch()     # again and again
    table.launch_among(among)               # many tables, one list of tensors

Packing (blocks of tensors into a message) and unpacking (a message into blocks of tensors) are both
such a copy. Without Triton, or where it lacks a cast, torch copies the blocks one by one: the same
bytes, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from reshard.columns import Ints
from reshard.errors import PlanError
from reshard.run.live.device_table import (
    Cast,
    CopyBlocks,
    LaunchTable,
    Strided,
    compile_table,
    merged_blocks,
)

__all__ = ["Among", "BoundCopy", "CopyTable"]

MOST_KEPT = 8
"""Launch tables kept for tensors that are aligned differently, and addresses kept per stream."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
E4M3 = torch.float8_e4m3fn
Tensors = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]


class CopyTable:
    """Blocks to copy between tensors, compiled for one kernel launch.

    ``cast`` is (source dtype, destination dtype), the same for all blocks; without it bytes are
    copied as they are. Tensors may change between launches, the blocks may not.
    """

    def __init__(
        self, blocks: CopyBlocks, *, cast: tuple[torch.dtype, torch.dtype] | None = None
    ) -> None:
        self.blocks = blocks
        self.cast = None if cast is None or cast[0] == cast[1] else cast
        self._sizes = None if self.cast is None else Cast(*(d.itemsize for d in self.cast))
        self._compiled: dict[bytes, _Compiled] = {}
        self._sent: dict[tuple[torch.device, int], tuple[Ints, torch.Tensor]] = {}

    def launch(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Copy all blocks, on the current stream if none is given; returns at once."""
        self.bind(sources, destinations).launch(stream)

    def bind(
        self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]
    ) -> BoundCopy:
        """The table with its tensors. Asking thousands of tensors where they are takes a while:
        whoever copies between the same ones again keeps this and launches it."""
        tensors = [*sources, *destinations]
        bases = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
        compiled = self._compile(bases, len(sources))
        return BoundCopy(self, compiled, bases, tuple(sources), tuple(destinations))

    def launch_among(self, among: Among) -> None:
        """Copy all blocks on the current stream; both sides are numbered in the one list."""
        compiled = self._compiled.get(among.key) or self._compile_for(
            among.key, (among.phases, among.phases), 0
        )
        if not len(compiled.blocks):
            return
        if _is_kernels(among.device, compiled, self.cast):
            _launch_kernel(compiled, self.cast, among.device, among.sent)
        else:
            _copy_one_by_one(compiled.blocks, among.tensors, among.tensors, self.cast)

    @property
    def device_bytes(self) -> int:
        """Bytes that the kept tables and addresses take up on the device."""
        kept = [tensor for _, tensor in self._sent.values()]
        for compiled in self._compiled.values():
            kept += compiled.uploaded.values()
        return sum(tensor.nbytes for tensor in kept)

    def _compile(self, bases: Ints, num_sources: int) -> _Compiled:
        """The table for tensors aligned like these: it is made once."""
        phases = bases % 16
        key = num_sources.to_bytes(8, "little") + phases.astype(np.uint8).tobytes()
        sides = phases[:num_sources], phases[num_sources:]
        return self._compiled.get(key) or self._compile_for(key, sides, num_sources)

    def _compile_for(self, key: bytes, phases: tuple[Ints, Ints], num_sources: int) -> _Compiled:
        blocks = merged_blocks(self.blocks, *phases, self._sizes)
        aligned = self._sizes is None or _aligned(blocks, phases, self._sizes)
        _drop_oldest(self._compiled)
        table = compile_table(blocks, num_sources, self._sizes)
        made = self._compiled[key] = _Compiled(blocks, table, aligned, {})
        return made

    def _addresses(self, bases: Ints, device: torch.device, stream: int) -> torch.Tensor:
        """The addresses on the device; sent if they are not those of the last launch there.

        A fresh tensor each time: a kernel in flight may still read the one before. Both belong to
        the same stream, so that torch reuses the old one's memory only after that kernel.
        """
        kept = self._sent.get((device, stream))
        if kept is None or not np.array_equal(kept[0], bases):
            _drop_oldest(self._sent)
            kept = self._sent[device, stream] = bases, _sent(bases, device)
        return kept[1]


class Among:
    """Tensors that many tables copy between, by number; asked once where they are.

    Belongs to one stream: the addresses on the device are read in its order.
    """

    def __init__(
        self, addresses: Ints, tensors: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        self.tensors, self.device = tensors, device
        self.phases = addresses % 16
        self.key = b"among" + self.phases.astype(np.uint8).tobytes()
        self._addresses = addresses
        self._there: torch.Tensor | None = None

    def sent(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """The addresses on the device."""
        if self._there is None:
            self._there = _sent(self._addresses, self.device)
        return self._there


class BoundCopy:
    """A table of blocks and the tensors it copies between; holds the tensors."""

    def __init__(
        self,
        table: CopyTable,
        compiled: _Compiled,
        bases: Ints,
        sources: tuple[torch.Tensor, ...],
        destinations: tuple[torch.Tensor, ...],
    ) -> None:
        self.table, self.compiled, self.bases = table, compiled, bases
        self.sources, self.destinations = sources, destinations
        self.device = _common_device((*sources, *destinations)) if len(bases) else None

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Copy all blocks, on the current stream if none is given; returns at once."""
        if self.device is None or not len(self.compiled.blocks):
            return
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if _is_kernels(self.device, self.compiled, self.table.cast):
                _launch_kernel(self.compiled, self.table.cast, self.device, self._where)
            else:
                sides = self.sources, self.destinations
                _copy_one_by_one(self.compiled.blocks, *sides, self.table.cast)

    def _where(self, stream: torch.cuda.Stream) -> torch.Tensor:
        return self.table._addresses(self.bases, stream.device, stream.cuda_stream)


def _is_kernels(
    device: torch.device, compiled: _Compiled, cast: tuple[torch.dtype, torch.dtype] | None
) -> bool:
    """Whether the kernel can do it."""
    return device.type == "cuda" and compiled.aligned and _kernel_casts(cast)


def _launch_kernel(
    compiled: _Compiled,
    cast: tuple[torch.dtype, torch.dtype] | None,
    device: torch.device,
    where: Callable[[torch.cuda.Stream], torch.Tensor],
) -> None:
    from reshard.run.live.device_kernel import cast_tiles, copy_tiles

    table = compiled.table
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        tensors = *compiled.on(device, stream), where(stream)
        grid, shape = (len(table.tiles),), (table.lanes, table.num_dims, table.wide)
        num_warps = table.lanes // 256
        if cast is None:
            only = table.units[0] if len(table.units) == 1 else 0
            copy_tiles[grid](*tensors, *shape, only, num_warps=num_warps)
        else:
            together = Cast(*(dtype.itemsize for dtype in cast)).num_together
            dtypes = _triton_dtype(cast[0]), _triton_dtype(cast[1])
            cast_tiles[grid](*tensors, *shape, together, *dtypes, num_warps=num_warps)


def _sent(addresses: Ints, device: torch.device) -> torch.Tensor:
    """Addresses on a device; on their way when this returns."""
    return torch.from_numpy(addresses).pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A launch table for tensors of one alignment, and its copies on devices."""

    blocks: Strided
    table: LaunchTable
    aligned: bool
    """Whether every element that is cast lies at a multiple of its size."""
    uploaded: dict[torch.device, torch.Tensor]

    def on(
        self, device: torch.device, stream: torch.cuda.Stream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and tiles on a device, in one tensor that is uploaded once."""
        num_rows = self.table.rows.size
        if device not in self.uploaded:
            tiles = np.zeros(-(-len(self.table.tiles) // 2) * 2, dtype=np.int32)
            tiles[: len(self.table.tiles)] = self.table.tiles
            both = np.concatenate([self.table.rows.reshape(-1), tiles.view(np.int64)])
            self.uploaded[device] = torch.from_numpy(both).to(device)
        both_there = self.uploaded[device]
        both_there.record_stream(stream)
        return both_there[:num_rows], both_there[num_rows:].view(torch.int32)


def _common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise PlanError(
            f"one launch copies on one device and these tensors lie on {len(devices)}: "
            f"{sorted(map(str, devices))}; make a table per device"
        )
    return devices.pop()


def _aligned(blocks: Strided, phases: tuple[Ints, Ints], sizes: Cast) -> bool:
    """Whether casts find whole elements: a pointer to a float32 must be a multiple of 4."""
    source = blocks.source_offset + phases[0][blocks.source]
    destination = blocks.destination_offset + phases[1][blocks.destination]
    halves = source % sizes.source_itemsize, destination % sizes.destination_itemsize
    return not (halves[0].any() or halves[1].any())


def _drop_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernel_casts(cast: tuple[torch.dtype, torch.dtype] | None) -> bool:
    """Whether the kernel gives torch's own result for this cast."""
    if not _has_triton():
        return False
    if cast is None:
        return True
    have, want = cast
    small = want == E4M3 and have in FLOATS, have == E4M3 and want in FLOATS[:3]
    return (have in FLOATS and want in FLOATS) or any(small)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return {**names, torch.float64: tl.float64, E4M3: tl.float8e4nv}[dtype]


def _copy_one_by_one(
    blocks: Strided,
    sources: Tensors,
    destinations: Tensors,
    cast: tuple[torch.dtype, torch.dtype] | None,
) -> None:
    """What the kernel does, block by block with torch."""
    for row in range(len(blocks)):
        source = _Side(
            sources[int(blocks.source[row])],
            int(blocks.source_offset[row]),
            blocks.source_strides[row].tolist(),
        )
        destination = _Side(
            destinations[int(blocks.destination[row])],
            int(blocks.destination_offset[row]),
            blocks.destination_strides[row].tolist(),
        )
        widths, unit = blocks.widths[row].tolist(), int(blocks.unit[row])
        if cast is None:
            word = math.gcd(source.grid, destination.grid, unit)
            destination.view(widths, unit, word).copy_(source.view(widths, unit, word))
        else:
            _cast_block(source, destination, [*widths, unit], cast)


def _cast_block(
    source: _Side, destination: _Side, widths: list[int], cast: tuple[torch.dtype, torch.dtype]
) -> None:
    """Cast by way of contiguous copies: those may be viewed as any dtype."""
    have, want = cast
    source, destination = source.of_items(have.itemsize), destination.of_items(want.itemsize)
    word = math.gcd(source.grid, have.itemsize)
    value = source.view(widths, have.itemsize, word).contiguous().view(have)
    if have.is_complex and not want.is_complex:
        value = value.real  # torch would warn that the rest is lost
    value = value.to(want).contiguous()
    word = math.gcd(destination.grid, want.itemsize)
    destination.view(widths, want.itemsize, word).copy_(value.view(WORDS[word]))


@dataclass(frozen=True, slots=True)
class _Side:
    """Where a block lies in one tensor, in bytes."""

    tensor: torch.Tensor
    offset: int
    strides: list[int]

    @property
    def start(self) -> int:
        """Bytes from the start of the tensor's storage."""
        return self.tensor.data_ptr() - self.tensor.untyped_storage().data_ptr() + self.offset

    @property
    def grid(self) -> int:
        """The most bytes, up to 8, of which all places of the block are multiples."""
        return math.gcd(8, self.start, *self.strides)

    def of_items(self, itemsize: int) -> _Side:
        """The same place with one more dim, over the elements that are cast together."""
        return _Side(self.tensor, self.offset, [*self.strides, itemsize])

    def view(self, widths: list[int], size: int, word: int) -> torch.Tensor:
        """The block as words, with one more dim over the words of a unit of ``size`` bytes."""
        strides = [*(stride // word for stride in self.strides), 1]
        empty = torch.empty(0, dtype=WORDS[word], device=self.tensor.device)
        storage = self.tensor.untyped_storage()
        return empty.set_(storage, self.start // word, [*widths, size // word], strides)
