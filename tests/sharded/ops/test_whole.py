"""Operations that DTensor or torch does wrong on shards: right here, or refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reshard.errors import OperationError
from reshard.sharded import ShardedTensor
from tests.ranks.pool import Pool
from tests.sharded.specs_and_values import FOUR, boxes, check_close, chunk, sharded, specs, values
from tests.soak import soaking

F64, C128 = torch.float64, torch.complex128


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(values(*size, seed=seed), values(*size, seed=seed + 50))


def check_gradients(
    op: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], layouts: Sequence[Any]
) -> None:
    """Values and gradients of tensors in these layouts; None leaves one plain."""
    plain = [
        one.clone().requires_grad_(one.is_floating_point() or one.is_complex()) for one in tensors
    ]
    given = [
        (one.clone() if layout is None else sharded(one, layout)).requires_grad_(one.requires_grad)
        for one, layout in zip(plain, layouts, strict=True)
    ]
    wanted, found = op(*plain), op(*given)
    check_close(found, wanted)
    weight = (
        numbers(*wanted.shape, seed=9) if wanted.is_complex() else values(*wanted.shape, seed=9)
    )
    inputs = [one for one in plain if one.requires_grad]
    ours = torch.autograd.grad(found, [one for one in given if one.requires_grad], weight)
    for one, other in zip(ours, torch.autograd.grad(wanted, inputs, weight), strict=True):
        check_close(one, other)


COMPLEX: dict[str, Callable[..., torch.Tensor]] = {
    "conj": lambda a, b: a.conj() * 2 + b,
    "sum of conj": lambda a, b: (a.conj() + b).sum(),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "exp": lambda a, b: a.exp() + b,
    "sin": lambda a, b: b.sin() * a,
    "abs": lambda a, b: (a * b.conj()).abs(),
    "real": lambda a, b: a.real + b.imag,
    "resolved": lambda a, b: a.conj().resolve_conj() - b.conj(),
    "sgn": lambda a, b: torch.sgn(a) + b,
}


def complex_numbers(rank: int) -> None:
    a, b = numbers(7, 9), numbers(7, 9, seed=1)
    some = specs(7, 9).values() if soaking() else (chunk(0), boxes(7, 9))
    for number, spec in enumerate(some):
        for at, (name, op) in enumerate(COMPLEX.items()):
            if name == "real" and spec not in (chunk(0), chunk(1)):
                continue  # refused: DTensor cannot express the layout
            usual = (spec, None)[(number + at) % 2]  # they take turns
            for other in (spec, None, chunk(1)) if soaking() else (usual,):
                check_gradients(op, [a, b], [spec, other])
        x = sharded(a, spec)
        check_close(x.conj(), a.conj().resolve_conj())
        check_close(x.conj().sum(0), a.conj().sum(0))
        check_close(x + b.conj(), (a + b.conj()).resolve_conj())
    for dim in (0, 1):
        x = sharded(a, chunk(dim))
        check_gradients(lambda a, b: a @ b.mH, [a, b], [chunk(dim), chunk(1 - dim)])
        check_close(torch.linalg.pinv(x), torch.linalg.pinv(a))
        check_close(torch.fft.hfft(x), torch.fft.hfft(a))
        check_close(
            torch.fft.ihfft(sharded(a.real.contiguous(), chunk(dim))), torch.fft.ihfft(a.real)
        )


def test_complex_tensors_and_conjugates(pool: Pool) -> None:
    pool.run(complex_numbers, ranks=FOUR)


def asked_gradients(rank: int) -> None:
    full, other = values(7, 9), values(7, 9, seed=1)
    for spec in specs(7, 9).values():
        x, plain, unused = (
            sharded(full, spec).requires_grad_(),
            other.clone().requires_grad_(),
            None,
        )
        unused = other.clone().requires_grad_()
        gradients = torch.autograd.grad((x * plain).sum(), [x, plain, unused], allow_unused=True)
        check_close(gradients[0], other)
        check_close(gradients[1], full)
        assert gradients[2] is None
        assert not isinstance(gradients[1], ShardedTensor)
        (x * plain).sum().backward(inputs=[plain])
        check_close(plain.grad, full)
        assert x.grad is None
        torch.autograd.backward([(x * plain).sum()], inputs=[x, plain])
        check_close(x.grad, other)
        check_close(plain.grad, 2 * full)
        check_gradients(torch.sgn, [full], [spec])


def test_gradients_of_chosen_inputs(pool: Pool) -> None:
    pool.run(asked_gradients, ranks=FOUR)


def convolutions(rank: int) -> None:
    x, w, b = values(4, 8, 6), values(8, 8, 3, seed=1), values(8, seed=2)
    permuted = chunk(1, [3, 2, 0, 1])
    for cut in (
        (None, chunk(0)),
        (chunk(1), None),
        (chunk(1), chunk(1)),
        (chunk(0), None),
        (chunk(0), chunk(0)),
        (chunk(2), chunk(1)),
        (permuted, None),
    ):
        check_gradients(F.conv1d, [x, w, b], [*cut, None])
        check_gradients(F.conv1d, [x, w, b], [*cut, chunk(0)])
        check_gradients(F.conv_transpose1d, [x, w], [*cut])
    check_gradients(lambda x, w: F.conv1d(x, w, groups=2), [x, w[:, :4]], [chunk(1), chunk(0)])
    check_gradients(F.conv2d, [values(2, 4, 5, 5), values(6, 4, 3, 3)], [chunk(1), chunk(1)])


def test_convolutions_cut_along_channels(pool: Pool) -> None:
    pool.run(convolutions, ranks=FOUR)


def by_index(rank: int) -> None:
    full = values(8, 9)
    short = torch.tensor([[0, 2, 1], [3, 3, 0]])
    for spec in (None, chunk(0), chunk(1)):
        for index_spec in (None, chunk(0), chunk(1)):
            if spec is None and index_spec is None:
                continue
            for dim in (0, 1, -1) if soaking() else (0, -1):
                check_gradients(
                    lambda x, i, dim=dim: torch.gather(x, dim, i), [full, short], [spec, index_spec]
                )
                for source_spec in (None, chunk(1)) if soaking() else (chunk(1),):
                    check_gradients(
                        lambda x, i, s, dim=dim: torch.scatter_add(x, dim, i, s),
                        [full, short, values(2, 3, seed=2)],
                        [spec, index_spec, source_spec],
                    )
    for dim in (0, 1):
        for along in (0, 1, -1, -2):
            check_gradients(lambda x, along=along: x.select(along, 3), [full], [chunk(dim)])
            check_gradients(lambda x, along=along: x.narrow(along, 1, 4), [full], [chunk(dim)])


def test_gather_scatter_and_select(pool: Pool) -> None:
    pool.run(by_index, ranks=FOUR)


def ones(rank: int) -> None:
    for shape in ((1, 1, 4), (1, 4, 1), (3, 1, 0), (1,)):
        full = values(*shape)
        for dim in range(len(shape)):
            ops: list[Callable[..., torch.Tensor]] = [
                lambda x: x.transpose(0, -1),
                lambda x: x.exp() * values(*x.shape),
                lambda x: x.sum(0),
                lambda x: x.unsqueeze(0),
            ]
            for op in ops if soaking() or len(shape) == 1 else ops[dim % 2 :: 2]:
                check_gradients(op, [full], [chunk(dim)])


def test_dims_of_one_and_of_nothing(pool: Pool) -> None:
    pool.run(ones, ranks=FOUR)


PRODUCTS: list[Callable[[Any, torch.Tensor], Any]] = [
    lambda x, w: x @ w,
    lambda x, w: x.t() @ x,
    lambda x, w: w.t() @ x.t(),
    lambda x, w: x @ x,
]


def products(rank: int) -> list[str]:
    told = []
    for spec in (boxes(7, 9), chunk(0, [2, 1])):
        x = sharded(values(7, 9), spec)
        for op in PRODUCTS:
            with pytest.raises(OperationError, match="is not supported for ShardedTensor") as info:
                op(x, values(9, 4))
            told.append(str(info.value))
    return told


def test_a_refused_product_says_why(pool: Pool) -> None:
    told = pool.run(products, ranks=FOUR)
    assert all(one == told[0] for one in told)


def truth_of_bytes(rank: int) -> None:
    full = (torch.arange(20).reshape(5, 4) % 3).to(torch.uint8)
    for spec in specs(5, 4).values():
        x = sharded(full, spec)
        for op in (torch.any, torch.all):
            check_close(op(x), op(full))
            check_close(op(x, 0), op(full, 0))


def test_any_and_all_of_bytes_are_0_or_1(pool: Pool) -> None:
    pool.run(truth_of_bytes, ranks=FOUR)
