"""Keeps holders of admin keys and authors of a registry's recipes from running code, reading files and reaching hosts by vLLM's flags.

They may start, stop and tune models. A flag needs the configuration file if it loads code, names another repository, reads or writes the
node's files, opens addresses, or writes prompts and answers into logs. A stolen key is then no shell on the node. A flag that no list names
is refused, and so is a flag of a later vLLM. Source: the parser of vLLM 0.32.0 (sparkd/vllm/vllm-flags-0.32.0.txt).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkd.errors import ConfigError
from sparkd.nearest import nearest
from sparkd.vllm.arg_check import flags_of_vllm
from sparkd.vllm.flags import Flag, flags_in, shown

# Flags without a value, also as --no-NAME.
SWITCHES = frozenset(
    {
        "enable-auto-tool-choice", "exclude-tools-when-tool-choice-none", "return-tokens-as-token-ids", "enable-prompt-tokens-details",
        "enable-per-request-metrics", "enable-server-load-tracking", "enable-force-include-usage", "enable-tokenizer-info-endpoint",
        "cohere-is-reasoning-model", "enable-request-id-headers", "enable-flash-late-interaction", "allow-deprecated-quantization",
        "enforce-eager", "enable-return-routed-experts", "return-sampling-mask", "use-fp64-gumbel", "disable-sliding-window",
        "disable-cascade-attn", "skip-tokenizer-init", "enable-mamba-cache-stochastic-rounding", "dcp-q-replicate",
        "enable-expert-parallel", "enable-batch-sharded-sampling", "enable-ep-weight-filter", "enable-dbo", "enable-eplb",
        "disable-custom-all-reduce", "enable-prefix-caching", "kv-sharing-fast-prefill", "swa-bounded-replay",
        "enable-mamba-shared-prefix-checkpoint", "use-replayssm", "language-model-only", "mm-encoder-only", "interleave-mm-strings",
        "skip-mm-profiling", "enable-lora", "enable-tower-connector-lora", "fully-sharded-loras", "kv-cache-metrics",
        "long-prefill-token-threshold-adaptive", "enable-chunked-prefill", "disable-chunked-mm-input", "scheduler-reserve-full-isl",
        "disable-hybrid-kv-cache-manager", "async-scheduling", "enable-flashinfer-autotune", "disable-log-stats",
    }
)  # fmt: skip
# Flags with one value: a number, or a name from a list of vLLM's. No value is a file, a repository, an address or a module.
VALUES = frozenset(
    {
        "chat-template-content-format", "response-role", "tool-call-parser", "tool-strict-level", "sse-keep-alive-interval",
        "cohere-format", "anthropic-disabled-thinking-effort", "runner", "convert", "tokenizer-mode", "dtype", "seed", "max-model-len",
        "quantization", "max-logprobs", "logprobs-mode", "config-format", "model-impl", "renderer-num-workers",
        "safetensors-load-strategy", "safetensors-prefetch-num-threads", "safetensors-prefetch-block-size", "attention-backend",
        "mamba-backend", "mamba-ssu-algorithm", "mamba-cache-philox-rounds", "reasoning-parser", "distributed-timeout-seconds",
        "cpu-distributed-timeout-seconds", "decode-context-parallel-size", "dcp-comm-backend", "dcp-kv-cache-interleave-size",
        "cp-kv-cache-interleave-size", "all2all-backend", "ubatch-size", "dbo-decode-token-threshold", "dbo-prefill-token-threshold",
        "expert-placement-strategy", "max-parallel-loading-workers", "block-size", "gpu-memory-utilization",
        "device-memory-utilization", "kv-cache-memory-bytes", "kv-cache-dtype", "num-gpu-blocks-override", "prefix-caching-hash-algo",
        "prefix-cache-retention-interval", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "prefix-match-unit",
        "mamba-cache-mode", "replayssm-buffer-len", "offload-backend", "cpu-offload-gb", "offload-group-size", "offload-num-in-group",
        "offload-prefetch-step", "mm-processor-cache-gb", "mm-processor-cache-type", "mm-hasher-algorithm",
        "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "mm-encoder-attn-backend", "mm-encoder-attn-dtype",
        "video-pruning-rate", "video-pruning-method", "max-loras", "max-lora-rank", "lora-dtype", "max-cpu-loras",
        "max-lora-cls-labels", "kv-cache-metrics-sample", "max-num-batched-tokens", "max-num-scheduled-tokens", "max-num-seqs",
        "max-num-active-seqs", "max-num-queued-reqs", "max-num-queued-tokens", "long-prefill-token-threshold", "scheduling-policy",
        "watermark", "prefill-schedule-interval", "stream-interval", "max-cudagraph-capture-size", "moe-backend", "linear-backend",
        "sparse-indexer-topk-backend", "optimization-level", "performance-mode", "gdn-prefill-backend", "kda-prefill-backend",
        "kda-decode-backend",
    }
)  # fmt: skip
# Flags with one value, JSON of numbers and names.
MAPPINGS = frozenset({"limit-mm-per-prompt", "override-generation-config", "default-chat-template-kwargs", "pooler-config"})
# Flags with any number of values.
LISTS = frozenset({"cudagraph-capture-sizes", "kv-cache-dtype-skip-layers"})

# Too many variables load code (LD_PRELOAD, PYTHON*, PATH, NCCL_NET_PLUGIN, VLLM_PLUGINS, ...), and VLLM_LOGGING_LEVEL writes what models
# answer into the log: only these plain numbers and switches may be set. VLLM_MARLIN_USE_ATOMIC_ADD is compared with "1" and chooses how a
# kernel adds up its own output (marlin_utils.py, should_use_atomic_add_reduce).
ENVIRONMENT = frozenset(
    {
        "CUDA_LAUNCH_BLOCKING", "HF_HUB_OFFLINE", "MKL_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_MERGE_NICS", "NCCL_IB_QPS_PER_CONNECTION",
        "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOG_STATS_INTERVAL", "VLLM_MARLIN_USE_ATOMIC_ADD",
        "VLLM_USE_DEEP_GEMM",
    }
)  # fmt: skip


WHERE, CURE = "over the admin API", "set it in the configuration file."


def refuse_flags(args: Sequence[str], where: str = WHERE, cure: str = CURE) -> None:
    """Raise ConfigError for the first flag that is not in the lists or has more or fewer values than its list says.

    A value after a flag that takes none is refused, because vLLM may read it as its model. where, cure: words of the message, for a place
    other than the admin API.
    """
    for flag in flags_in(args):
        if not flag.name or (flag.name in SWITCHES and not isinstance(flag.value, bool)):
            message = "extra_args has a value that no flag before it takes, and vLLM would read it as its model: remove it."
            raise ConfigError(message, param="extra_args")
        name = flag.name if flag.name.startswith("-") else f"--{flag.name}"
        if not _is_listed(flag.name):
            reason = "only flags that tune a model are let in there, written in full"
            if (near := _meant(flag.name)) is not None:
                raise ConfigError(f"{shown(name)} is refused {where}: {reason}. Did you mean --{near}?", param="extra_args")
            raise ConfigError(f"{shown(name)} is refused {where}: {reason}; {cure}", param="extra_args")
        if not _is_whole(flag):
            raise ConfigError(f"{shown(name)} needs one value that does not begin with '-': write {name[:48]}=VALUE.", param="extra_args")


def refuse_variables(names: Iterable[str], where: str = WHERE, cure: str = CURE) -> None:
    """Raise ConfigError for the first variable that an added model may not set. where, cure: see `refuse_flags`."""
    for name in names:
        if name not in ENVIRONMENT:
            raise ConfigError(f"The environment variable {shown(name)} is refused {where}: {cure}", param="env")


def _is_listed(name: str) -> bool:
    return any(name in names for names in (SWITCHES, VALUES, MAPPINGS, LISTS))


def _meant(name: str) -> str | None:
    """The listed flag that a flag unknown to vLLM was most likely meant for."""
    return None if name in flags_of_vllm() else nearest(name, SWITCHES | VALUES | MAPPINGS | LISTS)


def _is_whole(flag: Flag) -> bool:
    """Whether a listed flag has as many values as it takes."""
    if flag.name in SWITCHES:
        return isinstance(flag.value, bool)
    return isinstance(flag.value, str) or (flag.name in LISTS and isinstance(flag.value, tuple))
