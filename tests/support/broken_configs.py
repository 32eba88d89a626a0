"""Configuration files with one mistake each, made from valid ones by class, with the reason that `sparkd check` has to give."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd.cli.config_check import check
from sparkd.schema.yaml_file import MAX_BYTES
from tests.support.checkpoints import dense, tensors_of, write

VALID_TOP = {"listen": "127.0.0.1:4000", "log_level": "info"}
COLUMNS = ("refused for its reason", "refused for another", "accepted", "crashed")


@dataclass(frozen=True, slots=True)
class Broken:
    """kind: the class of the mistake. words: what the reason has to name, in any one error. line: of that error, None for no line."""

    kind: str
    text: bytes
    words: tuple[str, ...]
    line: int | None


@dataclass(frozen=True, slots=True)
class Folders:
    """Models on disk: a sound one, one of 9 heads, one without config.json, an empty one."""

    sound: Path
    nine_heads: Path
    no_config: Path
    empty: Path

    @classmethod
    def under(cls, folder: Path) -> Folders:
        config = dense(num_hidden_layers=2)
        nine = dense(num_hidden_layers=2, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
        sound, nine_heads = (write(folder / name, shape, tensors_of(shape)) for name, shape in (("sound", config), ("nine", nine)))
        no_config, empty = folder / "bare", folder / "empty"
        no_config.mkdir()
        (no_config / "model.safetensors").write_bytes(b"")
        empty.mkdir()
        return cls(sound, nine_heads, no_config, empty)


def corpus(folder: Path) -> list[Broken]:
    """What tests/golden/errors.txt does not have, because the machine, the model's files or vLLM are asked. folder: an empty one, for the
    models that entries name."""
    models = Folders.under(folder)
    cases: list[Broken] = []
    for kind, make in (
        ("value", odd_values), ("contradiction", contradictions), ("argument or variable", arguments), ("the model's files", files),
        ("path or address", odd_paths), ("text that is no YAML of ours", texts),
    ):  # fmt: skip
        cases += [Broken(kind, text if isinstance(text, bytes) else text.encode(), words, line) for text, words, line in make(models)]
    return cases


Case = tuple[str | bytes, tuple[str, ...], int | None]


def top(**keys: Any) -> str:
    """One key a line, the first two are valid."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in {**VALID_TOP, **keys}.items())


def entry(model: object, keys: Mapping[str, Any]) -> str:
    """One key of the entry `m` a line, from line 4 on."""
    own = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in keys.items())
    return f"models:\n  m:\n    model: {json.dumps(str(model))}\n{own}"


def odd_values(models: Folders) -> Iterator[Case]:
    for key, value, word in (
        ("tensor_parallel", "two", "auto"), ("max_num_seqs", 2.5, "2.5"), ("env", "A", "env"), ("gpu_memory_utilization", 1.5, "1.5"),
        ("sampling", {"temperature": 9}, "sampling.temperature"), ("dtype", "float99", "float"), ("tool_call_parser", "hermess", "hermes?"),
    ):  # fmt: skip
        yield entry(models.sound, {key: value}), (f"models.m.{key}", word), 4


def odd_paths(models: Folders) -> Iterator[Case]:
    """A file where a folder or a program is expected, and models that never run together."""
    file = str(models.sound / "config.json")
    yield top(state_dir=file), ("state_dir", "folder"), 3
    yield top(engine={"runtime": file}), ("engine.runtime", "run"), 3
    yield entry(models.sound, {"entrypoint": "x y"}), ("models.m.entrypoint", "module"), 4
    yield top(cluster={"address": "999.1.1.1:6379"}), ("cluster.address", "IPv4"), 3
    two = f"models:\n  a: {{model: {models.sound}, preload: true}}\n  b: {{model: {models.sound}, preload: true}}\n"
    yield f"{two}groups: {{exclude: [[a, b]]}}\n", ("models.b.preload", "groups.exclude"), 3


def contradictions(models: Folders) -> Iterator[Case]:
    for keys, words, line in (
        ({"memory_gib": 1}, ("memory_gib", "at least"), 4),
        ({"load_format": "spark_stream"}, ("load_format", "quantize is not set"), 4),
        ({"speculative": "mtp"}, ("speculative", "predict tokens ahead"), 4),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ("max_num_batched_tokens", "max_num_seqs"), 5),
        ({"memory_gib": 4, "kv_cache": {"bytes": "8GiB"}}, ("kv_cache", "8GiB", "4 GiB"), 5),
    ):  # fmt: skip
        yield entry(models.sound, keys), words, line
    two = f"models:\n  a: {{model: {models.sound}}}\n  b: {{model: {models.sound}, aliases: [c], default: true}}\n"
    yield f"{two}groups: {{exclude: [[a, b]], accompany: [[a, c]]}}\n", ("groups.exclude", "accompany"), 4
    yield f"{two}groups: {{accompany: [[a, bb]]}}\n", ("groups.accompany", "'bb'", "Did you mean b?"), 4


def arguments(models: Folders) -> Iterator[Case]:
    for args, word in (
        (["--tensor-parallel-size", "2"], "tensor_parallel"), (["model"], "not a flag"),
        (["--enforce-eagr"], "Did you mean --enforce-eager?"), (["--max-num-seqs", "many"], "whole number"),
    ):  # fmt: skip
        yield entry(models.sound, {"extra_args": args}), (word,), 4
    yield entry(models.sound, {"env": {"1A": "1"}}), ("models.m.env", "environment variable"), 4


def files(models: Folders) -> Iterator[Case]:
    yield entry("Qwen3-8B", {}), ("models.m.model", "owner"), 3
    yield entry(models.empty, {}), ("models.m.model", "empty"), 3
    yield entry(models.no_config, {}), ("models.m.model", "config.json"), 3
    yield entry(models.nine_heads, {"quantize": "int4-g128"}), ("models.m.quantize", "groups of 128"), 4
    yield entry(models.sound, {"extra_args": ["--num-gpu-blocks-override", "2"]}), ("models.m.extra_args", "8,192 tokens"), 4


def texts(models: Folders) -> Iterator[Case]:
    yield entry(models.sound, {}).encode() + b"a: \xff\xfe\n", ("UTF-8",), 4
    yield "- a\n- b\n", ("map",), 1
    yield "#" * (MAX_BYTES + 1), ("bytes",), None


def outcome(broken: Broken, folder: Path) -> str:
    """One of COLUMNS."""
    file = folder / "sparkd.yaml"
    file.write_bytes(broken.text)
    try:
        errors = [problem for problem in check(file, {"HOME": str(folder)}) if problem.severity == "error"]
    except Exception:  # noqa: BLE001 - it is what is counted
        return "crashed"
    if not errors:
        return "accepted"
    matching = [one for one in errors if all(word in one.message or word in (one.file or "") for word in broken.words)]
    return COLUMNS[0] if any(broken.line in (one.line, None) for one in matching) else COLUMNS[1]
