"""How much memory is reserved for a model: what the engine will take, from sizes and flags alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.requirement import VLLM_DEFAULT_UTILIZATION
from sparkd.config.config import parse_model
from sparkd.errors import ConfigError
from sparkd.hardware import machine
from sparkd.units import GIB
from tests.support.accounts import account, needed_gib
from tests.support.checkpoints import dense, write
from tests.support.published_tensors import tensors_of
from workers.kv.settings import CPU_KV_CACHE_GIB

SPARK_GIB = 121.6
UTILIZATION = "--gpu-memory-utilization"


def need(platform: str, total_gib: float = SPARK_GIB, env: dict[str, str] | None = None, **keys: Any) -> int:
    return needed_gib(parse_model("m", {"model": "owner/name", **keys}, over_admin=False), platform, total_gib, env or {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 20 MiB."""
    return write(tmp_path_factory.mktemp("reserved") / "m", dense(), tensors_of(dense()))


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
    ("platform", "keys", "env", "cache_gib"),
    [
        ("cpu", {}, {}, CPU_KV_CACHE_GIB),
        ("cpu", {}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 5),
        ("cpu", {"kv_cache": {"bytes": "8GiB"}}, {"VLLM_CPU_KVCACHE_SPACE": "5"}, 8),
        ("cuda", {"kv_cache": {"bytes": "8GiB"}}, {}, 8),
    ],
)
def test_a_cache_of_a_given_size_is_reserved_with_the_rest_of_the_account(
    platform: str, keys: dict[str, Any], env: dict[str, str], cache_gib: int, folder: Path
) -> None:
    spec = parse_model("m", {"model": str(folder), "max_num_seqs": 16, **keys}, over_admin=False)
    known = account(spec, machine(platform, int(SPARK_GIB * GIB), 0), env)
    assert known is not None
    assert needed_gib(spec, platform, SPARK_GIB, env, 100.7, known) == -(-(known.fixed + cache_gib * GIB) // GIB)


@pytest.mark.parametrize(
    ("platform", "keys", "gib"),
    [("cuda", {}, 100), ("cpu", {"kv_cache": "auto"}, 100), ("cpu", {}, 100), ("cuda", {"gpu_memory_utilization": 0.9}, 110)],
)
def test_without_an_account_all_that_a_node_lends_is_reserved(platform: str, keys: dict[str, Any], gib: int) -> None:
    spec = parse_model("m", {"model": "owner/name", **keys}, over_admin=False)

    assert needed_gib(spec, platform, SPARK_GIB, {}, 100.7) == gib


@pytest.mark.parametrize("value", ["much", "0", "1.5", "nan"])
def test_a_share_that_vllm_would_not_read(value: str) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        need("cuda", extra_args=[UTILIZATION, value])


@pytest.mark.parametrize("env", ["4GB", "-1"])
def test_a_kv_cache_space_that_vllm_would_not_read(env: str) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE\b.*GiB") as caught:
        need("cpu", env={"VLLM_CPU_KVCACHE_SPACE": env})
    assert env not in caught.value.message


def test_a_kv_cache_size_that_vllm_would_not_read() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        need("cpu", extra_args=["--kv-cache-memory-bytes", "lots"])
