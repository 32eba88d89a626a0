"""What a plan knows of a model: inventories of synthetic checkpoints, and shapes of published configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sparkd.capacity.weights import Inventory, inventory
from sparkd.checkpoint.shape import Shape, shape_of
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import Tensor, Tensors, checkpoint_of, dense, mixture
from tests.support.published_tensors import tensors_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


def published(name: str) -> dict[str, Any]:
    """config.json of a published model."""
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def shape(name: str) -> Shape:
    return shape_of(published(name))


def known(config: Mapping[str, Any], tensors: Tensors) -> Inventory:
    return inventory(checkpoint_of(tensors, config), shape_of(config))


def architecture(name: str) -> Inventory:
    """One of tests/support/architectures.py."""
    model = ARCHITECTURES[name]()
    return known(model.config, model.entries)


def packed_tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """A mixture that stores all experts of a layer in two tensors."""
    hidden, inner, experts = (config[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts"))
    found = [tensor for tensor in tensors_of(config) if ".experts." not in tensor.name]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}.mlp.experts"
        found += [Tensor(f"{base}.gate_up_proj", (experts, 2 * inner, hidden)), Tensor(f"{base}.down_proj", (experts, hidden, inner))]
    return found


def models() -> st.SearchStrategy[Inventory]:
    """Small ones that two and four ranks can share."""

    def made(layers: int, heads: int, keys: int, head: int, inner: int, experts: int, tied: bool, packed: bool) -> Inventory:
        plain = {"num_hidden_layers": layers, "num_attention_heads": 4 * heads, "num_key_value_heads": keys, "head_dim": head}
        plain |= {"hidden_size": 256, "tie_word_embeddings": tied, "intermediate_size": 128 * inner, "vocab_size": 100 * inner}
        config = mixture(**plain, num_experts=4 * experts, moe_intermediate_size=128 * inner) if experts else dense(**plain)
        return known(config, packed_tensors(config) if packed and experts else tensors_of(config))

    counts = st.integers(1, 3)
    return st.builds(
        made,
        counts,
        counts,
        st.sampled_from([1, 2, 4]),
        st.sampled_from([64, 128]),
        counts,
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    )
