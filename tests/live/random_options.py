"""Inside a rank: random moves with random options, compared with what the oracle cuts."""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from reshard.live.session import rendezvous
from tests import checks
from tests.generate import chance
from tests.live.layout_oracle import Moved, random_moved
from tests.ranks.live import bits, limits_of
from tests.ranks.rank import pool_group

TIMEOUT = 20.0
MOST_ERRORS = 2
"""Calls that raise before a rank gives up; after wrong values the ranks go on together."""
TRANSPORTS = ("auto", "peer", "shared", "network")
LIMITS = ("", "", "large", "many runs", "straight")
OWN_PLANS = 4
"""Of so many cases one is planned by every rank for itself, the others by one rank for all."""
STYLES = ("plain", "plain", "transposed", "stepped", "inside")


@dataclass(frozen=True)
class CallSpec:
    """One call, the same on all ranks but for what is given by rank."""

    moved: dict[str, Moved]
    memory: int | None
    transport: str
    atomic: bool
    check: str
    via: str
    """``move``, ``run``, ``start``."""
    times: int
    sources: tuple[str, ...]
    """How the source tensors of each rank are stored."""
    into: tuple[str, ...]
    """How the destination tensors of each rank are stored; empty where it gives none."""
    donate: tuple[bool, ...]
    leave_out: tuple[bool, ...]
    """Whether a rank leaves out its empty parts."""


@dataclass(frozen=True)
class Batch:
    """Calls that are in flight together."""

    seed: int
    calls: tuple[CallSpec, ...]
    same_plan: bool
    """Whether all run the plan of the first."""
    limits: str
    hosts: int
    thread: bool
    order: tuple[int, ...]
    """In which the calls are waited for."""


@dataclass
class Found:
    """What a rank has to say about its batches."""

    problems: list[str] = field(default_factory=list)
    num_batches: int = 0
    num_calls: int = 0
    """Calls in which this rank had a part."""
    sent: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    """Bytes and messages that this rank sent, by seed, call and repeat."""
    planned: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    """The same of all ranks, as planned."""


def random_call(rng: Random, num_ranks: int, several: bool) -> CallSpec:
    count = rng.choice((1, 1, 1, 2, 3))
    moved = {f"t{n}": random_moved(rng, num_ranks) for n in range(count)}
    if count == 1:
        moved = {"tensor": moved["t0"]}
    memory = rng.choice([one.case.memory for one in moved.values()])
    vias = ["start"] * 3 if several else ["run", "start"] + ["move"] * 2 * (count == 1)
    plain = chance(rng, 30)  # the usual move, without any option
    styles = ("plain",) if plain else STYLES
    atomic = not plain and chance(rng, 30)
    into = chance(rng, 70 if atomic else 40)
    return CallSpec(
        moved,
        None if plain else memory,
        "auto" if plain else rng.choice(TRANSPORTS),
        atomic,
        "always" if not plain and chance(rng, 15) else "first",
        rng.choice(vias),
        rng.choice((1, 2, 3)),
        tuple(rng.choice(styles) for _ in range(num_ranks)),
        tuple(rng.choice(styles) if into and chance(rng, 90) else "" for _ in range(num_ranks)),
        tuple(not plain and chance(rng, 20) for _ in range(num_ranks)),
        tuple(chance(rng, 30) for _ in range(num_ranks)),
    )


def random_batch(seed: int, num_ranks: int) -> Batch:
    rng = Random(seed)
    count = rng.choice((1, 1, 1, 2, 4))
    calls = tuple(random_call(rng, num_ranks, count > 1) for _ in range(count))
    return Batch(
        seed,
        calls,
        count > 1 and chance(rng, 40),
        rng.choice(LIMITS),
        2 if chance(rng, 25) else 1,
        chance(rng, 20),
        tuple(rng.sample(range(count), count)),
    )


def stored(tensor: torch.Tensor, style: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the same values with other strides, and the memory that it is a view of."""
    if style == "plain":
        found = tensor.clone(memory_format=torch.contiguous_format)
        return found, found
    dims = tuple(reversed(range(tensor.dim())))
    if style == "transposed":
        memory = tensor.permute(dims).clone(memory_format=torch.contiguous_format)
        return memory.permute(dims), memory
    if style == "inside" or not dims:
        memory = torch.zeros(tensor.numel() + 7, dtype=tensor.dtype)
        return memory[3 : 3 + tensor.numel()].view(tensor.shape).copy_(tensor), memory
    sizes = [1 + size * (2 + dim) for dim, size in enumerate(tensor.shape)]
    memory = torch.zeros(sizes, dtype=tensor.dtype)
    steps = tuple(slice(1, 1 + size * (2 + dim), 2 + dim) for dim, size in enumerate(tensor.shape))
    return memory[steps].copy_(tensor), memory


@dataclass(eq=False)
class RankCall:
    """A call as this rank makes it: what it gives, and what must come."""

    call: CallSpec
    plan: rs.Plan
    rank: int
    group: Any
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    """The values of what is given."""
    into: dict[str, torch.Tensor] | None = None
    memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """What destination tensors are views of, and which elements of that must stay as they are."""
    wanted: dict[str, torch.Tensor] = field(default_factory=dict)
    handle: Any = None
    result: Any = None

    @classmethod
    def of(cls, call: CallSpec, plan: rs.Plan, rank: int, group: Any, seed: int) -> RankCall:
        one = cls(call, plan, rank, group)
        leave_out, style = call.leave_out[rank], call.into[rank]
        one.into = {} if style else None
        for number, (name, moved) in enumerate(call.moved.items()):
            values = moved.values(seed + number)
            local = moved.given(values, rank)
            if local is not None and (local.numel() or not leave_out):
                one.before[name] = local
                one.given[name] = stored(local, call.sources[rank])[0]
            wanted = moved.wanted(moved.reduced(values), rank)
            if wanted is not None:
                one.wanted[name] = wanted
                if one.into is not None and (wanted.numel() or not leave_out):
                    one._make_place(name, wanted, style)
        return one

    def _make_place(self, name: str, wanted: torch.Tensor, style: str) -> None:
        assert self.into is not None
        place, memory = stored(torch.zeros_like(wanted), style)
        holes = torch.ones(memory.shape, dtype=torch.bool)
        offset = place.storage_offset() - memory.storage_offset()
        torch.as_strided(holes, place.shape, place.stride(), offset).zero_()
        self.into[name], self.memory[name] = place, (memory, holes)

    def begin(self) -> None:
        call, rank = self.call, self.rank
        options: dict[str, Any] = {"group": self.group}
        if call.via == "move" and call.memory is not None:
            options["timeout"] = TIMEOUT
        if call.transport != "auto":
            options["transport"] = call.transport
        options |= {"atomic": True} if call.atomic else {}
        options |= {"check": call.check} if call.check != "first" else {}
        options |= {"donate": True} if call.donate[rank] else {}
        if call.via == "move":
            self.result = self._move(options)
        elif call.via == "run":
            self.result = self.plan.run(self.given, into=self.into, timeout=TIMEOUT, **options)
        else:
            self.handle = self.plan.start(self.given, into=self.into, timeout=TIMEOUT, **options)

    def _move(self, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        ((name, moved),) = self.call.moved.items()
        memory = {} if self.call.memory is None else {"memory": self.plan.memory}
        cast = {} if moved.cast == moved.case.dtype else {"cast_to": moved.cast}
        into = None if self.into is None else self.into.get(name)
        found = rs.move(
            self.given.get(name),
            self.plan.have[name].layout,
            self.plan.want[name].layout,
            shape=moved.case.shape,
            dtype=moved.case.dtype,
            into=into,
            **memory,
            **cast,
            **options,
        )
        assert into is None or found is into
        return {} if found is None else {name: found}

    def end(self) -> None:
        if self.handle is not None:
            self.result = self.handle.wait()
        self._check()

    def _check(self) -> None:
        expected = self.wanted
        if self.into is not None and self.call.via != "move":
            expected = {name: self.wanted[name] for name in self.into}
        assert self.result.keys() == expected.keys(), (sorted(self.result), sorted(expected))
        for name, wanted in expected.items():
            found = self.result[name]
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
            assert bits(found) == bits(wanted), f"{name}: {found}, not {wanted}"
            if self.into is not None and name in self.into:
                assert found is self.into[name], f"{name}: not the tensor given by into="
        for name, (memory, holes) in self.memory.items():
            rest = bits(memory[holes]) if memory.dim() else b""
            assert rest == bytes(len(rest)), f"{name}: changed beside the destination"
        if self.handle is not None:
            assert self.handle.report.peak_staging <= self.plan.memory
        self._check_sources()

    def _check_sources(self) -> None:
        donates, is_plain = self.call.donate[self.rank], self.call.sources[self.rank] == "plain"
        for name, tensor in self.given.items():
            if not donates:
                assert bits(tensor) == bits(self.before[name]), f"{name}: the source has changed"
            elif is_plain and self.call.via != "move" and self.plan.num_rounds:
                assert not tensor.untyped_storage().nbytes(), f"{name}: the source is not freed"


def plan_of(call: CallSpec) -> rs.Plan:
    """The plan of a call; without a cap where that is too small."""
    have, want = {}, {}
    for name, moved in call.moved.items():
        case = moved.case
        have[name] = rs.TensorSpec(case.shape, case.dtype, checks.build(case.have, case.shape))
        want[name] = rs.TensorSpec(case.shape, moved.cast, checks.build(case.want, case.shape))
    memory = {} if call.memory is None else {"memory": call.memory}
    try:
        return rs.plan(have, want, **memory)
    except rs.MemoryCapError:
        return rs.plan(have, want)


def plans_of(batch: Batch) -> list[rs.Plan]:
    """The plan of every call."""
    if batch.same_plan:
        return [plan_of(batch.calls[0])] * len(batch.calls)
    return [plan_of(call) for call in batch.calls]


Made = tuple[Batch, list[rs.Plan] | Exception]


def make_batch(seed: int, num_ranks: int) -> Made:
    """A batch and its plans, or why there are none."""
    batch = random_batch(seed, num_ranks)
    try:
        plans = plans_of(batch)
        for plan in plans:
            plan.summary()
    except Exception as error:
        return batch, error
    return batch, plans


def make_batches(rank: int, num_ranks: int, seeds: range) -> dict[int, Made]:
    """All batches; planning is much of their work, and most are planned by one rank for all."""
    made = {seed: make_batch(seed, num_ranks) for seed in seeds if seed % OWN_PLANS == 0}
    shared = [seed for seed in seeds if seed % OWN_PLANS]
    mine = {seed: make_batch(seed, num_ranks) for seed in shared[rank::num_ranks]}
    told: list[bytes] = [b""] * num_ranks
    dist.all_gather_object(told, pickled(mine), group=pool_group(num_ranks))
    for one in told:
        made |= pickle.loads(one)
    return made


def pickled(made: dict[int, Made]) -> bytes:
    """Plans as they are: the usual pickle of a plan makes it again where it is read."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    as_it_is = {rs.Plan: lambda plan: (rs.Plan.__new__, (rs.Plan,), vars(plan))}
    pickler.dispatch_table = copyreg.dispatch_table | as_it_is
    pickler.dump(made)
    return file.getvalue()


def run_batch(
    rank: int, batch: Batch, plans: list[rs.Plan] | Exception, group: Any, found: Found
) -> None:
    """Begin all calls of a batch, wait for them in its order, and do it again."""
    if isinstance(plans, Exception):
        raise plans
    calls = (batch.calls[0],) * len(batch.calls) if batch.same_plan else batch.calls
    for repeat in range(max(call.times for call in calls)):
        begun = {}
        for number, call in enumerate(calls):
            if repeat < call.times and rank in plans[number].parties:
                seed = batch.seed * 64 + repeat * 16 + number * 4
                begun[number] = RankCall.of(call, plans[number], rank, group, seed)
                begun[number].begin()
                found.num_calls += 1
        for number in (number for number in batch.order if number in begun):
            try:
                begun[number].end()
            except AssertionError as error:  # the ranks go on together
                found.problems.append(f"# rank {rank}, call {number}: {error}\n{batch}")
            if begun[number].handle is not None:
                report, summary = begun[number].handle.report, plans[number].summary()
                key = (batch.seed, number, repeat)
                found.sent[key] = (report.bytes_sent, report.messages_sent)
                found.planned[key] = (summary.wire_bytes, summary.num_messages)


_two_hosts: dict[int, Any] = {}
"""Groups whose ranks take each other for ranks of two hosts, by size."""


def make_two_hosts(rank: int, num_ranks: int) -> None:
    """Make the group of the first ranks, once; all ranks of the pool call it."""
    if num_ranks not in _two_hosts:
        _two_hosts[num_ranks] = dist.new_group(range(num_ranks))


def in_thread(act: Callable[[], None], is_wanted: bool) -> None:
    """Run a function, perhaps in a thread, whose error is raised here."""
    if not is_wanted:
        act()
        return
    errors: list[BaseException] = []

    def work() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def run_batches(rank: int, num_ranks: int, seeds: range) -> Found:
    """Run the batches of the seeds on the first ranks."""
    found, num_errors = Found(), 0
    made = make_batches(rank, num_ranks, seeds)
    for seed in seeds:
        batch, plans = made.pop(seed)
        group = pool_group(num_ranks) if batch.hosts == 1 else _two_hosts[num_ranks]
        try:
            with pytest.MonkeyPatch.context() as patch, limits_of(batch.limits):
                if batch.hosts == 2:
                    host = f"host {rank % 3 % 2}"
                    patch.setattr(rendezvous, "host_identity", lambda host=host: host)
                in_thread(partial(run_batch, rank, batch, plans, group, found), batch.thread)
                found.num_batches += 1
        except Exception:
            text = traceback.format_exc(limit=-6)
            found.problems.append(f"# seed {seed}, rank {rank}\n{text}\n{batch}")
            num_errors += 1
        if num_errors >= MOST_ERRORS:
            break
    return found
