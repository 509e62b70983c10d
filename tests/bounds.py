"""What is the least that a move must send? Reference numbers by brute force, next to the oracle.

Everything is counted in elements; `held` is what `tests.oracle` returns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.oracle import Held, Indices


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
