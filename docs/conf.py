"""Sphinx configuration: pip install -e '.[docs]' && sphinx-build docs docs/_build."""

import tomllib
from pathlib import Path

_pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

project = "reshard"
author = "the reshard authors"
copyright = author
release = version = _pyproject["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}

html_theme = "furo"
html_title = "reshard"
