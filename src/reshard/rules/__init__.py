"""Rules: tensor names to layouts.

ruleset   `Rules`: the rules of a model family or a file, with the numbers of a model
language  patterns of tensor names, integer formulas, and layouts with formulas
document  rules files: what they say, and which axes of a mesh they use
factors   an axis that is larger than a number of the model, read as two
table     the layouts of one document on one mesh
configs   the numbers of config.json that rules use, and configs of published models
models    tensor names and shapes of known models
families/ the shipped rules files
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.rules import models as models
    from reshard.rules.ruleset import Rules

__all__ = ["Rules"]


def __getattr__(name: str) -> object:
    """Load the rules when they are first used: names are matched with patterns without them."""
    if name == "Rules":
        return import_module("reshard.rules.ruleset").Rules
    if name == "models":
        return import_module("reshard.rules.models")
    raise AttributeError(f"module 'reshard.rules' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "models"]
