"""The quantization method `spark`: vLLM's compressed-tensors, with sparkd's kernels for NF4 and where vLLM's CPU backend has none.

Importing this module imports vLLM. The configuration is the `quantization_config` of workers/vllm/load/config.py under the name `spark`,
so a streamed model and an exported checkpoint have the same description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workers.quantization.recipe import Format
from workers.vllm.load.config import NAME, format_of
from workers.vllm.load.packed_layers import PackedMoEMethod, PackedScheme
from workers.vllm.symbols import symbol

RoutedExperts: Any = symbol("RoutedExperts")
LinearBase: Any = symbol("LinearBase")
CompressedTensorsConfig: Any = symbol("CompressedTensorsConfig")
CompressedTensorsLinearMethod: Any = symbol("CompressedTensorsLinearMethod")
ParallelLMHead: Any = symbol("ParallelLMHead")
current_platform: Any = symbol("current_platform")


class SparkConfig(CompressedTensorsConfig):
    """Matches modules and chooses schemes as compressed-tensors does; each module that stock vLLM cannot run gets a method of ours."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, *_args: Any, **_kwargs: Any) -> str | None:
        """`spark` where the model's configuration names it, because the plugin has written it there."""
        method = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        return NAME if method == NAME and user_quant in (None, NAME) else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        own = self._own_method(layer, prefix)
        return super().get_quant_method(layer, prefix) if own is None else own

    def _own_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            scheme = self.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_gate_proj_name}")
            if scheme is None or not _is_ours(form := format_of(scheme)):
                return None
            return PackedMoEMethod(form, layer)
        if isinstance(layer, LinearBase | ParallelLMHead) and (scheme := self.get_scheme_dict(layer, prefix)) is not None:
            if not _is_ours(form := format_of(scheme)):
                return None
            layer.scheme = PackedScheme(form)
            return CompressedTensorsLinearMethod(self)
        return None


def _is_ours(form: Format) -> bool:
    """Whether sparkd may have to serve a layer of this format on this platform; for nf4 on a GPU, its products are ready then."""
    if form.name == "nf4" and not current_platform.is_cpu():
        import workers.vllm.load.nf4_products  # noqa: F401 - Triton, which a CPU does without

    return form.name == "nf4" or current_platform.is_cpu()


def formats_of(described: Mapping[str, Any]) -> list[Format]:
    """The weight formats that a `quantization_config` names."""
    schemes = (CompressedTensorsConfig._quantization_scheme_map_from_config(dict(described)) or {}).values()
    return list(dict.fromkeys(format_of(scheme) for scheme in schemes))
