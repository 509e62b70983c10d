"""What type checkers and editors know of the library; `make check` runs mypy and pyright here."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reshard as rs
from tests.docs.snippets import ROOT

HERE = Path(__file__).parent
PAGES_WITHOUT_PYTHON = {
    *("benchmarks", "changes", "cli", "guarantees", "json", "scale"),
    *("architecture", "behaviours", "digest", "exit-codes", "index", "protocol", "source-index"),
}
"""Pages whose reader types no Python."""


def test_every_page_with_python_has_a_typed_script() -> None:
    pages = {path.stem for path in ROOT.glob("docs/*.md")} - PAGES_WITHOUT_PYTHON
    scripts = {path.stem for path in HERE.glob("*.py")} - {"__init__", Path(__file__).stem}
    assert scripts == pages | {"readme", "how_to"}


def test_jedi_completes_names_that_load_lazily() -> None:
    jedi = pytest.importorskip("jedi", reason="make setup installs it")
    project = jedi.Project(ROOT, added_sys_path=[str(ROOT / "src")])

    def completed(text: str) -> list[str]:
        script = jedi.Script(f"import reshard as rs\n{text}", project=project)
        return [found.name for found in script.complete()]

    assert completed("rs.pl")[0] == "plan"
    assert {"Mesh", "MeshError"} <= set(completed("rs.Me"))
    assert "checkpoint" in completed("rs.checkp")
    assert "convert" in completed("rs.checkpoint.conv")
    assert "wire_bytes" in completed("rs.plan(1, 2).summary().")


@pytest.mark.parametrize("name", ["", ".checkpoint", ".rules", ".nn", ".sharded"])
def test_dir_shows_public_names_only(name: str) -> None:
    if name != ".rules":  # all others have names that load what needs torch
        pytest.importorskip("torch", reason="some of the names are for tensors")
    module = importlib.import_module(f"reshard{name}")
    shown = dir(module)
    more = {"": {"checkpoint", "nn", "rules", "sharded", "__version__"}, ".rules": {"models"}}
    assert set(shown) == {*module.__all__, *more.get(name, ())}
    assert all(getattr(module, one) is not None for one in shown)


def test_what_type_checkers_see_is_what_loads() -> None:
    for module, path in ((rs, "__init__.py"), (rs.checkpoint, "checkpoint/__init__.py")):
        text = (ROOT / "src/reshard" / path).read_text()
        lines = re.findall(r"^    from (reshard\S*) import (\w+) as \2$", text, re.MULTILINE)
        seen = {name: home for home, name in lines if home != "reshard"}
        assert seen == {name: f"{module.__name__}.{home}" for name, home in module._HOMES.items()}
        at_once = set(rs.errors.__all__) if module is rs else set()
        assert set(module.__all__) == set(module._HOMES) | at_once


def test_packages_of_users_load_when_first_named() -> None:
    code = (
        "import sys, reshard as rs; print('numpy' in sys.modules); rs.rules; rs.checkpoint; "
        "print('torch' in sys.modules, rs.rules.Rules is rs.Rules, rs.checkpoint.inspect.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "True", "inspect"], done.stderr


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'plann': try plan"):
        getattr(rs, "plann")  # noqa: B009
