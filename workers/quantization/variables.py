"""Owns the environment variables of the earlier fork of vLLM, read as rules. Never reads the process's own environment."""

from __future__ import annotations

from collections.abc import Mapping

from workers.quantization.formats import Format, refused
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
        if words and spelling == "nf4":
            raise refused(
                f"{variable}={','.join(words)}", "nf4 is not built yet; name these layers in VLLM_MXFP4_LAYERS, or use `quantize: nvfp4`"
            )
        rules += [FormatRule(word, Format(spelling), priority, source=variable) for word in words]
    return tuple(rules)


def notes_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that is set and has no effect."""
    idle = environ.get(NF4_GROUP_SIZE, "").strip()
    return (f"{NF4_GROUP_SIZE}={idle}: not used, because it is of nf4 alone, which is not built yet.",) if idle else ()


def set_in(environ: Mapping[str, str]) -> list[str]:
    """The names of the variables that are set and not empty."""
    return [name for name in NAMES if environ.get(name, "").strip()]
