"""``torch.save`` files: a nested state dict, flattened to dotted names.

Tensors are found through the archive's pickle, which is read by our own machine. Plain values
(an iteration, a version) are kept as texts; what is neither is named in a note and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from reshard.checkpoint.catalog import Crc, StoredFile
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.pickle_machine import Record, unpickle
from reshard.checkpoint.formats.torch_tensors import (
    LocalTensor,
    allow_tensors,
    is_tensor,
    tensor_of,
)
from reshard.checkpoint.formats.torch_zip import read_archives
from reshard.checkpoint.storage import Storage
from reshard.errors import DamageError, quoted

__all__ = ["Content", "read_torch_file"]

MAX_ENTRIES = 1 << 20
MAX_NESTING = 32
MAX_SHARED = 1 << 12
"""Places at which one and the same dict or list may be; of dicts within dicts there is no end."""
MAX_VALUE = 1 << 10
"""Characters of a plain value that is kept."""

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Content:
    """What a file of one rank holds."""

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """Plain values as JSON."""
    nesting: dict[str, Path] = field(default_factory=dict)
    crcs: list[Crc] = field(default_factory=list)


def read_torch_file(
    storage: Storage, file: StoredFile, findings: Findings, number: int = 0
) -> Content:
    """The tensors and plain values of one ``torch.save`` file, which has this number."""
    [archive] = read_archives(storage, [(file.path, 0, file.size)])
    value = unpickle(archive.pickle, allow_tensors, archive.where)
    content, left_out = Content(crcs=archive.crcs(number)), []
    for path, leaf in _leaves(value, archive.where):
        name = ".".join(map(str, path)) or "tensor"
        if is_tensor(leaf):
            _add(content, name, path, tensor_of(leaf, archive, _at(archive.where, name)), archive)
        elif _is_plain(leaf):
            content.values[name] = json.dumps(leaf)
        else:
            left_out.append(name)
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        findings.note(f"{archive.where}: {quoted(left_out[0])}{more} is no tensor and is left out")
    used = {tensor.storage for tensor in content.tensors.values()}
    lost = [member.size for key, member in archive.storages.items() if key not in used]
    if sum(lost):
        findings.note(
            f"{archive.where}: {sum(lost)} bytes of tensors are parts of objects that are left out"
        )
    return content


def _add(content: Content, name: str, path: Path, tensor: LocalTensor, archive: Any) -> None:
    if name in content.tensors:
        raise DamageError(f"{archive.where}: two tensors are called {quoted(name)}")
    content.tensors[name] = tensor
    content.nesting[name] = path


def _at(where: str, name: str) -> str:
    return f"{where}: tensor {quoted(name)}"


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, str):
        return len(value) <= MAX_VALUE
    return value is None or isinstance(value, bool | int)


def _leaves(value: Any, where: str) -> Iterator[tuple[Path, Any]]:
    """All entries of nested dicts and lists that are neither; a file may nest without end."""
    pending: list[tuple[Path, Any]] = [((), value)]
    seen: Counter[int] = Counter()
    count = 0
    while pending:
        path, found = pending.pop()
        children = _children(found)
        if children is None:
            yield path, found
            continue
        seen[id(found)] += bool(children)
        count += len(children)
        if len(path) > MAX_NESTING or count > MAX_ENTRIES or seen[id(found)] > MAX_SHARED:
            raise DamageError(f"{where} nests more than {MAX_NESTING} deep or {MAX_ENTRIES} wide")
        pending += [((*path, key), child) for key, child in reversed(children)]


def _children(value: Any) -> Sequence[tuple[str | int, Any]] | None:
    """The entries of a dict or a list; None for what is kept, or left out, as one."""
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, str | int) else str(key)[:80] for key in value]
        return [*zip(keys, value.values(), strict=True)]
    if isinstance(value, Record) and value.kind == "collections.defaultdict":
        return _children(dict(pair for pair in value.items if _is_pair(pair)))
    if isinstance(value, list | tuple):
        return [*enumerate(value)]
    return None


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str | int)
