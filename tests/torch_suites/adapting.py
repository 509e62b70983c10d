"""What is changed in a file of PyTorch's tests: devices for everybody, imports for reshard."""

import re

__all__ = ["HELPERS", "for_cpu", "for_reshard"]

HELPERS = "torch.testing._internal.distributed._shard"
"""Modules of the installed torch that its tests share; they import ``_shard`` too."""

_DEVICES = (
    # An index of its own where there is one device only: "cuda:1", f"cuda:{self.rank}".
    (re.compile(r"cuda:(\d+|\{[^{}]*\})"), "cpu"),
    (re.compile(r"\{device_type\}:(\d+|\{[^{}]*\})"), "{device_type}"),
    (re.compile(r"(?<=[\"'])cuda(?=[\"'])"), "cpu"),
    (re.compile(r"torch\.device\(\d\)"), 'torch.device("cpu")'),
    # A rank is the number of its GPU there: tensor.to(self.rank), torch.rand(3, device=rank).
    (re.compile(r"\.to\((self\.)?rank\)"), '.to("cpu")'),
    (re.compile(r"device=(self\.)?rank\b"), 'device="cpu"'),
    (re.compile(r"not TEST_MULTIGPU\b"), "False"),
    (re.compile(r"backend=.nccl."), 'backend="gloo"'),
    # On a CPU the first offset of embedding_bag must be 0.
    (re.compile(r"tensor\(\[len\(unique_inp\) // 2\]\)"), "tensor([0])"),
)


def for_cpu(text: str, first: str) -> str:
    """The file for gloo and the CPU; ``first`` is the module that it imports before all others."""
    for pattern, replaced in _DEVICES:
        text = pattern.sub(replaced, text)
    lines = text.splitlines()
    # After the last __future__ import, which must stay the first statement.
    future = [n for n, line in enumerate(lines) if line.startswith("from __future__")]
    at = future[-1] + 1 if future else 0
    return "\n".join([*lines[:at], f"import {first}  # noqa", *lines[at:], ""])


def for_reshard(text: str) -> str:
    """The file with other imports, and nothing else.

    >>> for_reshard("from torch.distributed._shard.api import shard_module")
    'from reshard.compat.api import shard_module'
    """
    return text.replace("torch.distributed._shard", "reshard.compat")
