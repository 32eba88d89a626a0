"""Rules of a client: whatever they are, they cost time in proportion to the names that they are held against."""

from __future__ import annotations

import ast
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparkd
import workers
from sparkd.config.config import load_config
from sparkd.control.registry import Registry
from sparkd.errors import SparkdError
from sparkd.state.store import Store
from workers.quantization.recipe import MAX_RULES, Format, FormatRule, QuantizationRecipe

# Each of these sends Python's own matcher of expressions back and forth where it is written as one.
COSTLY = ["*a" * 500 + "Z", "?*" * 200 + "Z", "*[a-f]*[0-9]" * 100 + "Z"]


@pytest.mark.parametrize("pattern", COSTLY)
def test_a_rule_looks_at_each_letter_of_a_name_once(pattern: str) -> None:
    """It would take longer than anybody waits for, if a `*` gave back what it has matched."""
    assert not FormatRule(pattern, Format("fp8")).matches(["a0" * 5000, "b" * 10000], "mlp")


PARTS = st.sampled_from(["a", "b", "ab", "*", "?", "a*", "*b", "[ab]", "[!a]"])
COMPONENTS = st.text(alphabet="ab1", min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(COMPONENTS, min_size=1, max_size=5))
def test_a_glob_names_whole_components_anywhere_in_the_path(parts: list[str], components: list[str]) -> None:
    rule = FormatRule(".".join(parts), Format("fp8"))

    windows = (components[at : at + len(parts)] for at in range(len(components)))
    assert rule.matches(components, "mlp") == any(len(window) == len(parts) and all(map(fnmatchcase, window, parts)) for window in windows)


def test_there_are_so_many_rules_at_most() -> None:
    QuantizationRecipe.parse({"format": "fp8", "keep": ["o_proj"] * MAX_RULES})
    with pytest.raises(SparkdError):
        QuantizationRecipe.parse({"format": "fp8", "keep": ["o_proj"] * (MAX_RULES + 1)})


def test_a_stored_model_with_such_a_rule_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Store(tmp_path / "state.db")) as store:
        store.wishes.save_spec("globs", {"model": "o/m", "quantize": {"layers": {"*a*b": "fp8"}}})
        store.wishes.save_spec("odd", {"model": "o/m", "quantize": {"layers": {"re:(a+)+b": "fp8"}}})

        registry = Registry(load_config(None, flags={"state_dir": str(tmp_path)}, environ={}), store, lambda: 0.0, lambda: 0.0)

    assert set(registry.records) == {"globs"}
    assert "odd" in caplog.text


# Where a pattern that is no literal is compiled, and why no client can have written it.
_MADE_HERE = {
    "sparkd/recipes/registry.py": "four constant keys",
    "sparkd/config/yaml_file.py": "constants of YAML's core schema",
    "workers/quantization/rules.py": "globs, whose patterns of fnmatch's own never go back",
    "workers/rank/log_parser.py": "constants of the table beside it",
    "workers/rank/signatures.py": "constants of its data file",
    "workers/vllm/ask/parse_args.py": "values of a command line, escaped",
    "workers/vllm/load/config.py": "patterns that this module has made itself, every name in them escaped",
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
