"""Where the elements of a destination tensor come from, when names or shapes differ.

    names = {
        "layers.{i}.qkv.weight": join("layers.{i}.q.weight", "layers.{i}.k.weight", dim=0),
        "layers.{i}.qkv.bias":   join(dim=0, source="layers.{i}.{part}.bias", q=512, k=128, v=128),
        "layers.{i}.experts":    stack("layers.{i}.expert.{e}", dim=0),
        "embed.weight":          take("tok_embeddings.weight", pad={0: 128512}),
        "head.weight":           "lm_head.weight",
    }

A key names destination tensors; ``{i}`` stands for digits and means the same in the source. Names
without an entry come from the source tensor of the same name. One source may feed several names.

sources    the values of such a mapping: take, join, stack
templates  `{i}` in names
tables     the same mapping as TOML and JSON
feeds      which part of which source tensor fills which part of a destination tensor
"""

from reshard.planning.names.sources import (
    Feed,
    Join,
    Names,
    Segments,
    Source,
    Stacked,
    Take,
    join,
    stack,
    take,
)

__all__ = [
    "Feed",
    "Join",
    "Names",
    "Segments",
    "Source",
    "Stacked",
    "Take",
    "join",
    "stack",
    "take",
]
