"""All ranks read the same cause, however long it is, and tolerate malformed ones."""

from __future__ import annotations

import pytest

from reshard.errors import DisagreementError, LiveError, MoveTimeoutError, PeerLostError
from reshard.live.session.control import MAX_CHARACTERS, MAX_TEXT, Cause


@pytest.mark.parametrize("error", [PeerLostError, MoveTimeoutError, DisagreementError, LiveError])
def test_a_cause_comes_back_as_the_error_it_was(error: type[LiveError]) -> None:
    told = Cause.from_json(Cause.of(error("rank 3 was lost"), 0).to_json().encode())
    assert type(told.error("")) is error
    assert str(told.error("round 2 of 3")) == "rank 3 was lost (round 2 of 3)"


@pytest.mark.parametrize("letter", ["x", "\N{GREEK SMALL LETTER ALPHA}", "\N{PILE OF POO}", '"'])
def test_a_long_cause_is_cut_alike_for_all(letter: str) -> None:
    cause = Cause("tensor", letter * 100_000, tag=3)
    once = Cause.from_json(cause.to_json().encode())
    assert len(once.text) == MAX_CHARACTERS
    assert Cause.from_json(once.to_json().encode()) == once
    assert once.tag == 3


def test_calls_of_other_sessions_come_along_while_they_are_few() -> None:
    few = Cause("disagree", "crossed", calls=(((0, 1, 2), 7), ((0, 1, 2, 3), 9)))
    assert Cause.from_json(few.to_json().encode()) == few
    many = Cause("disagree", "\N{GREEK SMALL LETTER ALPHA}" * 9999, calls=((tuple(range(256)), 1),))
    assert Cause.from_json(many.to_json().encode()).calls == many.calls
    assert len(many.to_json()) <= MAX_TEXT
    more = Cause("disagree", "crossed", calls=((tuple(range(257)), 1),))
    assert Cause.from_json(more.to_json().encode()).calls == ()


@pytest.mark.parametrize(
    "said",
    [
        b"", b"[]", b"{}", b'{"kind": 1}', b"\xff\xfe", b"null",
        b'{"kind": "late", "text": "x", "tag": Infinity}',
        b'{"kind": "late", "text": "x", "calls": [[1, 2]]}',
        b'{"kind": "late", "text": "x", "calls": 5}',
    ],
)  # fmt: skip
def test_what_is_no_cause_is_told_as_it_is(said: bytes) -> None:
    assert "cannot be read" in Cause.from_json(said).text
