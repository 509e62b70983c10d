"""Configuration of the site: `make docs` builds it into docs/_build; warnings are errors."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

_pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())

project = "reshard"
author = "the reshard authors"
copyright = author
release = version = _pyproject["project"]["version"]

# Nothing is fetched: the site builds without a network.
extensions = ["myst_parser", "sphinx.ext.autodoc", "generated"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False

html_theme = "furo"
html_title = "reshard"
smartquotes = False  # --json is an option
