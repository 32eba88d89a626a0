"""Checkpoints that are published quantized: what FP8, AWQ, GPTQ, ModelOpt and compressed-tensors make of a BF16 one. Never of real values.

Tensors and configurations are those of Qwen/Qwen3-8B-AWQ, Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4, nvidia/Llama-3.1-8B-Instruct-NVFP4 and
RedHatAI/Llama-3.1-8B-Instruct-NVFP4; every projection is quantized, and values have about the deviation 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.support.checkpoints import BYTES, Draw, Tensor, normal

# FP8 codes are drawn with this deviation: 448 is 4.7 of them away, as in a checkpoint whose scales come from the largest value.
FP8_STD = 96.0
GROUP = 128
NVFP4_GROUP = 16
_CODES = Draw("integers", -(2**31), 2**31 - 1)
# Codes of four bits drawn evenly lie 6.5 apart from another such code, 4.6 from the middle; E2M1 ones have a mean square of 8.6.
_AWQ_SCALES = Draw("uniform", 0.004, 0.012)
_GPTQ_SCALES = Draw("uniform", 0.005, 0.017)
_BLOCK_SCALES = Draw("uniform", 64.0, 256.0)
_TENSOR_SCALE = Draw("uniform", 0.9e-4, 1.2e-4)
_TENSOR_DIVISOR = Draw("uniform", 8400.0, 11000.0)
# Activations of up to 10, over 6 times 448.
_INPUT_SCALE = Draw("uniform", 0.003, 0.004)
_INPUT_DIVISOR = Draw("uniform", 250.0, 330.0)
# Eight times the code 7, which stands for the zero point 8.
_MIDDLE = Draw("constant", 0x77777777)


def quantized(source: str, config: Mapping[str, Any], entries: Iterable[Tensor]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """config.json and tensors of a BF16 model as one of SOURCES has them."""
    make, described = SOURCES[source]
    half = source in ("awq", "gptq")
    found: list[Tensor] = []
    for entry in entries:
        if entry.name.endswith("_proj.weight"):
            found += make(entry.name.removesuffix(".weight"), *entry.shape)
        else:
            found.append(entry._replace(dtype="F16") if half and entry.dtype == "BF16" else entry)
    more = {"quantization_config": described, "torch_dtype": "float16" if half else "bfloat16"}
    return {**config, **more}, tuple(found)


def linear(module: str, n: int, k: int, source: str = "bf16", std: float = 0.03) -> list[Tensor]:
    """The tensors of one weight [n, k], whose values have about the deviation `std`. source: bf16, fp8_tensor or fp8_block."""
    if source == "bf16":
        return [Tensor(f"{module}.weight", (n, k), "BF16", normal(std))]
    weight = Tensor(f"{module}.weight", (n, k), "F8_E4M3", normal(FP8_STD))
    scales = Draw("uniform", 0.75 * std / FP8_STD, 1.25 * std / FP8_STD)
    if source == "fp8_tensor":
        return [weight, Tensor(f"{module}.weight_scale", (), "F32", scales)]
    return [weight, Tensor(f"{module}.weight_scale_inv", (-(-n // 128), -(-k // 128)), "F32", scales)]


def fp8_config(source: str) -> dict[str, Any]:
    """The `quantization_config` that goes with an FP8 source."""
    block = {"weight_block_size": [128, 128]} if source == "fp8_block" else {}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **block}


def projected(entries: Iterable[Tensor], source: str) -> Iterator[Tensor]:
    """The projections of a BF16 model in another source."""
    for entry in entries:
        module, is_projection, _ = entry.name.partition("_proj.weight")
        yield from linear(f"{module}_proj", *entry.shape, source) if is_projection else (entry,)


def _awq(module: str, n: int, k: int) -> list[Tensor]:
    return [
        Tensor(f"{module}.qweight", (k, n // 8), "I32", _CODES),
        Tensor(f"{module}.qzeros", (k // GROUP, n // 8), "I32", _CODES),
        Tensor(f"{module}.scales", (k // GROUP, n), "F16", _AWQ_SCALES),
    ]


def _gptq(module: str, n: int, k: int) -> list[Tensor]:
    return [
        Tensor(f"{module}.qweight", (k // 8, n), "I32", _CODES),
        Tensor(f"{module}.qzeros", (k // GROUP, n // 8), "I32", _MIDDLE),
        Tensor(f"{module}.scales", (k // GROUP, n), "F16", _GPTQ_SCALES),
        Tensor(f"{module}.g_idx", (k,), "I32", Draw("steps", GROUP)),
    ]


def _modelopt(module: str, n: int, k: int) -> list[Tensor]:
    return [
        Tensor(f"{module}.weight", (n, k // 2), "U8", BYTES),
        Tensor(f"{module}.weight_scale", (n, k // NVFP4_GROUP), "F8_E4M3", _BLOCK_SCALES),
        Tensor(f"{module}.weight_scale_2", (), "F32", _TENSOR_SCALE),
        Tensor(f"{module}.input_scale", (), "F32", _INPUT_SCALE),
    ]


def _compressed(module: str, n: int, k: int) -> list[Tensor]:
    return [
        Tensor(f"{module}.weight_packed", (n, k // 2), "U8", BYTES),
        Tensor(f"{module}.weight_scale", (n, k // NVFP4_GROUP), "F8_E4M3", _BLOCK_SCALES),
        Tensor(f"{module}.weight_global_scale", (1,), "F32", _TENSOR_DIVISOR),
        Tensor(f"{module}.input_global_scale", (1,), "F32", _INPUT_DIVISOR),
    ]


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "static_groups": False, "lm_head": False}
_KEPT = ["lm_head", "re:.*mlp.gate$"]
_FLOAT4 = {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_FLOAT4, "dynamic": False}, "input_activations": dict(_FLOAT4)}},
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
_TENSOR_GROUP = {**_FLOAT4, "strategy": "tensor_group", "symmetric": True}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_TENSOR_GROUP, "dynamic": False},
            "input_activations": {**_TENSOR_GROUP, "dynamic": "local"},
            "output_activations": None,
        }
    },
    "ignore": _KEPT,
    "kv_cache_scheme": None,
}

SOURCES: Mapping[str, tuple[Callable[[str, int, int], list[Tensor]], Mapping[str, Any]]] = {
    "awq": (_awq, _AWQ),
    "gptq": (_gptq, _GPTQ),
    "modelopt_nvfp4": (_modelopt, _MODELOPT),
    "ct_nvfp4": (_compressed, _COMPRESSED),
}
