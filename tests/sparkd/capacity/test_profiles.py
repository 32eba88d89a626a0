"""Which profile of an earlier start the daemon and a plan believe: that of the same engine, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity import planned_entry
from sparkd.capacity.evidence import Evidence
from sparkd.capacity.launch import rank_fields
from sparkd.checkpoint.source import folder_of
from sparkd.config.config import Config, parse_model
from sparkd.config.model import ModelConfig
from sparkd.hardware import machine
from sparkd.units import GIB
from tests.support.accounts import account
from tests.support.checkpoints import dense, write
from tests.support.published_tensors import tensors_of
from workers.host.runtime import API_SERVER, Runtime
from workers.kv.arithmetic import Demand
from workers.kv.profiles import MeasuredProfile, Profiles, checkpoint_of, key_of, profiles_in
from workers.kv.settings import CacheSettings

SPARK = machine("cuda", 121 * GIB, 0)
KEYS: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 8, "quantize": "nvfp4", "env": {"VLLM_ATTENTION": "a", "HF_TOKEN": "secret"}}
PEAK, GRAPHS = 5 * GIB + 1, GIB + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = dense(max_position_embeddings=8192)
    return str(write(tmp_path_factory.mktemp("models") / "m", config, tensors_of(config)))


def spec_of(model: str, **more: Any) -> ModelConfig:
    return parse_model("m", {"model": model, **KEYS, **more}, over_admin=False)


def run(state: Path, spec: ModelConfig, ways: tuple[int, int] = (1, 1), rank: int = 0, vllm: str = "0.32.0", device: str = "") -> Config:
    """As a worker keeps what it has found, which the daemon has started so."""
    config = Config(state_dir=state)
    fields = rank_fields(config, spec, "cuda", "vllm.entrypoints.openai.api_server", vllm)
    settings = CacheSettings(**fields["kv_cache"])
    held = folder_of(spec.model, spec.revision, spec.environment(config.engine))
    about = {"checkpoint": checkpoint_of(str(held)), "world": [*ways, rank], "config": settings.engine, "device": device}
    kept = Profiles(settings.profiles, settings.engine)
    assert kept.keep(key_of(about), MeasuredProfile(Demand(graphs=GRAPHS, peak=PEAK), 3.0), about)
    assert "secret" not in "".join(path.read_text() for path in Path(str(settings.profiles)).iterdir())
    return config


def believed(config: Config, spec: ModelConfig, ways: tuple[int, int] = (1, 1)) -> bool:
    plain = account(spec, SPARK, spec.environment(config.engine), Evidence((), "0.32.0"), ways)
    found = account(spec, SPARK, spec.environment(config.engine), Evidence(profiles_in(str(config.profiles_path)), "0.32.0"), ways)
    assert plain is not None and found is not None
    return found.fixed > plain.fixed + 4 * GIB


def test_the_same_engine_is_believed(folder: str, tmp_path: Path) -> None:
    config = run(tmp_path, spec_of(folder))
    assert believed(config, spec_of(folder))
    # What it is called, and how its answers are read, takes no memory.
    assert believed(config, spec_of(folder, aliases=["other"], tool_call_parser="hermes", reasoning_parser="qwen3", ttl=5))
    assert believed(config, spec_of(folder, env={"VLLM_ATTENTION": "a", "HF_TOKEN": "another"}))


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_seqs": 9},
        {"quantize": "mxfp4"},
        {"env": {"VLLM_ATTENTION": "b"}},
        {"extra_args": ["--attention-backend", "TRITON_ATTN"]},
    ],
)
def test_another_engine_is_not(folder: str, tmp_path: Path, more: dict[str, Any]) -> None:
    assert not believed(run(tmp_path, spec_of(folder)), spec_of(folder, **more))


def test_nor_is_another_world_or_release(folder: str, tmp_path: Path) -> None:
    config = run(tmp_path, spec_of(folder), (2, 1))
    assert not believed(config, spec_of(folder)) and not believed(config, spec_of(folder), (1, 2))
    assert believed(config, spec_of(folder), (2, 1))
    assert not believed(run(tmp_path / "other", spec_of(folder), (2, 1), rank=1), spec_of(folder), (2, 1))
    assert not believed(run(tmp_path / "old", spec_of(folder), vllm="0.26.0"), spec_of(folder))


def test_a_hub_id_is_known_by_its_snapshot(folder: str, tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--owner--name"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "snapshots").mkdir()
    (snapshots / "refs" / "main").write_text("abc")
    (snapshots / "snapshots" / "abc").symlink_to(folder)
    spec = spec_of("owner/name", env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    config = run(tmp_path / "state", spec)
    assert believed(config, spec)
    (snapshots / "refs" / "main").write_text("new")
    (snapshots / "snapshots" / "new").symlink_to(f"{folder}-new")
    other = dense(max_position_embeddings=8192, tie_word_embeddings=False)
    write(Path(f"{folder}-new"), other, tensors_of(other))
    assert not believed(config, spec)


def test_a_plan_without_a_configuration_believes_the_engine_of_its_entry(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_entry, "probe", lambda _: Runtime("cuda", "0.32.0", API_SERVER))

    def peak_of(state: Path) -> tuple[dict[str, Any], int]:
        monkeypatch.setenv("SPARKD_STATE_DIR", str(state))
        assert exit_code(["plan", "--quick", "--json", folder, "--quantize", "nvfp4", "--ctx", "4096"]) == 0
        choice = json.loads(capsys.readouterr().out)["choice"]
        return choice["config"], choice["footprint"]["peak"]

    entry, plain = peak_of(tmp_path)
    spec = parse_model("m", entry, over_admin=False)
    run(tmp_path, spec, device="NVIDIA GB10 127")
    assert plain < peak_of(tmp_path)[1] == PEAK
    run(tmp_path / "other", spec, device="NVIDIA H200 150")
    assert peak_of(tmp_path / "other")[1] == plain
