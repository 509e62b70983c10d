"""Side streams of a move that runs in a thread, in order with the caller's streams.

The move begins after the work that the caller enqueued before it, and the work that the caller
enqueues after `join` begins after the move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["SideStreams"]

_cuda: Any = torch.cuda  # its streams and events have no types
_streams: dict[torch.device, Any] = {}
"""One per GPU, not one per move: torch's allocator keeps separate memory for each stream."""


class SideStreams:
    """The side streams of one move, one per GPU that it uses."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._begun = {
            device: _cuda.current_stream(device).record_event() for device in set(devices)
        }
        self._done: dict[torch.device, Any] = {}

    @property
    def any(self) -> bool:
        """Whether the move uses a GPU."""
        return bool(self._begun)

    @contextmanager
    def used(self, given: Iterable[torch.Tensor]) -> Iterator[None]:
        """Enqueue the work done inside on the side streams; it reads and writes these tensors."""
        with ExitStack() as entered:
            for device, event in self._begun.items():
                _stream(device).wait_event(event)
                entered.enter_context(_cuda.stream(_stream(device)))
            yield
        for tensor in given if self._begun else ():
            # The allocator must not reuse memory that these streams still use.
            if tensor.device in self._begun:
                tensor.record_stream(_stream(tensor.device))
        self._done = {device: _stream(device).record_event() for device in self._begun}

    def join(self, results: Iterable[torch.Tensor]) -> None:
        """Let the caller's streams wait for the move; they use the results from now on."""
        for device, event in self._done.items():
            _cuda.current_stream(device).wait_event(event)
        for tensor in results if self._done else ():
            if tensor.device in self._done:
                tensor.record_stream(_cuda.current_stream(tensor.device))


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = _cuda.Stream(device)
    return _streams[device]
