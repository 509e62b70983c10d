"""Sharding plans: which tensors and outputs of a module are sharded, and how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from reshard.errors import ArgumentTypeError
from reshard.layout.layout import Layout
from reshard.nn.shard.resolve import Resolved, Sharder, resolve, warn_unmatched
from reshard.sharded.specs.base import ShardingSpec
from reshard.sharded.specs.listed import LayoutShardingSpec
from reshard.text import quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

__all__ = ["Sharder", "ShardingPlan", "ShardingPlanner"]


@dataclass(frozen=True)
class ShardingPlan:
    """How the tensors and the outputs of a module are sharded, by path.

        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ShardingPlan(
            {"embed.weight": rows, "layers.{i}.fc1.weight": rows, "tower": MySharder()},
            output_plan={"layers.{i}": rows},
            return_local_tensor=[""],
        )

    Patterns are those of rules files: ``{i}`` is one part of a path that is an integer, ``*`` any
    text. A path that is written out beats a pattern.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    """Parameters and buffers with a spec, modules with a Sharder."""
    output_plan: Mapping[str, ShardingSpec] | None = None
    """Modules whose sharded outputs are resharded to a spec; "" is the root."""
    return_local_tensor: Sequence[str] | None = None
    """Modules whose sharded outputs become this rank's plain tensors; "" is the root."""

    def __post_init__(self) -> None:
        # Copies: the caller may change its own dicts later.
        for name in ("plan", "output_plan"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                kind = type(value).__name__
                raise ArgumentTypeError(f"{name} is a dict with paths as keys, found {kind}")
            if value is not None:
                object.__setattr__(self, name, dict(value))
        paths = self.return_local_tensor
        if isinstance(paths, str):
            raise ArgumentTypeError(
                f"return_local_tensor is a list of paths: write [{quoted(paths)}]"
            )
        if paths is not None:
            object.__setattr__(self, "return_local_tensor", tuple(paths))

    def validate(self, module: nn.Module) -> None:
        """Raise what is wrong with the plan for this module; change nothing.

        If several things are wrong, the first is raised and the others are its notes.
        """
        warn_unmatched(self.resolve(module).unmatched, stacklevel=2)

    def resolve(self, module: nn.Module) -> Resolved:
        """The plan with every pattern replaced by the paths that it matches in this module."""
        return resolve(self.plan, self.output_plan or {}, self.return_local_tensor or (), module)

    @classmethod
    def from_rules(
        cls,
        rules: Rules,
        module: nn.Module,
        mesh: Mesh,
        device: str | torch.device = "cpu",
    ) -> ShardingPlan:
        """The plan that rules give for a module; tensors that they replicate stay as they are.

        rules = Rules.for_config(config.to_dict())
        shard_module(model, ShardingPlan.from_rules(rules, model, Mesh(tp=4)))
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        layouts = rules.fit(shapes).layouts(shapes, mesh)
        # A model has few different pairs.
        pairs = {(layout, shapes[name]) for name, layout in layouts.items()}
        replicated = {pair for pair in pairs if _is_replicated(*pair)}
        return cls(
            {
                name: LayoutShardingSpec(layout, str(device))
                for name, layout in layouts.items()
                if (layout, shapes[name]) not in replicated
            }
        )


class ShardingPlanner(ABC):
    """Builds the plan for a module.

    class Rows(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan({name: self.rows for name, _ in module.named_parameters()})
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for this module."""


def _is_replicated(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank holds all of a tensor."""
    return all(
        layout.holds(rank) is not None and layout.local_shape(rank, shape) == shape
        for rank in layout.ranks
    )
