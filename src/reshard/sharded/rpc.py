"""PyTorch's RPC, where a program uses it: workers as placements, references to remote shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from reshard.sharded.shard import Shard
from reshard.tensors.kinds import this_rank

__all__ = ["check_rrefs", "exchanged_rrefs", "is_running", "worker_rank"]


def is_running() -> bool:
    """Whether ``init_rpc`` was called; torch may be built without RPC."""
    return rpc.is_available() and bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def worker_rank(name: str) -> int | None:
    """The rank of a worker, which is its number; None for one that RPC does not know."""
    if not is_running():
        return None
    workers = rpc._get_current_rpc_agent().get_worker_infos()  # type: ignore[attr-defined]
    return next((worker.id for worker in workers if worker.name == name), None)


def check_rrefs(init_rrefs: bool) -> None:
    """Refuse references where there is no RPC, or one whose ranks are others."""
    if not init_rrefs:
        return
    if not is_running():
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc for "
            "init_rrefs=True: call it, or leave init_rrefs out and reach shards of other ranks by "
            "reshard() or gather()"
        )
    number = rpc.get_worker_info().id
    if number != this_rank():
        raise ValueError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank {this_rank()} and RPC rank {number}: give init_rpc the same rank"
        )


def exchanged_rrefs(shards: Sequence[Shard]) -> dict[int, list[Any]]:
    """References to the shards of all other ranks, which call this too."""
    mine = [rpc.RRef(shard) for shard in shards]
    found = rpc.api._all_gather(mine)
    ranks = {name: rpc.get_worker_info(name).id for name in found}
    others = {ranks[name]: refs for name, refs in found.items() if ranks[name] != this_rank()}
    return {rank: refs for rank, refs in others.items() if refs}
