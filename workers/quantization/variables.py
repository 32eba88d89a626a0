"""Owns the environment variables of the earlier fork of vLLM, read as rules. Never reads the process's own environment."""

from __future__ import annotations

from collections.abc import Mapping

from workers.quantization.formats import Format
from workers.quantization.rules import FormatRule

# Variable -> (format, priority): FP8 overrides NF4, NF4 overrides MXFP4.
LAYERS: Mapping[str, tuple[str, int]] = {"VLLM_FP8_LAYERS": ("fp8", 30), "VLLM_NF4_LAYERS": ("nf4", 20), "VLLM_MXFP4_LAYERS": ("mxfp4", 10)}
NF4_GROUP_SIZE = "VLLM_NF4_GROUP_SIZE"
NAMES = (*LAYERS, NF4_GROUP_SIZE)


def rules_of(environ: Mapping[str, str]) -> tuple[FormatRule, ...]:
    """The rules of the variables: `all`, or names separated by commas such as `moe,q_proj,o_proj,lm_head`. Raises ConfigError, which names
    the variable."""
    rules: list[FormatRule] = []
    for variable, (spelling, priority) in LAYERS.items():
        words = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
        if words:
            chosen = _nf4(environ.get(NF4_GROUP_SIZE, "").strip()) if spelling == "nf4" else Format(spelling)
            rules += [FormatRule(word, chosen, priority, source=variable) for word in words]
    return tuple(rules)


def notes_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that is set and has no effect."""
    idle = environ.get(NF4_GROUP_SIZE, "").strip()
    if not idle or environ.get("VLLM_NF4_LAYERS", "").strip():
        return ()
    return (f"{NF4_GROUP_SIZE}={idle}: not used, because VLLM_NF4_LAYERS names no layer.",)


def _nf4(size: str) -> Format:
    """NF4 with the group size of the variable, which may be empty."""
    return Format.parse(f"nf4-g{size}" if size else "nf4", where=f"{NF4_GROUP_SIZE}={size}" if size else "VLLM_NF4_LAYERS")


def set_in(environ: Mapping[str, str]) -> list[str]:
    """The names of the variables that are set and not empty."""
    return [name for name in NAMES if environ.get(name, "").strip()]
