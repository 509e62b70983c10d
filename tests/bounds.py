"""What is the least that a move must send? Reference numbers by brute force, next to the oracle.

Everything is counted in elements; `held` is what `tests.oracle` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tests.oracle import Held, Indices

if TYPE_CHECKING:
    import reshard as rs


def masks(held: Held, num_elements: int) -> Indices:
    """For every element the set of ranks that hold it, as bits (rank r is bit r, r <= 62)."""
    bits = np.zeros(num_elements, dtype=np.int64)
    for rank, indices in held.items():
        bits[indices.reshape(-1)] |= np.int64(1) << np.int64(rank)
    return bits


def num_bits(bits: Indices) -> Indices:
    return np.unpackbits(bits.view(np.uint8)).reshape(-1, 64).sum(axis=1, dtype=np.int64)


def covered(have: Held, want: Held, num_elements: int) -> bool:
    """Is every element that some rank wants held by some rank?"""
    return not np.any((masks(want, num_elements) != 0) & (masks(have, num_elements) == 0))


def needed_elements(have: Held, want: Held, num_elements: int) -> int:
    """The lower bound of what must travel: elements wanted by a rank that does not hold them."""
    return int(num_bits(masks(want, num_elements) & ~masks(have, num_elements)).sum())


def missing_by_holders(have: Held, want: Held, num_elements: int) -> dict[tuple[int, ...], int]:
    """How many distinct elements some rank wants and lacks, by the set of ranks that hold them."""
    holders = masks(have, num_elements)
    lacking = (masks(want, num_elements) & ~holders) != 0
    values, counts = np.unique(holders[lacking], return_counts=True)
    return {
        tuple(rank for rank in range(63) if int(bits) >> rank & 1): int(count)
        for bits, count in zip(values, counts, strict=True)
    }


def lp_balance(missing: Mapping[tuple[int, ...], int]) -> float:
    """The least load of the busiest sender when every missing element is sent once by a holder.

    Elements with the same holders are one class; classes may be divided at will (a linear program).
    """
    from scipy.optimize import linprog

    shares = [(group, rank) for group, holders in enumerate(missing) for rank in holders]
    ranks = sorted({rank for _, rank in shares})
    if not shares:
        return 0.0
    once = np.zeros((len(missing), len(shares) + 1))
    load = np.zeros((len(ranks), len(shares) + 1))
    load[:, -1] = -1
    for column, (group, rank) in enumerate(shares):
        once[group, column] = 1
        load[ranks.index(rank), column] = 1
    cost = np.append(np.zeros(len(shares)), 1.0)
    counts = list(missing.values())
    solved = linprog(cost, load, np.zeros(len(ranks)), once, counts, method="highs")
    if solved.status != 0:
        raise RuntimeError(f"HiGHS: {solved.message} for {missing}")
    return float(solved.fun)


def most_elements_of_sum(num: int, want: Held, num_elements: int) -> int:
    """What reduce-scatter followed by a move may send, in elements; reshard must not send more.

    An element with n addends that is wanted by w > 0 ranks takes n - 1 messages of it to be reduced
    at one of its holders, whichever that is, and at most w more to reach those that want it. (One
    less where the reducer is itself among those that want it, which is not demanded.)
    """
    wanting = num_bits(masks(want, num_elements))
    return int((wanting + num - 1)[wanting > 0].sum())


def fewest_elements_of_sum(num: int, have: Held, want: Held, num_elements: int) -> int:
    """The same at its best: an element is reduced by a rank that wants it, if one has an addend."""
    wants, holds = masks(want, num_elements), masks(have, num_elements)
    saved = (wants & holds) != 0
    return int((num_bits(wants) + num - 1 - saved)[wants != 0].sum())


def lp_links(have: Held, want: Held, num_elements: int, topology: rs.Topology) -> float:
    """The least seconds per byte of an element that the busiest link takes, whoever relays.

    Elements with the same holders and takers are one class, which may be divided at will. Each
    class enters every host that wants it and holds none of it once, through any ranks of it; it
    leaves the hosts that hold it at least once, and hosts that it has entered may send it on.
    Inside a host, holders send at least one copy, and every rank that gets it may send it on. What
    is counted in advance is less than any plan can do, so the optimum is a lower bound.
    """
    from scipy.optimize import linprog

    held, wanted = masks(have, num_elements), masks(want, num_elements)
    kinds, counts = np.unique(
        np.stack([held, wanted & ~held])[:, wanted != 0], axis=1, return_counts=True
    )
    host_of = {rank: n for n, host in enumerate(topology.hosts) for rank in host}
    columns: list[dict[tuple[str, int], float]] = []
    fixed: dict[tuple[str, int], float] = {}
    equal: list[tuple[dict[int, float], float]] = []
    least: list[tuple[dict[int, float], float]] = []
    limits: list[float] = []

    def variable(link: tuple[str, int], bandwidth: float, most: float) -> int:
        columns.append({link: 1 / bandwidth})
        limits.append(most)
        return len(columns) - 1

    def add(link: tuple[str, int], seconds: float) -> None:
        fixed[link] = fixed.get(link, 0.0) + seconds

    far, near = topology.between.bandwidth, topology.inside.bandwidth
    for (holders, lacking), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        has = [r for r in range(63) if holders >> r & 1]
        lacks = [r for r in range(63) if lacking >> r & 1]
        if not lacks:
            continue
        holding = {host_of[r] for r in has}
        needy = sorted({host_of[r] for r in lacks} - holding)
        if needy:
            out = [variable(("out", g), far, count * len(needy)) for g in sorted(holding)]
            more = [variable(("out", g), far, count * (len(needy) - 1)) for g in needy]
            equal.append((dict.fromkeys([*out, *more], 1.0), count * len(needy)))
            least.append((dict.fromkeys(out, 1.0), count))
        for g in {host_of[r] for r in lacks}:
            here = [r for r in lacks if host_of[r] == g]
            senders = []
            if g in needy:
                add(("in", g), count / far)
                enters = [variable(("got", r), -near, count) for r in here]
                equal.append((dict.fromkeys(enters, 1.0), count))
                total = count * (len(here) - 1)
            else:
                total = count * len(here)
                senders = [variable(("sent", r), near, total) for r in has if host_of[r] == g]
                least.append((dict.fromkeys(senders, 1.0), count))
            for r in here:
                add(("got", r), count / near)
            more = [variable(("sent", r), near, count * (len(here) - 1)) for r in here]
            equal.append((dict.fromkeys([*senders, *more], 1.0), total))
    links = sorted({link for column in columns for link in column} | set(fixed))
    if not links:
        return 0.0
    size = len(columns) + 1
    load = np.zeros((len(links) + len(least), size))
    bound = np.zeros(len(load))
    for row, link in enumerate(links):
        load[row, -1] = -1
        bound[row] = -fixed.get(link, 0.0)
        for column, cost in enumerate(columns):
            load[row, column] = cost.get(link, 0.0)
    for row, (terms, amount) in enumerate(least, len(links)):
        bound[row] = -amount
        for column, factor in terms.items():
            load[row, column] = -factor
    once = np.zeros((len(equal), size))
    for row, (terms, _) in enumerate(equal):
        for column, factor in terms.items():
            once[row, column] = factor
    # Seconds are tiny next to elements: scaled, so that tolerances do not matter.
    scale = far / num_elements
    load[: len(links), :-1] *= scale * num_elements
    bound[: len(links)] *= scale * num_elements
    solved = linprog(
        np.append(np.zeros(len(columns)), 1.0),
        load, bound, once, [amount for _, amount in equal],
        bounds=[*((0, most) for most in limits), (0, None)], method="highs",
    )  # fmt: skip
    if solved.status != 0:
        raise RuntimeError(f"HiGHS: {solved.message}")
    return float(solved.fun) / (scale * num_elements)
