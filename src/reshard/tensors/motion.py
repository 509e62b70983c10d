"""A move of one tensor, with gradients: what `rs.move` does once everything is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.errors import TensorError
from reshard.layout import Layout
from reshard.planning.adjoint import SumMove, unreduced
from reshard.planning.plan import ONE, Plan, plan
from reshard.run.live import engine
from reshard.spec import TensorSpec
from reshard.tensors.boxes import Boxes, added, listed

__all__ = ["Grad", "Motion", "plan_of"]

Grad = Literal["sum", "replicated"]
Tensor = torch.Tensor


@lru_cache(maxsize=4096)
def plan_of(
    have: Layout, want: Layout, shape: tuple[int, ...], dtype: str, cast: str, memory: int
) -> Plan:
    """The plan of one tensor; kept, because training makes the same move in every step."""
    specs = ({ONE: TensorSpec(shape, dtype, have)}, {ONE: TensorSpec(shape, cast, want)})
    return plan(*specs, memory=memory)


@lru_cache(maxsize=4096)
def _is_still(have: Layout, want: Layout, shape: tuple[int, ...]) -> bool:
    return have == want or have.same_as(want, shape)


@dataclass(frozen=True)
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

    @property
    def plan(self) -> Plan:
        """Who sends what to whom."""
        return plan_of(self.have, self.want, self.shape, self.dtype, self.cast, self.memory)

    def run(self, local: Tensor | None, into: Tensor | None, device: Any) -> Tensor | None:
        """Move, and attach the way back if gradients are wanted anywhere."""
        wanted = None if local is None else local.requires_grad and torch.is_grad_enabled()
        if wanted:
            self.check_differentiable()
        handle = engine.start(
            self.plan,
            {} if local is None else {ONE: local.detach()},
            into=None if into is None else {ONE: into.detach()},
            group=self.group,
            device=device,
            grad=wanted,
            _thread=False,
            **self.options,
        )
        moved = handle.wait().get(ONE)
        if not (wanted or (wanted is None and handle.grad_seen and torch.is_grad_enabled())):
            return moved if into is None else into
        return self._attach(local, moved, device)

    def _attach(self, local: Tensor | None, moved: Tensor | None, device: Any) -> Tensor:
        # A rank without input has a hidden leaf, one without output an empty tensor: both so that
        # their part of the backward runs.
        leaf = torch.zeros(0, device=device, requires_grad=True) if local is None else local
        kind = getattr(torch, self.cast)
        out = torch.zeros(0, dtype=kind, device=leaf.device) if moved is None else moved
        attached: Tensor = _moved(leaf, out, self, local is None, moved is None)
        return attached

    @property
    def is_still(self) -> bool:
        """Whether every rank already has exactly what it should have."""
        return self.dtype == self.cast and _is_still(self.have, self.want, self.shape)

    def check_differentiable(self, dtensors: bool = False) -> None:
        """Refuse what has no gradient, before anything moves."""
        op = self.have.reduce[0] if self.have.reduce else "sum"
        if op not in ("sum", "avg"):
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

    @property
    def back(self) -> Backward:
        """How gradients of the result go back to the source."""
        scale = 1.0
        if self.have.reduce is not None and self.have.reduce[0] == "avg":
            scale = 1.0 / prod(self.have.mesh.axes[axis] for axis in self.have.reduce[1])
        return Backward(self.want, unreduced(self.have), self, scale)


@dataclass(frozen=True)
class Backward:
    """Gradients on their way from one layout to another, perhaps more than once."""

    have: Layout
    want: Layout
    of: Motion
    scale: float

    @property
    def back(self) -> Backward:
        """The gradient of this."""
        return Backward(self.want, self.have, self.of, self.scale)

    def run(self, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        """This rank's part of the gradients at the other end."""
        move = SumMove(self.have, self.want, self.of.shape, self.of.dtype, self.of.memory)
        if self.of.grad == "replicated":
            found = self._moved(_replicas(move), gradient, device)
        elif move.direct is not None:
            found = self._moved(move.direct, gradient, device)
        else:
            found = self._spread(move, gradient, device)
        return found if found is None or self.scale == 1.0 else found * self.scale

    def _moved(self, plan: Plan, gradient: Tensor | None, device: torch.device) -> Tensor | None:
        given = {} if gradient is None else {ONE: gradient}
        return self._run(plan, given, device).get(ONE)

    def _run(
        self, plan: Plan, given: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        return engine.run(plan, given, group=self.of.group, device=device, **self.of.options)

    def _spread(
        self, move: SumMove, gradient: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Add up at first holders, box by box, then send the sums to whoever wants them."""
        rank, spread = dist.get_rank(), move.spread
        mine = Boxes(self.have, self.of.shape, rank)
        own = [boxes.get(rank, ()) for boxes in spread.holding]
        total = None if gradient is None else mine.joined(gradient, own[0] if own else ())
        if spread.gather is not None:
            later = {
                str(n): mine.joined(gradient, boxes)
                for n, boxes in enumerate(own)
                if n and boxes and gradient is not None
            }
            arrived = self._run(spread.gather, later, device)
            for name, more in arrived.items():
                if total is not None:
                    which = listed(spread.gather.want[name].layout, rank)
                    total = added(total, own[0], more, which)
        given = {"sum": total} if total is not None and own and own[0] else {}
        sums = self._run(spread.spread, given, device).get("sum")
        if self.want.holds(rank) is None:
            return None
        kind = getattr(torch, self.of.dtype)
        shape = self.want.local_shape(rank, self.of.shape)
        result = torch.zeros(shape, dtype=kind, device=device)
        if sums is not None:
            Boxes(self.want, self.of.shape, rank).split_into(result, spread.wanting[rank], sums)
        return result


def _replicas(move: SumMove) -> Plan:
    return plan_of(move.have, move.want, move.shape, move.dtype, move.dtype, move.memory)


class _Moved(torch.autograd.Function):
    """Makes the result of a move the result of its input."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, moved: Tensor, motion: Motion, no_input: bool, no_output: bool
    ) -> Tensor:
        ctx.back, ctx.no_input, ctx.no_output = motion.back, no_input, no_output
        ctx.kind, ctx.shape, ctx.device = source.dtype, source.shape, source.device
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _back(gradients[0], ctx.back, ctx.no_output, ctx.no_input, ctx.device, ctx.kind)
        return gradient, None, None, None, None


class _Back(torch.autograd.Function):
    """Gradients going back, differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        back: Backward,
        no_input: bool,
        no_output: bool,
        device: torch.device,
        kind: torch.dtype,
    ) -> Tensor:
        ctx.back, ctx.no_input, ctx.no_output = back.back, no_input, no_output
        ctx.device, ctx.kind = gradient.device, gradient.dtype
        moved_kind: torch.dtype = getattr(torch, back.of.dtype)
        local = None if no_input else gradient.detach().to(moved_kind)
        found = back.run(local, device)
        return torch.zeros(0, dtype=kind, device=device) if found is None else found.to(kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _back(gradients[0], ctx.back, ctx.no_output, ctx.no_input, ctx.device, ctx.kind)
        return gradient, None, None, None, None, None


_moved: Callable[..., Tensor] = _Moved.apply
_back: Callable[..., Tensor] = _Back.apply
