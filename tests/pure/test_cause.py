"""A cause is told alike to all ranks, however long it is and whatever a peer sends."""

from __future__ import annotations

import pytest

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError, PeerLostError
from reshard.run.live.cause import MOST_CHARACTERS, Cause


@pytest.mark.parametrize("error", [PeerLostError, MoveTimeoutError, DisagreementError, LiveError])
def test_a_cause_comes_back_as_the_error_it_was(error: type[LiveError]) -> None:
    told = Cause.from_json(Cause.of(error("rank 3 was lost")).to_json().encode())
    assert type(told.error("")) is error
    assert str(told.error("round 2 of 3")) == "rank 3 was lost (round 2 of 3)"


@pytest.mark.parametrize("letter", ["x", "\N{GREEK SMALL LETTER ALPHA}", "\N{PILE OF POO}", '"'])
def test_a_long_cause_is_cut_alike_for_all(letter: str) -> None:
    cause = Cause("tensor", letter * 100_000, tag=3)
    once = Cause.from_json(cause.to_json().encode())
    assert len(once.text) == MOST_CHARACTERS
    assert Cause.from_json(once.to_json().encode()) == once
    assert once.tag == 3


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"kind": 1}', b"\xff\xfe", b"null"])
def test_what_is_no_cause_is_told_as_it_is(said: bytes) -> None:
    assert "cannot be read" in Cause.from_json(said).text
