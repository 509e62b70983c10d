"""Checkpoints to convert: a language model of any size, cut over 4 ranks as torch saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod, sqrt
from pathlib import Path

import numpy as np

RANKS = 4
ONE_GIB = 1 << 30
POOL = np.random.default_rng(0).bytes((16 << 20) + 4099)
"""Random bytes that all tensors are made of, each from another place."""

Shapes = dict[str, tuple[int, ...]]
DimOf = Callable[[str], int | None]
"""The dim along which a tensor is cut; None for one that is replicated."""


def model(num_bytes: int) -> Shapes:
    """A Llama of 12 layers, 111 tensors and about so many bytes of bfloat16."""
    width = max(round(sqrt(num_bytes / 2.231e9) * 2560 / 64), 1) * 64
    hidden, words = round(2.7 * width / 64) * 64, round(12.5 * width / 64) * 64
    shapes: Shapes = {"model.embed_tokens.weight": (words, width)}
    for layer in range(12):
        here = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{here}.self_attn.{name}_proj.weight"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"{here}.mlp.{name}_proj.weight"] = (hidden, width)
        shapes[f"{here}.mlp.down_proj.weight"] = (width, hidden)
        for name in ("input", "post_attention"):
            shapes[f"{here}.{name}_layernorm.weight"] = (width,)
    return {**shapes, "model.norm.weight": (width,), "lm_head.weight": (words, width)}


def one_tensor(num_bytes: int) -> Shapes:
    """A single tensor of about so many bytes of bfloat16."""
    return {"w": (max(num_bytes // 2 // 8192 // RANKS, 1) * RANKS, 8192)}


def size_of(shapes: Shapes) -> int:
    """Bytes of all tensors."""
    return 2 * sum(map(prod, shapes.values()))


def by_rows(name: str) -> int | None:
    """FSDP: everything along dim 0."""
    return 0


def by_columns(name: str) -> int | None:
    """The worst case from there: matrices along dim 1."""
    return None if "norm" in name else 1


def by_heads(name: str) -> int | None:
    """Tensor parallel: o and down along dim 1, norms replicated, the rest along dim 0."""
    if "norm" in name:
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


def rules_text(dim_of: DimOf, shapes: Shapes) -> str:
    """The same cut as a rules file."""
    words = {0: "tp ...", 1: "- tp ...", None: "..."}
    lines = [f'"{name}" = "{words[dim_of(name)]}"' for name in shapes]
    return 'axes = ["tp"]\n[tensors]\n' + "\n".join(lines) + "\n"


def write(folder: Path, shapes: Shapes, dim_of: DimOf) -> None:
    """Write sharded safetensors as torch's writer does: a file for each rank, with offsets."""
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        boxes = {name: _box(shape, dim_of(name), rank) for name, shape in shapes.items()}
        held = {name: box for name, box in boxes.items() if box is not None}
        path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        with path.open("wb") as file:
            file.write(_header(held))
            for name, (_, shape) in held.items():
                _write_random(file, f"{name} {rank}", 2 * prod(shape))


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


def _box(shape: tuple[int, ...], dim: int | None, rank: int) -> Box | None:
    if dim is None:  # torch writes what is replicated once
        return ((0,) * len(shape), shape) if rank == 0 else None
    step = -(-shape[dim] // RANKS)
    low, high = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
    offsets = tuple(low if each == dim else 0 for each in range(len(shape)))
    return offsets, tuple(high - low if each == dim else n for each, n in enumerate(shape))


def _header(held: Mapping[str, Box]) -> bytes:
    table: dict[str, object] = {}
    at = 0
    for name, (_, shape) in held.items():
        size = 2 * prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    offsets = {name: {"saved_offsets": box[0]} for name, box in held.items()}
    table["__metadata__"] = {
        "format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets),
    }  # fmt: skip
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_random(file: object, seed: str, num_bytes: int) -> None:
    import zlib

    at = zlib.crc32(seed.encode()) % 4096
    view = memoryview(POOL)[at:]
    while num_bytes:
        part = view[: min(num_bytes, len(view))]
        file.write(part)  # type: ignore[attr-defined]
        num_bytes -= len(part)
        view = memoryview(POOL)[(at := (at * 31 + 7) % 4096) :]
