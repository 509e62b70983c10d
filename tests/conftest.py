"""How pytest-xdist shares out the tests: those that use the pool of ranks all go to one worker.

The mark `xdist_group` would say the same, but pytest 9.2 with pytest-xdist 3.8 passes over it
(pytest-xdist issue 1386).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.loopback import name_loopback
from tests.processes import collect_rarely
from tests.soak import soaking

if TYPE_CHECKING:
    from tests.ranks.pool import Pool

name_loopback()

WANTED = ("explicit", "reuse", "generate")

# The usual run has the same cases each time, and no test fails because the machine is busy. A case
# that fails is not made smaller there: that can outlast the timeout of a test, which ends a worker.
hypothesis.settings.register_profile(
    "ours",
    derandomize=not soaking(),
    deadline=None,
    phases=[phase for phase in hypothesis.Phase if soaking() or phase.name in WANTED],
)
hypothesis.settings.load_profile("ours")
if not soaking():
    # It draws constants of all modules that a process has imported so far: which ones, and so which
    # cases, would depend on the tests that ran there before.
    assert hasattr(providers, "_get_local_constants"), "hypothesis looks for constants elsewhere"
    providers._get_local_constants = lambda: providers._local_constants

ONE_WORKER = {
    "tests/ranks/": "engine",
    "tests/live/session/": "failures",
    "tests/live/failure/": "failures",
    "tests/live/": "engine",
    "tests/tensors/": "engine",
    "tests/sharded/": "sharded",
    "tests/nn/shard/": "sharded",
    "tests/nn/activations/": "sharded",
    "tests/checkpoint/live/": "sharded",
    "tests/show/test_page_in_browser.py": "browser",
    "tests/show/test_explore.py": "browser",
}
"""Folders and files whose tests share a pool of ranks, or a browser, and the piece of work that
they are; the first that fits counts."""
OWN_RANKS = ("broken_peers", "interrupted", "killed", "two_hosts")
"""Files there whose tests start ranks of their own."""
WAITING = ("failures", *(f"test_{name}.py" for name in (*OWN_RANKS, "stand_in_moves", "demo")))
"""What the names of pieces of work contain that mostly wait, for timeouts or for processes."""
BY_FILE = ("tests/rules/", "tests/structure/")
"""Folders where tests of a file share what the first of them has parsed or imported."""


SOAK_SECONDS = 3600
"""How long a test may take that runs all its cases."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if soaking():
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SOAK_SECONDS))


@pytest.fixture(scope="session")
def session_pool() -> Iterator["Pool"]:
    from tests.ranks.pool import Pool  # imports torch, which many tests do without

    ranks = Pool(size=8)
    yield ranks
    ranks.close()


@pytest.fixture
def pool(session_pool: "Pool") -> "Pool":
    """Eight gloo ranks, started by the first test that runs something on them."""
    session_pool.renew()
    return session_pool


class RanksOnOneWorker(LoadScopeScheduling):
    """Tests that share the pool of ranks are one piece of work, as are those of one file beside
    them; every other test is its own.

    Of three or more workers the last one runs the tests that mostly wait, and no others: beside
    one worker per core it costs little, and no core is idle while they wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a worker the first piece of its kind; `LoadScopeScheduling` takes the first."""
        waits = len(self.nodes) > 2 and node is self.nodes[-1]
        fits = (name for name in self.workqueue if any(w in name for w in WAITING) == waits)
        first = next(fits, None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        elif waits:
            node.shutdown()
            return
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        work = next((one for path, one in ONE_WORKER.items() if file.startswith(path)), None)
        if work is None:
            return file if file.startswith(BY_FILE) else nodeid
        own = any(file.endswith(f"test_{name}.py") for name in OWN_RANKS)
        return file if own else work


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """The scheduler for a plain `-n 3`; another `--dist` is left as it is."""
    return RanksOnOneWorker(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage need look at them."""
    collect_rarely()


SOAKING = {"device/test_nccl_moves.py"}
"""Tests that take minutes, of what others test as well: only `make soak` runs them."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what soaks, unless asked for."""
    here = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if here in SOAKING and not soaking() else None
