"""Do tensors go from GPU to GPU, or by way of the memory of the hosts?

Each rank says where its tensors are when plans are compared. If all ranks have all of theirs on one
GPU each, and the caller's process group has NCCL, they go from GPU to GPU. Otherwise, on a gloo
group or where some tensors are on the host, they go by way of the host, GPU tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from reshard.live.inputs.bound import BoundTensors

__all__ = ["GPU", "all_on_gpus", "default_device", "device_of", "placement_of", "with_index"]

GPU, NOWHERE = "cuda", "none"


def placement_of(bound: BoundTensors, group: dist.ProcessGroup) -> str:
    """Where the tensors of this rank are, as it tells the others: `GPU` if NCCL can move them."""
    if bound.is_host and bound.tensors:
        return "cpu"
    kinds = {device.type for device in bound.devices}
    if len(bound.on_devices) < len(bound.tensors):
        kinds.add("cpu")
    if kinds == {GPU} and len(bound.devices) > 1:
        return f"{len(bound.devices)} GPUs"
    if not kinds <= {GPU}:
        return "+".join(sorted(kinds))
    where = GPU if kinds else NOWHERE
    return where if _backends(group).get(GPU) == "nccl" else f"{where}, and no NCCL"


def all_on_gpus(placements: Mapping[int, str]) -> bool:
    """Whether tensors go from GPU to GPU, by what all ranks have said."""
    return GPU in placements.values() and set(placements.values()) <= {GPU, NOWHERE}


def device_of(bound: BoundTensors) -> torch.device:
    """The GPU of this rank: that of its tensors, or the current one if it has none."""
    for device in bound.devices:
        return device
    return with_index(torch.device(GPU))


def with_index(device: torch.device) -> torch.device:
    """The device; of GPUs the current one, if it does not say which."""
    if device.type == GPU and device.index is None:
        return torch.device(GPU, torch.cuda.current_device())
    return device


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a rank without source tensors wants its new ones: where its group can move them."""
    return with_index(torch.device(GPU if set(_backends(group)) == {GPU} else "cpu"))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each kind of device."""
    parts = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}
