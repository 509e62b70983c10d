"""Activations kept as 1/N between forward and backward, with the same gradients to the last bit.

    from reshard import nn

    nn.input_reshard(block, mesh["tp"], 0)              # the inputs of a tensor-parallel block
    nn.input_reshard(model, mesh["tp"], 0, modules="layers.*.mlp")
    nn.input_reshard(model, mesh["tp"], 0, budget="2GiB")
    print(nn.resharding_of(block).stats())

What tensor-parallel ranks save for backward is partly the same on all of them: the inputs of a
block. Each rank keeps a share of those, and they are put together again when backward needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from reshard.nn.activations.frame import Frame
from reshard.nn.activations.handle import Resharding
from reshard.nn.activations.keeping import Keeper, Options
from reshard.nn.activations.known import Known, sources_in
from reshard.nn.activations.meeting import Meeting, group_of
from reshard.nn.activations.owned import Owned
from reshard.nn.activations.restoring import restorer_of
from reshard.nn.paths import find_module, matching
from reshard.text import parse_bytes, quoted

__all__ = ["input_reshard", "resharded_activations"]


def input_reshard(
    module: nn.Module,
    mesh_or_group: Meeting = None,
    dim: int | None = None,
    *,
    modules: str | Sequence[str] | None = None,
    tp_device_mesh: Meeting = None,
    input_reshard_dim: int | None = None,
    **options: Any,
) -> nn.Module:
    """Keep the inputs of a module, or of those inside it that patterns name, as shares.

    Gives the module back; without a dim it is untouched. Every rank of the mesh's axis must give
    the same inputs, as in tensor parallelism. ``options``: ``budget`` ("2GiB": keep what fits),
    ``min_bytes``, ``timeout`` and ``check`` (compare checksums once).

    Memory is cut by elements, whatever the dim: shares are exact and nothing has to be reordered.
    """
    wanted = input_reshard_dim if dim is None else dim
    if wanted is None:
        return module
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise TypeError(f"dim={wanted!r}: give a dim of the inputs, such as 0")
    keeper = _keeper(mesh_or_group or tp_device_mesh, options)
    handle, owned = Resharding(keeper), Owned(module)
    for path, one in _chosen(module, modules):
        handle.attach(one, path or type(one).__name__, wanted, owned)
    return module


@contextmanager
def resharded_activations(
    mesh_or_group: Meeting, inputs: Iterable[torch.Tensor], **options: Any
) -> Iterator[Resharding]:
    """Keep saved tensors as shares in code that is no module; ``inputs`` are equal on all ranks.

    with resharded_activations(group, [x]) as handle:
        y = torch.nn.functional.linear(x, weight)
    """
    keeper = _keeper(mesh_or_group, options)
    handle = Resharding(keeper)
    if len(keeper.restorer.ranks) == 1:
        yield handle
        return
    owned = Owned(None)
    known = Known(sources_in(tuple(inputs), {}, owned), keeper.restorer.ranks, owned)
    with Frame(keeper, known, "resharded_activations", keeper.options.check) as frame:
        yield handle
    frame.finish()


def _keeper(meeting: Meeting, options: dict[str, Any]) -> Keeper:
    return Keeper(restorer_of(group_of(meeting)), _options(**options))


def _options(
    budget: int | str | None = None,
    min_bytes: int | str = 0,
    timeout: float = 60.0,
    check: bool = False,
) -> Options:
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0")
    most = None if budget is None else parse_bytes(budget)
    return Options(parse_bytes(min_bytes), float(timeout), most, bool(check))


def _chosen(module: nn.Module, patterns: str | Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    if patterns is None:
        return [("", module)]
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    found: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = matching(pattern, paths)
        if not matched:
            raise AttributeError(
                f"{quoted(pattern)} matches no module of {type(module).__name__}: patterns are "
                "paths with *, ? and [0-9] inside a part, such as layers.*.mlp"
            )
        found |= {path: find_module(module, path) for path in matched}
    return list(found.items())
