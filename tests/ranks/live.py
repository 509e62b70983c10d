"""Inside a rank: run cases of the generators live, and compare with the simulator bit by bit.

Every rank makes and simulates its share of the cases and tells the others; the plan of a case is
made by every rank for itself, as users do.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.program import messages
from reshard.live.program.messages import Policy
from reshard.live.transport import gloo, host
from tests import checks, generate, moves, state_cases
from tests.cases import Case
from tests.ranks.rank import pool_group
from tests.state_cases import StateCase

Arrays = dict[int, dict[str, np.ndarray]]

TIMEOUT = 20.0
MOST_PROBLEMS = 5
OTHERS = {
    0: "shared", 1: "large", 2: "network", 3: "peer", 5: "many runs", 6: "straight",
}  # fmt: skip
"""Which cases also go another way than the usual one."""
EXACT = {
    "bool": 2, "uint8": 251, "int8": 120, "float16": 2039, "bfloat16": 251, "float8_e4m3fn": 13,
    "float8_e5m2": 7,
}  # fmt: skip
"""How far dtypes are made to count: not to a power of two, so that rows differ."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers, by their size."""


@dataclass(frozen=True)
class Simulated:
    """A case, what every rank gives, what it must get, and what the simulator counted."""

    seed: int
    case: Case | StateCase
    ranks: tuple[int, ...]
    memory: int
    given: Arrays
    expected: Arrays
    report: rs.SimulationReport


@dataclass(frozen=True)
class Count:
    """What one rank reports of one move."""

    seed: int
    transport: str
    bytes_sent: int
    messages_sent: int
    peak_staging: int


@dataclass(frozen=True)
class Told:
    """What a rank has to say about its cases."""

    counts: list[Count]
    problems: list[str]
    planned: dict[int, tuple[int, int, int]]
    """By seed: bytes on the wire and messages by the simulator, and the memory cap."""


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """An array of the simulator as a tensor."""
    kind: torch.dtype = getattr(torch, dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=kind)
    return torch.from_numpy(np.array(array, order="C")).view(kind)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its strides."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def numbered(shape: tuple[int, ...], dtype: str = "float32", first: int = 0) -> torch.Tensor:
    """A tensor whose elements tell where they were, as far as its dtype can count."""
    most = EXACT.get(dtype, 1 << 20)
    counted = torch.arange(first, first + math.prod(shape)) % most
    return counted.to(getattr(torch, dtype)).reshape(shape)


def local_of(full: torch.Tensor, layout: rs.Layout, rank: int) -> torch.Tensor | None:
    """What a rank holds of a tensor, as the oracle reads the layout; None if it has no part."""
    indices = moves.held(layout, tuple(full.shape)).get(rank)
    if indices is None:
        return None
    flat, at = full.contiguous().reshape(-1), torch.from_numpy(indices.reshape(-1))
    if full.element_size() in WHOLE:  # any dtype can be indexed as a number of its size
        return flat.view(WHOLE[full.element_size()])[at].view(full.dtype).reshape(indices.shape)
    rows = flat.view(torch.uint8).reshape(full.numel(), full.element_size())
    return rows[at].reshape(-1).view(full.dtype).reshape(indices.shape)


def locals_of(
    full: Mapping[str, torch.Tensor], specs: Mapping[str, rs.TensorSpec], rank: int
) -> dict[str, torch.Tensor]:
    """What a rank holds of tensors with these specs."""
    found = {name: local_of(full[name], spec.layout, rank) for name, spec in specs.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def same_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Assert that tensors are equal to the last bit, NaNs included."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    for name, tensor in wanted.items():
        got = found[name]
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name
        assert bits(got) == bits(tensor), f"{name}: {got}, not {tensor}"


def tensors_of(arrays: Mapping[str, np.ndarray], specs: Mapping) -> dict[str, torch.Tensor]:
    return {name: tensor_of(array, specs[name].dtype) for name, array in arrays.items()}


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, np.ndarray]) -> str:
    """How the tensors that came differ from what the simulator gives; empty if they do not."""
    if found.keys() != wanted.keys():
        return f"names {sorted(found)}, not {sorted(wanted)}"
    for name, array in wanted.items():
        if tuple(found[name].shape) != array.shape:
            return f"{name}: shape {tuple(found[name].shape)}, not {array.shape}"
        if bits(found[name]) != array.tobytes():
            return f"{name}: {found[name]}, not {array}"
    return ""


def plan_of(case: Case | StateCase) -> rs.Plan:
    if isinstance(case, Case):
        return checks.plan_case(case)
    options = {} if case.memory is None else {"memory": case.memory}
    have, want = state_cases.specs(case.have), state_cases.specs(case.want)
    return rs.plan(have, want, names=state_cases.names_argument(case), **options)


def simulated(seed: int, num_ranks: int, states: bool) -> Simulated | None:
    """The case of a seed; none if planning it is an error by design."""
    rng, within = Random(seed), range(num_ranks)
    case: Case | StateCase
    if states:
        case = state_cases.random_state(rng, within)
        plan = plan_of(case)
        given = moves.given(plan.have, state_cases.values(case))
    else:
        case = generate.random_case(rng, within=within)
        if case.error is not None:
            return None
        plan = plan_of(case)
        values = checks.source_values(case)
        local = checks.arrays(case.have, case.shape, values)
        given = {rank: {"tensor": array} for rank, array in local.items()}
    expected, report = rs.simulate(plan, given, report=True)
    return Simulated(seed, case, tuple(plan.ranks), plan.memory, given, expected, report)


def simulate_all(rank: int, num_ranks: int, seeds: range, states: bool) -> list[Simulated]:
    """All cases, each simulated by one rank."""
    mine = [simulated(seed, num_ranks, states) for seed in seeds[rank::num_ranks]]
    shares: list[list[Simulated | None]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(shares, mine, group=pool_group(num_ranks))
    return sorted((one for share in shares for one in share if one), key=lambda one: one.seed)


def transports_of(place: int) -> Iterable[str]:
    """Every case goes the usual way, some also straight from memory, packed, or over a network."""
    return ["auto", *([OTHERS[place % 8]] if place % 8 in OTHERS else [])]


@contextmanager
def limits_of(transport: str) -> Iterator[str]:
    """Limits that are made so low that small tensors go the ways of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        if transport in ("large", "many runs"):
            patch.setattr(host, "HOST", Policy(eager_bytes=0))
        if transport == "many runs":
            patch.setattr(messages, "MAX_PIECES", 4)
            patch.setattr(messages, "MAX_BYTES", 50)
        if transport == "straight":
            patch.setattr(gloo, "GLOO", Policy(block_bytes=1))
        yield {"large": "auto", "many runs": "peer", "straight": "network"}.get(
            transport, transport
        )


def run_cases(rank: int, num_ranks: int, seeds: range, states: bool) -> Told:
    """Run the cases of the seeds live on the first ranks."""
    told = Told([], [], {})
    for place, one in enumerate(simulate_all(rank, num_ranks, seeds, states)):
        told.planned[one.seed] = (one.report.wire_bytes, one.report.num_messages, one.memory)
        # Planning is most of the work: ranks that have no part mostly save it.
        if rank in one.ranks or place % 16 == 0:
            plan = plan_of(one.case)
            for transport in transports_of(place):
                run_case(rank, one, plan, transport, told)
        if len(told.problems) >= MOST_PROBLEMS:
            break
    return told


def run_case(
    rank: int, one: Simulated, plan: rs.Plan, transport: str, told: Told, group: Any = None
) -> None:
    """Run one case by one transport, and tell what came of it."""
    given = tensors_of(one.given.get(rank, {}), plan.have)
    try:
        with limits_of(transport) as forced:
            handle = plan.start(given, timeout=TIMEOUT, transport=forced, group=group)
            problem = difference(handle.wait(), one.expected.get(rank, {}))
        report = handle.report
        figures = report.bytes_sent, report.messages_sent, report.peak_staging
        told.counts.append(Count(one.seed, transport, *figures))
    except Exception:
        problem = traceback.format_exc(limit=-5)
    if problem:
        told.problems.append(
            f"# seed {one.seed}, {transport}, rank {rank}: {problem}\n{one.case.snippet()}"
        )


def check_told(all_told: list[Told], num_cases: int) -> None:
    """What ranks say together is what the simulator said: values, bytes, messages, memory."""
    problems = [problem for told in all_told for problem in told.problems]
    assert not problems, "\n".join(problems)
    planned = all_told[0].planned
    assert len(planned) >= num_cases
    sums: dict[tuple[int, str], list[int]] = {}
    for count in (count for told in all_told for count in told.counts):
        total = sums.setdefault((count.seed, count.transport), [0, 0])
        total[0] += count.bytes_sent
        total[1] += count.messages_sent
        cap = planned[count.seed][2]
        assert count.peak_staging <= cap, f"{count} over the cap of {cap}"
    for (seed, transport), total in sums.items():
        assert tuple(total) == planned[seed][:2], (seed, transport, total, planned[seed])
