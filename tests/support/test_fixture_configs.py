"""What the fixtures of real checkpoints promise: they parse, agree with themselves, and name their source; it estimates nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = FIXTURES / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
KEYS = ("model", "fixture", "hardware", "nodes", "tp", "format", "vllm", "what", "value", "conditions", "source")
LAYERS = re.compile(r"\.layers\.(\d+)\.")


def config(name: str) -> dict[str, Any]:
    loaded = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


def entries(name: str) -> list[dict[str, Any]]:
    loaded = yaml.safe_load((FIXTURES / name).read_text())
    assert isinstance(loaded, list)
    return loaded


def language(loaded: dict[str, Any]) -> dict[str, Any]:
    """The part that shapes the language model, wherever the architecture keeps it."""
    return loaded.get("text_config") or loaded.get("llm_config") or loaded


SHAPES = [name for name in NAMES if not name.endswith(".hf_quant_config")]


def test_a_configuration_describes_every_layer() -> None:
    for text in (language(config(name)) for name in SHAPES):
        layers = text["num_hidden_layers"]
        assert layers > 0 and text["hidden_size"] > 0 and text["vocab_size"] > 0
        assert text["num_attention_heads"] % text["num_key_value_heads"] == 0
        assert len(text.get("layer_types", range(layers))) == layers
        assert len(text.get("hybrid_override_pattern", range(layers))) == layers
        assert layers % text.get("full_attention_interval", 1) == 0


def test_a_quantization_names_only_layers_that_are_there() -> None:
    for name in SHAPES:
        loaded, separate = config(name), f"{name}.hf_quant_config"
        texts = [json.dumps(loaded.get("quantization_config", {})), json.dumps(config(separate)) if separate in NAMES else ""]
        named = {int(layer) for text in texts for layer in LAYERS.findall(text)}
        assert max(named, default=0) < language(loaded)["num_hidden_layers"], name


def test_a_separate_quantization_belongs_to_a_configuration() -> None:
    assert not {name.removesuffix(".hf_quant_config") for name in NAMES} - set(SHAPES)


def test_the_readme_says_where_each_file_is_from() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (\S[^|]*) \|", (CONFIGS / "README.md").read_text(), re.MULTILINE)

    assert [name for name, _ in rows] == [name for name, _ in dict(rows).items()]
    assert {name for name, _ in rows} == set(NAMES)


def test_a_published_figure_says_what_it_is_of_and_where_it_stands() -> None:
    published = entries("published.yaml")

    assert {tuple(entry) for entry in published} == {KEYS}
    assert all(entry["fixture"] in SHAPES and entry["source"] and entry["value"] > 0 for entry in published)


def test_a_total_is_a_count_of_a_known_shape() -> None:
    for entry in entries("totals.yaml"):
        assert set(entry) == {"model", "fixture", "what", "value", "conditions", "source"}, entry
        assert entry["what"] in {"elements", "checkpoint_bytes"} and entry["fixture"] in SHAPES, entry
        assert isinstance(entry["value"], int) and entry["value"] > 0 and entry["source"], entry
