"""Profiles: those that come with sparkd, sparkrun's form, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sparkd.bench.profile import MOST_CELLS, named, parsed, shipped
from sparkd.errors import ConfigError


def test_every_shipped_profile_is_read() -> None:
    assert {"quick", "spark-arena-v2", "vllm-blog", "decode-prefill"} <= set(shipped())
    assert all(named(name).cells and named(name).description for name in shipped())


def test_the_arenas_profile_has_its_cells_in_its_order() -> None:
    profile = named("spark-arena-v2")
    assert len({(cell.depth, cell.concurrency) for cell in profile.cells}) == len(profile.cells) == 28
    assert [(cell.depth, cell.concurrency) for cell in (profile.cells[0], profile.cells[9], profile.cells[-1])] == [
        *((8192, 5), (0, 1), (100000, 10)),
    ]
    assert {(cell.prompt_tokens, cell.output_tokens) for cell in profile.cells} == {(2048, 128)}
    assert (profile.args.runs, profile.args.prefix_caching) == (3, True)


def test_a_profile_without_a_schedule_is_a_grid() -> None:
    profile = parsed("mine", "args: {depth: '0, 16', concurrency: [1, 2], pp: 8, tg: [4, 5]}")
    places = [(cell.depth, cell.concurrency, cell.prompt_tokens, cell.output_tokens) for cell in profile.cells]
    assert places == [(depth, concurrency, 8, tg) for depth in (0, 16) for concurrency in (1, 2) for tg in (4, 5)]
    assert profile.cells[-1].name == "pp8 tg5 @ d16 (c2)"


def test_an_entry_of_the_schedule_may_have_lengths_of_its_own() -> None:
    profile = parsed("mine", "args: {pp: 8}\nschedule: [{depth: 0, concurrency: 1, pp: 58, tg: 2}, {depth: 1, concurrency: 2}]")
    assert [(cell.prompt_tokens, cell.output_tokens) for cell in profile.cells] == [(58, 2), (8, 32)]


@pytest.mark.parametrize(
    ("text", "named_key"),
    [
        ("args: {speed: 3}", "args.speed"),
        ("schedule: [{depth: 0}]", "schedule.0.concurrency"),
        ("framework: guidellm", "guidellm"),
        (f"args: {{depth: {list(range(MOST_CELLS + 1))}}}", "1,000 cells"),
        (
            f"args: {{depth: '{'0,' * 4000}0', concurrency: '{'1,' * 4000}1', pp: '{'1,' * 4000}1', tg: '{'1,' * 4000}1'}}",
            f"{MOST_CELLS:,}",
        ),
        (f"args: {{pp: '{'1,' * 999}1'}}\nschedule: [{'{depth: 0, concurrency: 1}, ' * 2000}]", "1,000 cells"),
        ("a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")), "aliases"),
        ("args: " + "[" * 60_000, "nested"),
        ("args: {pp: ", ":1:"),
        ("[]", "map"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_its_key(text: str, named_key: str) -> None:
    with pytest.raises(ConfigError, match="The profile mine") as refused:
        parsed("mine", text)
    assert named_key in refused.value.message


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="spark-arena-v2"):
        named("../quick")
