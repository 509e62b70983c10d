"""State dicts saved by any number of ranks, one file each, loaded on any number of ranks.

    torch.save(model.state_dict(), f"model.{rank}.pt")       # on 4 ranks
    model.load_state_dict(load_files(paths))                 # on 2, on 3, on 8

Rank r of M reads the files r, r + M, ...; no rank reads all of them. The shards of a loaded tensor
are on the ranks that read them, until it is copied into a tensor with another layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.sharded.content import ContentTensor, wrap
from reshard.sharded.files.pickles import boxes_of, from_other_ranks, restore_flags
from reshard.sharded.groups import Group, current_process_group, members
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.specs.coverage import check_disjoint, check_tensor
from reshard.sharded.specs.lowering import content_of_shards
from reshard.tensors.agreement import Agreement
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = ["load_files"]

Path = str | PathLike[str]
Key = tuple[object, ...]
"""The keys and indices of a value in nested dicts and lists."""
Row = dict[str, Any]
"""What a file says about a sharded tensor: its kind, boxes and device."""


@dataclass(frozen=True)
class File:
    """The file that one rank saved."""

    path: Path
    state: Mapping[str, Any]
    entries: dict[Key, Any]
    """All values in it that are no dicts and no lists."""

    @property
    def sharded(self) -> dict[str, ContentTensor]:
        """Its sharded tensors, by name."""
        pairs = self.entries.items()
        return {_name(key): one for key, one in pairs if isinstance(one, ContentTensor)}


def load_files(
    paths: Sequence[Path],
    process_group: Group = None,
    weights_only: bool = True,
    map_location: Any = None,
) -> dict[str, Any]:
    """The nested dict that ranks have saved, one file for each, in the order of ranks.

    Every ShardedTensor becomes one of the group: its shards are on the ranks that have read them.
    Plain entries are those of the first file, which every rank reads for them; the other files
    must have the same. All ranks of the group call this, and all raise if a file is wrong.
    """
    if not paths:
        raise ArgumentError("no files to load: give one path for each rank that has saved")
    group = current_process_group() if process_group is None else process_group
    ranks = members(group)
    mine = range(ranks.index(this_rank()), len(paths), len(ranks))
    files: dict[int, File] = {}

    def read() -> dict[int, dict[str, Row]]:
        for index in sorted({0, *mine}):
            files[index] = _read(paths[index], weights_only, map_location)
            _check_plain(files[0], files[index])
        return {index: _rows(files[index]) for index in mine}

    rows_by_rank = Agreement(group, "loading files", error=ArgumentError).run(read)
    by_file = {
        int(index): (rank, rows)
        for rank, own in rows_by_rank.items()
        for index, rows in own.items()
    }
    rows = [by_file[index] for index in sorted(by_file)]
    joined: dict[int, ContentTensor] = {}
    for name, tensor in files[0].sharded.items():
        # A tied tensor has several names and stays one.
        if id(tensor) not in joined:
            own = [files[index].sharded[name] for index in mine]
            joined[id(tensor)] = _join(name, rows, own, paths, group)
    state: dict[str, Any] = _with_joined(files[0].state, joined)
    return state


def _read(path: Path, weights_only: bool, map_location: Any) -> File:
    token = from_other_ranks.set(True)
    try:
        state = torch.load(path, map_location=map_location, weights_only=weights_only)
    except Exception as error:
        raise _wrong(path, f"cannot be read: {_first_line(error)}") from error
    finally:
        from_other_ranks.reset(token)
    if not isinstance(state, Mapping):
        raise _wrong(path, f"holds a {type(state).__name__}, not a state dict")
    return File(path, state, dict(_entries(state, ())))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _wrong(path: Path, why: str) -> ArgumentError:
    return ArgumentError(f"the file {quoted(fspath(path))} {why}")


def _entries(value: Any, key: Key) -> list[tuple[Key, Any]]:
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list | tuple):
        inside = list(enumerate(value))
    else:
        return [(key, value)]
    return [entry for name, one in inside for entry in _entries(one, (*key, name))]


def _name(key: Key) -> str:
    return ".".join(map(str, key))


def _check_plain(first: File, other: File) -> None:
    """Refuse a file with other names, or other plain entries, than the first one."""
    differing = first.entries.keys() ^ other.entries.keys()
    if differing:
        names = sorted(map(_name, differing))[:4]
        raise _wrong(other.path, f"differs from {quoted(fspath(first.path))} in {names}")
    for key, one in first.entries.items():
        two = other.entries[key]
        kinds = isinstance(one, ContentTensor), isinstance(two, ContentTensor)
        if kinds[0] != kinds[1] or not _are_equal(one, two):
            raise _wrong(
                other.path,
                f"has another {quoted(_name(key))} than {quoted(fspath(first.path))}: entries "
                "that are not sharded must be the same in all files",
            )


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, ContentTensor):
        return True
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        same = one.shape == two.shape and one.dtype == two.dtype
        return same and bool(torch.equal(one.nan_to_num(), two.nan_to_num()))
    return type(one) is type(two) and (one == two or one != one)


def _rows(file: File) -> dict[str, Row]:
    """What a file says about its sharded tensors, as JSON."""
    rows = {}
    for name, tensor in file.sharded.items():
        content = tensor._content
        boxes = boxes_of(content, tensor._saved_rank)
        rows[name] = {
            "kind": [list(content.shape), str(content.dtype), tensor.requires_grad],
            "boxes": [[list(box.start), list(box.shape)] for box, _ in boxes],
            "device": str(content.device),
        }
    return rows


def _join(
    name: str,
    rows: list[tuple[int, dict[str, Row]]],
    own: list[ContentTensor],
    paths: Sequence[Path],
    group: Group,
) -> ContentTensor:
    """One tensor of the shards that all files have of it."""
    kinds = [row[name]["kind"] for _, row in rows]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise _wrong(path, f"has {quoted(name)} as {kind}, the first as {kinds[0]}")
    size, dtype, requires_grad = kinds[0]
    shards = _metadata(name, rows)
    try:
        check_disjoint(shards)
        check_tensor(shards, size)
    except ArgumentError as error:
        raise _wrong(paths[0], f"and the others do not make up {quoted(name)}: {error}") from None
    pieces = [piece for one in own for piece in boxes_of(one._content, one._saved_rank)]
    by_box = {(box.start, box.shape): part for box, part in reversed(pieces)}
    wanted = [(one.shard_offsets, one.shard_sizes) for one in shards if one.rank == this_rank()]
    parts = [by_box[one] for one in wanted]
    dtype = getattr(torch, dtype.removeprefix("torch."))
    content = content_of_shards(shards, size, dtype, parts, group)
    is_parameter = any(isinstance(one, torch.nn.Parameter) for one in own)
    return restore_flags(wrap(content), requires_grad, is_parameter)


def _metadata(name: str, rows: list[tuple[int, dict[str, Row]]]) -> tuple[ShardMetadata, ...]:
    """All shards, on the ranks that have read them; a box in several files comes from the first."""
    shards: dict[object, ShardMetadata] = {}
    for rank, row in rows:
        for offsets, sizes in row[name]["boxes"]:
            shard = ShardMetadata(offsets, sizes, f"rank:{rank}/{row[name]['device']}")
            key = (shard.shard_offsets, shard.shard_sizes)
            shards.setdefault((key, rank, len(shards)) if shard.is_empty else key, shard)
    return tuple(shards.values())


def _with_joined(value: Any, joined: dict[int, ContentTensor]) -> Any:
    """The saved state, with the joined tensors in place of one rank's."""
    if isinstance(value, ContentTensor):
        return joined[id(value)]
    if isinstance(value, Mapping):
        copy: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
        copy.update({name: _with_joined(one, joined) for name, one in value.items()})
        if hasattr(value, "_metadata"):
            copy._metadata = value._metadata  # the versions of modules in a state dict
        return copy
    if isinstance(value, list | tuple):
        return type(value)(_with_joined(one, joined) for one in value)
    return value
