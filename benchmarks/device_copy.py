"""How fast does one launch copy a table of slices on a GPU? Compared with torch's own copies.

    PYTHONPATH=src python3 benchmarks/device_copy.py [--rounds 15]

Needs a CUDA device, torch, Triton and numpy. Per case, interleaved in every round: one launch of
``CopyTable``, a plain copy of the same number of bytes from one buffer to another, torch copies one
by one, and ``torch._foreach_copy_``. Figures are medians, in TB/s of bytes read plus written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from reshard.live.copy.gpu import CopyTable, TensorTable
from reshard.live.program.blocks import CopyBlocks

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """Slices ``[rows, columns of pitch]`` of many tensors, packed into one message or back."""

    name: str
    count: int
    rows: int
    columns: int
    pitch: int
    dtype: torch.dtype = torch.bfloat16
    unpack: bool = False
    into: torch.dtype | None = None
    large: int = 0
    """Elements of one more slice, contiguous and much larger."""


CASES = [
    Case("64 x [4096, 1024 of 4096], pack", 64, 4096, 1024, 4096),
    Case("64 x [4096, 1024 of 4096], unpack", 64, 4096, 1024, 4096, unpack=True),
    Case("4096 x [64, 256 of 1024]", 4096, 64, 256, 1024),
    Case("32768 x [16, 128 of 512]", 32768, 16, 128, 512),
    Case("18000 x [64, 128 of 512], pack", 18000, 64, 128, 512),
    Case("18000 x [64, 128 of 512], unpack", 18000, 64, 128, 512, unpack=True),
    Case("18000 x [2, 256 of 512] and 1 GiB", 18000, 2, 256, 512, large=GIB // 2),
    Case("64 x [4096, 1001 of 4096]", 64, 4096, 1001, 4096),
    Case("64 x [4096, 1001 of 4093]", 64, 4096, 1001, 4093),
    Case(
        "64 x [2048, 1024 of 4096], to bf16",
        64,
        2048,
        1024,
        4096,
        torch.float32,
        into=torch.bfloat16,
    ),
]


@dataclass(frozen=True)
class Setting:
    """The tensors of a case, and the same slices as torch views."""

    table: CopyTable
    tensors: list[torch.Tensor]
    """Sources, then destinations, as the table numbers them."""
    warm: TensorTable
    """The same with their addresses, which the first launch uploads."""
    views: tuple[list[torch.Tensor], list[torch.Tensor]]
    num_bytes: int
    """Bytes read plus bytes written."""

    def launch(self) -> None:
        self.table.launch(self.warm)

    def list_and_launch(self) -> None:
        self.table.launch(listed(self.tensors))

    def one_by_one(self) -> None:
        for source, destination in zip(*self.views, strict=True):
            destination.copy_(source)

    def foreach(self) -> None:
        torch._foreach_copy_(self.views[1], self.views[0])


def prepared(case: Case) -> Setting:
    have, want = case.dtype, case.into or case.dtype
    sizes = [case.rows * case.columns] * case.count + [case.large] * bool(case.large)
    spots = np.cumsum([0, *sizes])
    strided_dtype, packed_dtype = (want, have) if case.unpack else (have, want)
    strided = [random_tensor((case.rows, case.pitch), strided_dtype) for _ in range(case.count)]
    strided += [random_tensor((1, size), strided_dtype) for size in sizes[case.count :]]
    packed = random_tensor((int(spots[-1]),), packed_dtype)
    views = [tensor[:, : case.columns] for tensor in strided[: case.count]]
    views += strided[case.count :]
    parts = [
        packed[start : start + size].view(view.shape)
        for start, size, view in zip(spots.tolist(), sizes, views, strict=False)
    ]
    columns = block_columns(views, parts, spots[:-1] * packed.itemsize)
    if case.unpack:
        columns = [columns[i] for i in (1, 0, 3, 2, 4, 6, 5, 7)]
        sides, sources, destinations = (parts, views), [packed], strided
    else:
        sides, sources, destinations = (views, parts), strided, [packed]
    columns[1] = columns[1] + len(sources)
    columns[7][:] = have.itemsize
    blocks = CopyBlocks(*columns)
    if have != want:
        blocks = replace(blocks, cast=(name_of(have), name_of(want)))
    num_bytes = sum(sizes) * (have.itemsize + want.itemsize)
    tensors = [*sources, *destinations]
    return Setting(CopyTable(blocks), tensors, listed(tensors), sides, num_bytes)


def listed(tensors: list[torch.Tensor]) -> TensorTable:
    """Tensors with their addresses, by their place in the list."""
    addresses = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
    return TensorTable(addresses, dict(enumerate(tensors)), tensors[0].device)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def block_columns(
    views: list[torch.Tensor], parts: list[torch.Tensor], offsets: np.ndarray
) -> list[np.ndarray]:
    """The columns of ``CopyBlocks`` from views of many tensors to parts of one."""
    numbers = np.arange(len(views))
    shapes, steps, packed = (
        np.array([list(one) for one in rows], dtype=np.int64)
        for rows in (
            [view.shape for view in views],
            [view.stride() for view in views],
            [part.stride() for part in parts],
        )
    )
    zeros = np.zeros_like(numbers)
    return [numbers, zeros, zeros, offsets, shapes, steps, packed, zeros.copy()]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=torch.uint8, device="cuda").to(dtype)


def gpu_seconds(action: Callable[[], object]) -> float:
    """Seconds on the GPU; it is kept busy before, so that the launch itself is not counted."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    action()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def measure(case: Case, rounds: int) -> str:
    setting = prepared(case)
    check(setting)
    half = setting.num_bytes // 2
    plain = [torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2)]
    ways: dict[str, Callable[[], object]] = {
        "launch": setting.launch,
        "plain": lambda: plain[1].copy_(plain[0]),
        "each": setting.one_by_one,
        "foreach": setting.foreach,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, action in ways.items():
            seconds = gpu_seconds(action)
            if number >= 2:
                found[name].append(seconds)
    speed = {n: setting.num_bytes / statistics.median(s) / 1e12 for n, s in found.items()}
    cells = [case.name, f"{setting.num_bytes / 2 / 2**20:.0f}"]
    cells += [f"{speed[name]:.2f}" for name in ways]
    cells += [f"{speed['launch'] / speed['plain']:.2f}", f"{speed['launch'] / speed['each']:.1f}"]
    return "| " + " | ".join([*cells, *host_costs(setting)]) + " |"


def check(setting: Setting) -> None:
    """One launch gives what torch gives."""
    setting.one_by_one()
    right = [view.clone() for view in setting.views[1]]
    for view in setting.views[1]:
        view.zero_()
    setting.launch()
    assert all(map(torch.equal, setting.views[1], right))


def host_costs(setting: Setting) -> list[str]:
    """Microseconds of a call, with tensors listed before or anew; the table per mille of data."""
    cells = []
    for action in (setting.launch, setting.list_and_launch):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            action()
        cells.append(f"{(time.perf_counter() - start) / 5 * 1e6:.0f}")
    torch.cuda.synchronize()
    return [*cells, f"{setting.table.device_bytes / setting.num_bytes * 2e3:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        sys.exit(print("skipped: this benchmark needs a CUDA device, and torch sees none"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rounds} rounds, TB/s")
    print("| case | MiB | launch | plain | one by one | foreach | / plain | / one by one", end="")
    print(" | call, us | list and call, us | table, per mille |")
    print("|---" * 11 + "|")
    for case in CASES:
        print(measure(case, rounds), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
