"""Expressions in linear time, held against Python's own where those come to an end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.stream.expression import MAX_STATES, Expression, Unreadable

PATHS = [
    "", "a", "b", "aaab", "o_proj", "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.down_proj", "lm_head", "model.lm_head",
    "model.layers.3.mlp.experts.17.gate_proj", "visual.blocks.0.attn.qkv", "layers", ".layers.", "x-y[z]",
]  # fmt: skip
EXPRESSIONS = [
    "", "a", "^a", "a$", "^$", "^lm_head$", r"layers\.\d+\.mlp", r"^model\.layers\.2.*(up|gate)_proj$", ".*", "a+b", "(a+)+b", "(a|b)*$",
    r"layers\.(0|1[0-9])\.", r"experts\.\d{2}\.", r"experts\.\d{3,}\.", r"experts\.[0-9]{1,2}?\.gate", "[^.]+_proj$", r"[^\W\d]+\.mlp",
    r"(?:self_attn|mlp)\.(?P<leaf>\w+)$", r"\Amodel", r"head\Z", r"x\-y\[z\]", "[]x]", "a{,2}b", "a{0}b", "{x}|a{}", "a??b", "q_proj|^a|b$",
    r"\.layers\.(?:[^.]+\.)*down_proj$", "((a)|(b)){2}", "^(a|ab)(c|bcd)*$|b",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_it_finds_what_python_finds(text: str) -> None:
    expression = Expression(text)
    for _ in range(2):  # the second time from what is remembered
        for path in PATHS:
            assert expression.search(path) == (re.search(text, path) is not None), path


LEAVES = st.sampled_from(["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "^", "$", "1"])
TEXTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.text(alphabet="ab1.", max_size=7))
def test_it_agrees_with_python_on_anything_short(text: str, path: str) -> None:
    assert Expression(text).search(path) == (re.search(text, path) is not None)


@pytest.mark.parametrize(
    "text",
    [
        "(", "*", "[", r"(a)\1", "(?=a)", "(?!a)", "(?<=a)b", "(?i)a", "(?i:a)", r"\bq", r"\B", "(?P<x>a)(?P=x)", "a*+", "(?>a)", "(?#x)a",
        "a" * 513, f"a{{{MAX_STATES}}}", "((a{99}){99}){99}", "(){70000}", "((){60000}){60000}", "a{99999999999}", "(" * 60 + ")" * 60,
        "(" * 250 + ")" * 250, r"\x41", r"\n",
    ],
)  # fmt: skip
def test_what_cannot_be_matched_in_linear_time_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        Expression(text)


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(a|a)*b", "(a*)*b", "(.*)*b", ".*.*.*.*.*.*.*.*.*b", "(a|aa)+b", "^(a?){50}a{50}$", "(.*a){12}b"]
)
def test_what_stops_python_costs_a_step_for_each_character(text: str) -> None:
    expression = Expression(text)
    steps = 0
    takers = expression._takers

    def counted(character: str) -> frozenset[int]:
        nonlocal steps
        steps += 1
        return takers(character)

    expression._takers = counted  # type: ignore[method-assign]

    assert not expression.search("a" * 40 + "c")
    assert steps == 41
