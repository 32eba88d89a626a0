"""The existing quantization of a checkpoint, from its configuration and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from sparkd.checkpoint.shape import text_config
from sparkd.checkpoint.tensors import TensorRef

# The formats that the loader can convert back to BF16, one tensor at a time; the others are served as stored.
_FP8 = frozenset({"fp8_tensor", "fp8_channel", "fp8_block"})
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_BLOCK = [128, 128]


@dataclass(frozen=True, slots=True)
class SourceQuantization:
    """The existing quantization of a checkpoint.

    method: fp8_tensor, fp8_channel, fp8_block, mxfp4, nvfp4, nvfp4-a4, modelopt_mixed, compressed-tensors, awq, gptq or other; for the fp8
        methods, each `weight` has a `weight_scale_inv` or `weight_scale`.
    details: the section of the configuration.
    apart: whether the section is in hf_quant_config.json, and config.json has none.
    """

    method: str
    details: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False

    @property
    def requantizable(self) -> bool:
        """True where each weight can be dequantized and quantized again; otherwise the checkpoint passes through unchanged."""
        return self.method in _FP8

    @property
    def kv_dtype(self) -> str:
        """The KV cache's dtype by default, where the checkpoint is served as it is: `fp8` if its configuration asks for it, else `auto`.

        vLLM reads ModelOpt's in vllm/utils/torch_utils.py (resolve_kv_cache_dtype_string) and the scheme of compressed-tensors in
        layers/attention/attention.py. A 4-bit cache is counted in the model's own dtype, which overestimates it.
        """
        inner = self.details.get("quantization")
        places = [inner, self.details] if isinstance(inner, Mapping) else [self.details]
        stated = [place.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places]
        scheme = next((entry for entry in stated if entry), None)
        method = str(self.details.get("quant_method") or "modelopt").lower()
        if scheme is None or not method.startswith(("modelopt", "compressed-tensors")):
            return "auto"
        if isinstance(scheme, Mapping):
            return "fp8" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else "auto"
        return "fp8" if str(scheme).lower() == "fp8" else "auto"

    def modelopt_file(self) -> dict[str, Any]:
        """The parts of hf_quant_config.json that vLLM reads."""
        return {"producer": {"name": "modelopt"}, "quantization": {key: self.details[key] for key in self.details if key != "quant_method"}}


def source_quantization(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None, tensors: Mapping[str, TensorRef]
) -> SourceQuantization | None:
    """The quantization of a checkpoint; None for unquantized weights.

    config: config.json.
    modelopt: hf_quant_config.json, if it exists.
    """
    stated = _stated(config)
    details = stated or _modelopt_details(modelopt)
    if details is None:
        # The configuration does not mention FP8 weights: their scales show the method.
        scaled = _fp8_by_scales(tensors)
        return SourceQuantization(scaled) if scaled else None
    return SourceQuantization(_method(details, tensors), details, apart=stated is None)


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization section of config.json, or of the text model's part of it in a multimodal model."""
    for place in (config, text_config(config)):
        for key in ("quantization_config", "compression_config"):
            section = place.get(key)
            if isinstance(section, Mapping) and section:
                return section
    return None


def _modelopt_details(modelopt: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    inner = modelopt.get("quantization") if modelopt is not None else None
    # Without an algorithm ModelOpt has quantized only the KV cache.
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) and inner.get("quant_algo") else None


def _method(details: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> str:
    method = str(details.get("quant_method") or details.get("quant_type") or "").lower()
    if not method and "quant_algo" in details:
        method = "modelopt"
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8"):
        if details.get("weight_block_size"):
            return "fp8_block" if details["weight_block_size"] == _BLOCK else "other"
        return _fp8_by_scales(tensors) or "fp8_tensor"
    if method.startswith("modelopt"):
        return _modelopt(details, tensors)
    if method == "compressed-tensors":
        return _compressed_tensors(details)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return "mxfp4"
    for name in ("awq", "gptq"):
        if method.startswith(name):
            return name
    return "other"


def _modelopt(details: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> str:
    """The method for ModelOpt's quant_algo (vllm/model_executor/layers/quantization/modelopt.py)."""
    inner = details.get("quantization")
    algorithm = str(details.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else "") or "").upper()
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    if algorithm in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"):
        return "nvfp4"
    if algorithm == "FP8":
        return _fp8_by_scales(tensors) or "fp8_tensor"
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return "fp8_channel"
    if algorithm in ("FP8_PB_WO", "FP8_PB_REAL"):
        return _fp8_by_scales(tensors) or "fp8_block"
    return "mxfp4" if algorithm == "MXFP4" else "other"


def _compressed_tensors(details: Mapping[str, Any]) -> str:
    """The method for a `format` and its groups' weights (compressed-tensors, config/base.py: CompressionFormat, QuantizationStrategy)."""
    groups = details.get("config_groups")
    members = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    formats = {str(group.get("format") or details.get("format") or "") for group in members} or {str(details.get("format") or "")}
    if len(formats) > 1:
        return "compressed-tensors"
    form = next(iter(formats))
    if form == "nvfp4-pack-quantized":
        return "nvfp4-a4" if any(group.get("input_activations") for group in members) else "nvfp4"
    if form == "mxfp4-pack-quantized":
        return "mxfp4"
    if form not in ("float-quantized", "naive-quantized"):
        return "compressed-tensors"
    weights = [group["weights"] for group in members if isinstance(group.get("weights"), Mapping)]
    if not weights or any(each.get("type") != "float" or each.get("num_bits") != 8 for each in weights):
        return "compressed-tensors"
    strategies = {str(each.get("strategy")) for each in weights}
    if len(strategies) > 1 or (strategies == {"block"} and any(each.get("block_structure") not in (_BLOCK, "128x128") for each in weights)):
        return "compressed-tensors"
    methods = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
    return methods.get(strategies.pop(), "compressed-tensors")


def _fp8_by_scales(tensors: Mapping[str, TensorRef]) -> str | None:
    """The method of the first scaled FP8 weight, None where there is no such weight."""
    for name, tensor in tensors.items():
        if tensor.dtype != "F8_E4M3" or len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        stem = name.removesuffix("weight")
        scale = next((tensors[stem + each] for each in _SCALE_NAMES if stem + each in tensors), None)
        if scale is None:
            continue
        rows, columns = tensor.shape
        if (count := prod(scale.shape)) == 1:
            return "fp8_tensor"
        if count == rows:
            return "fp8_channel"
        return "fp8_block" if tuple(scale.shape[-2:]) == (-(-rows // 128), -(-columns // 128)) else "other"
    return None
