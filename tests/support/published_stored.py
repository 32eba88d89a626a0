"""Owns how the tensors of a published checkpoint are stored where it is quantized: what becomes packed, and what lies beside it.

Never reads a file. The layouts: vllm/model_executor/layers/quantization/fp8.py (blocks of 128x128), modelopt.py (NVFP4: two values in a
byte, an E4M3 scale for 16 of them), compressed_tensors/schemes, auto_awq.py and auto_gptq.py. Where values are drawn, weights come to a
deviation of about 0.05, those of FP8 to 0.03.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from sparkd.checkpoint.classification import tensor_class
from tests.support.checkpoints import BYTES, Draw, Tensor, normal

FP8: Mapping[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FP8_BLOCK: Mapping[str, Any] = {**FP8, "weight_block_size": [128, 128]}
# What Qwen's FP8 builds leave alone in every published list of theirs (tests/fixtures/configs/qwen3-next-80b-a3b-instruct-fp8.json).
_NEVER_FP8 = ("lm_head", "shared_head.head", "in_proj_ba", "in_proj_a", "in_proj_b", "shared_expert_gate", "mtp.fc")
_LINEAR = frozenset({"attention", "mlp", "expert", "lm_head", "state_space"})
_GROUP, _NVFP4_GROUP = 128, 16
# FP8 codes are drawn with this deviation: 448 is 4.7 of them away, as in a checkpoint whose scales come from the largest value.
_FP8_STD = 96.0
_FP8_CODES, _FP8_SCALES = normal(_FP8_STD), Draw("uniform", 0.75 * 0.03 / _FP8_STD, 1.25 * 0.03 / _FP8_STD)
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


def stored(tensors: Iterable[Tensor], quantization: Mapping[str, Any]) -> Iterator[Tensor]:
    """quantization: of config.json or hf_quant_config.json. Raises ValueError for a method that is not here."""
    method = str(quantization.get("quant_method", "modelopt"))
    if method == "mxfp4":
        yield from tensors  # gpt-oss's experts are stored so from the beginning
        return
    if method not in _ALGORITHMS:
        raise ValueError(f"no layout is known here for {method}")
    algorithm = _ALGORITHMS[method](quantization)
    known: dict[str, str] = {}
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        if not _may_be_quantized(tensor):
            yield tensor
            continue
        before, experts, rest = module.partition(".experts.")
        key = f"{before}.experts.0.{rest.partition('.')[2]}" if experts and rest.partition(".")[0].isdigit() else module
        if key not in known:
            known[key] = algorithm(key)
        if not known[key]:
            yield tensor
            continue
        for weight, shape in _apart(module, tensor.shape):
            yield from _LAYOUTS[known[key]](weight, *shape)


def _may_be_quantized(tensor: Tensor) -> bool:
    if tensor.dtype != "BF16" or tensor_class(tensor.name, tensor.shape) not in _LINEAR:
        return False
    return tensor.name.endswith(".weight") if len(tensor.shape) == 2 else len(tensor.shape) == 3 and ".experts." in tensor.name


def _apart(module: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Publishers quantize experts one by one: a packed tensor becomes one weight for each."""
    before, _, leaf = module.partition(".experts.")
    if len(shape) == 2:
        yield module, (shape[0], shape[1])
        return
    experts, rows, columns = shape
    for number in range(experts):
        base = f"{before}.experts.{number}"
        if leaf == "gate_up_proj":
            yield f"{base}.gate_proj", (rows // 2, columns)
            yield f"{base}.up_proj", (rows // 2, columns)
        else:
            yield f"{base}.{leaf}", (rows, columns)


def _fp8(quantization: Mapping[str, Any]) -> Callable[[str], str]:
    named = frozenset(quantization.get("modules_to_not_convert") or ())
    layout = "FP8_BLOCK" if "weight_block_size" in quantization else "FP8_TENSOR"
    return lambda module: "" if module in named or module.endswith(_NEVER_FP8) else layout


def _int4(quantization: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda module: "" if module == "lm_head" else str(quantization["quant_method"])


def _modelopt(quantization: Mapping[str, Any]) -> Callable[[str], str]:
    """By module, with ModelOpt's wildcards in what it leaves alone."""
    names = quantization.get("exclude_modules") or quantization.get("ignore") or ()
    kept = re.compile("|".join(fnmatch.translate(name) for name in names)) if names else None
    every = str(quantization["quant_algo"])
    layers = quantization.get("quantized_layers", {})

    def algorithm(module: str) -> str:
        if kept and kept.match(module):
            return ""
        if every != "MIXED_PRECISION":
            return every
        before, experts, _ = module.partition(".experts.")
        spelled = (module, f"{before}.experts", f"{before}.experts.*") if experts else (module,)
        return next((str(layers[name]["quant_algo"]) for name in spelled if name in layers), "")

    return algorithm


def _compressed(quantization: Mapping[str, Any]) -> Callable[[str], str]:
    ignored = [one.removeprefix("re:") for one in quantization.get("ignore") or ()]

    def algorithm(module: str) -> str:
        if any(re.match(one, module) for one in ignored):
            return ""
        for group in quantization["config_groups"].values():
            if any(target == "Linear" or re.match(target.removeprefix("re:"), module) for target in group["targets"]):
                return str(group.get("format") or quantization["format"]) + (" of inputs" if group.get("input_activations") else "")
        return ""

    return algorithm


Parts = Iterator[Tensor]


def _fp8_block(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3", _FP8_CODES)
    yield Tensor(f"{module}.weight_scale_inv", (ceil(rows / 128), ceil(columns / 128)), "F32", _FP8_SCALES)


def _fp8_tensor(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3", _FP8_CODES)
    yield Tensor(f"{module}.weight_scale", (), "F32", _FP8_SCALES)


def _fp8_inputs(module: str, rows: int, columns: int) -> Parts:
    yield from _fp8_tensor(module, rows, columns)
    yield Tensor(f"{module}.input_scale", (), "F32")


def _fp8_channel(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3")
    yield Tensor(f"{module}.weight_scale", (rows, 1), "BF16")


def _nvfp4_weights(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.weight", (rows, columns // 2), "U8", BYTES)
    yield Tensor(f"{module}.weight_scale", (rows, columns // _NVFP4_GROUP), "F8_E4M3", _BLOCK_SCALES)
    yield Tensor(f"{module}.weight_scale_2", (), "F32", _TENSOR_SCALE)


def _nvfp4(module: str, rows: int, columns: int) -> Parts:
    yield from _nvfp4_weights(module, rows, columns)
    yield Tensor(f"{module}.input_scale", (), "F32", _INPUT_SCALE)


def _nvfp4_packed(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.weight_packed", (rows, columns // 2), "U8", BYTES)
    yield Tensor(f"{module}.weight_scale", (rows, columns // _NVFP4_GROUP), "F8_E4M3", _BLOCK_SCALES)
    yield Tensor(f"{module}.weight_global_scale", (1,), "F32", _TENSOR_DIVISOR)


def _nvfp4_packed_inputs(module: str, rows: int, columns: int) -> Parts:
    yield from _nvfp4_packed(module, rows, columns)
    yield Tensor(f"{module}.input_global_scale", (1,), "F32", _INPUT_DIVISOR)


def _awq(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.qweight", (columns, rows // 8), "I32", _CODES)
    yield Tensor(f"{module}.qzeros", (columns // _GROUP, rows // 8), "I32", _CODES)
    yield Tensor(f"{module}.scales", (columns // _GROUP, rows), "F16", _AWQ_SCALES)


def _gptq(module: str, rows: int, columns: int) -> Parts:
    yield Tensor(f"{module}.qweight", (columns // 8, rows), "I32", _CODES)
    yield Tensor(f"{module}.qzeros", (columns // _GROUP, rows // 8), "I32", _MIDDLE)
    yield Tensor(f"{module}.scales", (columns // _GROUP, rows), "F16", _GPTQ_SCALES)
    yield Tensor(f"{module}.g_idx", (columns,), "I32", Draw("steps", _GROUP))


_ALGORITHMS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str], str]]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "awq": _int4,
    "gptq": _int4,
}
_LAYOUTS: Mapping[str, Callable[[str, int, int], Parts]] = {
    "FP8_BLOCK": _fp8_block,
    "FP8_TENSOR": _fp8_tensor,
    "FP8": _fp8_inputs,
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4_weights,
    "float-quantized": _fp8_channel,
    "nvfp4-pack-quantized": _nvfp4_packed,
    "nvfp4-pack-quantized of inputs": _nvfp4_packed_inputs,
    "awq": _awq,
    "gptq": _gptq,
}
