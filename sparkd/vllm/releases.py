"""Owns what vLLM's releases dropped, renamed or brought: one row for each variable and flag, with its source. Never applies a row.

"Absent" in a source means: no occurrence in the package's Python files, read in 0.26.0 and 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Release = tuple[int, int]

# The release whose parser and envs.py the tables were last held against (tests/sparkd/vllm/test_translate.py).
READ_OFF: Release = (0, 32)
# As the value of a row's `becomes`: whatever was given. In its flags '{}' stands for the value in small letters.
ANY = "*"
NEVER: Release = (0, 0)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A variable, or a flag, that releases from `gone` on do not know (NEVER: no release of vLLM did, only a fork of it).

    becomes: its value in small letters -> the flags that say the same, none where nothing needs to be said. A value that is not there is
    refused with `cure`. 'true' and 'false' are read as 1 and 0. switch: a flag without a value. why: what the note adds.
    """

    name: str
    gone: Release
    becomes: Mapping[str, tuple[str, ...]]
    cure: str
    source: str
    switch: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Added:
    """A flag that releases before `since` do not know."""

    name: str
    since: Release
    cure: str
    source: str


_NAME = "Remove it, and name the backend by --moe-backend in extra_args"
_OFF = {"0": ()}
_NO_EFFECT = {ANY: ()}
_ELEVEN = "vLLM PR #44992 removed it; unknown to 0.23 (the Spark vLLM guide, section 6); absent in 0.26.0"
_V0 = "a setting of the V0 engine; absent in 0.26.0"

# The order is the precedence: of two rows that lead to one flag the first one sets it.
VARIABLES: tuple[Dropped, ...] = (
    Dropped(
        "VLLM_NVFP4_GEMM_BACKEND",
        (0, 23),
        {
            backend: ("--linear-backend", backend.replace("-", "_"))
            for backend in ("marlin", "cutlass", "flashinfer-cutlass", "flashinfer-trtllm", "flashinfer-cudnn")
        },
        "Remove it, and name the backend by --linear-backend in extra_args",
        f"vLLM PR #39538 brings --linear-backend in its place, #33201 has its values; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_USE_NVFP4_CT_EMULATIONS", (0, 23), {"1": ("--linear-backend", "emulation"), **_OFF},
        "Remove it, and name the backend by --linear-backend in extra_args", f"vLLM PR #39538; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_USE_FBGEMM", (0, 23), {"1": ("--linear-backend", "fbgemm"), **_OFF},
        "Remove it, and name the backend by --linear-backend in extra_args", f"vLLM PR #39538; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_TEST_FORCE_FP8_MARLIN", (0, 27), {"1": ("--linear-backend", "marlin", "--moe-backend", "marlin"), **_OFF},
        "Remove it, and give --linear-backend marlin and --moe-backend marlin in extra_args",
        "in 0.26.0 it forces Marlin for FP8 linears, FP8 and NVFP4 experts (kernels/linear/scaled_mm/marlin.py, fused_moe/oracle/fp8.py, "
        "nvfp4.py); absent in 0.32.0",
    ),
    Dropped(
        "VLLM_MXFP4_USE_MARLIN", (0, 23), {"1": ("--moe-backend", "marlin"), **_OFF}, _NAME, f"vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_MXFP4_BACKEND", NEVER,
        {"marlin": ("--moe-backend", "marlin"), "triton": ("--moe-backend", "triton"), "auto": ()}, _NAME,
        "a variable of forks (namake-taro/vllm-custom 0.17.1: auto, marlin, cutlass_fp4, triton); absent in 0.26.0",
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_FP4", (0, 23), {"0": ("--moe-backend", "marlin"), "1": ()}, _NAME,
        f"the Spark vLLM guide, 7.1.1: --moe-backend marlin takes the place of 0; 1 is the order of auto; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_FLASHINFER_MOE_BACKEND", (0, 23),
        {
            "throughput": ("--moe-backend", "flashinfer_cutlass"),
            "latency": ("--moe-backend", "flashinfer_trtllm"),
            "masked_gemm": ("--moe-backend", "flashinfer_cutedsl"),
        },
        _NAME, f"the map of flashinfer_utils.py, get_flashinfer_moe_backend; vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_FP8", (0, 23), {"1": ()},
        "No flag says 'anything but FlashInfer': remove it, and give --moe-backend triton or --moe-backend marlin in extra_args", _ELEVEN,
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_FP16", (0, 23), {"1": ()},
        "No flag says 'anything but FlashInfer': remove it, and give --moe-backend triton, or for a draft's experts \"moe_backend\": "
        '"triton" in --speculative-config', _ELEVEN,
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16", (0, 23), _OFF,
        "Remove it, and give --moe-backend flashinfer_cutlass (Hopper) or flashinfer_trtllm (SM100) in extra_args",
        f"what 1 meant depended on the GPU (oracle/mxfp4.py of 0.22); vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS", (0, 23), {"1": ("--moe-backend", "flashinfer_cutlass"), **_OFF}, _NAME,
        f"vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", (0, 23), {"1": ("--moe-backend", "flashinfer_trtllm"), **_OFF}, _NAME,
        f"vLLM PR #43148; {_ELEVEN}",
    ),
    Dropped(
        "VLLM_ATTENTION_BACKEND", (0, 16),
        {
            **{f"{name}_vllm_v1": ("--attention-backend", name) for name in ("flash_attn", "flashinfer", "triton_attn")},
            **{
                name: ("--attention-backend", name)
                for name in ("flash_attn", "flashinfer", "triton_attn", "flex_attention", "triton_mla", "flashinfer_mla", "cutlass_mla")
            },
        },
        "Remove it, and name the backend by --attention-backend in extra_args",
        "deprecated by vLLM PR #26315, suffix _VLLM_V1 by #25489; --attention-backend serves 0.16 (dgx-vllm README); absent in 0.26.0 "
        "(vLLM #50292)",
    ),
    Dropped(
        "VLLM_USE_V1", (0, 12), {"1": ()}, "There is one engine only, V1: remove it", "vLLM PRs #27784, #27798; absent in 0.26.0",
    ),
    Dropped("VLLM_RPC_TIMEOUT", (0, 24), _NO_EFFECT, "", "nothing read it (vLLM PR #45777); absent in 0.26.0"),
    Dropped(
        "VLLM_FP8_MOE_BACKEND", NEVER, _NO_EFFECT, "", "the Spark vLLM guide, 7.1.1; absent in 0.26.0", why="no release ever read it",
    ),
    Dropped(
        "VLLM_STREAM_LOADING", NEVER, _NO_EFFECT, "", "namake-taro/vllm-custom 0.17.1; absent in 0.26.0",
        why="it belongs to a fork; 'quantize:' on the model does the same",
    ),
    Dropped(
        "VLLM_FASTSAFETENSORS_NOGDS", NEVER, _NO_EFFECT, "", "namake-taro/vllm-custom 0.17.1; absent in 0.26.0",
        why="it belongs to a fork; sparkd's loader does not use GPUDirect",
    ),
)  # fmt: skip

FLAGS: tuple[Dropped, ...] = (
    Dropped("swap-space", (0, 18), _NO_EFFECT, "", "vLLM PR #36216: the V1 engine never used it", why="it had no effect any more"),
    Dropped(
        "disable-log-requests", (0, 11), _NO_EFFECT, "", "vLLM PR #21739: requests are logged with --enable-log-requests only",
        switch=True, why="that is the default",
    ),
    Dropped(
        "enable-reasoning", (0, 10), _NO_EFFECT, "", "vLLM #18538: --reasoning-parser alone switches it on", switch=True,
        why="--reasoning-parser is enough",
    ),
    Dropped(
        "guided-decoding-backend", (0, 26), {ANY: ("--structured-outputs-config.backend={}",)},
        "Remove it, or set --structured-outputs-config in extra_args", "absent in 0.26.0, whose StructuredOutputsConfig has .backend",
    ),
    Dropped("cuda-graph-sizes", (0, 26), {}, "Its name is --cudagraph-capture-sizes now", "absent in 0.26.0, which has the new name"),
    Dropped("num-scheduler-steps", (0, 12), _NO_EFFECT, "", _V0, why="it belongs to the V0 engine"),
    Dropped("num-lookahead-slots", (0, 12), _NO_EFFECT, "", _V0, why="it belongs to the V0 engine"),
    Dropped("preemption-mode", (0, 12), _NO_EFFECT, "", _V0, why="it belongs to the V0 engine"),
    Dropped("max-seq-len-to-capture", (0, 12), _NO_EFFECT, "", _V0, why="it belongs to the V0 engine"),
    Dropped("use-v2-block-manager", (0, 12), _NO_EFFECT, "", _V0, switch=True, why="it belongs to the V0 engine"),
    Dropped("disable-frontend-multiprocessing", (0, 26), _NO_EFFECT, "", "absent in 0.26.0", switch=True, why="there is no such mode"),
    Dropped("task", (0, 26), {"generate": (), "auto": ()}, "Remove it, and give --runner or --convert in extra_args", "absent in 0.26.0"),
    Dropped("rope-scaling", (0, 26), {}, "Give it inside --hf-overrides in extra_args", "absent in 0.26.0"),
    Dropped("rope-theta", (0, 26), {}, "Give it inside --hf-overrides in extra_args", "absent in 0.26.0"),
    Dropped("full-cuda-graph", (0, 26), {}, "Give --compilation-config.cudagraph_mode=FULL in extra_args", "absent in 0.26.0", switch=True),
    Dropped("speculative-model", (0, 12), {}, "Set 'speculative:' on the model, or give --speculative-config in extra_args", _V0),
    Dropped("num-speculative-tokens", (0, 12), {}, "Set 'speculative:' on the model, or give --speculative-config in extra_args", _V0),
    Dropped("calculate-kv-scales", (0, 32), {}, "Remove it: scales come with the checkpoint", "in 0.26.0, not in 0.32.0", switch=True),
    Dropped("override-attention-dtype", (0, 32), {}, "Remove it", "in 0.26.0, absent in 0.32.0"),
    Dropped(
        "mxfp4-backend", NEVER, {"marlin": ("--moe-backend", "marlin"), "triton": ("--moe-backend", "triton")}, _NAME,
        "a flag of christopherowen/spark-vllm-mxfp4-docker; absent in 0.26.0",
    ),
    Dropped(
        "mxfp4-layers", NEVER, {}, "Set 'quantize:' on the model instead: it says for each layer what becomes of it",
        "a flag of christopherowen/spark-vllm-mxfp4-docker; absent in 0.26.0",
    ),
)  # fmt: skip

ADDED: tuple[Added, ...] = (
    Added("linear-backend", (0, 20), "Use vLLM 0.20 or newer, or VLLM_NVFP4_GEMM_BACKEND in env", "vLLM PR #39538 of April 2026"),
)

# It kept the unquantized experts of an MTP draft off FlashInfer (eugr/spark-vllm-docker, recipes/nemotron-3-super-nvfp4-mtp.yaml), which
# the draft's own moe_backend does now; without one the draft takes the model's (config/speculative.py).
DRAFT_EXPERTS = "VLLM_USE_FLASHINFER_MOE_FP16"
DRAFT_EXPERTS_GONE: Release = (0, 23)
# Speculative decoding. A drafter of blocks, and a number of tokens that depends on the batch.
DFLASH_SINCE: Release = (0, 21)  # vLLM PR #41880; the Spark vLLM guide, 14.7
PER_BATCH_SINCE: Release = (0, 24)  # num_speculative_tokens_per_batch_size, vLLM PR #32374
# vLLM PR #35060: no release since 0.10 looked at the number that this flag and its field set.
DISABLE_BY_BATCH_GONE: Release = (0, 10)
