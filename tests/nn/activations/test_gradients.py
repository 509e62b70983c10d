"""Gradients are bit-identical with and without resharded activations, and memory is saved."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

from reshard.nn import (
    input_reshard,
    pack_activation,
    resharding_of,
    unpack_activation,
)
from tests.nn.activations.blocks import MLP, Attention, Block, Parallel
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Make,
    check_same,
    checkpointed,
    checkpointed_again,
    numbers,
    same,
)
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases, soaking


def megatron_blocks(rank: int, size: int) -> None:
    group = pool_group(size)
    makers: list[Make] = [
        lambda: MLP(HIDDEN, 64, group),
        lambda: Attention(HIDDEN, 4, group),
        lambda: Block(HIDDEN, group),
        lambda: Block(HIDDEN, group, dropout=0.3),
        lambda: nn.Sequential(Block(HIDDEN, group), Block(HIDDEN, group, dropout=0.1)),
    ]
    x = numbers(3, 5, HIDDEN)
    for make in makers:
        model = check_same(make, lambda one: input_reshard(one, group, 0), x)
        stats = resharding_of(model).stats()
        assert stats.bytes_saved > 0
        assert stats.restores > 0
    check_same(makers[-1], lambda one: input_reshard(one, group, 0, modules=["{i}", "*.mlp"]), x)


@pytest.mark.parametrize("size", [2, 4])
def test_D2_D27_megatron_blocks(pool: Pool, size: int) -> None:
    pool.run(megatron_blocks, size, ranks=range(size))


def norms(rank: int) -> None:
    group = pool_group(4)
    for batch in (*range(1, 10), 16, 17) if soaking() else (1, 2, 3, 4, 5, 8, 17):
        for make in (lambda: nn.LayerNorm(HIDDEN), lambda: nn.RMSNorm(HIDDEN)):
            check_same(make, lambda one: input_reshard(one, group, 0), numbers(batch, HIDDEN))


def test_D1_norms_of_every_batch(pool: Pool) -> None:
    pool.run(norms, ranks=FOUR)


def uneven(rank: int) -> None:
    group = pool_group(4)
    calls = (None, checkpointed, checkpointed_again)
    for number, rows in enumerate((1, 2, 3, 5, 7, 9)):
        for call in calls if soaking() else [calls[number % 3]]:
            check_same(
                lambda: MLP(HIDDEN, 64, group),
                lambda one: input_reshard(one, group, -1),
                numbers(rows, HIDDEN),
                call,
            )


def test_D3_uneven_rows(pool: Pool) -> None:
    pool.run(uneven, ranks=FOUR)


def dtensor_layers(rank: int, size: int) -> None:
    mesh = mesh_of(size)
    for kind in (None, CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT):
        model = check_same(
            partial(wrapped, mesh, kind),
            lambda one: input_reshard(one, mesh, 0),
            numbers(6, HIDDEN),
        )
        assert resharding_of(model).stats().bytes_saved > 0


def wrapped(mesh: DeviceMesh, kind: CheckpointImpl | None) -> nn.Module:
    model = Parallel(HIDDEN, mesh, 2)
    return model if kind is None else checkpoint_wrapper(model, kind)


@pytest.mark.parametrize("size", [2, 4])
def test_B98_D2_tensor_parallel_layers_of_pytorch(pool: Pool, size: int) -> None:
    pool.run(dtensor_layers, size, ranks=range(size))


def on_two_axes(rank: int) -> None:
    mesh = mesh_of(2, 4)
    model = check_same(
        lambda: Parallel(HIDDEN, mesh["tp"], 1),
        lambda one: input_reshard(one, mesh["tp"], 0),
        numbers(6, HIDDEN),
    )
    assert resharding_of(model).stats().bytes_saved > 0

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spread = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
            found: torch.Tensor = (spread * spread.exp()).to_local()
            return found

    model = check_same(Whole, lambda one: input_reshard(one, mesh["tp"], 0), numbers(6, HIDDEN))
    # What the product saves: the input, its exponential (which exp saves, too).
    assert resharding_of(model).stats().bytes_seen == 2 * 2 * 6 * HIDDEN * 4


def test_D25_a_mesh_of_two_axes(pool: Pool) -> None:
    pool.run(on_two_axes)


def kept_bytes(rank: int) -> None:
    """The table of the papers, a quarter as wide: 4 layers of which the inputs are 1 MiB."""
    group, hidden, tokens = pool_group(4), 128, 512
    whole = 4 * tokens * hidden * 4
    for recompute in (True, False):
        layers = nn.ModuleList([MLP(hidden, 4 * hidden, group) for _ in range(4)])
        if recompute:
            layers = nn.ModuleList([checkpoint_wrapper(one) for one in layers])
        input_reshard(layers, group, 0, modules="{i}")
        y = x = numbers(tokens, hidden).requires_grad_()
        inputs = []
        for layer in layers:
            inputs.append(StorageWeakRef(y.untyped_storage()))
            y = y + layer(y)
        stats = resharding_of(layers).stats()
        assert stats.bytes_seen == whole
        assert stats.bytes_kept == whole // 4
        # The caller holds the first input; the others are freed.
        assert [one.expired() for one in inputs] == [False, True, True, True]
        y.sum().backward()
        stats = resharding_of(layers).stats()
        assert stats.restores == 4
        assert stats.collectives <= 5
        assert x.grad is not None


def test_kept_is_one_of_n(pool: Pool) -> None:
    pool.run(kept_bytes, ranks=FOUR)


def training(rank: int, call: Any) -> None:
    group, steps = pool_group(4), cases(3, 50)

    def trained(wrap: bool) -> list[torch.Tensor]:
        model = nn.Sequential(Block(HIDDEN, group), Block(HIDDEN, group, dropout=0.1))
        if wrap:
            input_reshard(model, group, 0, modules=["*.mlp", "*.attention"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(100 + rank)
        for step in range(steps):
            x = numbers(2, 4, HIDDEN, seed=step)
            loss = (model(x) if call is None else call(model, x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    same(trained(True), trained(False))


@pytest.mark.parametrize("call", [None, checkpointed], ids=["plain", "checkpoint"])
def test_weights_stay_the_same(pool: Pool, call: Any) -> None:
    pool.run(training, call, ranks=FOUR)


def every_dtype(rank: int) -> None:
    group = pool_group(4)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]
    kinds += [torch.float8_e4m3fn, torch.float64]
    for kind in kinds:
        for size in ((), (0, 3), (3,), (7,), (5, 3)):
            raw = numbers(*size).mul(10).abs()
            x = raw.to(torch.int64).to(kind) if not kind.is_floating_point else raw.to(kind)
            kept = pack_activation(group, 0, x)
            found = unpack_activation(group, 0, kept)
            assert found.dtype == x.dtype
            assert found.stride() == x.stride()
            as_bytes = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found, x)]
            assert torch.equal(*as_bytes), (kind, size)


def test_D24_every_dtype(pool: Pool) -> None:
    pool.run(every_dtype, ranks=FOUR)


def strided_shards(rank: int) -> None:
    mesh = mesh_of(4)
    full = numbers(8, 6)
    for place in (Shard(0), _StridedShard(0, split_factor=2)):
        cut = DTensor.from_local(full.chunk(4)[rank].clone(), mesh, [Shard(0)])
        if isinstance(place, _StridedShard):
            cut = DTensor(
                cut._local_tensor,
                cut._spec.__class__(mesh, (place,), tensor_meta=cut._spec.tensor_meta),
                requires_grad=False,
            )
        found = unpack_activation(mesh, 0, cut)
        assert isinstance(found, DTensor)
        assert found.placements == (Replicate(),)
    assert unpack_activation(mesh, 0, full) is full


def test_B100_strided_shards_become_whole(pool: Pool) -> None:
    pool.run(strided_shards, ranks=FOUR)


def left_alone(rank: int) -> None:
    group = pool_group(4)
    model = MLP(HIDDEN, 64, group)
    before = vars(model).copy()
    assert input_reshard(model, group) is model
    assert input_reshard(model, tp_device_mesh=group, input_reshard_dim=None) is model
    assert vars(model) == before
    names = [name for name, _ in model.named_parameters()]
    assert input_reshard(model, tp_device_mesh=group, input_reshard_dim=0) is model
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    resharding_of(model).remove()
    assert vars(model) == before
    resharding_kept = input_reshard(model, group, 0)
    resharding_of(resharding_kept).remove()
    with pytest.raises(ValueError, match="is not resharded: call input_reshard"):
        resharding_of(model)


def test_B97_B101_left_alone(pool: Pool) -> None:
    pool.run(left_alone, ranks=FOUR)
