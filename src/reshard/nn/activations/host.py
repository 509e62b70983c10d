"""Regions that wait in the memory of the host, and come back when they are needed."""

from __future__ import annotations

import torch

from reshard.nn.activations.region import Region

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
    region.memory, region.is_away = host, True
    region.stats.bytes_kept -= size
    region.stats.bytes_offloaded += size


def brought_back(region: Region) -> torch.Tensor:
    """The bytes of a region that waits on the host, on its device again."""
    stream = torch.cuda.current_stream(region.device)
    stream.wait_stream(_side_stream(region.device))  # it may still be on its way out
    return region.memory.to(region.device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
