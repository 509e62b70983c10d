"""Regions that wait in the memory of the host, and come back when they are needed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reshard.nn.activations.region import Form, Region

__all__ = ["brought_back", "offload"]


def offload(region: Region) -> None:
    """Move the bytes of a region to the host, while the device computes."""
    memory = region.memory
    size = memory.numel()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = _side_stream(memory.device)
    stream.wait_stream(torch.cuda.current_stream(memory.device))
    with torch.cuda.stream(stream):
        host.copy_(memory, non_blocking=True)
    # Nobody may be given this memory before it was copied.
    memory.record_stream(stream)
    region.memory, region.form = host, Form.HOST
    region.stats.bytes_kept -= size
    region.stats.bytes_offloaded += size


def brought_back(region: Region, ahead: bool) -> Callable[[], torch.Tensor]:
    """Begin to bring a region back; what is returned waits for it."""
    device, host = region.device, region.memory
    stream = _side_stream(device) if ahead else torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        if not ahead:
            stream.wait_stream(_side_stream(device))  # it may still be on its way out
        whole = host.to(device, non_blocking=True)
        come = torch.cuda.Event()  # type: ignore[no-untyped-call]
        come.record(stream)

    def arrived() -> torch.Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_event(come)
        whole.record_stream(current)
        return whole

    return arrived


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
