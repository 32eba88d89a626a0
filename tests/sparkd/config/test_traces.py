"""`traces`: which addresses of a collector are taken, the error without the packages for it, and what engines are started with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity.launch_spec import rank_fields
from sparkd.config.config import Config, config_hash, load_config, parse_model
from sparkd.config.traces import TraceSettings
from sparkd.errors import ConfigError
from sparkd.vllm.translate import Translation
from workers.host.runtime import API_SERVER, COMMAND_LINE
from workers.rank.command import build_command, build_environment
from workers.rank.spec import RankSpec

URL = "http://10.0.0.1:4318"
FLAG = "--otlp-traces-endpoint"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def load(folder: Path, text: str) -> Config:
    path = folder / "sparkd.yaml"
    path.write_text(text)
    return load_config(path, environ={})


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (URL, f"{URL}/v1/traces"),
        ("https://[fd00::1]:4318/otlp", "https://[fd00::1]:4318/otlp/v1/traces"),
        (None, None),
    ],
)
def test_where_spans_are_posted(endpoint: str | None, url: str | None) -> None:
    assert TraceSettings(endpoint=endpoint).url == url


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://me:hunter2@collector", "http://collector/?key=hunter2"])
def test_an_address_with_a_secret_or_without_a_scheme_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint") as refused:
        load(tmp_path, f'traces: {{endpoint: "{endpoint}"}}')
    assert "hunter2" not in refused.value.message


def test_a_ratio_is_a_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"traces\.ratio"):
        load(tmp_path, "traces: {ratio: 1.1}")


def test_packages_that_are_missing_are_an_error_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http"
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(ConfigError, match=r"traces\.endpoint.*sparkd\[traces\]"):
        load(tmp_path, f"traces: {{endpoint: {URL}}}")
    assert exit_code(["check", str(tmp_path / "sparkd.yaml")]) != 0
    assert "sparkd[traces]" in "".join(capsys.readouterr())
    assert load(tmp_path, "traces: {ratio: 0.5}").traces.url is None


def engine(entrypoint: str, args: tuple[str, ...] = (), endpoint: str | None = URL) -> RankSpec:
    config = Config(traces=TraceSettings(endpoint=endpoint))
    spec = parse_model("m", {"model": "/models/m", "kv_cache": "auto"}, over_admin=False)
    fields = rank_fields(config, spec, "cuda", entrypoint, Translation(args, {}), None)
    own = {"rank_id": "r", "generation": 0, "node_id": "n", "run_dir": "/run/sparkd", "log_path": "/dev/null", "config_hash": ""}
    return RankSpec.from_dict({**fields, **own, "rank": 0, "world": 1})


@pytest.mark.parametrize("entrypoint", [API_SERVER, COMMAND_LINE])
def test_an_engine_of_vllm_sends_its_spans_to_the_same_collector(entrypoint: str) -> None:
    rank = engine(entrypoint)
    command = build_command(rank)

    assert command[command.index(FLAG) + 1] == f"{URL}/v1/traces"
    assert build_environment(rank, {})[PROTOCOL] == "http/protobuf"


@pytest.mark.parametrize(
    "rank",
    [
        engine(API_SERVER, endpoint=None),
        engine("tests.stub"),
        engine(API_SERVER, (FLAG, "http://other:4317")),
    ],
)
def test_another_engine_and_an_entry_with_a_collector_of_its_own_are_left_alone(rank: RankSpec) -> None:
    assert f"{URL}/v1/traces" not in build_command(rank)
    assert PROTOCOL not in build_environment(rank, {})


def test_an_engine_that_runs_is_adopted_with_and_without_a_collector() -> None:
    spec = parse_model("m", {"model": "/models/m"}, over_admin=False)

    hashes = {config_hash(spec, Config(traces=TraceSettings(endpoint=endpoint)).engine) for endpoint in (None, URL)}
    assert len(hashes) == 1
    assert replace(engine(API_SERVER, endpoint=None), flags=()) == replace(engine(API_SERVER), flags=(), env={})
