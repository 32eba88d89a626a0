"""Owns vLLM's configuration for a method of speculative decoding, and the rules of each method. Never measures.

The rules are those of the Spark vLLM guide, chapter 14, checked against vLLM 0.32 (config/speculative.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkd.recipes.file import Draft, Speculation
from sparkd.schema.fields import Method
from sparkd.vllm.translate import PER_BATCH, SPECULATIVE, flag_name, schedule

# From this many concurrent requests on, drafting costs more than it gains (14.1, 14.7).
BATCH_LIMIT = 32
# Stands for vLLM's default of max_num_seqs, which is above the limit (arg_utils.py, get_batch_defaults).
_MANY = 256
_NATIVE = ("auto", "bfloat16")
# A ValueError at the start of vLLM 0.32, with methods that draft on the CPU (config/vllm.py, "async scheduling is only supported with").
_ASYNC = ("async-scheduling",)


@dataclass(frozen=True, slots=True)
class Speculating:
    """The keys, flags and variables that a method adds to an entry. settings: keys that it sets. fixed: key -> the values it allows. why:
    the reason, for a message. drops: vLLM switches that exclude the method. own: the keys of `settings` that the recipe sets for this
    draft. flags: vLLM flags, each with the only allowed value; `args` has them too."""

    args: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    drops: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    flags: Mapping[str, str] = field(default_factory=dict)


NOTES: Mapping[str, str] = {
    "off": "",
    "ngram": "Fast where answers repeat the prompt (edits, retrieved text, JSON), nothing gained on new prose.",
    "suffix": "As ngram, with a tree of suffixes; vLLM needs the package arctic-inference for it in the engine's environment.",
    "mtp": "The model's own prediction heads draft; keep to few tokens, and look at the acceptance (`spec_decode` in the metrics).",
    "dflash": "A drafter made for this model proposes whole blocks; look at the acceptance (`spec_decode` in the metrics).",
}


def speculating(method: Method, offered: Speculation | None, model: str, max_num_seqs: Any, quantized: bool = False) -> Speculating:
    """vLLM's flags for `method` and a model. Raises ValueError, with a reason and a fix, where the method is not possible.

    offered: the drafts of the recipe, None without a recipe. model: folder or hub id. max_num_seqs: None where vLLM chooses.
    quantized: the model is quantized while it loads.
    """
    if method == "off":
        return Speculating()
    if method == "ngram":
        config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        return Speculating(_args(config, max_num_seqs), drops=_ASYNC)
    if method == "suffix":
        return Speculating(_args({"method": "suffix", "num_speculative_tokens": 8}, max_num_seqs), drops=_ASYNC)
    draft = getattr(offered, method) if offered is not None else Draft() if method == "mtp" else None
    if draft is None:
        what = "heads that predict several tokens" if method == "mtp" else "DFlash drafter"
        raise ValueError(f"is {method}, and sparkd knows no {what} for this model: choose off, ngram or suffix, or another recipe")
    config = {"method": method, "num_speculative_tokens": draft.num_speculative_tokens or 1}
    if draft.model is not None:
        if "{model}" in draft.model and not model.startswith("/"):
            raise ValueError(f"is {method}, whose draft lies inside the checkpoint: download {model} and set 'model:' to its folder")
        config["model"] = draft.model.replace("{model}", model)
        if quantized:
            # Else the draft would come through the target's loader, and be quantized too (model_loader/utils.py, get_draft_load_config).
            config["draft_load_config"] = {"load_format": "auto"}
    if draft.moe_backend is not None:
        config["moe_backend"] = draft.moe_backend
    if method == "mtp":
        fixed = {key: (value,) for key, value in draft.needs.items()}
        reason, own = "the draft works with no other value", frozenset(draft.needs)
        return Speculating((*draft.args, *_args(config, max_num_seqs)), draft.needs, fixed, why=reason, own=own)
    # The drafter's attention is left to vLLM. DeepGEMM is incompatible with the draft's path, and other attention crashes on SM121 (14.7).
    attention = {} if any(flag_name(arg) == "attention-backend" for arg in draft.args) else {"attention-backend": "TRITON_ATTN"}
    return Speculating(
        (*(word for name, value in attention.items() for word in (f"--{name}", value)), *draft.args, *_args(config, max_num_seqs)),
        {"kv_cache_dtype": "bfloat16", **draft.needs},
        {"kv_cache_dtype": _NATIVE, **{key: (value,) for key, value in draft.needs.items() if key != "kv_cache_dtype"}},
        {"VLLM_USE_DEEP_GEMM": "0"},
        "a DFlash drafter works on a BF16 cache only",
        own=frozenset(draft.needs),
        flags=attention,
    )


def _args(config: dict[str, Any], max_num_seqs: Any) -> tuple[str, ...]:
    """The flag with a draft configuration. A schedule turns drafting off for large batches, because vLLM's own
    --speculative-disable-by-batch-size has had no effect since 0.10 (vLLM PR #35060)."""
    sequences = max_num_seqs if isinstance(max_num_seqs, int) and not isinstance(max_num_seqs, bool) else _MANY
    if sequences >= BATCH_LIMIT:
        config = config | {PER_BATCH: schedule(config["num_speculative_tokens"], BATCH_LIMIT)}
    return (SPECULATIVE, json.dumps(config))
