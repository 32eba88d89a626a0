"""How a plan becomes `docker run`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from sparkd.capacity import docker_run as docker
from sparkd.capacity.docker_run import docker_run, shell
from sparkd.checkpoint.source import name_of
from sparkd.errors import ConfigError
from sparkd.vllm.flags import speculative_config

OURS = ["python", "-m", "api", "--model", "M", "--worker-cls", "workers.kv.SparkWorker", "--max-model-len", "64"]


def plan(
    model: str = "owner/Name", command: list[str] | None = None, nodes: int = 1, platform: str = "cuda", **environment: str
) -> dict[str, Any]:
    rank = {"command": command or [*OURS[:4], model, *OURS[5:]], "environment": environment}
    ranks = [{"node": number, **rank} for number in range(nodes)]
    choice = {"name": name_of(model), "model": model, "ranks": ranks}
    return {"model": model, "hardware": {"platform": platform}, "choice": choice}


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    folders = {"/site/workers": "/opt/sparkd/workers", "/site/sparkd-1.dist-info": "/opt/sparkd/sparkd-1.dist-info"}
    monkeypatch.setattr(docker, "_plugin", lambda: folders)
    return folders


def one(found: dict[str, Any], image: str = "vllm/vllm-openai:v1") -> list[str]:
    (argv,) = docker_run(found, image)
    return argv


def command_of(argv: list[str]) -> list[str]:
    """The words after the image."""
    return argv[next(at for at, word in enumerate(argv) if "/vllm" in word and word[0] != "-" and argv[at - 1] != "-v") + 1 :]


def values_of(argv: list[str], option: str) -> set[str]:
    return {value for name, value in pairwise(argv) if name == option}


@pytest.mark.parametrize(
    ("image", "first"),
    [
        ("vllm/vllm-openai:v0.27.1", []),
        ("nvidia/vllm:26.04-py3", ["vllm", "serve"]),
    ],
)
def test_only_some_images_begin_with_the_command(image: str, first: list[str]) -> None:
    assert command_of(one(plan(), image))[: len(first) + 1] == [*first, "owner/Name"]


def test_a_folder_is_mounted_and_called_by_its_place_inside() -> None:
    argv = one(plan("/data/my models/X"))
    assert command_of(argv)[0] == "/models/X"
    assert "'/data/my models/X:/models/X:ro'" in shell(argv)
    assert shlex.split(shell(argv).replace("\\\n", "")) == argv


def test_a_container_is_called_as_its_model_is() -> None:
    """Not as its folder is; and so that docker takes it."""
    for nodes, expected in ((1, "me-Mine-v2"), (2, "me-Mine-v2-1")):
        found = plan("/data/Some-Folder", nodes=nodes)
        argv = docker_run({**found, "choice": {**found["choice"], "name": "me/Mine:v2"}}, "vllm/vllm-openai:v1")[-1]
        assert argv[argv.index("--name") + 1] == expected


@pytest.mark.parametrize(("draft", "inside"), [("/drafts/D", "/models/draft/D"), ("/drafts/X", "/models/draft/X"), ("owner/D", "owner/D")])
def test_a_draft_in_a_folder_is_mounted_too(draft: str, inside: str) -> None:
    config = {"method": "dflash", "num_speculative_tokens": 4, "model": draft}
    argv = one(plan("/data/X", ["python", "-m", "api", "--model", "/data/X", "--speculative-config", json.dumps(config)]))
    assert speculative_config(command_of(argv)) == {**config, "model": inside}
    assert draft.startswith("owner") or f"{draft}:{inside}:ro" in argv


def test_the_plugin_comes_along_only_where_it_is_used() -> None:
    assert {"PYTHONPATH=/opt/sparkd", "/site/workers:/opt/sparkd/workers:ro"} <= set(one(plan()))
    stock = one(plan(command=["python", "-m", "api", "--model", "owner/Name", "--max-model-len", "64"]))
    assert not any("sparkd" in word for word in stock)


def test_what_is_kept_is_mounted_and_the_state_is_not() -> None:
    argv = one(plan(SPARKD_KV='{"profiles": "/var/lib/sparkd/kv-profiles"}'))
    kept = {folder for folder in values_of(argv, "-v") if folder.startswith("/var/lib/sparkd")}
    assert kept == {"/var/lib/sparkd/kv-profiles:/var/lib/sparkd/kv-profiles"}


def test_one_node_publishes_on_the_loopback_and_several_share_the_hosts_network() -> None:
    alone = one(plan())
    assert alone[alone.index("-p") + 1] == "127.0.0.1:8000:8000"
    assert "/dev/infiniband" not in alone
    first, second = docker_run(plan(nodes=2), "vllm/vllm-openai:v1")
    assert [argv[argv.index("--name") + 1] for argv in (first, second)] == ["name-0", "name-1"]
    assert first[first.index("--network") + 1] == "host"
    assert first[first.index("--device") + 1] == "/dev/infiniband"
    assert first[-4:] == ["--host", "127.0.0.1", "--port", "8000"]


def test_a_node_without_a_gpu_asks_for_nothing_of_nvidias() -> None:
    """Docker without NVIDIA's runtime ends over --gpus."""
    variables = {"FLASHINFER_NVCC_THREADS": "1", "NCCL_SOCKET_IFNAME": "=eth0", "MAX_JOBS": "2", "GLOO_SOCKET_IFNAME": "eth0"}
    found = plan(nodes=2, platform="cpu", **variables)
    for argv in docker_run(found, "vllm/vllm-openai-cpu:v0.32.0"):
        assert not {"--gpus", "--ulimit", "--device", "--cap-add"} & set(argv) and argv[argv.index("--ipc") + 1] == "host"
        assert values_of(argv, "-e") == {"MAX_JOBS=2", "GLOO_SOCKET_IFNAME=eth0", "PYTHONPATH=/opt/sparkd"}
        assert not any("flashinfer" in folder or "triton" in folder for folder in values_of(argv, "-v"))
    # The image that a recipe names is one for GPUs.
    found["choice"]["container"] = {"kind": "vllm-openai", "image": "vllm/vllm-openai:nightly"}
    with pytest.raises(ConfigError, match="one of vLLM's own for CPUs"):
        docker_run(found, None)


@pytest.mark.parametrize(("image", "told"), [(None, "an image"), ("-v", "'-v'")])
def test_an_image_must_be_named(image: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        docker_run(plan(), image)
