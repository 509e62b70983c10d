"""The files that each target format consists of, planned from shapes and layouts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.checkpoint.catalog import StoredObject
from reshard.checkpoint.outputs.distcp import distcp
from reshard.checkpoint.outputs.output import Literal, ObjectCopy, Output, OutputTensor, Wanted
from reshard.checkpoint.outputs.safetensors import full, ranks, sharded
from reshard.errors import CheckpointError, quoted

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
    mesh: str | None = None,
    max_shard_size: int = 5 * 10**9,
    base: str = "model",
) -> Output:
    """The files of a checkpoint in one of the formats; entries it cannot hold are listed."""
    match format:
        case "distcp":
            return replace(distcp(tensors, objects, nesting), left_out=_said(metadata))
        case "full":
            output = full(tensors, metadata, max_shard_size, base)
        case "sharded":
            output = sharded(tensors, metadata, mesh)
        case "ranks":
            output = ranks(tensors, metadata)
        case _:
            raise CheckpointError(unknown_format(format))
    return replace(output, left_out=tuple(entry.name for entry in objects))


def _said(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """What the files of the source say beside the tensors and entries.

    That they are torch's is said again by whatever is made of a .distcp.
    """
    return tuple(key for key, text in metadata.items() if (key, text) != ("format", "pt"))
