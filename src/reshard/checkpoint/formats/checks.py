"""What all readers share: checks of values, problems found, local tensors, names of files.

An inspection lists all problems, a read raises the first. Damage and unsupported content are kept
apart: only damage can be repaired from a backup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard.checkpoint.catalog import Catalog, Crc, StoredPiece, StoredTensor
from reshard.checkpoint.storage.local import Storage, StoredFile
from reshard.errors import CheckpointError, DamageError, UnsupportedError
from reshard.layout.box import Box
from reshard.text import and_more, quoted

if TYPE_CHECKING:
    from reshard.layout.mesh import Mesh
    from reshard.rules import Rules

T = TypeVar("T")
_PLAIN = (int, float, type(None))
MAX_SHOWN = 8
MAX_NOTED = 1000
MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48
"""The limit of layouts, which are not imported here: that takes longer than reading a header."""


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """The values as a tuple of integers from 0 on; None if they are anything else.

    >>> whole_numbers([2, 3]), whole_numbers([2, -3]), whole_numbers("23")
    ((2, 3), None, None)
    """
    if not isinstance(values, list | tuple):
        return None
    for value in values:  # half the time of `all`, and there are several calls for each box
        if type(value) is not int or value < 0:  # True is an int too, but no size
            return None
    return tuple(values)


def checked_shape(values: object, where: str, name: str | None = None) -> tuple[int, ...]:
    """A valid shape of a tensor; ``where`` and ``name`` are for the error."""
    # Thousands of tensors may share one list of millions: a list that is too long is not visited.
    too_long = isinstance(values, list | tuple) and len(values) > MAX_DIMS
    sizes = None if too_long else whole_numbers(values)
    if sizes is not None and prod(size or 1 for size in sizes) <= MAX_ELEMENTS:
        return sizes
    is_large = too_long or sizes is not None
    why = "no tensor has that many dims or elements" if is_large else "sizes are numbers from 0 on"
    about = where if name is None else f"{where}: tensor {quoted(name)}"
    raise DamageError(f"{about} has the shape {shown(values)}: {why}")


def shown(value: object) -> str:
    """A value as part of a message; of values that may nest without end only the type.

    >>> shown([2, "x"]), shown([[2]]), shown(2.5)
    ('[2, "x"]', 'a list', '2.5')
    """
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, _PLAIN):
        return str(value)
    if not isinstance(value, list | tuple) or any(
        not isinstance(part, (str, *_PLAIN)) for part in value[:MAX_SHOWN]
    ):
        return f"a {type(value).__name__}"
    inner = ", ".join(map(shown, value[:MAX_SHOWN])) + ", ..." * (len(value) > MAX_SHOWN)
    return f"[{inner}]" if isinstance(value, list) else f"({inner})"


@dataclass(slots=True)
class Findings:
    """Problems of a checkpoint, and notes for its reader; one line each.

    As a context it notes DamageError and UnsupportedError, and goes on after the block.
    """

    damage: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Content that is not damaged, as far as is known, and cannot be read."""
    notes: list[str] = field(default_factory=list)

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DamageError):
            self.add_damage(str(error))
        elif isinstance(error, UnsupportedError):
            self._add(str(error), self.unsupported)
        else:
            return False
        return True

    def add_damage(self, what: str) -> None:
        self._add(what, self.damage)

    def note(self, what: str) -> None:
        self._add(what, self.notes)

    def _add(self, what: str, lines: list[str]) -> None:
        if len(lines) < MAX_NOTED:
            lines.append(what)

    def refuse_doubled(self, doubled: Mapping[tuple[str, str], Sequence[str]], advice: str) -> None:
        """Note tensors that are in two files each, where nothing decides between these."""
        for (one, two), names in doubled.items():
            text = f"tensor {and_more([quoted(name) for name in names])} is in {one} and in {two}"
            text += f", and nothing says which of them counts: {advice}"
            self._add(text, self.unsupported)

    @property
    def any(self) -> bool:
        return bool(self.damage or self.unsupported)

    def check(self, root: str) -> None:
        """Raise the first problem; damage before unsupported content."""
        for kind, lines in ((DamageError, self.damage), (UnsupportedError, self.unsupported)):
            if lines:
                more = len(lines) - 1
                others = f" (and {more} more: reshard inspect {root} lists them)" if more else ""
                raise kind(f"{lines[0]}{others}")


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint that is being read: its files, the problems of them, arguments of the caller."""

    storage: Storage
    listed: tuple[StoredFile, ...]
    findings: Findings
    rules: Rules | None
    mesh: Mesh | None

    def catalog(
        self,
        kind: str,
        contents: Mapping[StoredFile, Content],
        tensors: Mapping[str, StoredTensor],
        *,
        index: StoredFile | None = None,
        **fields: Any,
    ) -> Catalog:
        """The catalog of files with this content; for names that several have the first counts."""
        used, each = {*contents, index}, contents.values()
        return Catalog(
            self.storage.root,
            kind,
            tuple(contents),
            tensors,
            others=tuple(file for file in self.listed if file not in used),
            metadata=_first_of_each(one.metadata for one in each),
            values=_first_of_each(one.values for one in each),
            nesting=_first_of_each(one.nesting for one in each),
            left_out=tuple(dict.fromkeys(name for one in each for name in one.left_out)),
            crcs=tuple(crc for one in each for crc in one.crcs),
            **fields,
        )

    def check_parts(self, files: Iterable[StoredFile]) -> None:
        """Note files that names such as ``model-00002-of-00004`` imply and that are not there."""
        groups: dict[tuple[str, str], tuple[int, set[int]]] = {}
        for file in files:
            if match := _PART.match(file.path):
                width, have = groups.setdefault((match[1], match[3]), (len(match[2]), set()))
                have.add(int(match[2]))
        for (stem, ending), (width, have) in groups.items():
            total = int(ending.partition(".")[0])
            for number in islice((n for n in range(1, total + 1) if n not in have), 16):
                path = f"{stem}{number:0{width}d}-of-{ending}"
                if self.storage.is_file:
                    self.findings.note(f"{path} and other files of the same set were not given")
                    return
                why = "is missing: the names of the other files imply it"
                self.findings.add_damage(f"{self.storage.where(path)} {why}")


def _first_of_each(dicts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    merged: dict[str, T] = {}
    for one in dicts:
        merged |= {key: value for key, value in one.items() if key not in merged}
    return merged


class LocalTensor(NamedTuple):
    """A tensor of a file: dtype, shape, strides, and the byte at which its first element begins."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: str = ""
    """The storage of the archive that holds it; empty outside of archives."""
    length: int = 0  # of that storage, in bytes


@dataclass(slots=True)
class Content:
    where: str
    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    """That of a safetensors file, or plain values that JSON can represent, as JSON."""
    described: dict[str, str] = field(default_factory=dict)
    """Metadata about the file itself: its place among others, where its tensors belong."""
    values: dict[str, Any] = field(default_factory=dict)
    nesting: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    crcs: list[Crc] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Names of entries that are neither tensors nor plain."""


_whole = lru_cache(maxsize=4096)(Box.whole)  # one object per shape: many tensors have the same


def whole_tensors(
    contents: Iterable[Content], findings: Findings, advice: str
) -> dict[str, StoredTensor]:
    """The tensors of files that hold whole ones; those that two files have are noted."""
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, str] = {}
    doubled: dict[tuple[str, str], list[str]] = {}
    for number, content in enumerate(contents):
        where = content.where
        for name, local in content.tensors.items():
            if home.setdefault(name, where) != where:
                doubled.setdefault((home[name], where), []).append(name)
                continue
            piece = StoredPiece(_whole(local.shape), number, local.offset, local.strides)
            tensors[name] = StoredTensor(name, local.shape, local.dtype, (piece,))
    findings.refuse_doubled(doubled, advice)
    return tensors


RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata\Z")
"""The metadata of one rank, written by ``dcp.save(use_collectives=False)``."""
_PART = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9}\.(?:safetensors|bin|pt|pth|ckpt))\Z", re.DOTALL)
_MODEL_PARALLEL = re.compile(r"(?:^|/)mp_rank_(\d{1,9})(?:_(\d{1,9}))?(?:_(\d{1,9}))?(?=[/._])")
_RANK = re.compile(r"(?:^|[-_./])rank[-_]?(\d{1,9})(?=[-_./])")
_CONSOLIDATED = re.compile(r"(?:^|/)consolidated\.(\d{1,9})\.pth\Z")
_ZERO = "zero_pp_rank_"
"""DeepSpeed's files of flattened optimizer states, which have no layout of their own."""
_AXES = (("tp", "mp"), ("pp",), ("ep",))
"""The mesh axes that the numbers of ``mp_rank_00_001_002`` index."""


def is_distcp(path: str) -> bool:
    """Whether a file makes its folder one of torch's distributed checkpoints."""
    return path == ".metadata" or path.endswith(".distcp") or bool(RANK_METADATA.match(path))


def rank_of(path: str, mesh: Mesh | None) -> int | None:
    """The rank whose tensors a file holds, from its name; None if the name has no rank.

    >>> from reshard.layout.mesh import Mesh
    >>> rank_of("model-rank-3-part-0.safetensors", Mesh(tp=4))
    3
    >>> rank_of("mp_rank_01_002/model_optim_rng.pt", Mesh(pp=4, tp=2))
    5
    """
    if _ZERO in path:
        return None
    match = _MODEL_PARALLEL.search(path)
    if match and mesh is not None and (match[2] is not None or "tp" in mesh.axes):
        # The rank at these coordinates along tp, pp and ep, and at 0 along all other axes.
        index = 0
        for names, digits in zip(_AXES, match.groups(), strict=True):
            number = int(digits or 0)
            axis = next((name for name in names if name in mesh.axes), names[0])
            size = mesh.axes.get(axis, 1)
            if number >= size:
                raise CheckpointError(
                    f"{path} is at {names[0]}={number}, and mesh {mesh} has {names[0]}={size}: "
                    "give the mesh that wrote it"
                )
            index += number * mesh.stride(axis) if number else 0
        return mesh.ranks[index]
    match = match or _RANK.search(path) or _CONSOLIDATED.search(path)
    if match is None:
        return None
    rank = int(match[1])
    if mesh is not None and mesh.index(rank) is None:
        raise CheckpointError(
            f"{path} is of rank {rank}, and mesh {mesh} has the ranks {mesh.ranks_text}: give the "
            "mesh that wrote it"
        )
    return rank
