"""Random checkpoints as they lie on disk: config.json, tokenizer, safetensors shards and their index. Never loads one, never imports vLLM.

    python -m tests.support.checkpoints cpu|h200 FOLDER [--shuffled] [--source SOURCE] [--packed linear|transposed] [--device cuda]

Only torch is needed. A tensor's values follow from the seed and its name alone, so the same model in another order holds the same tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
GIB = 2**30
CHUNK_BYTES = 64 * MIB
DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# FP8 codes are drawn with this deviation: 448 is 4.7 of them away, as in a checkpoint whose scales come from the largest value.
FP8_STD = 96.0
SOURCES = ("bf16", "f16", "fp8_tensor", "fp8_channel", "fp8_block")
PACKED = ("linear", "transposed")
# The CPU table's 1.85 GB, and the 9.29 GiB that the GPU figures are about.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "smallest": {"layers": 1, "hidden": 256, "experts": 4, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512},
    "cpu": {"layers": 6, "hidden": 1024, "experts": 64, "intermediate": 768, "heads": 16, "kv_heads": 4, "head_dim": 64, "vocab": 512},
    "h200": {
        "layers": 8,
        "hidden": 2048,
        "experts": 128,
        "intermediate": 768,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 1024,
        "shard_bytes": 2 * GIB,
    },
}


@dataclass(frozen=True, slots=True)
class Draw:
    """Where values come from. kind: normal (mean `low`, deviation `high`), uniform, integers (`low` to `high`), constant (`low`), steps
    (counted up by one after every `low` elements)."""

    kind: str
    low: float = 0.0
    high: float = 0.0


ONES = Draw("constant", 1.0)
ZEROS = Draw("constant", 0.0)
BYTES = Draw("integers", 0, 255)


def normal(std: float, mean: float = 0.0) -> Draw:
    return Draw("normal", mean, std)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint that is to be written. dtype: safetensors code."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    draw: Draw = ONES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    entries: Sequence[Entry],
    *,
    shard_bytes: int = 200 * MIB,
    shuffled: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Writes `entries` in their order, or in a random order over all shards, each shard full before the next; files are on disk afterwards.

    At most CHUNK_BYTES of values are in memory at once; they are drawn on `device`. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", dict(config))
    write_tokenizer(folder, int(dict(config).get("vocab_size") or dict(config.get("text_config", {})).get("vocab_size", 512)))
    entries = list(entries)
    if shuffled:
        random.Random(seed).shuffle(entries)
    shards = list(_shards(entries, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, members, seed, torch.device(device))
        weight_map |= dict.fromkeys((member.name for member in members), name)
    total = sum(entry.nbytes for entry in entries)
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    return folder


def qwen3_moe(
    folder: str | os.PathLike[str],
    *,
    layers: int = 4,
    hidden: int = 256,
    experts: int = 8,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    active: int = 8,
    source: str = "bf16",
    packed: str | None = None,
    shard_bytes: int = 200 * MIB,
    shuffled: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """A Qwen3-MoE checkpoint under the names of the published ones.

    source: precision of the linear weights, experts included; the scales lie beside them as publishers of FP8 checkpoints have them.
    packed: a layer's experts are two tensors, [experts, 2 intermediate, hidden] and [experts, hidden, intermediate] (`linear`), or both
    transposed; 16 bits only.
    """
    if source not in SOURCES or packed not in (None, *PACKED) or (packed and source.startswith("fp8")):
        raise ValueError(f"No checkpoint has the source {source!r} with packed={packed!r}; sources are {', '.join(SOURCES)}.")
    plain = "F16" if source == "f16" else "BF16"
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": min(active, experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "torch_dtype": "float16" if plain == "F16" else "bfloat16",
        **special_tokens(),
    }
    if source.startswith("fp8"):
        config["quantization_config"] = fp8_config(source)
    entries = [Entry("model.embed_tokens.weight", (vocab, hidden), plain, normal(0.05))]
    for layer in range(layers):
        base = f"model.layers.{layer}"
        attention = f"{base}.self_attn"
        entries += [
            Entry(f"{base}.input_layernorm.weight", (hidden,), plain),
            *linear(f"{attention}.q_proj", heads * head_dim, hidden, source),
            *linear(f"{attention}.k_proj", kv_heads * head_dim, hidden, source),
            *linear(f"{attention}.v_proj", kv_heads * head_dim, hidden, source),
            *linear(f"{attention}.o_proj", hidden, heads * head_dim, source),
            Entry(f"{attention}.q_norm.weight", (head_dim,), plain),
            Entry(f"{attention}.k_norm.weight", (head_dim,), plain),
            Entry(f"{base}.post_attention_layernorm.weight", (hidden,), plain),
            Entry(f"{base}.mlp.gate.weight", (experts, hidden), plain, normal(0.05)),
            *expert_entries(f"{base}.mlp.experts", experts, hidden, intermediate, source, packed),
        ]
    entries += [Entry("model.norm.weight", (hidden,), plain), Entry("lm_head.weight", (vocab, hidden), plain, normal(0.05))]
    return write_checkpoint(folder, config, entries, shard_bytes=shard_bytes, shuffled=shuffled, seed=seed, device=device)


def linear(module: str, n: int, k: int, source: str = "bf16", std: float = 0.03) -> list[Entry]:
    """The tensors of one linear weight [n, k] in a source precision; its values have about the deviation `std`."""
    if not source.startswith("fp8"):
        return [Entry(f"{module}.weight", (n, k), "F16" if source == "f16" else "BF16", normal(std))]
    weight = Entry(f"{module}.weight", (n, k), "F8_E4M3", normal(FP8_STD))
    scales = Draw("uniform", 0.75 * std / FP8_STD, 1.25 * std / FP8_STD)
    if source == "fp8_tensor":
        return [weight, Entry(f"{module}.weight_scale", (), "F32", scales)]
    if source == "fp8_channel":
        return [weight, Entry(f"{module}.weight_scale", (n, 1), "BF16", scales)]
    return [weight, Entry(f"{module}.weight_scale_inv", (-(-n // 128), -(-k // 128)), "F32", scales)]


def expert_entries(experts_module: str, experts: int, hidden: int, intermediate: int, source: str, packed: str | None) -> list[Entry]:
    """A layer's routed experts with gate, up and down projections, one by one or packed."""
    if packed is None:
        return [
            entry
            for expert in range(experts)
            for which, n, k in (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate))
            for entry in linear(f"{experts_module}.{expert}.{which}_proj", n, k, source)
        ]
    dtype = "F16" if source == "f16" else "BF16"
    first, second = (2 * intermediate, hidden), (hidden, intermediate)
    if packed == "transposed":
        first, second = first[::-1], second[::-1]
    return [
        Entry(f"{experts_module}.gate_up_proj", (experts, *first), dtype, normal(0.03)),
        Entry(f"{experts_module}.down_proj", (experts, *second), dtype, normal(0.03)),
    ]


def fp8_config(source: str) -> dict[str, Any]:
    """The `quantization_config` that goes with an FP8 source."""
    if source == "fp8_channel":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }
    block = {"weight_block_size": [128, 128]} if source == "fp8_block" else {}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **block}


def special_tokens() -> dict[str, int]:
    """For config.json: the ids that write_tokenizer gives the two special tokens."""
    return {"bos_token_id": 256, "eos_token_id": 257}


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer: 256 bytes, beginning, end, and unused tokens up to `vocab`."""
    # GPT-2's map: a byte that prints stands for itself, the others for the characters from U+0100 on.
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    characters = [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]
    added = ["<bos>", "<eos>", *(f"<unused{index}>" for index in range(max(0, vocab - 258)))]
    tokens = {token: index for index, token in enumerate([*characters, *added])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model: dict[str, Any] = {"type": "BPE", "vocab": tokens, "merges": [], "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokens[token], "content": token, **special} for token in added[:2]],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {**model, "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None},
    }
    _write_json(folder / "tokenizer.json", whole)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "model_max_length": 4096}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def values(entry: Entry, seed: int = 0, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
    """The tensor's elements in flat pieces of at most CHUNK_BYTES, in its dtype, on `device`. CPU and GPU draw different ones."""
    device = torch.device(device)
    generator = torch.Generator(device=device)
    total = math.prod(entry.shape)
    step = CHUNK_BYTES // 4
    for start in range(0, total, step):
        generator.manual_seed(zlib.crc32(f"{seed}/{entry.name}/{start}".encode()))
        yield _drawn(entry.draw, min(step, total - start), DTYPES[entry.dtype], generator, device)


def _drawn(draw: Draw, count: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    if draw.kind == "constant":
        return torch.full((count,), draw.low, device=device).to(dtype)
    if draw.kind == "integers":
        return torch.randint(int(draw.low), int(draw.high) + 1, (count,), generator=generator, device=device, dtype=dtype)
    if draw.kind == "steps":
        return torch.arange(count, device=device).div_(int(draw.low), rounding_mode="floor").to(dtype)
    drawn = torch.empty(count, dtype=torch.float32, device=device)
    if draw.kind == "uniform":
        drawn.uniform_(draw.low, draw.high, generator=generator)
    else:
        drawn.normal_(draw.low, draw.high, generator=generator)
    if dtype is torch.float8_e4m3fn:
        drawn.clamp_(-448.0, 448.0)  # torch's cast gives NaN above
    return drawn.to(dtype)


def _shards(entries: Iterable[Entry], shard_bytes: int) -> Iterator[list[Entry]]:
    members: list[Entry] = []
    size = 0
    for entry in entries:
        if members and size + entry.nbytes > shard_bytes:
            yield members
            members, size = [], 0
        members.append(entry)
        size += entry.nbytes
    if members:
        yield members


def _write_shard(path: Path, members: Sequence[Entry], seed: int, device: torch.device) -> None:
    # As safetensors itself does: wide types first, so that no tensor is misaligned.
    members = sorted(members, key=lambda member: -DTYPES[member.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for member in members:
        header[member.name] = {"dtype": member.dtype, "shape": list(member.shape), "data_offsets": [at, at + member.nbytes]}
        at += member.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for member in members:
            for piece in values(member, seed, device):
                file.write(memoryview(piece.cpu().view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--source", choices=SOURCES, default="bf16")
    parser.add_argument("--packed", choices=PACKED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    print(qwen3_moe(given.pop("folder"), **PRESETS[given.pop("preset")], **given))


if __name__ == "__main__":
    main()
