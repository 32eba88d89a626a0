"""Finds an existing quantized checkpoint of a model on this machine.

The plan offers such a checkpoint under its own name. The match is strict, because a fine-tune has the same shape as its model: the name is
the model's followed by the words of a quantization, the shape is equal in every number, and under another owner the model card names the
model as its base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.checkpoint.bounded_read import read_bounded
from sparkd.checkpoint.shape import Shape, shape_of
from sparkd.checkpoint.source import hub_cache, snapshot_of
from sparkd.errors import CheckpointError

# The words that publishers write behind a model's name; at least one word of the first kind.
_FORMAT = "nvfp4|mxfp4|fp8|awq|gptq|int4|int8|w4a16|w4a4|w8a8|w8a16|4bit|8bit"
_DETAIL = r"dynamic|static|block|channel|marlin|modelopt|quantized|g\d+"
_QUANTIZED = re.compile(rf"(?:[-_.](?:{_FORMAT}|{_DETAIL}))+", re.I)
_NAMED = re.compile(rf"[-_.](?:{_FORMAT})(?=[-_.]|$)", re.I)
_HUB_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")
_BASE = re.compile(r"^base_model:[ \t]*(\S*)[ \t]*\n((?:[ \t]*-[ \t]*\S+[ \t]*\n)*)", re.M)
_CARD_BYTES = 64 << 10


def prequantized(source: str, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Iterator[tuple[str, Checkpoint]]:
    """(folder or hub id, headers) of each, by name: those beside a folder, those of the hub cache for a hub id. Whole ones only.

    source: the model's folder or hub id.
    checkpoint: its headers.
    environ: of the engine, which says where the cache is.
    """
    if checkpoint.quantization is not None:
        return
    for name, folder in _beside(source) if source.startswith("/") else _cached(source, environ):
        try:
            candidate = read_bounded(read_checkpoint, str(folder))
        except CheckpointError:
            continue  # nothing that could be served, so nothing to offer
        if candidate.quantization is not None and _comparable(candidate) == _comparable(checkpoint):
            yield name, candidate


def is_quantized_name(name: str, of: str) -> bool:
    """Whether `name` is the name `of` with the words of a quantization behind it."""
    if not name.lower().startswith(of.lower()):
        return False
    rest = name[len(of) :]
    return _QUANTIZED.fullmatch(rest) is not None and _NAMED.search(rest) is not None


def _comparable(checkpoint: Checkpoint) -> Shape:
    """Its shape without what a quantizer may have written anew."""
    return replace(shape_of(checkpoint.config), dtype="bfloat16")


def _beside(source: str) -> Iterator[tuple[str, Path]]:
    folder = Path(source)
    try:
        others = sorted(other for other in folder.parent.iterdir() if is_quantized_name(other.name, folder.name) and other.is_dir())
    except OSError:
        return
    yield from ((str(other), other) for other in others)


def _cached(hub_id: str, environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    owner, _, name = hub_id.rpartition("/")
    try:
        folders = sorted(hub_cache(environ).iterdir())
    except OSError:
        return
    for folder in folders:
        match = _HUB_FOLDER.fullmatch(folder.name)
        if match is None or not is_quantized_name(match["name"], name):
            continue
        other = f"{match['owner']}/{match['name']}"
        snapshot = snapshot_of(other, None, environ)
        if snapshot is not None and (match["owner"] == owner or hub_id in _bases(snapshot)):
            yield other, snapshot


def _bases(snapshot: Path) -> list[str]:
    """The base models that a model card names in its front matter (the hub's documentation, "Model Cards", base_model)."""
    try:
        with (snapshot / "README.md").open("rb") as file:
            card = file.read(_CARD_BYTES).decode(errors="replace").replace("\r\n", "\n")
    except OSError:
        return []
    front = card.removeprefix("---\n").partition("\n---")[0] + "\n" if card.startswith("---\n") else ""
    match = _BASE.search(front)
    if match is None:
        return []
    listed = [line.strip().lstrip("-") for line in match[2].splitlines()]
    return [name.strip().strip("'\"") for name in (match[1], *listed) if name.strip()]
