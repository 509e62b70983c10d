"""Plans the files of an output in any format, from shapes and layouts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.checkpoint.catalog import StoredObject
from reshard.checkpoint.formats.output import Output, Wanted
from reshard.checkpoint.formats.safetensors.writer import full, ranks, sharded
from reshard.checkpoint.formats.torch.distcp_writer import distcp
from reshard.errors import CheckpointError
from reshard.text import quoted

__all__ = ["FORMATS", "plan_output", "unknown_format"]

FORMATS = ("full", "sharded", "distcp", "ranks")


def unknown_format(format: str) -> str:
    """The error message for an unknown format."""
    return f"{quoted(format)} is no format: use {', '.join(FORMATS)}"


def plan_output(
    format: str,
    tensors: Mapping[str, Wanted],
    *,
    metadata: Mapping[str, str],
    objects: Sequence[StoredObject] = (),
    nesting: Mapping[str, tuple[str | int, ...]] | None = None,
    values: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    mesh: str | None = None,
    max_shard_size: int = 5 * 10**9,
    base: str = "model",
) -> Output:
    """The files of a checkpoint in one format; entries that it cannot hold are listed.

    ``metadata`` are strings for safetensors, ``values`` plain values for .distcp; a name in both is
    one entry.
    """
    values = values or {}
    match format:
        case "distcp":
            kept = {key: text for key, text in metadata.items() if key not in values}
            output = distcp(tensors, objects, nesting, values, _kept_extras(tensors, extras or {}))
            return replace(output, left_out=(*_lost(kept), *_dropped_extras(tensors, extras or {})))
        case "full":
            output = full(tensors, metadata, max_shard_size, base)
        case "sharded":
            output = sharded(tensors, metadata, mesh)
        case "ranks":
            output = ranks(tensors, metadata)
        case _:
            raise CheckpointError(unknown_format(format))
    names = (*(entry.name for entry in objects), *(n for n in values if n not in metadata))
    return replace(output, left_out=(*names, *(extras or ())))


def _kept_extras(tensors: Mapping[str, Wanted], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Extra metadata of other programs, restricted to tensors of the output."""
    return {
        key: {name: one for name, one in extra.items() if name in tensors}
        for key, extra in extras.items()
    }


def _dropped_extras(tensors: Mapping[str, Wanted], extras: Mapping[str, Any]) -> tuple[str, ...]:
    """Extra metadata of tensors that the output does not have under their name."""
    return tuple(
        f"{key} of {name}"
        for key, extra in extras.items()
        for name, one in extra.items()
        if one and name not in tensors
    )


def _lost(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Metadata keys that are lost; ``format: pt`` is written again from any .distcp."""
    return tuple(key for key, text in metadata.items() if (key, text) != ("format", "pt"))
