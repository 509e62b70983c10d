"""What one would use instead: torch's own tools, each in a process of its own.

    python benchmarks/checkpoints/peers.py dcp SRC DST --ranks 2 --cut rows
    python benchmarks/checkpoints/peers.py consolidate SRC DST
    python benchmarks/checkpoints/peers.py to_torch SRC DST
    python benchmarks/checkpoints/peers.py check SRC DST

Importing torch and starting ranks are not counted, which is in their favour. The last line is JSON.
`check` compares two folders with the safetensors library, tensor by tensor, and exits 1 if they
differ: nothing of reshard takes part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from making import by_columns, by_heads, by_rows
from ours import status
from safetensors import safe_open

CUTS = {"rows": by_rows, "columns": by_columns, "heads": by_heads}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["dcp", "consolidate", "to_torch", "check"])
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cut", choices=sorted(CUTS), default="rows")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.what == "check":
        sys.exit(check(args.src, args.dst))
    if args.what == "dcp":
        run_ranks(args)
        return
    before, began = status("VmRSS"), time.perf_counter()
    {"consolidate": consolidate, "to_torch": to_torch}[args.what](args.src, args.dst)
    os.sync()
    tell(time.perf_counter() - began, status("VmHWM") - before)


def tell(seconds: float, peak: int) -> None:
    print("\n" + json.dumps({"seconds": seconds, "peak_kib": peak}), flush=True)


def consolidate(src: Path, dst: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    names = sorted(shapes_in(src))
    dst.mkdir()
    mapping = {name: at * 4 // len(names) + 1 for at, name in enumerate(names)}
    consolidate_safetensors_files(str(src), str(dst), mapping)


def to_torch(src: Path, dst: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dst.mkdir()
    dcp_to_torch_save(src, dst / "model.pt")


def run_ranks(args: argparse.Namespace) -> None:
    """Load and save on so many gloo ranks; the slowest counts."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=load_and_save, args=(rank, args, Path(folder), results))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)
        found = [results.get() for _ in ranks]
    tell(max(seconds for seconds, _ in found), max(peak for _, peak in found))


def load_and_save(rank: int, args: argparse.Namespace, folder: Path, results: Any) -> None:
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks)
    before = status("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    state = empty_state(args)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(args.src)))
    writer = HuggingFaceStorageWriter(str(args.dst), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    os.sync()
    dist.barrier()
    results.put((time.perf_counter() - began, status("VmHWM") - before))
    dist.destroy_process_group()


def empty_state(args: argparse.Namespace) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = init_device_mesh("cpu", (args.ranks,))
    state = {}
    for name, shape in shapes_in(args.src).items():
        dim = CUTS[args.cut](name)
        placement = Replicate() if dim is None else Shard(dim)
        options = {"dtype": torch.bfloat16, "device_mesh": mesh, "placements": [placement]}
        state[name] = empty(*shape, **options)
    return state


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The global shapes of a folder of safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            offsets = offsets_in(file)
            for name in file.keys():  # noqa: SIM118
                local = file.get_slice(name).get_shape()
                start = offsets.get(name, {}).get("saved_offsets", [0] * len(local))
                stop = tuple(a + b for a, b in zip(start, local, strict=True))
                shapes[name] = tuple(map(max, stop, shapes.get(name, stop)))
    return shapes


def offsets_in(file: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
    return found


def whole(folder: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor, put together from all files."""
    result = torch.zeros(shape, dtype=torch.int16)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                piece = file.get_tensor(name).view(torch.int16)
                start = offsets_in(file).get(name, {}).get("saved_offsets", [0] * len(shape))
                at = tuple(slice(a, a + b) for a, b in zip(start, piece.shape, strict=True))
                result[at] = piece
    return result


def check(src: Path, dst: Path) -> int:
    """Whether two folders hold the same bits."""
    ours, theirs = shapes_in(src), shapes_in(dst)
    if ours != theirs:
        print(f"{src} and {dst} hold other tensors")
        return 1
    wrong = [
        n
        for n, shape in ours.items()
        if not torch.equal(whole(src, n, shape), whole(dst, n, shape))
    ]
    print(f"{len(wrong)} of {len(ours)} tensors differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
