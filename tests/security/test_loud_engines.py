"""Settings that write prompts and answers into an engine's log: an added model's are refused, those in the file raise a condition."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import load_config, parse_model
from sparkd.control.registry import Registry
from sparkd.errors import ConfigError
from sparkd.state.store import Store
from sparkd.vllm.logging_args import loud

LOUD = [
    (["--log-level", "debug"], {}, "--log-level"),
    (["--log_level=NOTSET"], {}, "--log-level"),
    (["--uvicorn-log-level", "trace"], {}, "--uvicorn-log-level"),
    (["--enable-log-requests"], {}, "--enable-log-requests"),
    (["--enable_log_outputs"], {}, "--enable-log-outputs"),
    (["--enable-log-deltas"], {}, "--enable-log-deltas"),
    (["--logging-config={}"], {}, "--logging-config"),
    (["--log-config-file", "/x"], {}, "--log-config-file"),
    (["--log-error-stack"], {}, "--log-error-stack"),
    ([], {"VLLM_LOGGING_LEVEL": "debug"}, "VLLM_LOGGING_LEVEL"),
    ([], {"VLLM_LOGGING_CONFIG_PATH": "/x"}, "VLLM_LOGGING_CONFIG_PATH"),
    ([], {"VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "True"}, "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"),
    ([], {"VLLM_TRACE_FUNCTION": "1"}, "VLLM_TRACE_FUNCTION"),
]
QUIET = [
    (["--log-level", "info"], {}),
    (["--no-enable-log-requests", "--max-logprobs", "5", "--seed", "1"], {}),
    ([], {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_TRACE_FUNCTION": "0"}),
]


@pytest.mark.parametrize(("args", "env", "name"), LOUD)
def test_what_is_loud(args: list[str], env: dict[str, str], name: str) -> None:
    assert name in list(loud(args, env))
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", "extra_args": args, "env": env}, over_admin=True)


@pytest.mark.parametrize(("args", "env"), QUIET)
def test_what_is_not(args: list[str], env: dict[str, str]) -> None:
    assert list(loud(args, env)) == []


@pytest.mark.parametrize("where", ["models", "engine"])
def test_the_files_own_is_told_by_check_log_and_condition(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "sparkd.yaml"
    entry = "models: {m: {model: /m, env: {VLLM_LOGGING_LEVEL: DEBUG}}, quiet: {model: /m}}"
    file.write_text(entry if where == "models" else "engine: {env: {VLLM_LOGGING_LEVEL: DEBUG}}\nmodels: {m: {model: /m}}")

    assert [problem.severity for problem in check(file, {}) if "VLLM_LOGGING_LEVEL" in problem.message] == ["warning"]

    config = load_config(file, flags={"state_dir": str(tmp_path)}, environ={})
    with closing(Store(tmp_path / "state.db")) as store:
        registry = Registry(config, store, lambda: 0.0, lambda: 0.0)
        assert [condition.reason for condition in registry.conditions] == ["LogsAnswers"]
        warned = caplog.text.count("VLLM_LOGGING_LEVEL")
        registry.configure(config)
        assert warned and caplog.text.count("VLLM_LOGGING_LEVEL") == warned

        quiet = load_config(None, flags={"state_dir": str(tmp_path)}, environ={})
        registry.configure(quiet)
        assert registry.conditions == []
