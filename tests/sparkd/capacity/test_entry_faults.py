"""What a look at a model's files finds wrong with its entry, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity import entry_faults
from sparkd.capacity.entry_faults import refuse_faulty
from sparkd.config.config import Config, load_config
from sparkd.errors import ConfigError
from sparkd.vllm.ask.answers import ModelRefusal
from tests.sparkd.capacity.test_evidence import answer
from tests.support.checkpoints import dense, write
from tests.support.facts import facts
from tests.support.published_tensors import tensors_of

# No group above 64 divides 576 columns, and three ranks no 9 heads.
UNEVEN = dense(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("faults") / "m", UNEVEN, tensors_of(UNEVEN))


def config(folder: Path, **entries: Any) -> Config:
    models = {name: {"model": str(folder), "max_model_len": 4096, **keys} for name, keys in entries.items()}
    return load_config(None, flags={"models": models, "state_dir": str(folder.parent / "state")}, environ={})


def refusal(given: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_faulty(given.models.values(), given)
    return refused.value.message


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a group": ("quantize", {"quantize": "nf4-g128"}),
    "a text": ("quantize", {"quantize": {"format": "nvfp4-a4", "calibration": "/nothing/there.txt"}}),
    "a size": ("quantize", {"quantize": {"format": "best", "gib": 0.001}}),
    "ranks": ("tensor_parallel", {"tensor_parallel": 2}),
    "a length": ("max_model_len", {"max_model_len": 1_000_000}),
    "a draft": (
        "extra_args",
        {"extra_args": ["--speculative-config", '{"method": "eagle3", "model": "/none", "num_speculative_tokens": 2}']},
    ),
    "a folder": ("model", {"model": "/etc"}),
}


@pytest.mark.parametrize(("key", "entry"), FAULTS.values(), ids=FAULTS)
def test_an_entry_that_its_files_refuse_is_named_with_the_key(key: str, entry: dict[str, Any], folder: Path) -> None:
    assert refusal(config(folder, good={}, bad=entry)).startswith(f"models.bad.{key}: ")


def test_what_vllm_has_refused_is_told_in_its_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = answer(refusal=ModelRefusal("config", "ValueError", "9 heads are odd.", certain=True))
    monkeypatch.setattr(entry_faults, "kept_here", lambda questions, runtime: [said for _ in questions])
    assert "9 heads are odd." in refusal(config(folder, m={}))
    assert refusal(config(folder, m={"tensor_parallel": 2})).startswith("models.m.tensor_parallel: ")


def test_every_entry_is_named(folder: Path) -> None:
    message = refusal(config(folder, first={"quantize": "nf4-g128"}, second={"quantize": "int4-g128"}))
    assert [line.partition(":")[0] for line in message.splitlines()] == ["models.first.quantize", "models.second.quantize"]
    assert "576" in facts(message)


def test_what_only_warns_and_what_is_elsewhere_refuses_nothing(folder: Path) -> None:
    idle = {"quantize": {"format": "nf4-g64", "layers": {"no_such_layer": "fp8"}}}
    given = config(folder, idle=idle, hub={"model": "owner/name", "quantize": "nf4-g128"}, away={"model": "/nothing/there"})
    refuse_faulty(given.models.values(), given)


def test_a_text_that_came_meanwhile_is_seen(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    given = config(folder, m={"quantize": {"format": "nvfp4-a4", "calibration": str(text)}})
    refusal(given)
    text.write_text("All work and no play. " * 100)
    refuse_faulty(given.models.values(), given)
    text.unlink()
    assert str(text) in facts(refusal(given))
