"""Recognises checkpoints of DeepSpeed's ZeRO, which are refused: their parts have no shapes.

ZeRO flattens parameters and optimizer states, joins them to groups and shards the groups over
ranks. From stage 3 on the files of the model hold empty placeholders for parameters, which would be
read as complete tensors of shape (0,).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from reshard.checkpoint.formats.checks import whole_numbers
from reshard.checkpoint.formats.torch.unpickler import Record
from reshard.checkpoint.storage.base import StoredFile
from reshard.errors import UnsupportedError
from reshard.text import quoted

__all__ = ["check_no_zero", "check_no_zero_files"]

_FLAT = re.compile(r"(?:^|/)(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+\w*\.pt\Z")
_UNIVERSAL = re.compile(r"(?:^|/)zero/[^/]+/(?:fp32|exp_avg|exp_avg_sq)\.pt\Z")
_ADVICE = (
    "is not supported: make whole weights with the zero_to_fp32.py that DeepSpeed writes beside "
    "the checkpoint, and convert those"
)
_MARKS = ("ds_version", "ds_config")
MAX_PARAMETERS = 1 << 20
MAX_ARGS = 16


def check_no_zero_files(root: str, listed: Iterable[StoredFile]) -> None:
    """Refuse a folder that has files with the names of ZeRO's."""
    for file in listed:
        if _UNIVERSAL.search(file.path):
            raise UnsupportedError(
                f"{root}: {quoted(file.path)} is part of a universal checkpoint of DeepSpeed, "
                f"which {_ADVICE}"
            )
        if _FLAT.search(file.path):
            raise UnsupportedError(
                f"{root}: {quoted(file.path)} is one rank's part of a checkpoint of DeepSpeed's "
                f"ZeRO, which {_ADVICE}; of ZeRO-1 and ZeRO-2 an mp_rank_00_model_states.pt can be "
                "named alone"
            )


def check_no_zero(value: Any, where: str) -> None:
    """Refuse a file whose tensors are flattened parts or empty placeholders."""
    if not isinstance(value, dict):
        return
    states = value.get("optimizer_state_dict")
    if isinstance(states, dict) and "zero_stage" in states:
        stage = states["zero_stage"]
        name = f"ZeRO-{stage}" if isinstance(stage, int) and 0 <= stage <= 3 else "ZeRO"
        raise UnsupportedError(
            f"{where} holds flat parts of optimizer states of DeepSpeed's {name}, which {_ADVICE}"
        )
    if not any(mark in value for mark in _MARKS):
        return
    shapes = dict(_parameter_shapes(value.get("param_shapes")))
    module = value.get("module")
    for name, tensor in module.items() if isinstance(module, dict) else ():
        if _is_empty(tensor) and 0 not in shapes.get(name, (1,)):
            raise UnsupportedError(
                f"{where}: tensor {quoted(name)} is an empty placeholder of DeepSpeed's ZeRO-3, "
                f"whose parameters are flat parts in other files, which {_ADVICE}"
            )


def _parameter_shapes(value: object) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The global shapes of parameters: one dict, or one for each group."""
    groups = value if isinstance(value, list) else [value]
    for group in groups[:MAX_ARGS]:
        for name, sizes in group.items() if isinstance(group, dict) else ():
            short = isinstance(sizes, tuple) and len(sizes) <= MAX_ARGS
            shape = whole_numbers(sizes) if short else None
            if isinstance(name, str) and shape is not None:
                yield name, shape


def _is_empty(value: Any) -> bool:
    """Whether a record is a tensor, or a parameter with a tensor, that has no elements."""
    for _ in range(2):
        args = value.args[:MAX_ARGS] if isinstance(value, Record) else ()
        if len(args) > 2 and isinstance(args[2], tuple):
            return 0 in args[2][:MAX_ARGS]
        value = args[0] if args else None
    return False
