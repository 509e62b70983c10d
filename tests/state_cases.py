"""State dicts to move: several tensors over shared meshes, some renamed, joined or cast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np

from tests import generate, oracle
from tests.cases import Side
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
class Join:
    """A tensor made of others along a dim: blocks of these sizes in turn, until all are used up."""

    dim: int
    blocks: dict[str, int]

    def code(self) -> str:
        return f"rs.join(dim={self.dim}, parts={self.blocks})"


@dataclass(frozen=True)
class StateCase:
    """A state dict to move; `names` says what a destination name is made of where it differs."""

    have: dict[str, Tensor]
    want: dict[str, Tensor]
    names: dict[str, str | Join]
    memory: int | None = None

    def snippet(self) -> str:
        """Code that plans this case; paste it anywhere."""
        lines = ["import reshard as rs"]
        for title, tensors in (("have", self.have), ("want", self.want)):
            listed = "".join(f"    {name!r}: {t.code()},\n" for name, t in tensors.items())
            lines.append(f"{title} = {{\n{listed}}}")
        names = ", ".join(
            f"{name!r}: {origin.code() if isinstance(origin, Join) else repr(origin)}"
            for name, origin in self.names.items()
        )
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

    return {
        name: rs.join(dim=origin.dim, parts=origin.blocks) if isinstance(origin, Join) else origin
        for name, origin in case.names.items()
    }


def values(case: StateCase) -> dict[str, np.ndarray]:
    """A global value for every source name, different from name to name."""
    found = {}
    for number, (name, tensor) in enumerate(case.have.items()):
        size = math.prod(tensor.shape)
        most = 2 if tensor.dtype == "bool" else 120
        drawn = np.random.default_rng(number).integers(0, most, size)
        found[name] = drawn.astype(tensor.dtype).reshape(tensor.shape)
    return found


def joined(join: Join, parts: dict[str, np.ndarray]) -> np.ndarray:
    """The blocks of the parts in turn, put together one after the other."""
    first, block = next(iter(join.blocks.items()))
    num_groups = parts[first].shape[join.dim] // block if block else 0
    pieces = [
        parts[name].take(range(group * size, (group + 1) * size), axis=join.dim)
        for group in range(num_groups)
        for name, size in join.blocks.items()
    ]
    return np.concatenate(pieces, axis=join.dim)


def expected(case: StateCase) -> dict[str, np.ndarray]:
    """The global value of every destination name."""
    given = values(case)
    found = {}
    for name, tensor in case.want.items():
        origin = case.names.get(name, name)
        value = joined(origin, given) if isinstance(origin, Join) else given[origin]
        found[name] = value.astype(tensor.dtype)
    return found


def random_state(rng: Random) -> StateCase:
    """1 to 5 destination tensors over one pair of meshes."""
    first = generate.mesh(rng)
    second = generate.other_mesh(rng, first)
    have: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    names: dict[str, str | Join] = {}
    for number in range(rng.randint(1, 5)):
        name = f"layers.{number}.w"
        dtype = rng.choice(("int32", "int64", "float32", "uint8", "bool"))
        shape = generate.shape(rng)
        sources = {name: shape}
        if shape and all(shape) and chance(rng, 25):
            names[name], shape, sources = random_join(rng, name, shape)
        elif chance(rng, 20):
            names[name] = f"old.{number}"
            sources = {f"old.{number}": shape}
        for source, of_shape in sources.items():
            have[source] = Tensor(of_shape, dtype, generate.side(rng, first, of_shape))
        other = WIDER.get(dtype, dtype) if chance(rng, 10) else dtype
        want[name] = Tensor(shape, other, generate.side(rng, second, shape))
    return StateCase(have, want, names, rng.choice(generate.MEMORY))


def random_join(
    rng: Random, name: str, shape: tuple[int, ...]
) -> tuple[Join, tuple[int, ...], dict[str, tuple[int, ...]]]:
    """A join of two or three parts, the shape it has, and the shapes of its parts."""
    dim = rng.randrange(len(shape))
    num_groups = rng.choice((1, 1, 2, 3))
    parts = [f"{name}.{part}" for part in ("q", "k", "v")[: rng.randint(2, 3)]]
    blocks = {part: rng.randint(1, 4) for part in parts}

    def with_length(length: int) -> tuple[int, ...]:
        return (*shape[:dim], length, *shape[dim + 1 :])

    sources = {part: with_length(num_groups * size) for part, size in blocks.items()}
    return Join(dim, blocks), with_length(num_groups * sum(blocks.values())), sources


def check_state(case: StateCase) -> None:
    """The central property for a state dict: every name arrives, whole and at the right place."""
    import reshard as rs

    options = {} if case.memory is None else {"memory": case.memory}
    plan = rs.plan(specs(case.have), specs(case.want), names=names_argument(case), **options)
    plan.check()
    given, wanted = values(case), expected(case)
    held: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in case.have.items():
        for rank, local in oracle.cut(given[name], tensor.side.held(tensor.shape)).items():
            held.setdefault(rank, {})[name] = local
    out = rs.simulate(plan, held)
    for name, tensor in case.want.items():
        for rank, local in oracle.cut(wanted[name], tensor.side.held(tensor.shape)).items():
            same(out[rank][name], local, rank)
    summary = plan.summary()
    assert summary.wire_bytes == summary.lower_bound_bytes
    if case.memory is not None:
        assert summary.peak_bytes <= case.memory
