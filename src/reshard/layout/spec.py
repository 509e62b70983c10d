"""A spec is all that planning needs to know of one tensor: its shape, its dtype and its layout.

Specs are equal if the same ranks hold the same elements, whatever words their layouts use: equality
compares a fingerprint of who holds what. It has three forms, the simplest that fits, so that equal
placements meet in the same form: one box per rank; the same tables of intervals per dim; each
rank's pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod

import numpy as np

from reshard.dtypes import canonical_dtype, itemsize
from reshard.errors import LayoutError
from reshard.layout.boxlist import piece_columns
from reshard.layout.columns import Ints, contained, distinct, distinct_first, sized_cache
from reshard.layout.grid import DimTable, Grid, addend_of, grids_of, num_addends
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.words import check_shape


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """Shape, dtype and layout of one tensor; equal if the same ranks hold the same elements.

    >>> spec = TensorSpec(shape=(8, 4), dtype="bf16", layout=Layout(Mesh(tp=2), "tp -"))
    >>> spec.dtype, spec.num_bytes
    ('bfloat16', 64)
    >>> spec == TensorSpec((8, 4), "bfloat16", Layout(Mesh(x=2), "x[4,4] ..."))
    True
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "layout", Layout.of(self.layout))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return itemsize(self.dtype) * prod(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        return self.layout == other.layout or self.layout.same_as(other.layout, self.shape)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, fingerprint(self.layout, self.shape)))


@sized_cache(16 << 20, lambda _, layout, shape: layout.num_bytes)
def fingerprint(layout: Layout, shape: tuple[int, ...]) -> bytes:
    """A hash that is equal for layouts that put the same elements in the same places."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(repr((shape, layout.reduce and layout.reduce[0])).encode())
    hasher.update(repr(sorted(addend_of(layout).items())).encode())
    lost = layout.words.without
    whole = Layout(layout.mesh, replace(layout.words, without=())) if lost else layout
    grids = grids_of(whole, shape)
    if grids is not None and len(grids) == 1:
        _hash_grid(hasher, grids[0], np.array(lost, dtype=np.int64))
    else:
        _hash_pieces(hasher, layout, shape)
    return hasher.digest()


@sized_cache(16 << 20, lambda _, one, other, shape: one.num_bytes + other.num_bytes)
def agrees(layout: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank that both layouts speak of holds the same by both.

    A layout does not speak of ranks that it is without.
    """
    if layout == other or layout.same_as(other, shape):
        return True
    ranks = set(other.ranks).difference(layout.words.without, other.words.without)
    return all(holds_alike(layout, other, rank, shape) for rank in layout.ranks if rank in ranks)


@sized_cache(16 << 20, lambda _, one, other, shape: one.num_bytes + other.num_bytes)
def is_part_of(layout: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank of a layout holds the same by another one, which may have more ranks."""
    has_ranks = set(layout.ranks) <= set(other.ranks)
    return agrees(layout, other, shape) and (has_ranks or layout.same_as(other, shape))


def holds_alike(layout: Layout, other: Layout, rank: int, shape: tuple[int, ...]) -> bool:
    """Whether a rank has the same local tensor by both layouts."""
    one, two = (_local(each, rank, shape) for each in (layout, other))
    return one == two


def _local(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[object, ...]:
    """The pieces of a rank, the shape of its local tensor, and which addend it is."""
    pieces = layout.pieces(rank, shape)
    addend = None
    if layout.reduce and layout.holds(rank) is not None:
        addend = layout.reduce[0], addend_of(layout)[rank], num_addends(layout)
    return pieces, pieces and layout.local_shape(rank, shape), addend


def _hash_grid(hasher: hashlib.blake2b, grid: Grid, lost: Ints) -> None:
    """Hash one box per rank if that is all there is, else the tables and each rank's parts."""
    tables = [_canonical(dim) for dim in grid.dims]
    single = all(len(starts) == len(distinct(owners)) for starts, _, owners, _ in tables)
    places = np.flatnonzero((grid.region_at >= 0) & ~contained(grid.ranks, lost))
    pairs = zip(tables, grid.parts_of(grid.region_at[places]), strict=True)
    numbers = [number[part] for (*_, number), part in pairs]
    parts = np.array(numbers, dtype=np.int64).reshape(len(tables), len(places))
    full = (parts >= 0).all(axis=0)
    ranks = grid.ranks[places[full]]
    columns = [ranks]
    for (starts, stops, owners, _), part in zip(tables, parts[:, full], strict=True):
        if single:  # a part is its only interval
            columns += [starts[part], stops[part]]
        else:
            hasher.update(np.concatenate([starts, stops, owners]).tobytes())
            columns.append(part)
    rows = np.stack(columns, axis=1)[np.argsort(ranks)]
    hasher.update(b"box" if single else b"tables")
    hasher.update(np.ascontiguousarray(rows).tobytes())


def _canonical(dim: DimTable) -> tuple[Ints, Ints, Ints, Ints]:
    """Intervals with adjacent ones of one part merged, parts numbered as they appear.

    The last array maps old part numbers to new ones; parts without elements get -1.
    """
    new = np.ones(len(dim.starts), dtype=bool)
    new[1:] = (dim.parts[1:] != dim.parts[:-1]) | (dim.starts[1:] != dim.stops[:-1])
    first = np.flatnonzero(new)
    parts = dim.parts[first]
    last = np.append(first[1:], len(new))[: len(first)] - 1
    number = np.full(dim.num_parts, -1, dtype=np.int64)
    seen, where = distinct_first(parts)
    number[seen[np.argsort(where)]] = np.arange(len(seen))
    return dim.starts[first], dim.stops[last], number[parts], number


def _hash_pieces(hasher: hashlib.blake2b, layout: Layout, shape: tuple[int, ...]) -> None:
    pieces = {rank: piece_columns(layout, rank, shape) for rank in sorted(layout.ranks)}
    pieces = {rank: columns for rank, columns in pieces.items() if len(columns[3])}
    alone = all(len(offsets) == 1 for *_, offsets in pieces.values())
    alone = alone and (len(shape) < 2 or not layout.words.flat)
    hasher.update(b"box" if alone else b"pieces")
    for rank, columns in pieces.items():
        if alone:
            box = np.stack(columns[:2], axis=2).reshape(-1)
            hasher.update(np.append(rank, box).astype(np.int64).tobytes())
        else:
            hasher.update(np.array([rank, len(columns[3])], dtype=np.int64).tobytes())
            for column in columns:
                hasher.update(np.ascontiguousarray(column).tobytes())


def flat_bucket(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh | str,
    axis: str,
    *,
    align: int = 1,
    pad_to: int = 1,
) -> dict[str, Layout]:
    """The layout of each tensor of a bucket that is cut into equal ranges along an axis.

    FSDP1, ZeRO and Megatron's distributed optimizer flatten tensors one after the other into a
    padded bucket; a rank holds one range of it, and so a piece of some tensors, all of others and
    nothing of the rest:

        bucket   | a a a a a a | b b | c c c c c c c . |      (. is padding)
        ranks    |   rank 0    |   rank 1   |  rank 2  |

    Each tensor starts at a multiple of ``align`` elements; the length of the bucket is rounded up
    to a multiple of ``pad_to`` and of the size of the axis.

    >>> layouts = flat_bucket({"a": (2, 3), "b": (2,), "c": (7,)}, Mesh(dp=3), "dp")
    >>> [str(layout) for layout in layouts.values()]
    ['... | flat dp[5,1,0]', '... | flat dp[0,2,0]', '... | flat dp[0,2,5]']
    """
    mesh = Mesh.of(mesh)
    if axis not in mesh.axes:
        raise LayoutError(
            f'"{axis}" is not an axis of mesh {mesh}: use one of {", ".join(mesh.axes)}'
        )
    if align < 1 or pad_to < 1:
        raise LayoutError(f"align={align} and pad_to={pad_to}: both are at least 1")
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, shape in shapes.items():
        start = -(-end // align) * align
        end = start + prod(check_shape(shape))
        ranges[name] = start, end
    num = mesh.axes[axis]
    unit = lcm(pad_to, num)
    share = -(-end // unit) * unit // num
    layouts = {}
    for name, (start, stop) in ranges.items():
        edges = (min(max(number * share, start), stop) for number in range(num + 1))
        sizes = ",".join(str(high - low) for low, high in pairwise(edges))
        layouts[name] = Layout(mesh, f"... | flat {axis}[{sizes}]")
    return layouts
