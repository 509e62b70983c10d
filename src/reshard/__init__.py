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
    from reshard.tensors.autograd import backward as backward
    from reshard.tensors.exchanging import exchange as exchange
    from reshard.tensors.local import layout_of as layout_of
    from reshard.tensors.moving import move as move
    from reshard.tensors.state_dicts import describe as describe

    __version__: str

_NAMES = {
    "layout.box": "Box",
    "layout.layout": "Layout",
    "layout.mesh": "Mesh",
    "layout.spec": "TensorSpec flat_bucket",
    "live.api": "check",
    "planning.cost.summary": "Summary",
    "planning.cost.topology": "Topology",
    "planning.names": "join stack take",
    "planning.plans": "Plan plan",
    "rules": "Rules",
    "show.run_report": "RunReport",
    "simulation": "SimulationReport simulate",
    "tensors.autograd": "backward",
    "tensors.exchanging": "exchange",
    "tensors.local": "layout_of",
    "tensors.moving": "move",
    "tensors.state_dicts": "describe",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("checkpoint", "nn", "rules", "sharded")
"""Packages of users, which load when first named, as `rs.checkpoint` does."""

# Written out: of a computed list type checkers know nothing in `from reshard import *`.
__all__ = [
    "Box", "Layout", "Mesh", "Plan", "Rules", "RunReport", "SimulationReport", "Summary",
    "TensorSpec", "Topology", "backward", "check", "describe", "exchange", "flat_bucket", "join",
    "layout_of", "move", "plan", "simulate", "stack", "take",
]  # fmt: skip
__all__ += errors.__all__


if not TYPE_CHECKING:  # else every misspelt name would pass as one that is loaded here

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("reshard")
            except metadata.PackageNotFoundError:
                return "0.0.0+unknown"
        if name in _PACKAGES:
            return import_module(f"reshard.{name}")
        if name == "models":
            import warnings

            text = "reshard.models is reshard.rules.models now; the old name goes with version 0.3"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return import_module("reshard.rules.models")
        if name not in _HOMES:
            import difflib

            near = difflib.get_close_matches(name, __dir__(), n=1)
            advice = f": try {near[0]}" if near else ""
            raise AttributeError(f"module 'reshard' has no attribute '{name}'{advice}")
        try:
            module = import_module(f"reshard.{_HOMES[name]}")
        except ModuleNotFoundError:
            with errors.needing_torch(f"reshard.{name}"):
                raise
        globals()[name] = value = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
