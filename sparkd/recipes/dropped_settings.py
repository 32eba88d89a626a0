"""Writes flags and variables that published recipes still set, and supported releases of vLLM dropped, as those releases read them.

Supported are those of workers.vllm.symbols. "Absent" in a comment means: no occurrence in the package's Python files, read in 0.32.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparkd.vllm.flags import DRAFTS, SPECULATIVE, Value, json_object, parsed

_OFF = ("0", "false", "False")


@dataclass(frozen=True, slots=True)
class Dropped:
    """A variable, or a flag, that no supported release reads.

    becomes: its value in small letters -> the flags that say the same, none where nothing needs to be said. A value that is not there has
    no equivalent. 'true' and 'false' are read as 1 and 0.
    cure: what to do about a value without an equivalent.
    """

    name: str
    becomes: Mapping[str, Mapping[str, str]]
    cure: str


@dataclass(slots=True)
class Settings:
    """The flags and variables of a recipe.

    notes: one sentence for each change.
    refused: one for each setting without an equivalent.
    """

    flags: dict[str, Value]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


_NAME = "Remove it, and name the backend by --moe-backend in extra_args"
_ANYTHING_BUT = "No flag says 'anything but FlashInfer': remove it, and give --moe-backend triton or --moe-backend marlin in extra_args"


def _moe(backend: str) -> dict[str, str]:
    return {"moe-backend": backend}


# It kept the unquantized experts of an MTP draft off FlashInfer (eugr/spark-vllm-docker, recipes/nemotron-3-super-nvfp4-mtp.yaml), which
# the draft's own moe_backend does now; without one the draft takes the model's (config/speculative.py).
DRAFT_EXPERTS = "VLLM_USE_FLASHINFER_MOE_FP16"

# The order is the precedence: of two rows that lead to one flag the first one sets it. vLLM PR #44992 removed the variables for kernels in
# 0.23 (the Spark vLLM guide, section 6); they are absent in 0.32.0.
VARIABLES: tuple[Dropped, ...] = (
    # vLLM PR #39538 brings --linear-backend in its place, #33201 has its values.
    Dropped(
        "VLLM_NVFP4_GEMM_BACKEND",
        {
            backend: {"linear-backend": backend.replace("-", "_")}
            for backend in ("marlin", "cutlass", "flashinfer-cutlass", "flashinfer-trtllm", "flashinfer-cudnn")
        },
        "Remove it, and name the backend by --linear-backend in extra_args",
    ),
    # In 0.26.0 it forces Marlin for FP8 linears, FP8 and NVFP4 experts (kernels/linear/scaled_mm/marlin.py, fused_moe/oracle/fp8.py,
    # nvfp4.py).
    Dropped(
        "VLLM_TEST_FORCE_FP8_MARLIN",
        {"1": {"linear-backend": "marlin", "moe-backend": "marlin"}, "0": {}},
        "Remove it, and give --linear-backend marlin and --moe-backend marlin in extra_args",
    ),
    # The Spark vLLM guide, 7.1.1: --moe-backend marlin takes the place of 0; 1 is the order of auto.
    Dropped("VLLM_USE_FLASHINFER_MOE_FP4", {"0": _moe("marlin"), "1": {}}, _NAME),
    # The map of flashinfer_utils.py, get_flashinfer_moe_backend; vLLM PR #43148.
    Dropped(
        "VLLM_FLASHINFER_MOE_BACKEND",
        {"throughput": _moe("flashinfer_cutlass"), "latency": _moe("flashinfer_trtllm"), "masked_gemm": _moe("flashinfer_cutedsl")},
        _NAME,
    ),
    Dropped(DRAFT_EXPERTS, {"1": {}}, _ANYTHING_BUT),
    # vLLM PR #43148.
    Dropped("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", {"1": _moe("flashinfer_trtllm"), "0": {}}, _NAME),
    # Deprecated by vLLM PR #26315, suffix _VLLM_V1 by #25489; absent in 0.26.0 (vLLM #50292).
    Dropped(
        "VLLM_ATTENTION_BACKEND",
        {
            name: {"attention-backend": name.removesuffix("_vllm_v1")}
            for name in (
                "flash_attn", "flashinfer", "triton_attn", "flash_attn_vllm_v1", "flashinfer_vllm_v1", "triton_attn_vllm_v1",
                "flex_attention", "triton_mla", "flashinfer_mla", "cutlass_mla",
            )
        },
        "Remove it, and name the backend by --attention-backend in extra_args",
    ),
)  # fmt: skip

# Both are of a fork for the Spark whose recipes are published (christopherowen/spark-vllm-mxfp4-docker).
FLAGS: tuple[Dropped, ...] = (
    Dropped("mxfp4-backend", {"marlin": _moe("marlin"), "triton": _moe("triton")}, _NAME),
    Dropped("mxfp4-layers", {}, "Set 'quantize:' on the model instead: it says for each layer what becomes of it"),
)


def translated(args: Sequence[str], env: Mapping[str, str]) -> Settings:
    """`args` and `env` for any supported release.

    A flag that is given already is never contradicted: the variable that it replaced is then only left out.
    """
    settings = Settings(dict(parsed(args)), dict(env))
    for row in FLAGS:
        if row.name in settings.flags:
            _replace(settings, row, f"--{row.name}", str(settings.flags.pop(row.name)))
    _move_experts_of_draft(settings)
    for row in VARIABLES:
        if row.name in settings.env:
            value = settings.env.pop(row.name).strip().lower()
            _replace(settings, row, row.name, {"true": "1", "false": "0"}.get(value, value))
    return settings


def _replace(settings: Settings, row: Dropped, shown: str, value: str) -> None:
    flags = row.becomes.get(value)
    if flags is None:
        settings.refused.append(f"{shown}: vLLM does not know it any more, and no flag replaces its value. {row.cure}.")
        return
    said = [f"--{name} is given already" if name in settings.flags else f"--{name} {text} says it now" for name, text in flags.items()]
    settings.flags |= {name: text for name, text in flags.items() if name not in settings.flags}
    settings.notes.append(f"{shown} is left out: vLLM does not read it any more{'; ' + ', '.join(said) if said else ''}.")


def _move_experts_of_draft(settings: Settings) -> None:
    """The backend of an MTP draft's experts moves into the configuration of drafts."""
    text = settings.flags.get(DRAFTS)
    config = json_object(text) if isinstance(text, str) else None
    if config is not None and str(config.get("method")).endswith("mtp") and settings.env.get(DRAFT_EXPERTS) in _OFF:
        del settings.env[DRAFT_EXPERTS]
        settings.flags[DRAFTS] = json.dumps({"moe_backend": "triton", **config})
        reason = f"vLLM does not read it any more; moe_backend of {SPECULATIVE} says it now."
        settings.notes.append(f"{DRAFT_EXPERTS} is left out: {reason}")
