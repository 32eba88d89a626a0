"""The logs of a node's ranks, and no other file of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.agent.rank_logs import RankLogs
from workers.rank.log import NON_DEFAULT, STARTED


class Node(RankLogs):
    def __init__(self, folder: Path) -> None:
        self.log_dir = str(folder)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder / "m.log"


def test_how_the_last_engine_was_started(log: Path) -> None:
    first = f"sparkd: {STARTED} 1: vllm serve old\nINFO {NON_DEFAULT}{{'port': 1}}\n"
    log.write_text(f"{first}sparkd: {STARTED} 2: vllm serve new\nINFO other\nINFO {NON_DEFAULT}{{'port': 2}}\nNCCL INFO x\n")
    lines = Node(log.parent).setting_lines(str(log))
    assert lines == [f"sparkd: {STARTED} 2: vllm serve new", f"INFO {NON_DEFAULT}{{'port': 2}}"]
    assert Node(log.parent).nccl_lines(str(log)) == ["NCCL INFO x"]


def test_no_file_of_another_folder_is_read(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "secret.log"
    other.write_text(f"{STARTED} 1: x\nNCCL x\n")
    node = Node(log.parent)
    for path in (str(other), f"{log.parent}/../secret.log"):
        assert node.setting_lines(path) == node.nccl_lines(path) == []
        assert node.read_log(path, None, 100)["text"] == ""
