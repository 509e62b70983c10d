"""On which process group do sharded tensors come to life when a file is loaded?

A file cannot hold a process group, so the one to use is set around the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch.distributed as dist

__all__ = ["current_process_group", "load_with_process_group"]

# Of the thread or task that set it: another one that loads at the same time has its own.
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("reshard_process_group", default=None)


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Sharded tensors that are loaded inside are put on this group.

    with load_with_process_group(group):
        model.load_state_dict(torch.load("model.pt"))
    """
    outside = cast(Any, process_group) is dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup) and not outside:
        found = type(process_group).__name__
        raise TypeError(f"load_with_process_group takes a ProcessGroup, found {found}")
    if _group.get() is not None:
        raise RuntimeError(
            "the process group for loading is already set by a load_with_process_group around "
            "this one: leave that one first"
        )
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


def current_process_group() -> dist.ProcessGroup:
    """The group set by ``load_with_process_group``, or else the default group."""
    group = _group.get()
    if group is not None:
        return group
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group first, or load "
            "inside load_with_process_group"
        )
    default = dist.group.WORLD
    assert default is not None
    return default
