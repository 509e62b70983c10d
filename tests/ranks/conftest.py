"""One pool for all tests of this folder; tests/conftest.py gives them all to one worker."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks, started by the first test that runs something on them."""
    ranks = Pool(size=8)
    yield ranks
    ranks.close()
