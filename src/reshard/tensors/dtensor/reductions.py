"""Pending reductions that a layout cannot express: local computation before and after a move.

A layout has one pending reduction (sum, avg, max, min or prod) over some axes. DTensor has more:

* sums on some mesh dims and averages on others: one sum over all of them, then a division;
* ``_MaskPartial``, a sum of rows that count on one rank only: the others become zero first;
* ``_NormPartial``, a p-norm: the sum of p-th powers, then the p-th root;
* a replicated tensor that becomes ``Partial``: each rank keeps its share of the value.

Mesh dims of size 1 are ignored, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from reshard.dtypes import accumulator
from reshard.errors import LayoutError, TensorError
from reshard.tensors.kinds import this_rank

Placements = tuple[Placement, ...]

_LINEAR = {"sum", "avg"}
"""Reductions whose order does not matter."""


@dataclass(frozen=True)
class LocalWork:
    """What a rank does to its local tensor before and after a move between simpler placements."""

    have: Placements
    want: Placements
    """The simpler placements: at most one kind of pending reduction, and none that is new."""
    masks: tuple[Any, ...] = ()
    """The ``_MaskPartial``s that are reduced."""
    norm: float | None = None
    """The exponent of a p-norm that is reduced."""
    divisor: int = 1
    """The number of addends of averages that are reduced as a part of a sum."""
    shares: tuple[tuple[int, Any], ...] = ()
    """The mesh dims along which the result becomes addends, and their ``Partial``s."""

    def dtypes(self, dtype: str, cast: str) -> tuple[str, str]:
        """The dtypes that are moved, for a source and a destination of these: sums that are divided
        or rooted after the move are not rounded before."""
        if self.norm is not None:
            # Powers are summed in a wide dtype; integers are rounded after the root.
            return (accumulator(dtype) if _is_inexact(dtype) else "float64",) * 2
        if self.divisor == 1:
            return dtype, cast
        if not _is_inexact(dtype):
            raise LayoutError(
                f"sums and averages of {dtype} at once, {list(self.have)}: integers are not "
                "divided here; cast it to a floating-point dtype first"
            )
        return dtype, accumulator(dtype)

    def before(self, local: torch.Tensor) -> torch.Tensor:
        """The addends of the simpler reduction, of a tensor of the dtype that is moved."""
        for mask in self.masks:
            if mask.mask_buffer.data is None:
                raise TensorError(
                    f"rank {this_rank()}: the mask of {mask!r} was used up when the tensor was "
                    "redistributed before: keep that result, or compute the tensor again"
                )
            local = local.clone()
            mask.mask_buffer.apply_mask(local)
        return local if self.norm is None else local**self.norm

    def after(
        self, moved: torch.Tensor, device_mesh: DeviceMesh, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.divisor > 1:
            # By a tensor: by a number a GPU multiplies with its rounded inverse.
            moved = moved / torch.full((), self.divisor, dtype=moved.dtype, device=moved.device)
        if self.norm is not None:
            moved = moved ** (1.0 / self.norm)
        moved = moved.to(dtype)
        for axis, placement in self.shares:
            moved = placement._partition_value(moved, device_mesh, axis)
        # torch drops a mask when it was applied: the next lookup has another.
        for mask in self.masks:
            mask.mask_buffer.release_mask()
        return moved


def work_for(
    sizes: Sequence[int], have: Placements, want: Placements, dtype: str
) -> LocalWork | None:
    """The local work around a move; None if a layout expresses the reductions as they are."""
    partials = [one for one in (*have, *want) if one.is_partial()]
    if not partials:
        return None
    changed = [at for at, old in enumerate(have) if old != want[at]]
    pending = [at for at, old in enumerate(have) if old.is_partial()]
    reduced = [at for at in pending if at in changed and sizes[at] > 1]
    kept = [at for at in pending if at not in changed]
    shares = [at for at in changed if want[at].is_partial()]
    divided = [at for at in shares if sizes[at] > 1]
    kinds = {_kind(have[at]) for at in (*reduced, *kept)}
    if not shares and len(kinds) < 2 and all(type(one) is Partial for one in partials):
        return None
    if len(kinds) > 1 and not kinds <= _LINEAR:
        raise LayoutError(
            f"placements {list(have)} are pending {' and '.join(sorted(kinds))}: which of them is "
            "done first makes a difference; reduce one of them before the other comes up"
        )
    _check_masks(have, want, kept)
    _check_shares(want, divided, dtype)
    words = {_kind(have[at]) for at in reduced} if len(kinds) < 2 else kinds
    op = words.pop() if len(words) == 1 and "norm" not in min(words) else "sum"
    simple = {at: Partial(op) for at in (*kept, *reduced)}
    averages = [at for at in reduced if op == "sum" and _kind(have[at]) == "avg"]
    return LocalWork(
        tuple(simple.get(at, _without_partial(old)) for at, old in enumerate(have)),
        tuple(simple[at] if at in kept else _without_partial(new) for at, new in enumerate(want)),
        tuple(have[at] for at in reduced if hasattr(have[at], "mask_buffer")),
        next((norm for at in reduced if (norm := getattr(have[at], "norm_type", None))), None),
        prod(sizes[at] for at in averages),
        tuple((at, want[at]) for at in divided),
    )


def _without_partial(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _kind(placement: Any) -> str:
    """The name of a pending reduction; equal names are the same reduction."""
    norm = getattr(placement, "norm_type", None)
    return str(placement.reduce_op) if norm is None else f"{norm}-norm"


def _check_masks(have: Placements, want: Placements, kept: Sequence[int]) -> None:
    """Refuse a mask that stays pending while its rows move to other ranks."""
    masks: list[Any] = [have[at] for at in kept if hasattr(have[at], "mask_buffer")]
    for mask in masks:
        data = mask.mask_buffer.data
        rows = 1 << 30 if data is None else int(data.ndim)  # leading dims that the mask covers
        for old, new in zip(have, want, strict=True):
            if old != new and any(getattr(one, "dim", rows) < rows for one in (old, new)):
                raise LayoutError(
                    f"placements {list(have)} to {list(want)} would cut the rows to which the mask "
                    f"of {mask!r} belongs in another way: reduce it in the same call, to "
                    "Replicate() or Shard"
                )


def _check_shares(want: Placements, axes: Sequence[int], dtype: str) -> None:
    for at in axes:
        kind = _kind(want[at])
        known = "norm" in kind or kind in ("sum", "avg", "max", "min")
        known = known and getattr(want[at], "offset_shape", ()) is not None
        divides = not hasattr(want[at], "mask_buffer") and ("norm" in kind or kind == "sum")
        if not known:
            raise LayoutError(
                f"a value cannot be given as {want[at]!r}: there are no addends of it for every "
                "value; use Partial of sum, avg, max or min, or Replicate()"
            )
        if divides and not _is_inexact(dtype):
            raise LayoutError(
                f"torch.{dtype} cannot be given as {want[at]!r}: each rank would hold its share, "
                "and integers cannot be divided; use Replicate()"
            )


def _is_inexact(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.is_floating_point or kind.is_complex
