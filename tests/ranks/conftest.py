"""One pool for all tests of this folder, and one worker of pytest-xdist that runs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.pool import Pool

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # Known without pytest-xdist as well.
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Takes effect with --dist loadgroup; without it every worker has a pool of its own.
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks, started by the first test that runs something on them."""
    ranks = Pool(size=8)
    yield ranks
    ranks.close()
