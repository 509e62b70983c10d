"""Activations kept as shares, interleaved with no resharding and with PyTorch's input_reshard.

    python benchmarks/activations.py [--repeat 9] [--quick] [--json]

Four tensor-parallel MLPs (hidden 512, inner 2048, 512 tokens, float32) on 4 ranks, a forward and a
backward for each figure: the median over repetitions of the slowest rank. What a rank keeps between
forward and backward is counted, collectives too, and gradients are compared before anything is
timed. The last case has a budget, and tells the most that was ever there.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import Case, arguments, measured, run_ranks, tell
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard as theirs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reshard.nn import input_reshard, resharding_of
from reshard.nn.activations.policy import Policy
from reshard.nn.activations.region import Region
from reshard.text import format_bytes

RANKS, HIDDEN, LAYERS = 4, 512, 4


class MLP(nn.Module):
    """Columns, GELU, rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(x)))
        return found


class Model(nn.Module):
    """Some of them, each of which may be computed again in backward."""

    def __init__(self, mesh: DeviceMesh, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([MLP() for _ in range(LAYERS)])
        for number, layer in enumerate(self.layers):
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if recompute:
                self.layers[number] = checkpoint_wrapper(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> None:
    run_ranks(RANKS, on_a_rank, arguments(__doc__).parse_args())


def on_a_rank(rank: int, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    tokens, repeat = (64, 3) if args.quick else (512, args.repeat)
    mesh = init_device_mesh("cpu", (RANKS,))
    cases = chain(steps(mesh, tokens), budgets(mesh, tokens))
    tell((measured(case, repeat) for case in cases), rank, args.json)


def steps(mesh: DeviceMesh, tokens: int) -> Iterator[Case]:
    """A step with and without checkpointing."""
    for recompute in (True, False):
        plain, ours, original = (Model(mesh, recompute) for _ in range(3))
        input_reshard(ours, mesh, 0, modules="layers.{i}")
        for layer in original.layers:
            theirs(layer, mesh, 0)
        models = {"no resharding": plain, "ours": ours, "PyTorch's": original}
        runs = {name: stepper(model, tokens) for name, model in models.items()}
        expected = gradients(plain, runs["no resharding"])
        facts = {name: facts_of(model, tokens) for name, model in models.items()}
        for name, model in models.items():
            same = equal(gradients(model, runs[name]), expected)
            facts[name] += ", gradients bit-identical" if same else ", gradients WRONG"
            assert same or name != "ours"
        name = f"a step of {LAYERS} layers, {tokens} tokens" + ", checkpointed" * recompute
        # Without checkpointing the original gives wrong gradients, so there is no race.
        yield Case(
            name,
            runs,
            "ours",
            {"no resharding": 1.2},
            {"PyTorch's": 1} if recompute else {},
            facts,
        )


def stepper(model: nn.Module, tokens: int) -> Callable[[], object]:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model.zero_grad()
        model(x.clone().requires_grad_()).square().mean().backward()

    return step


def gradients(model: nn.Module, step: Callable[[], object]) -> list[torch.Tensor]:
    step()
    step()
    found = [param.grad for param in model.parameters()]
    return [one.to_local().clone() for one in found if isinstance(one, DTensor)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    same = torch.tensor(all(map(torch.equal, found, expected)), dtype=torch.int64)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def facts_of(model: nn.Module, tokens: int) -> str:
    """What a rank keeps between forward and backward, and collectives of a step."""
    step = stepper(model, tokens)
    step()
    before = restores(model)
    with CommDebugMode() as counted:
        step()
    collectives = counted.get_total_counts() + restores(model) - before
    return f"keeps {format_bytes(kept_by(model, tokens))}, {collectives} collectives a step"


def restores(model: nn.Module) -> int:
    try:
        return resharding_of(model).stats().collectives
    except ValueError:
        return 0


class Made(TorchDispatchMode):
    """Knows the memory that is made while it is on, and how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor):
                storage = (one._local_tensor if isinstance(one, DTensor) else one).untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    def alive(self, without: set[int]) -> int:
        """Bytes that somebody keeps, leaving out some storages."""
        kept = (one for key, one in self._made.items() if key not in without)
        return sum(size for ref, size in kept if not ref.expired())


def kept_by(model: nn.Module, tokens: int) -> int:
    """Bytes that are kept for backward, the input's among them."""
    with torch.no_grad():
        always = left_by(model, tokens)
    return left_by(model, tokens) - always


def left_by(model: nn.Module, tokens: int) -> int:
    """Bytes that are there after forward, without parameters and the output."""
    source = torch.randn(tokens, HIDDEN).requires_grad_()
    with Made() as made:
        x = source * 1.0
        out = model(x)
        del x
    gc.collect()
    return made.alive({address(one) for one in (*model.parameters(), out)})


def address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def budgets(mesh: DeviceMesh, tokens: int) -> Iterator[Case]:
    """A budget below the size of the inputs: some are kept as shares, and it is never exceeded."""
    size = tokens * HIDDEN * 4
    plain, ours = Model(mesh, True), Model(mesh, True)
    budget = 3 * size
    input_reshard(ours, mesh, 0, modules="layers.{i}", budget=budget)
    most = watch(resharding_of(ours).policy)
    runs = {"no resharding": stepper(plain, tokens), "ours": stepper(ours, tokens)}
    assert equal(gradients(ours, runs["ours"]), gradients(plain, runs["no resharding"]))
    peak = most()
    assert peak <= budget, (peak, budget)
    told = f"at most {format_bytes(peak)} at a time, {format_bytes(budget)} allowed"
    name = f"a budget of {format_bytes(budget)} for {format_bytes(LAYERS * size)}"
    yield Case(name, runs, "ours", {"no resharding": 1.2}, {}, {"ours": told})


def watch(policy: Policy) -> Callable[[], int]:
    """Count the kept and the restored bytes at every restore."""
    whole: list[tuple[StorageWeakRef, int]] = []
    peak = 0
    restore = policy._restore

    def counted(region: Region) -> torch.Tensor:
        nonlocal peak
        found = restore(region)
        if region.is_share or region.is_offloaded:  # else it is counted among what is kept
            whole.append((StorageWeakRef(found.untyped_storage()), found.numel()))
        alive = {ref.cdata: size for ref, size in whole if not ref.expired()}
        assert policy.budget is not None
        peak = max(peak, policy.budget.kept + sum(alive.values()))
        return found

    policy._restore = counted  # type: ignore[method-assign]
    return lambda: peak


if __name__ == "__main__":
    main()
