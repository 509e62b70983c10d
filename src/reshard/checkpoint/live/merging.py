"""What each rank says of a tensor, as one spec: which boxes lie on which ranks of the whole job?"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.box import Box
from reshard.checkpoint.live.views import boxes_of
from reshard.layout import Layout
from reshard.spec import TensorSpec
from reshard.tensors.merging import merge_specs

__all__ = ["merged_specs"]

Specs = Mapping[str, TensorSpec]


def merged_specs(said: Mapping[int, Specs]) -> dict[str, TensorSpec]:
    """One spec for each name, or an error that names who differs.

    Where FSDP cuts a tensor that tensor parallelism leaves whole, its ranks say different things,
    each of the mesh that it is in: dp over ranks 0 and 4, dp over 1 and 5. In a state dict one name
    is one tensor, so these are replicas of each other.
    """
    by_name: dict[str, dict[int, TensorSpec]] = {}
    for rank, specs in said.items():
        for name, spec in specs.items():
            by_name.setdefault(name, {})[rank] = spec
    known: dict[frozenset[TensorSpec], TensorSpec | None] = {}
    joined = {}
    for name, by_rank in by_name.items():
        distinct = {id(spec): spec for spec in by_rank.values()}
        key = frozenset(distinct.values())
        if len(key) > 1:
            if key not in known:
                known[key] = _joined(by_rank)
            joined[name] = known[key]
    apart = {name: spec for name, spec in joined.items() if spec is not None}
    rest = {
        rank: {name: spec for name, spec in specs.items() if name not in apart}
        for rank, specs in said.items()
    }
    return {**merge_specs(rest), **apart}


def _joined(by_rank: Mapping[int, TensorSpec]) -> TensorSpec | None:
    """Specs of meshes that have no rank in common, as one; None if they are not that."""
    first = next(iter(by_rank.values()))
    boxes: dict[int, tuple[Box, ...]] = {}
    for rank, spec in by_rank.items():
        if (spec.shape, spec.dtype) != (first.shape, first.dtype):
            return None
        for other in spec.layout.ranks:
            if other not in by_rank or by_rank[other] != spec:
                return None
        if rank not in spec.layout.ranks:
            return None
        boxes |= {rank: boxes_of(spec.layout, spec.shape).get(rank, ())}
    if all(str(spec.layout) == "..." for spec in by_rank.values()):
        return None  # plain tensors, which the usual way puts into words
    return TensorSpec(first.shape, first.dtype, Layout.from_boxes(first.shape, boxes))
