"""The documents and docstrings say what the code does."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.docs.snippets import DOCUMENTS, ROOT, name_of, run_file

MODULES = [
    ".".join(p.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for p in sorted(ROOT.glob("src/reshard/**/*.py"))
    if p.name != "__main__.py"
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_document(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(path, tmp_path)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    if name.endswith("gpu_kernel"):
        pytest.importorskip("triton", reason="Triton comes with torch for GPUs only")
    report = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert report.failed == 0


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```\n",
        "```python\nx = 1\n```\n```python\n>>> x + 1\n3\n```\n",
        "```console\n$ reshard --no-such-option\n```\n",
        "<!-- exit: 2 -->\n```console\n$ reshard --no-such-option\nother\n```\n",
        "1. in a list\n   ```sh\n   reshard --no-such-option\n   ```\n",
    ],
)
def test_a_wrong_document_is_noticed(text: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.md").write_text(text)
    with pytest.raises(AssertionError):
        run_file(tmp_path / "wrong.md", tmp_path)
