"""Expressions in linear time, held against Python's own where those come to an end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.quantization import expression
from workers.quantization.expression import MAX_STATES, MAX_STEPS_OF_ONE, Expression, Search, TooCostly, Unreadable

PATHS = [
    "", "a", "b", "aaab", "o_proj", "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.down_proj", "lm_head", "model.lm_head",
    "model.layers.3.mlp.experts.17.gate_proj", "visual.blocks.0.attn.qkv", "layers", ".layers.", "x-y[z]",
]  # fmt: skip
EXPRESSIONS = [
    "", "^lm_head$", r"layers\.\d+\.mlp", r"^model\.layers\.2.*(up|gate)_proj$", "(a+)+b", r"layers\.(0|1[0-9])\.", r"experts\.\d{2}\.",
    "[^.]+_proj$", r"[^\W\d]+\.mlp", r"(?:self_attn|mlp)\.(?P<leaf>\w+)$", r"\Amodel", r"head\Z", r"x\-y\[z\]", "[]x]", "a{,2}b", "{x}|a{}",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_it_finds_what_python_finds(text: str) -> None:
    alone, together = Expression(text), Search([Expression(text)])
    for _ in range(2):  # the second time from what is remembered
        for path in PATHS:
            assert alone.search(path) == (re.search(text, path) is not None), path
            assert together.matches(path) == ({0} if re.search(text, path) else set()), path


LEAVES = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\D", r"\w", "[ab]", "[^a]", "[^.]", "[a-z]", "^", "$", r"\A", r"\Z", "1"])
TEXTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{0}", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "??"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.text(alphabet="ab1.", max_size=7))
def test_it_agrees_with_python_on_anything_short(text: str, path: str) -> None:
    assert Expression(text).search(path) == (re.search(text, path) is not None)


@pytest.mark.parametrize(
    "text",
    [
        "(", "*", r"(a)\1", "(?=a)", "(?i)a", r"\bq", "a*+", "(?>a)", "a" * 513, f"a{{{MAX_STATES}}}", "((){60000}){60000}",
        "(" * 250 + ")" * 250, r"\x41",
    ],
)  # fmt: skip
def test_what_cannot_be_matched_in_linear_time_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        Expression(text)


@pytest.mark.parametrize("text", ["(a*)*b", ".*.*.*.*.*.*.*.*.*b", "^(a?){50}a{50}$", "(.?){330}Q$"])
def test_a_character_that_comes_again_costs_a_look_up(text: str) -> None:
    walked = Expression(text)

    assert not walked.search("a" * 400 + "c")
    before = walked.steps
    assert not walked.search("a" * 4000 + "c")

    assert before < MAX_STEPS_OF_ONE / 20
    assert walked.steps == before


# After each character another set of ways: a front for each of the texts of 200 letters.
GROWS = "[ab]*a[ab]{200}c"
TEXT = "".join("ab"[int(digit)] for number in range(3000) for digit in f"{number:b}")


def test_an_expression_with_too_many_sets_of_ways_ends_with_an_error() -> None:
    with pytest.raises(TooCostly):
        Expression(GROWS).search(TEXT)


def test_a_search_names_the_expression_that_takes_too_many_steps() -> None:
    search = Search([Expression("b"), Expression(GROWS), Expression("a")])

    with pytest.raises(TooCostly) as caught:
        search.matches(TEXT)

    assert caught.value.number == 1


def test_many_expressions_and_many_names_take_a_limited_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression, "MAX_STEPS", 50_000)
    search = Search([Expression(f"{number}c$") for number in range(20)])
    matched = 0

    with pytest.raises(TooCostly) as caught:
        while matched < 10_000:
            search.matches(f"model.{matched}")
            matched += 1

    assert caught.value.number is None
    assert 0 < matched < 1000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TEXTS, max_size=4), st.lists(st.lists(st.text(alphabet="ab1", max_size=3), min_size=1, max_size=4).map(".".join), max_size=6)
)
def test_together_they_find_what_each_finds(texts: list[str], paths: list[str]) -> None:
    search = Search([Expression(text) for text in texts])

    for path in [*paths, *paths]:
        assert search.matches(path) == {number for number, text in enumerate(texts) if re.search(text, path)}
