"""`sparkd check` and a start that is refused: no message shows what `${env.NAME}` stands for, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import load_config
from sparkd.errors import ConfigError
from sparkd.schema.yaml_file import ConfigProblem, masked
from tests.support.parser_batch import ask_at_once

SECRET = "Canary-4f1c9e77d2"
FILES = [
    "models: {m: {model: '${env.S}'}}",
    "models: {m: {model: '/${env.S}/x'}}",
    "models: {m: {model: 'a b ${env.S}'}}",
    "models: {m: {model: o/m, aliases: ['${env.S}', '${env.S}']}}",
    "models: {m: {model: o/m, aliases: ['${env.S}']}, n: {model: o/m, aliases: ['${env.S}']}}",
    "models: {m: {model: o/m, aliases: ['bad name ${env.S}']}}",
    "models: {m: {model: o/m, recipe: '${env.S}'}}",
    "models: {m: {model: o/m, recipe: 'gpt-oss-120b@${env.S}'}}",
    "models: {m: {model: o/m, quantize: '${env.S}'}}",
    "models: {m: {model: o/m, quantize: {layers: {'o_proj': '${env.S}'}}}}",
    "models: {m: {model: o/m, quantize: {layers: [{match: 're:(${env.S}', format: fp8}]}}}",
    "models: {m: {model: o/m, kv_cache: '${env.S}'}}",
    "models: {m: {model: o/m, kv_cache: {bytes: '${env.S}'}}}",
    "models: {m: {model: o/m, max_model_len: '${env.S}'}}",
    "models: {m: {model: o/m, extra_args: ['--${env.S}', '--api-key', '${env.S}']}}",
    "models: {m: {model: o/m, extra_args: ['${env.S}']}}",
    "models: {m: {model: o/m, extra_args: ['--api-key-${env.S}=x', '--host${env.S}']}}",
    "models: {m: {model: o/m, env: ['${env.S}']}}",
    "models: {m: {model: o/m, env: {VLLM_FP8_LAYERS: '${env.S}'}, quantize: ''}}",
    "models: {m: {model: o/m, runtime: '/${env.S}'}}",
    "models: {m: {model: o/m, media: {domains: ['http://${env.S}']}}}",
    "models: {m: {model: o/m, revision: '../${env.S}'}}",
    "models: {m: {model: o/m, dtype: '-${env.S}'}}",
    "models: {m: {model: o/m, speculative: '${env.S}'}}",
    "listen: '${env.S}'",
    "listen: '0.0.0.0:${env.S}'",
    "log_level: '${env.S}'",
    "engine: {runtime: '/${env.S}/python'}",
    "engine: {platform: '${env.S}'}",
    "cluster: {address: '${env.S}'}",
    "keys: {admin_file: '/${env.S}'}",
    "keys: {admin: ['${env.S} ${env.S}']}",
    "hooks: {on_startup: {preload: ['${env.S}']}}",
    "groups: {g: {members: ['${env.S}']}}",
    "recipes_dir: '/${env.S}'\nmodels: {m: {recipe: r}}",
    "memory: {os_reserve_gib: '${env.S}'}",
    "limits: {max_body_bytes: '${env.S}'}",
    "unknown: '${env.S}'",
]
VALUES = [SECRET, SECRET * 8, f"{SECRET}\n{SECRET}", f" {SECRET} ", f"{SECRET}'\"\\x", "é" + SECRET, f"/{SECRET}/{SECRET}"]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's parser has answered for every value in every file, in one child."""
    file = tmp_path_factory.mktemp("asked") / "sparkd.yaml"

    def checks() -> None:
        for text in FILES:
            file.write_text(text)
            for value in VALUES:
                check(file, {"S": value})

    ask_at_once(checks)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("text", FILES)
def test_no_message_shows_a_value_of_the_environment(text: str, tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(text)
    for value in VALUES:
        environ = {"S": value}
        told = [str(problem) for problem in check(file, environ)]
        try:
            load_config(file, environ=environ)
        except ConfigError as error:
            told.append(str(error))
        assert not [message for message in told if "anary-4f1c" in message], told


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("m is 'hunter2-secret' and no more", "m is '${env.S}' and no more"),
        ("m is 'hunter2-se...' and no more", "m is '${env.S}' and no more"),
        ("m is HUNTER2-SECRET", "m is HUNTER2-SECRET"),
        ("nothing of it", "nothing of it"),
        ("hunter2... is too short to be it", "hunter2... is too short to be it"),
    ],
)
def test_what_is_masked(message: str, shown: str) -> None:
    (problem,) = masked(
        [ConfigProblem("f", 1, message)], ["S", "UNSET", "SHORT"], {"S": "hunter2-secret", "SHORT": "is", "OTHER": "nothing"}
    )

    assert problem == ConfigProblem("f", 1, shown)
