"""``torch.save`` files: a nested state dict, flattened to dotted names.

Plain values (an iteration, the betas of an optimizer) are kept under the names that torch's
distributed checkpoints give them; other entries that are no tensors are left out and listed.

Checkpoints of DeepSpeed's ZeRO are refused. ZeRO flattens parameters and optimizer states, joins
them to groups and shards the groups over ranks, so its parts have no shapes. From stage 3 on the
model has empty placeholders, which would be read as complete tensors of shape (0,).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from reshard.checkpoint.catalog import Catalog
from reshard.checkpoint.formats.checks import (
    Content,
    Findings,
    Reading,
    rank_of,
    shown,
    whole_tensors,
)
from reshard.checkpoint.formats.torch.archive import Archive, read_archives
from reshard.checkpoint.formats.torch.tensors import (
    Visits,
    as_json,
    is_plain,
    is_tensor,
    tensor_of,
    within,
)
from reshard.checkpoint.formats.torch.unpickler import Record, unpickle
from reshard.checkpoint.storage.local import Storage, StoredFile
from reshard.dtypes import itemsize
from reshard.errors import CheckpointError, UnsupportedError
from reshard.text import and_more, format_bytes, quoted

_FLAT = re.compile(r"(?:^|/)(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+\w*\.pt\Z")
_UNIVERSAL = re.compile(r"(?:^|/)zero/[^/]+/(?:fp32|exp_avg|exp_avg_sq)\.pt\Z")
_ADVICE = (
    "is not supported: make whole weights with the zero_to_fp32.py that DeepSpeed writes beside "
    "the checkpoint, and convert those"
)


def check_no_zero_files(root: str, listed: Iterable[StoredFile]) -> None:
    """Refuse a folder that has files with the names of ZeRO's."""
    for file in listed:
        kind, more = "part of a universal checkpoint of DeepSpeed", ""
        if _FLAT.search(file.path):
            kind = "one rank's part of a checkpoint of DeepSpeed's ZeRO"
            more = "; of ZeRO-1 and ZeRO-2 an mp_rank_00_model_states.pt can be named alone"
        elif not _UNIVERSAL.search(file.path):
            continue
        raise UnsupportedError(f"{root}: {quoted(file.path)} is {kind}, which {_ADVICE}{more}")


def _check_no_states(value: Any, where: str) -> None:
    """Refuse a file of flattened parts of optimizer states."""
    states = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if isinstance(states, dict) and "zero_stage" in states:
        stage = states["zero_stage"]
        name = f"ZeRO-{stage}" if isinstance(stage, int) and 0 <= stage <= 3 else "ZeRO"
        raise UnsupportedError(
            f"{where} holds flat parts of optimizer states of DeepSpeed's {name}, which {_ADVICE}"
        )


def _check_placeholders(content: Content) -> None:
    """Refuse a model of ZeRO-3: a parameter is stored without elements, although it has some."""
    paths = content.nesting
    if not any(path[:1] in (("ds_version",), ("ds_config",)) for path in paths.values()):
        return
    # The global shapes are in one dict, or in one for each group.
    names = [name for name, path in paths.items() if path[:1] == ("param_shapes",)]
    shapes = {paths[name][-1]: content.values.get(name) for name in names}
    for name, tensor in content.tensors.items():
        first, key = paths[name][0], paths[name][-1]
        shape = shapes.get(key)
        has_none = isinstance(shape, tuple) and 0 in shape
        if first == "module" and 0 in tensor.shape and not has_none:
            raise UnsupportedError(
                f"{content.where}: tensor {quoted(key)} is an empty placeholder of DeepSpeed's "
                f"ZeRO-3, whose parameters are flat parts in other files, which {_ADVICE}"
            )


MAX_ENTRIES = 1 << 20
MAX_NESTING = 32
MAX_SHARED = 1 << 12
"""Places at which one dict or list object may occur; nested sharing grows without end."""
MAX_NAME = 1 << 12
ENTRIES = 4
"""Visits of entries per byte of the pickle; without sharing a byte has at most one entry, which is
visited up to four times."""
FREE_TEXT, TEXT = 1 << 24, 64
"""Characters of all names and values: a fixed number, and more for each byte of the pickle."""
FREE_BYTES, VIEWS = 1 << 26, 64
"""Bytes of all tensors: a fixed number, and more for each byte of their storages."""

Path = tuple[str | int, ...]


def read_torch(reading: Reading, named: Sequence[StoredFile]) -> Catalog:
    """The catalog of files that hold whole tensors: ``pytorch_model.bin``, ``model.pt``.

    Files in subfolders count only if those directly in the folder hold no tensors.
    """
    storage, findings = reading.storage, reading.findings
    files = tuple(file for file in named if file.path.startswith("pytorch_model")) or tuple(named)
    check_no_zero_files(storage.root, files)
    here = [file for file in files if "/" not in file.path]
    below = [file for file in files if "/" in file.path]
    contents: dict[StoredFile, Content] = {}
    for some in (here, below):
        if not some or findings.any or any(one.tensors for one in contents.values()):
            continue
        known = [*contents, *some]
        ranks = {rank_of(file.path, None) for file in known} - {None}
        if len(ranks) > 1:
            raise CheckpointError(
                f"{storage.root} holds files of {len(ranks)} ranks ({known[0].path} is one) that "
                "do not record their layout: give --rules and --mesh"
            )
        reading.check_parts(known)
        for number, file in enumerate(some, len(contents)):
            contents[file] = Content(storage.where(file.path))  # stays if it cannot be read
            with findings:
                contents[file] = read_torch_file(storage, file, findings, number)
    advice = f"name one of the files of {storage.root}"
    tensors = whole_tensors(contents.values(), findings, advice)
    return reading.catalog("torch", contents, tensors)


def read_torch_file(
    storage: Storage, file: StoredFile, findings: Findings, number: int = 0
) -> Content:
    """The tensors and plain values of one ``torch.save`` file, which has this number."""
    [archive] = read_archives(storage, [(file.path, 0, file.size)])
    value = unpickle(archive.pickle, archive.where)
    _check_no_states(value, archive.where)
    content = Content(archive.where, crcs=archive.crcs(number))
    visits = Visits(min(MAX_ENTRIES, MAX_SHARED + ENTRIES * len(archive.pickle)))
    most_text, num_text = FREE_TEXT + TEXT * len(archive.pickle), 0
    for path, leaf in _leaves(value, visits, archive.where):
        name = _name(path, archive.where)
        if name in content.nesting:
            raise UnsupportedError(
                f"{archive.where}: two entries are called {quoted(name)}, one of them nested: "
                "rename one of them and save again"
            )
        content.nesting[name] = path
        if is_tensor(leaf):
            with findings:
                where = f"{archive.where}: tensor {quoted(name)}"
                content.tensors[name] = within(archive, tensor_of(leaf, where), where)
        elif is_plain(leaf, visits):
            content.values[name] = leaf
            if (text := as_json(leaf)) is not None:
                content.metadata[name] = text
        else:
            content.left_out.append(name)
        if visits.left < 0:
            raise _endless(archive.where)
        num_text += len(name) + len(content.metadata.get(name, ""))
        if num_text > most_text:
            raise UnsupportedError(
                f"{archive.where}: its names and values have more than {most_text} characters, and "
                f"its pickle has {len(archive.pickle)} bytes: it repeats a few without end"
            )
    _check_placeholders(content)
    _check_content(content, archive, findings)
    return content


def _name(path: Path, where: str) -> str:
    length = sum(len(key) if isinstance(key, str) else 1 for key in path)
    if length > MAX_NAME:
        raise UnsupportedError(
            f"{where}: a name of {length} characters, at most {MAX_NAME} are read"
        )
    return ".".join(map(str, path)) if path else "tensor"


def _check_content(content: Content, archive: Archive, findings: Findings) -> None:
    """Refuse thousands of tensors that share one storage: each is read. Note what is left out."""
    tensors, storages = content.tensors.values(), archive.storages
    total = sum(prod(one.shape) * itemsize(one.dtype) for one in tensors)
    stored = sum(member.size for member in storages.values())
    if total > FREE_BYTES + VIEWS * stored:
        raise UnsupportedError(
            f"{archive.where}: its {len(tensors)} tensors have {format_bytes(total)} and their "
            f"storages {format_bytes(stored)}: save each tensor once"
        )
    if content.left_out:
        names = and_more([quoted(name) for name in content.left_out])
        findings.note(f"{archive.where}: {names} is no tensor and no plain value, and is left out")
    used = {tensor.storage for tensor in tensors}
    lost = sum(member.size for key, member in storages.items() if key not in used)
    if lost and not findings.any:
        findings.note(
            f"{archive.where}: {lost} bytes of tensors are parts of objects that are left out"
        )


def _leaves(value: Any, visits: Visits, where: str) -> Iterator[tuple[Path, Any]]:
    """All tensors and other entries, each with the keys that lead to it.

    Keys of dicts are strings and those of lists integers, as in torch's distributed checkpoints.
    """
    pending: list[tuple[Path, Any]] = [((), value)]
    seen: Counter[int] = Counter()
    while pending:
        path, leaf = pending.pop()
        is_default = isinstance(leaf, Record) and leaf.kind == "collections.defaultdict"
        entries = leaf.items if is_default else leaf
        is_leaf = not isinstance(entries, dict | list | tuple)
        if is_leaf or (path and _is_one_entry(leaf, visits)):
            yield path, leaf
            continue
        seen[id(leaf)] += bool(entries)
        visits.left -= len(entries)
        if len(path) > MAX_NESTING or visits.left < 0 or seen[id(leaf)] > MAX_SHARED:
            raise _endless(where)
        if isinstance(leaf, list | tuple):
            children = [((*path, at), child) for at, child in enumerate(leaf)]
        else:
            pairs = entries.items() if isinstance(entries, dict) else entries
            pairs = [pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
            children = [((*path, _key(key)), child) for key, child in pairs]
        pending += reversed(children)


def _endless(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where} nests more than {MAX_NESTING} deep or repeats a few dicts and lists without end"
    )


def _is_one_entry(value: Any, visits: Visits) -> bool:
    """Whether a list is one entry, as in torch: it has no tensors and no dicts.

    A tuple may have dicts, if these have no tensors.
    """
    if not isinstance(value, list | tuple):
        return False
    pending: list[Any] = [value]
    while pending and visits.left > 0:
        inside = pending.pop()
        visits.left -= len(inside)
        for one in inside.values() if isinstance(inside, dict) else inside:
            if is_tensor(one) or (isinstance(value, list) and isinstance(one, dict | Record)):
                return False
            if isinstance(one, list | tuple | dict):
                pending.append(one)
    return True


def _key(key: Any) -> str:
    if isinstance(key, bytes):
        return str(key[:80])[:80]
    return str(key) if isinstance(key, str | int) else shown(key)[:80]
