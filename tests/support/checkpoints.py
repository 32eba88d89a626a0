"""Synthetic checkpoints, in memory or on disk. Its data are a hole of any size, or values that follow from the name.

Tensors are `Tensor`s, rows of (name, shape, dtype), or a mapping {name: (dtype, shape)}. Only drawn values need torch.
"""

from __future__ import annotations

import json
import math
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkd.checkpoint import Checkpoint, SourceQuantization, TensorRef
from sparkd.checkpoint.header import DTYPE_BITS
from sparkd.checkpoint.quantization import source_quantization

if TYPE_CHECKING:
    import torch

MIB = 2**20
GIB = 2**30
CHUNK_BYTES = 64 * MIB
SEED = 0
# safetensors codes of the values that can be drawn, and torch's names of them.
DRAWN = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True, slots=True)
class Draw:
    """Where values come from. kind: normal (deviation `high`), uniform, integers (`low` to `high`), constant (`low`), steps
    (counted up by one after every `low` elements)."""

    kind: str
    low: float = 0.0
    high: float = 0.0


ONES = Draw("constant", 1.0)
ZEROS = Draw("constant", 0.0)
BYTES = Draw("integers", 0, 255)


def normal(std: float) -> Draw:
    return Draw("normal", 0.0, std)


class Tensor(NamedTuple):
    """One tensor of a checkpoint. dtype: safetensors code; draw: its values, where they are drawn."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    draw: Draw = ONES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


Shape = Sequence[int]
Tensors = Mapping[str, tuple[str, Shape]] | Iterable[tuple[Any, ...]]


def header_of(tensors: Tensors) -> dict[str, Any]:
    """The header of a file with these tensors, one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in _listed(tensors):
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    return header


def pack(header: Any, data_bytes: int | None = None) -> bytes:
    """A whole file of zeros. header: an object, or its bytes; data_bytes: how many follow, as the header says where it is left out."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data_bytes is None:
        data_bytes = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def checkpoint_of(tensors: Tensors, config: Mapping[str, Any] | None = None, quantization: SourceQuantization | None = None) -> Checkpoint:
    """A checkpoint that is on no disk. quantization: as `config` and the tensors say where it is left out."""
    refs: dict[str, TensorRef] = {}
    at = 0
    for tensor in _listed(tensors):
        refs[tensor.name] = TensorRef(tensor.name, tensor.dtype, tensor.shape, "/model/model.safetensors", at, tensor.nbytes)
        at += tensor.nbytes
    return Checkpoint("/model", config or {}, (), refs, quantization or source_quantization(config or {}, None, refs))


def write_shard(path: Path, tensors: Tensors) -> Path:
    """One file, whose data are a hole."""
    begin = pack(header_of(tensors), 0)
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + sum(tensor.nbytes for tensor in _listed(tensors)))
    return path


def write_folder(folder: Path, shards: Mapping[str, Tensors], config: Mapping[str, Any] | None = None, *, index: bool = False) -> Path:
    """Files whose data are holes. shards: file name -> tensors; index: with a model.safetensors.index.json over all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    # vLLM is not started for a folder without one.
    (folder / "tokenizer.json").touch()
    _write_json(folder / "config.json", config or {"model_type": "llama"})
    for file, tensors in shards.items():
        write_shard(folder / file, tensors)
    if index:
        _write_index(folder, {tensor.name: file for file, tensors in shards.items() for tensor in _listed(tensors)}, {})
    return folder


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """One file of any size that takes no room."""
    return write_folder(folder, {"model.safetensors": tensors}, config)


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    shard_bytes: int = 200 * MIB,
    shuffled: bool = False,
    device: str = "cpu",
) -> Path:
    """Writes drawn values in the order of `tensors` or in a random one, each shard full before the next; files are on disk afterwards.

    At most CHUNK_BYTES of values are in memory at once; they are drawn on `device`. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    write_tokenizer(folder, int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 512)))
    tensors = _listed(tensors)
    if shuffled:
        random.Random(SEED).shuffle(tensors)
    shards = list(_shards(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_drawn(folder / name, members, device)
        weight_map |= dict.fromkeys((member.name for member in members), name)
    _write_index(folder, dict(sorted(weight_map.items())), {"total_size": sum(tensor.nbytes for tensor in tensors)})
    return folder


def dense(**more: Any) -> dict[str, Any]:
    """A configuration of Llama's kind; keys are replaced or added, and left out where they are None."""
    plain: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in {**plain, **more}.items() if value is not None}


def mixture(**more: Any) -> dict[str, Any]:
    """A configuration of Qwen3-MoE's kind."""
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
    return dense(**{**own, "moe_intermediate_size": 256, **more})


def layered(count: int, shapes: Mapping[str, Shape], prefix: str = "model.layers", dtype: str = "BF16") -> dict[str, tuple[str, Shape]]:
    """The same tensors in `count` layers."""
    return {f"{prefix}.{layer}.{name}": (dtype, shape) for layer in range(count) for name, shape in shapes.items()}


LLAMA_8B = dense(
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    vocab_size=32_000,
    max_position_embeddings=131_072,
)


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


def values(tensor: Tensor, device: torch.device | str) -> Iterator[torch.Tensor]:
    """The tensor's elements in flat pieces of at most CHUNK_BYTES, in its dtype, on `device`. CPU and GPU draw different ones."""
    import torch

    device = torch.device(device)
    generator = torch.Generator(device=device)
    total = math.prod(tensor.shape)
    step = CHUNK_BYTES // 4
    for start in range(0, total, step):
        generator.manual_seed(zlib.crc32(f"{SEED}/{tensor.name}/{start}".encode()))
        yield _drawn(tensor.draw, min(step, total - start), getattr(torch, DRAWN[tensor.dtype]), generator)


def stored(ref: TensorRef) -> torch.Tensor:
    """A tensor as it stands in its file."""
    import torch

    with open(ref.path, "rb") as file:
        raw = bytearray(os.pread(file.fileno(), ref.nbytes, ref.offset))
    return torch.frombuffer(raw, dtype=getattr(torch, DRAWN[ref.dtype])).view(ref.shape)


def _drawn(draw: Draw, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    device = generator.device
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
        drawn.normal_(0.0, draw.high, generator=generator)
    if dtype is torch.float8_e4m3fn:
        drawn.clamp_(-448.0, 448.0)  # torch's cast gives NaN above
    return drawn.to(dtype)


def _listed(tensors: Tensors) -> list[Tensor]:
    rows = ((name, shape, dtype) for name, (dtype, shape) in tensors.items()) if isinstance(tensors, Mapping) else tensors
    return [Tensor(name, tuple(shape), *more) for name, shape, *more in rows]


def _shards(tensors: Iterable[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    members: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if members and size + tensor.nbytes > shard_bytes:
            yield members
            members, size = [], 0
        members.append(tensor)
        size += tensor.nbytes
    if members:
        yield members


def _write_drawn(path: Path, members: Sequence[Tensor], device: str) -> None:
    import torch

    # As safetensors itself does: wide types first, so that no tensor is misaligned.
    members = sorted(members, key=lambda member: -DTYPE_BITS[member.dtype])
    text = json.dumps(header_of(members), separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(pack(text + b" " * (-len(text) % 8), 0))
        for member in members:
            for piece in values(member, device):
                file.write(memoryview(piece.cpu().view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_index(folder: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    _write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
