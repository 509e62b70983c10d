"""Words of a layout for the axes a mesh has: what is left of ``(tp*128 dp) -`` without tp?

>>> from reshard.layout.notation import parse
>>> str(keep_axes(parse("(tp*128 kv) - | on pp=1"), {"kv", "dp"}))
'kv -'
>>> str(cut_first_dim(parse("tp*128 -"), ["dp"], num_dims=2))
'(tp*128 dp) -'
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from reshard.layout.notation import Chunk, Cut, Cuts, Packed, Segment, Units, Words, axes_of

__all__ = ["all_axes", "cut_first_dim", "keep_axes"]


def all_axes(words: Words) -> set[str]:
    """Every axis a layout names.

    >>> from reshard.layout.notation import parse
    >>> sorted(all_axes(parse("(tp dp) - | on pp=1 | sum cp")))
    ['cp', 'dp', 'pp', 'tp']
    """
    cut = {axis for cuts in (*words.dims, words.flat) for axis in axes_of(cuts)}
    pending = words.reduce[1] if words.reduce else ()
    return {*cut, *pending, *(axis for axis, _ in words.on)}


def keep_axes(words: Words, axes: Collection[str]) -> Words:
    """The words without the axes a mesh lacks: along these there is only one rank."""
    pending = tuple(axis for axis in words.reduce[1] if axis in axes) if words.reduce else ()
    return replace(
        words,
        dims=tuple(_keep(cuts, axes) for cuts in words.dims),
        on=tuple((axis, at) for axis, at in words.on if axis in axes),
        reduce=(words.reduce[0], pending) if words.reduce and pending else None,
        flat=_keep(words.flat, axes),
    )


def cut_first_dim(words: Words, axes: Iterable[str], *, num_dims: int | None) -> Words:
    """Cut dim 0 of what every rank holds further, by each of these axes not in use yet."""
    more = tuple(Chunk(axis) for axis in axes if axis not in all_axes(words))
    if not more or words.flat or num_dims == 0:
        return words
    if words.rest == 0 and num_dims is not None:
        words = replace(words, dims=words.expand(num_dims) or words.dims, rest=None)
    if words.rest == 0:
        return replace(words, dims=(more, *words.dims), rest=1)
    return replace(words, dims=((*words.dims[0], *more), *words.dims[1:]))


def _keep(cuts: Cuts, axes: Collection[str]) -> Cuts:
    kept = (_keep_cut(cut, axes) for cut in cuts)
    return tuple(cut for cut in kept if cut is not None)


def _keep_cut(cut: Cut, axes: Collection[str]) -> Cut | None:
    if isinstance(cut, Packed):
        segments = tuple(Segment(part.size, _keep(part.cuts, axes)) for part in cut.segments)
        return Packed(segments) if any(part.cuts for part in segments) else None
    if cut.axis not in axes:
        return None
    return Chunk(cut.axis) if isinstance(cut, Units) and cut.unit == 1 else cut
