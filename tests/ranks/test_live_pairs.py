"""Live equals simulate on random pairs of layouts: 500 on 4 ranks and 500 on 8 in a soak."""

import pytest

from tests.ranks.live import check_told, run_cases
from tests.ranks.pool import Pool
from tests.soak import cases


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_random_pairs(pool: Pool, num_ranks: int) -> None:
    seeds = range(cases(220 if num_ranks == 4 else 60, 520))
    told = pool.run(run_cases, num_ranks, seeds, False, ranks=range(num_ranks), timeout=100)
    check_told(told, cases(200 if num_ranks == 4 else 50, 500))
