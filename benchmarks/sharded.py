"""Sharded tensors and modules against torch.distributed._shard and a bare move, interleaved.

    python benchmarks/sharded.py [--repeat 9] [--quick] [--json]

`ShardedTensor.reshard` is compared with `rs.move` of the same local tensors along the same layouts,
which it stands on, and with torch's own `ShardedTensor.reshard` where that works at all: even
sizes, on gloo. Sharding a module is compared with torch's `shard_module`. A figure is the median
over repetitions of the slowest of 4 ranks; values are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from side_by_side import Case, arguments, measured, run_ranks, tell
from torch import nn

import reshard as rs
from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import ChunkShardingSpec, plan_reshard, shard_tensor

RANKS = 4
PLACES = [f"rank:{rank}/cpu" for rank in range(RANKS)]


def main() -> None:
    run_ranks(RANKS, on_a_rank, arguments(__doc__).parse_args())


def on_a_rank(rank: int, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")  # torch's own classes warn that they are going away
    repeat = 3 if args.quick else args.repeat
    cases = chain(reshards(args.quick), modules(args.quick))
    tell((measured(case, repeat) for case in cases), rank, args.json)


def reshards(quick: bool) -> Iterator[Case]:
    """From rows to columns, and to other ranks along the same dim."""
    for side in (256, 1024) if quick else (256, 1024, 4096):
        for what, dim, order in (("rows to columns", 1, PLACES), ("rows swapped", 0, swapped())):
            yield reshard_case(side, what, ChunkShardingSpec(dim, order))


def swapped() -> list[str]:
    """An involution: the only kind of permutation that torch's reshard gets right."""
    return [PLACES[1], PLACES[0], PLACES[3], PLACES[2]]


def reshard_case(side: int, what: str, want: ChunkShardingSpec) -> Case:
    from torch.distributed._shard import sharded_tensor as theirs
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirSpec

    have = ChunkShardingSpec(0, PLACES)
    full = torch.arange(side * side, dtype=torch.float32).reshape(side, side)
    ours = shard_tensor(full, have)
    local = ours.local_tensor()
    plan = plan_reshard(have, want, (side, side))
    layouts = plan.have["tensor"].layout, plan.want["tensor"].layout
    shards = [
        theirs.Shard.from_tensor_and_offsets(
            local, [dist.get_rank() * len(local), 0], dist.get_rank()
        )
    ]
    target = TheirSpec(want.dim, [str(place) for place in want.placements])

    def by_torch() -> object:
        # Its reshard changes the tensor, so that each time needs a new one.
        fresh = theirs.init_from_local_shards(shards, side, side)
        began = time.perf_counter()
        fresh.reshard(target)
        return time.perf_counter() - began

    moved = rs.move(local, *layouts, shape=(side, side))
    assert torch.equal(ours.resharded(want).local_tensor(), moved)
    return Case(
        f"{side}x{side} float32, {what}",
        {
            "reshard": lambda: ours.resharded(want),
            "rs.move": lambda: rs.move(local, *layouts, shape=(side, side)),
            "torch (with init_from_local_shards)": by_torch,
        },
        "reshard",
        {"rs.move": 1.3},
        {"torch (with init_from_local_shards)": 1},
    )


class Block(nn.Module):
    """Three parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)


def modules(quick: bool) -> Iterator[Case]:
    """300 parameters of small size: what takes time is to agree and to send, 300 times or once."""
    from torch.distributed._shard import shard_module as shard_theirs
    from torch.distributed._shard.sharding_plan import ShardingPlan as TheirPlan
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirSpec

    count = 30 if quick else 100

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(64) for _ in range(count)))

    names = [name for name, _ in fresh().named_parameters()]
    ours = ShardingPlan({name: ChunkShardingSpec(0, PLACES) for name in names})
    theirs = TheirPlan({name: TheirSpec(0, PLACES) for name in names})
    spare: list[nn.Module] = [fresh() for _ in range(200)]

    def by_us() -> object:
        return shard_module(spare.pop(), ours)

    def by_torch() -> object:
        return shard_theirs(spare.pop(), theirs)

    module = spare.pop()
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    shard_module(module, ours)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    yield Case(
        f"shard a module of {len(names)} parameters",
        {"shard_module": by_us, "torch": by_torch},
        "shard_module",
        {},
        {"torch": 5},
    )


if __name__ == "__main__":
    main()
