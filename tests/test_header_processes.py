"""Headers that copies of this process read: the same, in the same order, with the same fault."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from sparkd import header_processes
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError
from sparkd.header_processes import FEWEST_FILES, idle_cores, read_headers
from sparkd.safetensors import read_header

FILES = 3 * FEWEST_FILES + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one small tensor and an expert in each file."""
    made = tmp_path_factory.mktemp("many")
    for number in range(FILES):
        header = {
            f"model.layers.{number}.norm.weight": {"dtype": "BF16", "shape": [number], "data_offsets": [0, 2 * number]},
            f"model.layers.{number}.\u00e9": {"dtype": "F32", "shape": [2], "data_offsets": [2 * number, 2 * number + 8]},
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        (made / f"model-{number:05d}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 * number + 8))
    (made / "config.json").write_text("{}")
    return made


def paths_of(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.safetensors")))


def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The copies that are made from here on."""
    made: list[int] = []
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork = os.fork

    def counted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(header_processes.os, "fork", counted)
    return made


def told(checkpoint: Checkpoint) -> object:
    return checkpoint.shards, list(checkpoint.tensors.items()), checkpoint.config


@pytest.mark.parametrize(("processes", "expected"), [(1, 0), (2, 1), (3, 2), (64, 2)])
def test_any_number_of_processes_reads_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int, expected: int) -> None:
    made = copies(monkeypatch)

    assert told(read_checkpoint(folder, processes)) == told(read_checkpoint(folder))
    assert len(made) == expected
    for copy in made:
        with pytest.raises(ChildProcessError):
            os.waitpid(copy, 0)


@pytest.mark.parametrize("broken", [0, FILES // 2, FILES - 1])
def test_a_fault_is_told_wherever_it_was_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    paths = paths_of(folder)
    paths[broken] = str(tmp_path / "not there.safetensors")
    made = copies(monkeypatch)
    found = []

    with pytest.raises(CheckpointError, match="not there"):
        for header in read_headers(paths, 3):
            found.append(header)
    assert found == [read_header(path) for path in paths[:broken]]
    assert len(made) == 2


def test_a_reader_that_stops_leaves_no_copy_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    headers = read_headers(paths_of(folder), 2)
    next(headers)
    headers.close()

    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], 0)


def test_a_copy_that_is_killed_leaves_its_files_to_us(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    monkeypatch.setattr(header_processes, "_sent", lambda header: os._exit(9))

    assert list(read_headers(paths_of(folder), 2)) == [read_header(path) for path in paths_of(folder)]
    assert len(made) == 1


def test_a_process_with_threads_reads_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    monkeypatch.setattr(threading, "active_count", lambda: 2)

    assert len(list(read_headers(paths_of(folder), 3))) == FILES
    assert not made


@pytest.mark.parametrize(("load", "cores"), [(0.4, 4), (5.9, 3), (7.5, 1), (40.0, 1)])
def test_cores_that_are_busy_do_not_count(monkeypatch: pytest.MonkeyPatch, load: float, cores: int) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    assert idle_cores(4) == cores
