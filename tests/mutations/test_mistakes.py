"""The mistakes that `make mutations` plants are still in the source, once each."""

from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, mutations


def test_there_are_mistakes_for_every_room() -> None:
    rooms = [key.partition(".")[0] for key in mutations()]
    least = {"planning": 5, "live": 6, "checkpoint": 5, "sharded": 4}
    assert all(rooms.count(room) >= count for room, count in least.items())


@pytest.mark.parametrize("mutation", mutations().values(), ids=mutations().keys())
def test_a_mistake_can_be_planted(mutation: Mutation) -> None:
    """What it changes stands there once, is not the same afterwards, and has tests."""
    text = (ROOT / "src/reshard" / mutation.file).read_text()
    assert text.count(mutation.before) == 1, "change the table with the code"
    assert mutation.after not in ("", mutation.before)
    assert all((ROOT / "tests" / one).exists() for one in mutation.tests.split())
    assert Path(mutation.file).suffix == ".py"
