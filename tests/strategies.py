"""Hypothesis strategies: the generator of the fuzzer, with hypothesis making its choices.

`st.randoms` hands the generator a `random.Random` whose every choice hypothesis records, so that a
failing case shrinks to fewer ranks, fewer dims and simpler words.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

from tests import generate
from tests.cases import Case, Side
from tests.state_cases import StateCase, random_state

Drawn = TypeVar("Drawn")


def drawn_by(make: Callable[[Random], Drawn]) -> st.SearchStrategy[Drawn]:
    return st.randoms(use_true_random=False).map(make)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """0 to 4 dims, sizes 0 and 1 among them, at most 2000 elements."""
    return drawn_by(generate.shape)


def meshes() -> st.SearchStrategy[generate.Mesh]:
    """1 to 3 axes of 1 to 4 over at most 12 ranks: contiguous, offset, permuted or scattered."""
    return drawn_by(generate.mesh)


def sides() -> st.SearchStrategy[tuple[Side, tuple[int, ...]]]:
    """A layout and a shape that it fits: every word and suffix, or boxes."""
    return drawn_by(generate.random_side)


def cases(sums: bool | None = None, by_boxes: bool | None = None) -> st.SearchStrategy[Case]:
    """A pair of layouts to move between; `sums` and `by_boxes` force or forbid these."""
    return drawn_by(lambda rng: generate.random_case(rng, sums, by_boxes))


def states() -> st.SearchStrategy[StateCase]:
    """A state dict of 1 to 5 tensors over shared meshes, with renames, joins and casts."""
    return drawn_by(random_state)
