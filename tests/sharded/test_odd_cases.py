"""What a critical reader found: each was silently wrong, hung or crashed once."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from reshard import CoverageError, Layout, Mesh, OperationError
from reshard.sharded import (
    ChunkShardingSpec,
    LayoutShardingSpec,
    ShardedOptimizer,
    ShardedTensor,
    reshard_local_shard,
    shard_tensor,
    zeros,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.shards import chunk, group_of, numbered, places

FOUR = range(4)
ALONE = ["rank:0/cpu", "rank:0/cpu"]


def cut(full: torch.Tensor, spec: object) -> ShardedTensor:
    return shard_tensor(full, spec, process_group=pool_group(4), scatter=False)


def along_negative_dims(rank: int) -> None:
    full = torch.linspace(-1, 1, 35, dtype=torch.float64).reshape(5, 7)
    for spec in (chunk(0), chunk(1)):
        one = cut(full, spec)
        for operation in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.softmax):
            for dim in (0, 1, -1, -2):
                found = operation(one, dim).full_tensor()
                torch.testing.assert_close(found, operation(full, dim), rtol=0, atol=1e-12)


def test_dims_counted_from_the_end(pool: Pool) -> None:
    pool.run(along_negative_dims, ranks=FOUR)


def averaged_losses(rank: int) -> None:
    logits = torch.sin(numbered(8, 5))
    target = torch.tensor([0, 1, -100, 3, 4, -100, -100, 2])
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    for options in ({}, {"weight": weight}):
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, **options)
        expected.backward()
        for spec in (chunk(0), chunk(1)):
            one = cut(logits, spec).requires_grad_()
            found = F.cross_entropy(one, target, **options)
            found.backward()
            assert abs(found.item() - expected.item()) < 1e-12
            torch.testing.assert_close(one.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)


def test_cross_entropy_counts_elements_and_not_ranks(pool: Pool) -> None:
    pool.run(averaged_losses, ranks=FOUR)


def state_that_lies_otherwise(rank: int) -> None:
    full = numbered(8, 6) / 10
    whole, one = nn.Parameter(full.clone()), nn.Parameter(cut(full, chunk(0)))
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in (whole, one)]
    for step in range(4):
        if step == 2:
            state = optimizers[1].state[one]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].resharded(chunk(1))
        for parameter, optimizer in zip((whole, one), optimizers, strict=True):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(one.full_tensor(), whole.detach(), rtol=0, atol=1e-12)


def test_fused_optimizers_change_state_that_lies_otherwise(pool: Pool) -> None:
    pool.run(state_that_lies_otherwise, ranks=FOUR)


def gradients_of_local_tensors(rank: int) -> None:
    full = numbered(8, 4)
    one, other = (cut(full * factor, chunk(0)).requires_grad_() for factor in (1, 2))
    for _ in range(2):
        ((one.local_tensor() + other.local_tensor()) ** 2).sum().backward()
    for found in (one.grad, other.grad):
        assert torch.equal(found.full_tensor(), 2 * 6 * full)
    transposed = cut(full, chunk(0)).t()
    (shard,) = transposed.local_shards()
    assert torch.equal(shard.tensor, full.t()[:, 2 * rank : 2 * rank + 2])


def test_gradients_have_memory_of_their_own(pool: Pool) -> None:
    pool.run(gradients_of_local_tensors, ranks=FOUR)


class Turned(ChunkShardingSpec):
    """Equal to others of its kind, which cut otherwise."""

    def __init__(self, turn: int) -> None:
        super().__init__(0, places(FOUR))
        object.__setattr__(self, "turn", turn)

    def build_metadata(self, tensor_sizes, tensor_properties):  # type: ignore[no-untyped-def]
        ranks = [(rank + self.turn) % 4 for rank in FOUR]
        return chunk(0, ranks).build_metadata(tensor_sizes, tensor_properties)


def specs_of_the_users(rank: int) -> None:
    full = numbered(8, 2)
    for turn in range(3):
        (shard,) = cut(full, Turned(turn)).local_shards()
        assert shard.metadata.shard_offsets[0] == 2 * ((rank - turn) % 4)


def test_equal_specs_of_the_users_may_cut_otherwise(pool: Pool) -> None:
    pool.run(specs_of_the_users, ranks=FOUR)


def ranks_without_rows(rank: int) -> None:
    full = torch.sin(numbered(5, 8))
    one = cut(full, chunk(0))
    ids = torch.tensor([[0, 4], [2, 3]])
    assert torch.equal(F.embedding(ids, one).full_tensor(), F.embedding(ids, full))
    found = F.max_pool1d(one.unsqueeze(0), 2).full_tensor()
    assert torch.equal(found, F.max_pool1d(full.unsqueeze(0), 2))
    torch.testing.assert_close((one @ one.t()).full_tensor(), full @ full.t())


def test_ranks_without_elements_do_not_stop_the_others(pool: Pool) -> None:
    pool.run(ranks_without_rows, ranks=FOUR)


def attention_by_name(rank: int) -> None:
    shape = (2, 4, 3, 8)
    parts = [torch.sin(numbered(*shape) + n) for n in range(3)]
    names = ("query", "key", "value")
    expected = F.scaled_dot_product_attention(*parts)
    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "- tp - -"))
    given = {name: cut(part, spec) for name, part in zip(names, parts, strict=True)}
    found = F.scaled_dot_product_attention(**given)
    torch.testing.assert_close(found.full_tensor(), expected)
    half = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp - -"))
    try:
        F.scaled_dot_product_attention(*(cut(part, half) for part in parts))
    except RuntimeError:
        return  # on all ranks alike: the others would wait


def test_attention_by_name_and_on_some_ranks(pool: Pool) -> None:
    pool.run(attention_by_name, ranks=FOUR)


def replicas_and_copies(rank: int) -> None:
    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "- -"))
    one = cut(numbered(3, 4), spec).requires_grad_()
    for _ in range(2):
        one.sum().backward()
    nn.utils.clip_grad_norm_([one], 1.0)
    assert isinstance(copy.copy(one), ShardedTensor)
    assert copy.copy(one).requires_grad
    if rank in (2, 3):
        mesh = DeviceMesh.from_group(group_of(2, 3), "cpu")
        tensor = DTensor.from_local(numbered(2, 2) + rank, mesh, [Shard(0)], run_check=False)
        assert ShardedTensor.from_dtensor(tensor).full_tensor().shape == (4, 2)
    moved = nn.Parameter(cut(numbered(8, 2), chunk(0)))
    moved.data = cut(numbered(4, 6), chunk(1))
    (moved * 2).sum().backward()
    assert moved.grad.sharding_spec() == chunk(1)


def test_replicas_copies_and_data_that_is_set(pool: Pool) -> None:
    pool.run(replicas_and_copies, ranks=FOUR)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_device_of_a_layout_spec_counts(pool: Pool, device: str) -> None:
    pool.run(device_of_a_layout, device, ranks=FOUR)


def device_of_a_layout(rank: int, device: str) -> None:
    from reshard.sharded import empty

    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "tp -"), device)
    assert empty(spec, 4, 4, process_group=pool_group(4)).device.type == device


def norms_of_uneven_tensors(rank: int) -> None:
    full = torch.sin(numbered(5, 7))
    for spec in (chunk(0), chunk(1)):
        for order in (2, 1, float("inf")):
            whole, one = full.clone().requires_grad_(), cut(full, spec).requires_grad_()
            whole.norm(order).backward()
            one.norm(order).backward()
            torch.testing.assert_close(one.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)
        found = cut(full, spec).sum(dim=[], keepdim=True)
        torch.testing.assert_close(found.full_tensor(), full.sum(dim=[], keepdim=True))


def test_gradients_of_norms_over_all_dims(pool: Pool) -> None:
    pool.run(norms_of_uneven_tensors, ranks=FOUR)


def scaled_losses(rank: int) -> list[float]:
    one, plain = nn.Parameter(cut(numbered(8, 2), chunk(0))), nn.Parameter(torch.ones(3).double())
    optimizer = torch.optim.SGD([one, plain], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        # Only the last element, which one rank has, becomes infinite.
        weight = torch.ones(8, 2, dtype=torch.float64)
        weight[7, 1] = factor
        scaler.scale((one * weight).sum() + plain.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert torch.equal(one.full_tensor(), numbered(8, 2) - 0.5)
    assert torch.equal(plain.detach(), torch.full((3,), 0.5).double())
    return scales


def test_loss_scaling_skips_a_step_on_all_ranks_alike(pool: Pool) -> None:
    assert pool.run(scaled_losses, ranks=FOUR) == [[4.0, 2.0]] * 4


def gradients_of_shards(rank: int) -> None:
    full = numbered(8, 3)
    for spec in (chunk(0, [0, 1, 2, 3, 0, 1, 2, 3]), chunk(0)):
        one = cut(full, spec).requires_grad_()
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


def copied_optimizers(rank: int) -> None:
    one = nn.Parameter(cut(numbered(8, 2), chunk(0)))
    optimizer = ShardedOptimizer({"one": one}, torch.optim.SGD, lr=0.5, momentum=0.9)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    (one * 2).sum().backward()
    optimizer.step()
    assert calls == [1]
    twin = copy.deepcopy(optimizer)
    (other,) = twin.named_params.values()
    assert other is not one
    twin.step()
    assert torch.equal(one.full_tensor(), numbered(8, 2) - 1)
    assert torch.equal(other.full_tensor(), numbered(8, 2) - 1 - 0.5 * (2 + 0.9 * 2))


def test_an_optimizer_is_copied_with_its_parameters(pool: Pool) -> None:
    pool.run(copied_optimizers, ranks=FOUR)


def forgotten_groups(rank: int) -> None:
    group = torch.distributed.new_group([0, 1, 2, 3], use_local_synchronization=True)
    gone = weakref.ref(group)
    one = shard_tensor(numbered(8, 4), chunk(0), process_group=group)
    one.resharded(chunk(1))
    torch.distributed.destroy_process_group(group)
    del one, group
    gc.collect()
    assert gone() is None


def test_a_group_that_was_resharded_on_can_go(pool: Pool) -> None:
    pool.run(forgotten_groups, ranks=FOUR)


def several_results_into_plain_tensors(rank: int) -> None:
    full = torch.sin(numbered(6, 5))
    values, indices = torch.empty(5, dtype=full.dtype), torch.empty(5, dtype=torch.int64)
    torch.max(cut(full, chunk(0)), 0, out=(values, indices))
    expected = full.max(0)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_several_results_go_into_plain_tensors(pool: Pool) -> None:
    pool.run(several_results_into_plain_tensors, ranks=FOUR)


def like_one_that_requires_gradients(rank: int) -> None:
    one = cut(numbered(6, 5), chunk(0))
    made = torch.ones_like(one, requires_grad=True)
    assert made.requires_grad
    (made.full_tensor() * 3).sum().backward()
    assert made.grad is not None
    assert made.grad.cut == made.cut
    assert torch.equal(made.grad.full_tensor(), torch.full((6, 5), 3.0, dtype=torch.float64))


def test_a_tensor_like_another_may_require_gradients(pool: Pool) -> None:
    pool.run(like_one_that_requires_gradients, ranks=FOUR)


def loaded_state(rank: int) -> None:
    weight = nn.Parameter(cut(torch.sin(numbered(6, 5)), chunk(0)))
    other = nn.Parameter(cut(torch.sin(numbered(6, 5)), chunk(1)))
    for param in (weight, other):
        param.grad = cut(torch.cos(numbered(6, 5)), chunk(0))
    first = torch.optim.AdamW([weight])
    first.step()
    second = ShardedOptimizer({"w": other}, torch.optim.AdamW)
    second.load_state_dict(first.state_dict())
    kept = second.state[other]["exp_avg"]
    assert kept.cut == other.cut
    assert torch.equal(kept.full_tensor(), first.state[weight]["exp_avg"].full_tensor())


def test_loaded_state_lies_as_its_parameter(pool: Pool) -> None:
    pool.run(loaded_state, ranks=FOUR)


def test_an_array_of_a_part_is_refused() -> None:
    one = shard_tensor(numbered(6, 5), ChunkShardingSpec(0, ALONE))
    with pytest.raises(OperationError, match=r"take full_tensor\(\)\.numpy\(\)"):
        one.numpy()
    with pytest.raises(OperationError, match="of which this rank has a part"):
        np.asarray(one)


def test_one_process_without_a_group() -> None:
    full = numbered(6, 5)
    one = shard_tensor(full, ChunkShardingSpec(0, ALONE)).requires_grad_()
    assert [tuple(shard.tensor.shape) for shard in one.local_shards()] == [(3, 5), (3, 5)]
    other = one.resharded(ChunkShardingSpec(1, ALONE))
    assert torch.equal(other.local_shards()[1].tensor, full[:, 3:])
    assert torch.equal(one.full_tensor(), full)
    assert torch.equal(one.gather(), full)
    (other.full_tensor() * full).sum().backward()
    assert torch.equal(one.grad.full_tensor(), full)


def test_shards_elsewhere_without_a_group() -> None:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    one = zeros(spec, 4, 4)
    with pytest.raises(CoverageError, match="init_process_group"):
        one.full_tensor()
