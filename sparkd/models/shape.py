"""Owns the shape of a model's layers, from config.json: how each mixes tokens, and what it keeps of one. Never reads a tensor or refuses.

Keys are those of transformers' configurations (configuration_*.py), of vLLM's own (vllm/transformers_utils/configs) and of Mistral's
params.json. A kind of layer that has no formula counts as full attention, and a configuration that says too little has none at all: what
is missing stands in Shape.gaps, and vLLM's own answer goes before all of it (sparkd.capacity.consultation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkd.models.checked_keys import unread

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
# The names of a kind of layer: in layer_types and layers_block_type, and as a letter of Nemotron-H's pattern.
_FULL = frozenset({"full_attention", "attention", "global_attention", "*"})
_SLIDING = frozenset({"sliding_attention", "local_attention", "sliding_window_attention"})
_LINEAR = frozenset({"linear_attention", "gated_delta_net"})
_MAMBA = frozenset({"mamba", "mamba2", "M"})
_NOTHING = frozenset({"mlp", "moe", "-", "E"})
# Published configurations leave these to their class (transformers, configuration_gemma3.py).
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
_PATTERNS = {"gemma3": 6, "gemma3_text": 6}
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
# Lists of one value for each layer that change nothing of its cache, or whose largest counts.
_READ = frozenset({*_KINDS, "mlp_layer_types", "num_key_value_heads", "intermediate_size", "architectures", "eos_token_id"})
# The model types whose latent attention vLLM keeps as one vector (vllm/transformers_utils/model_arch_config_convertor.py, is_deepseek_mla).
# Any other class with its keys, such as MiniCPM3's, keeps keys and values of all heads.
_LATENT = frozenset({
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note", "glm5_next", "glm5_next_text",
    "glm_moe_dsa", "glm4_moe_lite", "kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe", "bailing_hybrid", "hy_v4",
})  # fmt: skip
# Far more than any model has: a count is multiplied and a list made of it.
_MOST_LAYERS, _MOST = 4096, 1 << 40


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of every token: heads times (key_dim + value_dim) elements. window: tokens it looks back, None for all of them.

    latent: one vector of key_dim for all heads together, on every rank (multi-head latent attention); heads is 1 then.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentState:
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


Mixer = Attention | RecurrentState


@dataclass(frozen=True, slots=True)
class Shape:
    """mixers: of each layer in order, None for one that keeps nothing of a token; none at all where there is no formula. dtype: that vLLM
    computes in. gaps: what config.json does not say, or says in a way that is not known here; layers, hidden, heads and vocab are 0 then.

    experts, active_experts: routed ones of a layer and how many of them a token uses; 0 for a dense model. mtp_layers: further layers that
    predict tokens ahead, loaded for speculative decoding only. rotary_bytes: of the tables of sines and cosines. unread: see
    sparkd.models.checked_keys.
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
    gaps: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

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
    text = text_config(config)
    names = config.get("architectures")
    gaps: list[str] = []
    layers = _layers(text, gaps)
    heads, hidden = _count(text, *_HEADS), _count(text, *_HIDDEN)
    mixers = _mixers(text, layers, gaps)
    stated = {_HIDDEN[0]: hidden, _HEADS[0]: heads, "vocab_size": _count(text, "vocab_size"), LENGTHS[0]: _count(text, *LENGTHS)}
    architecture = str(names[0]) if isinstance(names, Sequence) and names else str(text.get("model_type", "unknown"))
    return Shape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        vocab=stated["vocab_size"],
        intermediate=_count(text, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden),
        expert_width=_count(text, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
        max_len=_max_len(text),
        dtype=_dtype(config, text),
        mixers=mixers,
        experts=_count(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        active_experts=_count(text, *_ACTIVE),
        mtp_layers=_count(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
        tied=bool(text.get("tie_word_embeddings", True)),
        rotary_bytes=_rotary_bytes(text, heads) * DTYPE_BYTES[_dtype(config, text)],
        gaps=(*gaps, *(key for key, size in stated.items() if not size), *_of_each_layer(text, layers)),
        unread=tuple(unread(architecture, config, text)),
    )


def of_layers(shape: Shape, config: Mapping[str, Any], layers: int) -> Shape:
    """The shape with so many layers, each with full attention where config.json tells its heads and widths."""
    return replace(shape, layers=layers, mixers=_mixers({**text_config(config), LAYERS: layers}, layers, []))


def widest(shape: Shape, config: Mapping[str, Any], attentions: int) -> Shape:
    """The shape with the most that a class may make of config.json: every layer without a window, with the most heads of keys that any key
    names, and with a state beside them where config.json describes one. A layer that is known to keep a state keeps that alone.

    attentions: of each layer, at least 1.
    """
    text = text_config(config)
    whole = [replace(one, window=None) for one in shape.mixers if isinstance(one, Attention)]
    if not whole:
        return shape
    most = max(whole, key=lambda one: one.heads * (one.key_dim + one.value_dim))
    if not most.latent:
        named = (_count(text, key) for key in text if key.endswith("num_key_value_heads"))
        most = replace(most, heads=max(most.heads, *named, 0))
    keeping: tuple[Mixer, ...] = (most,) * attentions
    states = [one for one in shape.mixers if isinstance(one, RecurrentState)]
    if states:
        return replace(shape, mixers=(*states, *keeping * (shape.layers - len(states))))
    state = _delta_net(text) or _mamba2(text)
    return replace(shape, mixers=(*keeping, *([state] if state else [])) * shape.layers)


def reads_another_sequence(config: Mapping[str, Any]) -> bool:
    """Whether its decoder also keeps keys and values of what an encoder read."""
    text = text_config(config)
    return bool(config.get("is_encoder_decoder") or text.get("is_encoder_decoder") or "max_source_positions" in text)


def _layers(text: Mapping[str, Any], gaps: list[str]) -> int:
    layers = _count(text, *_LAYERS)
    listed = next((len(text[key]) for key in _KINDS if isinstance(text.get(key), list)), len(_pattern(text)))
    if 0 < (layers or listed) <= _MOST_LAYERS:
        return layers or listed
    gaps.append(LAYERS)
    return 0


def _of_each_layer(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    """The keys that state something for each layer for which there is no formula."""
    for key, value in text.items():
        if (key == "per_layer_config" and value) or (isinstance(value, list) and len(value) == layers and key not in _READ):
            yield key


def _mixers(text: Mapping[str, Any], layers: int, gaps: list[str]) -> tuple[Mixer | None, ...]:
    if not layers or _full_attention(text) is None:
        return ()
    # Layers at the end that read another layer's cache (Gemma 3n, Gemma 4) keep none.
    caching = layers - _count(text, "num_kv_shared_layers")
    kinds = _kinds(text, layers, gaps)
    mixers = {kind: _mixer(text, kind, gaps) for kind in dict.fromkeys(kinds)}
    return tuple(mixers[kind] if number < caching else None for number, kind in enumerate(kinds))


def _pattern(text: Mapping[str, Any]) -> str:
    pattern = text.get("hybrid_override_pattern")
    return pattern.replace("|", "") if isinstance(pattern, str) else ""


def _kinds(text: Mapping[str, Any], layers: int, gaps: list[str]) -> list[str]:
    """One word for each layer."""
    stated = [("hybrid_override_pattern", _pattern(text)), *((key, text[key]) for key in _KINDS if isinstance(text.get(key), list))]
    for key, listed in stated:
        if listed and len(listed) != layers:
            gaps.append(key)
        elif listed:
            return [str(kind) for kind in listed]
    if (every := _count(text, "full_attention_interval")) and "linear_num_value_heads" in text:
        return ["full_attention" if (number + 1) % every == 0 else "linear_attention" for number in range(layers)]
    if not _window(text):
        return ["full_attention"] * layers
    if _type(text) == "gpt_oss":
        return ["full_attention" if number % 2 else "sliding_attention" for number in range(layers)]
    if every := _count(text, "sliding_window_pattern", "_sliding_window_pattern", default=_PATTERNS.get(_type(text), 0)):
        return ["full_attention" if (number + 1) % every == 0 else "sliding_attention" for number in range(layers)]
    if "max_window_layers" in text:  # Qwen3: the layers from there on
        first = _count(text, "max_window_layers")
        return ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    gaps.append("layer_types")
    return ["sliding_attention"] * layers


def _mixer(text: Mapping[str, Any], kind: str, gaps: list[str]) -> Mixer | None:
    if kind in _NOTHING:
        return None
    if kind in _SLIDING:
        return _attention(text, full=False)
    # transformers' classes call a Mamba-2 layer linear attention, too.
    state = (_delta_net(text) or _mamba2(text)) if kind in _LINEAR else _mamba2(text) if kind in _MAMBA else None
    if state is None and kind not in _FULL:
        gaps.append(kind)
    return state or _full_attention(text)


def _full_attention(text: Mapping[str, Any]) -> Attention | None:
    """None where config.json does not tell how wide keys are, or how many."""
    if text.get("kv_lora_rank"):
        return _latent(text) if _type(text) in ("", *_LATENT) else _all_heads(text)
    attention = _attention(text, full=True)
    return attention if attention.heads and attention.key_dim else None


def _latent(text: Mapping[str, Any]) -> Attention:
    """One vector for all heads: the latent one and the rotary part of the keys (DeepSeek-V2, section 2.1)."""
    return Attention(1, _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim"), 0, latent=True)


def _all_heads(text: Mapping[str, Any]) -> Attention:
    """Values are padded to the width of keys (vllm/model_executor/models/minicpm3.py)."""
    width = _count(text, "qk_nope_head_dim") + _count(text, "qk_rope_head_dim")
    return Attention(_count(text, *_HEADS), width, width)


def _attention(text: Mapping[str, Any], *, full: bool) -> Attention:
    heads = _count(text, *_HEADS)
    own_heads, own_dim = _kv_heads(text, heads), _head_dim(text, heads)
    if full and text.get("global_head_dim"):  # Gemma 4: the layers without a window have their own
        own_dim = _count(text, "global_head_dim", default=own_dim)
        own_heads = _count(text, "num_global_key_value_heads", default=own_heads)
    return Attention(own_heads, own_dim, _count(text, "v_head_dim", default=own_dim), window=None if full else _window(text))


def _delta_net(text: Mapping[str, Any]) -> RecurrentState | None:
    """Gated delta net (Qwen3-Next): channels are keys, queries and values."""
    key_heads, key_dim = _count(text, "linear_num_key_heads"), _count(text, "linear_key_head_dim")
    value_heads, value_dim = _count(text, "linear_num_value_heads"), _count(text, "linear_value_head_dim")
    if not all((key_heads, key_dim, value_heads, value_dim)):
        return None
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    own = text.get("mamba_ssm_dtype")
    taps = _count(text, "linear_conv_kernel_dim", default=4) - 1
    return RecurrentState(channels, taps, value_heads, value_dim, key_dim, key_heads=key_heads, matrix_dtype=str(own) if own else None)


def _mamba2(text: Mapping[str, Any]) -> RecurrentState | None:
    heads, head_dim = _count(text, "mamba_num_heads", "mamba_n_heads"), _count(text, "mamba_head_dim", "mamba_d_head")
    groups, size = _count(text, "n_groups", "mamba_n_groups"), _count(text, "ssm_state_size", "mamba_d_state")
    kernel = _count(text, "conv_kernel", "mamba_d_conv")
    if not all((heads, head_dim, groups, size, kernel)):
        return None
    # Nemotron-H's own default (vllm/model_executor/models/config.py: "Only `float32` is known to have no accuracy issues").
    default = "float32" if _type(text).startswith("nemotron_h") else None
    own = text.get("mamba_ssm_cache_dtype") or default
    return RecurrentState(
        heads * head_dim, kernel - 1, heads, head_dim, size, groups, size, matrix_dtype=str(own) if own and own != "auto" else None
    )


def _rotary_bytes(text: Mapping[str, Any], heads: int) -> int:
    """Elements of the tables of sines and cosines, one for each kind of rotary embedding (vllm/model_executor/layers/rotary_embedding)."""
    if _type(text).startswith("nemotron_h"):
        return 0
    tables = rotary_tables(text)
    # A local base beside a single table is that of the layers with a window (Gemma 3), and never stretched.
    kinds = {**tables, "sliding_attention": {}} if len(tables) == 1 and "rope_local_base_freq" in text else tables
    total = 0
    for kind, table in kinds.items():
        own = _count(text, "global_head_dim") if kind == "full_attention" else 0
        head = own or _count(text, "qk_rope_head_dim") or _head_dim(text, heads)
        # Gemma 4's proportional tables keep the part that is not rotated.
        share = 1.0 if _rope_type(table) == "proportional" else _factor({**text, **table}, "partial_rotary_factor")
        total += _rotary_rows(text, table) * int(head * share)
    return total


def rotary_tables(text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By kind of layer where the configuration tells them apart."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(parameters, Mapping):
        return {"": {}}
    return {kind: table for kind, table in parameters.items() if isinstance(table, Mapping)} or {"": parameters}


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
    # Room for the positions of frames that video pruning leaves out (vllm/model_executor/models/qwen3_vl.py, mrope_positions_factor).
    return 4 * rows if "mrope_section" in table and not _type(text).startswith("qwen3") else rows


def _rope_type(table: Mapping[str, Any]) -> str:
    return str(table.get("rope_type") or table.get("type") or "default")


def _max_len(text: Mapping[str, Any]) -> int:
    """The longest request that vLLM allows, in tokens (vllm/config/model.py, _get_and_verify_max_len)."""
    length = _count(text, *LENGTHS, default=2048)
    if "gemma3" in _type(text):
        return length
    factors = [_factor(table, "factor") for table in rotary_tables(text).values() if _rope_type(table) not in _STRETCHED]
    return int(length * (factors[-1] if factors else 1.0))


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    return _count(text, "sliding_window", "sliding_window_size") or None


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


def _type(text: Mapping[str, Any]) -> str:
    return str(text.get("model_type", ""))


def _factor(table: Mapping[str, Any], key: str) -> float:
    """A number above 0, 1 where there is none."""
    value = table.get(key)
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
