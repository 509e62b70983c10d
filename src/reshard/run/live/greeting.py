"""Who else must be greeted, so that every rank learns whether gradients are wanted?

A rank that brings a part of the tensor knows, and says so in its greetings. A rank that gets its
part from other destinations alone, who pass it on, would hear it from nobody who knows: the first
rank that sends anything of its own greets it besides.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from reshard.planning.plan import Plan

__all__ = ["greeted_besides"]

_known: WeakKeyDictionary[Plan, dict[int, frozenset[int]]] = WeakKeyDictionary()


def greeted_besides(plan: Plan, rank: int) -> frozenset[int]:
    """The ranks that greet this one although they exchange nothing with it."""
    found = _known.get(plan)
    if found is None:
        found = _known[plan] = _greetings(plan)
    return found.get(rank, frozenset())


def _greetings(plan: Plan) -> dict[int, frozenset[int]]:
    traffic = plan.traffic
    knowing = {int(rank) for rank in traffic.source[traffic.first_hand > 0]}
    pairs = list(zip(traffic.source.tolist(), traffic.destination.tolist(), strict=True))
    told = {to for by, to in pairs if by in knowing} | knowing
    unaware = {to for _, to in pairs} - told
    if not unaware:
        return {}
    first = frozenset({min(knowing)})
    return {**dict.fromkeys(unaware, first), min(knowing): frozenset(unaware)}
