"""A pipe or a device where a file is expected is refused: no command waits for what nobody writes, or reads for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.config_check import check
from sparkd.config.recipe_check import load
from sparkd.errors import ConfigError
from workers.host import regular_file
from workers.host.hub_cache import snapshot_of


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def device(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/zero")
    return path


KINDS = pytest.mark.parametrize("made", [pipe, device])


@KINDS
def test_the_reader_refuses_it(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    with pytest.raises(OSError, match="device"):
        regular_file.read(made(tmp_path / "a"), 10)
    with pytest.raises(IsADirectoryError):
        regular_file.read(tmp_path)


@KINDS
def test_a_configuration_and_what_it_names(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    (problem,) = check(made(tmp_path / "sparkd.yaml"), {})
    assert problem.severity == "error"

    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors.index.json", "model.safetensors"):
        made(model / name)
    made(tmp_path / "keys")
    made(tmp_path / "recipes" / "odd.yaml")
    file = tmp_path / "all.yaml"
    file.write_text(
        f"keys: {{admin_file: {tmp_path}/keys}}\nrecipes_dir: {tmp_path}/recipes\n"
        f"models: {{a: {{model: {model}, tensor_parallel: 2, chat_template: x}}, b: {{recipe: ./recipes/odd.yaml}}, c: {{recipe: odd}}}}"
    )
    problems = {problem.line for problem in check(file, {}) if problem.severity == "error"}
    assert {1, 3} == problems


@KINDS
def test_a_recipe_and_a_reference_of_the_hub(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    file, problems = load(made(tmp_path / "odd.yaml"), {})
    assert file is None and len(problems) == 1
    made(tmp_path / "models--o--m" / "refs" / "main")
    assert snapshot_of("o/m", None, {"HF_HUB_CACHE": str(tmp_path)}) is None


COMMANDS = ("check PATH", "recipes check PATH", "recipes import PATH", "ps --key-file PATH", "plan m --config PATH")


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    path = pipe(tmp_path / "odd.yaml")
    assert exit_code([str(path) if word == "PATH" else word for word in line.split()]) == ConfigError.exit_code
    told = capsys.readouterr()
    assert "device" in told.out + told.err
