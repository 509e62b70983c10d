"""Random redistributions against the truth and against torch: values, gradients, refusals."""

from collections import Counter

import pytest

from tests.ranks.pool import Pool
from tests.soak import cases, soaking
from tests.tensors.dtensor.random_redistributions import refused_alone, run_cases, summary

AT_ONCE = 100


@pytest.mark.timeout(1800 if soaking() else 300)
def test_random_redistributions(pool: Pool) -> None:
    """Whatever torch does right is done right here, and nothing is done wrong."""
    counts: Counter[tuple[str, str]] = Counter()
    alone: list[str] = []
    number = cases(25, 2000)
    for start in range(0, number, AT_ONCE):
        seeds = range(start, min(number, start + AT_ONCE))
        told = pool.run(run_cases, seeds, timeout=110)[:4]
        problems = [problem for one in told for problem in one.problems]
        assert not problems, "\n\n".join(problems[:4])
        counts += summary(told)
        alone += refused_alone(told)
    for (ours, torchs), count in sorted(counts.items()):
        print(f"{count} {ours} here, {torchs} by torch")
    assert counts["right", "right"] > number / 2
    # torch mixes a norm with sums, and what comes out depends on which it does first.
    assert [text for text in alone if "which of them is done first" not in text] == []
