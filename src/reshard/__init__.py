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
from typing import TYPE_CHECKING

from reshard import errors
from reshard.errors import *  # noqa: F403 - they import nothing, and load at once

if TYPE_CHECKING:  # type checkers and editors see here what `__getattr__` loads
    from reshard import checkpoint as checkpoint
    from reshard import nn as nn
    from reshard import rules as rules
    from reshard import sharded as sharded
    from reshard.layout.box import Box as Box
    from reshard.layout.layout import Layout as Layout
    from reshard.layout.mesh import Mesh as Mesh
    from reshard.layout.spec import TensorSpec as TensorSpec
    from reshard.layout.spec import flat_bucket as flat_bucket
    from reshard.live.api import check as check
    from reshard.planning.cost.summary import Summary as Summary
    from reshard.planning.cost.topology import Topology as Topology
    from reshard.planning.names import join as join
    from reshard.planning.names import stack as stack
    from reshard.planning.names import take as take
    from reshard.planning.plans import Plan as Plan
    from reshard.planning.plans import plan as plan
    from reshard.rules import Rules as Rules
    from reshard.show.run_report import RunReport as RunReport
    from reshard.simulation import SimulationReport as SimulationReport
    from reshard.simulation import simulate as simulate
    from reshard.tensors.exchanging import exchange as exchange
    from reshard.tensors.local import layout_of as layout_of
    from reshard.tensors.moving import backward as backward
    from reshard.tensors.moving import move as move
    from reshard.tensors.state_dicts import describe as describe

    __version__: str

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
    "backward": "tensors.moving",
    "check": "live.api",
    "describe": "tensors.state_dicts",
    "exchange": "tensors.exchanging",
    "flat_bucket": "layout.spec",
    "join": "planning.names",
    "layout_of": "tensors.local",
    "move": "tensors.moving",
    "plan": "planning.plans",
    "simulate": "simulation",
    "stack": "planning.names",
    "take": "planning.names",
}
_PACKAGES = ("checkpoint", "nn", "rules", "sharded")
"""Packages of users, which load when first named, as `rs.checkpoint` does."""

# Written out: of a computed list type checkers know nothing in `from reshard import *`.
__all__ = [
    "Box", "Layout", "Mesh", "Plan", "Rules", "RunReport", "SimulationReport", "Summary",
    "TensorSpec", "Topology", "backward", "check", "describe", "exchange", "flat_bucket", "join",
    "layout_of", "move", "plan", "simulate", "stack", "take",
]  # fmt: skip
__all__ += errors.__all__


_MOVED = {"models": "rules.models"}
"""Modules under their old names, each for one minor version."""


if not TYPE_CHECKING:  # else every misspelt name would pass as one that is loaded here

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return _version()
        if name in _PACKAGES:
            return import_module(f"reshard.{name}")
        if name in _MOVED:
            return _moved(name)
        if name not in _HOMES:
            raise AttributeError(_unknown(name))
        return _load(name)


def _load(name: str) -> object:
    try:
        module = import_module(f"reshard.{_HOMES[name]}")
    except ModuleNotFoundError:
        with errors.needing_torch(f"reshard.{name}"):
            raise
    globals()[name] = value = getattr(module, name)
    return value


def _moved(name: str) -> object:
    import warnings

    warnings.warn(
        f"reshard.{name} is reshard.{_MOVED[name]} now; the old name goes with version 0.3",
        DeprecationWarning,
        stacklevel=3,
    )
    return import_module(f"reshard.{_MOVED[name]}")


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, __dir__(), n=1)
    return f"module 'reshard' has no attribute '{name}'" + (f": try {near[0]}" if near else "")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("reshard")
    except PackageNotFoundError:
        return "0.0.0+unknown"


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
