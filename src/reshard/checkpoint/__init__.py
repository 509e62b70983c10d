"""Checkpoints: inspect, convert, verify, compare, load and save them in any layout.

    >>> from reshard import checkpoint
    >>> report = checkpoint.inspect("ckpt")                      # doctest: +SKIP
    >>> print(report)                                            # doctest: +SKIP

    catalog, piece_table  what a checkpoint holds: tensors, and where their boxes are in files
    output         the plan of an output: its files, and the place of every box
    storage/       files: read by byte ranges, local or remote, and written durably
    integrity/     checksums, digests and CRCs
    formats/       readers and writers, by format
    transfer/      copy boxes between files under a cap of memory
    conversion/    request, source, plan, build
    publish/       a destination appears when it is complete; overwriting; resuming
    inspection     what a checkpoint holds, from its headers
    soundness      is it sound, are two the same
    differences    where and by how much two differ
    live/          load and save in a job

Names load when first used, and only ``load`` and ``save``, which are for tensors in a job, load
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see here what `__getattr__` loads
    from reshard.checkpoint.conversion.stages import ConvertReport as ConvertReport
    from reshard.checkpoint.conversion.stages import convert as convert
    from reshard.checkpoint.differences import DiffReport as DiffReport
    from reshard.checkpoint.differences import TensorDiff as TensorDiff
    from reshard.checkpoint.differences import diff as diff
    from reshard.checkpoint.inspection import InspectedTensor as InspectedTensor
    from reshard.checkpoint.inspection import Inspection as Inspection
    from reshard.checkpoint.inspection import inspect as inspect
    from reshard.checkpoint.live.loading import LoadReport as LoadReport
    from reshard.checkpoint.live.loading import load as load
    from reshard.checkpoint.live.saving import SaveReport as SaveReport
    from reshard.checkpoint.live.saving import save as save
    from reshard.checkpoint.soundness import VerifyReport as VerifyReport
    from reshard.checkpoint.soundness import verify as verify

_NAMES = {
    "conversion.stages": ("ConvertReport", "convert"),
    "differences": ("DiffReport", "TensorDiff", "diff"),
    "inspection": ("InspectedTensor", "Inspection", "inspect"),
    "live.loading": ("LoadReport", "load"),
    "live.saving": ("SaveReport", "save"),
    "soundness": ("VerifyReport", "verify"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# Written out: of a computed list type checkers know nothing in `from reshard.checkpoint import *`.
__all__ = [
    "ConvertReport", "DiffReport", "InspectedTensor", "Inspection", "LoadReport", "SaveReport",
    "TensorDiff", "VerifyReport", "convert", "diff", "inspect", "load", "save", "verify",
]  # fmt: skip

if not TYPE_CHECKING:  # else every misspelt name would pass as one that is loaded here

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'reshard.checkpoint' has no attribute '{name}'")
        from reshard.errors import needing_torch

        with needing_torch(f"reshard.checkpoint.{name}"):
            value = getattr(import_module(f"reshard.checkpoint.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__]
