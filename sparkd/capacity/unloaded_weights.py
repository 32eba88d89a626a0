"""Owns which parts of a checkpoint no class of vLLM loads. Never reads a weight.

As the mappings of vLLM's classes have it (`WeightsMapper` with None, vllm/model_executor/models of 0.32): generators of speech and of
images stand beside a model that answers in text, and adapters are loaded by `--enable-lora` alone.
"""

from __future__ import annotations

# A component of a tensor's name, in any model: those that speak (Qwen-Omni, MiniCPM-o, Kimi-Audio, FunAudioChat), tokenizers of sound and
# of images (MiMo-V2-Omni, HyperCLOVA X), adapters (Phi-4-multimodal), towers for time series (Intern-S1 Pro).
_PARTS = frozenset({
    "talker", "code2wav", "token2wav", "tts", "mimo_layers", "mimo_output", "mimo_norm", "audio_invert_tower", "audio_tokenizer",
    "discrete_vision_model", "time_series", "lora_A", "lora_B",
})  # fmt: skip
# The first component, by architecture.
_ROOTS = {"BagelForConditionalGeneration": frozenset({"decoder", "encoder"})}
# Classes for text alone, of checkpoints that have towers.
_TOWERS = frozenset({"audio_tower", "vision_tower", "embed_audio", "embed_vision"})
_TEXT_ALONE = frozenset({"Gemma3nForCausalLM", "Gemma4ForCausalLM"})
_IMAGE_GENERATION = "_moe_gen"


def unloaded_part(name: str, architecture: str) -> str | None:
    """The part that vLLM leaves on the disk with the tensor `name`, such as `talker`; None for a tensor that it loads."""
    parts = name.split(".")
    if found := next((part for part in parts if part in _PARTS), None):
        return "adapters" if found.startswith("lora_") else found
    if parts[0] in _ROOTS.get(architecture, ()):
        return parts[0]
    if architecture in _TEXT_ALONE and (found := next((part for part in parts if part in _TOWERS), None)):
        return found
    return _IMAGE_GENERATION.strip("_") if _IMAGE_GENERATION in name else None
