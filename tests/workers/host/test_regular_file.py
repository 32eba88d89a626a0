"""A pipe or a device where a file is expected is refused: no command waits for what nobody writes, or reads for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.errors import ConfigError
from workers.host import regular_file


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


COMMANDS = ("check PATH", "recipes import PATH", "ps --key-file PATH")


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    path = pipe(tmp_path / "odd.yaml")
    assert exit_code([str(path) if word == "PATH" else word for word in line.split()]) == ConfigError.exit_code
    told = capsys.readouterr()
    assert "device" in told.out + told.err
