"""Owns what config.json says of a model's layers: which mix tokens how, and what each keeps of a token. Never reads a tensor.

Keys are those of transformers' configurations (configuration_*.py) and of vLLM's own (vllm/transformers_utils/configs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkd.errors import CheckpointError

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
# What one layer is called: by layer_types and layers_block_type, and by a letter of Nemotron-H's pattern.
_FULL = frozenset({"full_attention", "attention", "global_attention", "*"})
_CHUNKED = "chunked_attention"
_SLIDING = frozenset({"sliding_attention", "local_attention", "sliding_window_attention"})
_LINEAR = frozenset({"linear_attention", "gated_delta_net"})
_MAMBA = frozenset({"mamba", "mamba2", "M"})
_NOTHING = frozenset({"mlp", "moe", "-", "E"})
# What published configurations leave to their class (transformers, configuration_gemma3.py).
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 10_000.0,
    },
    # Its one layer that predicts ahead is in the checkpoints, and no key names it (vllm/model_executor/models/qwen3_next_mtp.py).
    "qwen3_next": {"num_nextn_predict_layers": 1},
}
# Every n-th layer sees all tokens, the others a window.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
# Types of rotary scaling whose max_position_embeddings is the stretched length already (vllm/config/model.py, _get_and_verify_max_len).
_STRETCHED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
# Of Llama 4, where its configuration has no word on it (transformers, configuration_llama4.py, attention_chunk_size).
_CHUNK = 8192
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "experts_per_token", "num_experts_per_token")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Far more than any model has: a count is multiplied and a list made of it.
_MOST_LAYERS, _MOST = 4096, 1 << 40


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of every token: heads times (key_dim + value_dim) elements. window: tokens it looks back, None for all of them.

    latent: one vector of key_dim for all heads together, on every rank (multi-head latent attention); heads is 1 then. chunked: `window` is
    the length of a chunk, beyond whose beginning nothing is kept. element_bytes: whatever the cache's dtype; None for that. fp8_bytes: of a
    token in an FP8 cache where scales stand beside the elements.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False
    chunked: bool = False
    element_bytes: int | None = None
    fp8_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A state of fixed size for each request: a convolution's last inputs and a matrix for every head.

    channels: of the convolution, `taps` inputs of each are kept. heads, rows, columns: of the matrices. groups: of Mamba-2, whose channels
    come on top; key_heads: of linear attention. matrix_dtype: None for the model's own.
    """

    channels: int
    taps: int
    heads: int
    rows: int
    columns: int
    groups: int = 0
    group_size: int = 0
    key_heads: int = 0
    matrix_dtype: str | None = None


Mixer = Attention | State


@dataclass(frozen=True, slots=True)
class Shape:
    """mixers: of each layer in order, None for one that keeps nothing of a token. beside: what a layer keeps besides, where any does: a
    Mamba next to its attention, the keys of a sparse attention's indexer. dtype: that vLLM computes in.

    experts, active_experts: routed ones of a layer and how many of them a token uses; 0 for a dense model. mtp_layers: further layers that
    predict tokens ahead, loaded for speculative decoding only. rotary_bytes: of the tables of sines and cosines.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    intermediate: int
    expert_width: int
    max_len: int
    dtype: str
    mixers: tuple[Mixer | None, ...]
    experts: int = 0
    active_experts: int = 0
    mtp_layers: int = 0
    tied: bool = False
    rotary_bytes: int = 0
    beside: tuple[Mixer | None, ...] = ()

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: all of it for a text model. Whether embeddings are tied may be said outside of it."""
    text: Mapping[str, Any] = config
    while inner := next((text[key] for key in TEXT_PARTS if isinstance(text.get(key), Mapping)), None):
        text = {**({"tie_word_embeddings": text["tie_word_embeddings"]} if "tie_word_embeddings" in text else {}), **inner}
    return {**_CLASS_DEFAULTS.get(_type(text), {}), **text}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Raises CheckpointError, which names the key that is missing or of no known kind."""
    text = text_config(config)
    names = config.get("architectures")
    layers = _count(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > _MOST_LAYERS:
        raise _wrong(f"num_hidden_layers is {layers}, more than {_MOST_LAYERS}")
    heads = _count(text, "num_attention_heads", "n_head", "num_heads", default=1)
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    return Shape(
        architecture=str(names[0]) if isinstance(names, Sequence) and names else str(text.get("model_type", "unknown")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        vocab=_count(text, "vocab_size"),
        intermediate=_count(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        expert_width=_count(text, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", default=0),
        max_len=_max_len(text),
        dtype=_dtype(config, text),
        mixers=tuple(_mixers(text, layers)),
        experts=_count(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0),
        active_experts=_count(
            text, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "experts_per_token", "num_experts_per_token", default=0
        ),
        mtp_layers=_count(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", default=0),
        tied=bool(text.get("tie_word_embeddings", True)),
        rotary_bytes=_rotary_bytes(text, heads) * DTYPE_BYTES[_dtype(config, text)],
        beside=tuple(_beside(text, layers)),
    )


def _mixers(text: Mapping[str, Any], layers: int) -> Iterator[Mixer | None]:
    # Layers at the end that read another layer's cache (Gemma 3n, Gemma 4) keep none.
    kept = layers - _count(text, "num_kv_shared_layers", default=0)
    for number, kind in enumerate(_kinds(text, layers)):
        mixer = _mixer(text, kind)
        yield mixer if number < kept else None


def _beside(text: Mapping[str, Any], layers: int) -> Iterator[Mixer | None]:
    if _type(text) == "falcon_h1":  # every layer runs both (vllm/model_executor/models/falcon_h1.py, FalconH1ParallelHybrid)
        yield from [_mamba2(text)] * layers
    if "index_topk" in text and text.get("kv_lora_rank"):
        # FP8 keys, and a scale in four bytes for 128 of them (deepseek_v2.py, Indexer).
        size = _count(text, "index_head_dim", default=128)
        keys = Attention(1, size + size // 128 * 4, 0, latent=True, element_bytes=1)
        yield from (keys if _has_indexer(text, number) else None for number in range(layers))


def _has_indexer(text: Mapping[str, Any], number: int) -> bool:
    """Layers may take over what an earlier one selected (deepseek_v2.py, "IndexCache config")."""
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, (str, list)) and number < len(pattern):
        return bool(pattern[number] != "S")
    every, offset = _count(text, "index_topk_freq", default=1), _count(text, "index_skip_topk_offset", default=2)
    return pattern is not None or max(number - offset + 1, 0) % every == 0


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """One word for each layer. Raises CheckpointError where the configuration has more of them, or fewer."""
    pattern = text.get("hybrid_override_pattern")
    stated = [("hybrid_override_pattern", pattern.replace("|", ""))] if isinstance(pattern, str) and pattern else []
    stated += [(key, text[key]) for key in ("layer_types", "layers_block_type", "attention_layer_types") if isinstance(text.get(key), list)]
    for key, found in stated:
        if found and len(found) != layers:
            raise _wrong(f"{key} is of {len(found)} layers and num_hidden_layers is {layers}")
        if found:
            return [str(one) for one in found]
    if linear := _kimi(text):
        delta = linear.get("kda_layers")
        return ["linear_attention" if isinstance(delta, list) and number + 1 in delta else "full_attention" for number in range(layers)]
    if _type(text).startswith("llama4") and text.get("attention_chunk_size", _CHUNK):
        listed, each = text.get("no_rope_layers"), _count(text, "no_rope_layer_interval", default=4)
        rotated = listed if isinstance(listed, list) and len(listed) == layers else [(number + 1) % each for number in range(layers)]
        return [_CHUNKED if one else "full_attention" for one in rotated]
    if (every := _count(text, "full_attention_interval", default=0)) and "linear_num_value_heads" in text:
        return ["full_attention" if (number + 1) % every == 0 else "linear_attention" for number in range(layers)]
    if not _window(text):
        return ["full_attention"] * layers
    if _type(text) == "gpt_oss":
        return ["full_attention" if number % 2 else "sliding_attention" for number in range(layers)]
    if every := _count(text, "sliding_window_pattern", "_sliding_window_pattern", default=_PATTERNS.get(_type(text), 0)):
        return ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(layers)]
    if "max_window_layers" in text:  # Qwen2: the layers from there on
        first = _count(text, "max_window_layers", default=0)
        return ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    return ["sliding_attention"] * layers


def _mixer(text: Mapping[str, Any], kind: str) -> Mixer | None:
    if kind in _NOTHING:
        return None
    if kind in _FULL:
        return _latent(text) if text.get("kv_lora_rank") else _attention(text, full=True)
    if kind in _SLIDING:
        return _attention(text, full=False)
    if kind == _CHUNKED:
        chunk = _count(text, "attention_chunk_size", default=_CHUNK if "attention_chunk_size" not in text else 0)
        return replace(_attention(text, full=True), window=chunk or None, chunked=chunk > 0)
    if kind in _LINEAR:
        return _kimi_delta(text) if _kimi(text) else _delta_net(text)
    if kind in _MAMBA:
        return _mamba2(text)
    raise CheckpointError(
        f"a layer of the kind {kind!r} is not known, so what its cache takes cannot be said",
        file="config.json",
        cure="Give memory_gib and load it, or tell us about the model",
    )


def _latent(text: Mapping[str, Any]) -> Attention:
    """One vector for all heads: the latent one and the rotary part of the keys (DeepSeek-V2, section 2.1)."""
    rank, rotary = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim", default=0)
    # A sparse attention's kernels read FP8 with a scale for 128, and the rotary part in 16 bits: 656 bytes of 512 + 64 elements
    # (vllm/v1/attention/backends/mla/flashmla_sparse.py, "FP8 with scale").
    return Attention(1, rank + rotary, 0, latent=True, fp8_bytes=rank + rank // 128 * 4 + 2 * rotary if "index_topk" in text else None)


def _attention(text: Mapping[str, Any], *, full: bool) -> Attention:
    heads = _count(text, "num_attention_heads", "n_head", "num_heads")
    own_heads, own_dim = _kv_heads(text, heads), _head_dim(text, heads)
    if full and text.get("global_head_dim"):  # Gemma 4: the layers without a window have their own
        own_dim = _count(text, "global_head_dim")
        own_heads = _count(text, "num_global_key_value_heads", default=own_heads)
    value_dim = _count(text, "v_head_dim", default=own_dim)
    return Attention(own_heads, own_dim, value_dim, window=None if full else _window(text))


def _delta_net(text: Mapping[str, Any]) -> State:
    """Gated delta net (Qwen3-Next): channels are keys, queries and values."""
    key_heads, key_dim = _count(text, "linear_num_key_heads"), _count(text, "linear_key_head_dim")
    value_heads, value_dim = _count(text, "linear_num_value_heads"), _count(text, "linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    own = text.get("mamba_ssm_dtype")
    taps = _count(text, "linear_conv_kernel_dim", default=4) - 1
    return State(channels, taps, value_heads, value_dim, key_dim, key_heads=key_heads, matrix_dtype=str(own) if own else None)


def _kimi(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kimi Linear's section on its layers, which it counts from 1 (vllm/transformers_utils/configs/kimi_linear.py); empty for others."""
    found = text.get("linear_attn_config")
    return found if isinstance(found, Mapping) else {}


def _kimi_delta(text: Mapping[str, Any]) -> State:
    """Kimi delta attention (vllm/model_executor/layers/mamba/mamba_utils.py, kda_state_shape and kda_state_dtype)."""
    own = _kimi(text)
    heads, size = _count(own, "num_heads"), _count(own, "head_dim")
    taps = _count(own, "short_conv_kernel_size", default=4) - 1
    return State(3 * heads * size, taps, heads, size, size, key_heads=heads, matrix_dtype="float32")


def _mamba2(text: Mapping[str, Any]) -> State:
    heads = _count(text, "mamba_num_heads", "mamba_n_heads")
    head_dim = _count(text, "mamba_head_dim", "mamba_d_head")
    groups = _count(text, "n_groups", "mamba_n_groups")
    size = _count(text, "ssm_state_size", "mamba_d_state")
    taps = _count(text, "conv_kernel", "mamba_d_conv") - 1
    # Nemotron-H's own default (vllm/model_executor/models/config.py: "Only `float32` is known to have no accuracy issues").
    default = "float32" if _type(text).startswith("nemotron_h") else None
    own = text.get("mamba_ssm_cache_dtype") or default
    width = _count(text, "mamba_d_ssm", default=heads * head_dim)
    return State(width, taps, heads, head_dim, size, groups, size, matrix_dtype=str(own) if own and own != "auto" else None)


def _rotary_bytes(text: Mapping[str, Any], heads: int) -> int:
    """Elements of the tables of sines and cosines, one for each kind of rotary embedding (vllm/model_executor/layers/rotary_embedding)."""
    if _type(text).startswith("nemotron_h"):
        return 0
    tables = rotary_tables(text)
    # A local base beside a single table is that of the layers with a window (Gemma 3), and never stretched.
    kinds = {**tables, "sliding_attention": {}} if len(tables) == 1 and "rope_local_base_freq" in text else tables
    total = 0
    for kind, table in kinds.items():
        own = _count(text, "global_head_dim", default=0) if kind == "full_attention" else 0
        head = own or _count(text, "qk_rope_head_dim", default=0) or _head_dim(text, heads)
        # Gemma 4's proportional tables keep the part that is not rotated.
        share = 1.0 if _rope_type(table) == "proportional" else _factor({**text, **table}, "partial_rotary_factor")
        total += _rotary_rows(text, table) * int(head * share)
    return total


def rotary_tables(text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By kind of layer where the configuration tells them apart."""
    given = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(given, Mapping):
        return {"": {}}
    return {kind: one for kind, one in given.items() if isinstance(one, Mapping)} or {"": given}


def _rotary_rows(text: Mapping[str, Any], table: Mapping[str, Any]) -> int:
    length, kind = _count(text, *LENGTHS, default=2048), _rope_type(table)
    original = _count({**text, **table}, "original_max_position_embeddings", default=length)
    rows = length
    if "yarn" in kind or kind == "deepseek_llama_scaling":
        rows = int(original * _factor(table, "factor"))
    elif kind == "linear":
        rows = int(length * _factor(table, "factor"))
    elif kind in ("longrope", "su"):
        rows = length + original
    return 4 * rows if "mrope_section" in table else rows


def _rope_type(table: Mapping[str, Any]) -> str:
    return str(table.get("rope_type") or table.get("type") or "default")


def _max_len(text: Mapping[str, Any]) -> int:
    """What vLLM takes as the longest request (vllm/config/model.py, _get_and_verify_max_len)."""
    length = _count(text, *LENGTHS, default=2048)
    if "gemma3" in _type(text):
        return length
    factors = [_factor(table, "factor") for table in rotary_tables(text).values() if _rope_type(table) not in _STRETCHED]
    return int(length * (factors[-1] if factors else 1.0))


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    return _count(text, "sliding_window", "sliding_window_size", default=0) or None


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") is True:
        return 1
    return _count(text, "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", default=heads)


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    own = max(1, _count(text, "hidden_size", "n_embd", "d_model") // heads)
    return _count(text, "head_dim", "attention_head_dim", "kv_channels", default=own)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """What vLLM makes of `auto`: float32 is computed in bfloat16 (vllm/config/model.py; in float16 where a device has nothing else)."""
    for place in (text, config):
        name = str(place.get("dtype") or place.get("torch_dtype") or "").removeprefix("torch.")
        if name in ("float32", "float"):
            return "bfloat16"
        if name in ("float16", "half", "bfloat16"):
            return name
    return "bfloat16"


def _type(text: Mapping[str, Any]) -> str:
    return str(text.get("model_type", ""))


def _factor(table: Mapping[str, Any], key: str) -> float:
    """A number above 0, 1 where there is none."""
    value = table.get(key)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST
    return float(value) if usable and value is not None else 1.0


def _count(text: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """A whole number, above 0 unless the default is 0. The largest of a list, which has one for each layer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and (default != 0) <= value <= _MOST
        if usable and value is not None and value == int(value):
            return int(value)
    if default is not None:
        return default
    raise _wrong(f"there is no usable {keys[0]} in it")


def _wrong(reason: str) -> CheckpointError:
    return CheckpointError(reason, file="config.json", cure="Give the folder of a language model, with its own config.json")
