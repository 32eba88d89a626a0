"""Names the flags and variables of vLLM that sparkd sets itself, each with the key to use.

Read off the parser of vLLM 0.32.0, all 318 flags (sparkd/vllm/vllm-flags-0.32.0.txt says for each where it belongs), and from its
calls of importlib, resolve_obj_by_qualname, bind and torch.load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sparkd.vllm.flags import flags_in, in_full, parsed, shown, why_not_in_full

_SOCKET = "sparkd chooses where an engine listens: a private Unix socket or address that only the gateway reaches. Remove it"
_TLS = "clients reach the engine through the gateway, which speaks to it on a private socket. Remove it"
_RANKS = "sparkd places the ranks of a model and tells each where its peers are. Remove it"
_SIZE = "sparkd chooses the number of ranks from the memory of the nodes. Set 'tensor_parallel:' on the model, or remove it"
_STAGES = (
    "sparkd makes a pipeline of the nodes where the heads cannot be split over them, and chooses its stages. Set 'tensor_parallel:' on the "
    "model, or remove it"
)

_OWNED: Mapping[str, str] = {
    "host": _SOCKET,
    "port": _SOCKET,
    "uds": _SOCKET,
    "grpc": _SOCKET,
    "grpc-port": _SOCKET,
    "api-key": "sparkd makes a random key for each engine that needs one; clients' keys stand under 'keys:'. Remove it",
    "hf-token": "every user of the machine can read a command line. Put HF_TOKEN into the model's 'env:'",
    "ssl-keyfile": _TLS,
    "ssl-certfile": _TLS,
    "ssl-ca-certs": _TLS,
    "ssl-cert-reqs": _TLS,
    "ssl-ciphers": _TLS,
    "enable-ssl-refresh": _TLS,
    "root-path": "the gateway forwards to fixed paths. Remove it",
    "model": "the model is the 'model:' key. Set it there",
    "served-model-name": "the engine must answer to the names that the gateway routes. Set 'aliases:' or 'served_model_name:' on the model",
    "config": "it would read more flags from an unchecked file. Write them out instead",
    "help": "the engine would print its help and end. Run the engine's --help in a shell",
    "headless": _RANKS,
    "nnodes": _RANKS,
    "node-rank": _RANKS,
    "master-addr": _RANKS,
    "master-port": _RANKS,
    "tensor-parallel-size": _SIZE,
    "pipeline-parallel-size": _STAGES,
    "prefill-context-parallel-size": "sparkd splits no prompt over the nodes. Set 'tensor_parallel:' on the model, or remove it",
    "distributed-executor-backend": "it decides how the ranks find each other. Set 'executor: mp' or 'executor: ray' on the model",
    "data-parallel": "sparkd runs one engine per model and places its ranks. Remove it",
}
_OWNED_FAMILIES = ("ssl-", "data-parallel-", "dp-supervisor-")

# Sparkd's own worker classes, which size a cache in the same way whoever names them.
OWN_WORKERS = ("workers.kv.SparkWorker", "workers.kv.SparkCPUWorker")
_CACHE = ("device-memory-utilization", "kv-cache-memory-bytes", "worker-cls")
_LOADER = ("model-loader-extra-config", "quantization-config")
_OWNED_ENV: Mapping[str, str] = {
    "VLLM_API_KEY": "the engine would ask sparkd itself for this key; sparkd's own door asks for another on every path",
    "VLLM_HOST_IP": "sparkd sets it to the node's address in the cluster",
    "VLLM_PORT": "sparkd chooses where an engine listens",
    "VLLM_LOOPBACK_IP": "sparkd chooses where an engine listens",
    "VLLM_USE_RUST_FRONTEND": "vLLM's Rust server refuses --allowed-media-domains and --middleware, by which sparkd keeps strangers out",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "a redirect may lead to a host that 'media:' does not name",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "sparkd restarts an engine when its process ends, so it has to end",
    "VLLM_SERVER_DEV_MODE": "it opens routes without a key that run any method in the engine",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "it lets the engine unpickle data from requests",
    "VLLM_RPC_BASE_PATH": "sparkd keeps the sockets between an engine's processes in its runtime folder",
    "PYTHONHOME": "it would break the interpreter of 'runtime:'",
}
_OWNED_ENV_FAMILIES: Mapping[str, str] = {
    "RAY_": "Ray belongs to sparkd; see 'cluster:'",
    "SPARKD_": "sparkd passes its own settings to its ranks by these names",
    "VLLM_DP_": "sparkd runs one engine per model and places its ranks",
    "VLLM_RAY_": "Ray belongs to sparkd; see 'cluster:'",
}


def owned_args(args: Sequence[str]) -> Iterable[tuple[int, str]]:
    """(index, message) of every flag that sparkd sets, in any spelling, and of every word that is no flag in full."""
    for flag in flags_in(args):
        if reason := _reason(_name(flag.name)):
            written = flag.name if flag.name.startswith("-") else f"--{flag.name}"
            yield flag.place, f"{shown(written)} is not allowed in extra_args: {reason}."
        elif fault := why_not_in_full(flag):
            yield flag.place, fault


def owned_env(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, reason) of every environment variable that sparkd owns. The reason is a clause.

    LD_PRELOAD is not among them: the CPU engine itself asks for tcmalloc and libiomp there, and who writes the file owns the engine
    anyway. Nor is PYTHONPATH: the rank puts sparkd's own folder before it.
    """
    for name in names:
        reason = _OWNED_ENV.get(name)
        if reason is None and not name.startswith("SPARKD_STUB_"):
            reason = next((why for family, why in _OWNED_ENV_FAMILIES.items() if name.startswith(family)), None)
        if reason:
            yield name, reason


def loader_flags(args: Sequence[str]) -> list[str]:
    """The flags without a key that say how weights are loaded or quantized."""
    return [shown(f"--{name}") for name in parsed(args) if name in _LOADER]


def cache_flags(args: Sequence[str]) -> list[str]:
    """The flags without a key that have vLLM size its KV cache, or name a worker class but sparkd's."""
    return [shown(f"--{name}") for name, value in parsed(args).items() if name in _CACHE and value not in OWN_WORKERS]


def _name(word: str) -> str:
    """The flag that vLLM's parser would read in a word that may not be one in full."""
    if word.startswith("-") and not word.startswith("--"):
        return in_full(word) or ""
    return word.removeprefix("--").partition(".")[0].rstrip("+").replace("_", "-").removeprefix("no-")


def _reason(name: str) -> str | None:
    if name in _OWNED:
        return _OWNED[name]
    family = next((family for family in _OWNED_FAMILIES if name.startswith(family)), None)
    return None if family is None else _TLS if family == "ssl-" else _OWNED["data-parallel"]
