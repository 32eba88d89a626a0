"""How much memory is reserved for a model: what the engine will take, from sizes and flags alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.account import VLLM_DEFAULT_UTILIZATION, stored_bytes
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config, parse_model
from sparkd.errors import ConfigError, RankError
from sparkd.hardware import GIB
from tests.support.accounts import needed_gib, needing
from workers.kv.settings import CPU_KV_CACHE_GIB

SPARK_GIB = 121.6
UTILIZATION = "--gpu-memory-utilization"


def need(platform: str, total_gib: float = SPARK_GIB, env: dict[str, str] | None = None, **keys: Any) -> int:
    return needed_gib(parse_model("m", {"model": "owner/name", **keys}, over_admin=False), platform, total_gib, env or {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """10 GiB of weights that take no room on the disk, and files that are none."""
    for number, gib in enumerate((4, 6), 1):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(gib * GIB)
    with (tmp_path / "optimizer.pt").open("wb") as file:
        file.truncate(50 * GIB)
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "gib"),
    [
        ({}, 112),
        ({"gpu_memory_utilization": 0.5}, 61),
        ({"extra_args": [UTILIZATION, "0.5"]}, 61),
        ({"gpu_memory_utilization": 0.5, "memory_gib": 7.2}, 8),
        ({"kv_cache": "auto"}, 112),
        ({"kv_cache": {"utilization": 0.5}}, 61),
    ],
)
def test_on_cuda_what_vllm_will_take(keys: dict[str, Any], gib: int) -> None:
    assert VLLM_DEFAULT_UTILIZATION * SPARK_GIB < 112
    assert need("cuda", **keys) == gib


@pytest.mark.parametrize(
    ("keys", "env", "gib"),
    [
        ({}, {}, 11 + CPU_KV_CACHE_GIB + 2),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 18),
        ({"extra_args": ["--kv-cache-memory-bytes", "3G"]}, {}, 16),
        ({"gpu_memory_utilization": 0.5}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 18),
        ({"kv_cache": {"bytes": "8GiB"}}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 21),
        ({"kv_cache": "auto"}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 112),
    ],
)
def test_on_the_cpu_weights_kv_cache_and_processes(folder: Path, keys: dict[str, Any], env: dict[str, str], gib: int) -> None:
    assert need("cpu", env=env, model=str(folder), **keys) == gib


def test_a_cache_of_so_many_bytes_leaves_room_for_other_models(folder: Path) -> None:
    assert need("cuda", model=str(folder), kv_cache={"bytes": "8GiB"}) == 11 + 8 + 3


@pytest.mark.parametrize(
    ("platform", "keys", "gib"),
    [
        ("cuda", {}, 100),
        ("cpu", {"kv_cache": "auto"}, 100),
        ("cuda", {"gpu_memory_utilization": 0.9}, 110),
        ("cpu", {}, 11 + CPU_KV_CACHE_GIB + 2),
    ],
)
def test_all_that_is_left_is_no_more_than_the_node_lends(folder: Path, platform: str, keys: dict[str, Any], gib: int) -> None:
    spec = parse_model("m", {"model": str(folder), **keys}, over_admin=False)

    assert needed_gib(spec, platform, SPARK_GIB, {}, 100.7) == gib


@pytest.mark.parametrize("value", ["much", "0", "1.5", "nan"])
def test_a_share_that_vllm_would_not_read(value: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu.memory.utilization.*\b0\b.*\b1\b"):
        need("cuda", extra_args=[UTILIZATION, value])


@pytest.mark.parametrize("env", ["4GB", "-1"])
def test_a_kv_cache_space_that_vllm_would_not_read(env: str) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE\b.*GiB") as caught:
        need("cpu", env={"VLLM_CPU_KVCACHE_SPACE": env})
    assert env not in caught.value.message


def test_a_kv_cache_size_that_vllm_would_not_read() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        need("cpu", extra_args=["--kv-cache-memory-bytes", "lots"])


def test_what_is_not_on_disk_weighs_nothing(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to("/nowhere/at/all")

    assert [stored_bytes(model) for model in ("owner/name", "/nowhere", str(tmp_path))] == [0] * 3
    assert need("cpu") == CPU_KV_CACHE_GIB + 2


async def test_what_the_release_of_the_runtime_does_not_understand_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.sentry.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    spec = parse_model("m", {"model": "o/m", "env": {"VLLM_ATTENTION_BACKEND": "XFORMERS"}}, over_admin=False)
    need = replace(needing(spec, "cuda", 1, None), entrypoint="vllm.entrypoints.cli.main", vllm="0.32.0")
    monkeypatch.setattr("sparkd.cluster.placer.requirement_of", lambda *_: need)

    with pytest.raises(RankError, match=r"\bVLLM_ATTENTION_BACKEND: vLLM "):
        await cluster.siting.place(spec)
