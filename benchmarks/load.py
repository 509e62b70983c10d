"""Loading a Hugging Face folder into a running job, against torch's own reader, interleaved.

    python benchmarks/load.py [--size 1.34GB] [--rounds 5] [--ranks 4] [--folder DIR] [--only WORD]
                              [--json]

A synthetic language model in bfloat16, written as Hugging Face has it (whole tensors, several
files with an index, no checksums), is loaded into the state dict of 4 ranks in a gloo group:

    FSDP2            every parameter along dim 0, as fully_shard has them
    TP               o and down projections along dim 1, norms replicated, the rest along dim 0
    columns          all matrices along dim 1: the worst case for a reader of whole rows

The contenders are ``reshard.checkpoint.load`` and ``torch.distributed.checkpoint.load`` with
``HuggingFaceStorageReader``, in turn, round after round, each with its order changed from round to
round. *first* is the first load of fresh processes, *warm* a later one with the files in the page
cache, *cold* a later one after they were dropped from it. A figure is the median over rounds of
the slowest rank; the ratio is the median of the ratios of each round. CPU seconds are those of all
ranks together. Tensors are filled with a constant before each load and compared with the source
by the safetensors library after the first load of each contender.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import making
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from reshard.checkpoint import load
from reshard.text import format_bytes, parse_bytes

OURS, TORCH = "reshard", "torch"
NUM_FILES = 3
BUSY = 2.5
"""A load average, before the ranks start, above which times say little."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A way to shard the model."""

    name: str
    state: Callable[[making.Shapes], State]


@dataclass
class Measured:
    """What the rounds of one case and one kind of load took, by contender."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    """Bytes that all ranks together asked the system for by read calls, at most."""
    disk: dict[str, int] = field(default_factory=dict)
    """Bytes that came from the disk, at most."""

    def note(self, name: str, found: Mapping[str, float]) -> None:
        """Add what one load took."""
        self.seconds.setdefault(name, []).append(found["seconds"])
        self.cpu.setdefault(name, []).append(found["cpu"])
        self.read[name] = max(self.read.get(name, 0), int(found["read"]))
        self.disk[name] = max(self.disk.get(name, 0), int(found["disk"]))


def main() -> None:
    args = arguments().parse_args()
    if args.quick:
        args.size, args.rounds = parse_bytes("64MB"), 2
    shapes = making.model(args.size)
    rows = []
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="reshard-load-", dir=args.folder) as folder:
        sys.dont_write_bytecode, sys.pycache_prefix = False, f"{folder}/bytecode"
        write_model(Path(folder) / "model", shapes)
        for case in CASES:
            if args.only in case.name:
                for row in measure(case, shapes, Path(folder), args):
                    rows.append(row)
                    if not args.json:
                        print(text_of(row), flush=True)
    close(rows, load_before, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_bytes, default="1.34GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", help="where to write the model")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--quick", action="store_true", help="64MB and two rounds")
    parser.add_argument("--json", action="store_true")
    return parser


def write_model(folder: Path, shapes: making.Shapes) -> None:
    """Write whole tensors of random bits, in several files with an index."""
    folder.mkdir()
    names = list(shapes)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number in range(NUM_FILES):
        path = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        some = names[number::NUM_FILES]
        tensors = {
            name: torch.randint(0, 1 << 14, shapes[name], generator=generator, dtype=torch.int16)
            for name in some
        }
        bits = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(bits, folder / path, {"format": "pt"})
        weight_map |= dict.fromkeys(some, path)
    index = {"metadata": {"total_size": making.size_of(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()


def fsdp2(shapes: making.Shapes) -> State:
    """The state dict of a model under ``fully_shard``."""
    model = torch.nn.Module()
    for number, (name, shape) in enumerate(shapes.items()):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False)
        model.register_parameter(f"p{number}", parameter)
        del name
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return dict(zip(shapes, model.state_dict().values(), strict=True))


def by(dim_of: making.DimOf) -> Callable[[making.Shapes], State]:
    """DTensors that are sharded along a dim of each, or replicated."""

    def state(shapes: making.Shapes) -> State:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        found: State = {}
        for name, shape in shapes.items():
            dim = dim_of(name)
            placement = Replicate() if dim is None else Shard(dim)
            whole = torch.zeros(shape, dtype=torch.bfloat16)
            found[name] = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        return found

    return state


CASES = (
    Case("FSDP2", fsdp2),
    Case("TP", by(making.by_heads)),
    Case("columns", by(making.by_columns)),
)


def with_reshard(folder: Path, state: State) -> None:
    load(folder, into=state)


def with_torch(folder: Path, state: State) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


CONTENDERS = {OURS: with_reshard, TORCH: with_torch}


def measure(
    case: Case, shapes: making.Shapes, folder: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """First loads in fresh processes, then warm and cold loads in processes that have loaded."""
    model, found = folder / "model", {kind: Measured() for kind in ("first", "warm", "cold")}
    for number in range(args.rounds + 1):
        for name in in_turn(number):
            warm(model)
            one = ranks(args, folder, first_load, case, shapes, model, name, number == 0)
            if number:  # the first turn is checked, leaves byte code, and is not counted
                found["first"].note(name, one)
    for kind in ("warm", "cold"):
        for name, one in ranks(
            args, folder, later_loads, case, shapes, model, args.rounds, kind == "cold"
        ):
            found[kind].note(name, one)
    for kind, measured in found.items():
        yield row_of(f"{case.name}, {kind}", measured, making.size_of(shapes))


def in_turn(number: int) -> list[str]:
    """The contenders in the order of one round."""
    names = list(CONTENDERS)
    return names if number % 2 == 0 else names[::-1]


def first_load(
    case: Case, shapes: making.Shapes, model: Path, name: str, check: bool
) -> dict[str, float]:
    state = case.state(shapes)
    found = timed(CONTENDERS[name], model, state)
    if check:
        compare(model, state)
    return found


def later_loads(
    case: Case, shapes: making.Shapes, model: Path, rounds: int, cold: bool
) -> list[tuple[str, dict[str, float]]]:
    state = case.state(shapes)
    for run in CONTENDERS.values():
        run(model, state)
    found = []
    for number in range(rounds):
        for name in in_turn(number):
            for tensor in state.values():
                local_of(tensor).fill_(7.0)
            if dist.get_rank() == 0:
                forget(model) if cold else warm(model)
            found.append((name, timed(CONTENDERS[name], model, state)))
    return found


def timed(run: Callable[[Path, State], None], model: Path, state: State) -> dict[str, float]:
    """One load: wall seconds of the slowest rank; CPU seconds and bytes of all ranks together."""
    dist.barrier()
    before, cpu, began = io_counts(), time.process_time(), time.perf_counter()
    run(model, state)
    took = time.perf_counter() - began
    cpu, after = time.process_time() - cpu, io_counts()
    slowest = torch.tensor([took], dtype=torch.float64)
    sums = [cpu, after["rchar"] - before["rchar"], after["read_bytes"] - before["read_bytes"]]
    total = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    spent, read, disk = total.tolist()
    return {"seconds": float(slowest), "cpu": spent, "read": read, "disk": disk}


def io_counts() -> dict[str, int]:
    """What this process has read, by read calls and from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(number) for key, number in (line.split(": ") for line in lines)}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(model: Path, state: State) -> None:
    """Refuse a state that is not what the safetensors library reads."""
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = state[name]
                whole = file.get_tensor(name)
                want = distribute_tensor(
                    whole, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                if not torch.equal(
                    local_of(want).view(torch.int16), local_of(tensor).view(torch.int16)
                ):
                    raise SystemExit(f"{name} is not what the file holds")


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def ranks(args: argparse.Namespace, folder: Path, body: Callable[..., Any], *given: Any) -> Any:
    """What a function gives on the first of the ranks, each a fresh process."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=folder) as here:
        result = Path(here) / "result"
        processes = [
            context.Process(target=_rank, args=(rank, args.ranks, Path(here), result, body, given))
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed: see above")
        return json.loads(result.read_text())


def _rank(
    rank: int,
    num: int,
    folder: Path,
    result: Path,
    body: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=num)
    found = body(*given)
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def row_of(name: str, found: Measured, size: int) -> dict[str, Any]:
    pairs = zip(found.seconds[OURS], found.seconds[TORCH], strict=True)
    spent = zip(found.cpu[OURS], found.cpu[TORCH], strict=True)
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    return {
        "name": name,
        "bytes": size,
        "seconds": {who: statistics.median(each) for who, each in found.seconds.items()},
        "spread": {who: [min(each), max(each)] for who, each in found.seconds.items()},
        "cpu": {who: statistics.median(each) for who, each in found.cpu.items()},
        "cpu ratio": statistics.median(mine / theirs for mine, theirs in spent),
        "read": {who: number / size for who, number in found.read.items()},
        "disk": {who: number / size for who, number in found.disk.items()},
        "checks": [
            {"what": "at most as long as torch", "is": ratio, "holds": ratio <= 1.0},
            {
                "what": "bytes read, of those of the model",
                "is": found.read[OURS] / size,
                "holds": found.read[OURS] <= 1.02 * size,
            },
        ],
    }


def text_of(row: dict[str, Any]) -> str:
    """A row in words, with a mark for each check."""
    lines = [f"{row['name']}, {format_bytes(row['bytes'])}"]
    for who, seconds in row["seconds"].items():
        low, high = row["spread"][who]
        lines.append(
            f"    {who:8} {seconds:.3f} s ({low:.3f} to {high:.3f}), {row['cpu'][who]:.2f} CPU s, "
            f"{row['read'][who]:.2f}x by read calls, {row['disk'][who]:.2f}x from the disk"
        )
    for check in row["checks"]:
        mark = "ok  " if check["holds"] else "MISS"
        lines.append(f"    {mark} {check['what']}: {check['is']:.2f}")
    return "\n".join(lines)


def close(rows: list[dict[str, Any]], load_before: float, as_json: bool) -> None:
    facts = {
        "load before": load_before,
        "load after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if as_json:
        print(json.dumps({"machine": facts, "cases": rows}, indent=2))
    else:
        busy = " (busy: times say little)" if load_before > BUSY else ""
        print(
            f"load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after, on "
            f"{os.cpu_count()} cores, torch {torch.__version__}{busy}"
        )


if __name__ == "__main__":
    main()
