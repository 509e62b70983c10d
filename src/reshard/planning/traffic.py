"""Who exchanges how much with whom, over a whole plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.planning.flow import Flow, Transfers
from reshard.planning.rounds import Slot, slice_edges
from reshard.regions import Ints

__all__ = ["Traffic", "moving", "traffic_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """Pairs of ranks that exchange anything, as columns."""

    source: Ints
    destination: Ints
    num_bytes: Ints
    first_hand: Ints
    """Bytes that come from a source tensor rather than from a rank that passes on."""
    messages: Ints
    """Rounds in which the pair exchanges something."""


def traffic_of(flows: Sequence[Flow], slots: Sequence[Slot], world: Ints) -> Traffic:
    """Add up all rows by pair of ranks."""
    none = np.zeros(0, dtype=np.int64)
    keys, sizes, first = [none], [none], [none]
    for flow in flows:
        for transfers in moving(flow):
            key, inverse = np.unique(_keys(transfers, world), return_inverse=True)
            total = np.bincount(inverse, weights=transfers.sizes).astype(np.int64)
            keys.append(key)
            sizes.append(total * flow.stack.itemsize)
            first.append(sizes[-1] if transfers.hop == 0 else sizes[-1] * 0)
    pairs, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    return Traffic(
        world[pairs // max(len(world), 1)],
        world[pairs % max(len(world), 1)],
        np.bincount(inverse, weights=np.concatenate(sizes), minlength=len(pairs)).astype(np.int64),
        np.bincount(inverse, weights=np.concatenate(first), minlength=len(pairs)).astype(np.int64),
        _messages(flows, slots, world, pairs),
    )


def moving(flow: Flow) -> Iterator[Transfers]:
    """The rows of a flow that go from one rank to another."""
    for transfers in flow.everything():
        rows = np.flatnonzero(transfers.source != transfers.destination)
        if len(rows):
            yield transfers if len(rows) == len(transfers) else transfers.take(rows)


def _keys(transfers: Transfers, world: Ints) -> Ints:
    """One number per pair of ranks."""
    source = np.searchsorted(world, transfers.source)
    return source * len(world) + np.searchsorted(world, transfers.destination)


def _messages(flows: Sequence[Flow], slots: Sequence[Slot], world: Ints, pairs: Ints) -> Ints:
    """How many rounds each pair exchanges something in; what shares a round shares a message."""
    counts = np.zeros(len(pairs), dtype=np.int64)
    shared: dict[int, list[Ints]] = {}
    for flow, slot in zip(flows, slots, strict=True):
        if slot.slices * slot.phases > 1:
            counts += _sliced_messages(flow, slot, world, pairs)
            continue
        for transfers in moving(flow):
            keys = np.unique(_keys(transfers, world))
            shared.setdefault(slot.first + transfers.hop, []).append(keys)
    for keys_of_round in shared.values():
        keys = np.unique(np.concatenate(keys_of_round))
        counts[np.searchsorted(pairs, keys)] += 1
    return counts


def _sliced_messages(flow: Flow, slot: Slot, world: Ints, pairs: Ints) -> Ints:
    """Messages of a stack that has its rounds to itself.

    A transfer of at least one unit per slice has a part in each of them; only shorter ones, and
    those that take turns in phases, need a look at every round.
    """
    steady: dict[int, Ints] = {}
    short: list[tuple[Transfers, Ints, Ints]] = []
    for transfers in moving(flow):
        place = np.searchsorted(pairs, _keys(transfers, world))
        units = flow.units(transfers.cells, slot.unit)[transfers.runs.cell]
        full = (transfers.sizes >= slot.slices * units) & (slot.phases == 1)
        steady.setdefault(transfers.hop, np.zeros(len(pairs), dtype=bool))[place[full]] = True
        rest = np.flatnonzero(~full)
        if len(rest):
            short.append((transfers.take(rest), units[rest], place[rest]))
    counts = np.zeros(len(pairs), dtype=np.int64)
    for number in range(slot.first, slot.first + slot.num_rounds):
        here = np.zeros(len(pairs), dtype=bool)
        for hop, places in steady.items():
            if slot.turn(number, hop) is not None:
                here |= places
        for transfers, units, place in short:
            here[place[_has_part(transfers, units, slot, number)]] = True
        counts += here
    return counts


def _has_part(transfers: Transfers, units: Ints, slot: Slot, number: int) -> Ints:
    """The transfers that have anything to move in a round."""
    turn = slot.turn(number, transfers.hop)
    if turn is None:
        return np.zeros(0, dtype=np.int64)
    runs, (phase, part) = transfers.runs, turn
    low = slice_edges(runs.start, runs.stop, units, slot.slices, part)
    high = slice_edges(runs.start, runs.stop, units, slot.slices, part + 1)
    return np.flatnonzero((low < high) & (transfers.part % slot.phases == phase))
