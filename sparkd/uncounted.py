"""Owns which of vLLM's flags change a model's account of memory in a way that sparkd does not count. Never counts, and refuses none itself.

Read from the arguments of vLLM 0.26 and 0.32 (vllm/engine/arg_utils.py). All others are counted past: kernels, logs, chats, scheduling.
Where one of those makes an engine smaller (--language-model-only, --max-cudagraph-capture-size), the account stays on the safe side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from sparkd.vllm_flags import flag_name, values_of

_FLAGS = frozenset(
    {
        # Other weights, or another form of them.
        "model", "revision", "config-format", "hf-config-path", "hf-overrides", "model-class-overrides", "model-impl", "dtype", "runner",
        "task", "convert", "quantization", "quantization-config", "load-format", "model-loader-extra-config", "ignore-patterns",
        "enable-lora", "mm-encoder-only",
        # Weights elsewhere, or more than once.
        "tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "decode-context-parallel-size",
        "data-parallel-size", "data-parallel-size-local",
        "enable-expert-parallel", "enable-eplb", "eplb-config", "enable-elastic-ep", "cpu-offload-gb",
        "cpu-offload-params", "offload-backend", "offload-group-size", "offload-num-in-group", "offload-prefetch-step", "offload-params",
        # A cache of another size or layout.
        "block-size", "kv-cache-dtype", "kv-cache-dtype-skip-layers", "kv-cache-memory-bytes", "gpu-memory-utilization",
        "device-memory-utilization", "num-gpu-blocks-override", "swap-space", "kv-offloading-size", "kv-offloading-backend",
        "kv-sharing-fast-prefill", "kv-transfer-config", "swa-bounded-replay", "disable-sliding-window", "disable-hybrid-kv-cache-manager",
        "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode", "enable-mamba-shared-prefix-checkpoint",
        "prefix-match-unit", "use-replayssm", "replayssm-buffer-len",
        # Another largest batch, other graphs, more processes.
        "max-model-len", "max-num-seqs", "max-num-batched-tokens", "max-num-scheduled-tokens", "performance-mode", "enforce-eager",
        "optimization-level", "compilation-config", "cudagraph-capture-sizes", "enable-dbo", "ubatch-size", "mm-processor-cache-gb",
        "mm-ipc-gpu-memory-gb", "api-server-count", "worker-cls", "worker-extension-cls",
        # Drafts that are not in --speculative-config, and what may be anything.
        "spec-method", "spec-model", "spec-tokens", "diffusion-config", "engram-config", "additional-config", "ec-transfer-config",
    }
)  # fmt: skip
# --attention-config, the only flag of one dash that is a kernel's alone.
_PASSED_SHORT = "-ac"
_SPECULATIVE = "speculative-config"
_BLOCKS = "num-gpu-blocks-override"
# Of vLLM's, flags that say a size themselves, so that what is reserved follows from them (sparkd.placement.needed_gib).
SHARE, BYTES = "gpu-memory-utilization", "kv-cache-memory-bytes"
# Sparkd's own worker classes, which size a cache in the same way whoever names them.
_OWN_WORKERS = ("workers.kv.SparkWorker", "workers.kv.SparkCPUWorker")


class Entry(Protocol):
    """Of a model's entry, what bears on how much is reserved for it; see sparkd.model_config.ModelConfig."""

    @property
    def memory_gib(self) -> Any: ...
    @property
    def kv_cache(self) -> dict[str, Any] | str | None: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...
    @property
    def extra_args(self) -> Sequence[str]: ...


def uncounted(args: Sequence[str]) -> Iterator[str]:
    """Every such flag as it was written, without its value; a beginning of one too, which argparse completes.

    --speculative-config is counted where its value is whole, and not in pieces (`--speculative-config.method`) or as `-sc`.
    """
    for index, arg in enumerate(args):
        written = arg.partition("=")[0]
        if is_own_worker(args, index):
            continue
        if arg.startswith("--"):
            path = written[2:].replace("_", "-")
            name = path.partition(".")[0].rstrip("+").removeprefix("no-")
            if name and (any(flag.startswith(name) for flag in _FLAGS) or (_SPECULATIVE.startswith(name) and path != _SPECULATIVE)):
                yield written
        elif len(arg) > 1 and arg[0] == "-" and not arg[1].isdigit() and written.partition(".")[0] != _PASSED_SHORT:
            yield arg[:2] if arg.startswith(("-q", "-O")) else written


def unsized(args: Sequence[str]) -> Iterator[str]:
    """`uncounted`, less a number of blocks of the cache: with the checkpoint's headers that is a size like others."""
    counted = blocks_of(args) is not None
    return (flag for flag in uncounted(args) if not counted or flag_name(flag) != _BLOCKS)


def blocks_of(args: Sequence[str]) -> int | None:
    """What --num-gpu-blocks-override gives the cache; None where it is not there, or vLLM could not serve with its value."""
    given = [value for *_, value in values_of(args, _BLOCKS)]
    return int(given[-1]) if given and given[-1].isascii() and given[-1].isdecimal() and len(given[-1]) <= 12 and int(given[-1]) else None


def is_own_worker(args: Sequence[str], index: int) -> bool:
    """Whether the argument there is a --worker-cls that names one of sparkd's own."""
    return any(first == index and value in _OWN_WORKERS for first, _, value in values_of(args, "worker-cls"))


def reserved_whole(model: Entry, keys: Collection[str]) -> Iterator[str]:
    """What `sparkd check` says where a flag of extra_args has the whole machine reserved, which sparkd.placement.needed_gib does. keys:
    those that a model's entry may have."""
    args = model.extra_args
    flags = list(dict.fromkeys(unsized(args)))
    share = model.gpu_memory_utilization is not None or (isinstance(model.kv_cache, dict) and "utilization" in model.kv_cache)
    share = share or any(flag_name(flag) == SHARE for flag in flags)
    if model.memory_gib != "auto" or not flags or (share and blocks_of(args) is None):
        return
    if all(flag_name(flag) == BYTES for flag in flags):
        told = f"{flags[0]} in extra_args has vLLM size the cache: on a GPU all that a node lends is reserved for it, on a CPU that size"
        yield f"{told}, its weights and processes. Better use kv_cache (bytes) of the entry, or set memory_gib."
        return
    named = {flag.strip("-").replace("-", "_") for flag in flags}
    better = sorted(key for key in keys if any(len(one) > 3 and key.startswith(one) for one in named))
    cure = f"use {' and '.join(better)} of the entry, or set memory_gib" if better else "set memory_gib to what it really needs"
    told = f"{' and '.join(flags)} in extra_args may change what it takes, which is not counted"
    yield f"{told}: all that a node lends is reserved for it. Better {cure}."


def switched(args: Sequence[str], name: str) -> bool | None:
    """What `--name` and `--no-name` say, the last of them; None where neither is there. A beginning of either counts, as for argparse."""
    found = None
    for arg in args:
        word = arg[2:].replace("_", "-") if arg.startswith("--") else ""
        if word and name.startswith(word):
            found = True
        elif len(word) > len("no-") and f"no-{name}".startswith(word):
            found = False
    return found
