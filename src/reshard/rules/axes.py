"""Axes of layouts and of meshes: which axes does a layout name, does a mesh lack or leave unused?

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> str(keep_axes(parse("(tp*128 kv) - | on pp=1"), {"kv", "dp"}))
'kv -'
>>> str(shard_first_dim(parse("tp*128 -"), ["dp"], num_dims=2))
'(tp*128 dp) -'
>>> idle_ranks({"q": Layout(Mesh(tp=16), "tp*128 -")}, {"q": (1024, 4096)})[0][:53]
'warning: 8 of 16 ranks along tp hold nothing of "q": '
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from reshard.errors import RulesError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.notation import Chunk, Cut, Cuts, Packed, Segment, Units, Words, parse
from reshard.layout.tiling import held
from reshard.rules.document import Document, all_axes
from reshard.text import and_more, quoted

__all__ = [
    "check_axes",
    "factored_axes",
    "idle_ranks",
    "keep_axes",
    "layout_axes",
    "rule_axes",
    "shard_first_dim",
]


def layout_axes(layouts: Iterable[Layout]) -> set[str]:
    """The axes that some layout names."""
    return {axis for layout in layouts for axis in all_axes(layout.words)}


def rule_axes(document: Document) -> set[str]:
    """The axes that could cut or place some tensor of some model."""
    named = set(document.fsdp)
    for rule in document.rules:
        named |= {place.axis for place in rule.on or ()}
        named |= all_axes(parse(rule.layout.sample())) if rule.layout else set()
    return named


def check_axes(document: Document, mesh: Mesh, named: set[str]) -> None:
    """Raise for an axis of a mesh that is not named and along which no replicas are asked for."""
    for axis in document.requested:
        if axis not in mesh.axes:
            option = "fsdp" if axis in document.fsdp else "replicate"
            raise RulesError(
                f"{option} names axis {quoted(axis)} and mesh {mesh} has {' '.join(mesh.axes)}: "
                "use one of these"
            )
    factored = {factor.axis for factor in document.factors if named.intersection(factor.into)}
    for axis, size in mesh.axes.items():
        if size > 1 and axis not in named | factored | {*document.replicate}:
            raise RulesError(_unused(document, mesh, axis))


def _unused(document: Document, mesh: Mesh, axis: str) -> str:
    near = difflib.get_close_matches(axis, document.axes, n=1)
    advice = f"write {near[0]}" if near else "correct the mesh"
    if axis in document.axes:
        advice = f'cut dim 0 by it (--fsdp {axis}, in plan --from-fsdp or --to-fsdp, fsdp="{axis}")'
    return (
        f"axis {quoted(axis)} of mesh {mesh} cuts no tensor, so that each of its {mesh.axes[axis]} "
        f"ranks would hold a copy of everything; the rules know the axes "
        f"{', '.join(document.axes) or '(none)'}: {advice}, or replicate on purpose "
        f'(--replicate {axis}, replicate="{axis}")'
    )


def factored_axes(document: Document, mesh: Mesh, factored: Mesh) -> Iterator[str]:
    """What a reader should know of axes that are read as two."""
    for factor in document.factors:
        if factor.axis in mesh.axes and factor.axis not in factored.axes:
            first, second = factor.into
            groups, copies = factored.axes[first], factored.axes[second]
            yield (
                f"{factor.axis}={mesh.axes[factor.axis]} is read as {first}={groups} "
                f"{second}={copies}, because {factor.at_most} is {groups}: {copies} neighbours "
                f"hold the same part of what is cut by {first} alone"
            )


def idle_ranks(layouts: Mapping[str, Layout], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Warnings about ranks that get none of the whole units, such as heads, of some tensors."""
    found: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
    known: dict[tuple[Layout, tuple[int, ...]], set[tuple[int, int, tuple[str, ...]]]] = {}
    for name, layout in layouts.items():
        key = layout, tuple(shapes[name])
        if key not in known:
            known[key] = set(_idle(*key))
        for idle in known[key]:
            found.setdefault(idle, []).append(name)
    return [
        f"warning: {idle} of {count} ranks along {', '.join(axes)} hold nothing of "
        f"{and_more([quoted(names[0]), *names[1:]])}: there are "
        "fewer whole heads (units of the layout) than ranks"
        for (idle, count, axes), names in found.items()
    ]


def _idle(layout: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """For each dim: how many of how many ranks along which axes get none of its units."""
    sizes = layout.mesh.axes
    for length, cuts in zip(shape, layout.dims(shape), strict=True):
        units = [cut for cut in cuts if isinstance(cut, Units) and cut.unit > 1]
        axes = tuple(cut.axis for cut in units)
        places = [*product(*(range(sizes[axis]) for axis in axes))]
        coords = (dict(zip(axes, place, strict=True)) for place in places)
        idle = sum(not held(tuple(units), length, sizes, at) for at in coords)
        if idle and length:
            yield idle, len(places), axes


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


def shard_first_dim(words: Words, axes: Iterable[str], *, num_dims: int | None) -> Words:
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
