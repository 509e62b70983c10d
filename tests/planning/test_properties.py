"""The central property on pairs drawn by hypothesis; the same pairs in every run.

`python -m tests.fuzz` runs it on as many other pairs as one has time for.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests import strategies
from tests.cases import Case
from tests.checks import check_case
from tests.soak import cases
from tests.state_cases import StateCase, check_state

PAIRS = settings(
    max_examples=cases(32, 250),
    derandomize=True,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def hold(case: Case | StateCase) -> None:
    try:
        check_case(case) if isinstance(case, Case) else check_state(case)
    except Exception as error:
        error.add_note(case.snippet())
        raise


# Several seeds rather than more examples, so that xdist can spread them over processes.
@pytest.mark.parametrize("number", range(5))
def test_layouts(number: int) -> None:
    @seed(number)
    @PAIRS
    @given(strategies.cases(sums=False, by_boxes=False))
    def holds(case: Case) -> None:
        hold(case)

    holds()


@PAIRS
@given(strategies.cases(sums=False, by_boxes=True))
def test_boxes(case: Case) -> None:
    hold(case)


@PAIRS
@given(strategies.cases(sums=True, by_boxes=False))
def test_sums(case: Case) -> None:
    hold(case)


@PAIRS
@given(strategies.cases())
def test_everything(case: Case) -> None:
    hold(case)


@PAIRS
@given(strategies.states())
def test_state_dicts(case: StateCase) -> None:
    hold(case)
