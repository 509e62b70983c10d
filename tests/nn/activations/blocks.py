"""Tensor-parallel blocks of plain tensors, as Megatron has them, for tests of activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class CopyIn(torch.autograd.Function):
    """The same input on all ranks; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class AddUp(torch.autograd.Function):
    """The sum of what ranks have; each has the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def mine(whole: torch.Tensor, dim: int, group: Any) -> nn.Parameter:
    """This rank's part of a weight."""
    part = whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(part.clone())


def weight(*size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator) / size[-1] ** 0.5


class MLP(nn.Module):
    """Columns, GELU, rows."""

    def __init__(self, hidden: int, inner: int, group: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = mine(weight(inner, hidden, seed=1), 0, group)
        self.down = mine(weight(hidden, inner, seed=2), 1, group)
        self.group, self.dropout = group, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(F.linear(CopyIn.apply(x, self.group), self.up))
        inner = F.dropout(inner, self.dropout, self.training)
        found: torch.Tensor = AddUp.apply(F.linear(inner, self.down), self.group)
        return found


class Attention(nn.Module):
    """Heads over ranks."""

    def __init__(self, hidden: int, heads: int, group: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            mine(weight(hidden, hidden, seed=seed), 0, group) for seed in (3, 4, 5)
        )
        self.out = mine(weight(hidden, hidden, seed=6), 1, group)
        self.group, self.heads = group, heads // dist.get_world_size(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = CopyIn.apply(x, self.group)
        q, k, v = (self._heads(F.linear(x, one)) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        found: torch.Tensor = AddUp.apply(F.linear(mixed.flatten(2), self.out), self.group)
        return found

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP with norms before them, as in a transformer."""

    def __init__(self, hidden: int, group: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, 4, group)
        self.mlp = MLP(hidden, 4 * hidden, group, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


class Parallel(nn.Module):
    """What PyTorch's own tensor parallelism makes of two layers."""

    def __init__(self, hidden: int, mesh: DeviceMesh, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential()
        for _ in range(layers):
            pair = nn.ModuleDict({"up": nn.Linear(hidden, 64), "down": nn.Linear(64, hidden)})
            parallelize_module(pair, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            self.net.append(pair)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.net:
            x = x + pair["down"](F.gelu(pair["up"](x)))
        return x
