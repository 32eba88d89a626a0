"""Whether a folder can be a model's: one wording for each cause, the same for the file's check, a plan and an added model."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.capacity.plan_for_node import entry_here
from sparkd.checkpoint.model_folder import unusable, unusable_of
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.config.config import Config, load_config, parse_model
from sparkd.errors import CheckpointError, ConfigError

FAULTY = ("file", "gone", "empty", "bare", "above", "models--a--b", "adapter")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    for name in ("empty", "bare", "above/inner", "models--a--b/snapshots", "adapter"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bare/model.safetensors", "above/inner/config.json", "adapter/adapter_config.json"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("name", FAULTY)
def test_one_wording_for_each_cause(place: Path, name: str) -> None:
    folder = str(place / name)
    fault = unusable(folder, vllm=True)
    assert fault is not None and folder in fault.message
    assert str(place) not in (fault.client_message or "")
    with pytest.raises(CheckpointError) as read:
        checkpoint_at(folder, None, {})
    with pytest.raises(ConfigError) as planned:
        entry_here(folder, None, Config())
    assert (read.value.message, planned.value.message) == (fault.message, fault.message)
    assert read.value.param == planned.value.param == "model"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "tekken.json", "spiece.model", "qwen.tiktoken"])
def test_a_folder_without_a_tokenizer_is_refused_by_name_before_vllm_is_started(tmp_path: Path, name: str) -> None:
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / file).touch()
    engine, keys = load_config(None, environ={}).engine, {"model": str(tmp_path)}
    entry = parse_model("m", keys, over_admin=False)
    fault = unusable_of(entry, engine)
    assert fault is not None and "tokenizer.json" in fault.message
    assert unusable(str(tmp_path), vllm=True) is None, "a plan needs none"
    for other in ({"extra_args": ["--tokenizer", "o/m"]}, {"entrypoint": "my.server"}):
        assert unusable_of(parse_model("m", keys | other, over_admin=False), engine) is None

    (tmp_path / name).touch()
    assert unusable_of(entry, engine) is None


def test_a_folder_of_models_is_told_from_one_of_other_files_and_no_folder_below_it_is_named(place: Path) -> None:
    above, bare = (unusable(str(place / name), vllm=True) for name in ("above", "bare"))
    assert above is not None and bare is not None
    assert "own folder" in above.message and "own folder" not in bare.message
    assert "inner" not in above.message


def test_a_folder_with_a_model_in_it_can_be_one(place: Path) -> None:
    assert unusable(str(place / "above" / "inner"), vllm=True) is None
    assert unusable(str(place / "bare"), vllm=False) is None
    assert unusable("owner/name", vllm=True) is None
