"""Every rank described what it holds: is that one state dict, and which?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import DisagreementError, quoted
from reshard.layout import BoxLayout
from reshard.mesh import format_ranks
from reshard.spec import TensorSpec
from reshard.tensors.reading import whole_on

__all__ = ["merge_specs"]

MOST_NAMED = 4
"""How many tensors an error names."""


def merge_specs(specs: Mapping[int, Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """One spec per name from what each rank said, or an error that names who differs.

    Ranks must say the same of a tensor. Plain tensors are the exception: each rank knows only its
    own, so equal shapes and dtypes under one name are taken as replicas of one tensor.
    """
    said: dict[str, dict[int, TensorSpec]] = {}
    for rank in sorted(specs):
        for name, spec in specs[rank].items():
            said.setdefault(name, {})[rank] = spec
    merged = {name: _merged(by_rank) for name, by_rank in said.items()}
    differing = [name for name, spec in merged.items() if spec is None]
    if differing:
        raise DisagreementError(_differs(differing, said[differing[0]]))
    return {name: spec for name, spec in merged.items() if spec is not None}


def _merged(by_rank: Mapping[int, TensorSpec]) -> TensorSpec | None:
    """The one spec that all ranks mean, or None."""
    (_, first), *others = by_rank.items()
    if all(spec is first or spec == first for _, spec in others):
        return first
    if _groups(by_rank)[1:]:
        return None
    return TensorSpec(first.shape, first.dtype, whole_on(tuple(by_rank)))


def _groups(by_rank: Mapping[int, TensorSpec]) -> list[dict[int, TensorSpec]]:
    """The ranks that agree with each other, together."""
    groups: list[dict[int, TensorSpec]] = []
    for rank, spec in by_rank.items():
        for group in groups:
            other_rank, other = next(iter(group.items()))
            plain = _is_plain(spec, rank) and _is_plain(other, other_rank)
            alike = (spec.shape, spec.dtype) == (other.shape, other.dtype)
            if spec is other or (plain and alike) or spec == other:
                group[rank] = spec
                break
        else:
            groups.append({rank: spec})
    return groups


def _is_plain(spec: TensorSpec, rank: int) -> bool:
    """Whether the rank says that it holds the whole tensor, and knows of no other."""
    return spec.layout == whole_on((rank,))


def _differs(names: Sequence[str], by_rank: Mapping[int, TensorSpec]) -> str:
    one, other = _groups(by_rank)[:2]
    more = f" (and {len(names) - 1} more tensors, such as {_some(names[1:])})" if names[1:] else ""
    return (
        f"{quoted(names[0])} is {_says(one)} and {_says(other)}{more}: "
        "every rank must describe the same tensor"
    )


def _says(group: Mapping[int, TensorSpec]) -> str:
    rank, spec = next(iter(group.items()))
    layout = spec.layout
    if _is_plain(spec, rank):
        how = "whole"
    elif isinstance(layout, BoxLayout):
        how = quoted(repr(layout))
    else:
        how = f"{quoted(layout)} over {quoted(layout.mesh)}"
    ranks = f"rank{'s' if group.keys() - {rank} else ''} {format_ranks(tuple(group))}"
    return f"{spec.dtype} {spec.shape} {how} on {ranks}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(quoted(name) for name in names[:MOST_NAMED])
