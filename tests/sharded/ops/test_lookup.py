"""embedding, embedding_bag and linear where every rank has inputs of its own."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from reshard.errors import OperationError
from reshard.sharded import ShardedTensor, shard_tensor
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, boxes, check_close, chunk, sharded, values
from tests.soak import soaking

F64 = torch.float64
PERMUTED = [chunk(dim, order) for dim in (0, 1) for order in ((2, 0, 3, 1), (3, 2, 1, 0))]
LAYOUTS = [PERMUTED[0], chunk(1)]
if soaking():
    LAYOUTS = [chunk(0), chunk(1), *PERMUTED, chunk(0, [2, 1])]


def own(rank: int, rows: int, *size: int) -> torch.Tensor:
    """Other indices on every rank."""
    return torch.randint(rows, size, generator=torch.Generator().manual_seed(rank))


def check_own(op: Any, table: torch.Tensor, spec: Any) -> None:
    """The plain result of this rank's inputs; gradients summed over ranks."""
    weight = sharded(table, spec).requires_grad_()
    plain = table.clone().requires_grad_()
    found, wanted = op(weight), op(plain)
    assert not isinstance(found, ShardedTensor)
    check_close(found, wanted)
    scale = values(*wanted.shape, seed=dist.get_rank())
    (found * scale).sum().backward()
    (wanted * scale).sum().backward()
    total = plain.grad
    dist.all_reduce(total, group=pool_group(4))
    assert isinstance(weight.grad, ShardedTensor)
    assert weight.grad.cut == weight.cut
    check_close(weight.grad, total)


def lookups(rank: int) -> None:
    for rows, width in ((21, 11), (3, 5)):
        table = values(rows, width)
        sizes = [(4,), (5, 2 + rank), (0,) if rank == 1 else (3, 1, 2)]
        for spec in (*LAYOUTS, boxes(rows, width)):
            for size, padding in zip(sizes, (None, 2, -1), strict=True):
                look_up = partial(F.embedding, own(rank, rows, *size), padding_idx=padding)
                check_own(look_up, table, spec)
            check_own(partial(look_up, scale_grad_by_freq=True), table, spec)


def test_B75_embedding_of_own_indices(pool: Pool) -> None:
    pool.run(lookups, ranks=FOUR)


def bags(rank: int) -> None:
    rows, width = 17, 6
    table, index, line = values(rows, width), own(rank, rows, 5, 3), own(rank, rows, 9 + rank)
    starts = torch.tensor([0, 2, 2, 6][: 2 + rank % 3])
    ends = torch.cat([starts, torch.tensor([len(line)])])
    for number, spec in enumerate((*LAYOUTS, boxes(rows, width))):
        for at, (mode, padding) in enumerate(product(("sum", "mean", "max"), (None, 4))):
            how = {"mode": mode, "padding_idx": padding}
            ways = [
                bag(index, **how),
                bag(line, offsets=starts, **how),
                bag(line, offsets=ends, include_last_offset=True, **how),
            ]
            # In the usual run the three layouts take turns.
            for way in ways if soaking() else [ways[(number + at) % 3]]:
                check_own(way, table, spec)
        weights = values(5, 3, seed=rank).requires_grad_()
        check_own(bag(index, mode="sum", per_sample_weights=weights), table, spec)
        found, weights.grad = weights.grad, None
        plain = F.embedding_bag(index, table, mode="sum", per_sample_weights=weights)
        (plain * values(5, 6, seed=rank)).sum().backward()
        assert found is not None
        assert weights.grad is not None
        check_close(found, 2 * weights.grad)  # of the sharded table, and of the plain one


def bag(index: torch.Tensor, **how: Any) -> Any:
    return lambda weight: F.embedding_bag(index, weight, **how)


def test_B75_embedding_bag_of_own_indices(pool: Pool) -> None:
    pool.run(bags, ranks=FOUR)


def shortened(rank: int) -> None:
    rows, width = 21, 11
    for spec in (*LAYOUTS, boxes(rows, width)):
        for norm in (1.0, 2.0):
            for function in (F.embedding, F.embedding_bag):
                table = values(rows, width)
                weight, plain = sharded(table, spec), table.clone()
                index = own(rank, rows, 3, 2)
                everyone = torch.cat([own(one, rows, 3, 2) for one in FOUR])
                given: dict[str, Any] = {"max_norm": 1.5, "norm_type": norm}
                function(everyone, plain, **given)
                check_close(function(index, weight, **given), function(index, plain, **given))
                check_close(weight, plain)


def test_max_norm_shortens_what_any_rank_looks_up(pool: Pool) -> None:
    pool.run(shortened, ranks=FOUR)


def linears(rank: int) -> None:
    weight, bias = values(7, 5), values(7, seed=1)
    mine = values(2 + rank, 5, seed=10 + rank)
    for spec in (*LAYOUTS, boxes(7, 5)):
        check_own(partial(F.linear, mine), weight, spec)
        check_own(partial(F.linear, mine, bias=bias), weight, spec)
        x = mine.clone().requires_grad_()
        own_bias = sharded(bias, chunk(0)).requires_grad_()
        found = F.linear(x, sharded(weight, spec), own_bias)
        check_close(found, F.linear(mine, weight, bias))
        found.sum().backward()
        check_close(x.grad, weight.sum(0).expand_as(mine).contiguous())
        check_close(own_bias.grad, torch.full((7,), 14.0, dtype=F64))


def test_linear_of_own_inputs(pool: Pool) -> None:
    pool.run(linears, ranks=FOUR)


def alike(rank: int) -> None:
    index, table = own(0, 12, 4, 3), values(12, 6)
    ways: dict[str, Any] = {
        "embedding": F.embedding,
        "renorm": partial(F.embedding, max_norm=2.0),
        "by frequency": partial(F.embedding, scale_grad_by_freq=True),
        "sparse": partial(F.embedding, sparse=True),
        "bag": partial(F.embedding_bag, mode="max"),
    }
    for spec in (*LAYOUTS, boxes(12, 6)):
        for name, op in ways.items():
            weight, plain = sharded(table, spec).requires_grad_(), table.clone().requires_grad_()
            given = sharded(index, chunk(0)) if name == "bag" else index
            found, wanted = op(given, weight), op(index, plain)
            assert isinstance(found, ShardedTensor)
            check_close(found, wanted)
            found.sum().backward()
            wanted.sum().backward()
            assert plain.grad is not None
            check_close(weight.grad, plain.grad.to_dense())


def test_equal_inputs_count_once(pool: Pool) -> None:
    pool.run(alike, ranks=FOUR)


def linears_alike(rank: int) -> None:
    weight, bias, x = values(8, 5), values(8, seed=1), values(3, 5, seed=2)
    for spec in (*LAYOUTS, boxes(8, 5)):
        mine, given = sharded(weight, spec).requires_grad_(), x.clone().requires_grad_()
        own_bias = sharded(bias, chunk(0, (2, 0, 3, 1)))
        found = F.linear(given, mine, own_bias)
        assert isinstance(found, ShardedTensor)
        check_close(found, F.linear(x, weight, bias))
        found.sum().backward()
        check_close(mine.grad, x.sum(0).expand_as(weight).contiguous())
        check_close(given.grad, weight.sum(0).expand_as(x).contiguous())


def test_linear_of_equal_inputs_on_any_layout(pool: Pool) -> None:
    """Also where DTensor cannot express the layout of the weight or of the bias."""
    pool.run(linears_alike, ranks=FOUR)


def mistakes(rank: int) -> list[str]:
    told = []
    weight, index = sharded(values(12, 6), chunk(0, [2, 0, 3, 1])), own(rank, 12, 3)
    beyond = torch.tensor([12 if rank == 2 else 1])
    late = torch.tensor([1, 2] if rank == 1 else [0, 2])
    for op in (
        partial(F.embedding, beyond),
        bag(index, offsets=late),
        bag(index, offsets=None if rank else late),
        partial(F.embedding, index, max_norm=1.0 + rank),
        partial(F.linear, values(2, 5 + rank % 2)),
        partial(F.embedding, index, padding_idx=12),
        partial(F.embedding, index.double()),
    ):
        with pytest.raises(OperationError) as info:
            op(weight)
        told.append(str(info.value))
    check_close(weight, values(12, 6))
    return told


def test_a_wrong_input_of_one_rank_is_an_error_of_all(pool: Pool) -> None:
    told = pool.run(mistakes, ranks=FOUR)
    assert all(one == told[0] for one in told)
    assert "on rank 2: index 12 is out of range: the weight has 12 rows" in told[0][0]


def test_one_process_looks_up_without_a_group() -> None:
    table = shard_tensor(values(4, 3), chunk(0, [0]))
    found = F.embedding(torch.tensor([1, 3, 1]), table)
    check_close(found, values(4, 3)[[1, 3, 1]])
    with pytest.raises(OperationError, match="need a process group: call"):
        torch.mm(table, values(3, 2))
