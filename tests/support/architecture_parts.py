"""What scaled-down architectures have in common: sizes, and the tensors of attention, MLPs and experts. Never a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints import Draw, Tensor, linear, normal, special_tokens

HEAD_DIM = 64
# A norm that multiplies by one plus its weight is stored around zero.
ZERO_NORM = normal(0.05)


@dataclass(frozen=True, slots=True)
class Size:
    """wide: inner width of a dense MLP; inner: of an expert; times: how often the layers are repeated."""

    hidden: int = 256
    vocab: int = 512
    experts: int = 8
    heads: int = 4
    kv_heads: int = 2
    wide: int = 512
    inner: int = 256
    times: int = 1


SMALL = Size()


def plain_config(size: Size, architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    plain = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": size.hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": size.vocab,
        "torch_dtype": "bfloat16",
    }
    return {**plain, **special_tokens(), **more}


def attention_config(size: Size) -> dict[str, Any]:
    return {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": HEAD_DIM}


def qwen_moe_config(size: Size, inner: int) -> dict[str, Any]:
    return {
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def ends(size: Size, *, tied: bool = False, norm: Draw | None = None) -> list[Tensor]:
    embedding = Tensor("model.embed_tokens.weight", (size.vocab, size.hidden), "BF16", normal(0.05))
    last = Tensor("model.norm.weight", (size.hidden,), "BF16", norm or Draw("constant", 1.0))
    return [embedding, last] if tied else [embedding, last, Tensor("lm_head.weight", (size.vocab, size.hidden), "BF16", normal(0.05))]


def norms(size: Size, base: str, *, draw: Draw | None = None) -> list[Tensor]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [Tensor(f"{base}.{name}.weight", (size.hidden,), "BF16", draw or Draw("constant", 1.0)) for name in names]


def head_norms(base: str, *, head_dim: int = HEAD_DIM, draw: Draw | None = None) -> list[Tensor]:
    return [Tensor(f"{base}.self_attn.{name}_norm.weight", (head_dim,), "BF16", draw or Draw("constant", 1.0)) for name in "qk"]


def self_attention(
    size: Size, base: str, *, mixer: str = "", head_dim: int = HEAD_DIM, gated: bool = False, biased: bool = False
) -> list[Tensor]:
    """gated: the query projection holds an output gate too."""
    module = mixer or f"{base}.self_attn"
    queries, keys = size.heads * head_dim, size.kv_heads * head_dim
    shapes = {
        "q_proj": ((2 if gated else 1) * queries, size.hidden),
        "k_proj": (keys, size.hidden),
        "v_proj": (keys, size.hidden),
        "o_proj": (size.hidden, queries),
    }
    found = [entry for name, shape in shapes.items() for entry in linear(f"{module}.{name}", *shape, std=0.05)]
    biases = [Tensor(f"{module}.{name}.bias", (shape[0],), "BF16", normal(0.1)) for name, shape in shapes.items()]
    return found + biases if biased else found


def gated_mlp(size: Size, module: str, inner: int) -> list[Tensor]:
    shapes = (("gate_proj", inner, size.hidden), ("up_proj", inner, size.hidden), ("down_proj", size.hidden, inner))
    return [entry for name, n, k in shapes for entry in linear(f"{module}.{name}", n, k, std=0.05)]


def routed_experts(size: Size, mlp: str) -> list[Tensor]:
    gate = linear(f"{mlp}.gate", size.experts, size.hidden, std=0.05)
    return gate + [entry for expert in range(size.experts) for entry in gated_mlp(size, f"{mlp}.experts.{expert}", size.inner)]


def packed_experts(size: Size, mlp: str, inner: int) -> list[Tensor]:
    shapes = {"gate_up_proj": (2 * inner, size.hidden), "down_proj": (size.hidden, inner)}
    packed = [Tensor(f"{mlp}.experts.{name}", (size.experts, *shape), "BF16", normal(0.05)) for name, shape in shapes.items()]
    return linear(f"{mlp}.gate", size.experts, size.hidden, std=0.05) + packed


def dense(size: Size, *, qk_norm: bool = False, tied: bool = False) -> list[Tensor]:
    entries = ends(size, tied=tied)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        entries += [
            *norms(size, base),
            *self_attention(size, base),
            *(head_norms(base) if qk_norm else []),
            *gated_mlp(size, f"{base}.mlp", size.wide),
        ]
    return entries
