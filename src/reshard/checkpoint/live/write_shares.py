"""The shares of the ranks in writing: each box is written once, by a rank that holds it.

Plain tensors that several ranks hold must be equal: digests of them are compared before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.checkpoint.catalog import StoredObject, StoredPiece
from reshard.checkpoint.formats.distcp_writer import distcp
from reshard.checkpoint.formats.safetensors.writer import sharded
from reshard.checkpoint.integrity import digest
from reshard.checkpoint.integrity.checksums import checksum
from reshard.checkpoint.live.entries import RankBoxes, RankTensor, View, bytes_of, part_of
from reshard.checkpoint.output import Output, OwnedBox, Wanted, owned_boxes
from reshard.checkpoint.storage.output_files import OutputFiles
from reshard.checkpoint.transfer.copying import Done
from reshard.checkpoint.transfer.windows import in_order
from reshard.dtypes import itemsize
from reshard.errors import DisagreementError
from reshard.layout.box import Box
from reshard.layout.boxlist import listed_of
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.planning.sharing import LeastLoaded
from reshard.tensors.local import whole_on
from reshard.text import quoted

WORKERS = 2
WINDOW = 8 << 20
"""Bytes that are written at once."""
STEP = 1 << 30
"""Bytes after which the ranks agree, so that heartbeats arrive in time."""
COMPARED = 4 << 20
"""The most bytes of a plain tensor that are all compared between ranks."""
SAMPLED = 1 << 16
"""Elements of a larger one that are compared."""

_CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def digests_of(local: Mapping[str, RankTensor], rank: int) -> dict[str, str]:
    """A digest of every plain tensor of this rank: other ranks may hold it too.

    Of a large tensor it is that of evenly spaced elements. In data parallel jobs without sharding
    every rank holds the whole model: to read all of it would take every rank longer than to write
    its share.
    """
    plain, digests = whole_on((rank,)), {}
    for name, (spec, parts) in local.items():
        if spec.layout == plain:
            [tensor] = parts
            cells, last = tensor.view(_CELLS[tensor.element_size()]), tensor.numel() - 1
            if tensor.nbytes > COMPARED:
                spaced = torch.arange(SAMPLED, device=tensor.device) * last // (SAMPLED - 1)
                cells = cells[torch.unravel_index(spaced, tensor.shape)]
            digests[name] = checksum(bytes_of(cells.contiguous().cpu())).hex()
    return digests


def check_copies(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse a plain tensor that differs between ranks: the checkpoint has room for one copy."""
    first: dict[str, tuple[int, str]] = {}
    for rank, values in digests.items():
        for name, value in values.items():
            holder, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise DisagreementError(
                    f"{quoted(name)} is a plain tensor that differs between ranks {holder} and "
                    f"{rank}: broadcast it first, give it on one rank only, or under another name "
                    "on each rank"
                )


def owners_of(specs: Mapping[str, TensorSpec]) -> dict[str, list[OwnedBox]]:
    """The rank that writes each distinct box of every tensor: one that holds it, in equal shares.

    >>> from reshard.layout.mesh import Mesh
    >>> specs = {name: TensorSpec((size,), "float32", Layout(Mesh(dp=2), "-"))
    ...          for name, size in [("a", 6), ("b", 1), ("c", 5)]}
    >>> {name: [box.rank for box in boxes] for name, boxes in owners_of(specs).items()}
    {'a': [0], 'b': [1], 'c': [1]}
    """
    owned = {
        name: [*owned_boxes(name, Wanted(spec.shape, spec.dtype, spec.layout), number)]
        for number, (name, spec) in enumerate(specs.items())
    }
    loads = LeastLoaded(rank for spec in specs.values() for rank in spec.layout.ranks)
    choices = []
    for name, spec in specs.items():
        if not spec.num_bytes:
            continue
        listed = listed_of(spec.layout, spec.shape)
        sizes = (listed.stops - listed.starts).prod(axis=1) * itemsize(spec.dtype)
        shared = np.diff(listed.first) > 1
        for box in np.flatnonzero(~shared).tolist():
            loads.loads[owned[name][box].rank] += int(sizes[box])
        choices += [
            (-int(sizes[box]), name, box, listed.of(box)) for box in np.flatnonzero(shared).tolist()
        ]
    for size, name, box, holders in sorted(choices, key=lambda one: one[:3]):
        rank = loads.choose(sorted(holders.tolist()), -size)
        owned[name][box] = owned[name][box]._replace(rank=rank)
    return owned


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What is to be saved, equal on all ranks."""

    specs: Mapping[str, TensorSpec]
    owned: Mapping[str, Sequence[OwnedBox]]
    output: Output
    others: Mapping[str, tuple[int, int]]
    """The rank that writes each entry that is not a tensor, and its size."""
    first: int
    """The rank that writes files without a box."""

    def pieces(self) -> Iterator[tuple[str, StoredPiece, int]]:
        """All pieces of tensors in the output, each with the rank that writes it."""
        for name, tensor in self.output.tensors.items():
            ranks = {start: rank for start, _, rank in self.owned[name]}
            yield from ((name, piece, ranks[piece.box.start]) for piece in tensor.pieces)


def plan_save(
    specs: Mapping[str, TensorSpec],
    others: Mapping[str, tuple[int, int]],
    keys: Mapping[str, tuple[str | int, ...]],
    format: str,
    first: int,
) -> SavePlan:
    """All files, and the place of every box in them."""
    mesh = _main_mesh(specs)
    specs = {
        name: replace(spec, layout=_on_mesh(spec.layout, mesh))
        for name, spec in sorted(specs.items())
    }
    owned = owners_of(specs)
    wanted = {
        name: Wanted(spec.shape, spec.dtype, spec.layout, owned[name])
        for name, spec in specs.items()
    }
    if format == "distcp":
        objects = [StoredObject(name, 0, 0, size) for name, (_, size) in others.items()]
        output = distcp(wanted, objects, keys)
    else:
        output = sharded(wanted, {}, None if mesh is None else str(mesh))
    return SavePlan(specs, owned, output, others, first)


def _main_mesh(specs: Mapping[str, TensorSpec]) -> Mesh | None:
    """The mesh that most bytes are sharded over, which the files record."""
    num_bytes = Counter[Mesh]()
    for spec in specs.values():
        if not isinstance(spec.layout, BoxLayout):
            num_bytes[spec.layout.mesh] += spec.num_bytes
    return num_bytes.most_common(1)[0][0] if num_bytes else None


def _on_mesh(layout: Layout, mesh: Mesh | None) -> Layout:
    """The layout on this mesh, if it is whole on all ranks of it; else unchanged."""
    if mesh is None or isinstance(layout, BoxLayout) or str(layout) != "...":
        return layout
    is_whole = layout.mesh != mesh and sorted(layout.ranks) == sorted(mesh.ranks)
    return Layout(mesh, "...") if is_whole else layout


class _Write(NamedTuple):
    """A box of a tensor to be written, and the view of this rank that contains it."""

    file: int
    offset: int
    name: str
    box: Box
    view: View


def write_share(
    plan: SavePlan,
    target: OutputFiles,
    local: Mapping[str, RankTensor],
    objects: Mapping[str, bytes],
    done: Done,
    checksums: bool,
) -> Iterator[bool]:
    """Write the share of one rank in steps, each of which ends on disk; whether it wrote a box.

    ``done`` has the number of the rank, and collects what was written; the parts of digests are by
    number of the tensor.
    """

    def write(task: _Write, _: None) -> tuple[Done, Any]:
        part = part_of(task.view, task.box)
        data, written = bytes_of(part.contiguous().cpu()), Done(done.number)
        written.write(target, task.file, task.offset, data.data, checksums)
        return written, data.view(f"V{part.element_size()}").reshape(task.box.shape)

    touched = set[int]()
    for file, offset, data in _known_bytes(plan, objects, done.number):
        done.write(target, file, offset, memoryview(data), checksums)
        touched.add(file)
    tasks = _writes(plan, local, done.number)
    numbers = {name: number for number, name in enumerate(plan.specs)}
    while True:
        some = [*islice(tasks, max(STEP // WINDOW, 1))]
        for task, (written, array) in in_order(write, some, WORKERS):
            done.sums += written.sums
            done.num_bytes += written.num_bytes
            if checksums:
                spec = plan.specs[task.name]
                part = digest.part(array, task.box, spec.shape, spec.dtype)
                done.parts[numbers[task.name]] += part
        for file in sorted(touched.union(task.file for task in some)):
            target.sync_file(file)
        touched = set()
        yield bool(some)


def _known_bytes(
    plan: SavePlan, objects: Mapping[str, bytes], rank: int
) -> Iterator[tuple[int, int, bytes]]:
    """File, offset and bytes of the headers and of the entries that a rank writes."""
    writers = dict.fromkeys(range(len(plan.output.files)), plan.first)
    writers |= {piece.file: writer for _, piece, writer in plan.pieces()}
    for literal in plan.output.all_literals():
        if writers[literal.file] == rank:
            yield literal.file, literal.offset, literal.data
    for copy in plan.output.objects:
        writer, _ = plan.others[copy.source.name]
        if writer == rank:
            yield copy.file, copy.offset, objects[copy.source.name]


def _writes(plan: SavePlan, local: Mapping[str, RankTensor], rank: int) -> Iterator[_Write]:
    """The boxes that a rank writes, in windows."""
    boxes, own = RankBoxes(), (one for one in plan.pieces() if one[2] == rank)
    for name, pieces in groupby(own, key=itemgetter(0)):
        views, size = boxes.views(local[name], rank), itemsize(plan.specs[name].dtype)
        for _, piece, _ in pieces:
            at = piece.offset
            for box in piece.box.slabs(WINDOW // size):
                view = next(view for view in views if box in view[0])
                yield _Write(piece.file, at, name, box, view)
                at += box.size * size
