"""How a planned rank runs in a container: its `docker run` command."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from sparkd.errors import ConfigError
from sparkd.vllm.flags import speculative_config, value_of, with_draft, without
from workers.kv.settings import VARIABLE as KV_VARIABLE
from workers.rank import ray_environment

# The cache folders that are worth keeping between containers: weights, and what compilers and autotuners made for this GPU.
CACHES = {"~/.cache/huggingface": "/root/.cache/huggingface", "~/.cache/vllm": "/root/.cache/vllm"}
JIT_CACHES = {"~/.cache/flashinfer": "/root/.cache/flashinfer", "~/.triton": "/root/.triton"}
# Images of vLLM's project begin with the command `vllm serve`; all others, NVIDIA's among them, with a shell of their own.
_SERVE_ENTRYPOINT = ("vllm/vllm-openai", "vllm-openai", "vllm-openai-cpu", "vllm-cpu-release-repo", "vllm-arm64-cpu-release-repo")
# Variables that only kernels and collectives for NVIDIA's GPUs read.
_OF_NVIDIA = ("NCCL_", "FLASHINFER_")
# Where the plugin's packages lie in the container: the loader and the worker class come from the host.
PLUGIN_FOLDER = "/opt/sparkd"
PORT = 8000
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_METADATA = re.compile(r"sparkd-[0-9][^/]*\.dist-info")
_SKIPPED_FLAGS = ("uds", "host", "port")


@dataclass(frozen=True, slots=True)
class RankContainer:
    """One rank's. folders: host -> container, read-write where they are caches; network_host: what ranks on several nodes need. gpu: False
    for a node that serves by its CPU, which has none of NVIDIA's runtime to ask for a GPU.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folders: Mapping[str, str]
    network_host: bool
    rdma: bool
    gpu: bool = True

    def docker(self) -> list[str]:
        """argv."""
        argv = ["docker", "run", "-d", "--name", self.name, "--restart", "unless-stopped"]
        argv += ["--gpus", "all"] if self.gpu else []
        argv += ["--ipc", "host"]
        argv += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"] if self.gpu else []
        argv += ["--network", "host"] if self.network_host else ["-p", f"127.0.0.1:{PORT}:{PORT}"]
        if self.rdma:
            argv += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"]
        for host, inside in self.folders.items():
            argv += ["-v", f"{host}:{inside}{_mode(inside)}"]
        for name, value in self.environment.items():
            # One that is its operator's alone comes from the shell that runs it.
            argv += ["-e", name if value == hidden(name) else f"{name}={value}"]
        return [*argv, self.image, *self.command]


def containers(plan: Mapping[str, Any], image: str | None) -> list[RankContainer]:
    """The command of each node of a plan's choice. image: None for the one that the model's recipe names, which is for GPUs. Raises
    ConfigError."""
    choice = plan["choice"]
    if choice is None:
        return []
    gpu = plan["hardware"]["platform"] == "cuda"
    named = (choice.get("container") or {}) if gpu else {}
    serves = named.get("kind") == "vllm-openai" if not image and named else None
    image = image or named.get("image")
    if not image:
        which = "one of vLLM's own or of NVIDIA's, for ARM64 on a Spark" if gpu else "one of vLLM's own for CPUs (vllm/vllm-openai-cpu)"
        raise ConfigError(f"--docker needs an image: give --image NAME, {which}.", param="image")
    if any(sign in image for sign in " \t\n'\"$`;&|<>") or image.startswith("-"):
        raise ConfigError(f"--image {image!r} is not the name of an image.", param="image")
    # A neighbour that is quantized already may have won over the model that was asked about.
    first = serves if serves is not None else _serves(image)
    name, model = str(choice["name"]), str(choice["model"])
    return [_container(name, model, rank, image, len(choice["ranks"]), first, gpu=gpu) for rank in choice["ranks"]]


def hidden(name: str) -> str:
    """Stands for a value that is its operator's alone: the shell that runs the command has it in its environment."""
    return f"${{{name}}}"


def shell(container: RankContainer) -> str:
    """The `docker run` line, one option a line."""
    words = container.docker()
    lines: list[str] = []
    for word in words:
        text = shlex.quote(word)
        if not lines or (word.startswith("-") and word not in ("-d",)) or word == container.image:
            lines.append(text)
        else:
            lines[-1] += f" {text}"
    return " \\\n  ".join(lines)


def _container(name: str, model: str, rank: Mapping[str, Any], image: str, nodes: int, serves: bool, *, gpu: bool) -> RankContainer:
    """name: what the model is called. serves: whether the image begins with `vllm serve` by itself. gpu: see RankContainer."""
    folders = {os.path.expanduser(host): inside for host, inside in {**CACHES, **(JIT_CACHES if gpu else {})}.items()}
    environment = {key: value for key, value in rank["environment"].items() if gpu or not key.startswith(_OF_NVIDIA)}
    words = _served(rank["command"], model, folders)
    ours = any(word.startswith(("workers.", "spark_stream")) for word in words)
    if ours:
        folders |= _plugin()
        environment["PYTHONPATH"] = PLUGIN_FOLDER
        # At the same place inside: the paths in the arguments hold. The state database beside them stays outside.
        folders |= {kept: kept for kept in _kept(words, environment)}
    if "--headless" not in words:
        # Inside it may be any address, because the port is published on the loopback alone; with the host's network it is the loopback.
        words += ["--host", "127.0.0.1" if nodes > 1 else "0.0.0.0", "--port", str(PORT)]
    first = [] if serves else ["vllm", "serve"]
    suffix = f"-{rank['node']}" if nodes > 1 else ""
    return RankContainer(_name(f"{name}{suffix}"), image, (*first, *words), environment, folders, nodes > 1, gpu and nodes > 1, gpu)


def _name(text: str) -> str:
    """Docker's names begin with an ASCII letter or digit and have two characters at least (moby, daemon/names/names.go)."""
    safe = _UNSAFE.sub("-", text).strip("_.-")
    return safe if len(safe) > 1 else "-".join(filter(None, ("model", safe)))


def _served(command: Sequence[str], model: str, folders: dict[str, str]) -> list[str]:
    """`vllm serve`'s own arguments: the model first, and a local folder as it is called inside. Raises ConfigError for what is none."""
    before = next((word for word in ("--model", "serve") if word in command[:5]), None)
    if before is None:
        what = "the workers of executor: ray are started by sparkd alone" if ray_environment.KEEPER in command else f"it runs {command[2]}"
        raise ConfigError(f"--docker prints commands of `vllm serve`, and {what}.", param="image")
    words = without(command[command.index(before) + 2 :], *_SKIPPED_FLAGS)
    model = _mounted(model, folders)
    draft = (speculative_config(words) or {}).get("model")
    if isinstance(draft, str) and draft.startswith("/"):
        words = with_draft(words, _mounted(draft, folders))
    return [model, *words]


def _kept(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The folders of what sparkd keeps of a model: quantized weights, and what sizing the cache has learned."""
    loader = value_of(words, "model-loader-extra-config") or "{}"
    for text, key in ((loader, "cache_dir"), (environment.get(KV_VARIABLE, "{}"), "profiles")):
        if folder := json.loads(text).get(key):
            yield str(folder)


def _mounted(model: str, folders: dict[str, str]) -> str:
    """A local folder as it is called inside, by a name of its own there; a hub id as it is."""
    if not model.startswith("/"):
        return model
    if model not in folders:
        inside = f"/models/{os.path.basename(model.rstrip('/'))}"
        taken = set(folders.values())
        while inside in taken:
            inside = f"{inside}-draft"
        folders[model] = inside
    return folders[model]


def _serves(image: str) -> bool:
    plain = image.partition("@")[0]
    return any(plain.rpartition(":")[0].endswith(one) or plain.endswith(one) for one in _SERVE_ENTRYPOINT)


def _plugin() -> dict[str, str]:
    """The two packages that an engine imports, and the metadata by which vLLM finds the plugin; nothing else of this environment."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        metadata = str(distribution("sparkd").locate_file(""))
        found = next(name for name in sorted(os.listdir(metadata)) if _METADATA.fullmatch(name))
    except (PackageNotFoundError, OSError, StopIteration):
        raise ConfigError("sparkd is not installed in this environment, so a container cannot find its plugin: install it.") from None
    folders = {os.path.join(root, name): f"{PLUGIN_FOLDER}/{name}" for name in ("sparkd", "workers")}
    return {**folders, os.path.join(metadata, found): f"{PLUGIN_FOLDER}/{found}"}


def _mode(inside: str) -> str:
    return ":ro" if inside.startswith((f"{PLUGIN_FOLDER}/", "/models/")) else ""
