"""sparkd.yaml, SPARKD_ variables and flags: what they become, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkd.config.config import Config, ModelConfig, load_config
from sparkd.config.overlay import _ENTRY_ALIASES, _TOP_ALIASES
from sparkd.errors import ConfigError
from tests.support.facts import lacking

KEY = "sk-canary-0123456789"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, flags: dict[str, Any] | None = None, **environ: str) -> Config:
        file = tmp_path / "sparkd.yaml"
        file.write_text(text)
        file.chmod(0o600)
        return load_config(file, flags=flags, environ=environ)

    return load


@pytest.fixture
def complain(load, tmp_path: Path):
    def complain(text: str, **environ: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        assert "Traceback" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path / "sparkd.yaml"), "F").splitlines()

    return complain


# What wins


@pytest.mark.parametrize(
    ("text", "environ", "flags", "port"),
    [
        ("", {}, {}, 4000),
        ("listen: 127.0.0.1:1", {}, {}, 1),
        ("listen: 127.0.0.1:1", {"SPARKD_LISTEN": "127.0.0.1:2"}, {}, 2),
        ("listen: 127.0.0.1:1", {"SPARKD_LISTEN": "127.0.0.1:2"}, {"listen": "127.0.0.1:3"}, 3),
        ("listen: 127.0.0.1:1", {"SPARKD_LISTEN": ""}, {"listen": None}, 1),
    ],
)
def test_flag_over_environment_over_file_over_default(load, text, environ, flags, port) -> None:
    assert load(text, flags, **environ).port == port


def test_no_file_is_the_default() -> None:
    assert load_config(None, environ={}) == Config()


def test_environment_reaches_into_sections_and_lists(load) -> None:
    config = load(
        "cluster: {port: 1, node_ip: 10.0.0.1}",
        SPARKD_CLUSTER__PORT="6379",
        SPARKD_KEYS__INFERENCE="a, b",
        SPARKD_LIMITS__KEEP_ALIVE_S="1.5",
        SPARKD_METRICS_NEED_KEY="true",
        SPARKD_HOOKS__ON_STARTUP__PRELOAD="",
        SPARKD_STUB_DELAY="1",
        SPARKD_API_KEY="x",
        HOME="/root",
    )

    assert (config.cluster.port, config.cluster.node_ip) == (6379, "10.0.0.1")
    assert [key.get_secret_value() for key in config.keys.inference] == ["a", "b"]
    assert config.limits.keep_alive_s == 1.5
    assert config.metrics_need_key is True


def test_an_unknown_variable_is_an_error_unless_the_file_names_it(load, complain) -> None:
    (unknown,) = complain("", SPARKD_LISTN="x")
    assert unknown.startswith("SPARKD_LISTN: ") and lacking(unknown, "SPARKD_LISTEN") == []
    (no_port,) = complain("", SPARKD_CLUSTER__PORT="x")
    assert no_port.startswith("SPARKD_CLUSTER__PORT: ") and lacking(no_port, "cluster.port", "'x'") == []
    assert load("log_level: '${env.SPARKD_MINE}'", SPARKD_MINE="debug").log_level == "debug"


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        ("model: o/a, sampling: {temprature: 1}", ["models.a.sampling.temprature", "temperature"]),
        ("modl: o/a", ["models.a.modl", "model"]),
        ("model: o/a, cmd: x", ["models.a.cmd", "docs/configuration.md"]),
        ("model: o/a, profile: single-user", ["models.a.profile", "max_num_seqs", "docs/upgrading.md"]),
    ],
)
def test_one_cause_is_told_once(complain, entry: str, facts: list[str]) -> None:
    (line,) = complain(f"models: {{a: {{{entry}}}}}")

    assert line.startswith("F:1: ") and lacking(line, *facts) == []


def test_flags_add_models_and_preloads(load) -> None:
    config = load(
        "models: {a: {model: o/a, ttl: 5}, b: {model: o/b}}",
        {"models": {"a": {"model": "o/other"}, "c": {"model": "/c"}}, "hooks.on_startup.preload": ["c"], "engine.platform": "cpu"},
    )

    assert {name: model.model for name, model in config.models.items()} == {"a": "o/other", "b": "o/b", "c": "/c"}
    assert config.models["a"].ttl is None
    assert (config.preload(), config.engine.platform) == (("c",), "cpu")


def test_relative_paths_count_from_the_file_or_the_working_folder(load, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir("/usr")
    monkeypatch.setenv("HOME", "/home/me")
    text = "state_dir: state\nengine: {runtime: ../venv/bin/python}\nmodels: {a: {model: ./a}, b: {model: ~/b}, c: {model: o/c}}"

    config = load(text)
    assert config.state_dir == tmp_path / "state"
    assert config.engine.runtime == tmp_path.parent / "venv/bin/python"
    assert [model.model for model in config.models.values()] == [str(tmp_path / "a"), "/home/me/b", "o/c"]
    assert load(text, {"state_dir": "here"}).state_dir == Path("/usr/here")
    assert load(text, {"state_dir": "~/x"}).state_dir == Path("/home/me/x")
    assert load(text, SPARKD_ENGINE__RUNTIME="bin/python").engine.runtime == Path("/usr/bin/python")


# What is wrong


# More of them: BROKEN of tests/golden/outputs.py, and tests/sparkd/cli/test_broken_configs.py.
@pytest.mark.parametrize(
    ("text", "line", "facts"),
    [
        ("models:\n a:\n  model: o/a\n  quantize:\n   layers: [{match: x, format: fp9}]", 4, ["models.a.quantize", "layers[0]", "'fp9'"]),
        (
            "models:\n a:\n  model: o/a\n  quantize: bf16\n  extra_args: [--seed, 1,\n   --load-format=auto]",
            *(6, ["models.a", "load_format and quantize", "exclude"]),
        ),
        ("models: {a: {model: o/../a}}", 1, ["models.a.model", "a folder", "owner/name"]),
        ("models: {a/../b: {model: o/a}}", 1, ["models.a/../b.name", "128 letters"]),
        ('models: {"a\\n\\e[31m": {model: o/a}}', 1, [r"models.'a\n\x1b[31m'.name", "128 letters"]),
        ("apiKeys: [a]\nkeys: {inference: [b]}", 1, ["apiKeys", "keys.inference", "line 2"]),
    ],
)
def test_every_complaint_names_place_key_and_what_it_takes(complain, text: str, line: int, facts: list[str]) -> None:
    (complaint,) = complain(text)

    assert complaint.startswith(f"F:{line}: ") and complaint.endswith((".", "?"))
    assert lacking(complaint, *facts) == []


def test_all_complaints_come_at_once_by_line_and_the_error_has_the_first_place(load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("models:\n  a: {model: o/a, cmd: x}\nlog_level: x\nlisten: ${env.NOPE}\nxyzzy: 1\n")

    assert [line.removeprefix(str(tmp_path / "sparkd.yaml"))[:3] for line in str(caught.value).splitlines()] == [
        ":2:",
        ":3:",
        ":4:",
        ":4:",
        ":5:",
    ]
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "sparkd.yaml"), 2)


def test_a_flood_of_complaints_is_cut(complain) -> None:
    lines = complain("\n".join(f"key{number}: 1" for number in range(100)))

    assert len(lines) == 21
    assert lines[-1] == "... and 80 more problems."


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path, environ={})
        assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "text",
    [
        f"keys: {{inference: [{KEY}, 5]}}",
        f"keys: {{inferense: [{KEY}]}}",
        f"models: {{a: {{model: o/a, env: {{HF_TOKEN: [{KEY}]}}}}}}",
        f"models: {{a: {{model: o/a, extra_args: [--hf-token={KEY}]}}}}",
        "limits: {max_body_bytes: '${env.CANARY}'}",
    ],
)
def test_no_complaint_repeats_a_secret(complain, text: str) -> None:
    assert KEY not in "\n".join(complain(text, CANARY=KEY))


def test_no_repr_and_no_dump_shows_a_secret(load) -> None:
    config = load(
        f"keys: {{inference: [{KEY}], admin: {KEY}}}\nengine: {{env: {{A: {KEY}}}}}\nmodels: {{a: {{model: o/a, env: [HF_TOKEN={KEY}]}}}}"
    )

    assert config.models["a"].environment(config.engine) == {"A": KEY, "HF_TOKEN": KEY}
    for shown in (repr(config), str(config), str(config.model_dump()), config.model_dump_json(), repr(config.models)):
        assert KEY not in shown


# What other tools write


def test_llama_swap_spellings(load) -> None:
    config = load(
        """
        healthCheckTimeout: 500
        logLevel: warn
        globalTTL: 60
        unloadTimeout: 10
        includeAliasesInList: true
        sendLoadingState: true
        apiKeys: ["${env.MINE}"]
        models:
          "qwen:72b":
            model: Qwen/Qwen
            useModelName: Qwen/Qwen
            aliases: [gpt-4o]
            env: ["A=b=c", "B="]
            ttl: -1
            concurrencyLimit: 0
            unlisted: true
            metadata: {a: [1, {b: c}]}
          "other":
            model: o/o
            ttl: 0
            concurrencyLimit: 4
            sendLoadingState: false
        hooks: {on_startup: {preload: [gpt-4o]}}
        """,
        MINE=KEY,
    )

    qwen, other = config.models["qwen:72b"], config.models["other"]
    assert (config.health_check_timeout_s, config.log_level, config.global_ttl_s, config.unload_timeout_s) == (500, "warning", 60, 10)
    assert config.include_aliases_in_list
    assert config.keys.inference[0].get_secret_value() == KEY
    assert qwen.served_names() == ("qwen:72b", "Qwen/Qwen", "gpt-4o")
    assert qwen.environment(config.engine) == {"A": "b=c", "B": ""}
    assert (config.ttl_s(qwen), qwen.concurrency_limit, qwen.unlisted, qwen.metadata) == (60, None, True, {"a": [1, {"b": "c"}]})
    assert (config.ttl_s(other), other.concurrency_limit) == (0, 4)
    assert (config.tells_loading(qwen), config.tells_loading(other)) == (True, False)
    assert config.preload() == ("qwen:72b",)


def test_no_spelling_hides_a_key_of_ours() -> None:
    assert not set(Config.model_fields) & set(_TOP_ALIASES) and not set(ModelConfig.model_fields) & set(_ENTRY_ALIASES)
    assert {path[0] for path in _TOP_ALIASES.values()} <= set(Config.model_fields)
    assert set(_ENTRY_ALIASES.values()) <= set(ModelConfig.model_fields)
