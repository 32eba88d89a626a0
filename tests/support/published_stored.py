"""Owns how the tensors of a published checkpoint are stored where it is quantized: what becomes packed, and what lies beside it.

Never reads a file. The layouts: vllm/model_executor/layers/quantization/fp8.py (blocks of 128x128), modelopt.py (NVFP4: two values in a
byte, an E4M3 scale for 16 of them) and compressed_tensors/schemes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from sparkd.checkpoint.classification import tensor_class
from tests.support.checkpoints import Tensor

FP8_BLOCK: Mapping[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# What Qwen's FP8 builds leave alone in every published list of theirs (tests/fixtures/configs/qwen3-next-80b-a3b-instruct-fp8.json).
_NEVER_FP8 = ("lm_head", "shared_head.head", "in_proj_ba", "in_proj_a", "in_proj_b", "shared_expert_gate", "mtp.fc")
_LINEAR = frozenset({"attention", "mlp", "expert", "lm_head", "state_space"})


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
    return lambda module: "" if module in named or module.endswith(_NEVER_FP8) else "FP8_BLOCK"


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
            if any(re.match(target.removeprefix("re:"), module) for target in group["targets"]):
                return str(group["format"])
        return ""

    return algorithm


def _fp8_block(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3")
    yield Tensor(f"{module}.weight_scale_inv", (ceil(rows / 128), ceil(columns / 128)), "F32")


def _fp8_tensor(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3")
    yield Tensor(f"{module}.weight_scale", (), "F32")
    yield Tensor(f"{module}.input_scale", (), "F32")


def _fp8_channel(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight", (rows, columns), "F8_E4M3")
    yield Tensor(f"{module}.weight_scale", (rows, 1), "BF16")


def _nvfp4_weights(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight", (rows, columns // 2), "U8")
    yield Tensor(f"{module}.weight_scale", (rows, columns // 16), "F8_E4M3")
    yield Tensor(f"{module}.weight_scale_2", (), "F32")


def _nvfp4(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield from _nvfp4_weights(module, rows, columns)
    yield Tensor(f"{module}.input_scale", (), "F32")


def _nvfp4_packed(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight_packed", (rows, columns // 2), "U8")
    yield Tensor(f"{module}.weight_scale", (rows, columns // 16), "F8_E4M3")
    yield Tensor(f"{module}.weight_global_scale", (1,), "F32")


_ALGORITHMS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str], str]]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}
_LAYOUTS: Mapping[str, Callable[[str, int, int], Iterator[Tensor]]] = {
    "FP8_BLOCK": _fp8_block,
    "FP8": _fp8_tensor,
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4_weights,
    "float-quantized": _fp8_channel,
    "nvfp4-pack-quantized": _nvfp4_packed,
}
