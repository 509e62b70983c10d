"""What of a module is sharded, and how? Written down before anything happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from reshard.layout.layout import Layout
from reshard.nn.resolving import Resolved, resolve
from reshard.nn.sharder import Sharder
from reshard.sharded.by_layout import LayoutShardingSpec
from reshard.sharded.spec import ShardingSpec
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["ShardingPlan", "ShardingPlanner"]


@dataclass(frozen=True)
class ShardingPlan:
    """How the tensors and the outputs of a module are sharded, by path.

        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ShardingPlan(
            {"embed.weight": rows, "layers.*.fc1.weight": rows, "tower": MySharder()},
            output_plan={"layers.*": rows},
            return_local_tensor=[""],
        )

    ``*``, ``?`` and ``[0-9]`` stand for text inside one part of a path. What is written out beats
    what a wildcard matches.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    """Parameters and buffers with a spec, modules with a Sharder."""
    output_plan: Mapping[str, ShardingSpec] | None = None
    """Modules whose sharded outputs are brought to a spec; "" is the root."""
    return_local_tensor: Sequence[str] | None = None
    """Modules whose sharded outputs become this rank's plain tensors; "" is the root."""

    def __post_init__(self) -> None:
        # Copies: the caller may go on to fill its own.
        for name in ("plan", "output_plan"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, dict(_checked(name, given)))
        paths = self.return_local_tensor
        if isinstance(paths, str):
            raise TypeError(f"return_local_tensor is a list of paths: write [{quoted(paths)}]")
        if paths is not None:
            object.__setattr__(self, "return_local_tensor", tuple(paths))

    def validate(self, module: nn.Module) -> None:
        """Raises what is wrong with the plan for this module, and changes nothing.

        Where several things are wrong, the first is raised and the others are its notes.
        """
        self.resolve(module)

    def resolve(self, module: nn.Module) -> Resolved:
        """The plan with every wildcard replaced by what it matches in this module."""
        return resolve(self.plan, self.output_plan or {}, self.return_local_tensor or (), module)

    @classmethod
    def from_rules(
        cls,
        rules: Rules,
        module: nn.Module,
        mesh: Mesh,
        device: str | torch.device = "cpu",
    ) -> ShardingPlan:
        """The plan that rules make for a module; what they replicate is left alone.

        rules = Rules.for_config(config.to_dict())
        shard_module(model, ShardingPlan.from_rules(rules, model, Mesh(tp=4)))
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        layouts = rules.fit(shapes).layouts(shapes, mesh)
        whole = {pair: _is_whole(*pair) for pair in _pairs(layouts, shapes)}
        return cls(
            {
                name: LayoutShardingSpec(layout, str(device))
                for name, layout in layouts.items()
                if not whole[layout, shapes[name]]
            }
        )


class ShardingPlanner(ABC):
    """Someone who makes the plan for a module.

    class Rows(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan({name: self.rows for name, _ in module.named_parameters()})
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for this module."""


def _checked(name: str, given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} is a dict with a path for each key, found {type(given).__name__}")
    return given


def _pairs(
    layouts: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Layout, tuple[int, ...]]]:
    """Layouts and shapes that belong together, each pair once: a model has few."""
    yield from {(layout, shapes[name]): None for name, layout in layouts.items()}


def _is_whole(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank holds all of a tensor."""
    return all(
        layout.holds(rank) is not None and layout.local_shape(rank, shape) == shape
        for rank in layout.ranks
    )
