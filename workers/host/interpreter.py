"""Starts a Python for sparkd: it imports nothing from the working folder and inherits only a list of environment variables.

A variable that is not on the list may hold a secret that only `${env.NAME}` in sparkd.yaml reads. /proc/PID/environ shows a process's
environment to every process of the same user, so such a variable must stay in the one process that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE_DIR = str(Path(__file__).resolve().parents[2])

INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH",
    "HF_*", "TRANSFORMERS_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "TORCH*", "TRITON_*", "FLASHINFER_*", "VLLM_*",
    "TP_SOCKET_IFNAME", "MAX_JOBS",
)  # fmt: skip

# Variables that open development or update routes, load code, write prompts, tensors or answers to disk or log, change the log that
# progress is read from, or describe the place of another process. The operator's own `env` may still set them. OMP_NUM_THREADS is not
# inherited because Ray forces it to 1 in its workers (ray/_private/utils.py), and LD_PRELOAD because it loads code.
NOT_INHERITED = (
    "RAY_*", "*_PLUGINS", "*PROFIL*", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_API_KEY", "VLLM_LORA_RESOLVER_*", "VLLM_MODEL_REDIRECT_PATH", "VLLM_MEDIA_CONNECTOR", "VLLM_GPT_OSS_*", "VLLM_RUST_FRONTEND_PATH",
    "VLLM_USE_RUST_FRONTEND",
    "VLLM_DEBUG_*", "VLLM_TRACE_FUNCTION", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_STREAM",
    "VLLM_LOGGING_PREFIX", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_RPC_BASE_PATH", "VLLM_DP_*", "VLLM_RAY_*",
    "TORCH_TRACE", "TORCH_LOGS*", "TORCH_SHOW_*",
)  # fmt: skip


def module_command(interpreter: str, module: str, *arguments: str) -> list[str]:
    """argv of `module` in that interpreter. -P: without it `-m` would import from the working folder first."""
    return [interpreter, "-P", "-m", module, *arguments]


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that a child may have."""
    return {name: value for name, value in environ.items() if _is_inherited(name, value)}


def program_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program of sparkd's: the variables it may inherit, and sparkd's packages as the only import folder."""
    return inherited_environment(environ) | {"PYTHONPATH": PACKAGE_DIR}


def _is_inherited(name: str, value: str) -> bool:
    if name == "CUDA_VISIBLE_DEVICES" and not value:
        return False  # Ray hides the GPUs from an actor that asked for none; the engine is not that actor
    return any(fnmatchcase(name, pattern) for pattern in INHERITED) and not any(fnmatchcase(name, pattern) for pattern in NOT_INHERITED)
