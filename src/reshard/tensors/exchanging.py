"""`rs.exchange`: every rank describes its tensors, and all ranks get the merged specs.

The ranks of a trainer know the layout of the weights there, the ranks of an inference engine the
layout that they need; a plan needs both. Each rank describes its own side, and gets both.

    specs = rs.describe(model.state_dict())
    have, want = rs.exchange(have=specs)              # on a trainer's rank
    have, want = rs.exchange(want=specs)              # on an inference rank
    plan = rs.plan(have, want)

A name in a state dict identifies one tensor. Tensors with the same name on disjoint sub-meshes are
therefore replicas, and so are plain tensors with the same name on several ranks. A rank only knows
the mesh of its own tensor. If FSDP shards a tensor that tensor parallelism does not shard, that
mesh is the dp sub-mesh, and the ranks of the other dp sub-meshes hold replicas:

    dp=2 @ 0,2   "dp -"
    dp=2 @ 1,3   "dp -"     ->     dp=2 tp=2   "dp -"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist

from reshard.errors import DisagreementError, FormatError, LiveError, ReshardError, TensorError
from reshard.layout.box import Box
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh, format_ranks
from reshard.layout.spec import TensorSpec, holds_alike
from reshard.tensors.agreement import Agreement
from reshard.tensors.local import whole_on
from reshard.tensors.tensor_move import holders
from reshard.text import quoted

Specs = Mapping[str, TensorSpec]

GIVE = "give rs.describe(state_dict), or a dict of rs.TensorSpec"
SCHEMA = "reshard.specs/1"
MAX_TEXT = 1 << 28
MAX_DIMS = 32


def exchange(
    have: Specs | None = None,
    want: Specs | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 60.0,
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Both sides of a move, as all ranks of the group described them together.

    Every rank of the group calls it, with what it holds, what it wants, both or neither. One name
    is one tensor: ranks that describe it on different sub-meshes hold replicas of it. Where shapes,
    dtypes or what a rank holds differ, all ranks get the same error.
    """
    if not dist.is_initialized():
        raise LiveError("exchange needs torch.distributed: call init_process_group first")
    ranks = Agreement(group, "an exchange of layouts", timeout, TensorError)
    texts = ranks.run(lambda: [_write("have", have or {}), _write("want", want or {})])
    sides = ({rank: both[side] for rank, both in texts.items()} for side in (0, 1))
    have_specs, want_specs = (merge_specs(specs_from_texts(side)) for side in sides)
    return have_specs, want_specs


def _write(side: str, specs: Specs) -> str:
    if not isinstance(specs, Mapping):
        raise TensorError(f"{side}= is a {type(specs).__name__}: {GIVE}")
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            raise TensorError(f"{side}[{quoted(name)}] is a {type(spec).__name__}: {GIVE}")
        if not isinstance(name, str):
            raise TensorError(f"the name {name!r} in {side}= is a {type(name).__name__}: {GIVE}")
        try:
            spec.layout.dims(spec.shape)
        except ReshardError as error:
            raise TensorError(f"{side}[{quoted(name)}]: {error}") from None
    return specs_to_text(specs)


def specs_to_text(specs: Specs) -> str:
    """Write specs as JSON; layouts, and specs that tensors share, are listed once."""
    layouts: dict[Layout, int] = {}
    kinds: dict[tuple[tuple[int, ...], str, int], int] = {}
    tensors: dict[str, int] = {}
    for name, spec in specs.items():
        layout = layouts.setdefault(spec.layout, len(layouts))
        tensors[name] = kinds.setdefault((spec.shape, spec.dtype, layout), len(kinds))
    data = {
        "schema": SCHEMA,
        "layouts": [layout.to_dict() for layout in layouts],
        "kinds": [*kinds],
        "names": [*tensors],
        "kind_of": [*tensors.values()],
    }
    return json.dumps(data, separators=(",", ":"))


def specs_from_texts(texts: Mapping[int, str]) -> dict[int, dict[str, TensorSpec]]:
    """Read what ranks wrote with `specs_to_text`; any other text raises a FormatError. Equal specs
    become one object, so that merging is quick."""
    layout_from, spec_from = cache(Layout.from_json), cache(_checked_spec)
    read = {text: _read(text, layout_from, spec_from) for text in dict.fromkeys(texts.values())}
    return {rank: read[text] for rank, text in texts.items()}


def _checked_spec(shape: tuple[int, ...], dtype: str, layout: Layout) -> TensorSpec:
    layout.dims(shape)
    return TensorSpec(shape, dtype, layout)


def _read(
    text: str, layout_from: Callable[[str], Layout], spec_from: Callable[..., TensorSpec]
) -> dict[str, TensorSpec]:
    if len(text) > MAX_TEXT:
        raise FormatError(f"specs of {len(text)} characters: at most {MAX_TEXT} work")
    try:
        match data := json.loads(text):
            case {
                "schema": str(schema),
                "layouts": list(layouts),
                "kinds": list(kinds),
                "names": list(names),
                "kind_of": list(kind_of),
            } if schema == SCHEMA:
                known = [layout_from(json.dumps(layout)) for layout in layouts]
                specs = [spec_from(*_kind(kind, known)) for kind in kinds]
                return _read_names(names, kind_of, specs)
    except FormatError:
        raise
    except (ReshardError, ValueError, RecursionError) as error:
        raise FormatError(f"the text of specs cannot be read: {error}") from None
    kind = data.get("schema") if isinstance(data, dict) else type(data).__name__
    raise FormatError(f'this is {quoted(kind)} and not whole "{SCHEMA}"')


def _kind(data: Any, layouts: list[Layout]) -> tuple[tuple[int, ...], str, Layout]:
    match data:
        case [list(shape), str(dtype), int(layout)] if len(shape) <= MAX_DIMS:
            if all(map(_is_size, (*shape, layout))) and layout < len(layouts):
                return tuple(shape), dtype, layouts[layout]
    raise FormatError(f"a kind is [shape, dtype, layout], and found {quoted(data)}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_names(
    names: list[Any], kind_of: list[Any], specs: list[TensorSpec]
) -> dict[str, TensorSpec]:
    if len(names) != len(kind_of):
        raise FormatError(f"{len(names)} names and {len(kind_of)} kinds of them: give one each")
    for name, kind in zip(names, kind_of, strict=True):
        if not isinstance(name, str) or not _is_size(kind) or kind >= len(specs):
            raise FormatError(
                f"{quoted(name)} is of kind {quoted(kind)}: expected a name and a number below "
                f"{len(specs)}"
            )
    read = dict(zip(names, map(specs.__getitem__, kind_of), strict=True))
    if len(read) != len(names):
        raise FormatError(f"{len(names)} names, of which {len(read)} are distinct: name each once")
    return read


MOST_NAMED, MOST_BOXES = 4, 2
"""Names and boxes that an error lists."""

NOT_JOINED = (
    "sub-meshes with pending sums or interleaved blocks must have the same axes and words to be "
    "replicas of each other"
)
RENAME = "describe it the same way on all ranks, or rename it if these are different tensors"
PLAIN = (
    "a plain tensor counts as the whole tensor: describe a shard as "
    "rs.TensorSpec(whole_shape, dtype, rs.Layout(mesh, words)), or give a DTensor"
)

ByRank = Mapping[int, TensorSpec]


@dataclass(frozen=True, slots=True)
class _Difference:
    """Two ranks whose specs of one tensor contradict each other, and the reason."""

    ranks: tuple[int, int]
    why: str


def merge_specs(specs: Mapping[int, Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """One spec per name from the specs of each rank, or a DisagreementError.

    Ranks must give the same shape and dtype, and if several ranks describe what one rank holds,
    they must agree. The merged layout is in words on a mesh of the state dict if possible,
    otherwise it lists boxes.
    """
    first = next(iter(specs.values()), {})
    if all(one is first for one in specs.values()):
        return dict(first)
    by_name: dict[str, dict[int, TensorSpec]] = {}
    for rank in sorted(specs):
        for name, spec in specs[rank].items():
            by_name.setdefault(name, {})[rank] = spec
    every = {id(spec): spec for by_rank in by_name.values() for spec in by_rank.values()}
    layouts = dict.fromkeys(spec.layout for spec in every.values())
    meshes = tuple({one.mesh: None for one in layouts if not isinstance(one, BoxLayout)})
    in_words = cache(partial(_in_words, meshes=meshes))
    merged: dict[str, TensorSpec] = {}
    differing: dict[str, _Difference] = {}
    known: dict[tuple[int, ...], TensorSpec | _Difference] = {}
    for name, by_rank in by_name.items():
        # Equal specs are one object, unless there are very many.
        key = tuple(map(id, by_rank.values()))
        if key not in known:
            known[key] = _merged(by_rank, in_words)
        result = known[key]
        if isinstance(result, _Difference):
            differing[name] = result
        else:
            merged[name] = result
    if differing:
        name, difference = next(iter(differing.items()))
        raise DisagreementError(_message([*differing], by_name[name], difference))
    return merged


def _merged(
    by_rank: ByRank, in_words: Callable[[tuple[Layout, ...]], Layout | None]
) -> TensorSpec | _Difference:
    first_rank, first = next(iter(by_rank.items()))
    described_by: dict[Layout, int] = {}
    for rank, spec in by_rank.items():
        if (spec.shape, spec.dtype) != (first.shape, first.dtype):
            return _Difference((first_rank, rank), "shape and dtype of a tensor must be the same")
        described_by.setdefault(spec.layout, rank)
    layouts = _without_repeats(described_by, first.shape)
    if isinstance(layouts, _Difference):
        return layouts
    layout = in_words(layouts) or _in_boxes(layouts, first.shape)
    if layout is None:
        return _Difference((described_by[layouts[0]], described_by[layouts[1]]), NOT_JOINED)
    return first if layout is first.layout else replace(first, layout=layout)


def _message(names: Sequence[str], by_rank: ByRank, difference: _Difference) -> str:
    # Plain tensors, which are whole on one rank, are alike.
    kinds = {
        rank: (spec.dtype, spec.shape, None if spec.layout == whole_on((rank,)) else spec.layout)
        for rank, spec in by_rank.items()
    }
    sides = []
    for dtype, shape, layout in (kinds[rank] for rank in difference.ranks):
        ranks = [rank for rank, kind in kinds.items() if kind == (dtype, shape, layout)]
        by = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
        how = "whole" if layout is None else f"{quoted(layout)} over {quoted(layout.mesh)}"
        how = quoted(repr(layout)) if isinstance(layout, BoxLayout) else how
        sides.append(f"{dtype} {shape} {how} according to {by}")
    more, some = len(names) - 1, ", ".join(map(quoted, names[1:][:MOST_NAMED]))
    others = f" (and {more} more tensor{'s' * (more > 1)}, such as {some})" if more else ""
    plain = any(kinds[rank][2] is None for rank in difference.ranks)
    return (
        f"{quoted(names[0])} is {' and '.join(sides)}{others}: {difference.why}; "
        f"{PLAIN if plain else RENAME}"
    )


def _without_repeats(
    described_by: Mapping[Layout, int], shape: tuple[int, ...]
) -> tuple[Layout, ...] | _Difference:
    """Drop layouts whose ranks all occur in larger ones, if both give each rank the same boxes."""
    if sum(len(layout.ranks) for layout in described_by) == len(_ranks(described_by)):
        return tuple(described_by)
    by_rank: dict[int, Layout] = {}
    kept = set()
    for layout in sorted(described_by, key=lambda layout: -len(layout.ranks)):
        for rank in layout.ranks:
            other = by_rank.get(rank)
            if other is not None and not holds_alike(layout, other, rank, shape):
                one, two = (_boxes_text(each, rank, shape) for each in (other, layout))
                why = f"the first gives rank {rank} {one}, the second {two}"
                return _Difference((described_by[other], described_by[layout]), why)
        if not by_rank.keys() >= set(layout.ranks):
            kept.add(layout)
            for rank in layout.ranks:
                by_rank.setdefault(rank, layout)
    return tuple(layout for layout in described_by if layout in kept)


def _boxes_text(layout: Layout, rank: int, shape: tuple[int, ...]) -> str:
    boxes = [str(piece.box) for piece in layout.pieces(rank, shape)]
    more = f" and {len(boxes) - MOST_BOXES} more boxes" if len(boxes) > MOST_BOXES else ""
    pending = f" of a pending {layout.reduce[0]}" if layout.reduce else ""
    return (", ".join(boxes[:MOST_BOXES]) or "nothing") + more + pending


REPLICA = "replica"
"""The name of the added axis if no mesh in the state dict contains the sub-meshes."""


def _in_words(layouts: Sequence[Layout], meshes: Iterable[Mesh]) -> Layout | None:
    """One layout in words, on one of these meshes if it has the sub-meshes; None unless all are
    whole, or the same words on sub-meshes that have no rank in common."""
    if len(layouts) == 1:
        return layouts[0]
    ranks = _ranks(layouts)
    if sum(len(layout.ranks) for layout in layouts) > len(ranks):
        return None
    candidates = [
        mesh for mesh in meshes if len(mesh.ranks) == len(ranks) and ranks >= set(mesh.ranks)
    ]
    if all(map(_is_whole, layouts)):
        return Layout(candidates[0], "...") if candidates else whole_on(tuple(sorted(ranks)))
    first = layouts[0]
    # What layouts of replicas on different sub-meshes have in common.
    signatures = {(type(one), str(one), *one.mesh.axes.items()) for one in layouts}
    if isinstance(first, BoxLayout) or first.words.without or len(signatures) > 1:
        return None
    subs = [layout.mesh for layout in layouts]
    mesh = next((mesh for mesh in candidates if _has_slices(mesh, subs)), None)
    return Layout(mesh or _stacked(subs), first.words)


def _in_boxes(layouts: Sequence[Layout], shape: tuple[int, ...]) -> Layout | None:
    """A layout of all boxes; None if a local tensor is not the concatenation of its boxes."""
    by_rank = {rank: layout for layout in layouts for rank in holders(layout)}
    boxes: dict[int, Sequence[Box]] = {}
    for rank, layout in by_rank.items():
        boxes[rank] = [piece.box for piece in layout.pieces(rank, shape)]
        local = layout.local_shape(rank, shape)
        if isinstance(layout, BoxLayout):
            boxes[rank] = layout.boxes[rank]
        elif not boxes[rank] and len(local) == len(shape):  # an empty one keeps its local shape
            boxes[rank] = [Box((0,) * len(shape), local)]
    union = Layout.from_boxes(shape, boxes)
    fits = all(holds_alike(layout, union, rank, shape) for rank, layout in by_rank.items())
    return union if fits else None


def _ranks(layouts: Iterable[Layout]) -> set[int]:
    return set().union(*(layout.ranks for layout in layouts))


def _is_whole(layout: Layout) -> bool:
    """Whether every rank of the layout holds the whole of any tensor."""
    words = layout.words
    parts = (*words.dims, words.on, words.reduce, words.flat, words.without)
    return not isinstance(layout, BoxLayout) and not any(parts)


def _has_slices(mesh: Mesh, subs: Sequence[Mesh]) -> bool:
    """Whether these are the slices of a mesh along some of its axes."""
    sizes = subs[0].axes
    if any(mesh.axes.get(axis) != size for axis, size in sizes.items()):
        return False
    names = list(mesh.axes)
    last = [names.index(axis) for axis in sizes]
    order = [at for at in range(len(names)) if at not in last] + last
    places = np.array(mesh.ranks).reshape(tuple(mesh.axes.values())).transpose(order)
    slices = set(map(tuple, places.reshape(len(subs), prod(sizes.values())).tolist()))
    return slices == {tuple(sub.ranks) for sub in subs}


def _stacked(subs: Sequence[Mesh]) -> Mesh:
    """A mesh with an axis of replicas added, where ranks stay ascending if possible, else first."""
    axes, name = [*subs[0].axes.items()], REPLICA
    while name in subs[0].axes:
        name += "_"
    rising = sorted((tuple(sub.ranks) for sub in subs), key=min)
    places = np.array(rising).reshape(len(subs), *subs[0].axes.values())
    for at in reversed(range(len(axes) + 1)):
        ranks = np.moveaxis(places, 0, at).ravel()
        if at == 0 or bool((np.diff(ranks) > 0).all()):
            break
    return Mesh(ranks=ranks.tolist(), **dict([*axes[:at], (name, len(subs)), *axes[at:]]))
