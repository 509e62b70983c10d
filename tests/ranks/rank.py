"""Inside a rank: wait for a function, run it, send back what became of it, until told to leave."""

import faulthandler
import fcntl
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.processes import collect_rarely
from tests.ranks.outcome import Raised, Returned, Told

READY = b"ready"
SUB_GROUP_SIZES = (2, 4)
# Longer than a test may take: the pool should notice a hang, not gloo.
GROUP_TIMEOUT = timedelta(seconds=150)

_wires: list["Wires"] = []
_ended_threads: list[str] = []
"""Stacks of threads that have ended with an exception since the function began."""
_stores: list[dist.TCPStore] = []
_groups: dict[int, Any] = {}
NAMES_PER_JOB = 1000
"""More groups than one function makes."""


@dataclass(frozen=True)
class Wires:
    """A rank's ends of its pipes to the process that started it."""

    tasks: Connection
    """Functions come in, outcomes go out."""
    stacks: Connection
    """faulthandler writes here."""
    parent: Connection
    """Nothing ever comes; it closes when the parent is gone."""


def pool_group(size: int) -> Any:
    """The process group of the first `size` ranks; call it inside a rank.

    The sizes are 2, 4 and that of the whole pool. On a rank that is not among the first `size`,
    this is torch's `GroupMember.NON_GROUP_MEMBER`.
    """
    return _groups[size]


def _begin_job(number: int) -> None:
    """Give the groups that this function makes the same names on all its ranks.

    torch names a group by how many this rank has made. That differs between ranks that took part in
    different functions, and then they would wait for each other for ever.
    """
    if dist.is_initialized():
        distributed_c10d._world.group_count = number * NAMES_PER_JOB


_made: Counter[tuple[int, ...]] = Counter()


def local_group(*ranks: int) -> Any:
    """A new process group of some ranks, which only they call.

    torch would name it by how many groups a rank has. That differs between ranks that took part in
    different tests, and then they would wait for each other for ever; so the name counts the groups
    of these ranks.
    """
    _made[ranks] += 1
    name = f"{ranks} for the {_made[ranks]}. time"
    with patch.object(distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        return dist.new_group(ranks, use_local_synchronization=True)


def tell(value: Any) -> None:
    """Sends a value to the test while the function goes on; `Job.hear` receives it."""
    _wires[0].tasks.send_bytes(pickle.dumps(Told(value)))


def serve(rank: int, wires: Wires) -> None:
    """The life of a rank."""
    # What the fork server has imported stays: a collection would look at millions of objects.
    collect_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(wires.stacks.fileno())
    faulthandler.register(signal.SIGUSR1, wires.stacks.fileno(), all_threads=True)
    _end_with(wires.parent)
    _wires.append(wires)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    threading.excepthook = _note_thread
    wires.tasks.send_bytes(READY)
    while (task := _next_task(wires.tasks)) is not None:
        wires.tasks.send_bytes(_answer(rank, task))
    leave_group()


def _end_with(parent: Connection) -> None:
    """Has the kernel kill this process when the parent is gone, whatever it is doing."""
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent, fcntl.F_SETFL, os.O_ASYNC)


def _next_task(tasks: Connection) -> bytes | None:
    try:
        return tasks.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _answer(rank: int, task: bytes) -> bytes:
    # Plain pickle: a tensor is copied. The pickler of multiprocessing would send a handle to shared
    # memory, which dies with the rank.
    outcome = _outcome(rank, task)
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        return pickle.dumps(_raised(error, outcome.ended - outcome.seconds))


def _outcome(rank: int, task: bytes) -> Returned | Raised:
    start = time.monotonic()
    try:
        value = _interruptible(rank, task)
    except BaseException as error:
        return _raised(error, start)
    end = time.monotonic()
    return Returned(value, end - start, end)


def _interruptible(rank: int, task: bytes) -> Any:
    """Runs the task; only now an interrupt counts, it would otherwise end an idle rank."""
    _ended_threads.clear()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        function, args, number = pickle.loads(task)
        _begin_job(number)
        value = function(rank, *args)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _ended_threads:
        raise RuntimeError(f"a thread has ended with an exception:\n{_ended_threads[0]}")
    return value


def _note_thread(ended: threading.ExceptHookArgs) -> None:
    """As pytest does in its own process: otherwise a function would return as if all were well."""
    if ended.exc_type is not SystemExit:
        parts = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        _ended_threads.append("".join(traceback.format_exception(*parts)))


def _raised(error: BaseException, start: float) -> Raised:
    end = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next  # the frames of this file tell nothing about the function
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Raised(type(error).__name__, str(error), text, end - start, end)


def host_store(rank: int) -> int:
    """Serves the store of the default group, on a free port, which is returned."""
    del rank
    # To a socket of IPv4 ranks come as 127.0.0.1, whose name torch finds without a name server.
    listener = socket.create_server(("", 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _stores.append(store)
    return port


def join_group(rank: int, size: int, port: int) -> None:
    """Makes the default group and the sub-groups of the first ranks."""
    if rank != 0:
        _stores.append(dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(
        "gloo", store=_stores[0], rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    _groups[size] = dist.group.WORLD
    for sub_size in SUB_GROUP_SIZES:
        if sub_size < size:
            _groups[sub_size] = dist.new_group(range(sub_size))


def leave_group() -> None:
    """Ends all process groups; whatever a function has made is included."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()
