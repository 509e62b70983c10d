"""Entry points of the live engine; `Plan.run` and `Plan.start` come here through ``tensors``."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from reshard.errors import ReshardError, require_type
from reshard.live.call import Call
from reshard.live.compiled import compiled_plan
from reshard.live.failure.cleanup import abandon, with_ticket
from reshard.live.inputs.bound import Tensors
from reshard.live.inputs.request import Options
from reshard.live.session.session import Ticket, all_connections
from reshard.live.session.store import UndecidedError
from reshard.live.transport.in_flight import InFlight
from reshard.planning.plans import Plan
from reshard.show.run_report import RunReport

Result = dict[str, torch.Tensor]

_cuda: Any = torch.cuda  # its streams and events have no types


def release(plan: Plan) -> None:
    """Free the buffers and tables that are kept for the next call."""
    plan.compiled = None
    for connections in all_connections():
        connections.release()


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise the error of a move between GPUs that failed after its call had returned.

    Such moves only enqueue work. This does not wait for the work: it raises what is known so far,
    and what no call has raised yet.
    """
    if group is not None:
        advice = "give a process group of torch.distributed, as new_group makes"
        require_type(group, dist.ProcessGroup, "check(group)", advice)
    for connections in all_connections(group):
        in_flight = connections.resources.get(InFlight)
        if in_flight is not None:
            in_flight.check()


def raise_on_all_ranks(
    plan: Plan, error: BaseException, group: dist.ProcessGroup | None = None
) -> NoReturn:
    """Raise an error that was found before the move, here and on the ranks that wait for it."""

    def fail(_: Ticket) -> NoReturn:
        raise error

    with_ticket(group, lambda: plan.parties, fail)


def skip_exchange(ticket: Ticket, plan: Plan, check: str | None = None, tag: object = None) -> bool:
    """End a call of a plan without messages, if the ranks have compared it; whether that is so."""
    if plan.compiled is None:
        return False
    compiled, session = compiled_plan(plan, ticket.group)
    if compiled is None:
        return False
    if not compiled.is_alone and check != "never":
        if session is None or compiled.key not in session.agreed:
            return False
        session.close_call(session.begin(ticket, tag))
    ticket.finish()
    return True


def start_call(
    ticket: Ticket, plan: Plan, tensors: Tensors, into: Tensors | None, options: Options
) -> Handle:
    """Start a move in a thread."""
    report = RunReport(dist.get_rank() if dist.is_initialized() else -1, -1, plan.digest)
    call = Call(ticket, plan, tensors, into, options, report=report)
    report.call = ticket.number
    return Handle(call, report)


class Handle:
    """A move in flight, as `plan.start` returns it."""

    def __init__(self, call: Call, report: RunReport) -> None:
        self._call = call
        self.report = report
        self.finish: Callable[[Result], Result] | None = None
        """Converts the result before `wait` returns it for the first time."""
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._streams = SideStreams(call.gpus())
        self._running = _thread.allocate_lock()
        """Locked while the thread runs: joining the thread itself breaks its state in Python 3.11
        when a signal handler raises."""
        self._running.acquire()
        call.ticket.in_thread = True
        threading.Thread(target=self._work, daemon=True, name="reshard-move").start()
        # Here and in the thread, which may start only after the next call of this thread.
        call.ticket.owner = None

    def _work(self) -> None:
        call, streams = self._call, self._streams
        call.ticket.owner = None
        try:
            with streams.used(call.all_tensors()):
                self._result = call.run()
        except BaseException as error:
            # An internal one has the user's inside, also when the call was ended meanwhile.
            self._error = error.error if isinstance(error, UndecidedError) else error
            if not call.ticket.over:
                call.ticket.in_thread = False
                self._error = abandon(call.ticket, error)
        finally:
            if call.ticket.in_thread and call.ticket.abandoned:
                call.close()  # not before: this thread has used the buffers of the call until now
            self.report.finish()
            self._running.release()

    def done(self) -> bool:
        """Whether the move has completed or failed."""
        in_flight = self._call.in_flight
        complete = in_flight is None or in_flight.complete
        return not self._running.locked() and complete

    def wait(self) -> Result:
        """Wait for the move; returns this rank's destination tensors, or raises its error.

        On GPUs it waits until all messages have arrived. Work that is enqueued on the current
        stream afterwards sees the complete tensors.
        """
        try:
            with self._running:
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


class SideStreams:
    """The side streams of a move that runs in a thread, one per GPU, in order with the caller's.

    The move begins after the work that the caller enqueued before it, and the work that the caller
    enqueues after `join` begins after the move.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._begun = {
            device: _cuda.current_stream(device).record_event() for device in set(devices)
        }
        self._done: dict[torch.device, Any] = {}

    @contextmanager
    def used(self, given: Iterable[torch.Tensor]) -> Iterator[None]:
        """Enqueue the work done inside on the side streams; it reads and writes these tensors."""
        with ExitStack() as entered:
            for device, event in self._begun.items():
                _stream(device).wait_event(event)
                entered.enter_context(_cuda.stream(_stream(device)))
            yield
        for tensor in given:
            # The allocator must not reuse memory that these streams still use.
            if tensor.device in self._begun:
                tensor.record_stream(_stream(tensor.device))
        self._done = {device: _stream(device).record_event() for device in self._begun}

    def join(self, results: Iterable[torch.Tensor]) -> None:
        """Let the caller's streams wait for the move; they use the results from now on."""
        for device, event in self._done.items():
            _cuda.current_stream(device).wait_event(event)
        # Results of a second `wait` are converted: torch warns of its ShardedTensor's attributes.
        for tensor in results if self._done else ():
            if tensor.device in self._done:
                tensor.record_stream(_cuda.current_stream(tensor.device))


@cache
def _stream(device: torch.device) -> Any:
    """One per GPU, not one per move: torch's allocator keeps separate memory for each stream."""
    return _cuda.Stream(device)
