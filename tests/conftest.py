"""How pytest-xdist shares out the tests: those of tests/ranks all go to one worker.

The mark `xdist_group` would say the same, but pytest 9.2 with pytest-xdist 3.8 passes over it
(pytest-xdist issue 1386).
"""

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.soak import soaking

ONE_WORKER = "tests/ranks/"


class RanksOnOneWorker(LoadScopeScheduling):
    """Tests that share the pool of ranks are one piece of work; every other test is its own."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_WORKER if nodeid.startswith(ONE_WORKER) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """The scheduler for a plain `-n 2`; another `--dist` is left as it is."""
    return RanksOnOneWorker(config, log) if config.getoption("dist") == "load" else None


SOAKING = {
    "ranks/test_documents.py",
    "ranks/test_dtensor_meshes.py",
    "ranks/test_gradients_adjoint.py",
    "ranks/test_live_calls.py",
    "ranks/test_live_hosts.py",
    "ranks/test_live_options.py",
    "ranks/test_live_progress.py",
    "device/test_nccl_moves.py",
    "device/test_device_wire.py",
    "examples/test_examples.py",
}
"""Tests that take minutes on two busy cores; `make soak` runs them, `make test` does not."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what soaks, unless asked for."""
    here = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if here in SOAKING and not soaking() else None
