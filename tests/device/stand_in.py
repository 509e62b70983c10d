"""A stand-in for a NCCL group: moves from GPU to GPU run where there is no GPU.

Tensors stay on the host and messages go over gloo; all else is what runs with a GPU: the handshake,
the order of calls, the tables of copies (copied by torch), sums, the watching thread.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import LiveError
from reshard.live import call
from reshard.live.inputs.bound import BoundTensors
from reshard.live.transport import nccl


class StandInWork:
    """What `NcclWork` does: messages in flight, and a thread that waits for them."""

    def __init__(self, group: "StandInGroup", begin: Callable[[], list[Any]], lag: float) -> None:
        self.group = group
        self.over = threading.Event()
        self._reached = threading.Event()
        self._begin, self._lag = begin, lag
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        time.sleep(self._lag)
        self._reached.set()
        with contextlib.suppress(RuntimeError):
            for work in [] if self.group.aborted else self._begin():
                work.wait()
            self.over.set()

    def join(self) -> None:
        """A stream would wait now; the host is its own stream."""
        while not self.over.wait(0.001) and not self.group.aborted:
            pass

    def begun(self) -> bool:
        return self._reached.is_set()

    def done(self) -> bool:
        if self.group.aborted:
            raise LiveError("aborted")
        return self.over.is_set()


class StandInGroup:
    """What `NcclGroup` does, over gloo."""

    lag = 0.0
    """Seconds by which the next exchange begins too late."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, *, wait: Any
    ) -> None:
        self.device = device
        self.aborted = False
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def exchange(self, sends: Any, receives: Any, wait: Any) -> StandInWork:
        if self.aborted:
            raise LiveError("a closed group")

        def begin() -> list[Any]:
            works = [self._group.recv([tensor], rank, 0) for rank, tensor in receives]
            return works + [self._group.send([tensor], rank, 0) for rank, tensor in sends]

        lag, StandInGroup.lag = StandInGroup.lag, 0.0
        return StandInWork(self, begin, lag)

    def abort(self) -> None:
        self.aborted = True

    def close(self, wait: Any = None) -> None:
        self.aborted = True


def use() -> None:
    """From now on this process takes the host for a GPU."""
    nccl.NcclGroup = StandInGroup  # type: ignore[misc, assignment]
    call.placement_of = _placement  # type: ignore[assignment]
    call.device_of = lambda bound: torch.device("cpu")  # type: ignore[assignment]


def _placement(bound: BoundTensors, group: Any) -> str:
    """What a rank tells the others: its tensors are on a GPU, or it has none."""
    return "cuda" if bound.tensors else "none"
