"""What input_reshard says to what cannot be, and what happens when ranks do not agree."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError
from reshard.nn import input_reshard, resharding_of
from tests.nn.blocks import MLP
from tests.nn.test_input_reshard import FOUR, HIDDEN, check_same, numbers
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


def refused(rank: int) -> None:
    group, model = pool_group(4), nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(TypeError, match="dim='0': give a dim of the inputs"):
        input_reshard(model, group, "0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh_or_group is a int"):
        input_reshard(model, 4, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=0: give a number of seconds"):
        input_reshard(model, group, 0, timeout=0)
    with pytest.raises(ValueError, match='"2 lots" is not an amount of bytes'):
        input_reshard(model, group, 0, budget="2 lots")
    with pytest.raises(AttributeError, match=r'"layers\.\*\.mlp" matches no module of Linear'):
        input_reshard(model, group, 0, modules="layers.*.mlp")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        input_reshard(model, group, 0, budgte="2GiB")
    assert "forward" not in vars(model)
    input_reshard(model, group, 2)
    with pytest.raises(
        ValueError, match=r"Linear has inputs of shapes \[\[4, 32\]\], of which none"
    ):
        model(numbers(4, HIDDEN).requires_grad_())


def test_what_is_refused(pool: Pool) -> None:
    pool.run(refused, ranks=FOUR)


def not_a_member(rank: int) -> None:
    mesh = mesh_of(2, 4)
    with pytest.raises(ValueError, match=r"the mesh has 2 axes, \('dp', 'tp'\): give the one"):
        input_reshard(nn.Identity(), mesh, 0)
    part = init_device_mesh("cpu", (8,))
    half = type(part)("cpu", [0, 1, 2, 3])
    if rank >= 4:
        with pytest.raises(ValueError, match=rf"rank {rank} is not in the mesh of ranks"):
            input_reshard(nn.Identity(), half, 0)
        with pytest.raises(ValueError, match=f"rank {rank} is not in the process group"):
            input_reshard(nn.Identity(), dist.GroupMember.NON_GROUP_MEMBER, 0)
    else:
        input_reshard(nn.Identity(), half, 0)


def test_a_mesh_without_this_rank(pool: Pool) -> None:
    pool.run(not_a_member)


_alone: dict[int, Any] = {}


def one_rank(rank: int) -> None:
    if rank not in _alone:
        _alone[rank] = dist.new_group([rank], use_local_synchronization=True)
    group = _alone[rank]
    model = check_same(
        lambda: MLP(HIDDEN, 64, group), lambda one: input_reshard(one, group, 0), numbers(4, HIDDEN)
    )
    assert resharding_of(model).stats().bytes_seen == 0


def test_a_group_of_one_rank(pool: Pool) -> None:
    pool.run(one_rank)  # all: torch names groups by how many a rank has


def skipped(rank: int) -> str:
    """Rank 2 leaves out a backward: the others hear of it in time, and it does when it is back."""
    group = pool_group(4)
    model = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(model, group, 0, timeout=2)
    out = model(numbers(4, HIDDEN).requires_grad_()).sum()
    if rank == 2:
        dist.barrier(group)
    began = time.monotonic()
    with pytest.raises(MoveTimeoutError) as caught:
        out.backward()
    assert time.monotonic() - began < 8
    if rank != 2:
        dist.barrier(group)
    x = numbers(4, HIDDEN).requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(4, HIDDEN))
    return str(caught.value)


def test_D29_a_rank_that_skips_backward(pool: Pool) -> None:
    told = pool.run(skipped, ranks=FOUR)
    for rank in FOUR:
        assert "rank 2 has not called" in told[rank], told[rank]
        assert "Linear, argument 0" in told[rank], told[rank]


def differing(rank: int) -> None:
    """With checking on, an input that is not the same on all ranks is named, on all of them."""
    group = pool_group(4)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    input_reshard(model, group, 0, modules="*", check=True)
    x = numbers(4, HIDDEN)
    x[2, 3] += rank == 3
    with pytest.raises(DisagreementError, match=r"0, argument 0 is not the same .* ranks \[3\]"):
        model(x.requires_grad_())
    # Once is enough: it is compared in the first call only.
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    torch.manual_seed(0)
    nn.init.normal_(model[0].weight)
    input_reshard(model, group, 0, check=True)
    for _ in range(2):
        model(numbers(4, HIDDEN).requires_grad_()).sum().backward()


def test_an_input_that_differs_is_named(pool: Pool) -> None:
    pool.run(differing, ranks=FOUR)


def other_shapes(rank: int) -> None:
    """Inputs of different shapes are an error on all ranks, no hang and no wrong gradient."""
    group = pool_group(4)
    model = nn.Linear(HIDDEN, HIDDEN)
    input_reshard(model, group, 0, timeout=5)
    out = model(numbers(4 + (rank == 1), HIDDEN).requires_grad_()).sum()
    with pytest.raises(LiveError):
        out.backward()


def test_inputs_of_different_shapes(pool: Pool) -> None:
    pool.run(other_shapes, ranks=FOUR)
