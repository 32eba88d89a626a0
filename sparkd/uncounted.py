"""Owns which of vLLM's flags change a model's account of memory in a way that sparkd does not count. Never counts, and refuses none itself.

Read from the arguments of vLLM 0.26 and 0.32 (vllm/engine/arg_utils.py). All others are counted past: kernels, logs, chats, scheduling.
Where one of those makes an engine smaller (--language-model-only, --max-cudagraph-capture-size), the account stays on the safe side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

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


def uncounted(args: Sequence[str]) -> Iterator[str]:
    """Every such flag as it was written, without its value; a beginning of one too, which argparse completes.

    --speculative-config is counted where its value is whole, and not in pieces (`--speculative-config.method`) or as `-sc`.
    """
    for arg in args:
        written = arg.partition("=")[0]
        if arg.startswith("--"):
            path = written[2:].replace("_", "-")
            name = path.partition(".")[0].rstrip("+").removeprefix("no-")
            if name and (any(flag.startswith(name) for flag in _FLAGS) or (_SPECULATIVE.startswith(name) and path != _SPECULATIVE)):
                yield written
        elif len(arg) > 1 and arg[0] == "-" and not arg[1].isdigit() and written.partition(".")[0] != _PASSED_SHORT:
            yield arg[:2] if arg.startswith(("-q", "-O")) else written


def reserved_whole(args: Sequence[str], memory_gib: object, keys: Collection[str]) -> Iterator[str]:
    """What `sparkd check` says where a flag of extra_args has the whole machine reserved. keys: those that a model's entry may have."""
    if memory_gib != "auto" or not (flags := list(dict.fromkeys(uncounted(args)))):
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
