"""State dicts that some ranks have saved, put together on others: however many there are.

    torch.save(model.state_dict(), f"model.{rank}.pt")       # on 4 ranks
    model.load_state_dict(load_files(paths))                 # on 2, on 3, on 8

Rank r of M reads the files r, r + M, ...; nobody reads all of them. What it reads lies on it then,
and goes to where it should be when it is copied into a tensor that lies there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch

from reshard.sharded.content import Content, Group, layout_of_shards, members
from reshard.sharded.enumerable import check_disjoint, check_tensor
from reshard.sharded.inference import infer_sharding_spec
from reshard.sharded.loading import current_process_group
from reshard.sharded.making import home_of
from reshard.sharded.metadata import ShardMetadata
from reshard.sharded.pickling import foreign, held_by, marked
from reshard.sharded.telling import all_told
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.kinds import this_rank
from reshard.text import quoted

__all__ = ["load_files"]

Path = str | PathLike[str]
Key = tuple[Any, ...]
"""Where in nested dicts and lists something stands."""


@dataclass(frozen=True)
class File:
    """What one rank has saved."""

    path: Path
    state: Any
    entries: dict[Key, Any]
    """Everything in it that is no dict and no list."""

    @property
    def sharded(self) -> dict[str, ShardedTensor]:
        """Its sharded tensors, by a name for where they stand."""
        pairs = self.entries.items()
        return {_name(key): one for key, one in pairs if isinstance(one, ShardedTensor)}


def load_files(
    paths: Sequence[Path],
    process_group: Group = None,
    weights_only: bool = True,
    map_location: Any = None,
) -> dict[str, Any]:
    """The nested dict that ranks have saved, one file for each, in the order of ranks.

    Every ShardedTensor becomes one of the group: its shards lie on the ranks that have read them.
    Plain entries are those of the first file, which every rank reads for them; the other files
    must have the same. All ranks of the group call this, and all hear of a file that is wrong.
    """
    if not paths:
        raise ValueError("no files to load: give one path for each rank that has saved")
    group = current_process_group() if process_group is None else process_group
    ranks = members(group)
    mine = range(ranks.index(this_rank()), len(paths), len(ranks))
    files: dict[int, File] = {}
    held: dict[int, dict[str, Any]] = {}
    problem = None
    try:
        for at in sorted({0, *mine}):
            files[at] = _read(paths[at], weights_only, map_location)
            _check_plain(files[0], files[at])
        held = {at: _held(files[at]) for at in mine}
    except Exception as error:  # whatever it is: the others must hear of it
        problem = error
    rows = _rows_of_all(held, problem, group)
    joined: dict[int, ShardedTensor] = {}
    for name, tensor in files[0].sharded.items():
        # A tied tensor has several names and stays one.
        if id(tensor) not in joined:
            own = [files[at].sharded[name] for at in mine]
            joined[id(tensor)] = _joined(name, rows, own, paths, group)
    found: dict[str, Any] = _rebuilt(files[0].state, joined)
    return found


def _read(path: Path, weights_only: bool, map_location: Any) -> File:
    token = foreign.set(True)
    try:
        state = torch.load(path, map_location=map_location, weights_only=weights_only)
    except Exception as error:
        raise _wrong(path, f"cannot be read: {_line(error)}") from error
    finally:
        foreign.reset(token)
    if not isinstance(state, Mapping):
        raise _wrong(path, f"holds a {type(state).__name__}, not a state dict")
    return File(path, state, dict(_entries(state, ())))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _wrong(path: Path, why: str) -> ValueError:
    return ValueError(f"the file {quoted(fspath(path))} {why}")


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
    """Refuse a file that has other names, or other plain entries, than the first one."""
    odd = first.entries.keys() ^ other.entries.keys()
    if odd:
        names = sorted(map(_name, odd))[:4]
        raise _wrong(other.path, f"differs from {quoted(fspath(first.path))} in {names}")
    for key, one in first.entries.items():
        two = other.entries[key]
        if isinstance(one, ShardedTensor) != isinstance(two, ShardedTensor) or not _alike(one, two):
            raise _wrong(
                other.path,
                f"has another {quoted(_name(key))} than {quoted(fspath(first.path))}: what is not "
                "sharded must be the same in all files",
            )


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, ShardedTensor):
        return True
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        same = one.shape == two.shape and one.dtype == two.dtype
        return same and bool(torch.equal(one.nan_to_num(), two.nan_to_num()))
    return type(one) is type(two) and (one == two or one != one)


def _held(file: File) -> dict[str, Any]:
    """What a file tells of its sharded tensors."""
    return {name: _row(tensor) for name, tensor in file.sharded.items()}


def _rows_of_all(
    held: dict[int, dict[str, Any]], problem: Exception | None, group: Group
) -> list[Any]:
    """What all files hold, in their order; an error if one of them is wrong."""
    said = {"problem": None if problem is None else str(problem), "files": held}
    told = all_told(said, group, home_of(group))
    if problem is not None:
        raise problem
    for one in told:
        if one["problem"] is not None:
            raise ValueError(one["problem"])
    found = {int(at): (rank, rows) for rank, one in _ranked(told, group) for at, rows in one}
    return [found[at] for at in sorted(found)]


def _ranked(told: list[Any], group: Group) -> list[tuple[int, Any]]:
    pairs = zip(members(group), told, strict=True)
    return [(rank, one["files"].items()) for rank, one in pairs]


def _row(tensor: ShardedTensor) -> dict[str, Any]:
    """What a file tells of one of its tensors."""
    content = tensor._content
    kind = [list(content.shape), str(content.dtype), tensor.requires_grad]
    boxes = [[list(box.start), list(box.shape)] for box, _ in held_by(content, _saver(tensor))]
    return {"kind": kind, "boxes": boxes, "device": str(content.device)}


def _saver(tensor: ShardedTensor) -> int:
    return int(tensor._saved_rank)  # type: ignore[attr-defined]


def _joined(
    name: str,
    rows: list[Any],
    own: list[ShardedTensor],
    paths: Sequence[Path],
    group: Group,
) -> ShardedTensor:
    """One tensor of the shards that all files have of it."""
    kinds = [row[name]["kind"] for _, row in rows]
    odd = next((at for at, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise _wrong(paths[odd], f"has {quoted(name)} as {kinds[odd]}, the first as {kinds[0]}")
    shards = _stated(name, rows)
    size = torch.Size(kinds[0][0])
    try:
        check_disjoint(shards)
        check_tensor(shards, size)
    except ValueError as error:
        raise _wrong(paths[0], f"and the others do not make up {quoted(name)}: {error}") from None
    wanted = [(one.shard_offsets, one.shard_sizes) for one in shards if one.rank == this_rank()]
    pieces = [piece for one in own for piece in held_by(one._content, _saver(one))]
    parts = {(box.start, box.shape): part for box, part in reversed(pieces)}
    return _made([parts[one] for one in wanted], shards, size, kinds[0], group, own)


def _stated(name: str, rows: list[Any]) -> tuple[ShardMetadata, ...]:
    """All shards, on the ranks that have read them; what several files hold comes from one."""
    found: dict[Any, ShardMetadata] = {}
    for rank, row in rows:
        for offsets, sizes in row[name]["boxes"]:
            shard = ShardMetadata(offsets, sizes, f"rank:{rank}/{row[name]['device']}")
            key = (shard.shard_offsets, shard.shard_sizes)
            found.setdefault(key if not shard.is_empty else (key, rank, len(found)), shard)
    return tuple(found.values())


def _made(
    parts: list[torch.Tensor],
    shards: tuple[ShardMetadata, ...],
    size: torch.Size,
    kind: list[Any],
    group: Group,
    own: list[ShardedTensor],
) -> ShardedTensor:
    layout, spec = layout_of_shards(tuple(size), shards), infer_sharding_spec(shards)
    device = parts[0].device if parts else home_of(group)
    dtype = getattr(torch, kind[1].removeprefix("torch."))
    content = Content(layout, tuple(size), dtype, tuple(parts), device, group, spec, shards)
    return marked(wrap(content), kind[2], any(isinstance(one, torch.nn.Parameter) for one in own))


def _rebuilt(value: Any, joined: dict[int, ShardedTensor]) -> Any:
    """What was saved, with the tensors that were put together in it."""
    if isinstance(value, ShardedTensor):
        return joined[id(value)]
    if isinstance(value, Mapping):
        made: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
        made.update({name: _rebuilt(one, joined) for name, one in value.items()})
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata  # the versions of modules in a state dict
        return made
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(one, joined) for one in value)
    return value
