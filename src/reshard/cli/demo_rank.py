"""One rank of ``reshard demo``: a process that moves what it is given, and says what it got."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.cli.demo_live import Done, Failed, digest

# Loaded by the process that ranks are forked from, and not once by every rank.
from reshard.live import api  # noqa: F401
from reshard.live.session.store import TCPStore
from reshard.planning.plan import Plan

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["serve"]

NUM_CALLS = 2
"""The first meets, compares and works out addresses; the second only moves."""


def serve(rank: int, num_ranks: int, pipe: Connection) -> None:
    """Join the others, move, answer, and leave when nobody needs this rank any more."""
    try:
        _join(rank, num_ranks, pipe)
        plan, arrays = pipe.recv()
        pipe.send(_move(plan, arrays))
        # Nobody leaves before all are done: rank 0 serves the store.
        pipe.recv()
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(rank: int, num_ranks: int, pipe: Connection) -> None:
    """Make a process group on this machine, at a port that the system chooses."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    port = pipe.recv()
    if rank:
        store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def _move(plan: Plan, arrays: Mapping[str, Array]) -> Done:
    given = {name: _tensor(array, plan.have[name].dtype) for name, array in arrays.items()}
    reports = []
    for _ in range(NUM_CALLS):
        handle = plan.start(given)
        moved = handle.wait()
        reports.append(handle.report)
    return Done(tuple(reports), {name: digest(_bytes(tensor)) for name, tensor in moved.items()})


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same bits as a tensor; numpy has no bfloat16 and keeps integers in its place."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(array).view(kind)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
