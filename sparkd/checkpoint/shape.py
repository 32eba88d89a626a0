"""The shape of a model from config.json: its sizes, and which layers keep keys and values of each token.

Keys are those of transformers' configurations (configuration_*.py), of vLLM's own (vllm/transformers_utils/configs) and of Mistral's
params.json. It serves a rough estimate: a kind of layer that is not known counts as full attention. Shape.gaps names the keys that
config.json lacks. vLLM's own answer overrides all of it (sparkd.capacity.evidence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
# The names of kinds of layers: in layer_types and layers_block_type, and as a letter of Nemotron-H's pattern.
_SLIDING = frozenset({"sliding_attention", "local_attention", "sliding_window_attention"})
# They keep a state of fixed size, or nothing.
_STATE = frozenset({"linear_attention", "gated_delta_net", "mamba", "mamba2", "M"})
_NOTHING = frozenset({"mlp", "moe", "-", "E"})
# Published configurations leave these to their class (transformers, configuration_gemma3.py).
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
    },
    # Its one layer that predicts ahead is in the checkpoints, and no key names it (vllm/model_executor/models/qwen3_next_mtp.py).
    "qwen3_next": {"num_nextn_predict_layers": 1},
}
# Types of rotary scaling whose max_position_embeddings is the stretched length already (vllm/config/model.py, _get_and_verify_max_len).
_STRETCHED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions", "max_sequence_length", "max_seq_length",
)  # fmt: skip
LAYERS = "num_hidden_layers"
_LAYERS = (LAYERS, "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "experts_per_token", "num_experts_per_token")
# Lists of one word for each layer.
_KINDS = ("layer_types", "layers_block_type", "attention_layer_types")
# Far more than any model has: a count is multiplied and a list made of it.
_MOST_LAYERS, _MOST = 4096, 1 << 40


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of every token: heads times (key_dim + value_dim) elements.

    window: tokens it looks back, None for all of them.
    latent: one vector of key_dim for all heads together, on every rank (multi-head latent attention); heads is 1 then.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that config.json tells.

    layers, hidden, heads, vocab: 0 where it does not.
    dtype: that vLLM computes in.
    attentions: of each layer in order, None for one that keeps nothing of a token; empty where it does not tell how wide keys are.
    state_bytes: of one request, in all layers with a state together.
    experts, active_experts: routed ones of a layer and how many of them a token uses; 0 for a dense model.
    mtp_layers: further layers that predict tokens ahead, loaded for speculative decoding only.
    gaps: the keys that are missing.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    max_len: int
    dtype: str
    attentions: tuple[Attention | None, ...]
    experts: int = 0
    active_experts: int = 0
    mtp_layers: int = 0
    tied: bool = False
    state_bytes: int = 0
    gaps: tuple[str, ...] = ()

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: all of it for a text model. Whether embeddings are tied may be said outside of it."""
    text: Mapping[str, Any] = config
    while inner := next((text[key] for key in TEXT_PARTS if isinstance(text.get(key), Mapping)), None):
        text = {**({"tie_word_embeddings": text["tie_word_embeddings"]} if "tie_word_embeddings" in text else {}), **inner}
    return {**_CLASS_DEFAULTS.get(str(text.get("model_type", "")), {}), **text}


def shape_of(config: Mapping[str, Any]) -> Shape:
    text = text_config(config)
    names = config.get("architectures")
    layers, heads, hidden = _layers(text), _count(text, *_HEADS), _count(text, *_HIDDEN)
    stated = {
        LAYERS: layers,
        _HIDDEN[0]: hidden,
        _HEADS[0]: heads,
        "vocab_size": _count(text, "vocab_size"),
        LENGTHS[0]: _count(text, *LENGTHS),
    }
    return Shape(
        architecture=str(names[0]) if isinstance(names, Sequence) and names else str(text.get("model_type", "unknown")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=stated["vocab_size"],
        max_len=_max_len(text),
        dtype=_dtype(config, text),
        attentions=_attentions(text, layers),
        experts=_count(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        active_experts=_count(text, *_ACTIVE),
        mtp_layers=_count(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
        tied=bool(text.get("tie_word_embeddings", True)),
        state_bytes=_state_bytes(text, layers),
        gaps=tuple(key for key, size in stated.items() if not size),
    )


def _layers(text: Mapping[str, Any]) -> int:
    listed = next((len(text[key]) for key in _KINDS if isinstance(text.get(key), list)), len(_pattern(text)))
    layers = _count(text, *_LAYERS) or listed
    return layers if layers <= _MOST_LAYERS else 0


def _attentions(text: Mapping[str, Any], layers: int) -> tuple[Attention | None, ...]:
    heads = _count(text, *_HEADS)
    key_heads, width = _kv_heads(text, heads), _head_dim(text, heads)
    whole = Attention(key_heads, width, _count(text, "v_head_dim", default=width))
    if latent := _count(text, "kv_lora_rank"):
        # The latent vector and the rotary part of the keys (DeepSeek-V2, section 2.1).
        whole = Attention(1, latent + _count(text, "qk_rope_head_dim"), 0, latent=True)
    if not layers or not whole.heads or not whole.key_dim:
        return ()
    window = _window(text)
    # Layers at the end that read another layer's cache (Gemma 3n, Gemma 4) keep none.
    caching = layers - _count(text, "num_kv_shared_layers")
    kinds = _kinds(text, layers)
    return tuple(
        None if kind in _STATE | _NOTHING or number >= caching else replace(whole, window=window) if kind in _SLIDING else whole
        for number, kind in enumerate(kinds)
    )


def _state_bytes(text: Mapping[str, Any], layers: int) -> int:
    """In float32: the matrices of gated delta nets (Qwen3-Next) or of Mamba-2. Their convolutions' inputs are small beside them."""
    heads = _count(text, "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads")
    rows = _count(text, "linear_value_head_dim", "mamba_head_dim", "mamba_d_head")
    columns = _count(text, "linear_key_head_dim", "ssm_state_size", "mamba_d_state")
    return 4 * heads * rows * columns * sum(kind in _STATE for kind in _kinds(text, layers))


def _window(text: Mapping[str, Any]) -> int | None:
    return None if text.get("use_sliding_window") is False else _count(text, "sliding_window", "sliding_window_size") or None


def _kinds(text: Mapping[str, Any], layers: int) -> Sequence[str]:
    """One word for each layer."""
    stated = [_pattern(text), *(text[key] for key in _KINDS if isinstance(text.get(key), list))]
    if listed := next((kinds for kinds in stated if len(kinds) == layers), None):
        return [str(kind) for kind in listed]
    every, other = _count(text, "full_attention_interval"), "linear_attention"
    if _window(text) is not None:
        every, other = _count(text, "sliding_window_pattern", "_sliding_window_pattern"), "sliding_attention"
    return [other if every and (number + 1) % every else "full_attention" for number in range(layers)]


def _pattern(text: Mapping[str, Any]) -> str:
    pattern = text.get("hybrid_override_pattern")
    return pattern.replace("|", "") if isinstance(pattern, str) else ""


def _max_len(text: Mapping[str, Any]) -> int:
    """The longest request that vLLM allows, in tokens (vllm/config/model.py, _get_and_verify_max_len)."""
    length = _count(text, *LENGTHS, default=2048)
    parameters = text.get("rope_parameters") or text.get("rope_scaling")
    if "gemma3" in str(text.get("model_type")) or not isinstance(parameters, Mapping):
        return length
    tables = [table for table in parameters.values() if isinstance(table, Mapping)] or [parameters]
    factors = [_factor(table) for table in tables if str(table.get("rope_type") or table.get("type")) not in _STRETCHED]
    return int(length * (factors[-1] if factors else 1.0))


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") is True:
        return 1
    return _count(text, "num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num", default=heads)


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    """0 where nothing tells."""
    return _count(text, "head_dim", "attention_head_dim", "kv_channels", default=_count(text, *_HIDDEN) // max(1, heads))


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The dtype that vLLM takes for `auto`: bfloat16 for float32 (vllm/config/model.py; float16 where a device has nothing else)."""
    for place in (text, config):
        name = str(place.get("dtype") or place.get("torch_dtype") or "").removeprefix("torch.")
        if name in ("float32", "float"):
            return "bfloat16"
        if name in ("float16", "half", "bfloat16"):
            return name
    return "bfloat16"


def _factor(table: Mapping[str, Any]) -> float:
    """A number above 0, 1 where there is none."""
    value = table.get("factor")
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST
    return float(value) if usable and value is not None else 1.0


def _count(text: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """A whole number above 0, else the default. The largest of a list, which has one for each layer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, list) and value and all(isinstance(size, int) for size in value):
            value = max(value)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST
        if usable and value is not None and value == int(value):
            return int(value)
    return default
