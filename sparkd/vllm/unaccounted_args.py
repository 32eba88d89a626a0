"""Sorts vLLM's flags by what they change of a model's memory, and by whether vLLM's answer about the model includes it.

Read from the arguments of vLLM 0.26 and 0.32 (vllm/engine/arg_utils.py). All others are counted past: kernels, logs, chats, scheduling.
Where one of those makes an engine smaller (--language-model-only, --max-cudagraph-capture-size), the account stays on the safe side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sparkd.vllm.flags import DRAFTS, Value, parsed
from sparkd.vllm.reserved_args import OWN_WORKERS

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

# The flags of an entry by name (sparkd.vllm.flags.parsed).
Flags = Mapping[str, Value]
# Other weights, or another form of them, and with them other layers with a cache. vLLM's answer about a model has what becomes of both
# (sparkd.capacity.evidence).
_WEIGHTS = frozenset(
    {
        "config-format", "hf-config-path", "hf-overrides", "model-class-overrides", "model-impl", "dtype", "runner", "convert",
        "quantization", "quantization-config", "mm-encoder-only", "enable-expert-parallel",
        # Drafts that are not in --speculative-config.
        "spec-method", "spec-model", "spec-tokens",
    }
)  # fmt: skip
# A cache of another layout; that too is in vLLM's answer.
_CACHE = frozenset(
    {
        "kv-cache-dtype", "kv-cache-dtype-skip-layers", "kv-sharing-fast-prefill", "swa-bounded-replay",
        "disable-sliding-window", "disable-hybrid-kv-cache-manager", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size",
        "mamba-cache-mode", "enable-mamba-shared-prefix-checkpoint", "prefix-match-unit", "use-replayssm", "replayssm-buffer-len",
    }
)  # fmt: skip
# The flags that no answer about the model has, so that vLLM is asked without them.
REST = frozenset(
    {
        # Other weights than those of the model that is asked about, or beside them.
        "model", "revision", "load-format", "model-loader-extra-config", "ignore-patterns", "enable-lora",
        # Weights elsewhere, or more than once.
        "tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "decode-context-parallel-size",
        "data-parallel-size", "data-parallel-size-local", "enable-eplb", "eplb-config", "enable-elastic-ep", "cpu-offload-gb",
        "cpu-offload-params", "offload-backend", "offload-group-size", "offload-num-in-group", "offload-prefetch-step", "offload-params",
        # A cache of another size, or one more.
        "kv-cache-memory-bytes", "gpu-memory-utilization", "device-memory-utilization", "num-gpu-blocks-override", "kv-offloading-size",
        "kv-offloading-backend", "kv-transfer-config", "max-model-len",
        # A class of the operator's own, which may do anything, and what else may be anything.
        "worker-cls", "worker-extension-cls", "diffusion-config", "engram-config", "additional-config", "ec-transfer-config",
    }
)  # fmt: skip
_FLAGS = _WEIGHTS | _CACHE | REST
# Another largest batch, other graphs, more processes: the rehearsal of a start measures what is left for the cache beside them
# (workers/kv), so that nothing is refused over one and no machine is reserved whole for it.
_MEASURED = frozenset(
    {
        "max-num-scheduled-tokens", "performance-mode", "optimization-level",
        "compilation-config", "cudagraph-capture-sizes", "enable-dbo", "ubatch-size", "mm-processor-cache-gb", "mm-ipc-gpu-memory-gb",
        "api-server-count",
    }
)  # fmt: skip
# Types of half width, as checkpoints are, or vLLM's choice between these.
NARROW = ("auto", "bfloat16", "float16", "half")
# Types of twice the width of what is stored.
WIDE = ("float32", "float")
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
# The things that a flag may change: the layers' weights, the layout of their cache, or something else.
WEIGHTS, CACHE, OTHER = "weights", "cache", "other"
BLOCKS, BLOCK = "num-gpu-blocks-override", "block-size"
BYTES = "kv-cache-memory-bytes"


def measured(args: Sequence[str]) -> list[str]:
    """Every flag whose cost is not counted beforehand and is measured by each start."""
    return [_written(name, value) for name, value in parsed(args).items() if name in _MEASURED]


def unsized(flags: Flags) -> list[str]:
    """Every such flag, without its value, but a number of blocks of the cache, which is counted."""
    names = _FLAGS - {BLOCKS} if count_in(flags, BLOCKS) is not None else _FLAGS
    return [_written(name, value) for name, value in flags.items() if name in names and value not in OWN_WORKERS]


def unanswered(args: Sequence[str]) -> list[str]:
    """The flags of `unsized` that vLLM's answer about the model does not account for either."""
    return [flag for flag in unsized(parsed(args)) if OTHER in changed_by([flag])]


def changed_by(flags: Iterable[str]) -> frozenset[str]:
    """The parts (WEIGHTS, CACHE, OTHER) that flags of `unsized` may change."""
    changed: set[str] = set()
    for name in map(_name, flags):
        if name in _CACHE:
            changed.add(CACHE)
        else:
            changed |= {WEIGHTS, CACHE} if name in _WEIGHTS or name == DRAFTS else {OTHER}
    return frozenset(changed)


def count_in(flags: Flags, name: str) -> int | None:
    """The whole number of BLOCKS or BLOCK; None without the flag, or where vLLM could not serve with its value."""
    count = str(flags.get(name))
    return int(count) if count.isascii() and count.isdecimal() and len(count) <= 12 and int(count) else None


def reserved_whole(model: ModelConfig) -> Iterator[str]:
    """Warnings of `sparkd check` for flags of extra_args by which a start reserves the whole machine."""
    given = parsed(model.extra_args)
    flags = unsized(given)
    share = model.gpu_memory_utilization is not None or (isinstance(model.kv_cache, dict) and "utilization" in model.kv_cache)
    if model.memory_gib != "auto" or not flags or (share and count_in(given, BLOCKS) is None):
        return
    keys = {"kv_cache" if _name(flag) == BYTES else _name(flag).replace("-", "_") for flag in flags}
    better = sorted(keys & set(type(model).model_fields))
    cure = f"use {' and '.join(better)} of the entry, or set memory_gib" if better else "set memory_gib to its real need"
    written = f"{' and '.join(flags)} in extra_args may change its memory"
    if OTHER in changed_by(flags):
        yield f"{written}, which sparkd cannot count: it reserves all that a node lends. Better {cure}."
    else:
        yield f"{written}: until vLLM has computed that, sparkd reserves all that a node lends. For a load before that {cure}."


def _written(name: str, value: Value) -> str:
    return f"--no-{name}" if value is False else f"--{name}"


def _name(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-")
