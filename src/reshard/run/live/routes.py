"""Do tensors go from GPU to GPU, or by way of the memory of the hosts?

Each rank says where its tensors are when plans are compared. If all ranks have all of theirs on one
GPU each, and the caller's process group has NCCL, they go from GPU to GPU. Otherwise, on a gloo
group or where some tensors are on the host, they go by way of the host, GPU tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from reshard.run.live.holding import Held

__all__ = [
    "GPU",
    "all_on_gpus",
    "default_device",
    "device_of",
    "places_of_tensors",
    "with_number",
]

GPU, NOWHERE = "cuda", "none"


def places_of_tensors(held: tuple[Held, Held], group: dist.ProcessGroup) -> str:
    """Where the tensors of this rank are, as it tells the others: `GPU` if NCCL can move them."""
    devices = held[0].devices | held[1].devices
    kinds = {device.type for device in devices}
    if any(len(side.elsewhere) < len(side.tensors) for side in held):
        kinds.add("cpu")
    if kinds == {GPU} and len(devices) > 1:
        return f"{len(devices)} GPUs"
    if not kinds <= {GPU}:
        return "+".join(sorted(kinds))
    where = GPU if kinds else NOWHERE
    return where if _has_nccl(group) else f"{where}, and no NCCL"


def all_on_gpus(said: Mapping[int, str]) -> bool:
    """Whether tensors go from GPU to GPU, by what all ranks have said."""
    return GPU in said.values() and set(said.values()) <= {GPU, NOWHERE}


def device_of(held: tuple[Held, Held]) -> torch.device:
    """The GPU of this rank: that of its tensors, or the current one if it has none."""
    for device in held[0].devices | held[1].devices:
        return device
    return with_number(torch.device(GPU))


def with_number(device: torch.device) -> torch.device:
    """The device; of GPUs the current one, if it does not say which."""
    if device.type == GPU and device.index is None:
        return torch.device(GPU, torch.cuda.current_device())
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a rank without source tensors wants its new ones: where its group can move them."""
    return with_number(torch.device(GPU if set(_backends(group)) == {GPU} else "cpu"))


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return _backends(group).get(GPU) == "nccl"


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each kind of device."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}
