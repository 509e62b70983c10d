"""Process groups and RPC workers: ranks, default devices, the group that a load uses, references.

A file cannot hold a process group, so ``load_with_process_group`` sets the group around the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from reshard.errors import ArgumentError, ArgumentTypeError, StateError
from reshard.live.inputs.request import default_device
from reshard.tensors.kinds import this_rank

T = TypeVar("T")


def digest(text: str) -> int:
    """Hash a text to 56 bits, for ranks to compare."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Assign a context variable inside a with statement."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def is_running() -> bool:
    """Whether ``init_rpc`` was called; torch may be built without RPC."""
    return rpc.is_available() and bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def worker_rank(name: str) -> int | None:
    """The rank of a worker, which is its id; None if RPC does not know the worker."""
    if not is_running():
        return None
    workers = rpc._get_current_rpc_agent().get_worker_infos()  # type: ignore[attr-defined]
    return next((worker.id for worker in workers if worker.name == name), None)


def check_rpc() -> None:
    """Refuse ``init_rrefs`` if RPC is not running, or if its ranks are not those of the group."""
    if not is_running():
        raise StateError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc for "
            "init_rrefs=True: call it, or leave init_rrefs out and reach shards of other ranks by "
            "reshard() or gather()"
        )
    rpc_rank = rpc.get_worker_info().id
    if rpc_rank != this_rank():
        raise ArgumentError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
            f"group rank {this_rank()} and RPC rank {rpc_rank}: give init_rpc the same rank"
        )


def exchange_rrefs(shards: Sequence[object]) -> dict[int, list[Any]]:
    """References to the shards of all other ranks, by rank; every RPC worker calls this."""
    check_rpc()
    by_name = rpc.api._all_gather([rpc.RRef(shard) for shard in shards])
    by_rank = {rpc.get_worker_info(name).id: refs for name, refs in by_name.items() if refs}
    by_rank.pop(this_rank(), None)
    return by_rank


Group = dist.ProcessGroup | None
"""A process group, or None for the default one."""

# A context variable: threads and tasks that load at the same time each have their own group.
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("reshard_process_group", default=None)


def is_outside(group: object) -> bool:
    """Whether this process got NON_GROUP_MEMBER from ``new_group`` in place of a group."""
    return group is dist.GroupMember.NON_GROUP_MEMBER


def members(group: Group) -> tuple[int, ...]:
    """The global ranks of a group; (0,) if there is no process group."""
    if not dist.is_initialized():
        return (0,)
    if is_outside(group):
        raise ArgumentError(
            f"rank {dist.get_rank()} is not in the process group that was given: call this on the "
            "ranks of the group only"
        )
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def check_members(ranks: Iterable[int | None], group: Group) -> None:
    """Refuse ranks that are not in the group."""
    if not dist.is_initialized() or is_outside(group):
        return
    known = members(group)
    for rank in ranks:
        if rank not in known:
            raise ArgumentError(
                f"Global rank {rank} does not exist in input process group: {list(known)}; give "
                "placements of its ranks, or the group that they are in"
            )


def default_device_of(group: Group) -> torch.device:
    """The device of this rank's tensors if nothing else is known about them."""
    return default_device(group) if dist.is_initialized() else torch.device("cpu")


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Use this group for the sharded tensors that are loaded inside the block.

    with load_with_process_group(group):
        model.load_state_dict(torch.load("model.pt"))
    """
    if not isinstance(process_group, dist.ProcessGroup) and not is_outside(process_group):
        kind = type(process_group).__name__
        raise ArgumentTypeError(f"load_with_process_group takes a ProcessGroup, found {kind}")
    if _group.get() is not None:
        raise StateError(
            "the process group for loading is already set by a load_with_process_group around "
            "this one: leave that one first"
        )
    with assigned(_group, process_group):
        yield process_group


def current_process_group() -> dist.ProcessGroup:
    """The group set by ``load_with_process_group``, or the default group."""
    group = _group.get() or dist.group.WORLD
    if group is None:
        raise StateError(
            "there is no process group: call torch.distributed.init_process_group first, or load "
            "inside load_with_process_group"
        )
    return group
