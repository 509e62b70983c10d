"""Give readers damaged files: `python -m tests.checkpoint.formats.fuzz --inputs 100000 --seed 0`.

Good files are damaged in random ways (bytes flipped, cut, doubled, numbers made huge, keys swapped)
and read again. A reader may give a catalog or raise one of our errors, which is one line; anything
else is a failure: another exception, a second of work, or memory beyond what the input can need.
Input number i of a run with seed s is `damaged(s + i)`, found again by its number alone.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import resource
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import fsspec

from reshard import Mesh, Rules
from reshard.checkpoint.formats.reader import open_storage, survey_catalog
from reshard.checkpoint.formats.safetensors.header import (
    KEY,
    SHARDING,
    OwnMetadata,
    OwnTensor,
    build_header,
)
from reshard.checkpoint.formats.torch.tensors import object_texts
from reshard.checkpoint.inspection import inspect
from reshard.errors import DamageError, ReshardError

SLOW = 2.0
ROOM = 2 << 30
"""Memory beyond what the fuzzer has at its start; a reader that believes a number needs more."""

Files = dict[str, bytes]


@dataclass
class Run:
    """What became of the inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def safetensors(metadata: dict[str, str], rows: int = 2) -> bytes:
    tensors = {"layers.0.w": ("float32", (rows, 3)), "b": ("bfloat16", (4,)), "s": ("int64", ())}
    built = build_header(tensors, metadata)
    return built.data + bytes(built.file_size - len(built.data))


def whole() -> Files:
    mapped = {"layers.0.w": "model.safetensors", "b": "model.safetensors", "s": "model.safetensors"}
    return {
        "model.safetensors": safetensors({"format": "pt"}),
        "model.safetensors.index.json": json.dumps({"weight_map": mapped}).encode(),
        "config.json": json.dumps({"model_type": "llama", "hidden_size": 8}).encode(),
    }


def sharded(own: bool) -> Files:
    files = {}
    for number in range(2):
        offsets = {"layers.0.w": [2 * number, 0], "b": [4 * number], "s": []}
        metadata = {SHARDING: json.dumps({n: {"saved_offsets": o} for n, o in offsets.items()})}
        if own:
            shapes = {"layers.0.w": (4, 3), "b": (8,), "s": ()}
            tensors = {name: OwnTensor(shape, "tp ...") for name, shape in shapes.items()}
            metadata[KEY] = OwnMetadata(number + 1, 2, "tp=2", None, tensors).to_text()
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        files[name] = safetensors(metadata)
    return files


def own_ranks() -> Files:
    tensors = {
        "layers.0.w": OwnTensor((4, 3), "tp -"),
        "b": OwnTensor((4,), "-"),
        "s": OwnTensor((), "..."),
    }
    return {
        f"rank-{rank}.safetensors": safetensors(
            {KEY: OwnMetadata(rank + 1, 2, "tp=2", rank, tensors).to_text()}
        )
        for rank in range(2)
    }


def ranks() -> Files:
    return {f"model-rank-{rank}-part-0.safetensors": safetensors({}) for rank in range(2)}


def distcp(rank: int | None = None, more: bool = False) -> Files:
    """What torch writes: of all ranks, or of one that saves without the others. With ``more`` the
    metadata has plans and data of tensors in it, as Megatron's has.
    """
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    state = {"layers.0.w": torch.zeros(2, 3), "b": torch.ones(4).bfloat16(), "step": [3, 0.5]}
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, writer.storage_meta(), True)
        writer.set_up_storage_writer(True, rank=rank, use_collectives=rank is None)
        local = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([local])
        [plan] = writer.prepare_global_plan(plans)
        done = writer.write_data(planner.finish_plan(plan), planner).value()
        if more:
            metadata.all_local_plans = [local]  # type: ignore[attr-defined]
            metadata.mcore_data = {"b": {"shape": (4,)}}  # type: ignore[attr-defined]
        writer.finish(metadata, [done])
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved(state: object) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@cache
def torch_files() -> dict[str, Files]:
    """What torch writes, by kind."""
    import torch

    opt = [{"lr": 0.1, "betas": (0.5, 0.75), "params": [0, 1]}]
    zero = {
        "module": {"w": torch.zeros(0)},
        "param_shapes": [{"w": torch.Size([2])}],
        "ds_version": "1",
    }
    return {
        "distcp": distcp(),
        "megatron": distcp(more=True),
        "alone": distcp(0) | distcp(1),
        "torch": {"model.pt": saved({"model": {"layers.0.w": torch.zeros(2, 3)}, "opt": opt})},
        "zero": {"mp_rank_00_model_states.pt": saved(zero)},
    }


RULES = """
axes = ["tp", "pp"]
[model]
num_layers = "count i"
[tensors]
"*.w" = "tp -"
"b" = "tp*2"
"s" = "..."
"layers.{i}.*" = { on = "pp = i * pp_size // num_layers" }
"""

KINDS: dict[str, Callable[[], Files]] = {
    "whole": whole,
    "sharded": lambda: sharded(own=False),
    "own shards": lambda: sharded(own=True),
    "own ranks": own_ranks,
    "ranks": ranks,
    "distcp": lambda: torch_files()["distcp"],
    "megatron": lambda: torch_files()["megatron"],
    "alone": lambda: torch_files()["alone"],
    "torch": lambda: torch_files()["torch"],
    "zero": lambda: torch_files()["zero"],
}

NUMBERS = [b"0", b"-1", b"1e9", b"99999999999999999999", b"4294967296", b"null", b'"x"', b"true",
           b"[]", b"{}", b"1.5", b"9" * 5000]  # fmt: skip
WORDS = [b"../../etc/passwd", b"/etc/passwd", b"\x00", b"..", b"os\nsystem\n", b"\xff\xfe",
         b"PK\x03\x04", b"\x80\x04", b"((((((((", b"(((((t", b"R", b"b", b"\x93",
         b"[" * 3000, b")" + b"2\x86" * 60, b")" + b"2\x86" * 60 + b"R", b"0N",
         b"0K\x05"]  # fmt: skip


def flip(rng: Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 8, len(data)])]


def double(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    length = rng.choice([1, 8, 64, 512])
    data[at:at] = data[at : at + length]


def swap(rng: Random, data: bytearray) -> None:
    one, two = rng.randrange(len(data)), rng.randrange(len(data))
    length = rng.choice([1, 4, 16])
    data[one : one + length] = data[two : two + length]


def number(rng: Random, data: bytearray) -> None:
    """Another number in place of a run of digits, or a field of some bytes made extreme."""
    at = rng.randrange(len(data))
    digits = [i for i in range(at, min(at + 400, len(data))) if chr(data[i]).isdigit()]
    if digits and rng.random() < 0.7:
        first = last = rng.choice(digits)
        while last < len(data) and chr(data[last]).isdigit():
            last += 1
        data[first:last] = rng.choice(NUMBERS)
    else:
        width = rng.choice([1, 2, 4, 8])
        data[at : at + width] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * width


def word(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice([0, 0, 8])] = rng.choice(WORDS)


def longer_header(rng: Random, data: bytearray) -> None:
    """A header with its length put right, so that damage inside of it is reached."""
    length = int.from_bytes(data[:8], "little")
    if len(data) >= 8 and length < len(data):
        inner = bytearray(data[8 : 8 + length])
        if inner:
            rng.choice([number, word, cut, double])(rng, inner)
        data[8 : 8 + length] = inner
        data[:8] = len(inner).to_bytes(8, "little")


def other_pickle(rng: Random, data: bytearray) -> None:
    """A pickle of its own making: known instructions in any order."""
    codes = (
        b"(0123NKMJXCB]})tdlae\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x90\x93\x94\x81RbsuhjqrcQ."
    )
    body = bytes(rng.choice(codes) if rng.random() < 0.8 else rng.randrange(256) for _ in range(60))
    data[:] = b"\x80\x04" + body + b"."


STRANGE = [-1, 0, 1, 3, 1 << 40, 1 << 70, None, "", "../x", "__0_0.distcp", (), (0,), (1 << 60, 2),
           (-1, 0), [], {}, 1.5, True, b"x"]  # fmt: skip


def other_values(rng: Random, data: bytearray) -> None:
    """Metadata that is a fine pickle and says something strange."""
    metadata = pickle.loads(torch_files()["megatron"][".metadata"])
    chosen = rng.choice(["info", "index", "entry", "chunk", "properties", "metadata"])
    index, info = rng.choice([*metadata.storage_data.items()])
    entry = rng.choice([e for e in metadata.state_dict_metadata.values() if hasattr(e, "chunks")])
    target = {
        "info": info, "index": index, "entry": entry, "chunk": entry.chunks[0],
        "properties": entry.properties, "metadata": metadata,
    }[chosen]  # fmt: skip
    name = rng.choice([*vars(target)])
    object.__setattr__(target, name, rng.choice([*STRANGE, info, entry, target]))
    try:
        data[:] = pickle.dumps(metadata, rng.choice([2, 4, 5]))
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return


def repack(rng: Random, data: bytearray) -> None:
    """An archive with another pickle in it, whose checksum is right."""
    try:
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as source:
            members = {name: source.read(name) for name in source.namelist()}
    except (zipfile.BadZipFile, EOFError, RuntimeError, OSError, ValueError):
        return
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, content in members.items():
            inner = bytearray(content)
            if name.endswith("data.pkl") and inner:
                rng.choice([flip, cut, double, swap, number, word])(rng, inner)
            packed.writestr(name, bytes(inner))
    data[:] = out.getvalue()


WAYS = [flip, flip, cut, double, swap, number, number, word, longer_header, longer_header]


def damaged(seed: int) -> tuple[str, Files, str]:
    """A kind of checkpoint, its files after some damage, and the rules to read it with."""
    rng = Random(seed)
    kind = rng.choice([*KINDS])
    files = {path: bytearray(data) for path, data in KINDS[kind]().items()}
    rules = bytearray(RULES.encode())
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice([*files])
        if kind == "ranks" and rng.random() < 0.5:
            rng.choice(WAYS[:-2])(rng, rules)
        elif path.endswith(".pt") and rng.random() < 0.5:
            repack(rng, files[path])
        elif path.endswith(".metadata") and rng.random() < 0.4:
            rng.choice([other_pickle, other_values, other_values])(rng, files[path])
        elif rng.random() < 0.02:
            del files[path]
        elif files[path]:
            rng.choice(WAYS)(rng, files[path])
        if not files or not rules:
            break
    return (
        kind,
        {path: bytes(data) for path, data in files.items()},
        rules.decode("utf-8", "replace"),
    )


def check(seed: int) -> str:
    """Read one damaged input; how it ended. Anything but a catalog or our error is raised."""
    kind, files, rules = damaged(seed)
    root = f"memory://fuzz-{seed}"
    memory = fsspec.filesystem("memory")
    for path, data in files.items():
        memory.pipe_file(f"/fuzz-{seed}/{path}", data)
    try:
        return _read(kind, root, rules)
    except ReshardError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from None
        return type(error).__name__
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


def _read(kind: str, root: str, rules: str) -> str:
    is_cut = kind in ("ranks", "alone")
    given: Any = (Rules.parse(rules), Mesh(tp=2)) if is_cut else (None, None)
    with open_storage(root) as storage:
        catalog, findings = survey_catalog(storage, *given)
        with suppress(DamageError):
            object_texts(storage, catalog)
    for tensor in catalog.tensors.values():
        for piece in tensor.pieces:
            last = sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
            if piece.box.size:
                end = piece.offset + (last + 1) * (piece.num_bytes(tensor.dtype) // piece.box.size)
                assert 0 <= piece.offset <= end <= catalog.files[piece.file].size, piece
    report = inspect(root, *given)
    for text in (str(report), report.tree(), report.to_json()):
        assert text.isascii() or text.encode("utf-8", "surrogatepass")
    return "damage" if findings.damage else "unsupported" if findings.unsupported else "read"


def fuzz(first: int, count: int, shown: bool = False) -> Run:
    """Read so many inputs, from this number on."""
    run = Run()
    torch_files()  # takes its time, which no input should be blamed for
    for seed in range(first, first + count):
        began = time.process_time()
        try:
            outcome = check(seed)
        except Exception:
            outcome = "FAILED"
            run.failures.append(f"input {seed}:\n{traceback.format_exc(limit=-4)}")
        if time.process_time() - began > SLOW:
            run.failures.append(f"input {seed}: took {time.process_time() - began:.1f} s")
        run.outcomes[outcome] += 1
        if shown and (seed + 1 - first) % 5000 == 0:
            print(f"{seed + 1 - first} inputs: {dict(run.outcomes)}", flush=True)
    return run


def bound_memory() -> None:
    """Let allocations fail that no input of this size needs."""
    torch_files()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            now = int(line.split()[1]) << 10
            resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, resource.RLIM_INFINITY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bound_memory()
    run = fuzz(options.seed, options.inputs, shown=True)
    print(f"{options.inputs} inputs, {len(run.failures)} failures: {dict(run.outcomes)}")
    print("\n".join(run.failures[:20]))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
