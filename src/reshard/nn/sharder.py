"""Someone who knows how one kind of module is sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

__all__ = ["Sharder"]


class Sharder(ABC):
    """Takes a module and gives the one that stands in its place, for what no spec can say.

    class EmbeddingBags(Sharder):
        def shard(self, module):
            return ShardedEmbeddingBags(module)

    shard_module(model, ShardingPlan({"embeddings": EmbeddingBags()}))
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module to use instead; the same one, changed in place, is fine as well."""
