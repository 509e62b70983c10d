"""What the documents show on several ranks runs on as many, in order, in one namespace."""

import contextlib
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.docs.snippets import DOCUMENTS, FENCE, name_of
from tests.ranks.outcome import RankError
from tests.ranks.pool import Ranks, fresh_ranks

ON_RANKS = re.compile(r"not run: on (\d+) ranks")
ON_RANKS_PAGES = [path for path in DOCUMENTS if ON_RANKS.search(path.read_text())]


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


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Ranks that the documents share, by number; a document that fails leaves new ones behind."""
    with contextlib.ExitStack() as stack:
        started: dict[int, Ranks] = {}

        def get(size: int) -> Ranks:
            if size not in started or not started[size].usable:
                started[size] = stack.enter_context(fresh_ranks(size))
            return started[size]

        yield get


@pytest.mark.parametrize("path", ON_RANKS_PAGES, ids=name_of)
def test_document_on_ranks(path: Path, ranks_of: Callable[[int], Ranks]) -> None:
    size, blocks = blocks_of(path)
    ranks_of(size).run(run_blocks, path.name, blocks)


def test_there_are_documents_and_wrong_ones_are_noticed() -> None:
    assert "live.md" in [path.name for path in ON_RANKS_PAGES]
    with fresh_ranks(1) as ranks, pytest.raises(RankError, match=r"wrong\.md.*line 3"):
        ranks.run(run_blocks, "wrong.md", ["\n\nassert False"])
