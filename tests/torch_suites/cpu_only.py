"""Imported first by adapted tests: what asks for GPUs or NCCL gets the CPU and gloo.

The ranks of those tests are spawned and import the test's module, and so this one too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal import common_distributed

init_process_group, new_group = dist.init_process_group, dist.new_group


def with_gloo(made: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") not in (None, "gloo"):
            kwargs["backend"] = "gloo"
        args = tuple("gloo" if one in ("nccl", "xccl") else one for one in args)
        kwargs.pop("device_id", None)
        return made(*args, **kwargs)

    return make


def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


def nothing(*_: Any, **__: Any) -> None:
    return


dist.init_process_group = with_gloo(init_process_group)
dist.new_group = with_gloo(new_group)
for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
    setattr(common_distributed, name, always)
torch.cuda.set_device = nothing
torch.accelerator.set_device_index = nothing
torch.accelerator.current_device_index = lambda: torch.device("cpu")
rpc.TensorPipeRpcBackendOptions.set_device_map = nothing
torch.Tensor.cuda = lambda self, *_, **__: self
torch.nn.Module.cuda = lambda self, *_, **__: self


def _fork_processes(self: Any) -> None:
    """Four fresh processes that import torch take ten seconds; nothing runs here before."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


common_distributed.MultiProcessTestCase._spawn_processes = _fork_processes
