"""A move of one tensor, with gradients: what `rs.move` does once everything is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.dtypes import accumulator
from reshard.errors import TensorError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.live.api import skip_exchange
from reshard.live.call import Call
from reshard.live.options import options_from
from reshard.live.session.session import Ticket
from reshard.planning.adjoint import SumMove, unreduced
from reshard.planning.plans import ONE, Plan, plan
from reshard.tensors.fitting import Place, check_fits, place_of
from reshard.tensors.kinds import computed, knows_layout
from reshard.tensors.way_back import WayBack, attached

__all__ = ["Grad", "Motion", "plan_of"]

Grad = Literal["sum", "replicated"]
Tensor = torch.Tensor

NOT_INTO = (
    "the source requires gradients and into= is given, which gradients do not pass: leave out "
    "into=, or call under no_grad"
)


@lru_cache(maxsize=4096)
def plan_of(
    have: Layout, want: Layout, shape: tuple[int, ...], dtype: str, cast: str, memory: int
) -> Plan:
    """The plan of one tensor; kept, because training makes the same move in every step."""
    specs = ({ONE: TensorSpec(shape, dtype, have)}, {ONE: TensorSpec(shape, cast, want)})
    return plan(*specs, memory=memory)


@lru_cache(maxsize=4096)
def _shapes_at_rest(
    have: Layout, want: Layout, shape: tuple[int, ...], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A rank's local shapes, if every rank already has what it should have; else None.

    Asked on any rank of either layout it is None alike: none waits for one that is at rest.
    """
    if have != want and not have.same_as(want, shape):
        return None
    if have.holds(rank) is None or _holders(have) != _holders(want):
        return None
    return have.local_shape(rank, shape), want.local_shape(rank, shape)


def _holders(layout: Layout) -> set[int]:
    return {rank for rank in layout.ranks if layout.holds(rank) is not None}


@dataclass(frozen=True, eq=False)
class Motion:
    """One tensor, from one layout to another."""

    have: Layout
    want: Layout
    shape: tuple[int, ...]
    dtype: str
    cast: str
    """The dtype at the destination."""
    memory: int
    grad: Grad = "sum"
    group: dist.ProcessGroup | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        """Who sends what to whom."""
        return plan_of(self.have, self.want, self.shape, self.dtype, self.cast, self.memory)

    def run(
        self,
        ticket: Ticket,
        local: Tensor | None,
        leaf: Tensor | None,
        into: Tensor | None,
        device: Any,
    ) -> Tensor | None:
        """Move, and attach the way back if gradients are wanted anywhere.

        A rank without a local tensor may have a leaf that stands for it in backward.
        """
        if local is not None:
            device = local.device
        elif leaf is not None and device is None:
            device = leaf.device
        enabled = torch.is_grad_enabled()
        # A rank without input cannot know, unless it refuses.
        known = enabled and (leaf is not None or _requires_grad(local))
        wanted = None if local is None and leaf is None and enabled else known
        if wanted:
            self.check_differentiable(into is not None)
        at_rest = self.stays(ticket, local) if into is None else None
        if at_rest is not None:
            if not wanted or self.grad == "replicated":
                return at_rest if leaf is None else leaf.reshape(at_rest.shape)
            return attached(local, leaf, at_rest.detach(), self.way_back, device)
        moved, wanted = self.moved(ticket, local, into, device, wanted)
        if not wanted:
            return moved if into is None else into
        if into is not None:
            raise TensorError(NOT_INTO)
        if moved is None:
            moved = torch.zeros(0, dtype=getattr(torch, self.cast), device=device)
        return attached(local, leaf, moved, self.way_back, device)

    def moved(
        self,
        ticket: Ticket,
        local: Tensor | None,
        into: Tensor | None,
        device: Any,
        wanted: bool | None,
    ) -> tuple[Tensor | None, bool]:
        """The result without a way back, and whether any rank wants one."""
        local = None if local is None else computed(local)
        given = {} if local is None else {ONE: local.detach()}
        to = None if into is None else {ONE: into.detach()}
        options = options_from(self.options, None if local is not None and local.is_cpu else device)
        call = Call(ticket, self.plan, given, to, options, grad=wanted, ask_grad=True)
        found = call.run().get(ONE)
        return found, call.grad_seen if wanted is None else wanted

    def place(self, into: Tensor) -> Place:
        """Where the result goes, if that lies as it should."""
        if knows_layout(into):
            try:
                check_fits(into, TensorSpec(self.shape, self.cast, self.want), ONE, is_source=False)
            except TensorError as error:
                raise TensorError(str(error)) from None
        return place_of(into)

    def stays(self, ticket: Ticket, local: Tensor | None) -> Tensor | None:
        """The source itself where every rank already has what it should have, else None.

        The first time the ranks compare what they were given: others may have another move.
        """
        found = self.at_rest(local)
        if found is not None:
            options_from(self.options)  # nothing else looks whether there are such options
            if not skip_exchange(ticket, self.plan, self.options):
                given = {} if local is None else {ONE: computed(local).detach()}
                # The source is the result, so it is not freed, whatever was asked for.
                options = options_from({**self.options, "donate": False}, found.device)
                Call(ticket, self.plan, given, None, options).run()
        return found

    def at_rest(self, local: Tensor | None) -> Tensor | None:
        """The source itself where every rank already has what it should have, else None."""
        together = self.options.get("check") == "always" or self.options.get("atomic")
        if self.dtype != self.cast or together:
            return None
        shapes = _shapes_at_rest(self.have, self.want, self.shape, dist.get_rank())
        if shapes is None:
            return None
        if local is None and not prod(shapes[0]):
            local = torch.empty(shapes[0], dtype=getattr(torch, self.dtype))
        # A tensor of another shape is refused by the engine.
        if local is None or local.shape != shapes[0]:
            return None
        return local if shapes[0] == shapes[1] else local.reshape(shapes[1])

    def check_differentiable(self, into: bool, dtensors: bool = False) -> None:
        """Refuse what has no gradient, on all ranks, before anything moves."""
        problem = NOT_INTO if into else self._problem(dtensors)
        if problem:
            raise TensorError(problem)

    def _problem(self, dtensors: bool) -> str:
        op = self.have.reduce[0] if self.have.reduce else "sum"
        if op not in ("sum", "avg") and not dtensors:
            return (
                f'the source "{self.have}" has a pending {op} and requires gradients: only a sum '
                "and an avg have them here; detach it, or reduce it first"
            )
        kind: torch.dtype = getattr(torch, self.cast)
        if not (kind.is_floating_point or kind.is_complex):
            return (
                f"the source requires gradients and the destination is {self.cast}: integers have "
                "none; detach the source, or move it as it is"
            )
        if self.want.reduce is not None and not dtensors:
            return (
                f'the destination "{self.want}" has a pending {self.want.reduce[0]} and the source '
                "requires gradients: reduce it, or detach the source"
            )
        return ""

    @property
    def way_back(self) -> WayBack:
        """How gradients of the result go back to the source."""
        count = 1
        if self.have.reduce is not None and self.have.reduce[0] == "avg":
            count = prod(self.have.mesh.axes[axis] for axis in self.have.reduce[1])
        kinds = (getattr(torch, self.dtype), getattr(torch, self.cast))
        # Added up in the wider of the two.
        kind = str(torch.promote_types(*kinds)).removeprefix("torch.")
        adds = self.grad == "sum"
        # What is still to be divided is not rounded before.
        cast = accumulator(kind) if adds and count > 1 else kind
        back = SumMove(self.want, unreduced(self.have), self.shape, kind, self.memory, adds, cast)
        return WayBack(back, count, self.group, self.options)


def _requires_grad(local: Tensor | None) -> bool:
    return local is not None and local.requires_grad
