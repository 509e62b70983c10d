"""What `plan.start` gives: a move that is in flight, and its result."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from reshard.errors import ReshardError
from reshard.live.call import Call
from reshard.live.failure.cleanup import abandon, clean_up
from reshard.live.inputs.streams import SideStreams
from reshard.show.run_report import RunReport

__all__ = ["Handle"]

Result = dict[str, torch.Tensor]


class Handle:
    """A move that is in flight."""

    def __init__(self, call: Call, report: RunReport) -> None:
        self._call = call
        self.report = report
        self.finish: Callable[[Result], Result] | None = None
        """What is done with the result before it is given, once."""
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._streams = SideStreams(call.request.gpus())
        self._ended = _thread.allocate_lock()
        """Locked while a thread makes the move: waiting for a thread itself breaks the thread's
        state in Python 3.11 when a signal handler raises."""
        self._ended.acquire()
        threading.Thread(target=self._work, daemon=True, name="reshard-move").start()
        # Here as well: the thread may not have come so far when the next call is made.
        call.ticket.owner = None

    def _work(self) -> None:
        call, streams = self._call, self._streams
        call.ticket.owner = None
        try:
            used = streams.used(call.request.all_tensors()) if streams.any else nullcontext()
            with used:
                self._result = call.run()
        except BaseException as error:
            self._error = error
            if not call.ticket.over:
                clean_up(call.ticket, error)
        finally:
            self.report.finish()
            self._ended.release()

    def done(self) -> bool:
        """Whether the move is over, well or badly."""
        return not self._ended.locked() and self._call.is_complete()

    def wait(self) -> Result:
        """The destination tensors of this rank, once all are complete.

        On GPUs: once all messages have come. What the current stream is given from then on finds
        the tensors complete.
        """
        try:
            with self._ended:
                pass
            if self._error is None:
                self._call.wait_complete()
        except BaseException as error:
            if not isinstance(error, ReshardError):
                abandon(self._call.ticket, error)
            raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        self._streams.join(self._result.values())
        if self.finish is not None:
            self._result, self.finish = self.finish(self._result), None
        return self._result
