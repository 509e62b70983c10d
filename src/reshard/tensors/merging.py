"""One state dict from what each rank says of its tensors, or an error that says who differs.

In a state dict one name is one tensor. So what ranks say of a name on sub-meshes without a rank in
common are replicas, as are plain tensors of one name on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import DisagreementError, quoted
from reshard.layout import BoxLayout, Layout
from reshard.mesh import format_ranks
from reshard.spec import TensorSpec
from reshard.tensors.reading import whole_on
from reshard.tensors.replicas import Contradiction, in_boxes, in_words, without_repeats

__all__ = ["merge_specs"]

MOST_NAMED = 4
"""How many tensors an error names."""

MOST_BOXES = 2
"""How many boxes of a rank an error lists."""

NOT_JOINED = (
    "sub-meshes with pending sums or interleaved blocks must have the same axes and words to be "
    "replicas of each other"
)
PLAIN = (
    "a plain tensor counts as the whole tensor: describe a shard as "
    "rs.TensorSpec(whole_shape, dtype, rs.Layout(mesh, words)), or give a DTensor"
)

Said = Mapping[int, TensorSpec]
"""What each rank says of one tensor."""


def merge_specs(specs: Mapping[int, Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """One spec per name from what each rank says, or a DisagreementError.

    Ranks must agree on shape and dtype, and on what a rank holds that several of them speak of. The
    merged layout is in words, on a mesh of the state dict, where that is possible.
    """
    said: dict[str, dict[int, TensorSpec]] = {}
    for rank in sorted(specs):
        for name, spec in specs[rank].items():
            said.setdefault(name, {})[rank] = spec
    merger = _Merger(said)
    merged, differing = {}, {}
    for name, by_rank in said.items():
        result = merger.merged(by_rank)
        if isinstance(result, TensorSpec):
            merged[name] = result
        else:
            differing[name] = result
    if differing:
        names = list(differing)
        raise DisagreementError(_message(names, said[names[0]], differing[names[0]]))
    return merged


@dataclass(frozen=True, slots=True)
class _Difference:
    """Two specs of one tensor that cannot both be right, and why."""

    one: TensorSpec
    other: TensorSpec
    why: str


class _Merger:
    """Merges tensor by tensor; equal questions are answered once."""

    def __init__(self, said: Mapping[str, Said]) -> None:
        self._known: dict[tuple[int, ...], TensorSpec | _Difference] = {}
        self._in_words: dict[tuple[Layout, ...], Layout | None] = {}
        specs = {id(spec): spec for by_rank in said.values() for spec in by_rank.values()}
        layouts = dict.fromkeys(spec.layout for spec in specs.values())
        self._meshes = dict.fromkeys(
            layout.mesh for layout in layouts if not isinstance(layout, BoxLayout)
        )

    def merged(self, said: Said) -> TensorSpec | _Difference:
        """The one spec that ranks describe together, or what they differ in."""
        first = next(iter(said.values()))
        if all(spec is first for spec in said.values()):
            return first
        # Equal specs are one object, unless there are very many.
        key = tuple(map(id, said.values()))
        if key not in self._known:
            self._known[key] = self._merged(list({id(one): one for one in said.values()}.values()))
        return self._known[key]

    def _merged(self, specs: Sequence[TensorSpec]) -> TensorSpec | _Difference:
        first = specs[0]
        for spec in specs:
            if (spec.shape, spec.dtype) != (first.shape, first.dtype):
                return _Difference(first, spec, "shape and dtype of a tensor must be the same")
        layouts = list(dict.fromkeys(spec.layout for spec in specs))
        found = without_repeats(layouts, first.shape)
        if isinstance(found, Contradiction):
            why = _contradiction(found, first.shape)
            return _Difference(_with(first, found.one), _with(first, found.other), why)
        if found not in self._in_words:
            self._in_words[found] = in_words(found, self._meshes)
        layout = self._in_words[found] or in_boxes(found, first.shape)
        if layout is None:
            return _Difference(_with(first, found[0]), _with(first, found[1]), NOT_JOINED)
        return _with(first, layout)


def _with(spec: TensorSpec, layout: Layout) -> TensorSpec:
    return spec if layout is spec.layout else replace(spec, layout=layout)


def _contradiction(found: Contradiction, shape: tuple[int, ...]) -> str:
    one, other = (_held(layout, found.rank, shape) for layout in (found.one, found.other))
    return f"rank {found.rank} holds {one} by the one and {other} by the other"


def _held(layout: Layout, rank: int, shape: tuple[int, ...]) -> str:
    boxes = [str(piece.box) for piece in layout.pieces(rank, shape)]
    more = f" and {len(boxes) - MOST_BOXES} more boxes" if len(boxes) > MOST_BOXES else ""
    pending = f" of a pending {layout.reduce[0]}" if layout.reduce else ""
    return (", ".join(boxes[:MOST_BOXES]) or "nothing") + more + pending


def _message(names: Sequence[str], said: Said, found: _Difference) -> str:
    one, other = (_who_says(said, spec) for spec in (found.one, found.other))
    plural = "s" if len(names) > 2 else ""
    more = f" (and {len(names) - 1} more tensor{plural}, such as {_some(names[1:])})"
    plain = any(_is_plain(*next(iter(group.items()))) for group in (one, other))
    advice = PLAIN if plain else "describe it alike on all ranks, or give other tensors other names"
    both = f"{_text(one)} and {_text(other)}{more if names[1:] else ''}"
    return f"{quoted(names[0])} is {both}: {found.why}; {advice}"


def _who_says(said: Said, wanted: TensorSpec) -> Said:
    """The ranks that say the same as one of them; all ranks with plain tensors say the same."""
    rank = next(rank for rank, spec in said.items() if _equal(spec, wanted))
    plain = _is_plain(rank, said[rank])
    alike = (wanted.shape, wanted.dtype)
    return {
        rank: spec
        for rank, spec in said.items()
        if _equal(spec, wanted)
        or (plain and _is_plain(rank, spec) and (spec.shape, spec.dtype) == alike)
    }


def _equal(spec: TensorSpec, other: TensorSpec) -> bool:
    """Whether two specs are the same in every word, which is quicker than ``==``."""
    mine, theirs = (spec.shape, spec.dtype), (other.shape, other.dtype)
    return mine == theirs and spec.layout == other.layout


def _is_plain(rank: int, spec: TensorSpec) -> bool:
    """Whether a rank says that it holds the whole tensor, and speaks of no other rank."""
    return spec.layout == whole_on((rank,))


def _text(said: Said) -> str:
    rank, spec = next(iter(said.items()))
    layout = spec.layout
    if _is_plain(rank, spec):
        how = "whole"
    elif isinstance(layout, BoxLayout):
        how = quoted(repr(layout))
    else:
        how = f"{quoted(layout)} over {quoted(layout.mesh)}"
    ranks = f"rank{'s' if len(said) > 1 else ''} {format_ranks(tuple(said))}"
    return f"{spec.dtype} {spec.shape} {how} according to {ranks}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(quoted(name) for name in names[:MOST_NAMED])
