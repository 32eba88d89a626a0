"""Lists what the supported releases of vLLM read no more and published recipes still set: one row for each variable and flag.

Supported are those of workers.vllm.symbols. "Absent" in a source means: no occurrence in the package's Python files, read in 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Release = tuple[int, int]

# The release whose parser and envs.py the rows were last held against (tests/sparkd/vllm/test_translate.py).
READ_OFF: Release = (0, 32)
# As the value of a row's `becomes`: whatever was given.
ANY = "*"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A variable, or a flag, that no supported release reads.

    becomes: its value in small letters -> the flags that say the same, none where nothing needs to be said. A value that is not there is
    refused with `cure`. 'true' and 'false' are read as 1 and 0. why: the beginning of the note.
    """

    name: str
    becomes: Mapping[str, Mapping[str, str]]
    cure: str
    source: str
    why: str = "vLLM does not read it any more"


_NAME = "Remove it, and name the backend by --moe-backend in extra_args"
_ANYTHING_BUT = "No flag says 'anything but FlashInfer': remove it, and give --moe-backend triton or --moe-backend marlin in extra_args"
_ELEVEN = "vLLM PR #44992 removed it in 0.23 (the Spark vLLM guide, section 6); absent in 0.32.0"
_FORK = "a fork of vLLM for the Spark, whose recipes are published (christopherowen/spark-vllm-mxfp4-docker); absent in 0.32.0"


def _moe(backend: str) -> dict[str, str]:
    return {"moe-backend": backend}


# It kept the unquantized experts of an MTP draft off FlashInfer (eugr/spark-vllm-docker, recipes/nemotron-3-super-nvfp4-mtp.yaml), which
# the draft's own moe_backend does now; without one the draft takes the model's (config/speculative.py).
DRAFT_EXPERTS = "VLLM_USE_FLASHINFER_MOE_FP16"

# The order is the precedence: of two rows that lead to one flag the first one sets it.
VARIABLES: tuple[Dropped, ...] = (
    Dropped(
        "VLLM_NVFP4_GEMM_BACKEND",
        {
            backend: {"linear-backend": backend.replace("-", "_")}
            for backend in ("marlin", "cutlass", "flashinfer-cutlass", "flashinfer-trtllm", "flashinfer-cudnn")
        },
        "Remove it, and name the backend by --linear-backend in extra_args",
        f"vLLM PR #39538 brings --linear-backend in its place, #33201 has its values; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_TEST_FORCE_FP8_MARLIN", {"1": {"linear-backend": "marlin", "moe-backend": "marlin"}, "0": {}},
        "Remove it, and give --linear-backend marlin and --moe-backend marlin in extra_args",
        "in 0.26.0 it forces Marlin for FP8 linears, FP8 and NVFP4 experts (kernels/linear/scaled_mm/marlin.py, fused_moe/oracle/fp8.py, "
        "nvfp4.py); absent in 0.32.0",
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_FP4", {"0": _moe("marlin"), "1": {}}, _NAME,
        f"the Spark vLLM guide, 7.1.1: --moe-backend marlin takes the place of 0; 1 is the order of auto; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_FLASHINFER_MOE_BACKEND",
        {"throughput": _moe("flashinfer_cutlass"), "latency": _moe("flashinfer_trtllm"), "masked_gemm": _moe("flashinfer_cutedsl")},
        _NAME, f"the map of flashinfer_utils.py, get_flashinfer_moe_backend; vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped("VLLM_USE_FLASHINFER_MOE_FP8", {"1": {}}, _ANYTHING_BUT, _ELEVEN),
    Dropped(DRAFT_EXPERTS, {"1": {}}, _ANYTHING_BUT, _ELEVEN),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", {"1": _moe("flashinfer_trtllm"), "0": {}}, _NAME, f"vLLM PR #43148; {_ELEVEN}",
    ),
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
        "deprecated by vLLM PR #26315, suffix _VLLM_V1 by #25489; absent in 0.26.0 (vLLM #50292)",
    ),
)  # fmt: skip

FLAGS: tuple[Dropped, ...] = (
    Dropped("swap-space", {ANY: {}}, "", "vLLM PR #36216: the V1 engine never used it", "it had no effect any more"),
    Dropped(
        "disable-log-requests", {ANY: {}}, "", "vLLM PR #21739: requests are logged with --enable-log-requests only", "that is the default",
    ),
    Dropped("rope-scaling", {}, "Give it inside --hf-overrides in extra_args", "absent in 0.26.0"),
    Dropped("mxfp4-backend", {"marlin": _moe("marlin"), "triton": _moe("triton")}, _NAME, _FORK),
    Dropped("mxfp4-layers", {}, "Set 'quantize:' on the model instead: it says for each layer what becomes of it", _FORK),
)  # fmt: skip
