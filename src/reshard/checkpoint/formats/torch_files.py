"""``torch.save`` files: a nested state dict, flattened to dotted names.

Tensors are found through the archive's pickle, which is read by our own machine. Plain values
(an iteration, a version) are kept as texts; what is neither is named in a note and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from reshard.bytesize import format_bytes
from reshard.checkpoint.catalog import Crc, StoredFile
from reshard.checkpoint.formats.checks import shown
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.pickle_machine import Record, unpickle
from reshard.checkpoint.formats.torch_tensors import (
    LocalTensor,
    allow_tensors,
    is_tensor,
    tensor_of,
)
from reshard.checkpoint.formats.torch_zip import Archive, read_archives
from reshard.checkpoint.storage import Storage
from reshard.dtypes import itemsize
from reshard.errors import DamageError, quoted

__all__ = ["Content", "read_torch_file"]

MAX_ENTRIES = 1 << 20
MAX_NESTING = 32
MAX_SHARED = 1 << 12
"""Places at which one and the same dict or list may be; of dicts within dicts there is no end."""
MAX_VALUE = 1 << 10
"""Characters of a plain value that is kept."""
MAX_NAME = 1 << 12
"""Characters of a name: keys and their dots."""
ENTRIES = 2
"""Entries of nested dicts and lists for each byte of a pickle; without sharing there is one."""
FREE_TEXT, TEXT = 1 << 24, 64
"""Characters of all names and values together: so many, and for each byte of a pickle so many."""
FREE_BYTES, VIEWS = 1 << 26, 64
"""Bytes of all tensors together: so many, and for each byte of their storages so many."""

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
    most_text, num_text = FREE_TEXT + TEXT * len(archive.pickle), 0
    for path, leaf in _leaves(value, len(archive.pickle), archive.where):
        name = _name(path, archive.where)
        if is_tensor(leaf):
            _add(content, name, path, tensor_of(leaf, archive, _at(archive.where, name)), archive)
        elif _is_plain(leaf):
            content.values[name] = json.dumps(leaf)
        else:
            left_out.append(name)
        num_text += len(name) + len(content.values.get(name, ""))
        if num_text > most_text:
            raise DamageError(
                f"{archive.where}: its names and values have more than {most_text} characters, and "
                f"its pickle has {len(archive.pickle)} bytes: it repeats a few without end"
            )
    _check_views(content, archive)
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


def _name(path: Path, where: str) -> str:
    """The keys that lead to an entry, with dots between them."""
    length = sum(len(key) if isinstance(key, str) else 1 for key in path)
    if length > MAX_NAME:
        raise DamageError(f"{where}: a name of {length} characters, at most {MAX_NAME} are read")
    return ".".join(map(str, path)) or "tensor"


def _check_views(content: Content, archive: Archive) -> None:
    """Refuse thousands of tensors that are all one storage: each of them would be read."""
    total = sum(prod(one.shape) * itemsize(one.dtype) for one in content.tensors.values())
    stored = sum(member.size for member in archive.storages.values())
    if total > FREE_BYTES + VIEWS * stored:
        raise DamageError(
            f"{archive.where}: its {len(content.tensors)} tensors have {format_bytes(total)} and "
            f"their storages {format_bytes(stored)}: save each tensor once"
        )


def _add(content: Content, name: str, path: Path, tensor: LocalTensor, archive: Archive) -> None:
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


def _leaves(value: Any, num_bytes: int, where: str) -> Iterator[tuple[Path, Any]]:
    """All entries of nested dicts and lists that are neither; a file may nest without end."""
    pending: list[tuple[Path, Any]] = [((), value)]
    seen: Counter[int] = Counter()
    count, most = 0, min(MAX_ENTRIES, MAX_SHARED + ENTRIES * num_bytes)
    while pending:
        path, found = pending.pop()
        entries = _entries(found)
        if entries is None:
            yield path, found
            continue
        seen[id(found)] += bool(entries)
        count += len(entries)
        if len(path) > MAX_NESTING or count > most or seen[id(found)] > MAX_SHARED:
            raise DamageError(f"{where} nests more than {MAX_NESTING} deep or {most} wide")
        pending += [((*path, key), child) for key, child in reversed([*_children(found)])]


def _entries(value: Any) -> Sized | None:
    """What a dict or a list holds, to be counted; None for what is kept, or left out, as one."""
    if isinstance(value, Record) and value.kind == "collections.defaultdict":
        return value.items
    return value if isinstance(value, dict | list | tuple) else None


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    """The entries of a dict or a list, each with its key."""
    if isinstance(value, list | tuple):
        yield from enumerate(value)
        return
    pairs = value.items if isinstance(value, Record) else value.items()
    yield from ((_key(pair[0]), pair[1]) for pair in pairs if _is_pair(pair))


def _key(key: Any) -> str | int:
    if isinstance(key, bytes):
        return str(key[:80])[:80]
    return key if isinstance(key, str | int) else shown(key)[:80]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2
