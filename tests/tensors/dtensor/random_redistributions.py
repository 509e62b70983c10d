"""Inside a rank: random redistributions by reshard and by torch, each compared with the truth.

The truth does not come from either of them: values are reduced from the addends of all ranks, which
every rank can compute, and cut by torch's own chunking of a replicated tensor, which sends nothing.
Numbers are small integers, so that sums, products and averages over 2 and 4 ranks are exact.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import reshard as rs
from reshard.tensors.kinds import wait_ready

Placements = tuple[Placement, ...]

MESHES = ((4,), (2, 2))
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 24, 48)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
DTYPES = (*FLOATS, torch.float64, *COMPLEX, torch.int64, torch.int32, torch.bool)
OPS = ("sum", "sum", "avg", "max", "min", "product", "norm", "mask", "bor")
TIMEOUT = 30.0


@dataclass(frozen=True)
class Case:
    """One random redistribution."""

    seed: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    have: tuple[str, ...]
    want: tuple[str, ...]
    back: tuple[str, ...]
    """The placements of the gradient; as words, because masks are made anew for every tensor."""
    lazy: bool
    forward: torch.dtype | None
    backward: torch.dtype | None
    async_op: bool

    @property
    def is_too_much_for_torch(self) -> bool:
        """Whether torch's ranks enter different collectives: they abort, or mix up later ones.

        So it does with strided shards on two axes, unless everything comes out even, and with two
        masks, of which the second does not fit what the first one left.
        """
        words = (*self.have, *self.want, *self.back)
        if self.have.count("Pmask") > 1:
            return True
        factors = [int(word.split("x")[1]) for word in words if word[0] == "T"]
        if len(self.sizes) < 2 or not factors:
            return False
        dims = {int(word[1:].split("x")[0]) for word in words if word[0] in "ST"}
        return any(self.shape[dim] % (4 * math.prod(factors)) for dim in dims)

    @property
    def has_gradients(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


def random_case(seed: int) -> Case:
    rng = Random(seed)
    sizes = rng.choice(MESHES)
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 2, 3))))
    dtype = rng.choice(DTYPES)
    op = rng.choice(OPS)
    have = tuple(_source_word(rng, len(shape), op) for _ in sizes)
    if "Pmask" in have:
        shape = tuple(size or 1 for size in shape)  # of nothing every mask is right
    want = tuple(_target_word(rng, len(shape), word) for word in have)
    back = tuple(_back_word(rng, word, len(shape)) for word in want)
    same = FLOATS if dtype.is_floating_point else COMPLEX
    casts = dtype.is_floating_point or dtype.is_complex
    forward = rng.choice(same) if casts and rng.random() < 0.1 else None
    backward = rng.choice(same) if casts and rng.random() < 0.1 else None
    lazy = rng.random() < 0.4
    return Case(
        seed, sizes, shape, dtype, have, want, back, lazy, forward, backward, rng.random() < 0.1
    )


def _cut_word(rng: Random, num_dims: int) -> str:
    if not num_dims or rng.random() < 0.3:
        return "R"
    dim = rng.randrange(num_dims)
    return f"S{dim}" if rng.random() < 0.65 else f"T{dim}x{rng.choice((2, 2, 3, 4, 5))}"


def _source_word(rng: Random, num_dims: int, op: str) -> str:
    if rng.random() < 0.6:
        return _cut_word(rng, num_dims)
    if op in ("sum", "avg") and rng.random() < 0.4:
        return f"P{rng.choice(('sum', 'avg', 'mask'))}"
    return f"P{op}" if rng.random() < 0.97 else f"P{rng.choice(OPS)}"


def _target_word(rng: Random, num_dims: int, old: str) -> str:
    if old[0] == "P" and rng.random() < 0.2:
        return "keep"
    if rng.random() < 0.06:
        new = f"P{rng.choice([op for op in OPS if op != 'mask'])}"
        return "keep" if new == old else new
    return _cut_word(rng, num_dims)


def _back_word(rng: Random, word: str, num_dims: int) -> str:
    if rng.random() < 0.15:
        return "Psum"
    if rng.random() < 0.3:
        return _cut_word(rng, num_dims)
    return "R" if word[0] in "Pk" else word


def placement_of(word: str) -> Placement:
    """A fresh placement: no two tensors may share a mask."""
    if word == "R":
        return Replicate()
    if word[0] == "S":
        return Shard(int(word[1:]))
    if word[0] == "T":
        dim, factor = word[1:].split("x")
        return _StridedShard(int(dim), split_factor=int(factor))
    if word == "Pnorm":
        return _NormPartial(2)
    if word == "Pmask":
        return _MaskPartial("sum", offset_shape=torch.Size((4,)), offset_dim=0)
    return Partial(word[1:])


def whole(word: str) -> str:
    return "R" if word[0] in "Pk" else word


def number_of(place: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for at in axes:
        number = number * sizes[at] + place[at]
    return number


def cut(full: torch.Tensor, mesh: DeviceMesh, words: Sequence[str]) -> torch.Tensor:
    """This rank's part of a tensor that all have, as torch cuts it."""
    placed = [placement_of(whole(word)) for word in words]
    made = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made.redistribute(mesh, placed).to_local().contiguous().clone()


class Truth:
    """The addends of a case on all ranks, and what must become of them."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh, self.place = case, mesh, tuple(mesh.get_coordinate())
        self.pending = [at for at, word in enumerate(case.have) if word[0] == "P"]
        self.full = numbers(case.seed, case.shape, case.dtype)

    def addend(self, place: Sequence[int], masked: bool) -> torch.Tensor:
        """The whole addend of the rank at a place; without what its masks take away."""
        number = number_of(place, self.pending, self.case.sizes)
        made = self.full
        if number:
            made = made ^ True if made.dtype == torch.bool else made * (1, -1, 2, 3)[number]
        if self.case.have[0] == "Pnorm" or self.case.have[-1] == "Pnorm":
            made = made if made.dtype.is_complex or made.dtype == torch.bool else made.abs()
        for at in self.pending:
            if masked and self.case.have[at] == "Pmask":
                made = torch.where(self.mask(at, place[at]), torch.zeros_like(made), made)
        return made

    def mask(self, axis: int, place: int) -> torch.Tensor:
        """Which elements do not count on the ranks at a place of an axis; alike along the last."""
        rows = math.prod(self.case.shape[:-1])
        chosen = (torch.arange(rows) * 7 + axis + place * 3) % 3 == 0
        shape = (*self.case.shape[:-1], 1) if self.case.shape else ()
        return chosen.reshape(shape).expand(self.case.shape).clone()

    def value(self) -> torch.Tensor:
        """What the addends are worth at this rank's coordinates of reductions that stay pending."""
        case = self.case
        reduced = [at for at in self.pending if case.want[at] != "keep"]
        places = [
            tuple(place)
            for place in product(*map(range, case.sizes))
            if all(place[at] == self.place[at] for at in range(len(place)) if at not in reduced)
        ]
        addends = [self.addend(place, masked=bool(reduced)) for place in places]
        kept = [at for at in self.pending if case.want[at] == "keep"]
        if any(case.have[at] == "Pmask" for at in kept):
            addends = [self._without(place, reduced) for place in places]
        kinds = {case.have[at] for at in reduced}
        stack = torch.stack(addends)
        if case.forward is not None:
            stack = stack.to(case.forward)
        if not kinds:
            return stack[0]
        averages = math.prod(case.sizes[at] for at in reduced if case.have[at] == "Pavg")
        return reduce_all(stack, kinds, averages)

    def _without(self, place: Sequence[int], reduced: Sequence[int]) -> torch.Tensor:
        made = self.addend(place, masked=False)
        for at in reduced:
            if self.case.have[at] == "Pmask":
                made = torch.where(self.mask(at, place[at]), torch.zeros_like(made), made)
        return made

    def local(self) -> torch.Tensor:
        """This rank's part of the result."""
        found = cut(self.value(), self.mesh, self.case.want)
        for at, word in enumerate(self.case.want):
            size = self.case.sizes[at]
            if word == "Psum":
                found = found / size
            elif word == "Pnorm":
                found = found / math.sqrt(size)
        return found

    def source(self) -> DTensor:
        """The source of the case on this rank, with masks of its own."""
        case, mesh = self.case, self.mesh
        local = cut(self.addend(self.place, masked=False), mesh, case.have)
        placements = [placement_of(word) for word in case.have]
        for at, placement in enumerate(placements):
            if isinstance(placement, _MaskPartial):
                mask = cut(self.mask(at, self.place[at]), mesh, case.have)
                short = mask.ndim > 1 and mask.shape[-1] > 0 and case.seed % 2
                placement.mask_buffer.materialize_mask(mask[..., 0] if short else mask)
        if case.lazy and local.dtype.is_complex:
            local = local.conj_physical().conj()
        # Not from_local, which refuses mixtures of reductions: those are to be refused later.
        meta = TensorMeta(self.full.shape, self.full.stride(), case.dtype)
        made = DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)
        return made.requires_grad_(case.has_gradients)

    def target(self, source: DTensor) -> list[Placement]:
        pairs = zip(self.case.want, source.placements, strict=True)
        return [old if word == "keep" else placement_of(word) for word, old in pairs]

    def gradient(self, dtype: torch.dtype) -> tuple[DTensor, DTensor]:
        """A gradient of the result, and the one of the source that follows from it."""
        case, mesh = self.case, self.mesh
        full = numbers(case.seed + 1, case.shape, dtype)
        pending = [at for at, word in enumerate(case.back) if word == "Psum"]
        stay = [at for at in pending if case.have[at] == "Psum"]

        def placed(words: Sequence[str], axes: Sequence[int], kind: torch.dtype) -> DTensor:
            share = full
            for at in axes:
                share = share * ((2, -1) if case.sizes[at] == 2 else (2, -1, 1, -1))[self.place[at]]
            local = cut(share.to(kind), mesh, words)
            placements = [placement_of(word) for word in words]
            size, stride = full.shape, full.stride()
            return DTensor.from_local(
                local, mesh, placements, run_check=False, shape=size, stride=stride
            )

        words = [
            ("Psum" if at in stay else "R") if word[0] == "P" else word
            for at, word in enumerate(case.have)
        ]
        return placed(case.back, pending, dtype), placed(words, stay, case.dtype)


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    made = torch.arange(math.prod(shape)) * (2 * (seed % 5) + 3) % 7 - 3 + seed % 2
    made = made.reshape(tuple(shape))
    if dtype == torch.bool:
        return made > 0
    if dtype.is_complex:
        return torch.complex(made.double(), (made + 1).double() % 4).to(dtype)
    return made.to(dtype)


def reduce_all(stack: torch.Tensor, kinds: set[str], averages: int) -> torch.Tensor:
    """The rows reduced; of sums, averages and masks in any order."""
    kind = next(iter(kinds))
    if kind == "Pnorm":
        wide = stack.to(torch.complex128 if stack.dtype.is_complex else torch.float64)
        return ((wide**2).sum(0) ** 0.5).to(stack.dtype)
    if kind in ("Pmax", "Pmin"):
        if stack.dtype.is_complex:
            order = sorted if kind == "Pmin" else lambda one: sorted(one, reverse=True)
            rows = stack.reshape(len(stack), -1).T.tolist()
            best = [order([(z.real, z.imag) for z in row])[0] for row in rows]
            made = [complex(*pair) for pair in best]
            return torch.tensor(made, dtype=stack.dtype).reshape(stack.shape[1:])
        return stack.amax(0) if kind == "Pmax" else stack.amin(0)
    if kind == "Pproduct":
        return stack.all(0) if stack.dtype == torch.bool else stack.prod(0)
    if kind == "Pbor":
        made = stack[0]
        for one in stack[1:]:
            made = made | one
        return made
    if stack.dtype == torch.bool:
        return stack.any(0)
    total = stack.sum(0)
    if averages == 1:
        return total
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, averages, rounding_mode="floor" if whole else None)


@dataclass
class Told:
    """What a rank saw."""

    outcomes: dict[int, tuple[str, str]] = field(default_factory=dict)
    """What became of each case by reshard, and by torch: right, refused, wrong, not tried."""
    refusals: dict[int, str] = field(default_factory=dict)
    """What reshard said when it refused."""
    problems: list[str] = field(default_factory=list)


def run_cases(rank: int, seeds: range) -> Told:
    """Every case by both, with gradients."""
    meshes = {sizes: mesh_on_four(sizes) for sizes in MESHES}
    told = Told()
    for seed in seeds if rank < 4 else ():
        case = random_case(seed)
        told.outcomes[seed] = run_case(case, meshes[case.sizes], told)
    return told


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_on_four(sizes: tuple[int, ...]) -> DeviceMesh:
    if sizes not in _meshes:
        _meshes[sizes] = DeviceMesh("cpu", torch.arange(4).reshape(sizes))
    return _meshes[sizes]


NOT_TRIED = RuntimeError("not tried")


def run_case(case: Case, mesh: DeviceMesh, told: Told) -> tuple[str, str]:
    truth = Truth(case, mesh)
    try:
        truth.source()
        wanted = truth.local()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError):
        wanted = None  # it has no value
    theirs = NOT_TRIED if case.is_too_much_for_torch else attempt(case, truth, by_torch)
    ours = attempt(case, truth, by_reshard)
    mine, other = verdict(case, truth, wanted, ours), verdict(case, truth, wanted, theirs)
    if mine == "refused":
        told.refusals[case.seed] = f"{type(ours).__name__}: {ours}"
        mine = mine if isinstance(ours, rs.ReshardError) else "wrong"
    if mine == "wrong":
        what = "".join(traceback.format_exception(ours)) if mine == "refused" else f"{ours}"
        told.problems.append(f"{case}\n{what}\nwanted {wanted}, torch {theirs}")
    return mine, "not tried" if theirs is NOT_TRIED else other


def by_torch(source: DTensor, case: Case, target: Sequence[Placement]) -> DTensor:
    return source.redistribute(
        source.device_mesh, target, async_op=case.async_op, forward_dtype=case.forward,
        backward_dtype=case.backward,
    )  # fmt: skip


def by_reshard(source: DTensor, case: Case, target: Sequence[Placement]) -> DTensor:
    return rs.move(
        source, to=(source.device_mesh, target), async_op=case.async_op, timeout=TIMEOUT,
        forward_dtype=case.forward, backward_dtype=case.backward,
    )  # fmt: skip


def attempt(case: Case, truth: Truth, move: Callable[..., DTensor]) -> Any:
    """The result and the gradient of the source; or the exception."""
    try:
        source = truth.source()
        moved = move(source, case, truth.target(source))
        wait_ready(moved.to_local())  # torch may raise only now
        found = None
        if case.has_gradients:
            gradient, _ = truth.gradient(moved.dtype)
            (found,) = torch.autograd.grad(moved, source, gradient)
        return moved, found
    except Exception as error:
        return error


def verdict(case: Case, truth: Truth, wanted: torch.Tensor | None, outcome: Any) -> str:
    if isinstance(outcome, Exception):
        return "refused"
    if wanted is None:
        return "wrong"
    moved, gradient = outcome
    target = [p for p in truth.target(truth.source()) if not isinstance(p, _MaskPartial)]
    placed = [p for p in moved.placements if not isinstance(p, _MaskPartial)]
    if placed != target or moved.shape != truth.full.shape:
        return "wrong"
    if moved.to_local().dtype != moved.dtype or not masks_fit(moved):
        return "wrong"
    if moved.dtype != (case.forward or case.dtype) or not close(moved.to_local(), wanted):
        return "wrong"
    if gradient is None:
        return "right"
    _, expected = truth.gradient(moved.dtype)
    same = gradient.placements == expected.placements and gradient.dtype == case.dtype
    return "right" if same and close(gradient.to_local(), expected.to_local()) else "wrong"


def masks_fit(moved: DTensor) -> bool:
    """Whether masks that stay pending are still of the rows that this rank has."""
    masks = [p.mask_buffer.data for p in moved.placements if isinstance(p, _MaskPartial)]
    shape = moved.to_local().shape
    return all(mask is None or mask.shape == shape[: mask.ndim] for mask in masks)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape:
        return bool(found.numel() == wanted.numel() == 0)
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(found, wanted)
    # Roots and shares are rounded; what is not is exact anyway.
    limit = 2e-2 if wanted.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return torch.allclose(found.detach().to(wanted.dtype), wanted, rtol=limit, atol=limit)


def summary(all_told: Sequence[Told]) -> Counter[tuple[str, str]]:
    """How many cases came out how, by reshard and by torch.

    By reshard a case comes out alike on all ranks; torch is wrong where it is wrong on one.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for seed in all_told[0].outcomes:
        mine = {told.outcomes[seed][0] for told in all_told}
        other = {told.outcomes[seed][1] for told in all_told}
        assert len(mine) == 1, f"{random_case(seed)}: {mine}"
        worst = next(word for word in ("wrong", "refused", "not tried", "right") if word in other)
        counts[mine.pop(), worst] += 1
    return counts


def refused_alone(all_told: Sequence[Told]) -> list[str]:
    """What reshard said where torch did something, and was not wrong on any rank."""
    return [
        f"{random_case(seed)}: {text}"
        for seed, text in all_told[0].refusals.items()
        if all(told.outcomes[seed][1] == "right" for told in all_told)
    ]


__all__ = ["Case", "Told", "random_case", "refused_alone", "run_cases", "summary"]
