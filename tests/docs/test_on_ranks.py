"""What the documents show on several ranks runs on as many, in order, in one namespace."""

import contextlib
import doctest
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.docs.snippets import DOCUMENTS, FENCE, ROOT, name_of
from tests.ranks.outcome import RankError
from tests.ranks.pool import Ranks, fresh_ranks

ON_RANKS = re.compile(r"not run: on (\d+) ranks")
PRINTED = re.compile(
    r"\s*<!-- prints on rank 0 -->\s*```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
ON_RANKS_PAGES = [path for path in DOCUMENTS if ON_RANKS.search(path.read_text())]


def blocks_of(path: Path) -> tuple[int, list[tuple[str, str]]]:
    """How many ranks a document speaks of, and its pieces of code, each at its line.

    With each the output that the document shows for rank 0, or nothing.
    """
    text, sizes, blocks = path.read_text(), set(), []
    for found in FENCE.finditer(text):
        note = ON_RANKS.match(found["note"] or "")
        if note and found["lang"] == "python":
            sizes.add(int(note[1]))
            line = text.count("\n", 0, found.start("body"))
            shown = PRINTED.match(text, found.end())
            code = "\n" * line + textwrap.dedent(found["body"])
            blocks.append((code, shown[1] if shown else ""))
    (size,) = sizes
    return size, blocks


def run_blocks(rank: int, name: str, blocks: list[str], folder: str) -> list[str]:
    """Run all blocks in a folder that all ranks see; what each of them prints.

    Documents begin with a process group, which these ranks have already.
    """
    del rank
    namespace: dict[str, object] = {"__name__": "__docs__"}
    ready = mock.patch.object(dist, "init_process_group")
    printed = []
    with contextlib.chdir(folder), ready:
        for block in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, name, "exec"), namespace)
            printed.append(output.getvalue())
    return printed


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
def test_document_on_ranks(path: Path, ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    size, blocks = blocks_of(path)
    code = [block for block, _ in blocks]
    printed, *_ = ranks_of(size).run(run_blocks, path.name, code, str(tmp_path))
    check = doctest.OutputChecker().check_output
    for (_, shown), found in zip(blocks, printed, strict=True):
        assert not shown or check(shown, found, doctest.ELLIPSIS), f"{found}\nis not\n{shown}"


def test_there_are_documents_and_wrong_ones_are_noticed(tmp_path: Path) -> None:
    assert "live.md" in [path.name for path in ON_RANKS_PAGES]
    assert sum(bool(shown) for _, shown in blocks_of(ROOT / "README.md")[1]) == 2
    with fresh_ranks(1) as ranks, pytest.raises(RankError, match=r"wrong\.md.*line 3"):
        ranks.run(run_blocks, "wrong.md", ["\n\nassert False"], str(tmp_path))
