"""A plan says who copies which box to whom, in which round, before anything moves.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> have = Layout(Mesh(dp=2, tp=2), "(dp tp) -")
>>> want = Layout(Mesh(tp=2, ranks=[8, 9]), "- tp")
>>> move = plan(have, want, shape=(4, 6), dtype="float32")
>>> move.check()
>>> move.summary().wire_bytes, move.summary().num_messages
(96, 8)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypedDict, Unpack

import numpy as np

from reshard.errors import (
    ArgumentTypeError,
    FormatError,
    PlanError,
    ReshardError,
    needing_torch,
    require_type,
)
from reshard.layout.columns import Ints, distinct
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec, fingerprint
from reshard.planning.cells.listed import Home
from reshard.planning.classes import Fill, Stack, stacks_of
from reshard.planning.cost.summary import Summary, Traffic, summarize
from reshard.planning.cost.topology import Topology
from reshard.planning.flows import Flow, flows_of
from reshard.planning.hosts import host_flows
from reshard.planning.names import Names, check_names, names_of, table_of
from reshard.planning.rank import RankPlan
from reshard.planning.rounds import Schedule, TooTightError, load_of, schedule
from reshard.text import parse_bytes, quoted

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

DEFAULT_MEMORY = 256 << 20
"""Bytes that a rank may stage beyond source and destination, unless ``memory=`` says otherwise."""

MAX_KEPT = 16  # how many ranks' parts a plan keeps, for executors that ask more than once
SCHEMA = "reshard.plan/1"
MAX_TEXT = 1 << 30
ONE = "tensor"  # the name of the tensor in a plan for one tensor


class RunOptions(TypedDict, total=False):
    """The keyword options of `Plan.run`, `Plan.start` and `rs.move`.

    ``reshard/live/inputs/request.py`` says what each of them means.
    """

    group: torch.distributed.ProcessGroup | None
    device: torch.device | str | None
    timeout: float
    deadline: float | None
    transport: Literal["auto", "peer", "shared", "network", "gpu_peer", "nccl"]
    check: Literal["first", "always", "never"]
    atomic: bool
    donate: bool
    progress: bool | None
    tag: int | str | None
    sync: bool


class Handle(Protocol):
    """A move in flight; ``report`` is the `RunReport` of the move on this rank."""

    report: Any

    def done(self) -> bool:
        """Whether the move has completed or failed."""

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for the move; returns this rank's destination tensors, or raises its error."""


def plan(
    have: Layout | str | Mapping[str, TensorSpec],
    want: Layout | str | Mapping[str, TensorSpec],
    *,
    shape: Sequence[int] | None = None,
    dtype: object = None,
    names: Names | None = None,
    memory: int | str | None = None,
    topology: Topology | str | Path | None = None,
    strict: bool = True,
) -> Plan:
    """Plan the move of one tensor (two layouts, a shape, a dtype) or of a state dict (two dicts).

    A layout may be a text, such as "dp=2 tp=4: (dp tp) -".

    ``memory`` caps what any rank stages, ``names`` says where renamed or joined tensors come from,
    ``topology`` (or the path of its file) knows hosts and links, and ``strict=False`` moves only
    the names that both sides have.
    """
    have = have if isinstance(have, Mapping) else Layout.of(have)
    want = want if isinstance(want, Mapping) else Layout.of(want)
    if isinstance(have, Layout) and isinstance(want, Layout):
        if not isinstance(shape, Iterable):
            raise PlanError(
                f"a plan for one tensor needs its shape, not {shape}: give shape=(rows, columns)"
            )
        kind: Any = "float32" if dtype is None else dtype
        have, want = ({ONE: TensorSpec(tuple(shape), kind, side)} for side in (have, want))
    elif isinstance(have, Layout) or isinstance(want, Layout):
        raise PlanError("plan takes two layouts or two dicts of specs, and got one of each")
    elif shape is not None or dtype is not None:
        raise PlanError("shape= and dtype= are for one tensor: each spec of a dict has its own")
    for name, spec in (*have.items(), *want.items()):
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"the name {name!r} is a {type(name).__name__}: tensors of a plan are named by "
                "strings; rs.describe makes them of numbers"
            )
        if not isinstance(spec, TensorSpec):
            raise ArgumentTypeError(
                f"{quoted(str(name))} is a {type(spec).__name__}, and a plan of dicts takes specs: "
                "give rs.TensorSpec(shape, dtype, layout), or rs.describe(tensors) in a job"
            )
    cap = DEFAULT_MEMORY if memory is None else parse_bytes(memory)
    if topology is not None and not isinstance(topology, Topology):
        topology = Topology.load(topology)
    if names is not None:
        check_names(names)
    return Plan(have, want, names=names or {}, memory=cap, topology=topology, strict=strict)


class Plan:
    """A move of one or many tensors, global and pure; a rank asks for its own part."""

    def __init__(
        self,
        have: Mapping[str, TensorSpec],
        want: Mapping[str, TensorSpec],
        *,
        names: Names,
        memory: int,
        topology: Topology | None,
        strict: bool,
    ) -> None:
        self.have = dict(sorted(have.items()))
        self.names = dict(names)
        self.memory = memory
        self.topology = topology
        self.strict = strict
        want = dict(sorted(want.items()))
        stacks, fills = stacks_of(self.have, want, self.names, strict)
        fed = {name for stack in stacks for _, name in stack.names}
        self.want = {name: spec for name, spec in want.items() if name in fed}
        self.stacks: tuple[Stack, ...] = tuple(stacks)
        self.fills: tuple[Fill, ...] = tuple(fills)
        sides = {side.layout for stack in stacks for side in (stack.have, stack.want)}
        ranks = [np.fromiter(layout.ranks, dtype=np.int64) for layout in sides]
        self.world: Ints = distinct(np.concatenate([*ranks, np.zeros(0, np.int64)]))
        """All ranks that any layout speaks of, in rising order."""
        self.flows, self.schedule = self._arrange()
        self._ranks: dict[tuple[object, ...], RankPlan] = {}
        self.compiled: Any = None
        """What the live engine has compiled for this rank; `release` frees it."""

    def _arrange(self) -> tuple[tuple[Flow, ...], Schedule]:
        """Share the work and put it into rounds; list every row only where the cap demands it."""
        for listed in (False, True):
            if self._home is None:
                flows = flows_of(self.stacks, self.world, listed)
            else:
                flows = host_flows(self.stacks, self.world, self._home)
            try:
                return tuple(flows), schedule([load_of(f, self.world) for f in flows], self.memory)
            except TooTightError:
                continue
        raise AssertionError("listed flows are never too tight")

    @cached_property
    def _home(self) -> Home | None:
        """The hosts of ranks, if there is a topology."""
        if self.topology is None:
            return None
        hosts, world = self.topology.hosts_of(map(int, self.world)), self.world
        number = np.array([hosts[int(rank)] for rank in world], dtype=np.int64)
        return lambda ranks: number[np.searchsorted(world, ranks)]

    @property
    def num_rounds(self) -> int:
        """How many exchanges the move takes."""
        return self.schedule.num_rounds

    @property
    def ranks(self) -> list[int]:
        """Every rank that either side speaks of."""
        return [int(rank) for rank in self.world]

    @cached_property
    def parties(self) -> tuple[int, ...]:
        """The ranks that have a part on either side, perhaps an empty one; lost ranks have none."""
        specs = (*self.have.values(), *self.want.values())
        layouts = {id(spec.layout): spec.layout for spec in specs}.values()
        return tuple(sorted({r for one in layouts for r in one.ranks if one.holds(r) is not None}))

    def for_rank(self, rank: int) -> RankPlan:
        """What one rank sends, receives and copies; derived without the others."""
        if type(rank) is not int:
            require_type(rank, SupportsIndex, "for_rank()", "give the number of a rank")
        if rank not in self.world:
            return RankPlan.of(rank, (), (), ())
        key = (rank, self.flows, self.schedule)
        if key not in self._ranks:
            if len(self._ranks) >= MAX_KEPT:
                self._ranks.clear()
            self._ranks[key] = RankPlan.of(rank, self.flows, self.schedule.slots, self.fills)
        return self._ranks[key]

    def summary(self) -> Summary:
        """What the move costs."""
        return summarize(self.flows, self.traffic, self.schedule, self.topology)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes and messages of every rank, and between groups of ranks."""
        return Traffic(self.flows, self.schedule.slots, self.world, self._home)

    def check(self, *, memory: int | str = "2GiB") -> None:
        """Prove that every wanted element is written exactly once, by a rank that holds it.

        ``memory`` is what the proof may take; pieces that do not fit are worked out again, and an
        error says how much it needs at least if that is more.
        """
        _module("planning.proof").check_plan(self, parse_bytes(memory))

    @cached_property
    def digest(self) -> str:
        """A hash that ranks compare: equal only if names, shapes, dtypes, cuts and cap are."""
        hasher = hashlib.blake2b(digest_size=16)
        topology = self.topology and self.topology.to_dict()
        hasher.update(repr(("reshard.plan/2", self.memory, topology)).encode())
        for stack in self.stacks:
            for spec in (stack.have, stack.want):
                hasher.update(repr((spec.shape, spec.dtype)).encode())
                hasher.update(fingerprint(spec.layout, spec.shape))
            feed = stack.feed
            hasher.update(repr((feed.moves, feed.have_insert, feed.want_insert)).encode())
            hasher.update(repr(stack.names).encode())
        hasher.update(bytes(flow.geometry.listed for flow in self.flows))
        hasher.update(repr([(fill.name, fill.box) for fill in self.fills]).encode())
        return hasher.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The two sides, the options and the digest, as plain data: the rows follow from these.

        Layouts are listed once and referred to by number.
        """
        layouts: dict[Layout, int] = {}
        have, want = (
            {
                name: [list(spec.shape), spec.dtype, layouts.setdefault(spec.layout, len(layouts))]
                for name, spec in side.items()
            }
            for side in (self.have, self.want)
        )
        return {
            "schema": SCHEMA,
            "digest": self.digest,
            "have": have,
            "want": want,
            "layouts": [layout.to_dict() for layout in layouts],
            "names": table_of(self.names),
            "memory": self.memory,
            "strict": self.strict,
            "topology": self.topology and self.topology.to_dict(),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan as JSON text, with a schema version, that ``from_json`` reads back."""
        return json.dumps(self.to_dict(), indent=indent)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote, and check that it is still the same plan."""
        if len(text) > MAX_TEXT:
            raise FormatError(f"a plan of {len(text)} characters: at most {MAX_TEXT} work")
        try:
            data = json.loads(text)
            schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
            if schema != SCHEMA:
                raise FormatError(f'this is "{schema}" and this library reads "{SCHEMA}"')
            layouts = [Layout.from_dict(layout) for layout in data["layouts"]]
            have, want = (
                {
                    str(name): TensorSpec(tuple(shape), dtype, layouts[number])
                    for name, (shape, dtype, number) in data[side].items()
                }
                for side in ("have", "want")
            )
            names, topology = names_of(data["names"]), data["topology"]
            plan = Plan(
                have,
                want,
                names=names,
                memory=int(data["memory"]),
                topology=None if topology is None else Topology.from_dict(topology),
                strict=data["strict"] is True,
            )
        except ReshardError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            what = f"{type(error).__name__} {error}"
            raise FormatError(f"a plan's JSON cannot be read: {what}") from None
        if plan.digest != data.get("digest"):
            raise FormatError(
                f"the text says digest {data.get('digest')} and the plan in it has {plan.digest}: "
                "it was changed, or written by another version"
            )
        return plan

    def run(
        self,
        tensors: Mapping[str, Any],
        *,
        into: Mapping[str, Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> dict[str, Tensor]:
        """Move this rank's tensors along the plan, live; gives its destination tensors.

        DTensors, ShardedTensors and local tensors, nested as in a state dict; what is moved into
        tensors is given as they are. Every rank of the two layouts calls it with the same plan.
        `RunOptions` lists the options.
        """
        result: dict[str, Tensor] = _engine().run(self, tensors, into=into, **options)
        return result

    def start(
        self,
        tensors: Mapping[str, Any],
        *,
        into: Mapping[str, Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> Handle:
        """Begin to move and go on; the handle's ``wait()`` gives the tensors."""
        handle: Handle = _engine().start(self, tensors, into=into, **options)
        return handle

    def release(self) -> None:
        """Free the buffers and tables that live runs keep for the next call."""
        _engine().release(self)

    def save(self, path: str | Path, *, reports: Sequence[Any] = ()) -> None:
        """Write the plan as ``.json``, as a page (``.html``) or as a trace (``.trace``).

        A page shows what the `RunReport`s of a run of this plan measured, where they are given.
        """
        _module("show.page").save(self, path, reports=reports)

    def __str__(self) -> str:
        text: str = _module("show.plan_text").describe(self)
        return text

    def _repr_html_(self) -> str:
        """The plan as a cell of a notebook."""
        text: str = _module("show.page.notebook").plan_cell(self)
        return text

    def __repr__(self) -> str:
        return f"<Plan of {len(self.want)} tensors, {self.num_rounds} rounds, digest {self.digest}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_json, (self.to_json(),)


@cache
def _engine() -> Any:
    """The live engine, which needs torch: loaded when something really moves."""
    with needing_torch("running a plan"):
        return _module("tensors.state_dicts")


def _module(name: str) -> Any:
    """A module above this one, which only some methods of a plan need."""
    return import_module(f"reshard.{name}")
