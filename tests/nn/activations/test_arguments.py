"""Arguments that are refused, groups of one rank, and inputs that differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from reshard.errors import DisagreementError, MoveTimeoutError
from reshard.nn import (
    input_reshard,
    pack_activation,
    resharded_activations,
    resharding_of,
)
from tests.nn.activations.blocks import MLP
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Cube,
    check_same,
    checkpointed,
    numbers,
)
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import local_group, pool_group


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
    with pytest.raises(TypeError, match="pack_activation got 3: give a tensor"):
        pack_activation(group, 0, 3)  # type: ignore[arg-type]
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
        _alone[rank] = local_group(rank)
    group = _alone[rank]
    model = check_same(
        lambda: MLP(HIDDEN, 64, group), lambda one: input_reshard(one, group, 0), numbers(4, HIDDEN)
    )
    assert resharding_of(model).stats().bytes_seen == 0

    def cube(x: torch.Tensor) -> torch.Tensor:
        with resharded_activations(group, [x]):
            return x * x * x

    assert torch.func.grad(cube)(torch.tensor(2.0)) == 12


def test_a_group_of_one_rank(pool: Pool) -> None:
    pool.run(one_rank)


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


def saved_on_some(rank: int) -> None:
    """An input that rank 0 does not save, as it needs no gradient there, is named on all ranks."""
    model = nn.Linear(HIDDEN, HIDDEN).requires_grad_(rank > 0)
    input_reshard(model, pool_group(4), 0, check=True, timeout=20)
    with pytest.raises(DisagreementError, match=r"Linear, argument 0 is not .* ranks \[1, 2, 3\]"):
        model(numbers(4, HIDDEN))


def test_an_input_that_only_some_ranks_save_is_named(pool: Pool) -> None:
    pool.run(saved_on_some, ranks=FOUR)


def test_an_input_that_differs_is_named(pool: Pool) -> None:
    pool.run(differing, ranks=FOUR)


def absent_while_checking(rank: int) -> None:
    """A rank whose first forward fails does not hang those that compare checksums."""

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                raise ValueError("on purpose")
            return x * x

    model = Picky()
    input_reshard(model, pool_group(4), 0, check=True, timeout=2)
    words = "on purpose" if rank == 1 else "rank 1 has not called within 2 s"
    with pytest.raises(ValueError if rank == 1 else MoveTimeoutError, match=words):
        model(numbers(4, 8).requires_grad_())


def test_a_rank_that_fails_while_others_compare() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(absent_while_checking)


def checked_when_there_is_something(rank: int) -> None:
    model = Cube()
    input_reshard(model, pool_group(4), 0, check=True)
    checkpointed(model, numbers(4, 8).requires_grad_())
    with pytest.raises(DisagreementError, match=r"Cube, argument 0 is not the same"):
        model(numbers(4, 8, seed=rank).requires_grad_())


def test_a_call_without_saved_tensors_does_not_count_as_checked(pool: Pool) -> None:
    pool.run(checked_when_there_is_something, ranks=FOUR)
