"""Names the flags and variables by which an engine writes prompts or answers into its log, which every holder of an admin key can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparkd.vllm.flags import parsed, value_of

# Flags of vLLM 0.32 that do so by being there.
_FLAGS = frozenset(
    {"enable-log-requests", "enable-log-outputs", "enable-log-deltas", "logging-config", "log-config-file", "log-error-stack"}
)
# And by a level: vLLM's own parsers and its server log what a model said at DEBUG (entrypoints, reasoning, tool_parsers).
_LEVELS: Mapping[str, tuple[str, ...]] = {"log-level": ("debug", "notset"), "uvicorn-log-level": ("debug", "trace")}
_VARIABLES = ("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_TRACE_FUNCTION")
_OFF = ("", "0", "false")


def loud(args: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """The name of every flag and variable that does so. args: all of the engine's; env: its own variables."""
    yield from (f"--{name}" for name, value in parsed(args).items() if name in _FLAGS and value is not False)
    yield from (f"--{flag}" for flag, levels in _LEVELS.items() if (value_of(args, flag) or "").lower() in levels)
    if env.get("VLLM_LOGGING_LEVEL", "").upper() in ("DEBUG", "NOTSET"):
        yield "VLLM_LOGGING_LEVEL"
    if env.get("VLLM_LOGGING_CONFIG_PATH"):
        yield "VLLM_LOGGING_CONFIG_PATH"
    yield from (name for name in _VARIABLES if env.get(name, "").lower() not in _OFF)


def remark(args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """A sentence about it; None where there is nothing of the kind."""
    names = list(dict.fromkeys(loud(args, env)))
    if not names:
        return None
    does = "writes" if len(names) == 1 else "write"
    reason = f"{' and '.join(names)} {does} prompts or answers into the engine's log, which every admin key can read"
    return f"{reason}: remove it once it has served."
