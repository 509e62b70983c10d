"""Gradients of local tensors and of shards."""

from __future__ import annotations

import torch

from reshard.sharded import (
    reshard_local_shard,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import FOUR, chunk, numbered, sharded


def gradients_of_local_tensors(rank: int) -> None:
    full = numbered(8, 4)
    one, other = (sharded(full * factor, chunk(0)).requires_grad_() for factor in (1, 2))
    for _ in range(2):
        ((one.local_tensor() + other.local_tensor()) ** 2).sum().backward()
    for found in (one.grad, other.grad):
        assert torch.equal(found.full_tensor(), 2 * 6 * full)
    transposed = sharded(full, chunk(0)).t()
    (shard,) = transposed.local_shards()
    assert torch.equal(shard.tensor, full.t()[:, 2 * rank : 2 * rank + 2])


def test_gradients_have_memory_of_their_own(pool: Pool) -> None:
    pool.run(gradients_of_local_tensors, ranks=FOUR)


def gradients_of_shards(rank: int) -> None:
    full = numbered(8, 3)
    for spec in (chunk(0, [0, 1, 2, 3, 0, 1, 2, 3]), chunk(0)):
        one = sharded(full, spec).requires_grad_()
        shards = one.local_shards()
        assert all(shard.tensor.requires_grad for shard in shards)
        sum((shard.tensor**2).sum() for shard in shards).backward()
        assert torch.equal(one.grad.full_tensor(), 2 * full)
        with torch.no_grad():
            for shard in one.local_shards():
                shard.tensor.add_(1)
        assert torch.equal(one.full_tensor(), full + 1)
    local = full[2 * rank : 2 * rank + 2].clone().requires_grad_()
    twice = chunk(1, [0, 1, 2, 3, 0])
    shards, _ = reshard_local_shard(local, full.shape, chunk(0), twice, pool_group(4))
    sum(shard.tensor.sum() for shard in shards).backward()
    assert torch.equal(local.grad, torch.ones_like(local))


def test_gradients_of_shards_reach_the_tensor(pool: Pool) -> None:
    pool.run(gradients_of_shards, ranks=FOUR)
