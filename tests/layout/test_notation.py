"""The notation: every line of the grammar, texts that read back, and texts meant to hurt."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.layout.notation import parse
from reshard.layout.words import (
    Chunk,
    Cyclic,
    Packed,
    Ragged,
    Segment,
    Words,
    ZigZag,
    axes_of,
)
from tests import strategies
from tests.cases import Side
from tests.soak import cases

EXAMPLES = settings(max_examples=cases(70, 120), derandomize=True, deadline=None)
MAX_SECONDS = cases(3, 10)

TP, DP, KV = Chunk("tp"), Chunk("dp"), Chunk("kv")

# Each line of the grammar, with its meaning as words and the text that is written back.
GRAMMAR: list[tuple[str, Words, str | None]] = [
    ("-", Words(((),)), None),
    ("...", Words((), 0), None),
    ("tp", Words(((TP,),)), None),
    ("tp -", Words(((TP,), ())), None),
    ("- ... tp", Words(((), (TP,)), 1), None),
    ("(dp tp)", Words(((DP, TP),)), None),
    ("(tp)", Words(((TP,),)), "tp"),
    ("tp*128", Words(((Chunk("tp", 128),),)), None),
    ("tp*1", Words(((TP,),)), "tp"),
    ("tp:128", Words(((Cyclic("tp", 128),),)), None),
    ("tp[3,1,4,2]", Words(((Ragged("tp", (3, 1, 4, 2)),),)), None),
    ("tp[0,0]", Words(((Ragged("tp", (0, 0)),),)), None),
    ("tp~", Words(((ZigZag("tp"),),)), None),
    ("tp{8,4}", Words(((Packed((Segment(8, (TP,)), Segment(4, (TP,)))),),)), None),
    ("(tp dp){8}", Words(((Packed((Segment(8, (TP, DP)),)),),)), None),
    ("tp*4{8,4}", Words(((Packed(tuple(Segment(s, (Chunk("tp", 4),)) for s in (8, 4))),),)), None),
    ("{8 tp, 4}", Words(((Packed((Segment(8, (TP,)), Segment(4, ()))),),)), "{8 tp, 4 -}"),
    ("{8 -, 4 -}", Words(((Packed((Segment(8, ()), Segment(4, ()))),),)), None),
    (
        "{8 (kv dp), 4 kv, 4 kv}",
        Words(((Packed((Segment(8, (KV, DP)), Segment(4, (KV,)), Segment(4, (KV,)))),),)),
        None,
    ),
    (
        "(tp{8,4} dp) -",
        Words(((Packed((Segment(8, (TP,)), Segment(4, (TP,)))), DP), ())),
        None,
    ),
    (
        "{4 {2 tp, 2 -}}",
        Words(((Packed((Segment(4, (Packed((Segment(2, (TP,)), Segment(2, ()))),)),)),),)),
        None,
    ),
    ("- | on pp=2", Words(((),), on=(("pp", (2,)),)), None),
    ("- | on pp=3,0,3 ep=1", Words(((),), on=(("pp", (0, 3)), ("ep", (1,)))), "- | on pp=0,3 ep=1"),
    ("- | sum dp", Words(((),), reduce=("sum", ("dp",))), None),
    ("- | avg dp cp", Words(((),), reduce=("avg", ("dp", "cp"))), None),
    ("- | max dp", Words(((),), reduce=("max", ("dp",))), None),
    ("- | min dp", Words(((),), reduce=("min", ("dp",))), None),
    ("- | prod dp", Words(((),), reduce=("prod", ("dp",))), None),
    ("... | flat dp", Words((), 0, flat=(DP,)), None),
    ("- | flat dp[0,1500]", Words(((),), flat=(Ragged("dp", (0, 1500)),)), None),
    ("- | flat (dp tp)", Words(((),), flat=(DP, TP)), None),
    ("- | without 3,7", Words(((),), without=(3, 7)), None),
    ("- | without 7,3-5,4", Words(((),), without=(3, 4, 5, 7)), "- | without 3-5,7"),
    (
        "tp - | on pp=1 | sum ep | flat dp | without 0",
        Words(((TP,), ()), None, (("pp", (1,)),), ("sum", ("ep",)), (DP,), (0,)),
        None,
    ),
    ("  tp   -|without 1 ", Words(((TP,), ()), without=(1,)), "tp - | without 1"),
    ("tp\n-", Words(((TP,), ())), "tp -"),
    ("tp * 8", Words(((Chunk("tp", 8),),)), "tp*8"),
    ("onn _sum flat2", Words(((Chunk("onn"),), (Chunk("_sum"),), (Chunk("flat2"),))), None),
]


@pytest.mark.parametrize(("text", "words", "canonical"), GRAMMAR, ids=[g[0] for g in GRAMMAR])
def test_every_line_of_the_grammar(text: str, words: Words, canonical: str | None) -> None:
    assert parse(text) == words
    assert str(words) == (canonical or text)
    assert parse(str(words)) == words


@EXAMPLES
@given(strategies.sides())
def test_round_trips(drawn: tuple[Side, tuple[int, ...]]) -> None:
    side, _ = drawn
    if side.boxes is None:
        words = parse(side.layout)
        assert parse(str(words)) == words
        assert str(parse(str(words))) == str(words)


def test_axes_in_order() -> None:
    assert axes_of(parse("(b {2 (c a), 2 a} d*3)").dims[0]) == ("b", "c", "a", "d")


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("", "no word", '"..."'),
        ("|", "no word", '"..."'),
        ("tp |", "the end", "one of on, sum"),
        ("tp | tp", '"tp" at character 6', "one of on, sum"),
        ("tp | on", "the end", "axis=coordinates"),
        ("tp | on pp", "the end", '"="'),
        ("tp | on pp=", "the end", "a number"),
        ("tp | on pp=-1", '"-"', "a number"),
        ("tp | sum", "the end", "addends"),
        ("tp | flat", "the end", "an axis name"),
        ("tp | flat -", '"-"', "an axis name"),
        ("tp | without", '""', "8 or 8-11"),
        ("tp | without x", '"x"', "8 or 8-11"),
        ("tp | without 5-3", '"5-3"', "backwards"),
        ("- | sum dp | on pp=1", '"on"', "order"),
        ("- | flat dp | flat tp", '"flat"', "repeated"),
        ("- | without 1 | flat dp", '"1 | flat dp"', "8 or 8-11"),
        ("()", '"()"', '"-"'),
        ("(tp", "the end", "an axis name"),
        ("tp)", '")" at character 3', "an axis name"),
        ("(-)", '"-" at character 2', "an axis name"),
        ("tp*", "the end", "a number"),
        ("tp*0", '"0"', "at least 1"),
        ("tp:0", '"0"', "at least 1"),
        ("tp*-1", '"-"', "a number"),
        ("tp[]", '"]"', "a number"),
        ("tp[1,]", '"]"', "a number"),
        ("tp[1 2]", '"2"', '"]"'),
        ("tp{}", '"}"', "a number"),
        ("tp{1 tp}", '"tp"', '"}"'),
        ("{tp}", '"tp"', "a number"),
        ("{4 tp", "the end", '"}"'),
        ("*4", '"*"', "an axis name"),
        ("4", '"4"', "an axis name"),
        ("tp,dp", '","', "an axis name"),
        ("sum", '"sum"', "an axis name"),
        ("tp on", '"on"', "an axis name"),
        ("... tp ...", '"..."', "once"),
        ("..", '"."', "an axis name"),
        ("t\u00e9", '"\u00e9"', "a"),
        ("tp\0", "x00", "a"),
    ],
)
def test_what_is_wrong_and_what_was_expected(text: str, found: str, expected: str) -> None:
    with pytest.raises(rs.NotationError) as caught:
        parse(text)
    message = str(caught.value)
    assert found in message, message
    assert expected in message.partition(found)[2], message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    ["tp tp", "(tp tp)", "tp | on tp=0", "tp | sum tp", "tp | flat tp", "- | sum dp dp",
     "- | on dp=0 dp=1", "{4 (tp tp)}", "{4 tp, 4 tp} tp", "tp{2,2} tp", "(tp{2} tp)"],
)  # fmt: skip
def test_an_axis_has_one_place(text: str) -> None:
    with pytest.raises(rs.NotationError, match=r'axis "[td]p" appears twice'):
        parse(text)


def test_segments_of_one_word_may_share_axes() -> None:
    assert parse("{4 tp, 4 tp, 2 (tp dp)}")


LIMIT = 1 << 20
LENGTH = cases(LIMIT // 4, LIMIT)
LONG = {
    "a text over the limit": "a" * (LIMIT + 1),
    "open brackets": "(" * LENGTH,
    "closed brackets": ")" * LENGTH,
    "nested segments": "{1 " * (LENGTH // 3),
    "nested groups": "(" * 400 + "tp" + ")" * 400,
    "segments of segments of segments": "tp" + "{1}" * (LENGTH // 4),
    "segments that double": "tp" + "{1,1}" * 40,
    "segments that multiply": "tp" + ("{" + "1," * 999 + "1}") * 3,
    "a long number": "tp*" + "9" * (LENGTH - 10),
    "a long rank": "- | without " + "9" * (LENGTH - 20),
    "many long ranges of ranks": "- | without " + ",".join(["0-9999999"] * 1000),
    "bars": "|" * LENGTH,
    "dots": "... " * (LENGTH // 4),
    "commas": "tp[" + "," * (LENGTH - 5),
    "an axis again and again": "tp " * (LENGTH // 3),
    "one word that never ends": "tp[" + "1," * (LENGTH // 2 - 5),
}
ODD = {
    "other digits": "tp*\u0661",
    "superscripts": "tp*\u00b2",
    "other digits in ranks": "- | without \u0661",
    "a wide space": "tp\u3000(",
    "new lines": "tp\n\n)",
    "an escape": "\x1b[31mtp",
}


SEGMENTS = [kind for kind in LONG if kind.startswith("segments")]
"""They may take more memory."""


@pytest.mark.timeout(60, method="signal")
@pytest.mark.parametrize("kind", [*SEGMENTS, *ODD])
def test_hostile_texts_are_refused_quickly(kind: str) -> None:
    start = time.process_time()
    with pytest.raises(rs.NotationError) as caught:
        parse((LONG | ODD)[kind])
    check_refusal(kind, time.process_time() - start, str(caught.value))


def check_refusal(kind: str, seconds: float, message: str) -> None:
    assert seconds < MAX_SECONDS, kind
    assert message, f"{kind} was not refused"
    assert "\n" not in message, kind
    assert len(message) < 1000, f"{kind}: a message of {len(message)} characters"


def test_long_hostile_texts_are_refused_quickly_and_need_little_memory() -> None:
    """All of them in one process that may not grow beyond 1 GiB."""
    kinds = [kind for kind in LONG if kind not in SEGMENTS]
    code = (
        "import json, sys, resource, time\n"
        "from reshard.errors import NotationError\n"
        "from reshard.layout.notation import parse\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30}))\n"
        "for line in sys.stdin:\n"
        "    start, message = time.process_time(), ''\n"
        "    try: parse(line[:-1])\n"
        "    except NotationError as error: message = str(error)\n"
        "    print(json.dumps([time.process_time() - start, message]))\n"
    )
    given_to = "".join(LONG[kind] + "\n" for kind in kinds)
    done = subprocess.run(
        [sys.executable, "-c", code], input=given_to, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr[-500:]
    for kind, line in zip(kinds, done.stdout.splitlines(), strict=True):
        check_refusal(kind, *json.loads(line))


@pytest.mark.timeout(60, method="signal")
@pytest.mark.parametrize(
    "text",
    [
        "- " * (LENGTH // 2),
        "a" * LENGTH,
        "tp[" + "1," * (LENGTH // 2 - 5) + "1]",
        "{" + "1 tp," * (LENGTH // 6) + "1}",
        " ".join(f"a{i}" for i in range(100_000)),
        "(" + " ".join(f"a{i}" for i in range(100_000)) + ")",
    ],
    ids=["dims", "a name", "sizes", "segments", "axes", "cuts"],
)
def test_long_texts_that_make_sense_are_read_quickly(text: str) -> None:
    start = time.process_time()
    words = parse(text)
    assert time.process_time() - start < MAX_SECONDS
    assert len(str(words)) >= len(text) - 1


@EXAMPLES
@given(st.text(alphabet="tdp -()[]{}*:~|.,=0123onsumflatwi\n\u00b2", max_size=30))
def test_any_text_is_a_layout_or_one_error(text: str) -> None:
    words, message = None, ""
    try:
        words = parse(text)
    except rs.NotationError as error:
        message = str(error)
    assert "\n" not in message
    assert words is None or parse(str(words)) == words


@EXAMPLES
@given(strategies.sides(), st.randoms(use_true_random=False))
def test_damaged_texts_are_read_or_refused(drawn: tuple[Side, tuple[int, ...]], rng) -> None:
    """A valid text with a few characters changed is still a layout or one error."""
    side, shape = drawn
    assume(side.boxes is None)
    text = list(side.layout)
    for _ in range(rng.randint(1, 3)):
        text[rng.randrange(len(text))] = rng.choice("tp1,{}()[]|.-* ")
    mesh, message = rs.Mesh.parse(side.mesh), ""
    try:
        layout = rs.Layout(mesh, "".join(text))
        for rank in itertools.islice(mesh.ranks, 3):
            layout.pieces(rank, shape)
    except rs.ReshardError as error:
        message = str(error)
    assert "\n" not in message
