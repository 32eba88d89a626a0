"""Rules of a client: whatever they are, they cost time in proportion to the names that they are held against."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import sparkd
import workers
from sparkd.config import load_config, parse_model
from sparkd.errors import ConfigError, SparkdError
from sparkd.roster import Roster
from sparkd.state import Store
from workers.stream.recipe import MAX_RULES, Recipe

CATASTROPHIC = [
    "re:(a+)+b",
    "re:(.*)*b",
    "re:(a|a)*$b",
    "re:(.*,){25}b",
    "*a*a*a*a*a*a*a*a*a*a*a*b",
    "**.**.**.**.**.**.b",
    "re:" + ".*" * 200 + "b",
]
NAMES = ["a" * 200, ".".join(["a"] * 200), "," * 200, "model.layers.0." + "a" * 3000]


@pytest.mark.parametrize("match", CATASTROPHIC)
def test_a_rule_that_would_try_every_way_comes_to_an_end(match: str) -> None:
    recipe = Recipe.parse({"layers": [{"match": match, "format": "fp8"}]})

    for name in NAMES:
        assert recipe.format_of(name, (1024, 1024)) is None


@pytest.mark.parametrize("quantize", [{"layers": {r"re:(a)\1": "fp8"}}, {"layers": {"re:(?=a)": "fp8"}}, {"keep": ["re:" + "a" * 600]}])
def test_a_rule_that_has_no_linear_form_is_refused(quantize: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "o/m", "quantize": quantize}, over_admin=True)

    assert "quantize" in caught.value.message


def test_there_are_so_many_rules_at_most() -> None:
    Recipe.parse({"format": "fp8", "keep": ["o_proj"] * MAX_RULES})
    with pytest.raises(SparkdError):
        Recipe.parse({"format": "fp8", "keep": ["o_proj"] * (MAX_RULES + 1)})


def test_a_stored_model_with_such_a_rule_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "state.db")
    store.save_spec("slow", {"model": "o/m", "quantize": {"layers": {"re:(a+)+b": "fp8"}}})
    store.save_spec("odd", {"model": "o/m", "quantize": {"layers": {r"re:(a)\1": "fp8"}}})

    roster = Roster(load_config(None, flags={"state_dir": str(tmp_path)}, environ={}), store, lambda: 0.0, lambda: 0.0)

    assert set(roster.records) == {"slow"}
    assert "odd" in caplog.text


# Where a pattern that is no literal is compiled, and why no client can have written it.
_MADE_HERE = {
    "sparkd/gateway/outline.py": "constants, with possessive repetitions",
    "sparkd/yamlfile.py": "constants of YAML's core schema",
    "workers/stream/expression.py": "validates, and matches single characters",
    "workers/stream/rules.py": "one set of characters",
    "workers/stream/ct_config.py": "patterns that this module has made itself, every name in them escaped",
    "workers/signatures.py": "constants",
    "workers/stub_engine.py": "constants, and no engine of a client's",
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
