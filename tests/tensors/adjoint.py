"""Inside a rank: is the backward of a move its adjoint?

A tensor is one logical value, and the loss is the sum of all ranks' losses. So for any y the sum
over ranks of <move(x), y> equals <x, backward(y)>, every element of x counted once, however many
ranks hold it, and every addend of a pending sum for itself. Expected values come from the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
import torch.distributed as dist

import reshard as rs
from tests import checks, generate
from tests.cases import Case
from tests.ranks.rank import pool_group

Arrays = dict[int, np.ndarray]

TIMEOUT = 30.0
RELATIVE = 1e-12
MOST_PROBLEMS = 5


@dataclass(frozen=True)
class Expected:
    """A case with what every rank brings, gets, is told, and must be told back."""

    seed: int
    case: Case
    sources: Arrays
    results: Arrays
    gradients: dict[str, Arrays]
    """What every rank finds its result is worth, by the rule for replicas."""
    backs: dict[str, Arrays]
    first: Arrays
    """1 where the rank is the first to hold an element of an addend, else 0."""


@dataclass(frozen=True)
class Products:
    """One rank's part of <move(x), y> and of <x, backward(y)>."""

    forth: float
    back: float
    scale: float


@dataclass(frozen=True)
class Told:
    """What a rank has to say: products by seed and rule, and what went wrong."""

    products: dict[tuple[int, str], Products]
    problems: list[str]


def case_of(seed: int, num_ranks: int) -> Case | None:
    """The case of a seed, in float64; none if it has no gradients."""
    case = generate.random_case(Random(seed), within=range(num_ranks))
    op, pending = case.have.addends()[0], case.want.addends()[0]
    if case.error is not None or op not in (None, "sum", "avg") or pending is not None:
        return None
    if not case.have.held(case.shape):
        return None  # all ranks with a part of the source are lost, so nothing requires gradients
    return replace(case, dtype="float64")


def expected(seed: int, num_ranks: int) -> Expected | None:
    """Random values for a case, and what must become of them."""
    case = case_of(seed, num_ranks)
    if case is None:
        return None
    rng, size = np.random.default_rng(seed), math.prod(case.shape)
    addends = rng.standard_normal((case.have.num_addends, size))
    held = case.want.held(case.shape)
    whole = rng.standard_normal(size)
    gradients = {
        "sum": {rank: rng.standard_normal(at.shape) for rank, at in held.items()},
        "replicated": {rank: whole[at] for rank, at in held.items()},
    }
    totals = {"sum": np.zeros(size), "replicated": np.zeros(size)}
    for rank, at in held.items():
        np.add.at(totals["sum"], at, gradients["sum"][rank])
        totals["replicated"][at] = whole[at]
    op, number = case.have.addends()
    scale = 1 / case.have.num_addends if op == "avg" else 1.0
    sources = case.have.held(case.shape)
    backs = {
        rule: {rank: scale * total[at] for rank, at in sources.items()}
        for rule, total in totals.items()
    }
    return Expected(
        seed,
        case,
        checks.arrays(case.have, case.shape, addends),
        checks.expected(case, addends),
        gradients,
        backs,
        first_holders(sources, number, size),
    )


def first_holders(held: Arrays, number: dict[int, int], size: int) -> Arrays:
    """Where each rank is the first to hold an element of its addend."""
    seen = np.zeros((1 + max(number.values(), default=0), size), dtype=bool)
    found = {}
    for rank, at in sorted(held.items()):
        found[rank] = (~seen[number[rank]][at]).astype(float)
        seen[number[rank]][at] = True
    return found


def expect_all(rank: int, num_ranks: int, seeds: range) -> list[Expected]:
    """All cases, each worked out by one rank."""
    mine = [expected(seed, num_ranks) for seed in seeds[rank::num_ranks]]
    shares: list[list[Expected | None]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(shares, mine, group=pool_group(num_ranks))
    return sorted((one for share in shares for one in share if one), key=lambda one: one.seed)


def run_cases(rank: int, num_ranks: int, seeds: range) -> Told:
    """Move every case forth and back, by both rules."""
    told = Told({}, [])
    for one in expect_all(rank, num_ranks, seeds):
        for rule in ("sum", "replicated"):
            try:
                told.products[one.seed, rule] = run_case(rank, one, rule)
            except Exception as error:
                text = f"# seed {one.seed}, {rule}, rank {rank}: {error!r}"
                told.problems.append(f"{text}\n{one.case.snippet()}")
        if len(told.problems) >= MOST_PROBLEMS:
            break
    return told


def run_case(rank: int, one: Expected, rule: str, device: torch.device | None = None) -> Products:
    """Forth and back on one rank, compared with the oracle."""
    case, have, want = one.case, *sides(one.case)
    source = tensor(one.sources.get(rank), grad=True, device=device)
    memory = case.memory
    moved = rs.move(
        source, have, want, shape=case.shape, dtype="float64", grad=rule, memory=memory,
        timeout=TIMEOUT, device=device,
    )  # fmt: skip
    gradient = tensor(one.gradients[rule].get(rank), device=device)
    if gradient is None:
        rs.backward(moved)
    else:
        close(moved, one.results[rank])
        torch.autograd.backward(moved, gradient)
    forth = back = scale = 0.0
    if gradient is not None:
        forth = float((moved.detach() * gradient).sum())
        scale = float((moved.detach() * gradient).abs().sum())
    if source is not None:
        close(source.grad, one.backs[rule][rank])
        first = tensor(one.first[rank], device=device)
        back = float((source.detach() * source.grad * first).sum())
    return Products(forth, back, scale)


def sides(case: Case) -> tuple[rs.Layout, rs.Layout]:
    return checks.build(case.have, case.shape), checks.build(case.want, case.shape)


def tensor(
    array: np.ndarray | None, grad: bool = False, device: torch.device | None = None
) -> torch.Tensor | None:
    if array is None:
        return None
    return torch.from_numpy(np.array(array, order="C")).to(device).requires_grad_(grad)


def close(found: torch.Tensor, wanted: np.ndarray) -> None:
    assert tuple(found.shape) == wanted.shape, f"shape {tuple(found.shape)}, not {wanted.shape}"
    off = np.abs(found.detach().cpu().numpy() - wanted)
    limit = RELATIVE * (1 + np.abs(wanted).max(initial=0.0))
    assert off.max(initial=0.0) <= limit, f"off by {off.max()}: {found}, not {wanted}"


def check_told(all_told: list[Told], num_cases: int) -> None:
    """No rank saw anything wrong, and the products are equal over all ranks."""
    problems = [problem for told in all_told for problem in told.problems]
    assert not problems, "\n".join(problems)
    keys = all_told[0].products.keys()
    assert len(keys) >= 2 * num_cases
    for seed, rule in keys:
        # Replicas that all have the same gradient are not added up: each is checked for itself.
        if rule == "sum":
            parts = [told.products[seed, rule] for told in all_told]
            forth, back, scale = (
                sum(getattr(part, name) for part in parts) for name in ("forth", "back", "scale")
            )
            assert abs(forth - back) <= RELATIVE * (1 + scale), (seed, forth, back)
