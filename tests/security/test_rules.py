"""Rules of a client: whatever they are, they cost time in proportion to the names that they are held against."""

from __future__ import annotations

import ast
import hashlib
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparkd
import workers
from sparkd.capacity.weights import Inventory
from sparkd.config.config import load_config
from sparkd.control.registry import Roster
from sparkd.errors import CheckpointError, ConfigError, SparkdError
from sparkd.models.shape import shape_of
from sparkd.state.store import Store
from tests.support.checkpoints import checkpoint_of
from workers.quantization.expression import MAX_STEPS_OF_ONE
from workers.quantization.recipe import MAX_RULE_CHARACTERS, MAX_RULES, Format, FormatRule, QuantizationRecipe

TENSOR = ("BF16", (128, 128))
# Every second letter of its names leads to another set of ways.
COSTLY = r"re:[a-z_.]*[aeiou]([a-z_.]|\d){200}Z$"
ODD_NAMES = {f"{hashlib.sha256(str(number).encode()).hexdigest()}.weight": TENSOR for number in range(3000)}


def test_a_rule_that_takes_too_many_steps_is_refused_by_name_and_only_once() -> None:
    recipe = QuantizationRecipe.parse({"layers": {"mlp": "fp8", COSTLY: "nvfp4"}})
    costly = recipe.rules[1].expression
    known = Inventory(
        checkpoint_of(ODD_NAMES),
        shape_of({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 1, "vocab_size": 8}),
        (),
        0,
        0,
    )

    with pytest.raises(CheckpointError) as caught:
        known.formatted(recipe)
    steps = costly.steps
    with pytest.raises(CheckpointError) as again:
        known.formatted(recipe)

    assert steps > MAX_STEPS_OF_ONE
    assert costly.steps == steps
    assert "quantize.layers[1].match" in caught.value.message
    assert again.value.message == caught.value.message
    assert caught.value.cure


def test_the_rules_of_an_entry_are_limited_by_their_size_too() -> None:
    rule = "re:" + "(.?){300}"
    with pytest.raises(ConfigError) as caught:
        QuantizationRecipe.parse({"format": "fp8", "keep": [rule] * 100})

    assert f"{MAX_RULE_CHARACTERS:,}" in caught.value.message


PARTS = st.sampled_from(["a", "b", "ab", "*", "?", "a*", "*b", "[ab]", "[!a]", "**"])
COMPONENTS = st.text(alphabet="ab1", min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(COMPONENTS, min_size=1, max_size=5))
def test_a_glob_names_whole_components_anywhere_in_the_path(parts: list[str], components: list[str]) -> None:
    rule = FormatRule(".".join(parts), Format("fp8"))

    assert rule.expression.search(".".join(components)) == any(_begins(parts, components[at:]) for at in range(len(components) + 1))


def _begins(parts: list[str], components: list[str]) -> bool:
    """Whether the parts match components from the first on; `**` matches any number of them."""
    if not parts:
        return True
    if parts[0] == "**":
        return any(_begins(parts[1:], components[at:]) for at in range(len(components) + 1))
    return bool(components) and fnmatchcase(components[0], parts[0]) and _begins(parts[1:], components[1:])


def test_there_are_so_many_rules_at_most() -> None:
    QuantizationRecipe.parse({"format": "fp8", "keep": ["o_proj"] * MAX_RULES})
    with pytest.raises(SparkdError):
        QuantizationRecipe.parse({"format": "fp8", "keep": ["o_proj"] * (MAX_RULES + 1)})


def test_a_stored_model_with_such_a_rule_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Store(tmp_path / "state.db")) as store:
        store.wishes.save_spec("slow", {"model": "o/m", "quantize": {"layers": {"re:(a+)+b": "fp8"}}})
        store.wishes.save_spec("odd", {"model": "o/m", "quantize": {"layers": {r"re:(a)\1": "fp8"}}})

        roster = Roster(load_config(None, flags={"state_dir": str(tmp_path)}, environ={}), store, lambda: 0.0, lambda: 0.0)

    assert set(roster.records) == {"slow"}
    assert "odd" in caplog.text


# Where a pattern that is no literal is compiled, and why no client can have written it.
_MADE_HERE = {
    "sparkd/gateway/outline.py": "constants, with possessive repetitions",
    "sparkd/vllm/installed.py": "names of vLLM's own types, which its callers spell out",
    "sparkd/recipes/registry.py": "four constant keys",
    "sparkd/schema/yaml_file.py": "constants of YAML's core schema",
    "workers/quantization/expression.py": "validates, and matches single characters",
    "workers/quantization/rules.py": "one set of characters",
    "workers/vllm/load/config.py": "patterns that this module has made itself, every name in them escaped",
    "workers/rank/signatures.py": "constants",
    "workers/stub/engine.py": "constants, and no engine of a client's",
}


def test_no_other_module_makes_a_pattern_out_of_what_it_was_given() -> None:
    """A call into `re` whose pattern is a name or a computed text stands in the table above."""
    found = set()
    root = Path(sparkd.__file__).parents[1]
    for package in (sparkd, workers):
        for file in Path(package.__file__ or "").parent.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "re":
                    pattern = node.args[0] if isinstance(node, ast.Call) and node.args else None
                    if called.attr in ("escape", "error") or _constant(pattern):
                        continue
                    found.add(file.relative_to(root).as_posix())
    assert found == set(_MADE_HERE)


def _constant(pattern: ast.expr | None) -> bool:
    """A literal, or one with other constants of its module put in (by a name in capitals)."""
    if isinstance(pattern, ast.JoinedStr):
        return all(_constant(part) for part in pattern.values)
    if isinstance(pattern, ast.FormattedValue):
        named = pattern.value.value if isinstance(pattern.value, ast.Attribute) else pattern.value
        return isinstance(named, ast.Name) and named.id.strip("_").isupper()
    return isinstance(pattern, ast.Constant)
