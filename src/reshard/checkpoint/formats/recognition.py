"""What kind of checkpoint is this: from the names of its files, else from their first bytes.

>>> by_content(b"PK\\3\\4" + bytes(22) + b"\\x10\\0\\0\\0archive/data.pkl", 1000)
'torch'
>>> by_content(b"\\x40\\0\\0\\0\\0\\0\\0\\0{", 1000)
'safetensors'
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.checkpoint.storage.base import TENSOR_FILES, Storage, StoredFile
from reshard.errors import CheckpointError
from reshard.text import quoted

__all__ = ["RANK_METADATA", "Recognised", "by_content", "is_distcp", "recognise"]

RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata\Z")
"""What ``dcp.save(use_collectives=False)`` calls the metadata of each rank."""
HEAD = 64
MOST_OPENED = 256
"""Files of a folder whose first bytes are looked at, where no name tells."""
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How torch.save began its files before torch 1.6."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """A kind of checkpoint, and the files that may hold its tensors."""

    kind: str
    """``distcp``, ``safetensors`` or ``torch``."""
    files: tuple[StoredFile, ...]


def recognise(storage: Storage, listed: Sequence[StoredFile]) -> Recognised:
    """The kind of a folder or a file; CheckpointError if it is no checkpoint."""
    here = [file.path for file in listed if "/" not in file.path]
    if any(map(is_distcp, here)):
        return Recognised("distcp", ())
    if storage.is_file:
        found = _by_contents(storage, listed)
        if found is not None:
            return found
    named = tuple(file for file in listed if file.path.endswith(TENSOR_FILES))
    safe = tuple(file for file in named if file.path.endswith(".safetensors"))
    if safe or any(file.path.endswith(".safetensors.index.json") for file in listed):
        return Recognised("safetensors", safe)
    if named:
        return Recognised("torch", named)
    found = _by_contents(storage, [file for file in listed if "/" not in file.path])
    if found is None:
        raise _no_checkpoint(storage.root, [file.path for file in listed])
    return found


def is_distcp(path: str) -> bool:
    """Whether a file directly in a folder makes it one of torch's distributed checkpoints."""
    named = path == ".metadata" or path.endswith(".distcp")
    return named or RANK_METADATA.match(path) is not None


def _by_contents(storage: Storage, files: Sequence[StoredFile]) -> Recognised | None:
    """What the first bytes of files say; safetensors first, as with names."""
    some = files[:MOST_OPENED]
    heads = storage.read_many([(file.path, 0, min(HEAD, file.size)) for file in some])
    kinds: dict[str, list[StoredFile]] = {}
    for file, head in zip(some, heads, strict=True):
        kind = by_content(head, file.size)
        if kind is not None:
            kinds.setdefault(kind, []).append(file)
    for kind in ("safetensors", "torch"):
        if kind in kinds:
            return Recognised(kind, tuple(kinds[kind]))
    return None


def by_content(head: bytes, size: int) -> str | None:
    """What the first bytes of a file say of the rest; None if they say nothing."""
    if head.startswith(b"PK\x03\x04"):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return "torch" if name.endswith(b"/data.pkl") else None
    if head.startswith(LEGACY):
        return "torch"
    length = int.from_bytes(head[:8], "little")
    return "safetensors" if head[8:9] == b"{" and 2 <= length <= size - 8 else None


def _no_checkpoint(root: str, paths: Sequence[str]) -> CheckpointError:
    inside = next((path for path in paths if path.endswith("/.metadata")), None)
    if inside is not None:
        folder = inside.removesuffix("/.metadata")
        return CheckpointError(
            f"{root} is no checkpoint, but {root}/{folder} may be: name that one"
        )
    shown = ", ".join(quoted(path) for path in paths[:3]) or "nothing"
    more = f" and {len(paths) - 3} more files" if len(paths) > 3 else ""
    return CheckpointError(
        f"{root} is no checkpoint: it holds {shown}{more}, and no .safetensors, .metadata with "
        ".distcp, .pt, .pth, .bin or .ckpt"
    )
