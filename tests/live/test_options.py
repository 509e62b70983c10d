"""Invalid options of a move are refused in one line, before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import LiveError
from reshard.live.inputs.request import Options, options_from


def test_what_was_given_is_kept() -> None:
    assert options_from({"timeout": 5, "device": "cpu"}) == Options(timeout=5, device="cpu")
    assert options_from({}) == Options()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeot": 5}, "did you mean timeout=?"),
        ({"colour": 5}, "it takes "),
        ({"timeout": 0}, "a timeout of 0"),
        ({"timeout": None}, "a timeout of None"),
        ({"timeout": float("nan")}, "a timeout of nan"),
        ({"timeout": "60"}, "a timeout of '60'"),
        ({"deadline": -1}, "a deadline of -1"),
        ({"transport": "rdma"}, "none of auto, peer, shared, network"),
        ({"check": "sometimes"}, "none of first, always, never"),
        ({"tag": [1]}, "tag= is a list: give a number or a short text"),
        ({"tag": True}, "tag= is a bool"),
        ({"tag": -1}, "tag=-1: a number is at least 0"),
        ({"tag": "x" * 201}, "tag= has 201 characters: 200 at most"),
        ({"device": "gpu"}, 'give "cpu", "cuda"'),
        ({"device": 1.5}, 'give "cpu", "cuda"'),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(LiveError) as caught:
        options_from(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
