"""Live equals simulate, on state dicts: names joined, stacked, split, padded, cropped and cast."""

import pytest

from tests.ranks.live import check_told, run_cases
from tests.ranks.pool import Pool
from tests.soak import cases


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_random_state_dicts(pool: Pool, num_ranks: int) -> None:
    seeds = range(cases(8, 120))
    told = pool.run(run_cases, num_ranks, seeds, True, ranks=range(num_ranks), timeout=100)
    check_told(told, len(seeds))
