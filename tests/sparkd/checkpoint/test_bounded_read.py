"""Which foreign checkpoints are read in a process of their own, and what comes back of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkd import checkpoint
from sparkd.capacity.headers import headers_here
from sparkd.checkpoint import INDEX, bounded_read, read_checkpoint
from sparkd.checkpoint.bounded_read import SMALL_BYTES, read_bounded
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.config.engine_args import engine_args
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError, CheckpointUnread
from sparkd.execution import bounded_call
from sparkd.execution.bounded_call import NoAnswer, call
from tests.support.bounded_functions import inside
from tests.support.checkpoints import write_folder
from tests.support.waiting import HUNG_S

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64}
SHARDS = {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m", SHARDS, CONFIG, index=True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are read in a process of their own."""
    sources: list[str] = []

    def called(read: Callable[..., Any], source: str, *_: Any, time_s: float) -> None:
        sources.append(source)

    monkeypatch.setattr(bounded_read, "call", called)
    return sources


def _long_index(folder: Path) -> None:
    """Names of a letter or two, of which the parser takes longest for a byte."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"{at:x}": "model.safetensors" for at in range(SMALL_BYTES // 20)}}))


def _long_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG) + " " * SMALL_BYTES)


def _long_headers(folder: Path) -> None:
    """Two files that only an index says to have a header."""
    for name in ("a.txt", "b.txt"):
        (folder / name).write_bytes((SMALL_BYTES // 2).to_bytes(8, "little") + b"[" * (SMALL_BYTES // 2))


@pytest.mark.parametrize("grow", [_long_index, _long_config, _long_headers])
def test_large_json_of_a_folder_is_read_in_another_process(folder: Path, apart: list[str], grow: Callable[[Path], None]) -> None:
    assert read_bounded(read_checkpoint, str(folder)) == read_checkpoint(folder)
    assert apart == []
    grow(folder)

    read_bounded(read_checkpoint, str(folder))

    assert apart == [str(folder)]


def test_large_files_that_are_not_read_do_not_count(folder: Path, apart: list[str]) -> None:
    (folder / "tokenizer.json").write_bytes(b"{" + b" " * SMALL_BYTES + b"}")

    assert read_bounded(read_checkpoint, str(folder)) == read_checkpoint(folder)
    assert apart == []


def test_a_hub_is_read_in_another_process(apart: list[str]) -> None:
    read_bounded(checkpoint_at, "owner/name", None, {})

    assert apart == ["owner/name"]


def test_the_checkpoint_and_the_error_come_back_from_the_other_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_call, "START_S", HUNG_S)
    monkeypatch.setattr(bounded_read, "SMALL_BYTES", 0)

    assert read_bounded(read_checkpoint, str(folder)) == read_checkpoint(folder)

    (folder / INDEX).write_text("[" * 1000)
    with pytest.raises(CheckpointError) as caught:
        read_bounded(checkpoint_at, str(folder), None, {})
    assert caught.value.file == str(folder / INDEX)


def test_without_an_answer_the_checkpoint_is_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, time_s: float) -> None:
        raise NoAnswer("it takes more than 4096 MiB of memory", "Check where this model's files come from")

    monkeypatch.setattr(bounded_read, "call", fails)
    monkeypatch.setattr(bounded_read, "SMALL_BYTES", 0)

    with pytest.raises(CheckpointUnread, match="more than 4096 MiB") as caught:
        read_bounded(read_checkpoint, str(folder))
    assert (caught.value.file, caught.value.cure) == (str(folder), "Check where this model's files come from")


def test_a_checkpoint_of_too_many_tensors_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 0)

    with pytest.raises(CheckpointError, match="more than 0 tensors"):
        read_checkpoint(folder)


def test_placement_reads_a_large_checkpoint_and_its_draft_in_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []

    def called(read: Callable[..., Any], source: str, *arguments: Any, time_s: float) -> Any:
        sources.append(source)
        return read(source, *arguments)

    monkeypatch.setattr(bounded_read, "call", called)
    monkeypatch.setattr(bounded_read, "SMALL_BYTES", 0)
    draft = write_folder(folder.parent / "draft", SHARDS, CONFIG)
    speculative = json.dumps({"method": "eagle", "model": str(draft), "num_speculative_tokens": 1})
    spec = ModelConfig(name="m", model=str(folder), extra_args=("--speculative-config", speculative))

    headers_here(engine_args(spec, {}))

    assert sources[:2] == [str(folder), str(draft)]


def test_a_bounded_process_starts_no_other() -> None:
    started, nested = call(inside, time_s=HUNG_S)

    assert started == nested
