"""A few of the inputs of the fuzzer, with every change; `make soak` runs many more."""

from tests.checkpoint.formats.fuzz import KINDS, damaged, fuzz
from tests.soak import cases


def test_damaged_inputs_are_errors_or_catalogs() -> None:
    run = fuzz(0, cases(600, 100_000))
    assert not run.failures, "\n".join(run.failures[:5])
    assert {"read", "damage", "unsupported"} <= run.outcomes.keys()


def test_inputs_are_of_every_kind_and_found_again_by_their_number() -> None:
    kinds = {damaged(seed)[0] for seed in range(100)}
    assert kinds == KINDS.keys()
    assert damaged(7) == damaged(7)
