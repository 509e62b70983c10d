"""Inside a rank: move DTensors by reshard and by torch, and compare everything that shows.

Values are integers in float64, so that sums in any order are equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import reshard as rs
from reshard.tensors.dtensor.placements import layout_from
from tests.tensors.worlds import cut, numbered

Placements = tuple[Placement, ...]

TARGETS = (Shard(0), Shard(1), Replicate())
TIMEOUT = 30.0


@dataclass(frozen=True)
class Pair:
    """A shape, and the placements of source and destination."""

    shape: tuple[int, ...]
    have: Placements
    want: Placements

    @property
    def op(self) -> str | None:
        """The reduction that is pending at the source."""
        ops = [p.reduce_op for p in self.have if isinstance(p, Partial)]
        return ops[0] if ops else None


def pairs(
    num_axes: int, shapes: Sequence[tuple[int, ...]], ops: Iterable[str | None]
) -> Iterator[Pair]:
    """Every pair on a mesh of so many axes, with a pending reduction or, for None, without."""
    for op in ops:
        kinds = TARGETS if op is None else (*TARGETS, Partial(op))
        sides = (product(kinds, repeat=num_axes), product(TARGETS, repeat=num_axes))
        for have, want in product(*sides):
            if (op is not None) == any(placement.is_partial() for placement in have):
                yield from (Pair(shape, have, want) for shape in shapes)


def place_of(mesh: DeviceMesh, axes: Iterable[int]) -> int:
    """The number of this rank among those along some axes of a mesh."""
    coordinate = mesh.get_coordinate()
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    return place


def pending(pair: Pair) -> list[int]:
    """The axes of the source's mesh that are not added up."""
    return [axis for axis, placement in enumerate(pair.have) if placement.is_partial()]


def values(mesh: DeviceMesh, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """The addends of the source, and what they are worth together."""
    full = numbered(*pair.shape).double() - 7
    num = math.prod(mesh.size(axis) for axis in pending(pair))
    factors = torch.arange(1, num + 1, dtype=torch.float64) * (-1) ** torch.arange(num)
    addends = full * factors.reshape(-1, *[1] * full.dim())
    worth = {
        None: full, "sum": addends.sum(0), "avg": addends.sum(0) / num,
        "max": addends.amax(0), "min": addends.amin(0),
    }[pair.op]  # fmt: skip
    return addends, worth


def plainly(placements: Placements) -> Placements:
    """The same placements with everything added up."""
    return tuple(Replicate() if one.is_partial() else one for one in placements)


def source(mesh: DeviceMesh, pair: Pair, rank: int) -> DTensor:
    """A DTensor with its own addend on every rank along pending axes; empty outside the mesh."""
    addends, worth = values(mesh, pair)
    local = torch.empty(0, dtype=torch.float64)
    if mesh.get_coordinate() is not None:
        layout = layout_from(mesh, plainly(pair.have), pair.shape)
        local = cut(addends[place_of(mesh, pending(pair))], layout, rank)
    size, stride = worth.size(), worth.stride()
    return DTensor.from_local(local, mesh, pair.have, shape=size, stride=stride)


def leaf(tensor: DTensor, grad: bool) -> DTensor:
    """The same values, as a tensor of its own; cloning would finish a pending sum."""
    local, shape = tensor.to_local().clone(), tensor.shape
    mesh, placements = tensor.device_mesh, tensor.placements
    made = DTensor.from_local(local, mesh, placements, shape=shape, stride=tensor.stride())
    return made.requires_grad_(grad)


def check_same(found: DTensor, wanted: DTensor, what: str) -> None:
    """Assert that nothing tells two DTensors apart."""
    assert found.device_mesh == wanted.device_mesh, what
    for name in ("placements", "shape", "dtype"):
        mine, other = getattr(found, name), getattr(wanted, name)
        assert mine == other, f"{what}: {name} {mine}, not {other}"
    assert found.stride() == wanted.stride(), f"{what}: {found.stride()}, not {wanted.stride()}"
    check_local(found.to_local(), wanted.to_local(), what)


def check_local(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    assert torch.equal(found, wanted), f"{what}: {found}, not {wanted}"


def gradient_for(mesh: DeviceMesh, pair: Pair, rank: int, number: int) -> DTensor:
    """A gradient of the result as torch may hand it back: placed like it, whole, or pending."""
    kinds = [pair.want, (Replicate(),) * mesh.ndim, (Partial(),) * mesh.ndim]
    if pair.op not in (None, "sum"):
        del kinds[2]  # torch makes no other reduction of a sum
    return source(mesh, replace(pair, have=kinds[number % len(kinds)]), rank)


def compare(mesh: DeviceMesh, pair: Pair, rank: int) -> tuple[DTensor, DTensor, DTensor, DTensor]:
    """Assert that reshard and torch do the same with a pair; gives both sources and results."""
    made, (_, value) = source(mesh, pair, rank), values(mesh, pair)
    ours, theirs = leaf(made, True), leaf(made, True)
    moved = rs.move(ours, to=(mesh, pair.want), timeout=TIMEOUT)
    reference = theirs.redistribute(mesh, pair.want)
    check_same(moved, reference, f"{pair}")
    check_local(moved.to_local(), cut(value, rs.layout_of(moved), rank), f"{pair}")
    assert moved.requires_grad
    return ours, theirs, moved, reference


def compare_back(mesh: DeviceMesh, pair: Pair, rank: int, number: int) -> None:
    """The same, forth and back."""
    ours, theirs, moved, reference = compare(mesh, pair, rank)
    gradient = gradient_for(mesh, pair, rank, number)
    (found,) = torch.autograd.grad(moved, ours, gradient)
    (wanted,) = torch.autograd.grad(reference, theirs, gradient)
    check_same(found, wanted, f"{pair}, gradient {gradient.placements}")
