"""Which elements does every rank hold? Brute force, from the text of the notation alone.

The tests compare reshard with this file, so it shares no code with it: it has its own parser, lists
every element of every rank with numpy, and knows nothing of boxes, strides or plans. A tensor is
its global flat indices, 0, 1, 2, ... in row-major order; a rank's local tensor is an array of them.

    >>> {rank: held.tolist() for rank, held in local_indices("tp=2", "tp", (5,)).items()}
    {0: [0, 1, 2], 1: [3, 4]}
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Held = dict[int, Indices]
Axes = Mapping[str, int]
Boxes = Mapping[int, Sequence[tuple[Sequence[int], Sequence[int]]]]
OPS = ("sum", "avg", "max", "min", "prod")
MAX_KEPT = 1024
MAX_SIZE = 1 << 18
"""Elements of a tensor whose indices are kept."""
"""Texts that stay parsed: a case asks for the same ones many times."""


@dataclass(frozen=True)
class Cut:
    """One cut of a dim: by an axis in one of five ways, or packed with a word for each segment."""

    kind: str
    axis: str = ""
    numbers: tuple[int, ...] = ()
    segments: tuple[tuple[int, tuple[Cut, ...]], ...] = ()


@dataclass(frozen=True)
class Parsed:
    """A layout text taken apart: the words of the dims and the suffixes."""

    words: tuple[str, ...]
    on: dict[str, tuple[int, ...]]
    op: str | None
    sum_axes: tuple[str, ...]
    flat: str | None
    without: tuple[int, ...]


def split(text: str, separator: str) -> list[str]:
    """Split at the separator where no bracket is open.

    >>> split("(a b) c{1, 2}", " ")
    ['(a b)', 'c{1, 2}']
    """
    parts, depth = [""], 0
    for char in text.strip():
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def rank_list(text: str) -> tuple[int, ...]:
    """The ranks of '0,4-6': (0, 4, 5, 6)."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


@lru_cache(MAX_KEPT)
def parse_mesh(text: str) -> tuple[dict[str, int], tuple[int, ...]]:
    """The axes in order with their sizes, and the ranks in row-major order."""
    axes_text, _, ranks_text = text.partition("@")
    axes = {name: int(size) for name, size in re.findall(r"(\w+)\s*=\s*(\d+)", axes_text)}
    num_ranks = math.prod(axes.values())
    ranks = rank_list(ranks_text) if ranks_text.strip() else tuple(range(num_ranks))
    if len(set(ranks)) != num_ranks:
        raise ValueError(f"{num_ranks} positions but ranks {ranks}")
    return axes, ranks


def coordinates(mesh_text: str) -> Iterator[tuple[int, dict[str, int]]]:
    """Every rank of the mesh with its coordinates."""
    axes, ranks = parse_mesh(mesh_text)
    places = itertools.product(*(range(size) for size in axes.values()))
    for rank, place in zip(ranks, places, strict=True):
        yield rank, dict(zip(axes, place, strict=True))


@lru_cache(MAX_KEPT)
def parse_layout(text: str) -> Parsed:
    dims, *suffixes = split(text, "|")
    on: dict[str, tuple[int, ...]] = {}
    op, sum_axes, flat, without = None, (), None, ()
    for suffix in suffixes:
        name, _, rest = suffix.partition(" ")
        if name == "on":
            on = {axis: integers(at) for axis, at in re.findall(r"(\w+)\s*=\s*([\d,]+)", rest)}
        elif name in OPS:
            op, sum_axes = name, tuple(rest.split())
        elif name == "flat":
            flat = rest
        elif name == "without":
            without = rank_list(rest)
        else:
            raise ValueError(f"unknown suffix {suffix!r}")
    return Parsed(tuple(split(dims, " ")), on, op, sum_axes, flat, without)


@lru_cache(MAX_KEPT)
def parse_cuts(word: str) -> tuple[Cut, ...]:
    """The cuts of one word, in the order in which they act."""
    word = word.strip()
    if word in ("", "-"):
        return ()
    if word.endswith("}"):
        prefix, _, segments = word[:-1].partition("{")
        sizes_and_words = re.findall(r"(\d+) *(.*)", "\n".join(split(segments, ",")))
        packed = ((int(size), parse_cuts(prefix or own)) for size, own in sizes_and_words)
        return (Cut("packed", segments=tuple(packed)),)
    if word.startswith("("):
        return tuple(cut for part in split(word[1:-1], " ") for cut in parse_cuts(part))
    axis, mark, numbers = re.fullmatch(r"(\w+)([*:\[~]?)([\d,\s]*)\]?", word).groups()
    kinds = {"": "chunk", "*": "units", ":": "cyclic", "[": "ragged", "~": "zigzag"}
    return (Cut(kinds[mark], axis, integers(numbers)),)


def kept(cut: Cut, length: int, at: Axes, axes: Axes) -> Indices:
    """The positions of a dim of this length that a rank keeps under one cut, in local order."""
    everything = np.arange(length)
    if cut.kind == "packed":
        if sum(size for size, _ in cut.segments) != length:
            raise ValueError(f"segments of {cut} do not add up to {length}")
        parts, start = [everything[:0]], 0
        for size, cuts in cut.segments:
            parts.append(start + kept_by_all(cuts, size, at, axes))
            start += size
        return np.concatenate(parts)
    n, c = axes[cut.axis], at[cut.axis]
    if cut.kind in ("chunk", "units"):
        unit = cut.numbers[0] if cut.numbers else 1
        num_units = -(-length // unit)
        block = -(-num_units // n) * unit
        return everything[c * block : (c + 1) * block]
    if cut.kind == "cyclic":
        return everything[everything // cut.numbers[0] % n == c]
    if cut.kind == "zigzag":
        block = -(-length // (2 * n))
        mirror = 2 * n - 1 - c
        first, second = (everything[k * block : (k + 1) * block] for k in (c, mirror))
        return np.concatenate([first, second])
    if len(cut.numbers) != n or sum(cut.numbers) != length:
        raise ValueError(f"sizes of {cut} do not fit length {length} over {n} ranks")
    start = sum(cut.numbers[:c])
    return everything[start : start + cut.numbers[c]]


def kept_by_all(cuts: tuple[Cut, ...], length: int, at: Axes, axes: Axes) -> Indices:
    """The positions kept after all cuts, each acting on what the one before left."""
    positions = np.arange(length)
    for cut in cuts:
        positions = positions[kept(cut, len(positions), at, axes)]
    return positions


def words_of_dims(words: Sequence[str], num_dims: int) -> list[str]:
    """One word for each dim, '...' filled up with '-'."""
    if "..." in words:
        where = list(words).index("...")
        fill = ["-"] * (num_dims - len(words) + 1)
        words = [*words[:where], *fill, *words[where + 1 :]]
    if len(words) != num_dims:
        raise ValueError(f"{len(words)} words for {num_dims} dims")
    return list(words)


def holding(mesh_text: str, parsed: Parsed) -> Iterator[tuple[int, dict[str, int]]]:
    """The ranks that hold the tensor at all, with their coordinates."""
    for rank, at in coordinates(mesh_text):
        if rank not in parsed.without and all(at[axis] in keep for axis, keep in parsed.on.items()):
            yield rank, at


def local_indices(mesh_text: str, layout_text: str, shape: Sequence[int]) -> Held:
    """What every rank holds: global flat indices in local order, shaped like its local tensor.

    Ranks that hold nothing because of `on` or `without` are absent; ranks whose shard is empty are
    present with an empty array. A rank of a layout with `sum` holds its addend of these elements.
    The arrays are kept for the next who asks: nobody may change them.
    """
    indices = _kept_indices if math.prod(shape) <= MAX_SIZE else _local_indices
    return dict(indices(mesh_text, layout_text, tuple(shape)))


def _local_indices(mesh_text: str, layout_text: str, shape: tuple[int, ...]) -> Held:
    axes, _ = parse_mesh(mesh_text)
    parsed = parse_layout(layout_text)
    dims = [parse_cuts(word) for word in words_of_dims(parsed.words, len(shape))]
    flat = None if parsed.flat is None else parse_cuts(parsed.flat)
    held = {}
    for rank, at in holding(mesh_text, parsed):
        local = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        for dim, cuts in enumerate(dims):
            local = local.take(kept_by_all(cuts, shape[dim], at, axes), axis=dim)
        if flat is not None:
            local = local.reshape(-1)[kept_by_all(flat, local.size, at, axes)]
        held[rank] = local
    return held


_kept_indices = lru_cache(24)(_local_indices)


def addends(mesh_text: str, layout_text: str) -> tuple[str | None, dict[int, int]]:
    """The operation of a pending sum, and which addend every rank holds (0 where there is none)."""
    axes, _ = parse_mesh(mesh_text)
    parsed = parse_layout(layout_text)
    index = {}
    for rank, at in holding(mesh_text, parsed):
        index[rank] = 0
        for axis in parsed.sum_axes:
            index[rank] = index[rank] * axes[axis] + at[axis]
    return parsed.op, index


def num_addends(mesh_text: str, layout_text: str) -> int:
    axes, _ = parse_mesh(mesh_text)
    return math.prod(axes[axis] for axis in parse_layout(layout_text).sum_axes)


def local_indices_of_boxes(shape: Sequence[int], boxes: Boxes) -> Held:
    """The same for `Layout.from_boxes`: one box keeps its shape, several are joined flat."""
    everything = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    held = {}
    for rank, listed in boxes.items():
        parts = [
            everything[tuple(slice(lo, hi) for lo, hi in zip(start, stop, strict=True))]
            for start, stop in listed
        ]
        flat = [everything.reshape(-1)[:0], *(part.reshape(-1) for part in parts)]
        held[rank] = parts[0] if len(parts) == 1 else np.concatenate(flat)
    return held


def cut(array: NDArray, held: Held) -> dict[int, NDArray]:
    """Every rank's local array of this global array."""
    return {rank: array.reshape(-1)[indices] for rank, indices in held.items()}


def reduce_addends(op: str, values: NDArray) -> NDArray:
    """The value of addends that are stacked along the first dim."""
    by_op = {"sum": np.sum, "avg": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
    reduced = by_op[op](values, axis=0).astype(values.dtype)
    return (reduced / len(values)).astype(values.dtype) if op == "avg" else reduced
