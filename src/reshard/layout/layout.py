"""A layout says who holds what of a tensor: a mesh and words, or explicit boxes.

>>> from reshard.layout.mesh import Mesh
>>> layout = Layout(Mesh(dp=2, tp=4), "(dp tp) -")
>>> layout.pieces(rank=3, shape=(8192, 4096))
(Piece(box=Box((3072, 0), (4096, 4096)), offset=0, strides=(4096, 1)),)
>>> layout.owners(Box((0, 0), (1500, 1)), shape=(8192, 4096))
(Owners(box=Box((0, 0), (1024, 1)), ranks=(0,)), Owners(box=Box((1024, 0), (1500, 1)), ranks=(1,)))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import accumulate, chain
from math import prod
from typing import Any

from reshard.errors import FormatError, LayoutError, NotationError, require_type
from reshard.layout.box import Box, Interval, Piece, length_of, local_pieces, row_major
from reshard.layout.coverage import first_overlap
from reshard.layout.mesh import MAX_RANK, Mesh, format_ranks
from reshard.layout.notation import from_placements, parse
from reshard.layout.words import (
    Cuts,
    Ragged,
    Words,
    check_shape,
    countable_shape,
    held_intervals,
    plain_cuts,
)
from reshard.text import count, quoted


@dataclass(frozen=True, slots=True)
class Owners:
    """A box and the ranks that hold all of it."""

    box: Box
    ranks: tuple[int, ...]


class Layout:
    """How a tensor is sharded over the ranks of a mesh, one word per tensor dim."""

    mesh: Mesh
    words: Words

    def __init__(self, mesh: Mesh, text: str | Words = "") -> None:
        if not isinstance(mesh, Mesh) or not isinstance(text, str | Words):
            raise LayoutError(
                from_placements(mesh.axes if isinstance(mesh, Mesh) else (), text)
                or f"Layout({mesh!r:.60}, {text!r:.60}): give a mesh and then a text, such as "
                'Layout(Mesh(dp=2, tp=4), "(dp tp) -"), or text to Layout.parse("tp=4: tp -")'
            )
        self.mesh = mesh
        self.words = parse(text, mesh.axes) if isinstance(text, str) else text
        _check_words(self)

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a mesh and a layout from one text, as the command line does.

        >>> Layout.parse("tp=2 @ 8-9: - tp")
        Layout(Mesh(tp=2, ranks=range(8, 10)), '- tp')
        """
        mesh, colon, words = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not colon:
            raise NotationError(
                f'{text!r:.60} is no mesh with a layout: expected "MESH: LAYOUT", such as '
                '"tp=2: - tp"'
            )
        return Layout(Mesh.parse(mesh.strip()), words.strip())

    @staticmethod
    def of(layout: Layout | str) -> Layout:
        """A layout, or the one that a text describes: for arguments."""
        if not isinstance(layout, Layout | str):
            raise LayoutError(
                from_placements((), layout)
                or f'{layout!r:.60} is no layout: give a Layout, or text: "dp=2 tp=4: (dp tp) -"'
            )
        return Layout.parse(layout) if isinstance(layout, str) else layout

    def draw(self, shape: Sequence[int], *, width: int = 80) -> str:
        """A picture and a table of which rank holds what, as text."""
        return str(import_module("reshard.show.terminal").as_text(self, shape, width))

    def _repr_html_(self) -> str:
        """A picture for a notebook, of a small shape that the layout shards evenly."""
        return str(import_module("reshard.show.page.notebook").layout_cell(self))

    @staticmethod
    def from_boxes(shape: Sequence[int], boxes: Mapping[int, Iterable[Box]]) -> BoxLayout:
        """Any boxes on any ranks, for what no text can say.

        The local tensor of a rank with one box has its shape; of a rank with several it is 1-d,
        the boxes flattened and joined in the given order.
        """
        return BoxLayout(shape, {rank: tuple(listed) for rank, listed in boxes.items()})

    @property
    def ranks(self) -> Sequence[int]:
        """Every rank of the layout's mesh."""
        return self.mesh.ranks

    @property
    def num_bytes(self) -> int:
        """About how much memory the layout itself takes, for caches."""
        return 1024 + 8 * len(self.ranks)

    @property
    def reduce(self) -> tuple[str, tuple[str, ...]] | None:
        """The operation and the axes of a pending reduction."""
        return self.words.reduce

    def without(self, ranks: Iterable[int]) -> Layout:
        """The same layout after these ranks are lost."""
        lost = tuple(sorted({*self.words.without, *_checked_ranks(ranks)}))
        return Layout(self.mesh, replace(self.words, without=lost))

    def dims(self, shape: Sequence[int]) -> tuple[Cuts, ...]:
        """The cuts of each dim of a tensor of this shape."""
        sizes = countable_shape(shape)
        dims = self.words.expand(len(sizes))
        if dims is None:
            raise LayoutError(
                f'layout "{self}" has {count(len(self.words.dims), "word")} and shape {sizes} has '
                f"{count(len(sizes), 'dim')}: write one word per dim, or "
                '"..." for dims that are whole'
            )
        return dims

    def holds(self, rank: int) -> dict[str, int] | None:
        """The coordinates of a rank, or None if it holds nothing of any tensor."""
        if self.mesh.index(rank) is None or rank in self._lost:
            return None
        coords = self.mesh.coords(rank)
        return coords if all(coords[axis] in at for axis, at in self.words.on) else None

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a rank's local tensor; ``(0,)`` where a rank of the mesh has none."""
        if self.mesh.index(rank) is None:
            raise LayoutError(
                f'rank {rank} has no local tensor of layout "{self}": mesh {self.mesh} has ranks '
                f"{self.mesh.ranks_text}"
            )
        if self.holds(rank) is None:
            return (0,)
        intervals, ranges = self.intervals(rank, shape)
        return tuple(map(length_of, intervals)) if ranges is None else (length_of(ranges),)

    def pieces(self, rank: int, shape: Sequence[int]) -> tuple[Piece, ...]:
        """The boxes a rank holds, in the order they have in its local tensor."""
        intervals, ranges = self.intervals(rank, shape)
        if self.holds(rank) is None:
            return ()
        return tuple(local_pieces(intervals, ranges))

    def intervals(
        self, rank: int, shape: Sequence[int]
    ) -> tuple[list[list[Interval]], list[Interval] | None]:
        """What a rank holds, dim by dim, and what it keeps of that once flattened, if it is."""
        coords = self.holds(rank)
        if coords is None:
            return [[] for _ in self.dims(shape)], None
        dims = zip(self.dims(shape), shape, strict=True)
        intervals = [self._intervals(cuts, size, coords) for cuts, size in dims]
        if not self.words.flat:
            return intervals, None
        return intervals, self._intervals(self.words.flat, prod(map(length_of, intervals)), coords)

    def owners(self, box: Box, shape: Sequence[int]) -> tuple[Owners, ...]:
        """Who holds the data inside a box: disjoint boxes, each with all its holders."""
        from reshard.layout.boxlist import owners

        return owners(self, box, check_shape(shape))

    def same_as(self, other: Layout | str, shape: Sequence[int]) -> bool:
        """Whether both shard a tensor of this shape equally, in whatever words."""
        from reshard.layout.spec import fingerprint

        sizes = check_shape(shape)
        return fingerprint(self, sizes) == fingerprint(Layout.of(other), sizes)

    def _intervals(self, cuts: Cuts, length: int, coords: Mapping[str, int]) -> list[Interval]:
        try:
            return held_intervals(cuts, length, self.mesh.axes, coords)
        except LayoutError as error:
            raise LayoutError(f'layout "{self}" on mesh {self.mesh}: {error}') from None

    def to_json(self) -> str:
        """The layout as JSON text that ``from_json`` reads back."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {"mesh": str(self.mesh), "layout": str(self)}

    @staticmethod
    def from_json(text: str) -> Layout:
        """Read what ``to_json`` wrote."""
        try:
            data = json.loads(text)
        except (RecursionError, ValueError) as error:
            raise FormatError(f"a layout's JSON cannot be read: {error}") from None
        return Layout.from_dict(data)

    @staticmethod
    def from_dict(data: object) -> Layout:
        """Read what ``to_dict`` gave."""
        match data:
            case {"mesh": str(mesh), "layout": str(text)}:
                return Layout(Mesh.parse(mesh), text)
            case {"shape": list(shape), "boxes": dict(boxes)}:
                return BoxLayout(_ints(shape), dict(map(_read_boxes, boxes.items())))
        raise FormatError(
            'a layout is {"mesh": ..., "layout": ...} or {"shape": ..., "boxes": ...}'
        )

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _lost(self) -> frozenset[int]:
        return frozenset(self.words.without)

    @cached_property
    def _text(self) -> str:
        return str(self.words)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        """What makes layouts equal."""
        return self._text, self.mesh

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Layout({self.mesh!r}, {str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return type(self) is type(other) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.mesh, self._text)


class BoxLayout(Layout):
    """Explicit boxes on ranks; made by ``Layout.from_boxes``."""

    words = Words((), 0)

    def __init__(self, shape: Sequence[int], boxes: dict[int, tuple[Box, ...]]) -> None:
        self.shape = countable_shape(shape)
        self.boxes = dict(sorted(boxes.items()))
        whole = Box.whole(self.shape)
        for rank, mine in self.boxes.items():
            if not 0 <= rank < MAX_RANK:
                raise LayoutError(f"rank {rank} of a box: ranks count from 0 to {MAX_RANK - 1}")
            for box in mine:
                if len(box.start) != len(whole.start) or box not in whole:
                    raise LayoutError(
                        f"box {box} on rank {rank} is not inside the tensor {whole}: "
                        "give boxes inside the shape"
                    )
            overlap = first_overlap(mine)
            if overlap is not None:
                box, other = sorted(mine[at] for at in overlap)
                raise LayoutError(
                    f"boxes {box} and {other} overlap on rank {rank} in {box & other}: "
                    "a rank holds each element once; cut one of them"
                )
        self.mesh = Mesh(ranks=tuple(self.boxes), rank=len(self.boxes)) if boxes else Mesh()

    @property
    def num_bytes(self) -> int:
        return 1024 + 256 * sum(map(len, self.boxes.values()))

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self.boxes)

    def without(self, ranks: Iterable[int]) -> BoxLayout:
        lost = _checked_ranks(ranks)
        return BoxLayout(self.shape, {r: b for r, b in self.boxes.items() if r not in lost})

    def dims(self, shape: Sequence[int]) -> tuple[Cuts, ...]:
        """Raises if the shape is not the one the boxes were given for."""
        sizes = check_shape(shape)
        if sizes != self.shape:
            raise LayoutError(
                f"the boxes of this layout are for shape {self.shape} and the tensor has shape "
                f"{sizes}: make the boxes from the tensor's shape"
            )
        return ((),) * len(sizes)

    def holds(self, rank: int) -> dict[str, int] | None:
        """An empty dict if the rank has an entry, else None."""
        return {} if rank in self.boxes else None

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """One box: its shape; otherwise 1-d."""
        self.dims(shape)
        mine = self.boxes.get(rank, ())
        return mine[0].shape if len(mine) == 1 else (sum(box.size for box in mine),)

    def pieces(self, rank: int, shape: Sequence[int]) -> tuple[Piece, ...]:
        """The boxes of a rank in the order given, each with its place in the local tensor."""
        self.dims(shape)
        boxes = [box for box in self.boxes.get(rank, ()) if box.size]
        places = accumulate((box.size for box in boxes), initial=0)
        return tuple(
            Piece(box, at, row_major(box.shape)) for box, at in zip(boxes, places, strict=False)
        )

    def to_dict(self) -> dict[str, Any]:
        boxes = {
            str(rank): [[list(box.start), list(box.stop)] for box in mine]
            for rank, mine in self.boxes.items()
        }
        return {"shape": list(self.shape), "boxes": boxes}

    @cached_property
    def _text(self) -> str:
        count = sum(map(len, self.boxes.values()))
        return f"{count} boxes on ranks {format_ranks(tuple(self.boxes))}"

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.shape, tuple(self.boxes.items())

    def __repr__(self) -> str:
        boxes = {rank: list(mine) for rank, mine in self.boxes.items()}
        return f"Layout.from_boxes({self.shape}, {boxes})"

    def __reduce__(self) -> tuple[object, ...]:
        return BoxLayout, (self.shape, self.boxes)


def _checked_ranks(ranks: Iterable[int]) -> set[int]:
    require_type(ranks, Iterable, "without()", "give the lost ranks, as layout.without([3])")
    return set(ranks)


def _check_words(layout: Layout) -> None:
    """Every axis is the mesh's, every coordinate and every lost rank exists."""
    words, mesh = layout.words, layout.mesh
    for axis in words.axes:
        if axis not in mesh.axes:
            raise LayoutError(
                f'layout "{layout}" names axis "{axis}" and mesh {mesh} has '
                f"{', '.join(mesh.axes) or 'no axis'}: use one of these"
            )
    for cut in plain_cuts(chain(*words.dims, words.flat)):
        if isinstance(cut, Ragged) and len(cut.sizes) != mesh.axes[cut.axis]:
            raise LayoutError(
                f'"{cut}" in layout "{layout}" gives {len(cut.sizes)} sizes and mesh {mesh} has '
                f"{cut.axis}={mesh.axes[cut.axis]}: give one size per rank"
            )
    for axis, places in words.on:
        if places[-1] >= mesh.axes[axis]:
            raise LayoutError(
                f'layout "{layout}" is on {axis}={places[-1]} and mesh {mesh} has {axis}='
                f"0 to {mesh.axes[axis] - 1}: name a coordinate that exists"
            )
    for rank in words.without:
        if mesh.index(rank) is None:
            raise LayoutError(
                f'layout "{layout}" is without rank {rank}, which mesh {mesh} does not have: '
                f"its ranks are {mesh.ranks_text}"
            )


def _read_boxes(entry: tuple[object, object]) -> tuple[int, tuple[Box, ...]]:
    match entry:
        case (str(rank), list(boxes)) if re.fullmatch("[0-9]{1,18}", rank):
            return int(rank), tuple(map(_read_box, boxes))
    raise FormatError(f'{quoted(entry[0])} in "boxes" is not a rank with a list of boxes')


def _read_box(data: object) -> Box:
    match data:
        case [list(start), list(stop)]:
            return Box(_ints(start), _ints(stop))
    raise FormatError(f"a box is [start, stop], and found {data!s:.160}")


def _ints(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise FormatError(f"expected a list of whole numbers and found {values!s:.160}")
    return tuple(values)
