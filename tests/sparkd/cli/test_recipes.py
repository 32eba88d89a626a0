"""`sparkd recipes`: what it prints, its JSON, its exit codes; `run` and `serve --model` with a recipe's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkd.__main__ import exit_code
from sparkd.cli import recipes
from sparkd.cli.serve import _is_recipe
from tests.sparkd.recipes.test_importer import ONE
from tests.sparkd.recipes.test_merge import OURS, RECIPE

SECRET = "sk-canary-0123456789"


@pytest.fixture(autouse=True)
def _no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first recipe with mods would import vLLM; tests/sparkd/recipes/test_importer.py has a parser."""
    monkeypatch.setattr(recipes, "_parser", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKD_RECIPES_DIR", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("A: recipe", "A: '${env.CANARY}'"))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert exit_code(["recipes", *argv]) == code
    out, err = capsys.readouterr()
    return out, err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *argv, "--json", code=code)[0])
    return found


def test_ls_names_every_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "ls")
    assert all(f"\n{name} " in out for name in [*OURS, "mine"]) and err == ""
    found = as_json(capsys, "ls")
    assert [row["name"] for row in found["recipes"]] == sorted([*OURS, "mine"]) and found["problems"] == []
    (folder / "broken.yaml").write_text("description: x\nmodel: [\n")
    out, err = run(capsys, "ls")
    assert "broken" not in out and "broken.yaml:" in err


def test_show_tells_what_it_comes_to_and_no_value_of_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    argv = ("show", "mine")
    out, _ = run(capsys, *argv)

    for words in ("owner/model", "--max-model-len 8192", "B=recipe", "paper: a paper", "recipe: mine", "${env.CANARY}"):
        assert words in out, words
    found = as_json(capsys, *argv)
    assert found["spec"]["max_model_len"] == 8192
    assert SECRET not in out + json.dumps(found)


def test_show_writes_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"kv_cache": {"sequences": 2}, "quantize": "nvfp4", "max_model_len": 4096, "tensor_parallel": 4}
    sampling = {"thinking": {"max_tokens": 64, "chat_template_kwargs": {"enable_thinking": True, "effort": None, "word": "yes"}}}
    recipe = {"description": "d", "model": "o/m", "sources": {"s": "s"}, "settings": settings, "sampling": sampling}
    (folder / "mine.yaml").write_text(json.dumps(recipe))
    out, _ = run(capsys, "show", "mine")

    entry = yaml.safe_load(out.partition("In sparkd.yaml\n")[2].partition("\nIt ")[0])
    assert entry == {"mine": {"recipe": "mine"}}
    assert "\n  tensor_parallel: 4\n" in out and "nodes        4 or more\n" in out
    assert "\n  kv_cache: {sequences: 2}\n" in out and "\n  quantize: nvfp4\n" in out
    (folder / "mine.yaml").write_text(json.dumps(recipe | {"settings": {"quantize": "auto"}}))
    assert "\n  quantize: auto\n" in run(capsys, "show", "mine")[0]
    assert "thinking: max_tokens 64, chat_template_kwargs {enable_thinking: true, effort: null, word: 'yes'}\n" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("show", "gpt-oss"), "gpt-oss-120b?"),
        (("show", "gpt-oss-120b@eagr"), "add-registry"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *argv, code=2)

    assert out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1


def test_check_passes_ours(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "check")
    assert out.endswith(": valid\n") and out.count("\n") == 1
    assert as_json(capsys, "check")["recipes"] == len(OURS)


def test_check_takes_other_formats_and_marks_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, mine = tmp_path / "theirs.yaml", tmp_path / "mine.yaml"
    theirs.write_text(ONE + "mods: [mods/fix]\n")
    mine.write_text(RECIPE.replace("max_num_seqs: 8", "max_num_seqs: many"))

    out, _ = run(capsys, "check", str(theirs))
    assert f"{theirs}: warning: mods " in out and out.endswith("1 recipe: 4 warnings\n")
    out, _ = run(capsys, "check", str(theirs), str(mine), code=2)
    assert f"{mine}:8: " in out and "'many'" in out
    assert run(capsys, "check", str(tmp_path / "no.yaml"), code=2)[0].count("no.yaml") == 1


def test_import_prints_or_writes_and_tells_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(ONE + "pre_exec: [touch /tmp/x]\n")

    out, err = run(capsys, "import", str(theirs), "-o", "max_model_len=4096")
    assert "max_model_len: 4096" in out and "pre_exec" in err and "# pre_exec" in out
    assert run(capsys, "import", str(theirs), "-o", "max_model_len=4096", "--to", str(ours))[0] == ""
    assert ours.read_text() == out
    assert "File exists" in run(capsys, "import", str(theirs), "--to", str(ours), code=2)[1]
    assert run(capsys, "check", str(ours))[0].endswith("valid\n")
    assert as_json(capsys, "import", str(theirs))["recipe"]["settings"]["env"] == {"A": "plain"}
    assert "KEY=VALUE" in run(capsys, "import", str(theirs), "-o", "x", code=2)[1]


def test_a_bad_recipe_among_others_is_named_and_the_others_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad.yaml", tmp_path / "good.yaml"
    bad.write_text(ONE.replace("vllm serve", "sglang serve"))
    good.write_text(ONE)
    found = as_json(capsys, "check", str(bad), str(good), code=2)
    errors = [problem for problem in found["problems"] if problem["severity"] == "error"]
    assert [problem["file"] for problem in errors] == [str(bad)] and found["recipes"] == 2


@pytest.mark.parametrize(
    ("there", "here", "options"),
    [
        ("--max-num-seqs=4", "--max-num-seqs=many", ()),
        ("--max-num-seqs=4", "--max-num-seqs={n}", ("-o", "n=many")),
    ],
)
def test_what_could_not_be_used_is_not_written(
    there: str, here: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(ONE.replace(there, here))
    out, err = run(capsys, "import", str(theirs), *options, "--to", str(ours), code=2)
    assert out == "" and not ours.exists() and err
    assert run(capsys, "import", str(theirs), *options, code=2)[0] == ""
    assert as_json(capsys, "import", str(theirs), *options, code=2)["problems"]


def test_the_file_of_another_launcher_is_told_how_to_become_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(ONE)
    ours.write_text(RECIPE)
    hint = f"recipes import {theirs} --to"
    assert hint in run(capsys, "show", str(theirs), code=2)[1]
    for argv in (["run", str(theirs)], ["serve", "--model", str(theirs)]):
        assert exit_code(argv) == 2
        assert hint in capsys.readouterr().err
    assert exit_code(["run", str(ours)]) == 2
    assert "recipes_dir" in capsys.readouterr().err


def test_serve_knows_a_recipe_from_a_hub_id(tmp_path: Path) -> None:
    config = tmp_path / "sparkd.yaml"
    config.write_text("recipes_dir: .\n")
    (tmp_path / "mine.yaml").write_text(RECIPE)

    assert _is_recipe("gpt-oss-120b", None, {}) and _is_recipe("nemotron-3-nano-30b-a3b-nvfp4-32gb", None, {})
    assert _is_recipe("mine", config, {}) and not _is_recipe("mine", None, {})
    assert not _is_recipe("gpt2", None, {}) and not _is_recipe("/models/gpt-oss-120b", None, {})
