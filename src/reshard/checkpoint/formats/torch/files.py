"""``torch.save`` files that hold whole tensors: ``pytorch_model.bin``, ``model.pt``."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.checkpoint.catalog import Catalog, StoredPiece, StoredTensor
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.ranks.names import rank_of
from reshard.checkpoint.formats.safetensors.files import missing_parts
from reshard.checkpoint.formats.torch.state_dict import Content, beside_tensors, read_torch_file
from reshard.checkpoint.formats.torch.zero import check_no_zero_files
from reshard.checkpoint.storage.base import Storage, StoredFile
from reshard.errors import CheckpointError
from reshard.layout.box import Box

__all__ = ["read_torch"]


def read_torch(
    storage: Storage,
    listed: Sequence[StoredFile],
    named: Sequence[StoredFile],
    findings: Findings,
) -> Catalog:
    """The catalog of the torch files of a folder, or of one such file; ``named`` may be such."""
    files = _chosen(storage.root, named)
    check_no_zero_files(storage.root, files)
    for path in missing_parts(files) if not storage.is_file else ():
        findings.found(f"{storage.where(path)} is missing: the names of the others count it")
    tensors: dict[str, StoredTensor] = {}
    doubled: dict[tuple[str, str], list[str]] = {}
    contents: list[Content] = []
    for number, file in enumerate(files):
        with findings.noting():
            content = read_torch_file(storage, file, findings, number)
            contents.append(content)
            for name, local in content.tensors.items():
                if name in tensors:
                    before = files[tensors[name].pieces[0].file].path
                    doubled.setdefault((before, file.path), []).append(name)
                    continue
                box = Box.whole(local.shape)
                piece = StoredPiece(box, number, local.offset, local.strides)
                tensors[name] = StoredTensor(name, local.shape, local.dtype, (piece,))
    findings.refuse_doubled(doubled, f"name one of the files of {storage.root}")
    used = {file.path for file in files}
    others = tuple(file for file in listed if file.path not in used)
    return Catalog(
        storage.root,
        "torch",
        files,
        tensors,
        others=others,
        **beside_tensors(contents),
    )


def _chosen(root: str, files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
    ranks = {rank_of(file.path, None) for file in files} - {None}
    if len(ranks) > 1:
        raise CheckpointError(
            f"{root} holds files of {len(ranks)} ranks ({files[0].path} is one) that do not say "
            "how they were cut: give --rules and --mesh"
        )
    usual = [file for file in files if file.path.startswith("pytorch_model")]
    return tuple(usual or files)
