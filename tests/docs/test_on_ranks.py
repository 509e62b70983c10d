"""What the documents show on several ranks runs on as many, in order, in one namespace."""

import contextlib
import re
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.docs.snippets import FENCE, ROOT
from tests.ranks.outcome import RankError
from tests.ranks.pool import fresh_ranks

ON_RANKS = re.compile(r"not run: on (\d+) ranks")
DOCUMENTS = [
    path
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if ON_RANKS.search(path.read_text())
]


def blocks_of(path: Path) -> tuple[int, list[str]]:
    """How many ranks a document speaks of, and its pieces of code, each at its line."""
    text, sizes, blocks = path.read_text(), set(), []
    for found in FENCE.finditer(text):
        note = ON_RANKS.match(found["note"] or "")
        if note and found["lang"] == "python":
            sizes.add(int(note[1]))
            line = text.count("\n", 0, found.start("body"))
            blocks.append("\n" * line + textwrap.dedent(found["body"]))
    (size,) = sizes
    return size, blocks


def run_blocks(rank: int, name: str, blocks: list[str]) -> None:
    """Documents begin with a process group, which these ranks have already."""
    del rank
    namespace: dict[str, object] = {"__name__": "__docs__"}
    ready = mock.patch.object(dist, "init_process_group")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), ready:
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_document_on_ranks(path: Path) -> None:
    size, blocks = blocks_of(path)
    with fresh_ranks(size) as ranks:
        ranks.run(run_blocks, path.name, blocks)


def test_there_are_documents_and_wrong_ones_are_noticed() -> None:
    assert "live.md" in [path.name for path in DOCUMENTS]
    with fresh_ranks(1) as ranks, pytest.raises(RankError, match=r"wrong\.md.*line 3"):
        ranks.run(run_blocks, "wrong.md", ["\n\nassert False"])
