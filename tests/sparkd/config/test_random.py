"""No text, whatever it says, makes anything but a configuration or a ConfigError."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.config.config import load_config, parse_model
from sparkd.errors import ConfigError
from sparkd.schema import aliases
from sparkd.schema.fields import Section

KEYS = sorted({key for section in Section.__subclasses__() for key in section.model_fields} | {*aliases.TOP, *aliases.MODEL, "<<", "a", ""})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "127.0.0.1:1", "/x", "~/x", "~nobody/x", "o/m", "--port", "${env.A}", "${env.B}", "\x00", "\ud800", "1k"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


# What else a model's entry has: with a recipe, its keys are laid over those of that.
BASES = st.sampled_from([
    {"model": "o/m"}, {"recipe": "gpt-oss-120b"}, {"recipe": "qwen3.6-35b-a3b-nvfp4", "speculative": "dflash", "profile": "single-user"},
])  # fmt: skip


def written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(str(key))}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


@settings(max_examples=100, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), BASES, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_random_configurations_load_or_raise_a_config_error(
    tmp_path_factory, top: dict[str, Any], base: dict[str, Any], entry: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.yaml"
    if "models" not in top:
        top["models"] = {"m": {**base, **entry}}
    file.write_text(written(top))
    with suppress(ConfigError):
        load_config(file, environ={"A": "1", "HOME": "/"}).preload()


@settings(max_examples=100, deadline=None, database=None)
@given(BASES | st.just({}), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), st.booleans())
def test_random_models_parse_or_raise_a_config_error(base: dict[str, Any], raw: dict[str, Any], over_admin: bool) -> None:
    with suppress(ConfigError):
        parse_model("m", {**base, **raw}, over_admin=over_admin).vllm_flags()
