"""Recipes of strangers: a model's code that they trust, folders that they name, the registry that they come from, or that is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import parse_model
from sparkd.errors import ConfigError
from sparkd.recipes.library import RecipeLibrary
from tests.sparkd.recipes.test_importer import ONE
from tests.sparkd.recipes.test_registry import COMMIT, PLAIN, as_json, keep, run, state
from tests.support.facts import lacking

__all__ = ["state"]
NATIVE = """
description: one of ours
model: owner/plain
sources: {a: somewhere}
"""
FOLDERS = {
    "a model": NATIVE.replace("owner/plain", "/srv/model"),
    "a draft beside the model": NATIVE + 'settings: {extra_args: [--speculative-config, \'{"model": "/srv/draft"}\']}\n',
    "another launcher's model": PLAIN.replace("owner/plain", "/srv/model"),
}


@pytest.mark.parametrize("text", FOLDERS.values(), ids=FOLDERS.keys())
def test_a_registrys_recipe_that_names_a_folder_is_refused_and_told_at_its_import(
    text: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(state, {"local": text})

    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"recipe": "local@eugr"}, over_admin=False, book=RecipeLibrary(None, {}, state))
    assert lacking(caught.value.message, "a folder", "recipes import local@eugr") == []
    assert len(as_json(capsys, "import", "local@eugr")["risks"]) == (2 if "trust-remote-code" in text else 1)


def test_a_registrys_recipe_whose_value_is_of_another_kind_is_refused(state: Path, tmp_path: Path) -> None:
    keep(state, {"odd": f"{NATIVE}settings: {{env: true}}\n"})
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\nmodels: {{m: {{recipe: odd@eugr}}}}\n")

    assert [problem.severity for problem in check(file, {})] == ["error"]


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        NATIVE + "settings: {extra_args: [--trust-remote-code]}\n",
    ],
)
def test_trust_in_a_models_code_is_told_first_and_apart(text: str, state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(state, {"trusting": text})

    (risk,) = as_json(capsys, "import", "trusting@eugr")["risks"]
    assert risk.startswith("trust_remote_code: ") and "owner/plain" in risk
    out, err = run(capsys, "import", "trusting@eugr")
    assert out.splitlines()[2].startswith("# trust_remote_code: ") and err.startswith("risk: trust_remote_code: ")
    (tmp_path / "again.yaml").write_text(out)
    assert run(capsys, "check", str(tmp_path / "again.yaml"))[0].endswith("valid\n")


def test_the_source_is_where_it_comes_from_and_not_the_first_who_had_its_format(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(state, {"one": ONE})
    file = tmp_path / "theirs.yaml"
    file.write_text(ONE)

    source = f"https://example.org/eugr at {COMMIT}"
    assert as_json(capsys, "import", "one@eugr")["recipe"]["sources"] == {"file": source}
    assert as_json(capsys, "show", "one@eugr")["sources"] == {"file": source}
    assert "format" in as_json(capsys, "import", str(file))["recipe"]["sources"]["file"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-oss-120b@eugre", ("'eugre'", " eugr?")),
        ("nothing.yaml", ("nothing.yaml", "be read")),
    ],
)
def test_an_import_of_what_is_not_there_names_the_registry_and_the_nearest(
    name: str, words: tuple[str, ...], state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(state, {"plain": PLAIN})
    out, err = run(capsys, "import", name, code=2)

    assert out == "" and all(word in err for word in words), err
