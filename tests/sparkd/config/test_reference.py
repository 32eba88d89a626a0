"""The files in configs/: the commented reference and the code say the same, and the examples load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sparkd.cli.config_check import check
from sparkd.config import yaml_file
from sparkd.config.config import Config, ModelConfig, load_config

CONFIGS = Path(__file__).parents[3] / "configs"
KEY = "sk-canary-0123456789"
SHOWN = "configs/sparkd.yaml shows each key with its default behind a #, and a comment above it"


def uncommented(text: str) -> str:
    """A '#' that is followed by no space hides a key; the reference's head says so."""
    return re.sub(r"^( *)#(?=[^ #\n])", r"\1", text, flags=re.MULTILINE)


def keys_of(section: type[BaseModel], path: str = "") -> set[str]:
    keys = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= keys_of(inner, f"{path}{name}.")
        keys.add(path + name)
    return keys


def keys_in(table: dict[str, Any], path: str = "") -> set[str]:
    keys = {path + key for key in table}
    for key, value in table.items():
        if isinstance(value, dict):
            keys |= keys_in(value, f"{path}{key}.")
    return keys


def test_the_reference_sets_every_key_to_its_default() -> None:
    assert load_config(CONFIGS / "sparkd.yaml", environ={}) == Config()
    assert check(CONFIGS / "sparkd.yaml", {}) == []


def test_the_reference_shows_every_key_and_no_other(tmp_path: Path) -> None:
    text = uncommented((CONFIGS / "sparkd.yaml").read_text())
    file = tmp_path / "sparkd.yaml"
    file.write_text(text)

    config = load_config(file, environ={})
    assert config.model_copy(update={"models": {}}) == Config()
    assert config.models == {"my-model": ModelConfig(name="my-model", model="/models/my-model")}
    shown = keys_in(yaml_file.parse(text.encode(), "", {}).values)
    models = {key.removeprefix("models.my-model.") for key in shown if key.startswith("models.my-model.")}
    assert models == keys_of(ModelConfig) - {"name"}, SHOWN
    assert {key for key in shown if not key.startswith("models.")} == keys_of(Config), SHOWN


def test_the_reference_explains_every_key() -> None:
    """Before each key stand its words, or they stand before the keys of which it is one."""
    lines = (CONFIGS / "sparkd.yaml").read_text().splitlines()
    explained = False
    for line in lines:
        if re.match(r" *# \S", line):
            explained = True
        elif not line.strip():
            explained = False
        else:
            assert explained or re.fullmatch(r" *(on_startup|#my-model|memory|hooks|#models):", line), line


@pytest.mark.parametrize("name", ["one-spark.yaml", "two-sparks.yaml"])
def test_the_examples_load(name: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    files = {f"SPARKD_KEYS__{role}_FILE": str(key) for role in ("INFERENCE", "ADMIN")}

    assert check(CONFIGS / name, files) == []
    config = load_config(CONFIGS / name, environ=files)
    assert len(config.preload()) == 1
    # What has a size fits beside the rest of it into one Spark; what takes all that is left has a Spark of its own.
    sized = [model.memory_gib for model in config.models.values() if model.memory_gib != "auto"]
    assert sum(sized) <= 121 - 7
    assert len(config.models) - len(sized) <= (2 if config.cluster.node_ip else 0)
