"""State dicts to move: several tensors over shared meshes, some renamed, joined or cast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from tests import generate, oracle
from tests.cases import DTYPES, Side
from tests.checks import build, same
from tests.generate import chance

WIDER = {"int32": "int64", "float32": "float64", "uint8": "int32"}


@dataclass(frozen=True)
class Tensor:
    """One name of a state dict."""

    shape: tuple[int, ...]
    dtype: str
    side: Side

    def code(self) -> str:
        layout = self.side.code(self.shape)
        return f"rs.TensorSpec(shape={self.shape}, dtype={self.dtype!r}, layout={layout})"


@dataclass(frozen=True)
class Origin:
    """What a destination tensor is made of: a call of `reshard` and what it means in numpy.

    `how` is one of join, interleave, stack, crop, index, pad and rename; `numbers` are the rows of
    each part, the span, the index or the padded size.
    """

    how: str
    names: tuple[str, ...]
    dim: int = 0
    numbers: tuple[int, ...] = ()

    def code(self) -> str:
        names = ", ".join(map(repr, self.names))
        match self.how:
            case "rename":
                return names
            case "join" | "stack":
                return f"rs.{self.how}({names}, dim={self.dim})"
            case "interleave":
                prefix = self.names[0].rpartition(".")[0]
                rows = (f"{name.rpartition('.')[2]}={rows}" for name, rows in self.rows())
                return f"rs.join(dim={self.dim}, source='{prefix}.{{part}}', {', '.join(rows)})"
        value = repr(self.numbers) if self.how == "crop" else str(self.numbers[0])
        return f"rs.take({names}, {self.how}={{{self.dim}: {value}}})"

    def rows(self) -> Iterator[tuple[str, int]]:
        return zip(self.names, self.numbers, strict=True)

    def value(self, given: Mapping[str, np.ndarray], fill: int = 0) -> np.ndarray:
        parts, dim = [given[name] for name in self.names], self.dim
        match self.how:
            case "join":
                return np.concatenate(parts, axis=dim)
            case "stack":
                return np.stack(parts, axis=dim)
            case "interleave":
                return np.concatenate(list(self.groups(given)), axis=dim)
            case "crop":
                return parts[0].take(range(*self.numbers), axis=dim)
            case "index":
                return parts[0].take(self.numbers[0], axis=dim)
            case "pad":
                more = [(0, 0)] * parts[0].ndim
                more[dim] = (0, self.numbers[0] - parts[0].shape[dim])
                return np.pad(parts[0], more, constant_values=fill)
        return parts[0]

    def groups(self, given: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
        """So many rows of every part in turn, until all are used up."""
        for group in range(given[self.names[0]].shape[self.dim] // self.numbers[0]):
            for name, rows in self.rows():
                yield given[name].take(range(group * rows, (group + 1) * rows), axis=self.dim)


@dataclass(frozen=True)
class StateCase:
    """A state dict to move; `names` says what a destination name is made of where it differs."""

    have: dict[str, Tensor]
    want: dict[str, Tensor]
    names: dict[str, Origin]
    memory: int | None = None

    def snippet(self) -> str:
        """Code that plans this case; paste it anywhere."""
        lines = ["import reshard as rs"]
        for title, tensors in (("have", self.have), ("want", self.want)):
            listed = "".join(f"    {name!r}: {t.code()},\n" for name, t in tensors.items())
            lines.append(f"{title} = {{\n{listed}}}")
        names = ", ".join(f"{name!r}: {origin.code()}" for name, origin in self.names.items())
        memory = "" if self.memory is None else f", memory={self.memory}"
        lines.append(f"p = rs.plan(have, want, names={{{names}}}{memory})\np.check()")
        return "\n".join(lines) + "\n"


def specs(tensors: dict[str, Tensor]) -> dict:
    import reshard as rs

    return {
        name: rs.TensorSpec(shape=t.shape, dtype=t.dtype, layout=build(t.side, t.shape))
        for name, t in tensors.items()
    }


def names_argument(case: StateCase) -> dict:
    import reshard as rs

    return {name: eval(origin.code(), {"rs": rs}) for name, origin in case.names.items()}


def values(case: StateCase) -> dict[str, np.ndarray]:
    """A global value for every source name, different from name to name."""
    found = {}
    for number, (name, tensor) in enumerate(case.have.items()):
        size = math.prod(tensor.shape)
        most = 2 if tensor.dtype == "bool" else 120
        drawn = np.random.default_rng(number).integers(0, most, size)
        found[name] = drawn.astype(tensor.dtype).reshape(tensor.shape)
    return found


def made(case: StateCase, given: Mapping[str, np.ndarray], fill: int = 0) -> dict:
    """Every destination tensor, put together from these source tensors."""
    origins = {name: case.names.get(name, Origin("rename", (name,))) for name in case.want}
    return {name: origin.value(given, fill) for name, origin in origins.items()}


def needed_bytes(case: StateCase) -> int:
    """What must travel if a rank fetches every name by itself, cast where that saves bytes."""
    sources, held, start = {}, {}, 0
    itemsize = []
    for name, tensor in case.have.items():
        size = math.prod(tensor.shape)
        sources[name] = np.arange(start, start + size).reshape(tensor.shape)
        for rank, at in tensor.side.held(tensor.shape).items():
            held.setdefault(rank, set()).update((start + at).reshape(-1).tolist())
        itemsize += [DTYPES[tensor.dtype]] * size
        start += size
    total = 0
    for name, ids in made(case, sources, fill=-1).items():
        tensor = case.want[name]
        for rank, local in oracle.cut(ids, tensor.side.held(tensor.shape)).items():
            lacking = set(local.reshape(-1).tolist()) - held.get(rank, set()) - {-1}
            total += sum(min(itemsize[id_], DTYPES[tensor.dtype]) for id_ in lacking)
    return total


def random_state(rng: Random, within: range = generate.RANK_IDS) -> StateCase:
    """1 to 5 destination tensors over one pair of meshes."""
    first = generate.mesh(rng, within)
    second = generate.other_mesh(rng, first, within)
    have: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    names: dict[str, Origin] = {}
    for number in range(rng.randint(1, 5)):
        name = f"layers.{number}.w"
        dtype = rng.choice(("int32", "int64", "float32", "uint8", "bool"))
        shape = generate.shape(rng)
        sources = {name: shape}
        if chance(rng, 50):
            names[name], sources = random_origin(rng, f"old.{number}", shape)
        for source, of_shape in sources.items():
            have[source] = Tensor(of_shape, dtype, generate.side(rng, first, of_shape))
        empty = {source: np.empty(of_shape, dtype=bool) for source, of_shape in sources.items()}
        shape = names[name].value(empty).shape if name in names else shape
        other = WIDER.get(dtype, dtype) if chance(rng, 10) else dtype
        want[name] = Tensor(shape, other, generate.side(rng, second, shape))
    return StateCase(have, want, names, rng.choice(generate.MEMORY))


def random_origin(
    rng: Random, prefix: str, shape: tuple[int, ...]
) -> tuple[Origin, dict[str, tuple[int, ...]]]:
    """What to make a tensor of, and the names and shapes of the sources."""
    if not shape or 0 in shape:
        return Origin("rename", (prefix,)), {prefix: shape}
    dim = rng.randrange(len(shape))
    length = shape[dim]
    how = rng.choice(("rename", "join", "interleave", "stack", "crop", "index", "pad"))
    parts = tuple(f"{prefix}.{part}" for part in rng.sample("qkv", rng.randint(2, 3)))
    if how == "stack":
        return Origin(how, parts, rng.randint(0, len(shape))), dict.fromkeys(parts, shape)
    if how in ("join", "interleave"):
        rows = tuple(rng.randint(1, 4) for _ in parts)
        num_groups = rng.randint(1, 3)
        sources = {
            name: (*shape[:dim], num_groups * size, *shape[dim + 1 :])
            for name, size in zip(parts, rows, strict=True)
        }
        return Origin(how, parts, dim, rows if how == "interleave" else ()), sources
    numbers = {
        "crop": tuple(sorted((rng.randint(0, length), rng.randint(0, length)))),
        "index": (rng.randrange(length),),
        "pad": (length + rng.randint(0, 5),),
    }
    return Origin(how, (prefix,), dim, numbers.get(how, ())), {prefix: shape}


def check_state(case: StateCase) -> None:
    """The central property for a state dict: every name arrives, whole and at the right place."""
    import reshard as rs

    options = {} if case.memory is None else {"memory": case.memory}
    plan = rs.plan(specs(case.have), specs(case.want), names=names_argument(case), **options)
    plan.check()
    given = values(case)
    wanted = made(case, given)
    held: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in case.have.items():
        for rank, local in oracle.cut(given[name], tensor.side.held(tensor.shape)).items():
            held.setdefault(rank, {})[name] = local
    out = rs.simulate(plan, held)
    for name, tensor in case.want.items():
        for rank, local in oracle.cut(
            wanted[name].astype(tensor.dtype), tensor.side.held(tensor.shape)
        ).items():
            same(out[rank][name], local, rank)
    summary = plan.summary()
    needed = needed_bytes(case)
    assert summary.wire_bytes == summary.lower_bound_bytes == needed, f"{summary}, not {needed}"
    if case.memory is not None:
        assert summary.peak_bytes <= case.memory
