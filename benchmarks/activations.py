"""Activations kept as shares, interleaved with no resharding and with PyTorch's input_reshard.

    python benchmarks/activations.py [--repeat 9] [--quick] [--json]

Four tensor-parallel MLPs (hidden 512, inner 2048, 512 tokens, float32) on 4 ranks, a forward and a
backward for each figure: the median over repetitions of the slowest rank. What a rank keeps between
forward and backward is counted, collectives too, and gradients are compared before anything is
timed. The last case has a budget, and tells the most that was ever there.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from itertools import chain

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

from reshard.bytesize import format_bytes
from reshard.nn import input_reshard, resharding_of
from reshard.nn.activations.keeping import Keeper
from reshard.nn.activations.region import Form, Region

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
        input_reshard(ours, mesh, 0, modules="layers.*")
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
        yield Case(
            f"a step of {LAYERS} layers, {tokens} tokens" + (", checkpointed" if recompute else ""),
            runs,
            "ours",
            {"no resharding": 1.2},
            {"PyTorch's": 1},
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


def kept_by(model: nn.Module, tokens: int) -> int:
    """Bytes of distinct memory that a graph holds, parameters and the input left out."""
    x = torch.randn(tokens, HIDDEN).requires_grad_()
    own = {address(param) for param in model.parameters()} | {address(x)}
    out = model(x)
    held: dict[int, int] = {}
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [other for other, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, tuple) else [raw]:
                    held |= memory_of(getattr(one, "data", one))
    return sum(size for key, size in held.items() if key not in own)


def memory_of(kept: object) -> dict[int, int]:
    if hasattr(kept, "_region"):
        kept = kept._region.memory
    if hasattr(kept, "_tensor"):
        kept = kept._tensor
    if not isinstance(kept, torch.Tensor):
        return {}
    local = kept._local_tensor if isinstance(kept, DTensor) else kept
    return {address(local): local.untyped_storage().nbytes()}


def address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def budgets(mesh: DeviceMesh, tokens: int) -> Iterator[Case]:
    """Less than the inputs take: some are cut, and never is more there than allowed."""
    size = tokens * HIDDEN * 4
    plain, ours = Model(mesh, True), Model(mesh, True)
    budget = 3 * size
    input_reshard(ours, mesh, 0, modules="layers.*", budget=budget)
    most = watch(resharding_of(ours).keeper)
    runs = {"no resharding": stepper(plain, tokens), "ours": stepper(ours, tokens)}
    assert equal(gradients(ours, runs["ours"]), gradients(plain, runs["no resharding"]))
    peak = most()
    assert peak <= budget, (peak, budget)
    told = f"at most {format_bytes(peak)} at a time, {format_bytes(budget)} allowed"
    name = f"a budget of {format_bytes(budget)} for {format_bytes(LAYERS * size)}"
    yield Case(name, runs, "ours", {"no resharding": 1.2}, {}, {"ours": told})


def watch(keeper: Keeper) -> Callable[[], int]:
    """Count what is kept and what is whole, whenever something is made whole."""
    whole: list[tuple[StorageWeakRef, int]] = []
    peak = 0
    bring = keeper._bring

    def counted(region: Region) -> torch.Tensor:
        nonlocal peak
        found = bring(region)
        if region.form is not Form.WHOLE:  # else it is counted among what is kept
            whole.append((StorageWeakRef(found.untyped_storage()), found.numel()))
        alive = {ref.cdata: size for ref, size in whole if not ref.expired()}
        assert keeper.ledger is not None
        peak = max(peak, keeper.ledger.kept + sum(alive.values()))
        return found

    keeper._bring = counted  # type: ignore[method-assign]
    return lambda: peak


if __name__ == "__main__":
    main()
