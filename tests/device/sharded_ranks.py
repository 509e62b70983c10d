"""Sharded tensors and modules on GPUs; one rank of `test_sharded_on_gpus`, run by `move_ranks`."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import ChunkShardingSpec, ShardedTensor, shard_tensor, zeros

SIZE = 4


def spec(dim: int, device: str = "cuda:0", order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in order])


def sharded_tensors(rank: int) -> None:
    """Values, gradients and devices through sharding, resharding and gathering."""
    for rows, columns in ((16, 8), (13, 7), (3, 5)):
        full = torch.arange(rows * columns, dtype=torch.float64, device="cuda:0")
        full = full.reshape(rows, columns)
        for first, second in ((0, 1), (1, 0), (0, 0), (1, 1)):
            one = shard_tensor(full, spec(first)).requires_grad_()
            other = one.resharded(spec(second, order=(2, 0, 3, 1)))
            assert torch.equal(other.full_tensor(), full)
            (other * full).sum().backward()
            assert one.grad is not None
            assert torch.equal(one.grad.full_tensor(), full)
            whole = one.gather(dst=1)
            assert (whole is None) == (rank != 1)
            assert whole is None or torch.equal(whole, full)


def sharded_devices(rank: int) -> None:
    """Metadata says where shards are, also after they went to another device."""
    one = zeros(spec(0), 8, 4)
    assert one.device == torch.device("cuda:0")
    down = one.cpu()
    assert {shard.placement.device().type for shard in down.metadata().shards_metadata} == {"cpu"}
    up = down.cuda()
    mine = [shard for shard in up.metadata().shards_metadata if shard.rank == rank]
    assert [shard.placement.device() for shard in mine] == [torch.device("cuda:0")]
    assert torch.equal(up.full_tensor(), one.full_tensor())
    placed = down.resharded(spec(1)) if rank >= 0 else None
    assert placed is not None
    assert placed.device == torch.device("cuda:0")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + out


def sharded_training(rank: int) -> None:
    """A column- and a row-parallel layer train as the whole model does."""
    torch.manual_seed(3)
    whole = nn.Sequential(Block(), Block()).double().cuda()
    model = copy.deepcopy(whole)
    layers: dict[str, Any] = {}
    for number in range(2):
        layers |= {f"{number}.up.weight": spec(0), f"{number}.up.bias": spec(0)}
        layers |= {f"{number}.down.weight": spec(1)}
    shard_module(model, ShardingPlan(layers))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (whole, model)]
    x = torch.randn(6, 32, dtype=torch.float64, device="cuda")
    for _ in range(5):
        losses = []
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            loss = one(x).square().mean()
            loss = loss.full_tensor() if isinstance(loss, ShardedTensor) else loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-10, losses
    assert {param.device for param in model.parameters()} == {torch.device("cuda:0")}


SCENARIOS = {one.__name__: one for one in (sharded_tensors, sharded_devices, sharded_training)}
