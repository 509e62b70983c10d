"""PyTorch RPC: workers as placements, and references to shards of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from reshard.errors import ArgumentError, StateError
from reshard.tensors.kinds import this_rank

__all__ = ["check_rrefs", "exchange_rrefs", "is_running", "worker_rank"]


def is_running() -> bool:
    """Whether ``init_rpc`` was called; torch may be built without RPC."""
    return rpc.is_available() and bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def worker_rank(name: str) -> int | None:
    """The rank of a worker, which is its id; None if RPC does not know the worker."""
    if not is_running():
        return None
    workers = rpc._get_current_rpc_agent().get_worker_infos()  # type: ignore[attr-defined]
    return next((worker.id for worker in workers if worker.name == name), None)


def check_rrefs(init_rrefs: bool) -> None:
    """Refuse ``init_rrefs`` if RPC is not running, or if its ranks are not those of the group."""
    if not init_rrefs:
        return
    if not is_running():
        raise StateError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc for "
            "init_rrefs=True: call it, or leave init_rrefs out and reach shards of other ranks by "
            "reshard() or gather()"
        )
    number = rpc.get_worker_info().id
    if number != this_rank():
        raise ArgumentError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank {this_rank()} and RPC rank {number}: give init_rpc the same rank"
        )


def exchange_rrefs(shards: Sequence[object]) -> dict[int, list[Any]]:
    """References to the shards of all other ranks, by rank; every RPC worker calls this."""
    own = [rpc.RRef(shard) for shard in shards]
    by_name = rpc.api._all_gather(own)
    ranks = {name: rpc.get_worker_info(name).id for name in by_name}
    others = {ranks[name]: refs for name, refs in by_name.items() if ranks[name] != this_rank()}
    return {rank: refs for rank, refs in others.items() if refs}
