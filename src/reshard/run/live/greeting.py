"""Who else must be greeted, so that every rank learns whether gradients are wanted?

A rank that brings a part of the tensor knows, and says so in its greetings. A rank that gets its
part from other destinations alone, who pass it on, or whose part is empty, would hear it from
nobody who knows: the first rank that brings something greets it besides.
"""

from __future__ import annotations

from math import prod

from reshard.planning.plan import Plan
from reshard.spec import TensorSpec

__all__ = ["Greetings", "greetings_of"]

DIFFERENTIABLE = ("float", "bfloat", "complex")

Greetings = dict[int, frozenset[int]]
"""For each rank, those that greet it although they exchange nothing with it."""


def greetings_of(plan: Plan) -> Greetings:
    """The greetings that only tell about gradients; none where there can be no gradients."""
    sources = [spec for spec in plan.have.values() if spec.dtype.startswith(DIFFERENTIABLE)]
    # Of a tensor without elements everyone brings an empty part.
    least = 1 if any(prod(spec.shape) for spec in sources) else 0
    knowing = [r for r in plan.parties if any(_brings(spec, r, least) for spec in sources)]
    if not knowing:
        return {}
    ends = (plan.traffic.source.tolist(), plan.traffic.destination.tolist())
    told = {to for by, to in zip(*ends, strict=True) if by in set(knowing)}
    unaware = frozenset(plan.parties) - told - set(knowing)
    first = knowing[0]
    return {**dict.fromkeys(unaware, frozenset({first})), first: unaware} if unaware else {}


def _brings(spec: TensorSpec, rank: int, least: int) -> bool:
    holds = spec.layout.holds(rank) is not None
    return holds and prod(spec.layout.local_shape(rank, spec.shape)) >= least
