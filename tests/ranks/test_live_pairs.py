"""Live equals simulate, on 500 random pairs of layouts on 4 ranks and 500 on 8."""

import pytest

from tests.ranks.live import check_told, run_cases
from tests.ranks.pool import Pool


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_random_pairs(pool: Pool, num_ranks: int) -> None:
    told = pool.run(run_cases, num_ranks, range(520), False, ranks=range(num_ranks), timeout=100)
    check_told(told, 500)
