"""Do the tensors of a job and those of a checkpoint fit each other?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.checkpoint.casting import check_cast
from reshard.checkpoint.live.outline import Outline
from reshard.errors import CheckpointError, NamesError, quoted
from reshard.spec import TensorSpec

__all__ = ["chosen_of"]

MOST_NAMED = 5


def chosen_of(
    want: Mapping[str, TensorSpec], outline: Outline, strict: bool, cast: bool
) -> dict[str, TensorSpec]:
    """What is loaded, by name; names, shapes and dtypes that do not fit are errors."""
    stored = outline.catalog.tensors
    missing = [name for name in want if name not in stored]
    if strict and (missing or outline.unwanted):
        raise NamesError(
            f"{outline.catalog.root} and the state dict have other names: "
            f"{_listed('the checkpoint lacks', missing)}"
            f"{'; ' if missing and outline.unwanted else ''}"
            f"{_listed('the state dict lacks', outline.unwanted)}: "
            "strict=False loads what both have"
        )
    chosen = {name: spec for name, spec in want.items() if name in stored}
    for name, spec in chosen.items():
        _check_one(name, spec, outline, cast)
    return chosen


def _check_one(name: str, spec: TensorSpec, outline: Outline, cast: bool) -> None:
    have, root = outline.catalog.tensors[name], outline.catalog.root
    if have.shape != spec.shape:
        raise CheckpointError(
            f"tensor {quoted(name)} has shape {have.shape} in {root} and {spec.shape} in the state "
            "dict: is it of another model, or a shard? A plain tensor counts as the whole tensor; "
            "give shards as DTensors or ShardedTensors"
        )
    if have.dtype != spec.dtype and not cast:
        raise CheckpointError(
            f"tensor {quoted(name)} is {have.dtype} in {root} and {spec.dtype} in the state dict: "
            "cast=True rounds while loading"
        )
    check_cast(have.dtype, spec.dtype, f"tensor {quoted(name)} of {root}")


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    some = ", ".join(quoted(name) for name in names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{what} {some}{more}"
