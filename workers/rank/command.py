"""The argv and the environment of one rank's engine. Never starts it, never reads this process's own environment.

Nothing here passes through a shell. The environment is built from empty: what is not on the list of workers.host.interpreter, and not the
operator's own `env`, does not reach the engine.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers import door
from workers.host import trusted_code
from workers.host.interpreter import inherited_environment, module_command
from workers.host.processes import RANK_ID_VARIABLE, RUN_DIR_VARIABLE
from workers.host.runtime import API_SERVER, COMMAND_LINE
from workers.kv.settings import CPU_KV_CACHE_GIB, CPU_KV_SPACE
from workers.kv.settings import VARIABLE as KV_VARIABLE
from workers.rank import ray_environment
from workers.rank.spec import SOCKET_PATH_BYTES, RankSpec

KEEP_ALIVE_S = 75
# vLLM's API server takes --headless and serves HTTP all the same; only its command line, or this module of ours, heeds it.
HEADLESS = "workers.vllm.headless"
# A rank with its own quantized cache has loaded long before one whose disk is slow, and waits for it over gloo, which gives up after
# 1,800 s by default. The daemon ends the ranks where one of them has ended.
MOST_WAIT_S = 86_400
_PARALLEL_FLAGS = ("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp", "--data-parallel", "-dp", "--nnodes")
UUID_CHARS = 36
# No URL's host has a slash: vLLM fetches from any host where the list is empty, and a name that could be one would be looked up, in a
# network's search domains or by its proxy too.
NO_HOST = "no-host/"


def build_command(spec: RankSpec) -> list[str]:
    """argv of the engine. The operator's arguments stand unchanged; names and listener come last, where argparse lets them win."""
    if spec.ray and spec.rank:
        return module_command(spec.runtime, ray_environment.KEEPER)
    entrypoint = HEADLESS if spec.rank and spec.entrypoint == API_SERVER else spec.entrypoint
    model = ["serve", spec.model] if entrypoint == COMMAND_LINE else ["--model", spec.model]
    names = ["--served-model-name", *spec.served_names] if spec.served_names else []
    flags = [*_platform_flags(spec), *spec.flags, *spec.extra_args, *names, *_listener(spec)]
    return module_command(spec.runtime, entrypoint, *model, *flags)


def parallel_flags(tensor: int, pipeline: int, rank: int, head: str, port: int, executor: str = "mp") -> list[str]:
    """How the ranks of a model meet, one on each node; none of a model on one node. head, port: rank 0's node, and where they meet there.

    executor `ray`: rank 0 alone has a command line of vLLM, and its workers meet through Ray.
    `mp`: vLLM's own executor over nodes (vllm/v1/executor/multiproc_executor.py); a rank other than 0 serves no HTTP.
    """
    nodes = tensor * pipeline
    if nodes == 1:
        return []
    flags = ["--tensor-parallel-size", str(tensor)] if tensor > 1 else []
    flags += ["--pipeline-parallel-size", str(pipeline)] if pipeline > 1 else []
    if executor == "ray":
        return [*flags, "--distributed-executor-backend", "ray"]
    flags += ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", head, "--master-port", str(port)]
    flags += ["--cpu-distributed-timeout-seconds", str(MOST_WAIT_S)]
    return [*flags, "--distributed-executor-backend", "mp", *(["--headless"] if rank else [])]


def media_flags(domains: Sequence[str] = ()) -> list[str]:
    """The hosts from which the engine may fetch images, audio and video. The flag in extra_args comes later and wins."""
    return ["--allowed-media-domains", *(domains or (NO_HOST,))]


def build_environment(spec: RankSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the engine: what it may inherit (workers.host.interpreter), sparkd's defaults, the operator's, sparkd's
    own."""
    environment = {**inherited_environment(inherited), **_defaults(spec), **spec.env}
    environment = {**kernels_on_disk(environment), **environment}
    # JIT compilers are looked up by name (ninja, ptxas): those beside the engine's interpreter come first, as in an activated venv.
    environment["PATH"] = os.pathsep.join([str(Path(spec.runtime).parent), environment.get("PATH", os.defpath)])
    folders = [*spec.pythonpath, *filter(None, [spec.env.get("PYTHONPATH")])]
    if folders:
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    if spec.kv_cache is not None:
        environment[KV_VARIABLE] = json.dumps(dict(spec.kv_cache), sort_keys=True)
        environment.pop(CPU_KV_SPACE, None)  # its number is in there; vLLM would log it as the size, whatever comes out
    if spec.trusted_code is not None:
        environment[trusted_code.VARIABLE] = json.dumps(dict(spec.trusted_code), sort_keys=True)
    if spec.host and spec.api_key_path:
        environment[door.KEY_FILE] = spec.api_key_path
    environment |= {
        RANK_ID_VARIABLE: spec.rank_id,
        RUN_DIR_VARIABLE: spec.run_dir,
        # Without SPT_NOENV setproctitle overwrites /proc/PID/environ, where an operator sees which rank a process is of.
        "SPT_NOENV": "1",
        # vLLM looks at the host of a medium's URL alone, not at those that a redirect leads to.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }
    if _is_address(spec.node_id) and "VLLM_HOST_IP" not in spec.env:
        # Else vLLM asks the routing table and lets torch.distributed listen on the LAN (vllm/utils/network_utils.py, get_ip).
        environment["VLLM_HOST_IP"] = spec.node_id
    if folder := ipc_dir(spec.run_dir, spec.rank_id):
        environment["VLLM_RPC_BASE_PATH"] = folder
    if spec.ray is not None:
        environment |= ray_environment.environment(spec, inherited)
        environment[ray_environment.OWN] = ",".join(sorted(environment))
    return environment


def ipc_dir(run_dir: str, rank_id: str) -> str | None:
    """Where the engine's processes put the sockets between them, so that they go with the rank, also after a SIGKILL.

    None where the path of a socket in it (a UUID) would be too long for the kernel: vLLM then uses the directory for temporary files.
    """
    folder = os.path.join(run_dir, hashlib.sha256(rank_id.encode()).hexdigest()[:8])
    return folder if len(os.fsencode(folder)) + 1 + UUID_CHARS <= SOCKET_PATH_BYTES else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _listener(spec: RankSpec) -> list[str]:
    if spec.socket_path:
        return ["--uds", spec.socket_path]
    if spec.host:
        return ["--host", spec.host, "--port", str(spec.port), "--middleware", door.MIDDLEWARE]
    return []


def _platform_flags(spec: RankSpec) -> list[str]:
    """The one place where a platform turns into flags: worker class and load format, once a specification names them."""
    flags: list[str] = []
    if spec.worker_cls:
        flags += ["--worker-cls", spec.worker_cls]
    if spec.load_format:
        flags += ["--load-format", spec.load_format]
    if spec.loader_extra_config is not None:
        flags += ["--model-loader-extra-config", json.dumps(dict(spec.loader_extra_config), sort_keys=True)]
    return flags


def _defaults(spec: RankSpec) -> dict[str, str]:
    """The flags that sparkd prefers and the operator may change."""
    defaults = {
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
        # Longer than the gateway keeps an idle connection, so that it is never the engine that closes one under a request.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
    }
    if spec.platform == "cpu" and not spec.worker_cls and not _has_flag(spec, "--kv-cache-memory", "--gpu-memory-utilization"):
        # Where vLLM sizes: without it the CPU backend takes gpu_memory_utilization of the whole machine (cpu_worker.py, "Auto set").
        defaults[CPU_KV_SPACE] = str(CPU_KV_CACHE_GIB)
    if spec.platform == "cpu" and not _has_flag(spec, *_PARALLEL_FLAGS):
        # One process less to import torch in, 1.7 GB and a third of the start time (43 s to 26 s on two cores, vLLM 0.32).
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # That process binds no cores itself; without a number it would compute on one (18 instead of 25 tokens/s on two cores).
        defaults["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        # A thread that waits must not spin while anything else wants the core: 40 tokens beside two busy processes took 9 to 18 s
        # without and 2.2 to 2.7 s with it; on a quiet machine it costs a third.
        defaults["OMP_WAIT_POLICY"] = "PASSIVE"
    return defaults


def kernels_on_disk(environment: Mapping[str, str]) -> dict[str, str]:
    """Triton's own default, said aloud. Unsaid, an engine that compiles a graph puts every kernel of its life into a folder of Inductor's
    (torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner), and the next, which loads that graph, compiles them once more here."""
    home = environment.get("TRITON_HOME") or environment.get("HOME")
    return {"TRITON_CACHE_DIR": os.path.join(home, ".triton", "cache")} if home else {}


def _has_flag(spec: RankSpec, *beginnings: str) -> bool:
    return any(flag.replace("_", "-").startswith(beginnings) for flag in (*spec.flags, *spec.extra_args))
