"""Formulas, patterns and templates of rules files, against Python's own and brute force."""

import contextlib
import fnmatch
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RulesError
from reshard.rules.language import (
    Formula,
    Pattern,
    Template,
    matches,
    matching,
    parse_places,
)

NUMBERS = {"i": 7, "e": 0, "num_layers": 32, "pp_size": 4}
LEAVES = st.one_of(st.integers(0, 99).map(str), st.sampled_from(sorted(NUMBERS)))


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["+", "-", "*", "//", "%", " // ", " - "])
    return st.one_of(
        st.tuples(inner, signs, inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    )


@given(st.recursive(LEAVES, _joined, max_leaves=8))
def test_formulas_mean_what_they_mean_in_python(text: str) -> None:
    try:
        expected = eval(text, {"__builtins__": {}}, NUMBERS)
    except ZeroDivisionError:
        with pytest.raises(RulesError, match="divides by zero"):
            Formula.parse(text).value(NUMBERS)
        return
    assert Formula.parse(text).value(NUMBERS) == expected


@given(st.text(alphabet="i12+-*/%()=, \n.{}__'x", max_size=40))
def test_any_text_is_a_formula_or_one_error(text: str) -> None:
    with contextlib.suppress(RulesError):
        Formula.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the end, expected a number, a name or"),
        ("i //", "found the end"),
        ("i ** 2", r'found "\*"'),
        ("i / 2", 'found "/"'),
        ("(i", r'expected "\)"'),
        ("i j", 'found "j", expected an operator'),
        (")", r'found "\)", expected a number'),
        ("i)", r'found "\)", expected an operator'),
        ("(i j)", r'found "j", expected "\)"'),
        ("i if i else 2", 'found "if"'),
        ("lambda: 1", 'found ":"'),
        ("f(i)", r'found "\("'),
        ("i.real", r'found "\."'),
        ("1" * 20, "beyond"),
        ("(" * 30 + "i" + ")" * 30, "nests more than 16 deep"),
        ("-" * 17 + "1", "nests more than 16 deep"),
        ("(" * 10 + "-" * 7 + "i" + ")" * 10, "nests more than 16 deep"),
        ("i+" * 200 + "1", "401 characters: at most 256"),
    ],
)
def test_wrong_formulas_are_named(text: str, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        Formula.parse(text)


def test_signs_of_different_parentheses_are_not_nested_in_each_other() -> None:
    assert Formula.parse("-(" * 15 + "i" + ")" * 15).value({"i": 3}) == -3
    assert Formula.parse("-" * 16 + "i").value({"i": 3}) == 3


def test_words_of_python_are_names_like_others() -> None:
    assert Formula.parse("in + 007 - True").value({"in": 2, "True": 3}) == 6


def test_values_are_bounded() -> None:
    formula = Formula.parse("*".join(["i"] * 100))
    with pytest.raises(RulesError, match="beyond"):
        formula.value({"i": 10**9})


def test_places() -> None:
    pp, ep = parse_places("pp = 0, pp_size - 1 ep = e // 8")
    assert (pp.axis, ep.axis) == ("pp", "ep")
    assert [at.value(NUMBERS) for at in pp.at] == [0, 3]
    assert ep.names == {"e"}
    assert parse_places("") == ()


@pytest.mark.parametrize("text", ["pp", "pp =", "pp = 1 pp = 2", "= 3", "pp = 1 2", "pp == 1"])
def test_wrong_places_are_errors(text: str) -> None:
    with pytest.raises(RulesError):
        parse_places(text)


@given(st.text(alphabet="ab.*", min_size=1, max_size=8), st.text(alphabet="ab.", max_size=10))
def test_stars_match_as_fnmatch_does(pattern: str, name: str) -> None:
    assert (Pattern.parse(pattern).match(name) is not None) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "name", "indices"),
    [
        ("layers.{i}.w", "layers.12.w", {"i": "12"}),
        ("*layers.{i}.*", "a.layers.1.layers.2.w", {"i": "1"}),  # the leftmost
        ("*layers.{i}.w", "a.layers.1.layers.2.w", {"i": "2"}),  # the only one that fits
        ("*.{i}", "a.b.3", {"i": "3"}),
        ("{i}.*", "0.weight", {"i": "0"}),
        ("*l.{i}.*e.{e}.w", "l.1.e.e.2.w", {"i": "1", "e": "2"}),
        ("layers.{i}.w", "layers.x1.w", None),
        ("layers.{i}.w", "layers.1x.w", None),
        ("layers.{i}.w", "layers..w", None),
        ("layers.{i}.w", "layers.1234567890.w", None),  # no model has that many
        ("a[b]?.w", "a[b]?.w", {}),  # only * and braces are special
        ("a.w", "b.a.w", None),
        ("a.w", "a.w\n", None),
        ("a.*", "a.x\ny", {}),
    ],
)
def test_captures(pattern: str, name: str, indices: dict[str, str] | None) -> None:
    starts = Pattern.parse(pattern).match(name)
    if starts is None or indices is None:
        assert starts is indices
    else:
        assert {key: name[at:].split(".")[0] for key, at in starts.items()} == indices


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "0 characters"),
        ("x" * 600, "600 characters"),
        ("a{i}.w", "whole part"),
        ("*{i}.w", "whole part"),
        ("a.{i}b", "whole part"),
        ("a.{}.w", "whole part"),
        ("a.{i j}.w", "whole part"),
        ("a.{i}.{i}", "appears twice"),
        ("a.{i", "brace alone"),
        ("a}b", "brace alone"),
    ],
)
def test_wrong_patterns_are_named(pattern: str, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        Pattern.parse(pattern)


def test_more_literal_text_is_more_specific() -> None:
    """From the least to the most specific; whatever replaces a star raises the rank."""
    texts = ["*", "*.w", "*h.*.w", "*h.{i}.w", "*h.{i}.*x.w", "*h.{i}.mlp.w", "h.{i}.mlp.w"]
    ranks = [Pattern.parse(text).rank for text in texts]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_wildcards_of_the_shell_are_refused_with_the_new_spelling() -> None:
    names = ["layers.0.w", "layers.1.w", "odd[0]"]
    assert matching("layers.{i}.w", names) == matching("layers.*", names) == names[:2]
    assert matching("odd[0]", names) == ["odd[0]"]
    assert matching("heads.*", names) == []
    assert matches("*", "any")
    for pattern in ("layers.?.w", "layers.[01].w"):
        with pytest.raises(RulesError, match=r"write \* for any text and \{i\} for an integer"):
            matching(pattern, names)


def test_no_pattern_is_slow() -> None:
    pattern = Pattern.parse("*a" * 200 + "*b")
    start = time.process_time()
    assert pattern.match("a" * 5000) is None
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("tp*{head_dim} -", "tp*128 -"),
        ("(tp*{3 * head_dim} dp) ...", "(tp*384 dp) ..."),
        ("tp{4096,1024} -", "tp{4096,1024} -"),
        ("{8192 (kv rep), 1024 kv, 64 -, 64}", "{8192 (kv rep), 1024 kv, 64 -, 64}"),
        ("{64 -} {64} {64 kv}", "{64 -} {64} {64 kv}"),
        ("tp{{head_dim},{head_dim - 1}}", "tp{128,127}"),
        ("tp*{64 - head_dim + head_dim}", "tp*64"),
    ],
)
def test_braces(text: str, filled: str) -> None:
    assert Template.parse(text).fill({"head_dim": 128}) == filled
