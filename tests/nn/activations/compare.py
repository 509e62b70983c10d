"""Gradients with and without resharded activations, compared to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

FOUR = range(4)

HIDDEN = 32

Make = Callable[[], nn.Module]

Wrap = Callable[[nn.Module], object]


def gradients(
    model: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The gradients of a model's parameters and of its input; dropout differs between ranks."""
    torch.manual_seed(100 + dist.get_rank())
    x = x.clone().requires_grad_(x.is_floating_point())
    out = model(x) if call is None else call(model, x)
    out.square().sum().backward()
    found = [param.grad for param in model.parameters()] + [x.grad]
    return [one for one in found if one is not None]


def same(found: list[torch.Tensor], expected: list[torch.Tensor], hint: object = "") -> None:
    assert len(found) == len(expected), hint
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(local(one), local(two)), (hint, (local(one) - local(two)).abs().max())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_same(make: Make, wrap: Wrap, x: torch.Tensor, call: Any = None) -> nn.Module:
    """Compare gradients with and without shares in two steps; the second step prefetches."""
    expected = gradients(make(), x, call)
    model = make()
    wrap(model)
    for turn in range(2):
        model.zero_grad()
        same(gradients(model, x, call), expected, turn)
    return model


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(model, x, use_reentrant=False)
    return found


def checkpointed_again(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(model, x, use_reentrant=True)
    return found


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * x
