"""The files that each target format consists of, planned from shapes and layouts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.checkpoint.catalog import StoredObject
from reshard.checkpoint.formats.output import Literal, ObjectCopy, Output, OutputTensor, Wanted
from reshard.checkpoint.formats.safetensors.writer import full, ranks, sharded
from reshard.checkpoint.formats.torch.distcp_writer import distcp
from reshard.errors import CheckpointError
from reshard.text import quoted

__all__ = [
    "FORMATS",
    "Literal",
    "ObjectCopy",
    "Output",
    "OutputTensor",
    "Wanted",
    "plan_output",
    "unknown_format",
]

FORMATS = ("full", "sharded", "distcp", "ranks")


def unknown_format(format: str) -> str:
    """What to say about a format that nobody knows."""
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
    """The files of a checkpoint in one of the formats; entries it cannot hold are listed.

    ``metadata`` are texts, which have a place in safetensors, and ``values`` plain values, which
    have one in .distcp; what is in both is one thing.
    """
    values = values or {}
    match format:
        case "distcp":
            kept = {key: text for key, text in metadata.items() if key not in values}
            output = distcp(tensors, objects, nesting, values, _about(tensors, extras or {}))
            return replace(output, left_out=(*_said(kept), *_dropped(tensors, extras or {})))
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


def _about(tensors: Mapping[str, Wanted], extras: Mapping[str, Any]) -> dict[str, Any]:
    """What other programs keep of each tensor, of those tensors that are there."""
    return {
        key: {name: one for name, one in extra.items() if name in tensors}
        for key, extra in extras.items()
    }


def _dropped(tensors: Mapping[str, Wanted], extras: Mapping[str, Any]) -> tuple[str, ...]:
    """What other programs keep of tensors that are not in the output under their name."""
    return tuple(
        f"{key} of {name}"
        for key, extra in extras.items()
        for name, one in extra.items()
        if one and name not in tensors
    )


def _said(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """What the files of the source say beside the tensors and entries.

    That they are torch's is said again by whatever is made of a .distcp.
    """
    return tuple(key for key, text in metadata.items() if (key, text) != ("format", "pt"))
