"""Owns which tensors the vision towers of published models have. Never knows a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]
Rows = Iterator[tuple[Any, ...]]


def qwen_tower(root: str, vision: Config) -> Rows:
    """Qwen3.5 and 3.6."""
    hidden, inner, taken = vision["hidden_size"], vision["intermediate_size"], vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    patch = (hidden, vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    yield from _biased(f"{root}.patch_embed.proj", patch)
    yield f"{root}.pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for number in range(vision["depth"]):
        base = f"{root}.blocks.{number}"
        yield from _biased(f"{base}.norm1", (hidden,))
        yield from _biased(f"{base}.norm2", (hidden,))
        yield from _biased(f"{base}.attn.qkv", (3 * hidden, hidden))
        yield from _biased(f"{base}.attn.proj", (hidden, hidden))
        yield from _biased(f"{base}.mlp.linear_fc1", (inner, hidden))
        yield from _biased(f"{base}.mlp.linear_fc2", (hidden, inner))
    yield from _biased(f"{root}.merger.norm", (hidden,))
    yield from _biased(f"{root}.merger.linear_fc1", (taken, taken))
    yield from _biased(f"{root}.merger.linear_fc2", (vision["out_hidden_size"], taken))


def siglip_tower(root: str, vision: Config) -> Rows:
    """Gemma 3."""
    hidden, inner, size = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield from _biased(f"{root}.embeddings.patch_embedding", (hidden, vision["num_channels"], size, size))
    yield f"{root}.embeddings.position_embedding.weight", ((vision["image_size"] // size) ** 2, hidden)
    for number in range(vision["num_hidden_layers"]):
        base = f"{root}.encoder.layers.{number}"
        for name in ("layer_norm1", "layer_norm2"):
            yield from _biased(f"{base}.{name}", (hidden,))
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{base}.self_attn.{name}", (hidden, hidden))
        yield from _biased(f"{base}.mlp.fc1", (inner, hidden))
        yield from _biased(f"{base}.mlp.fc2", (hidden, inner))
    yield from _biased(f"{root}.post_layernorm", (hidden,))


def clipped_tower(root: str, vision: Config) -> Rows:
    """Gemma 4."""
    hidden, inner, wide = vision["hidden_size"], vision["intermediate_size"], vision["num_attention_heads"] * vision["head_dim"]
    yield f"{root}.std_bias", (hidden,)
    yield f"{root}.std_scale", (hidden,)
    yield f"{root}.patch_embedder.position_embedding_table", (2, vision["position_embedding_size"], hidden)
    yield f"{root}.patch_embedder.input_proj.weight", (hidden, 3 * vision["patch_size"] ** 2)
    for number in range(vision["num_hidden_layers"]):
        base = f"{root}.encoder.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield f"{base}.{name}.weight", (hidden,)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{base}.self_attn.{name}.linear.weight", (wide, hidden)
        yield f"{base}.self_attn.o_proj.linear.weight", (hidden, wide)
        yield from ((f"{base}.self_attn.{name}_norm.weight", (vision["head_dim"],)) for name in "qk")
        yield f"{base}.mlp.gate_proj.linear.weight", (inner, hidden)
        yield f"{base}.mlp.up_proj.linear.weight", (inner, hidden)
        yield f"{base}.mlp.down_proj.linear.weight", (hidden, inner)


def patches(root: str, config: Config) -> Rows:
    """Gemma 4 12B has no tower: patches of pixels and samples of sound are projected."""
    vision, audio, hidden = config["vision_config"], config["audio_config"], config["text_config"]["hidden_size"]
    wide, patch = vision["mm_embed_dim"], 3 * vision["model_patch_size"] ** 2
    yield f"{root}.embed_vision.pos_embedding", (vision["mm_posemb_size"], 2, wide)
    yield from _biased(f"{root}.embed_vision.patch_ln1", (patch,))
    yield from _biased(f"{root}.embed_vision.patch_dense", (wide, patch))
    yield from _biased(f"{root}.embed_vision.patch_ln2", (wide,))
    yield from _biased(f"{root}.embed_vision.pos_norm", (wide,))
    yield f"{root}.embed_vision.multimodal_embedder.embedding_projection.weight", (hidden, vision["output_proj_dims"])
    yield f"{root}.embed_audio.embedding_projection.weight", (hidden, audio["audio_embed_dim"])


def _biased(module: str, shape: tuple[int, ...]) -> Rows:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]
