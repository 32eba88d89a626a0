"""Recipes that are small on disk and endless once their defaults are put in."""

from __future__ import annotations

import pytest

from sparkd.errors import ConfigError
from sparkd.recipes.importer import MAX_COMMAND, imported, substituted


def recipe(names: int, copies: int) -> bytes:
    lines = ["recipe_version: '1'", "model: o/m", "build_args: []", "command: vllm serve o/m --port {a0}", "defaults:"]
    for number in range(names):
        lines.append(f"  a{number}: '{('{a' + str(number + 1) + '} ') * copies}'")
    return "\n".join([*lines, f"  a{names}: x"]).encode()


@pytest.mark.parametrize(("names", "copies"), [(7, 4), (2, 9000)])
def test_defaults_that_name_each_other_come_to_an_end(names: int, copies: int) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(recipe(names, copies), "r.yaml")

    assert str(MAX_COMMAND) in caught.value.message


def test_a_default_that_names_itself_comes_to_an_end() -> None:
    with pytest.raises(ConfigError):
        substituted("{a}", {"a": "{a}" * 100})
    assert substituted("{a} {b}", {"a": "{b}", "b": "{b}"}) == "{b} {b}"
