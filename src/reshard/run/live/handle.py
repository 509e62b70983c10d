"""What `plan.start` gives: a move that is under way, and its result."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch

from reshard.errors import ReshardError
from reshard.run.live.binding import Given
from reshard.run.live.report import RunReport
from reshard.run.live.session import Ticket
from reshard.run.live.streams import SideStreams

__all__ = ["Handle"]

Result = dict[str, torch.Tensor]


class Runs(Protocol):
    """A call that a handle looks after."""

    report: RunReport
    given: Given
    ticket: Ticket

    @property
    def grad_seen(self) -> bool:
        """Whether any peer's source requires gradients."""

    def run(self) -> Result:
        """Do it."""

    def has_landed(self) -> bool:
        """Whether the GPU is done with what it was given, as far as this is known."""

    def land(self) -> None:
        """Wait for that."""

    def interrupt(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up."""


class Handle:
    """A move that is under way."""

    def __init__(self, run: Runs, thread: bool) -> None:
        self._run = run
        self.report = run.report
        self.grad_seen = False
        """Whether any peer's source requires gradients."""
        self.finish: Callable[[Result], Result] | None = None
        """What is done with the result before it is given, once."""
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._beside: SideStreams | None = None
        self._ended: _thread.LockType | None = None
        """Locked while a thread makes the move: waiting for a thread itself breaks the thread's
        state in Python 3.11 when a signal handler raises."""
        if thread:
            self._beside = SideStreams(run.given.gpus())
            self._ended = _thread.allocate_lock()
            self._ended.acquire()
            threading.Thread(target=self._work, daemon=True, name="reshard-move").start()
            # Here as well: the thread may not have come so far when the next call is made.
            run.ticket.owner = None
        else:
            self._result = run.run()
            self.grad_seen = run.grad_seen

    def _work(self) -> None:
        run, beside = self._run, self._beside
        run.ticket.owner = None
        try:
            with nullcontext() if beside is None else beside.used(run.given.all()):
                self._result = run.run()
            self.grad_seen = run.grad_seen
        except BaseException as error:
            self._error = error
            if not run.ticket.over:
                run.ticket.settle(error)
        finally:
            assert self._ended is not None
            self._ended.release()

    def done(self) -> bool:
        """Whether the move is over, well or badly."""
        over = self._ended is None or not self._ended.locked()
        return over and self._run.has_landed()

    def wait(self) -> Result:
        """The destination tensors of this rank, once all are complete.

        On GPUs: once all messages have come. What the current stream is given from then on finds
        the tensors complete.
        """
        if self._ended is not None:
            try:
                with self._ended:
                    pass
                if self._error is None:
                    self._run.land()
            except BaseException as error:
                if not isinstance(error, ReshardError):
                    self._run.interrupt(error)
                raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        if self._beside is not None:
            self._beside.join(self._result.values())
        if self.finish is not None:
            self._result, self.finish = self.finish(self._result), None
        return self._result
