"""How is every tensor of an output cut, and which dtype does it get?

Layouts come from rules, or are given by name or pattern. What an optimizer keeps of a parameter is
cut as that parameter is, by its name:

>>> params = Parameters({"model.w": (8, 4), "model.b": (4,)})
>>> params.followed_by("optim.state.model.w.exp_avg", (8, 4))
'model.w'
>>> params.followed_by("optim.state.w.exp_avg", (8, 4)), params.followed_by("other", (8, 4))
('model.w', None)

A change of dtype is for parameters alone, and what looks like another one may be one itself:

>>> params.is_state("optim.state.model.w.step"), params.is_state("layers.0.model.w")
(True, False)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path

from reshard.checkpoint.conversion.names import Outline
from reshard.checkpoint.formats.output import Wanted
from reshard.checkpoint.storage.base import Storage
from reshard.checkpoint.transfer.given import as_mesh, as_rules
from reshard.dtypes import canonical_dtype, check_cast, is_float
from reshard.errors import DtypeError, LayoutError, ReshardError, RulesError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules import Rules
from reshard.rules.pattern import matches, matching
from reshard.text import quoted

__all__ = ["Cut", "Parameters", "notes_of", "uncast_note", "wanted_of"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What a change of dtype for all tensors is about; all else stays as it is."""

_OPTIMIZER = re.compile(r"optim(izer)?s?(_states?(_dict)?)?|opt_states?")
_STATE = re.compile(r"states?")


@dataclass(frozen=True, slots=True)
class Cut:
    """How the caller wants tensors cut and cast."""

    mesh: Mesh | None = None
    rules: Rules | None = None
    layouts: Mapping[str, str | Layout] = field(default_factory=dict)
    dtype: str | Mapping[str, str] | None = None
    fsdp: str | None = None
    replicate: str | None = None

    @classmethod
    def of(
        cls,
        mesh: Mesh | str | None,
        rules: Rules | str | Path | None,
        layouts: Mapping[str, str | Layout] | None,
        dtype: object,
        fsdp: str | None = None,
        replicate: str | None = None,
    ) -> Cut:
        """Read what a caller may write."""
        given = dtype is not None and not isinstance(dtype, Mapping)
        kept = canonical_dtype(dtype) if given else dtype
        if isinstance(kept, str) and not is_float(kept):
            raise DtypeError(
                f"dtype {kept} is not floating-point: it is for all floating-point parameters; "
                "use float32, bfloat16, float16 or another float"
            )
        found = rules if isinstance(rules, Rules) or rules is None else Rules.load(rules)
        return cls(as_mesh(mesh), found, layouts or {}, kept, fsdp, replicate)  # type: ignore[arg-type]

    @property
    def has_mesh(self) -> bool:
        """Whether there are ranks to cut for."""
        return bool(self.mesh or self.layouts or (self.rules and self.rules.mesh))

    def with_config(self, storage: Storage) -> Cut:
        """The same with the numbers of the model, from the config.json beside it."""
        by_config = self.mesh is not None and not self.layouts
        rules = as_rules(
            self.rules, storage, fsdp=self.fsdp, replicate=self.replicate, by_config=by_config
        )
        if rules is None and (self.fsdp or self.replicate):
            raise RulesError("fsdp and replicate are for rules and a mesh: the layouts say it all")
        return replace(self, rules=rules)

    def check_whole(self, format: str) -> None:
        """Raise for what says how to cut where tensors are written whole."""
        told = {
            "mesh": self.mesh,
            "layouts": self.layouts,
            "fsdp": self.fsdp,
            "replicate": self.replicate,
            "rules": self.rules if self.rules is not None and not self.rules.names else None,
        }
        name = next((name for name, value in told.items() if value), None)
        if name is not None:
            other = "give --format sharded, distcp or ranks" if self.has_mesh else "give --mesh"
            raise LayoutError(
                f"{name} would do nothing: format {format} writes whole tensors here; leave it "
                f"out, or {other}"
            )


class Parameters:
    """Parameters by every end of their names, to find what follows them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    @cached_property
    def _ends(self) -> dict[str, str | None]:
        """The parameter with each end; None for an end that several have."""
        ends: dict[str, str | None] = {}
        for name in self.shapes:
            parts = name.split(".")
            for at in range(1, len(parts)):
                end = ".".join(parts[at:])
                ends[end] = None if end in ends else name
        return ends | {name: name for name in self.shapes}

    def followed_by(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The parameter of the same shape whose name, or the end of it, is longest in a name."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            for at in range(len(parts) - length + 1):
                found = self._ends.get(".".join(parts[at : at + length]))
                if found is not None and found != name and self.shapes[found] == shape:
                    return found
        return None

    def is_state(self, name: str) -> bool:
        """Whether a name is that of what an optimizer keeps, and not of a parameter.

        It says so itself, or begins with all of a parameter's name (below a parameter a model has
        nothing), or has "state" before one. That it ends as a parameter does tells nothing: of
        "norm.weight" and "layers.0.norm.weight" both are parameters.
        """
        words = name.split(".")
        starts = (".".join(words[:stop]) for stop in range(1, len(words)))
        if any(map(_OPTIMIZER.fullmatch, words[:-1])) or any(
            start in self.shapes for start in starts
        ):
            return True
        places = (at for at, word in enumerate(words[:-1], 1) if _STATE.fullmatch(word))
        return any(self._begins(words[at:], name) for at in places)

    def _begins(self, words: Sequence[str], name: str) -> bool:
        """Whether words begin with the name of another tensor, or with the end of one."""
        stops = range(1, len(words) + 1)
        return any(self._ends.get(".".join(words[:stop])) not in (None, name) for stop in stops)


def wanted_of(outlines: Mapping[str, Outline], cut: Cut, whole: bool) -> dict[str, Wanted]:
    """Every tensor of the output with its dtype and, unless it is to be whole, its layout."""
    layouts = {} if whole else _layouts(outlines, cut)
    parameters = Parameters({name: outline.shape for name, outline in outlines.items()})
    dtypes = {name: _dtype(name, outline, cut, parameters) for name, outline in outlines.items()}
    if isinstance(cut.dtype, Mapping):
        _check_overrides("dtype", cut.dtype, outlines)
    return {
        name: Wanted(outline.shape, dtypes[name], layouts.get(name))
        for name, outline in outlines.items()
    }


def uncast_note(outlines: Mapping[str, Outline], cut: Cut) -> tuple[str, ...]:
    """A line about floats of 8 bits or fewer, which a dtype for all parameters leaves alone.

    Their values mean little without the scales beside them.
    """
    if not isinstance(cut.dtype, str):
        return ()
    found = [n for n, o in outlines.items() if is_float(o.dtype) and o.dtype not in FLOATS]
    kept = [name for name in found if outlines[name].dtype != cut.dtype]
    if not kept:
        return ()
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    note = (
        f"{quoted(kept[0])}{more} of {outlines[kept[0]].dtype} kept this dtype: a dtype for all "
        f"parameters casts {', '.join(FLOATS[:3])} and {FLOATS[3]}; dtype={{name: dtype}} of "
        "checkpoint.convert casts others"
    )
    return (note,)


def notes_of(wanted: Mapping[str, Wanted], cut: Cut) -> tuple[str, ...]:
    """What the report says of the layouts: axes that are read as two, ranks without a head."""
    layouts = {name: tensor.layout for name, tensor in wanted.items() if tensor.layout is not None}
    if cut.rules is None or not layouts or not (cut.mesh or cut.rules.mesh):
        return ()
    shapes = {name: wanted[name].shape for name in layouts}
    return tuple(cut.rules.notes(layouts, shapes, cut.mesh))


def _layouts(outlines: Mapping[str, Outline], cut: Cut) -> dict[str, Layout]:
    _check_overrides("layout", cut.layouts, outlines)
    given = {name: _given(name, outline, cut) for name, outline in outlines.items()}
    found = {name: layout for name, layout in given.items() if layout is not None}
    open_names = [name for name in outlines if name not in found]
    rules = cut.rules.fit(outlines) if cut.rules is not None else None
    unmatched: dict[str, ReshardError] = {}
    for name in open_names:
        try:
            found[name] = _by_rules(name, outlines[name], rules, cut)
        except RulesError as error:
            unmatched[name] = error
    parameters = Parameters({name: outlines[name].shape for name in found})
    for name, unknown in unmatched.items():
        found[name] = _following(name, outlines[name], parameters, found, cut, unknown)
    for name, layout in found.items():
        _check(name, outlines[name], layout)
    if rules is not None and open_names:
        rules.check_axes(found.values(), cut.mesh)
    return found


def _check_overrides(what: str, keys: Iterable[str], names: Iterable[str]) -> None:
    """Raise for a name or a pattern that decides about no tensor: misspelt, or behind another."""
    keys = [*keys]
    deciding = {_override(name, keys) for name in names}
    for key in keys:
        if key in deciding:
            continue
        hidden = next(iter(matching(key, names)), None)
        if hidden is not None:
            raise LayoutError(
                f"{what} {quoted(key)} decides nothing: {quoted(hidden)} and all others that it "
                f"matches are matched by {quoted(str(_override(hidden, keys)))} before it; give it "
                "first"
            )
        near = difflib.get_close_matches(key, [*names], n=3, cutoff=0.3)
        nearest = ", ".join(map(quoted, near)) or "none"
        raise LayoutError(
            f"{what} {quoted(key)} matches no tensor: the nearest names are {nearest}"
        )


def _override(name: str, keys: Collection[str]) -> str | None:
    """The override for a name: the name itself, else the first pattern that it matches."""
    if name in keys:
        return name
    return next((key for key in keys if matches(key, name)), None)


def _given(name: str, outline: Outline, cut: Cut) -> Layout | None:
    """The layout that the caller gave for a name, or for a pattern that it matches.

    A pattern cuts no 0-d tensor: these are whole.
    """
    key = _override(name, cut.layouts)
    if key is None:
        return None
    layout = cut.layouts[key]
    if isinstance(layout, Layout):
        return layout
    mesh = cut.mesh or (cut.rules.mesh if cut.rules is not None else None)
    if mesh is None:
        raise LayoutError(f'layout "{layout}" for {quoted(name)} needs a mesh: give mesh=')
    return _layout(mesh, layout if outline.shape or key == name else "...")


@lru_cache(maxsize=1024)
def _layout(mesh: Mesh, text: str) -> Layout:
    """One object per layout: many tensors share one, and comparing them is then quick."""
    return Layout(mesh, text)


def _by_rules(name: str, outline: Outline, rules: Rules | None, cut: Cut) -> Layout:
    if rules is None:
        raise RulesError(f"no layout for {quoted(name)}: add it to layouts, or give rules")
    return rules.layout(name, cut.mesh, outline.shape)


def _following(
    name: str,
    outline: Outline,
    parameters: Parameters,
    found: Mapping[str, Layout],
    cut: Cut,
    error: ReshardError,
) -> Layout:
    """The layout of the parameter that a state belongs to; single numbers are whole."""
    leader = parameters.followed_by(name, outline.shape)
    if leader is not None:
        return found[leader]
    if prod(outline.shape) <= 1:
        some = next(iter(found.values()), None)
        mesh = some.mesh if some is not None else cut.mesh or Mesh()
        return Layout(mesh, "...")
    raise error


def _check(name: str, outline: Outline, layout: Layout) -> None:
    try:
        layout.dims(outline.shape)
    except LayoutError as error:
        raise LayoutError(f"tensor {quoted(name)}: {error}") from None


def _dtype(name: str, outline: Outline, cut: Cut, parameters: Parameters) -> str:
    """The dtype of an output tensor; states of an optimizer keep theirs unless they are named."""
    match cut.dtype:
        case str() as dtype:
            is_cast = outline.dtype in FLOATS and not parameters.is_state(name)
            want = dtype if is_cast else outline.dtype
        case None:
            return outline.dtype
        case patterns:
            key = _override(name, patterns)
            want = outline.dtype if key is None else canonical_dtype(patterns[key])
    check_cast(outline.dtype, want, f"tensor {quoted(name)}")
    return want
