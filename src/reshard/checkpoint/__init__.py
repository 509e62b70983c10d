"""Checkpoints: inspect, convert, verify, compare, load and save them in any layout.

    >>> from reshard import checkpoint
    >>> report = checkpoint.inspect("ckpt")                      # doctest: +SKIP
    >>> print(report)                                            # doctest: +SKIP

Names load when first used, and none of them loads torch but ``load`` and ``save``, which are for
tensors in a job.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "ConvertReport": "conversion.report",
    "DiffReport": "verification.differences",
    "InspectedTensor": "inspection.inspecting",
    "Inspection": "inspection.inspecting",
    "LoadReport": "live.reports",
    "SaveReport": "live.reports",
    "TensorDiff": "verification.differences",
    "VerifyReport": "verification.soundness",
    "convert": "conversion.stages",
    "diff": "verification.differences",
    "inspect": "inspection.inspecting",
    "load": "live.loading",
    "save": "live.saving",
    "verify": "verification.soundness",
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
