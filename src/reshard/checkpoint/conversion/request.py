"""The request of a conversion: the arguments of ``convert``, and what they say of each tensor.

Layouts come from rules, or from the caller by name or pattern. The optimizer state of a parameter
has the layout of that parameter, which is found by its name:

>>> params = Parameters({"model.w": (8, 4), "model.b": (4,)})
>>> params.followed_by("optim.state.model.w.exp_avg", (8, 4))
'model.w'
>>> params.followed_by("optim.state.w.exp_avg", (8, 4)), params.followed_by("other", (8, 4))
('model.w', None)

A change of dtype applies to parameters only, not to optimizer states:

>>> params.is_state("optim.state.model.w.step"), params.is_state("layers.0.model.w")
(True, False)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.conversion.names import Outline
from reshard.checkpoint.formats.reader import as_mesh, as_rules
from reshard.checkpoint.output import Wanted
from reshard.checkpoint.publish.journal import ALONE, Team
from reshard.checkpoint.storage.local import Storage, plain_path
from reshard.dtypes import canonical_dtype, check_cast, is_float
from reshard.errors import (
    CheckpointError,
    DtypeError,
    LayoutError,
    ReshardError,
    RulesError,
    require_type,
)
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules.language import matches, matching
from reshard.text import and_more, quoted

if TYPE_CHECKING:
    from reshard.planning.names import Names
    from reshard.rules import Rules


FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that a dtype for all parameters casts; tensors of other dtypes are unchanged."""

_OPTIMIZER = re.compile(r"optim(izer)?s?(_states?(_dict)?)?|opt_states?")
_STATE = re.compile(r"states?")


@dataclass(slots=True)
class Request:
    """The arguments of ``convert``, under the same names; texts become meshes, rules and dtypes."""

    src: str
    dst: str
    mesh: Mesh | None = None
    rules: Rules | None = None
    layouts: Mapping[str, str | Layout] = field(default_factory=dict)
    fsdp: str | None = None
    replicate: str | None = None
    format: str | None = None
    dtype: str | Mapping[str, str] | None = None
    names: Names | None = None
    drop: Sequence[str] = ()
    source_mesh: Mesh | str | None = None
    source_rules: Rules | str | Path | None = None
    memory: int | str = "256MiB"
    workers: int | None = None
    checksums: bool = True
    compare_replicas: bool = True
    max_shard_size: int | str = "5GB"
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    progress: Callable[[int, int], None] | None = None
    team: Team = ALONE

    def __post_init__(self) -> None:
        self.src, self.dst = plain_path(self.src), plain_path(self.dst)
        self.mesh, self.layouts = as_mesh(self.mesh), self.layouts or {}
        require_type(self.layouts, Mapping, "layouts=", 'give a dict, as {"*.weight": "tp -"}')
        if self.workers is not None and not (isinstance(self.workers, int) and self.workers > 0):
            raise CheckpointError(f"workers is {self.workers!r}: give a number of at least 1")
        if self.dtype is not None and not isinstance(self.dtype, Mapping):
            self.dtype = canonical_dtype(self.dtype)
            if not is_float(self.dtype):
                raise DtypeError(
                    f"dtype {self.dtype} is not floating-point: it is for all floating-point "
                    "parameters; use float32, bfloat16, float16 or another float"
                )
        if self.rules is not None:
            from reshard.rules import Rules

            rules: Any = self.rules
            self.rules = rules if isinstance(rules, Rules) else Rules.load(rules)

    @property
    def has_mesh(self) -> bool:
        return bool(self.mesh or self.layouts or (self.rules and self.rules.mesh))

    def with_config(self, storage: Storage) -> Request:
        """The request with the sizes of the model, from the config.json of the source."""
        by_config = self.mesh is not None and not self.layouts
        rules = as_rules(
            self.rules, storage, fsdp=self.fsdp, replicate=self.replicate, by_config=by_config
        )
        if rules is None and (self.fsdp or self.replicate):
            raise RulesError("fsdp and replicate are for rules and a mesh: the layouts say it all")
        return replace(self, rules=rules)

    def check_whole(self, format: str) -> None:
        """Refuse arguments about layouts where tensors are written whole."""
        useless = [n for n in ("mesh", "layouts", "fsdp", "replicate") if getattr(self, n)]
        useless += ["rules"] if self.rules is not None and not self.rules.names else []
        if useless:
            other = "give --format sharded, distcp or ranks" if self.has_mesh else "give --mesh"
            raise LayoutError(
                f"{useless[0]} would do nothing: format {format} writes whole tensors here; leave "
                f"it out, or {other}"
            )


class Parameters:
    """Parameters by every suffix of their names, to find the parameter of an optimizer state."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    @cached_property
    def _suffixes(self) -> dict[str, str | None]:
        """The parameter with each suffix; None for a suffix that several have."""
        suffixes: dict[str, str | None] = {}
        for name in self.shapes:
            parts = name.split(".")
            for at in range(1, len(parts)):
                suffix = ".".join(parts[at:])
                suffixes[suffix] = None if suffix in suffixes else name
        return suffixes | {name: name for name in self.shapes}

    def followed_by(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The parameter of this shape whose name, or longest suffix of it, is in another name."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            for at in range(len(parts) - length + 1):
                parameter = self._suffixes.get(".".join(parts[at : at + length]))
                if parameter not in (None, name) and self.shapes[parameter] == shape:
                    return parameter
        return None

    def is_state(self, name: str) -> bool:
        """Whether a name is that of an optimizer state, and not of a parameter.

        It has a word such as "optimizer", or begins with the whole name of a parameter, or has
        "state" before the name of one. The suffix alone does not show it: "norm.weight" and
        "layers.0.norm.weight" are both parameters.
        """
        words = name.split(".")
        starts = (".".join(words[:stop]) for stop in range(1, len(words)))
        if any(map(_OPTIMIZER.fullmatch, words[:-1])) or any(
            start in self.shapes for start in starts
        ):
            return True
        return any(
            self._suffixes.get(".".join(words[at:stop])) not in (None, name)
            for at, word in enumerate(words[:-1], 1)
            if _STATE.fullmatch(word)
            for stop in range(at + 1, len(words) + 1)
        )


def wanted_of(outlines: Mapping[str, Outline], request: Request, whole: bool) -> dict[str, Wanted]:
    """Every output tensor with its dtype and, unless it is whole, its layout."""
    layouts = {} if whole else _layouts(outlines, request)
    dtypes = {name: outline.dtype for name, outline in outlines.items()}
    if isinstance(request.dtype, Mapping):
        keys = _overrides("dtype", request.dtype, outlines)
        dtypes |= {name: canonical_dtype(request.dtype[key]) for name, key in keys.items()}
    elif request.dtype is not None:  # optimizer states are cast only by name
        parameters = Parameters({name: outline.shape for name, outline in outlines.items()})
        floats = [name for name, dtype in dtypes.items() if dtype in FLOATS]
        dtypes |= {name: request.dtype for name in floats if not parameters.is_state(name)}
    for name, want in dtypes.items():
        check_cast(outlines[name].dtype, want, f"tensor {quoted(name)}")
    return {
        name: Wanted(outline.shape, dtypes[name], layouts.get(name))
        for name, outline in outlines.items()
    }


def notes_of(
    wanted: Mapping[str, Wanted], outlines: Mapping[str, Outline], request: Request
) -> tuple[str, ...]:
    """Remarks for the report: axes that are split in two, ranks without a head, uncast floats."""
    layouts = {name: tensor.layout for name, tensor in wanted.items() if tensor.layout is not None}
    notes: list[str] = []
    if request.rules is not None and layouts and (request.mesh or request.rules.mesh):
        shapes = {name: wanted[name].shape for name in layouts}
        notes += request.rules.notes(layouts, shapes, request.mesh)
    # The values of floats of 8 bits or fewer mean little without their scales.
    small = [n for n, o in outlines.items() if is_float(o.dtype) and o.dtype not in FLOATS]
    kept = [name for name in small if outlines[name].dtype != request.dtype]
    if kept and isinstance(request.dtype, str):
        notes.append(
            f"{and_more([*map(quoted, kept)])} of {outlines[kept[0]].dtype} kept this dtype: a "
            f"dtype for all parameters casts {', '.join(FLOATS[:3])} and {FLOATS[3]}; "
            "dtype={name: dtype} of checkpoint.convert casts others"
        )
    return tuple(notes)


def _layouts(outlines: Mapping[str, Outline], request: Request) -> dict[str, Layout]:
    """The layout of every tensor: chosen by name, by the rules, or that of its parameter."""
    keys = _overrides("layout", request.layouts, outlines)
    rules = request.rules.fit(outlines) if request.rules is not None else None
    mesh = request.mesh or (request.rules.mesh if request.rules is not None else None)
    # One object per layout: many tensors share one, and equal objects are compared fast.
    parse = cache(partial(Layout, mesh or Mesh()))
    layouts: dict[str, Layout] = {}
    unmatched: dict[str, ReshardError] = {}
    for name, outline in outlines.items():
        if name in keys:
            layout = request.layouts[keys[name]]
            if not isinstance(layout, Layout):
                require_type(layout, str, f"the layout of {quoted(name)}", 'give words, as "tp -"')
                if mesh is None:
                    raise LayoutError(
                        f'layout "{layout}" for {quoted(name)} needs a mesh: give mesh='
                    )
                # A pattern does not shard a 0-d tensor.
                layout = parse(layout if outline.shape or keys[name] == name else "...")
            layouts[name] = layout
            continue
        try:
            if rules is None:
                raise RulesError(
                    f"no layout for {quoted(name)}: add it to layouts (--layout NAME=LAYOUT), or "
                    "give --rules (rules=)"
                )
            layouts[name] = rules.layout(name, request.mesh, outline.shape)
        except RulesError as error:
            unmatched[name] = error
    parameters = Parameters({name: outlines[name].shape for name in layouts})
    for name, unknown in unmatched.items():
        parameter = parameters.followed_by(name, outlines[name].shape)
        if parameter is not None:
            layouts[name] = layouts[parameter]
        elif prod(outlines[name].shape) <= 1:  # a single element is whole
            some = next(iter(layouts.values()), None)
            layouts[name] = Layout(request.mesh or Mesh() if some is None else some.mesh, "...")
        else:
            raise unknown
    _check_shapes(layouts, outlines)
    if rules is not None and len(keys) < len(outlines):
        rules.check_axes(layouts.values(), request.mesh)
    return layouts


def _check_shapes(layouts: Mapping[str, Layout], outlines: Mapping[str, Outline]) -> None:
    """Refuse layouts that do not fit their tensors; each pair of layout and shape is tried once."""
    pairs: dict[tuple[Layout, tuple[int, ...]], str] = {}
    for name, layout in layouts.items():
        pairs.setdefault((layout, outlines[name].shape), name)
    for (layout, shape), name in pairs.items():
        try:
            layout.dims(shape)
        except LayoutError as error:
            raise LayoutError(f"tensor {quoted(name)}: {error}") from None


def _overrides(what: str, keys: Collection[str], names: Iterable[str]) -> dict[str, str]:
    """The override for a name: the name itself, else the first pattern that it matches.

    A name or pattern that decides no tensor is an error: misspelt, or hidden by an earlier one.
    """
    overrides: dict[str, str] = {}
    for name in names:
        key = name if name in keys else next((key for key in keys if matches(key, name)), None)
        if key is not None:
            overrides[name] = key
    deciding = set(overrides.values())
    for key in (key for key in keys if key not in deciding):
        hidden = next(iter(matching(key, names)), None)
        if hidden is not None:
            raise LayoutError(
                f"{what} {quoted(key)} decides nothing: {quoted(hidden)} and all others that it "
                f"matches are matched by {quoted(overrides[hidden])} before it; give it first"
            )
        near = difflib.get_close_matches(key, [*names], n=3, cutoff=0.3)
        nearest = ", ".join(map(quoted, near or [*names][:3]))
        raise LayoutError(
            f"{what} {quoted(key)} matches no tensor: write a name or pattern such as {nearest}"
        )
    return overrides
