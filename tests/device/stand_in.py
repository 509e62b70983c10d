"""A wire between "GPUs" that are the host: moves from GPU to GPU run where there is none.

Tensors stay on the host and messages go over gloo; all else is what runs on a GPU: the greetings,
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
from reshard.run.live import device_wires, engine


class StandInExchange:
    """Messages under way, and a thread that waits for them."""

    def __init__(self, wire: "StandInWire", begin: Callable[[], list[Any]], lag: float) -> None:
        self.wire = wire
        self.over = threading.Event()
        self._reached = threading.Event()
        self._begin, self._lag = begin, lag
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        time.sleep(self._lag)
        self._reached.set()
        with contextlib.suppress(RuntimeError):
            for work in [] if self.wire.aborted else self._begin():
                work.wait()
            self.over.set()

    def join(self) -> None:
        """A stream would wait now; the host is its own stream."""
        while not self.over.wait(0.001) and not self.wire.aborted:
            pass

    def begun(self) -> bool:
        return self._reached.is_set()

    def done(self) -> bool:
        if self.wire.aborted:
            raise LiveError("aborted")
        return self.over.is_set()


class StandInWire:
    """What `DeviceWire` does, over gloo."""

    lag = 0.0
    """Seconds by which the next exchange begins too late."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, *, wait: Any
    ) -> None:
        self.device = device
        self.aborted = False
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def exchange(self, sends: Any, receives: Any, wait: Any) -> StandInExchange:
        if self.aborted:
            raise LiveError("a closed wire")

        def begin() -> list[Any]:
            works = [self._group.recv([tensor], rank, 0) for rank, tensor in receives]
            return works + [self._group.send([tensor], rank, 0) for rank, tensor in sends]

        lag, StandInWire.lag = StandInWire.lag, 0.0
        return StandInExchange(self, begin, lag)

    def abort(self) -> None:
        self.aborted = True

    def close(self, wait: Any = None) -> None:
        self.aborted = True


def use() -> None:
    """From now on this process takes the host for a GPU."""
    device_wires.DeviceWire = StandInWire  # type: ignore[misc, assignment]
    engine.places_of_tensors = _places  # type: ignore[assignment]
    engine.device_of = lambda held: torch.device("cpu")  # type: ignore[assignment]


def _places(held: Any, group: Any) -> str:
    """What a rank says; ``meta`` would be a GPU that NCCL does not reach."""
    return "cuda" if any(side.tensors for side in held) else "none"
