"""Tensors of every dtype and of any strides move as they are, and change dtype where asked."""

from __future__ import annotations

import warnings

import pytest
import torch

import reshard as rs
from reshard.dtypes import ITEMSIZE
from tests.ranks.live import bits, local_of, locals_of, numbered, same_bits
from tests.ranks.pool import Pool
from tests.soak import soaking

FOUR = range(4)
TRANSPORTS = ["auto", "peer", "shared", "network"]
GRID = rs.Mesh(dp=2, tp=2)
LINE = rs.Mesh(tp=4)


def noise(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Any bits at all, NaNs among them."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(len(dtype))
    most = 2 if dtype == "bool" else 256
    size = [*shape[:-1], shape[-1] * ITEMSIZE[dtype]]
    drawn = torch.randint(0, most, size, dtype=torch.uint8, generator=generator)
    return drawn.view(kind)


def spec(full: torch.Tensor, layout: rs.Layout, dtype: str | None = None) -> rs.TensorSpec:
    return rs.TensorSpec(tuple(full.shape), dtype or str(full.dtype), layout)


def one_plan(full: torch.Tensor, have: rs.Layout, want: rs.Layout, **options: object) -> rs.Plan:
    return rs.plan(have, want, shape=tuple(full.shape), dtype=str(full.dtype), **options)


def move_every_dtype(rank: int, transport: str, shape: tuple[int, ...]) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    full = {dtype: noise(shape, dtype) for dtype in ITEMSIZE}
    have = {name: spec(tensor, rs.Layout(GRID, "dp tp")) for name, tensor in full.items()}
    want = {name: spec(tensor, rs.Layout(LINE, "tp:2 -")) for name, tensor in full.items()}
    out = rs.plan(have, want).run(locals_of(full, have, rank), transport=transport)
    same_bits(out, locals_of(full, want, rank))


SMALL, LARGE = (7, 5), (130, 130)
WAYS = [(shape, transport) for shape in (SMALL, LARGE) for transport in TRANSPORTS]


# A soak also has small messages by each way within the host.
@pytest.mark.parametrize(
    ("shape", "transport"),
    [way for way in WAYS if soaking() or way[0] == LARGE or way[1] in ("auto", "network")],
)
def test_every_dtype_in_one_move(pool: Pool, transport: str, shape: tuple[int, ...]) -> None:
    pool.run(move_every_dtype, transport, shape, ranks=FOUR)


def strided(tensor: torch.Tensor, style: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor with other strides, and the memory that it is stored in."""
    if style == "transposed":
        memory = tensor.permute(*reversed(range(tensor.dim()))).contiguous()
        return memory.permute(*reversed(range(tensor.dim()))), memory
    steps = [2 + dim for dim in range(tensor.dim())]
    sizes = [1 + size * step for size, step in zip(tensor.shape, steps, strict=True)]
    memory = torch.full(sizes, 99, dtype=tensor.dtype)
    view = memory[tuple(slice(1, None, step) for step in steps)]
    return view.copy_(tensor), memory


def move_expanded(rank: int, transport: str) -> None:
    for width in (5, 50_000):
        full = numbered((width,)).expand(8, width)
        have, want = rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp")
        source = numbered((width,)).expand(2, width)
        out = one_plan(full, have, want).run({"tensor": source}, transport=transport)
        assert torch.equal(out["tensor"], local_of(full, want, rank))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_expanded_source(pool: Pool, transport: str) -> None:
    pool.run(move_expanded, transport, ranks=FOUR)


def pad_and_crop(rank: int, style: str) -> None:
    full = {"padded": numbered((10, 6)) + 1, "cropped": numbered((10, 6)) + 1}
    have = {name: spec(tensor, rs.Layout(GRID, "dp tp")) for name, tensor in full.items()}
    made = {
        "padded": torch.nn.functional.pad(full["padded"], (0, 0, 0, 7)),
        "cropped": full["cropped"][3:8],
    }
    names = {
        "padded": rs.take("padded", pad={0: 17}),
        "cropped": rs.take("cropped", crop={0: (3, 8)}),
    }
    for text in ("tp -", "tp:3 -", "- tp", "- - | flat tp"):
        want = {name: spec(tensor, rs.Layout(LINE, text)) for name, tensor in made.items()}
        plan = rs.plan(have, want, names=names)
        expected = locals_of(made, want, rank)
        into = {name: torch.full_like(tensor, 5) for name, tensor in expected.items()}
        if style != "plain":
            into = {name: strided(tensor, style)[0] for name, tensor in into.items()}
        same_bits(plan.run(locals_of(full, have, rank)), expected)
        same_bits(plan.run(locals_of(full, have, rank), into=into), expected)


@pytest.mark.parametrize("style", ["plain", "transposed", "stepped"])
def test_padding_is_zeros_and_the_rest_is_cropped(pool: Pool, style: str) -> None:
    pool.run(pad_and_crop, style, ranks=FOUR)


def move_parameters(rank: int) -> None:
    """Values move; no graph is made, and none is broken."""
    full = numbered((8, 6))
    have, want = rs.Layout(GRID, "dp tp"), rs.Layout(LINE, "- tp")
    plan = one_plan(full, have, want)
    leaf = local_of(full, have, rank).requires_grad_()
    into = torch.nn.Parameter(torch.zeros(8, len(local_of(full, want, rank)[0])))
    for source in (leaf, leaf * 1):
        for target in (None, {"tensor": into}):
            out = plan.run({"tensor": source}, into=target)["tensor"]
            assert out.grad_fn is None
            assert out.requires_grad == (target is not None)
            assert torch.equal(out, local_of(full, want, rank))
            into.data.zero_()
    leaf.sum().backward()
    assert bool((leaf.grad == 1).all())


def test_tensors_that_require_gradients(pool: Pool) -> None:
    pool.run(move_parameters, ranks=FOUR)


def move_conjugate(rank: int) -> tuple[str, bytes]:
    full = torch.complex(numbered((4, 4)), numbered((4, 4), first=3))
    plan = one_plan(full, rs.Layout(LINE, "tp -"), rs.Layout(LINE, "- tp"))
    mine = local_of(full, rs.Layout(LINE, "tp -"), rank)
    try:
        out = plan.run({"tensor": mine.conj()})["tensor"]
    except rs.TensorError as error:
        return str(error), b""
    return "", bits(out) + bits(local_of(full.conj().resolve_conj(), rs.Layout(LINE, "- tp"), rank))


def test_a_lazy_conjugate_is_never_taken_for_the_tensor(pool: Pool) -> None:
    for message, both in pool.run(move_conjugate, ranks=FOUR):
        assert "resolve_conj" in message or both[: len(both) // 2] == both[len(both) // 2 :]
        assert message or both


def cast_complex_to_bool(rank: int) -> None:
    """As torch casts: False is 0 only. Every rank keeps one part and receives one."""
    full = torch.tensor([0, 1, 1j, -2j], dtype=torch.complex64).repeat(4)
    have = {"w": spec(full, rs.Layout(LINE, "tp"))}
    want = {"w": spec(full, rs.Layout(LINE, "tp:2"), "bool")}
    out = rs.plan(have, want).run(locals_of({"w": full}, have, rank))
    same_bits(out, locals_of({"w": full.to(torch.bool)}, want, rank))


def test_complex_numbers_become_true_if_any_part_is_not_zero(pool: Pool) -> None:
    pool.run(cast_complex_to_bool, ranks=FOUR)


def add_up_complex32(rank: int) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    have, want = rs.Layout(LINE, "- | sum tp"), rs.Layout(LINE, "tp")
    local = torch.full((8,), complex(rank + 1, -rank), dtype=torch.complex64)
    moved = rs.move(local.to(torch.complex32), have, want, shape=(8,))
    expected = torch.full((2,), complex(10, -6), dtype=torch.complex64)
    assert torch.equal(moved.to(torch.complex64), expected)


def test_sums_of_complex32(pool: Pool) -> None:
    pool.run(add_up_complex32, ranks=FOUR)
