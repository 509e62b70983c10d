"""Every option with every other, on random layouts and dtypes: values, bytes, messages, memory.

The oracle cuts numpy arrays and shares no code with reshard. A case is up to four calls that are
in flight together, each made up to three times; 300 cases in the usual run, 20,000 in a soak.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.random_options import Found, make_two_hosts, run_batches
from tests.ranks.pool import Pool
from tests.soak import cases

AT_ONCE = 280


def batches() -> Iterator[tuple[int, range]]:
    """Numbers of ranks, and seeds."""
    for num_ranks, count in ((4, cases(280, 16_000)), (8, cases(20, 4000))):
        for first in range(0, count, AT_ONCE):
            yield num_ranks, range(first, min(first + AT_ONCE, count))


def check_found(found: list[Found], num_batches: int) -> None:
    """Every rank has what it must have, and together they sent what was planned."""
    problems = [problem for one in found for problem in one.problems]
    assert not problems, "\n".join(problems[:4])
    assert [one.num_batches for one in found] == [num_batches] * len(found)
    assert min(one.num_calls for one in found) >= num_batches // 4
    assert sum(len(one.planned) for one in found) >= num_batches // 4
    for key in {key for one in found for key in one.planned}:
        sent = [one.sent[key] for one in found if key in one.sent]
        planned = next(one.planned[key] for one in found if key in one.planned)
        total = tuple(sum(column) for column in zip(*sent, strict=True))
        assert total == planned, f"seed, call, repeat {key}: sent {total}, planned {planned}"


@pytest.mark.parametrize(("num_ranks", "seeds"), [*batches()], ids=str)
def test_options_with_each_other(pool: Pool, num_ranks: int, seeds: range) -> None:
    pool.run(make_two_hosts, num_ranks)
    found = pool.run(run_batches, num_ranks, seeds, ranks=range(num_ranks), timeout=100)
    check_found(found, len(seeds))
