"""The move of one tensor from one layout to another, with gradients.

TensorMoves are cached by their layouts, because training repeats the same moves in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from reshard.dtypes import accumulator
from reshard.errors import TensorError
from reshard.layout.columns import SizedCache
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.live.api import skip_exchange
from reshard.live.call import Call
from reshard.live.inputs.request import options_from
from reshard.live.session.session import Ticket
from reshard.planning.adjoint import SumMove, unreduced
from reshard.planning.plans import DEFAULT_MEMORY, ONE, Plan, plan
from reshard.tensors.autograd import Backward, attach, gradient_options
from reshard.tensors.kinds import this_rank
from reshard.text import parse_bytes

Grad = Literal["sum", "replicated"]
Options = Mapping[str, Any]
Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""A rank's local shapes at the source and at the destination."""

NO_OPTIONS: Options = {}
USUAL_MEMORY = parse_bytes(DEFAULT_MEMORY)

MAX_KEPT_BYTES = 128 << 20
"""Bytes of all plans that are kept for the next call."""
PLAN_BYTES, ROW_BYTES, RANK_BYTES = 64 << 10, 512, 128
"""About what a plan takes: in any case, per row that this rank sends, receives or copies, and per
rank."""

NOT_INTO = (
    "the source requires gradients and into= is given, which gradients do not pass: leave out "
    "into=, or call under no_grad"
)

_kept: SizedCache[tuple[object, ...], TensorMove] = SizedCache(MAX_KEPT_BYTES)


def move_between(
    have: Layout,
    want: Layout,
    shape: tuple[int, ...],
    dtype: str,
    cast: str | None = None,
    memory: int = USUAL_MEMORY,
) -> TensorMove:
    """The move of a tensor between these layouts; equal ones are one object while it is kept."""
    key = (have, want, shape, dtype, cast, memory)
    kept = _kept.get(key)
    if kept is not None:
        return kept
    move = TensorMove(have, want, shape, dtype, cast or dtype, memory)
    return _kept.put(key, move, plan_bytes(move.plan))


def plan_bytes(plan: Plan) -> int:
    """About how much memory a plan takes on this rank, with what is compiled from it."""
    size, rank = PLAN_BYTES + RANK_BYTES * len(plan.parties), this_rank()
    if rank not in plan.parties:
        return size
    rows = plan.for_rank(rank)
    return size + ROW_BYTES * sum(
        side.num_rows for side in (rows.sends, rows.receives, rows.copies)
    )


def holders(layout: Layout) -> set[int]:
    return {rank for rank in layout.ranks if layout.holds(rank) is not None}


@dataclass(frozen=True, eq=False)
class TensorMove:
    """One tensor, from one layout to another."""

    have: Layout
    want: Layout
    shape: tuple[int, ...]
    dtype: str
    cast: str
    memory: int
    _unmoved_shapes: dict[int, Shapes] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        have = {ONE: TensorSpec(self.shape, self.dtype, self.have)}
        return plan(have, {ONE: TensorSpec(self.shape, self.cast, self.want)}, memory=self.memory)

    @cached_property
    def _moves_nothing(self) -> bool:
        """Whether both layouts give every rank the same elements, of the same dtype."""
        have, want = self.have, self.want
        same = self.dtype == self.cast and (have == want or have.same_as(want, self.shape))
        return same and holders(have) == holders(want)

    def run(
        self,
        ticket: Ticket,
        source: Tensor | None,
        into: Tensor | None,
        device: torch.device | str | None,
        grad: Grad,
        options: Options,
    ) -> Tensor | None:
        """Move, and attach the backward if any rank wants gradients.

        The source of a rank that holds nothing may be an empty leaf: it takes part in backward.
        """
        local = source
        is_wanted: bool | None = False
        if torch.is_grad_enabled():
            # A rank without input cannot know whether gradients are wanted.
            is_wanted = None if source is None else source.requires_grad
        if source is not None and not source.numel() and self.have.holds(this_rank()) is None:
            local = None
        if is_wanted:
            self.check_differentiable(into is not None)
        moved = None if into is not None else self.unmoved(ticket, local, options, is_wanted)
        if moved is not None:
            if not is_wanted or grad == "replicated":
                return moved
            return attach(source, moved.detach(), self._backward(ticket, grad, options))
        if source is not None and (local is not None or device is None):
            device = source.device
        call = self.call(ticket, local, into, device, is_wanted, options)
        moved = call.run().get(ONE)
        if not (call.grad_seen if is_wanted is None else is_wanted):
            return moved if into is None else into
        if into is not None:
            raise TensorError(NOT_INTO)
        if moved is None:
            moved = torch.zeros(0, dtype=getattr(torch, self.cast), device=device or "cpu")
        return attach(source, moved, self._backward(ticket, grad, options))

    def values(
        self,
        ticket: Ticket,
        local: Tensor | None,
        into: Tensor | None,
        device: torch.device | str | None,
        grad: bool | None = False,
        options: Options = NO_OPTIONS,
    ) -> Tensor | None:
        """Move without a backward; gives the source itself if nothing has to move."""
        unmoved = self.unmoved(ticket, local, options) if into is None else None
        if unmoved is not None:
            return unmoved
        return self.call(ticket, local, into, device, grad, options).run().get(ONE)

    def call(
        self,
        ticket: Ticket,
        local: Tensor | None,
        into: Tensor | None,
        device: torch.device | str | None,
        grad: bool | None,
        options: Options,
    ) -> Call:
        """The call of the engine that moves the values; its result has them under `ONE`."""
        sources = {}
        if local is not None:
            sources[ONE] = local.detach() if local.requires_grad else local
            device = None if local.is_cpu else local.device  # where the source is
        destinations = None if into is None else {ONE: into.detach()}
        # Ranks without a source ask others whether it requires gradients. Not where nothing moves:
        # a rank without `into=` returns its source, and sends no Hello.
        ask_grad = self.unmoved_shapes(options) is None
        return Call(
            *(ticket, self.plan, sources, destinations, options_from(options, device)),
            grad=grad, ask_grad=ask_grad, resolves=True,
        )  # fmt: skip

    def unmoved(
        self,
        ticket: Ticket,
        local: Tensor | None,
        options: Options = NO_OPTIONS,
        grad: bool | None = None,
    ) -> Tensor | None:
        """The source itself, in the shape of the destination, if no rank has anything to move.

        The first time the ranks compare the plan: other ranks may have been given another move.
        """
        shapes = self.unmoved_shapes(options)
        if shapes is None:
            return None
        sources = {} if local is None else {ONE: local.detach()}
        if local is None and not prod(shapes[0]):
            local = torch.empty(shapes[0], dtype=getattr(torch, self.dtype), device="cpu")
        # The engine refuses a tensor of another shape.
        if local is None or local.shape != shapes[0]:
            return None
        options_from(options)  # raises if there is no such option
        if not skip_exchange(ticket, self.plan, options.get("check"), options.get("tag")):
            # The source is the result, so it is not freed, even if it is donated.
            kept = options_from({**options, "donate": False}, local.device)
            Call(ticket, self.plan, sources, None, kept, grad=grad, resolves=True).run()
        return local if shapes[0] == shapes[1] else local.reshape(shapes[1])

    def unmoved_shapes(self, options: Options = NO_OPTIONS) -> Shapes | None:
        """This rank's local shapes, if all ranks already hold what they should hold; or None.

        It is None on all ranks of either layout or on none of them, so no rank waits for another.
        """
        if not self._moves_nothing or (
            options and (options.get("check") == "always" or options.get("atomic"))
        ):
            return None
        rank, have, want, shape = this_rank(), self.have, self.want, self.shape
        if rank not in self._unmoved_shapes and have.holds(rank) is not None:
            shapes = have.local_shape(rank, shape), want.local_shape(rank, shape)
            self._unmoved_shapes[rank] = shapes
        return self._unmoved_shapes.get(rank)

    def check_differentiable(self, has_into: bool, dtensors: bool = False) -> None:
        """Refuse a move that has no gradient, on all ranks, before anything moves."""
        if has_into:
            raise TensorError(NOT_INTO)
        op = self.have.reduce[0] if self.have.reduce else "sum"
        if op not in ("sum", "avg") and not dtensors:
            raise TensorError(
                f'the source "{self.have}" has a pending {op} and requires gradients: only a sum '
                "and an avg have them here; detach it, or reduce it first"
            )
        kind: torch.dtype = getattr(torch, self.cast)
        if not (kind.is_floating_point or kind.is_complex):
            raise TensorError(
                f"the source requires gradients and the destination is {self.cast}: integers have "
                "none; detach the source, or move it as it is"
            )
        if self.want.reduce is not None and not dtensors:
            raise TensorError(
                f'the destination "{self.want}" has a pending {self.want.reduce[0]} and the source '
                "requires gradients: reduce it, or detach the source"
            )

    def _backward(self, ticket: Ticket, grad: Grad, options: Options) -> Backward:
        """How gradients of the result get back to the source."""
        have, count, kind = self.have, 1, self.dtype
        if have.reduce is not None and have.reduce[0] == "avg":
            count = prod(have.mesh.axes[axis] for axis in have.reduce[1])
        if self.dtype != self.cast:
            # Gradients are added up in the wider dtype, or one that is wider than both. torch
            # promotes no float8; float16 and bfloat16 are each wider than some of them only.
            kinds = ("float32" if "float8" in one else one for one in (self.dtype, self.cast))
            wider = torch.promote_types(*(getattr(torch, one) for one in kinds))
            kind = str(wider).removeprefix("torch.")
        adds = grad == "sum"
        # A sum that is divided afterwards is not rounded before.
        cast = accumulator(kind) if adds and count > 1 else kind
        move = SumMove(self.want, unreduced(have), self.shape, kind, self.memory, adds, cast)
        return Backward(move, count, ticket.group, gradient_options(options))
