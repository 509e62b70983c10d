"""The model of how calls are matched, explored in full; test_matching tests the engine with it."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.live.session.matching import Explored, Program, explore
from tests.soak import cases

RANKS, CALLS = 3, 3
PLACES = list(product(range(RANKS), range(CALLS)))


def mixed(found: Explored) -> list[object]:
    """Completed calls in which ranks were in different iterations."""
    return [met for met in found.met if len({iteration for _, iteration in met}) > 1]


@pytest.mark.parametrize("tags", [False, True])
def test_no_interrupts_mix_or_hang(tags: bool) -> None:
    """Any three calls may be interrupted, before they are entered or after, in any order."""
    num_states = 0
    for chosen in [*combinations(PLACES, 3)][:: cases(2, 1)]:
        found = explore(Program(RANKS, CALLS, interrupted=frozenset(chosen), tags=tags))
        assert not mixed(found), chosen
        assert not found.stuck, chosen
        # The ranks are in step at the end: the next call of each has the same number.
        assert found.ends == {(CALLS,) * RANKS}, chosen
        num_states += found.num_states
    assert num_states > 1000


def test_an_undisturbed_call_after_interrupts_can_complete() -> None:
    found = explore(Program(RANKS, CALLS, interrupted=frozenset({(1, 0), (1, 1)})))
    assert {(rank, 2) for rank in range(RANKS)} in [set(met) for met in found.met]


def test_a_death_ends_all_waits() -> None:
    for place in PLACES:
        found = explore(Program(RANKS, CALLS, dead=frozenset({place})))
        assert not mixed(found)
        assert not found.stuck


def test_tags_keep_a_call_that_is_left_out_from_mixing() -> None:
    for place in PLACES:
        program = Program(RANKS, CALLS + 1, left_out=frozenset({place}), tags=True)
        found = explore(program)
        assert not mixed(found), place
        later = [i for i in range(CALLS + 1) if i > place[1]]
        met = [set(one) for one in found.met]
        for after in later:
            assert {(r, after) for r in range(RANKS)} in met, (place, after)


def test_the_model_can_fail() -> None:
    """Without tags a call that is left out mixes; so does one that uses up no number."""
    left = explore(Program(RANKS, CALLS, left_out=frozenset({(1, 0)})))
    assert mixed(left)
    forgotten = Program(RANKS, CALLS, interrupted=frozenset({(1, 0)}), forgets_numbers=True)
    assert mixed(explore(forgotten))
