"""Describe how a tensor is sharded and how you want it sharded, and reshard moves it.

    >>> import reshard as rs
    >>> have = rs.Layout(rs.Mesh(dp=2, tp=4), "(dp tp) -")
    >>> want = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "- tp")
    >>> plan = rs.plan(have, want, shape=(8192, 4096), dtype="bfloat16")
    >>> plan.summary().wire_bytes == plan.summary().lower_bound_bytes == 8192 * 4096 * 2
    True

Names load when first used: importing reshard imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "Box": "layout.box",
    "Layout": "layout.layout",
    "Mesh": "layout.mesh",
    "Plan": "planning.plans",
    "Rules": "rules",
    "RunReport": "show.run_report",
    "SimulationReport": "simulation",
    "Summary": "planning.cost.summary",
    "TensorSpec": "layout.spec",
    "Topology": "planning.cost.topology",
    "backward": "tensors.move",
    "check": "live.api",
    "describe": "tensors.describe",
    "exchange": "tensors.exchange",
    "flat_bucket": "layout.bucket",
    "join": "planning.names",
    "layout_of": "tensors.reading",
    "move": "tensors.move",
    "plan": "planning.plans",
    "simulate": "simulation",
    "stack": "planning.names",
    "take": "planning.names",
}
_ERRORS = (
    "ArgumentError", "ArgumentTypeError", "BoxError", "CheckpointError", "CoverageError",
    "DamageError", "DisagreementError", "DtypeError", "FormatError", "LayoutError", "LiveError",
    "MemoryCapError", "MeshError", "MoveTimeoutError", "NamesError", "NotationError",
    "OperationError", "PathError", "PeerLostError", "PlanError", "ProofError", "ReshardError",
    "RulesError", "SizeError", "StateError", "TargetError", "TensorError", "TopologyError",
    "UnfinishedError", "UnsupportedError",
)  # fmt: skip
_HOMES |= dict.fromkeys(_ERRORS, "errors")

__all__ = [*sorted(_HOMES)]


_MOVED = {"models": "rules.models"}
"""Modules under their old names, each for one minor version."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _MOVED:
        import warnings

        warnings.warn(
            f"reshard.{name} is reshard.{_MOVED[name]} now; the old name goes with version 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return import_module(f"reshard.{_MOVED[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'reshard' has no attribute '{name}'")
    try:
        value = getattr(import_module(f"reshard.{_HOMES[name]}"), name)
    except ModuleNotFoundError:
        from reshard.errors import needing_torch

        with needing_torch(f"reshard.{name}"):
            raise
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("reshard")
    except PackageNotFoundError:
        return "0.0.0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
