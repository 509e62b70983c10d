"""How pytest-xdist shares out the tests: those of tests/ranks all go to one worker.

The mark `xdist_group` would say the same, but pytest 9.2 with pytest-xdist 3.8 passes over it
(pytest-xdist issue 1386).
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ONE_WORKER = "tests/ranks/"


class RanksOnOneWorker(LoadScopeScheduling):
    """Tests that share the pool of ranks are one piece of work; every other test is its own."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_WORKER if nodeid.startswith(ONE_WORKER) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """The scheduler for a plain `-n 2`; another `--dist` is left as it is."""
    return RanksOnOneWorker(config, log) if config.getoption("dist") == "load" else None
