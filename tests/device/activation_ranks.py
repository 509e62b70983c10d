"""Activations kept as shares on GPUs; a rank of `test_activations_on_gpus`, in `move_ranks`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from reshard.nn import input_reshard, resharding_of
from tests.nn.activations.blocks import MLP, Block

HIDDEN = 64


def trained(wrap: Any, recompute: bool, steps: int = 6) -> tuple[list[torch.Tensor], nn.Module]:
    """The weights after some steps; dropout differs between ranks."""
    group = dist.group.WORLD
    model = nn.Sequential(Block(HIDDEN, group, 0.1), MLP(HIDDEN, 128, group), Block(HIDDEN, group))
    model = model.cuda()
    wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        x = torch.randn(4, 32, HIDDEN, generator=torch.Generator().manual_seed(step)).cuda()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()], model


def activations_train(rank: int) -> None:
    """The same weights to the last bit, with shares and without."""
    for recompute in (False, True):
        expected, _ = trained(lambda model: None, recompute)
        found, model = trained(
            lambda model: input_reshard(
                model, dist.group.WORLD, 0, modules=["{i}", "*.mlp", "*.attention"]
            ),
            recompute,
        )
        assert all(map(torch.equal, found, expected))
        if not recompute:
            assert resharding_of(model).stats().bytes_saved > 0


def activations_offload(rank: int) -> None:
    """A small budget sends activations to the host, and they come back right."""
    expected, _ = trained(lambda model: None, False)
    one = 4 * 32 * HIDDEN * 4
    found, model = trained(
        lambda model: input_reshard(model, dist.group.WORLD, 0, modules="{i}", budget=12 * one),
        False,
    )
    stats = resharding_of(model).stats()
    assert all(map(torch.equal, found, expected))
    assert stats.bytes_offloaded > 0, str(stats)


SCENARIOS = {one.__name__: one for one in (activations_train, activations_offload)}
