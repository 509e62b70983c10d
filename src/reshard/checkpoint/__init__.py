"""Checkpoints: what is in them, are they sound, and how to cut them another way.

    >>> from reshard import checkpoint
    >>> report = checkpoint.inspect("ckpt")                      # doctest: +SKIP
    >>> print(report)                                            # doctest: +SKIP

Names load when first used, and none of them loads torch but ``load`` and ``save``, which are for
tensors in a job.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

_HOMES = {
    "ConvertReport": "reports",
    "DiffReport": "diff",
    "InspectedTensor": "inspect",
    "Inspection": "inspect",
    "LoadReport": "live.reports",
    "SaveReport": "live.reports",
    "TensorDiff": "diff",
    "VerifyReport": "verify",
    "convert": "convert",
    "diff": "diff",
    "inspect": "inspect",
    "load": "live.loading",
    "save": "live.saving",
    "verify": "verify",
}

__all__ = [*sorted(_HOMES)]


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


class _FunctionsFirst(ModuleType):
    """Loading ``checkpoint/verify.py`` would bind that module here as ``verify``; the function is
    what callers mean.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FunctionsFirst
