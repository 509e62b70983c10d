"""The backward of a move is its adjoint, on 200 random pairs on 4 ranks and 200 on 8."""

import pytest

from tests.ranks.pool import Pool
from tests.soak import cases
from tests.tensors.adjoint import check_told, run_cases


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("first", [0, 125])
def test_random_pairs(pool: Pool, num_ranks: int, first: int) -> None:
    seeds = range(first, first + cases(6, 125))
    told = pool.run(run_cases, num_ranks, seeds, ranks=range(num_ranks), timeout=110)
    check_told(told, cases(5, 100))
