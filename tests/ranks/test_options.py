"""Every option with every other, on random layouts and dtypes: values, bytes, messages, memory.

The oracle cuts numpy arrays and shares no code with reshard. A scene is up to four calls that are
in flight together, each up to three times; 300 scenes in the usual run, 20,000 in a soak.
"""

from __future__ import annotations

import pytest

from tests.ranks.options import Found, make_two_hosts, run_scenes
from tests.ranks.pool import Pool
from tests.soak import cases

AT_ONCE = 300


def check_found(found: list[Found]) -> None:
    """Every rank has what it must have, and together they sent what was planned."""
    problems = [problem for one in found for problem in one.problems]
    assert not problems, "\n".join(problems[:4])
    for key in {key for one in found for key in one.planned}:
        sent = [one.sent[key] for one in found if key in one.sent]
        planned = next(one.planned[key] for one in found if key in one.planned)
        total = tuple(sum(column) for column in zip(*sent, strict=True))
        assert total == planned, f"seed, flight, turn {key}: sent {total}, planned {planned}"


@pytest.mark.parametrize("first", range(0, cases(300, 20_000), AT_ONCE))
def test_options_with_each_other(pool: Pool, first: int) -> None:
    pool.run(make_two_hosts, 4)
    seeds = range(first, first + AT_ONCE)
    check_found(pool.run(run_scenes, 4, seeds, ranks=range(4), timeout=100))
