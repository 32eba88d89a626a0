"""A plan's remark about an architecture that the installed vLLM does not have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkd.vllm.installed import models_of, version_in

# The names that vLLM puts in each other's place where it has one of them (vllm/config/model.py, _SUFFIX_TO_DEFAULTS; registry.py,
# _normalize_arch).
_ENDS = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel", "ForSequenceClassification",
    "ForTokenClassification", "ForAudioClassification", "ForImageClassification", "ForVideoClassification", "ClassificationModel",
    "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip


def remark(config: Mapping[str, Any], runtime: Path | None) -> str | None:
    """A message where the vLLM of `runtime` (None: sparkd's own) lacks the model's architecture or config.json names none; else None.
    config: config.json. Never a refusal: a plugin may add the architecture, and Transformers may have a class that vLLM runs."""
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        return "Its config.json names no architecture (architectures), so vLLM may not know what it is."
    models = models_of(runtime)
    if models is None or any(_among(str(name), models) for name in names):
        return None
    how = "it starts only where a plugin brings it, or vLLM can run the class that Transformers has for it"
    return f"vLLM {version_in(runtime)}, which is installed, has no model named {names[0]}: {how}."


def _among(name: str, models: Collection[str]) -> bool:
    if name in models:
        return True
    end = next((end for end in _ENDS if name.endswith(end)), None)
    return end is not None and any(name.removesuffix(end) + other in models for other in _ENDS)
