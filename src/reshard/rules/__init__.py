"""Rules: tensor names to layouts.

ruleset   `Rules`: the rules of a model family or a file, with the numbers of a model
pattern   the pattern language of tensor names
formula   integer formulas, and layouts with formulas
document  rules files
table     the layouts of one document on one mesh
axes      which axes layouts name, and what a mesh does with them
configs   the numbers of config.json that rules use, and configs of published models
models    tensor names and shapes of known models
families/ the shipped rules files
"""

from reshard.rules import models as models
from reshard.rules.ruleset import Rules

__all__ = ["Rules"]


def __dir__() -> list[str]:
    return [*__all__, "models"]
