"""What docs/activations.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import reshard as rs
from reshard.nn import Stats, input_reshard, mark_replicated, resharded_activations, resharding_of


def train(mesh: DeviceMesh, x: torch.Tensor) -> None:
    """The calls of the page, in their order."""
    block = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    input_reshard(block, mesh["tp"], 0, modules=["0"], budget="2GiB")
    handle = resharding_of(block)
    assert_type(handle.stats(), Stats)
    assert_type(handle.stats().bytes_kept, int)
    handle.remove()
    with resharded_activations(mesh["tp"], [x]) as region:
        loss = (mark_replicated(x) * x.exp()).sum()
    assert loss.ndim == 0
    assert_type(region.stats().bytes_saved, int)
    rs.nn.input_reshard(block, mesh["tp"], 0)
