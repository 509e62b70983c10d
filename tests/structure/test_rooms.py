"""The structure of the library: small rooms that say what they hold, imports that go one way."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src"
MAX_MODULES = 12
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("reshard/**/*.py"))
}
ROOMS = [path.parent for path in MODULES.values() if path.name == "__init__.py"]
LAZY = {"reshard", "reshard.checkpoint", "reshard.nn", "reshard.sharded"}
"""Packages that users import from; what they load lazily goes upwards by design."""
METHODS = {
    ("reshard.layout.layout", "reshard.layout.boxlist"),
    ("reshard.layout.layout", "reshard.layout.spec"),
}
"""Public values with methods whose work is done in a module above: owners, same_as, str."""


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str, *, inside_functions: bool) -> Iterator[str]:
    """The modules of the library that a module imports, at its top or inside functions.

    Imports for type checkers count.
    """
    inner = {
        id(node)
        for function in ast.walk(tree_of(module))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if (id(node) in inner) != inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif node.module in MODULES:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in below if name in MODULES)
            if any(name not in MODULES for name in below):
                yield node.module


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imports(name, inside_functions=False)) - {name} for name in MODULES}


@cache
def reachable(module: str) -> frozenset[str]:
    """All modules that a module imports, directly or not."""
    found: set[str] = set()
    pending = [module]
    while pending:
        for name in graph()[pending.pop()] - found:
            found.add(name)
            pending.append(name)
    return frozenset(found)


def test_rooms_are_small() -> None:
    counts = {
        room.relative_to(ROOT): sum(path.name != "__init__.py" for path in room.glob("*.py"))
        for room in ROOMS
    }
    assert not {str(room): n for room, n in counts.items() if n > MAX_MODULES}


@pytest.mark.parametrize("room", ROOMS[1:], ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_lists_its_files(room: Path) -> None:
    """The docstring of a room is a sentence and its files, each of them by name."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert text.split("\n")[0].rstrip().endswith((".", ":")), "begin with a sentence"
    here = {path.stem for path in room.glob("*.py")} - {"__init__"}
    here |= {path.parent.name for path in room.glob("*/__init__.py")}
    assert not {name for name in here if not re.search(rf"\b{name}\b", text)}, "not listed"
    listed = re.findall(r"^ +([a-z_]+)(?:/)?  +[a-z]", text, re.MULTILINE)
    assert not set(listed) - here, "listed, and not there"


def test_class_names_are_unique_in_a_package() -> None:
    found = defaultdict(set)
    for module in MODULES:
        package = ".".join(module.split(".")[:2])
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef):
                found[package, node.name].add(module)
    assert not {name: homes for name, homes in found.items() if len(homes) > 1}


def test_no_import_cycles() -> None:
    assert not [name for name in MODULES if name in reachable(name)]


def test_imports_inside_functions_hide_no_cycle() -> None:
    hidden = [
        f"{module} imports {name} inside a function"
        for module in MODULES
        for name in imports(module, inside_functions=True)
        if module in reachable(name) and module not in LAZY and (module, name) not in METHODS
    ]
    assert not hidden


@pytest.mark.parametrize(
    "package", sorted({m for m in MODULES if MODULES[m].name == "__init__.py"})
)
def test_no_module_hides_what_its_package_exports(package: str) -> None:
    """`from package import name` must not depend on whether the module was imported before."""
    exported = set(getattr(importlib.import_module(package), "__all__", ()))
    here = {path.stem for path in MODULES[package].parent.glob("*.py")}
    here |= {path.parent.name for path in MODULES[package].parent.glob("*/__init__.py")}
    assert not exported & here
