"""A Llama of 8B's widths whose data are holes, with as many layers as a test wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.shards import layered, write_sparse

HIDDEN, INNER, VOCAB = 4096, 14_336, 32_000
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
ATTENTION = {f"self_attn.{name}_proj.weight": (rows, HIDDEN) for name, rows in (("q", HIDDEN), ("k", 1024), ("v", 1024), ("o", HIDDEN))}
ENDS = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (VOCAB, HIDDEN)))
_MLP = {"mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN), "mlp.down_proj.weight": (HIDDEN, INNER)}


def write_llama(folder: Path, layers: int = 32) -> Path:
    return write_sparse(folder, {**ENDS, **layered(layers, {**ATTENTION, **_MLP})}, {**CONFIG, "num_hidden_layers": layers})
