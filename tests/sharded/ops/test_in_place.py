"""Operations in place on sharded tensors: the tensor changes, or an error says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from reshard import Layout, Mesh, OperationError
from reshard.sharded import LayoutShardingSpec, ShardedTensor
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    check_close,
    check_lies_like,
    chunk,
    numbered,
    sharded,
    specs,
    values,
)
from tests.soak import soaking

Op = Callable[..., Any]
F64 = torch.float64

ONE, IDX = torch.ones(2, 9, dtype=F64), torch.tensor([0, 3])
IN_PLACE: dict[str, Op] = {
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3),
    "abs_": lambda x, y: x.abs_(),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "iadd": lambda x, y: x.__iadd__(y),
    "mul_ by itself": lambda x, y: x.mul_(x),
    "add a row": lambda x, y: x.add_(torch.arange(9.0, dtype=F64)),
    "add a column": lambda x, y: x.mul_(torch.arange(7.0, dtype=F64)[:, None]),
    "add integers": lambda x, y: x.add_(torch.ones(7, 9, dtype=torch.int64)),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ a row": lambda x, y: x.copy_(torch.ones(9, dtype=F64)),
    "copy_ float": lambda x, y: x.copy_(y.float()),
    "all of it": lambda x, y: x.__setitem__(slice(None), y),
    "by mask": lambda x, y: x.__setitem__(x > 0, 0.0),
    "by index": lambda x, y: x.__setitem__(IDX, 0.0),
    "index_add_": lambda x, y: x.index_add_(0, IDX, ONE),
    "index_copy_": lambda x, y: x.index_copy_(0, IDX, ONE),
    "scatter_": lambda x, y: x.scatter_(0, torch.zeros(1, 9, dtype=torch.int64), 3.0),
    "masked_scatter_": lambda x, y: x.masked_scatter_(x > 0, values(7, 9, seed=2)),
    "triu_": lambda x, y: x.triu_(),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "addmm_": lambda x, y: x.addmm_(torch.ones(7, 2, dtype=F64), ONE),
    "eye_": lambda x, y: torch.nn.init.eye_(x),
    "add out": lambda x, y: torch.add(y, 1, out=x),
    "mm out": lambda x, y: torch.mm(torch.ones(7, 2, dtype=F64), ONE, out=x),
    "data": lambda x, y: setattr(x, "data", x.data * 2),
}


def in_place(rank: int) -> None:
    A, B = values(7, 9), values(7, 9, seed=1)
    other, given = sharded(B, chunk(1)), specs(7, 9).values()
    kept = [sharded(A, spec) for spec in given]
    for at, op in enumerate(IN_PLACE.values()):
        wanted = A.clone()
        op(wanted, B)
        for number, (spec, before) in enumerate(zip(given, kept, strict=True)):
            if (number - at) % 4 > 1 and not soaking():
                continue  # two layouts take turns
            x = sharded(A, spec)
            op(x, other)
            check_lies_like(x, before)
            check_close(x, wanted)


def test_B72_D18_in_place_changes_the_tensor_itself(pool: Pool) -> None:
    pool.run(in_place, ranks=FOUR)


def drawn(rank: int) -> None:
    torch.manual_seed(rank)
    for spec in (
        LayoutShardingSpec(Layout(Mesh(dp=2, tp=2), "tp -")),
        LayoutShardingSpec(Layout(Mesh(dp=4), "- -")),
    ):
        tensor = sharded(values(6, 4), spec)
        for made in (
            F.dropout(tensor, 0.5),
            torch.rand_like(tensor),
            tensor.clone().normal_(),
            tensor.bernoulli_(0.5),
        ):
            told = [torch.empty(6, 4, dtype=F64) for _ in FOUR]
            mine = torch.zeros(6, 4, dtype=F64)
            for shard in made.local_shards():
                at = shard.metadata.shard_offsets[0]
                mine[at : at + shard.metadata.shard_sizes[0]] = shard.tensor
            torch.distributed.all_gather(told, mine, group=pool_group(4))
            assert torch.equal(told[0], told[2])
            assert torch.equal(told[1], told[3])


def test_random_numbers_are_the_same_in_all_replicas(pool: Pool) -> None:
    pool.run(drawn, ranks=FOUR)


def views(rank: int) -> None:
    full = values(8, 8)
    x = sharded(full, chunk(0))
    x.view(8, 2, 4).add_(1)
    x.t().mul_(2)
    x[:, 3].zero_()
    wanted = (full + 1) * 2
    wanted[:, 3] = 0
    check_close(x, wanted)
    for write in (
        lambda: x[0].zero_(),
        lambda: x.__setitem__(0, 1.0),
        lambda: x.chunk(2)[0].detach().fill_(1),
        lambda: x.diagonal().zero_(),
        lambda: x.t_(),
        lambda: x.unsqueeze_(0),
    ):
        with pytest.raises(OperationError, match=r"layout .* and shape"):
            write()
    check_close(x, wanted)
    check_close(x[0].clone().zero_(), torch.zeros(8, dtype=F64))


def test_writing_into_a_view_is_never_lost(pool: Pool) -> None:
    pool.run(views, ranks=FOUR)


def several_results_into_plain_tensors(rank: int) -> None:
    full = torch.sin(numbered(6, 5))
    values, indices = torch.empty(5, dtype=full.dtype), torch.empty(5, dtype=torch.int64)
    torch.max(sharded(full, chunk(0)), 0, out=(values, indices))
    expected = full.max(0)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_several_results_go_into_plain_tensors(pool: Pool) -> None:
    pool.run(several_results_into_plain_tensors, ranks=FOUR)


def without_elements_on_a_rank(rank: int) -> None:
    for rows in (1, 2, 7):
        full, row = values(rows, 9), torch.arange(9.0, dtype=F64)
        x = ShardedTensor.from_dtensor(sharded(full, chunk(0)).to_dtensor(), pool_group(4))
        x.add_(row)
        x.t().mul_(row[:, None])
        check_close(x, (full + row) * row)


def test_a_row_is_added_also_if_a_rank_has_no_elements(pool: Pool) -> None:
    pool.run(without_elements_on_a_rank, ranks=FOUR)


def several_sharded_results(rank: int) -> None:
    full = values(7, 9)
    for spec in specs(7, 9).values():
        mantissa = sharded(torch.zeros(7, 9, dtype=F64), spec)
        exponent = sharded(torch.zeros(7, 9, dtype=torch.int32), chunk(1))
        found = torch.frexp(sharded(full, chunk(0)), out=(mantissa, exponent))
        assert found[0] is mantissa
        for one, wanted in zip((mantissa, exponent), torch.frexp(full), strict=True):
            check_close(one, wanted)


def test_each_of_several_results_is_written(pool: Pool) -> None:
    pool.run(several_sharded_results, ranks=FOUR)


def running_statistics(rank: int) -> None:
    """Plain and sharded statistics, of a batch whose rows or columns are on other ranks."""
    full, scale = values(6, 9), values(9)
    for spec in (chunk(0), chunk(1)):
        for is_sharded in (False, True):
            wanted = [torch.zeros(9, dtype=F64), torch.ones(9, dtype=F64)]
            found = [sharded(one, chunk(0)) if is_sharded else one.clone() for one in wanted]
            batch = sharded(full, spec)
            for training in (True, False):
                result = F.batch_norm(batch, *found, scale, training=training)
                check_close(result, F.batch_norm(full, *wanted, scale, training=training))
                check_close(found[0], wanted[0])
                check_close(found[1], wanted[1])
    wanted = [torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)]
    found = [one.clone() for one in wanted]
    images = values(2, 3, 9)
    result = F.instance_norm(sharded(images, chunk(2)), *found)
    check_close(result, F.instance_norm(images, *wanted))
    check_close(found[0], wanted[0])
    check_close(found[1], wanted[1])


def test_batch_norm_updates_its_statistics(pool: Pool) -> None:
    pool.run(running_statistics, ranks=FOUR)
