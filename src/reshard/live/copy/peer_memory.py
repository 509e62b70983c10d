"""Copy between the memory of this process and that of another one, through the kernel.

Linux lets one process copy from and to the memory of another of the same user, up to 1,024 pieces
on each side with one system call (`process_vm_readv`, `process_vm_writev`); the other process has
to do nothing. Yama, where it is on, wants the other to have agreed (`PR_SET_PTRACER`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from reshard.live.program.runs import IovecCall

__all__ = ["allow_access", "read_memory", "write_memory"]

PR_SET_PTRACER = 0x59616D61


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(libc, name)
        call.restype = ctypes.c_ssize_t
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    return libc


def allow_access() -> None:
    """Let processes of the same user read and write this one's memory, where Yama asks."""
    _libc().prctl(PR_SET_PTRACER, ctypes.c_ulong(ctypes.c_ulong(-1).value), 0, 0, 0)


def read_memory(pid: int, call: IovecCall) -> None:
    """Copy from another process's memory into this one's."""
    _transfer(_libc().process_vm_readv, pid, call)


def write_memory(pid: int, call: IovecCall) -> None:
    """Copy from this process's memory into another's."""
    _transfer(_libc().process_vm_writev, pid, call)


def _transfer(system_call: Callable[..., int], pid: int, call: IovecCall) -> None:
    done = system_call(pid, *call.operands)
    if done == call.num_bytes:
        return
    number = ctypes.get_errno() if done < 0 else errno.EFAULT
    raise OSError(number, f"{os.strerror(number)}: {max(done, 0)} of {call.num_bytes} bytes")
