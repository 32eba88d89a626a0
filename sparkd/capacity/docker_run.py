"""A plan's start as `docker run`, one command for each node."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from sparkd.capacity.launch import hidden
from sparkd.errors import ConfigError
from sparkd.vllm.flags import speculative_config, value_of, with_draft, without
from workers.kv.settings import VARIABLE as KV_VARIABLE
from workers.rank import ray_environment

# The cache folders that are worth keeping between containers: weights, and what compilers and autotuners made for this GPU.
CACHES = {"~/.cache/huggingface": "/root/.cache/huggingface", "~/.cache/vllm": "/root/.cache/vllm"}
JIT_CACHES = {"~/.cache/flashinfer": "/root/.cache/flashinfer", "~/.triton": "/root/.triton"}
# Images of vLLM's project begin with the command `vllm serve`; all others, NVIDIA's among them, with a shell of their own.
_SERVES = ("vllm-openai", "vllm-openai-cpu", "vllm-cpu-release-repo", "vllm-arm64-cpu-release-repo")
_IMAGE = re.compile(r"[^\s'\"$`;&|<>-][^\s'\"$`;&|<>]*")
# Variables that only kernels and collectives for NVIDIA's GPUs read.
_OF_NVIDIA = ("NCCL_", "FLASHINFER_")
# Where the plugin's packages lie in the container: the loader and the worker class come from the host.
PLUGIN_FOLDER = "/opt/sparkd"
PORT = 8000
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_METADATA = re.compile(r"sparkd-[0-9][^/]*\.dist-info")


def docker_run(plan: Mapping[str, Any], image: str | None) -> list[list[str]]:
    """The `docker run` command of each node of a plan's choice, as argv.

    image: None for the one that the model's recipe names, which is for GPUs.

    Raises ConfigError without an image, and for an engine that is not `vllm serve`.
    """
    choice, gpu = plan["choice"], plan["hardware"]["platform"] == "cuda"
    if choice is None:
        return []
    named = (choice.get("container") or {}) if gpu else {}
    serves = named.get("kind") == "vllm-openai" if named and not image else None
    image = image or named.get("image")
    if not image:
        which = "one of vLLM's own or of NVIDIA's, for ARM64 on a Spark" if gpu else "one of vLLM's own for CPUs (vllm/vllm-openai-cpu)"
        raise ConfigError(f"--docker needs an image: give --image NAME, {which}.", param="image")
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"--image {image!r} is not the name of an image.", param="image")
    if serves is None:
        serves = re.split("[@:]", image.rpartition("/")[2])[0] in _SERVES
    return [_docker_argv(choice, rank, image, gpu=gpu, serves=serves) for rank in choice["ranks"]]


def shell(argv: Sequence[str]) -> str:
    """A `docker run` command with one option a line."""
    return " ".join(f"\\\n  {shlex.quote(word)}" if word.startswith("--") else shlex.quote(word) for word in argv)


def _docker_argv(choice: Mapping[str, Any], rank: Mapping[str, Any], image: str, *, gpu: bool, serves: bool) -> list[str]:
    """serves: whether the image begins with `vllm serve` by itself."""
    several = len(choice["ranks"]) > 1
    folders = {os.path.expanduser(host): inside for host, inside in (CACHES | (JIT_CACHES if gpu else {})).items()}
    environment = {key: value for key, value in rank["environment"].items() if gpu or not key.startswith(_OF_NVIDIA)}
    words = _arguments(rank["command"], str(choice["model"]), folders)
    if any(word.startswith(("workers.", "spark_stream")) for word in words):
        environment["PYTHONPATH"] = PLUGIN_FOLDER
        # At the same place inside: the paths in the arguments hold. The state database beside them stays outside.
        folders |= {**_plugin(), **{kept: kept for kept in _kept(words, environment)}}
    if "--headless" not in words:
        # Inside it may be any address, because the port is published on the loopback alone; with the host's network it is the loopback.
        words += ["--host", "127.0.0.1" if several else "0.0.0.0", "--port", str(PORT)]
    name = _UNSAFE.sub("-", f"{choice['name']}-{rank['node']}" if several else choice["name"])
    argv = ["docker", "run", "-d", "--name", name, "--restart", "unless-stopped"]
    argv += ["--gpus", "all", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"] if gpu else []
    argv += ["--ipc", "host", *(["--network", "host"] if several else ["-p", f"127.0.0.1:{PORT}:{PORT}"])]
    argv += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"] if several and gpu else []
    for host, inside in folders.items():
        argv += ["-v", f"{host}:{inside}{':ro' if inside.startswith((f'{PLUGIN_FOLDER}/', '/models/')) else ''}"]
    for key, value in environment.items():
        # One that is its operator's alone comes from the shell that runs it.
        argv += ["-e", key if value == hidden(key) else f"{key}={value}"]
    return [*argv, image, *([] if serves else ["vllm", "serve"]), *words]


def _arguments(command: Sequence[str], model: str, folders: dict[str, str]) -> list[str]:
    """`vllm serve`'s own arguments: the model first. A local folder is mounted, and named as it is inside. Raises ConfigError."""
    before = next((word for word in ("--model", "serve") if word in command[:5]), None)
    if before is None:
        what = "the workers of executor: ray are started by sparkd alone" if ray_environment.KEEPER in command else f"it runs {command[2]}"
        raise ConfigError(f"--docker prints commands of `vllm serve`, and {what}.", param="image")
    words = without(command[command.index(before) + 2 :], "uds", "host", "port")
    draft = str((speculative_config(words) or {}).get("model"))
    for folder, inside in ((model, f"/models/{os.path.basename(model)}"), (draft, f"/models/draft/{os.path.basename(draft)}")):
        if folder.startswith("/"):
            folders[folder] = inside
    if draft in folders:
        words = with_draft(words, folders[draft])
    return [folders.get(model, model), *words]


def _kept(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The folders of what sparkd keeps of a model: quantized weights, and what sizing the cache has learned."""
    loader = value_of(words, "model-loader-extra-config") or "{}"
    for text, key in ((loader, "cache_dir"), (environment.get(KV_VARIABLE, "{}"), "profiles")):
        if folder := json.loads(text).get(key):
            yield str(folder)


def _plugin() -> dict[str, str]:
    """The two packages that an engine imports, and the metadata by which vLLM finds the plugin; nothing else of this environment."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        metadata = str(distribution("sparkd").locate_file(""))
        folder = next(name for name in sorted(os.listdir(metadata)) if _METADATA.fullmatch(name))
    except (PackageNotFoundError, OSError, StopIteration):
        raise ConfigError("sparkd is not installed in this environment, so a container cannot find its plugin: install it.") from None
    folders = {os.path.join(root, name): f"{PLUGIN_FOLDER}/{name}" for name in ("sparkd", "workers")}
    return {**folders, os.path.join(metadata, folder): f"{PLUGIN_FOLDER}/{folder}"}
