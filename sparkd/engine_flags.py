"""Owns the vLLM flags that a model's keys stand for, whoever holds the keys. Never validates one, never names an executor or a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sparkd import kv_sizing
from sparkd.parsers import OFF

_VALUE_FLAGS = (
    "revision",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "load_format",
    "reasoning_parser",
)


class Sampling(Protocol):
    def flag(self) -> str: ...


class Keys(Protocol):
    """The keys of a model's entry that bear on how an engine loads it, sizes its cache and is called; see
    sparkd.model_config.ModelConfig."""

    @property
    def quantize(self) -> dict[str, Any] | str | None: ...
    @property
    def quantized_cache(self) -> bool: ...
    @property
    def allow_missing_weights(self) -> bool: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def load_format(self) -> str | None: ...
    @property
    def kv_cache(self) -> dict[str, Any] | str | None: ...
    @property
    def kv_margin_gib(self) -> float | None: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...
    @property
    def tool_call_parser(self) -> str | None: ...
    @property
    def sampling(self) -> Sampling | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def enforce_eager(self) -> bool: ...
    @property
    def extra_args(self) -> Sequence[str]: ...


class Sized(Keys, Protocol):
    """And the numbers that bound its cache."""

    @property
    def max_model_len(self) -> int | str | None: ...
    @property
    def memory_gib(self) -> float | str: ...


def flags_of(model: Keys) -> list[str]:
    """The keys as vLLM flags, in a fixed order, then extra_args as they are: argparse lets the last one win.

    Left to the caller, who knows the rest: --model, --served-model-name, the executor, the ranks and the socket.
    """
    flags: list[str] = []
    for key in _VALUE_FLAGS:
        value = kv_sizing.utilization_of(model) if key == "gpu_memory_utilization" else getattr(model, key, None)
        if value is not None and (key, value) != ("reasoning_parser", OFF):
            flags += [f"--{key.replace('_', '-')}", str(value)]
    if model.tool_call_parser not in (None, OFF):
        # vLLM ignores the parser without this switch (cli_args.py: "Required for `--enable-auto-tool-choice`").
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
    if model.sampling is not None and (said := model.sampling.flag()):
        flags += ["--override-generation-config", said]
    for key in ("trust_remote_code", "enforce_eager"):
        if getattr(model, key):
            flags.append(f"--{key.replace('_', '-')}")
    return [*flags, *model.extra_args]
