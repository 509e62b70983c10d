"""One launch over a table of blocks gives what numpy gives block by block."""

import random
import unittest
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from reshard.errors import PlanError
from reshard.live.copy import gpu as gpu_copy
from reshard.live.copy.gpu import CopyTable, TensorTable
from reshard.live.copy.gpu_table import (
    ROWS,
    SHIFTED,
    Cast,
    LaunchTable,
    compile_table,
    merged_blocks,
)
from reshard.live.program.blocks import CopyBlocks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
E4M3 = torch.float8_e4m3fn
NUM_SOURCES, NUM_DESTINATIONS = 3, 2
"""Buffers of random blocks, numbered in one table: destinations come after sources."""


@dataclass
class Side:
    """Buffers in which blocks get places of their own, one after the other."""

    num_buffers: int
    grid: int = 1

    def __post_init__(self) -> None:
        self.used = [0] * self.num_buffers

    def place(self, rng: random.Random, widths: list[int], item: int) -> tuple[int, int, list[int]]:
        """A buffer, an offset in bytes and strides in elements, in any order of dims."""
        strides, step = [0] * len(widths), 1
        order = list(range(len(widths)))[::-1]
        if rng.random() < 0.3:
            rng.shuffle(order)
        for dim in order:
            strides[dim] = step
            step *= widths[dim]
            step += rng.choice([0, 0, 0, 1, 8])
        buffer = rng.randrange(self.num_buffers)
        offset = self.used[buffer] + rng.choice([0, 0, 1, 3, 8, 16]) * self.grid
        self.used[buffer] = -(-(offset + step * item) // self.grid) * self.grid
        return buffer, offset, strides


def random_blocks(
    rng: random.Random, num_blocks: int, items: Callable[[], tuple[int, int]], grid: int = 1
) -> tuple[CopyBlocks, list[int], list[int]]:
    """Blocks of up to 6 dims, some of them empty, and the sizes of both lists of buffers."""
    sides = Side(NUM_SOURCES, grid), Side(NUM_DESTINATIONS, grid)
    columns: list[list[object]] = [[] for _ in range(8)]
    for _ in range(num_blocks):
        num_dims = rng.randrange(7)
        widths = [rng.choice([1, 2, 3, 5, 8, 16]) for _ in range(num_dims)]
        if num_dims and rng.random() < 0.1:
            widths[rng.randrange(num_dims)] = 0
        if num_dims and rng.random() < 0.2:
            widths[-1] = rng.choice([700, 1000, 4096])
            widths[:-1] = [min(width, 3) for width in widths[:-1]]
        have, want = items()
        places = sides[0].place(rng, widths, have), sides[1].place(rng, widths, want)
        lacking = 6 - num_dims
        row = [places[0][0], NUM_SOURCES + places[1][0], places[0][1], places[1][1]]
        row += [[1] * lacking + widths]
        row += [[7] * lacking + places[0][2], [7] * lacking + places[1][2], have]
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    blocks = CopyBlocks(*(np.array(column, dtype=np.int64) for column in columns))
    return blocks, [used + 16 for used in sides[0].used], [used + 16 for used in sides[1].used]


def view(buffer: np.ndarray, offset: int, widths: list[int], strides: list[int], item: int):
    """The elements of a block, each as its bytes."""
    steps = [stride * item for stride in strides]
    return np.lib.stride_tricks.as_strided(buffer[offset:], [*widths, item], [*steps, 1])


def expected(
    blocks: CopyBlocks, sources: list[np.ndarray], destinations: list[np.ndarray]
) -> list[np.ndarray]:
    out = [destination.copy() for destination in destinations]
    for row in range(len(blocks.source)):
        widths, item = blocks.widths[row].tolist(), int(blocks.itemsize[row])
        if 0 in widths:
            continue
        have = view(
            sources[blocks.source[row]],
            int(blocks.source_offset[row]),
            widths,
            blocks.source_strides[row].tolist(),
            item,
        )
        view(
            out[blocks.destination[row] - NUM_SOURCES],
            int(blocks.destination_offset[row]),
            widths,
            blocks.destination_strides[row].tolist(),
            item,
        )[...] = have
    return out


def on(device: str, array: np.ndarray, shift: int = 0) -> torch.Tensor:
    """The bytes on a device, ``shift`` bytes off the grid of 16."""
    room = torch.zeros(len(array) + 64, dtype=torch.uint8, device=device)
    skip = -room.data_ptr() % 16 + shift
    room[skip : skip + len(array)] = torch.from_numpy(array).to(device)
    return room[skip : skip + len(array)]


def launch(
    table: CopyTable,
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    device: str,
) -> None:
    """Copy between these tensors on the current stream."""
    tensors = dict(enumerate([*sources, *destinations]))
    addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], dtype=np.int64)
    table.launch(TensorTable(addresses, tensors, torch.device(device)))


def check_copies(device: str, seed: int, shift: int = 0) -> None:
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)

    def items() -> tuple[int, int]:
        item = rng.choice([1, 2, 2, 4, 8, 16])
        return item, item

    blocks, *sizes = random_blocks(rng, rng.choice([1, 5, 60]), items, rng.choice([1, 16]))
    table = CopyTable(blocks)
    for again in range(2):  # the second time with other tensors
        have, want = (
            [noise.integers(0, 256, size, dtype=np.uint8) for size in side] for side in sizes
        )
        sources = [on(device, array, shift) for array in have]
        destinations = [on(device, array, shift * again) for array in want]
        launch(table, sources, destinations, device)
        for found, right in zip(destinations, expected(blocks, have, want), strict=True):
            np.testing.assert_array_equal(found.cpu().numpy(), right, f"seed {seed}")


def check_casts(device: str, seed: int, have: torch.dtype, want: torch.dtype) -> None:
    """The same blocks in one launch, and cast by torch one by one."""
    rng = random.Random(seed)
    blocks, *sizes = random_blocks(rng, 20, lambda: (have.itemsize, want.itemsize), 16)
    noise = torch.Generator().manual_seed(seed)
    sources = []
    for size in sizes[0]:
        numbers = torch.randn(size // have.itemsize, generator=noise) * 10 ** rng.choice([-3, 0, 3])
        special = torch.tensor([0.0, -0.0, 448, 464, 465, -480, 1e9, float("inf"), float("nan")])
        numbers[: len(special)] = special
        sources.append(numbers.to(have).to(device))
    destinations = [
        torch.zeros(size // want.itemsize, dtype=want, device=device) for size in sizes[1]
    ]
    right = [destination.clone() for destination in destinations]
    # Between equal dtypes nothing is cast.
    cast = (name_of(have), name_of(want)) if have != want else None
    table = CopyTable(replace(blocks, cast=cast))
    for _ in range(2):  # the second time the kernel of the first is launched again
        for destination in destinations:
            destination.zero_()
        launch(table, sources, destinations, device)
    for row in range(len(blocks.source)):
        widths = blocks.widths[row].tolist()
        source = sources[blocks.source[row]]
        destination = right[blocks.destination[row] - NUM_SOURCES]
        from_, to = int(blocks.source_offset[row]), int(blocks.destination_offset[row])
        strides = blocks.source_strides[row].tolist(), blocks.destination_strides[row].tolist()
        part = source.as_strided(widths, strides[0], from_ // have.itemsize)
        destination.as_strided(widths, strides[1], to // want.itemsize).copy_(part)
    for found, one in zip(destinations, right, strict=True):
        torch.testing.assert_close(
            found.double(), one.double(), rtol=0, atol=0, equal_nan=True, msg=f"{have} to {want}"
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decoded(table: LaunchTable, phase: int = 0) -> dict[int, int]:
    """What the kernel does with a table, one address after the other: destination to source.

    The destination is so many bytes off the grid.
    """
    moved: dict[int, int] = {}
    for tile, block in enumerate(table.tiles.tolist()):
        row = table.rows[block].tolist()
        first = (tile - row[4]) * table.lanes
        for number in range(first, min(first + table.lanes, row[5])):
            rest, ways = number, [row[1], row[3] + phase]
            for inner in range(4):
                index = rest
                if inner < 3:
                    rest = ((index * row[12 - inner] >> 32) + index) >> row[15 - inner]
                    index -= rest * row[9 - inner]
                ways[0] += index * row[19 - inner]
                ways[1] += index * row[23 - inner]
            if row[6] >= SHIFTED:
                extra = shifted(row, number % row[9], *ways)
                assert not extra.keys() & moved.keys()
                moved |= extra
                continue
            for byte in range(row[6]):
                assert ways[1] + byte not in moved
                moved[ways[1] + byte] = ways[0] + byte
    return moved


def shifted(row: list[int], place: int, source: int, destination: int) -> dict[int, int]:
    """The bytes of a row off the grid that one unit stands for."""
    if row[6] < ROWS:
        length, start = row[6] - SHIFTED, destination - 16 * place
        unit = destination - destination % 16
        inside = range(max(unit, start), min(unit + 16, start + length))
        return {at: source + at - destination for at in inside}
    length, head = row[6] - ROWS, -destination % 16
    whole = 16 * place + head + 16 <= length
    at = {*range(head, head + 16)} if whole else set()
    if not place:  # and the ends of the row
        at |= {*range(head), *range(head + (length - head) // 16 * 16, length)}
    return {destination + n: source + n for n in at}


def test_a_table_names_every_byte_once() -> None:
    rng = random.Random(1)
    for _ in range(5):
        blocks, *_ = random_blocks(rng, 3, lambda: (2, 2))
        blocks = CopyBlocks(np.arange(3), 3 + np.arange(3), *(getattr(blocks, n) for n in REST))
        strided = merged_blocks(blocks, np.array([0, 4, 15, 0, 4, 7]))
        for number in range(3):
            chosen = strided.take(strided.base[0] == number)
            found = decoded(compile_table(chosen)) if len(chosen) else {}
            assert found == listed(blocks, number)


def test_rows_off_the_grid_are_put_together_from_words() -> None:
    kinds = (1001, 3, ROWS), (513, 1, ROWS), (2500, 0, ROWS), (300, 0, SHIFTED), (129, 5, SHIFTED)
    for length, at, kind in kinds:
        for phase in (0, 2, 14):
            blocks = one_block([3, length], [length + 7, 1], [length, 1], itemsize=2)
            blocks = replace(blocks, source_offset=np.array([2 * at]))
            table = compile_table(merged_blocks(blocks, np.array([0, phase])))
            assert max(table.units) == kind
            assert (table.lanes, table.num_warps) == ((128, 1) if kind == ROWS else (256, 4))
            moved = {to + phase: by for to, by in listed(blocks, 0).items()}
            assert decoded(table, phase) == moved


def test_rows_off_the_grid_on_a_gpu() -> None:
    device, rng = torch.device(gpu()), random.Random(3)
    for _ in range(60):
        item = rng.choice([1, 2, 4])
        rows, length = rng.randrange(1, 40), rng.randrange(256, 5000) // item
        gaps = [rng.randrange(0, 40), rng.choice([0, 0, rng.randrange(40)])]
        starts = [rng.randrange(40) * item for _ in range(2)]
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
        size = rows * (length + 40) + 80
        source = torch.randint(-100, 100, (size,), device=device).to(dtype)
        destination = torch.zeros(size, dtype=dtype, device=device)
        right = destination.clone()
        block = one_block([rows, length], [length + gaps[0], 1], [length + gaps[1], 1], item)
        block = replace(
            block,
            source_offset=np.array([starts[0]]),
            destination_offset=np.array([starts[1]]),
        )
        tensors = [source, destination]
        addresses = np.array([one.data_ptr() for one in tensors])
        CopyTable(block).launch(TensorTable(addresses, dict(enumerate(tensors)), device))
        part = source.as_strided((rows, length), (length + gaps[0], 1), starts[0] // item)
        right.as_strided((rows, length), (length + gaps[1], 1), starts[1] // item).copy_(part)
        assert torch.equal(destination, right), (item, rows, length, gaps, starts)


REST = (
    *("source_offset", "destination_offset", "widths"),
    *("source_strides", "destination_strides", "itemsize"),
)


def listed(blocks: CopyBlocks, row: int) -> dict[int, int]:
    """Every byte of a block by the definition."""
    moved = {}
    item = int(blocks.itemsize[row])
    starts = int(blocks.source_offset[row]), int(blocks.destination_offset[row])
    strides = blocks.source_strides[row] * item, blocks.destination_strides[row] * item
    for index in np.ndindex(*blocks.widths[row]):
        have, want = (
            start + int(step @ index) for start, step in zip(starts, strides, strict=True)
        )
        moved |= {want + byte: have + byte for byte in range(item)}
    return moved


def test_contiguous_dims_become_one() -> None:
    blocks = one_block([8, 4, 1, 16], [256, 16, 16, 1], [64, 16, 99, 1], itemsize=4)
    strided = merged_blocks(blocks, np.array([0, 0]))
    assert strided.widths.tolist() == [[8, 16]]
    assert strided.strides[0].tolist() == [[1024, 16]]
    assert strided.unit.tolist() == [16]


def test_long_rows_give_their_edges_away() -> None:
    blocks = one_block([2, 501], [512, 1], [504, 1], itemsize=2)
    strided = merged_blocks(blocks, np.array([6, 6]))
    # Each row: 10 bytes up to the grid, 61 units of 16, and 16 of the 1002 bytes are left.
    assert sorted(zip(strided.unit.tolist(), strided.widths.prod(1).tolist(), strict=True)) == [
        (2, 10),
        (16, 124),
    ]
    assert strided.widths.prod(1) @ strided.unit == 2 * 1002


def test_huge_blocks_are_cut() -> None:
    blocks = one_block([5 << 30], [1], [1], itemsize=1)
    table = compile_table(merged_blocks(blocks, np.array([1, 0])))
    assert table.rows[:, 5].sum() == 5 << 30
    assert table.rows[:, 5].max() <= 1 << 30
    assert len(table.tiles) == (5 << 30) // table.lanes


def test_far_strides_need_64_bits() -> None:
    for stride, wide in ((1 << 20, False), (1 << 30, True)):
        blocks = one_block([4, 4], [stride, 1], [4, 1], itemsize=1)
        assert compile_table(merged_blocks(blocks, np.array([0, 0]))).wide == wide


def test_casts_take_groups_where_both_sides_are_aligned() -> None:
    cast = Cast(4, 2)
    for width, shift, unit in ((64, 0, 8), (63, 0, 1), (64, 4, 1)):
        blocks = one_block([3, width], [64, 1], [64, 1], itemsize=4)
        assert merged_blocks(blocks, np.array([shift, 0]), cast).unit.tolist() == [unit]


def one_block(
    widths: list[int], source: list[int], destination: list[int], itemsize: int
) -> CopyBlocks:
    zero = np.zeros(1, dtype=np.int64)
    rows = (np.array([row], dtype=np.int64) for row in (widths, source, destination))
    return CopyBlocks(zero, zero + 1, zero, zero, *rows, np.array([itemsize], dtype=np.int64))


def test_columns_that_do_not_fit_are_refused() -> None:
    zero, two = np.zeros(1, dtype=np.int64), np.ones((1, 2), dtype=np.int64)
    for columns in ((zero, zero[:0], zero, zero, two, two, two, zero), (zero,) * 8):
        # GPU machines may lack pytest.
        with unittest.TestCase().assertRaisesRegex(PlanError, "shape"):  # noqa: PT027
            CopyBlocks(*columns)


def test_no_blocks_at_all() -> None:
    none, rows = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    blocks = CopyBlocks(none, none, none, none, rows, rows, rows, none)
    launch(CopyTable(blocks), [], [], "cpu")


def test_copies_with_torch() -> None:
    for seed in range(60):
        check_copies("cpu", seed, shift=seed % 4)


def test_casts_with_torch() -> None:
    for seed, (have, want) in enumerate(
        [(have, want) for have in (*FLOATS, E4M3, torch.int32) for want in (*FLOATS, torch.int64)]
    ):
        check_casts("cpu", seed, have, want)


def gpu() -> str:
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a CUDA device, and torch sees none")
    return "cuda"


def test_copies_on_a_gpu() -> None:
    for seed in range(150):
        check_copies(gpu(), seed, shift=seed % 4)


def test_casts_on_a_gpu() -> None:
    pairs = [(have, want) for have in FLOATS for want in (*FLOATS, E4M3) if have != want]
    pairs += [(E4M3, want) for want in FLOATS] + [(torch.int32, torch.float32)]
    for seed, (have, want) in enumerate(pairs):
        check_casts(gpu(), seed, have, want)


def test_a_triton_whose_kernels_take_other_arguments() -> None:
    """A kernel that cannot be launched again is found by Triton in every launch."""
    device = gpu()
    table = CopyTable(one_block([64, 64], [128, 1], [64, 1], itemsize=4))
    refused = []

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise TypeError("function takes exactly 12 arguments")

    for number in range(3):
        source = torch.full((64, 128), float(number), device=device)
        destination = torch.zeros(64, 64, device=device)
        launch(table, [source], [destination], device)
        assert bool((destination == number).all())
        for compiled in table._compiled.values():
            for there in compiled.uploaded.values():
                assert there._kernel is not None
                there._kernel = refuse
    assert len(refused) == 2


def test_a_gpu_without_triton_gives_the_same() -> None:
    device, has_triton = gpu(), gpu_copy._has_triton
    gpu_copy._has_triton = lambda: False  # type: ignore[assignment]
    try:
        check_copies(device, 5)
        check_casts(device, 5, torch.float32, torch.bfloat16)
    finally:
        gpu_copy._has_triton = has_triton


def test_copies_between_the_host_and_a_gpu() -> None:
    for seed in range(20):
        for devices in (("cpu", gpu()), (gpu(), "cpu")):
            check_copies_between(*devices, seed)


def check_copies_between(source: str, destination: str, seed: int) -> None:
    """Sources on one device and destinations on another; addresses of both are in one table."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    blocks, *sizes = random_blocks(rng, 10, lambda: (4, 4), rng.choice([1, 16]))
    have, want = ([noise.integers(0, 256, size, dtype=np.uint8) for size in side] for side in sizes)
    sources = [on(source, array) for array in have]
    destinations = [on(destination, array) for array in want]
    launch(CopyTable(blocks), sources, destinations, "cpu")
    for found, right in zip(destinations, expected(blocks, have, want), strict=True):
        np.testing.assert_array_equal(found.cpu().numpy(), right, f"seed {seed}")


def test_far_apart_on_a_gpu() -> None:
    """Offsets beyond 32 bits, inside a block and between blocks."""
    device = gpu()
    source = torch.zeros(5 << 30, dtype=torch.uint8, device=device)
    stride, rows = (5 << 30) // 4, torch.arange(4, dtype=torch.uint8, device=device) + 1
    source.view(4, stride)[:, -64:] = rows[:, None]
    destination = torch.zeros(4 * 48, dtype=torch.uint8, device=device)
    blocks = one_block([4, 48], [stride, 1], [48, 1], itemsize=1)
    blocks = replace(blocks, source_offset=np.array([stride - 48]))
    launch(CopyTable(blocks), [source], [destination], device)
    assert destination.view(4, 48).eq(rows[:, None]).all()


def test_other_streams_on_a_gpu() -> None:
    """Launches on two streams with addresses that change every time."""
    device = gpu()
    blocks = one_block([1000, 1000], [1024, 1], [1000, 1], itemsize=4)
    table = CopyTable(blocks)
    sources = [torch.rand(1000, 1024, device=device) for _ in range(6)]
    found = [torch.zeros(1000, 1000, device=device) for _ in range(6)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number, (source, destination) in enumerate(zip(sources, found, strict=True)):
        with torch.cuda.stream(streams[number % 2]):
            launch(table, [source], [destination], device)
    torch.cuda.synchronize()
    for source, destination in zip(sources, found, strict=True):
        assert torch.equal(source[:, :1000], destination)
    assert 0 < table.device_bytes < 1 << 20
