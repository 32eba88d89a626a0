"""Linear layers that vLLM's model classes cannot load in quantized form, by model type.

MambaMixer builds its projections without a quantization method (vllm/model_executor/layers/mamba/mamba_mixer.py, 0.32 and 0.33; that of
Mamba-2 takes one). BLOOM's class reorders every tensor of query_key_value along its first dimension (models/bloom.py, `_repack_qkv`), which
the scale of a whole matrix and an INT4 matrix's shape tensor do not have. gpt2.py transposes c_attn, c_proj and c_fc by name; a packed
weight would stay as stored.
"""

from __future__ import annotations

from collections.abc import Mapping

# These models are not quantized at all. blip2.py builds its vision tower without a `prefix`, so a configuration cannot exclude it by name.
_TRANSPOSED = "This model stores its weights transposed, and vLLM turns plain ones only: it is served unchanged."
UNCHANGED: Mapping[str, str] = {
    "gpt2": _TRANSPOSED,
    "openai-gpt": _TRANSPOSED,
    "blip-2": "vLLM's Blip2ForConditionalGeneration has no name for its vision tower, which so cannot be left out: it is served unchanged.",
}


# The last components of the paths that keep their precision, and the sentence about them.
_MAMBA = frozenset({"in_proj", "x_proj", "dt_proj", "out_proj"})
_MAMBA_STAYS = "dt_proj, in_proj, out_proj, x_proj keep their precision: vLLM's {} builds them without a quantization method."
PLAIN: Mapping[str, tuple[frozenset[str], str]] = {
    "mamba": (_MAMBA, _MAMBA_STAYS.format("MambaForCausalLM")),
    "falcon_mamba": (_MAMBA, _MAMBA_STAYS.format("MambaForCausalLM")),
    "jamba": (_MAMBA, _MAMBA_STAYS.format("JambaForCausalLM")),
    "bloom": (
        frozenset({"query_key_value"}),
        "query_key_value keep their precision: vLLM's BloomForCausalLM rearranges them and cannot do that with a scale.",
    ),
}
