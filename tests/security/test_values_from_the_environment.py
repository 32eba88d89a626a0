"""`sparkd check` and a start that is refused: no message shows what `${env.NAME}` stands for, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import load_config
from sparkd.errors import ConfigError
from sparkd.inquiry import parser_answers
from sparkd.schema.yaml_file import ConfigProblem, masked
from sparkd.vllm.arg_check import RefusedArg

SECRET = "Canary-4f1c9e77d2"
# One for each way of a value: keys that are read here, in a list, as a name, as a path, as a number, as a flag of vLLM's, as a rule.
FILES = [
    "models: {m: {model: '/${env.S}/x'}}",
    "models: {m: {model: 'a b ${env.S}'}}",
    "models: {m: {model: o/m, aliases: ['${env.S}', '${env.S}']}}",
    "models: {m: {model: o/m, recipe: 'gpt-oss-120b@${env.S}'}}",
    "models: {m: {model: o/m, quantize: {layers: [{match: 're:${env.S}', format: fp8}]}}}",
    "models: {m: {model: o/m, kv_cache: {bytes: '${env.S}'}}}",
    "models: {m: {model: o/m, max_model_len: '${env.S}'}}",
    "models: {m: {model: o/m, extra_args: ['--${env.S}', '--api-key', '${env.S}']}}",
    "models: {m: {model: o/m, extra_args: ['--seed', '${env.S}']}}",
    "models: {m: {model: o/m, env: ['${env.S}']}}",
    "models: {m: {model: o/m, runtime: '/${env.S}'}}",
    "models: {m: {model: o/m, media: {domains: ['http://${env.S}']}}}",
    "models: {m: {model: o/m, dtype: '${env.S}'}}",
    "listen: '0.0.0.0:${env.S}'",
    "log_level: '${env.S}'",
    "keys: {admin: ['${env.S} ${env.S}']}",
    "hooks: {on_startup: {preload: ['${env.S}']}}",
    "recipes_dir: '/${env.S}'\nmodels: {m: {recipe: r}}",
    "memory: {os_reserve_gib: '${env.S}'}",
    "unknown: '${env.S}'",
]
VALUES = [SECRET, SECRET * 8, f"{SECRET}\n{SECRET}", f"{SECRET}'\"\\x", "é" + SECRET]


@pytest.fixture(autouse=True)
def _parser_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser of vLLM's that refuses every argument and repeats it, as argparse does."""

    def answers(lines: Sequence[Sequence[str]], *_: object, **__: object) -> list[tuple[RefusedArg, ...]]:
        return [tuple(RefusedArg(word, f"invalid choice: {word}") for word in line) for line in lines]

    monkeypatch.setattr(parser_answers, "answers", answers)


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
