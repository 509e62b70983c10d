"""``torch.save`` files that hold whole tensors: ``pytorch_model.bin``, ``model.pt``."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.box import Box
from reshard.checkpoint.catalog import Catalog, Crc, StoredFile, StoredPiece, StoredTensor
from reshard.checkpoint.formats.findings import Findings
from reshard.checkpoint.formats.rank_names import rank_of
from reshard.checkpoint.formats.safetensors_files import missing_parts
from reshard.checkpoint.formats.torch_files import read_torch_file
from reshard.checkpoint.storage import TENSOR_FILES, Storage
from reshard.errors import CheckpointError, quoted

__all__ = ["read_torch"]


def read_torch(storage: Storage, listed: Sequence[StoredFile], findings: Findings) -> Catalog:
    """The catalog of the torch files of a folder, or of one such file."""
    files = _chosen(storage.root, listed)
    for path in missing_parts(files) if not storage.is_file else ():
        findings.found(f"{storage.where(path)} is missing: the names of the others count it")
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, str] = {}
    nesting: dict[str, tuple[str | int, ...]] = {}
    crcs: list[Crc] = []
    for number, file in enumerate(files):
        with findings.noting():
            content = read_torch_file(storage, file, findings, number)
            crcs += content.crcs
            for name, local in content.tensors.items():
                if name in tensors:
                    findings.found(
                        f"tensor {quoted(name)} is in {files[tensors[name].pieces[0].file].path} "
                        f"and in {file.path} of {storage.root}: name one of the files"
                    )
                    continue
                box = Box.whole(local.shape)
                piece = StoredPiece(box, number, local.offset, local.strides)
                tensors[name] = StoredTensor(name, local.shape, local.dtype, (piece,))
            for name, text in content.values.items():
                values.setdefault(name, text)
            nesting |= content.nesting
    used = {file.path for file in files}
    others = tuple(file for file in listed if file.path not in used)
    return Catalog(
        storage.root,
        "torch",
        files,
        tensors,
        metadata=values,
        others=others,
        nesting=nesting,
        crcs=tuple(crcs),
    )


def _chosen(root: str, listed: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
    files = [file for file in listed if file.path.endswith(TENSOR_FILES)]
    ranks = {rank_of(file.path, None) for file in files} - {None}
    if len(ranks) > 1:
        raise CheckpointError(
            f"{root} holds files of {len(ranks)} ranks ({files[0].path} is one) that do not say "
            "how they were cut: give --rules and --mesh"
        )
    usual = [file for file in files if file.path.startswith("pytorch_model")]
    return tuple(usual or files)
