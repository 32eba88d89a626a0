"""Recipes that are small on disk and very long once their defaults are put in."""

from __future__ import annotations

import pytest

from sparkd.errors import ConfigError
from sparkd.recipes.importer import MAX_COMMAND, imported, substituted


def test_a_default_that_is_put_in_many_times_comes_to_an_end() -> None:
    command = "vllm serve o/m --port " + "{a} " * 9000
    recipe = f"recipe_version: '1'\nmodel: o/m\nbuild_args: []\ncommand: {command}\ndefaults: {{a: {'x' * 100}}}\n"
    with pytest.raises(ConfigError) as caught:
        imported(recipe.encode(), "r.yaml")

    assert str(MAX_COMMAND) in caught.value.message


def test_defaults_that_name_each_other_are_put_in_once() -> None:
    assert substituted("{a}", {"a": "{a}" * 100}) == "{a}" * 100
    assert substituted("{a} {b}", {"a": "{b}", "b": "{b}"}) == "{b} {b}"
