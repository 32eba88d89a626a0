"""A checkpoint's weights, as config.json and the safetensors headers describe them.

Only the standard library is needed: the loader imports this inside Python environments that are not sparkd's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from sparkd.checkpoint.classification import CLASSES, VISION_PARTS, tensor_class, towers_of
from sparkd.checkpoint.foreign_json import MAX_JSON_BYTES, object_of, shown
from sparkd.checkpoint.header import AGAIN, Shard, open_regular, read_header
from sparkd.checkpoint.quantization import SourceQuantization, source_quantization
from sparkd.checkpoint.shape import text_config
from sparkd.checkpoint.tensors import TensorRef
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted, CheckpointUnread

__all__ = [
    "CLASSES", "VISION_PARTS", "Checkpoint", "Shard", "SourceQuantization", "TensorRef", "read_checkpoint", "tensor_class", "text_config",
    "towers_of",
]  # fmt: skip

CONFIG = "config.json"
# The file of Mistral's own format that stands for config.json.
PARAMS = "params.json"
MODELOPT = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
# The largest published models have 280,000.
MAX_TENSORS = 400_000
# In the order in which vLLM looks for them; it loads the first kind that exists (vllm/model_executor/model_loader/default_loader.py,
# _prepare_weights).
FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
INDEX_END = ".index.json"
COMPLETE = "Download the model again; complete files are kept"
# Files that a trainer leaves beside the weights (weight_utils.py, filter_files_not_needed_for_inference).
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.[a-z]+)")
# One file's name may promise 99,999 files, so the list of missing files ends after this many.
MAX_LACKING = 1_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's weights.

    tensors: by name, in the order of the shards, then of the offsets.
    config: the content of config_file.
    config_sha256: of that file's bytes.
    """

    folder: str
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorRef]
    quantization: SourceQuantization | None
    config_file: str = CONFIG
    config_sha256: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Source(Protocol):
    """A folder or hub repository with a checkpoint.

    place: the prefix of its paths.
    names: of its files.
    """

    place: str
    names: Collection[str]

    def path(self, name: str) -> str:
        return f"{self.place}/{name}"

    def content(self, name: str) -> bytes:
        """The content of a file of at most MAX_JSON_BYTES."""

    def headers(self, files: Sequence[str]) -> Iterable[tuple[Shard, list[TensorRef]]]:
        """Each file's shard and tensors, in the order of `files`."""


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """A folder's checkpoint, from its headers alone. Raises CheckpointError, which names file, tensor, reason and cure.

    The files are those that model.safetensors.index.json names, else every *.safetensors (without consolidated*, Mistral's second copy,
    where model* is there too). The snapshot folders of a hub cache, whose files are links, work.
    """
    return checkpoint_of(Folder(folder))


def is_weights(name: str) -> bool:
    """Whether an engine may take a file of this name, which may lie below a folder, for weights."""
    return name.endswith(FORMATS) and os.path.basename(name) not in _NO_WEIGHTS


def lacking_weights(names: Collection[str], content: Callable[[str], bytes]) -> frozenset[str]:
    """The missing weights files: files that an index names, or else the numbers in other files' names imply.

    Only the format that vLLM takes in a folder counts, so an incomplete set of *.bin beside complete safetensors lacks nothing, nor does a
    folder without Mistral's second copy.

    names: the complete files of one folder, and of those below it, from which an engine takes nothing by itself.
    content: reads an index; where it raises CheckpointError or OSError, the numbers count.
    """
    here = [name for name in names if "/" not in name]
    weights = [name for name in here if is_weights(name)]
    kinds = {os.path.splitext(name)[1] for name in weights}
    # Before the first file of a download is complete, only the index shows which files belong to it.
    kind = next((suffix for suffix in FORMATS if suffix in kinds), ".safetensors" if INDEX in here else None)
    if kind is None:
        return frozenset()
    weights = _first_copy([name for name in weights if name.endswith(kind)])
    indexes = _first_copy([name for name in here if name.endswith(f"{kind}{INDEX_END}")], weights)
    indexed = set[str]()
    for name in [INDEX] if INDEX in indexes else indexes:
        try:
            indexed.update(read_index(content(name), name).values())
        except (CheckpointError, OSError):
            continue  # the loader reports the fault of this index
    return frozenset(indexed or _numbered(weights)) - frozenset(names)


def read_index(raw: bytes, path: str) -> dict[str, str]:
    """Tensor -> name of its file. Raises CheckpointError.

    A path that may lead out of the folder is refused, so that an index cannot reach other files.
    """
    cure = "Download the index again"
    weight_map = object_of(raw, path, cure).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("it has no weight_map that names a tensor", file=path, cure=cure)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or file in ("", ".", "..") or "/" in file:
            problem = f"its weight_map names {shown(file)}, which is not the name of a file in this folder"
            raise CheckpointError(problem, file=path, tensor=shown(name), cure=cure)
    return weight_map


def checkpoint_of(source: Source) -> Checkpoint:
    """The checkpoint of a source. Raises CheckpointError."""
    config_file = next((name for name in (CONFIG, PARAMS) if name in source.names), None)
    if config_file is None:
        raise _without_config(source)
    raw = source.content(config_file)
    config = object_of(raw, source.path(config_file), AGAIN)
    index = read_index(source.content(INDEX), source.path(INDEX)) if INDEX in source.names else {}
    shards: list[Shard] = []
    tensors: dict[str, TensorRef] = {}
    for shard, its_tensors in source.headers(sorted(set(index.values())) or _weight_files(source)):
        shards.append(shard)
        for tensor in its_tensors:
            if tensor.name in tensors:
                tensor = _counting(tensor, tensors.pop(tensor.name), index)
            tensors[tensor.name] = tensor
        if len(tensors) > MAX_TENSORS:
            cure = "Check where this model's files come from"
            raise CheckpointError(f"its safetensors files have more than {MAX_TENSORS} tensors", file=source.place, cure=cure)
    if not tensors:
        raise CheckpointError("its safetensors files hold no tensor", file=source.place, cure=AGAIN.replace("file", "checkpoint"))
    modelopt = object_of(source.content(MODELOPT), source.path(MODELOPT), AGAIN) if MODELOPT in source.names else None
    quantization = source_quantization(config, modelopt, tensors)
    return Checkpoint(source.place, config, tuple(shards), tensors, quantization, config_file, hashlib.sha256(raw).hexdigest())


class Folder(Source):
    """A folder on this machine. Raises CheckpointError where it cannot be listed."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.place = os.path.abspath(os.fspath(folder))
        self.names = _listing(self.place)

    def content(self, name: str) -> bytes:
        path = self.path(name)
        try:
            with open_regular(path) as file:
                raw = file.read() if os.fstat(file.fileno()).st_size <= MAX_JSON_BYTES else None
        except OSError as error:
            raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure=AGAIN) from None
        if raw is None:
            raise CheckpointError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB", file=path, cure=AGAIN)
        return raw

    def headers(self, files: Sequence[str]) -> Iterator[tuple[Shard, list[TensorRef]]]:
        return (read_header(self.path(file)) for file in files)


def _numbered(weights: Collection[str]) -> set[str]:
    """All files of the numbered sets (N-of-M) to which these names belong; where MAX_LACKING or more are missing, the first of them."""
    sets = dict.fromkeys((match[1], match[3], match[4]) for match in map(_NUMBERED.fullmatch, weights) if match)
    names = (f"{name}-{number:05d}-of-{total}{end}" for name, total, end in sets for number in range(1, int(total) + 1))
    return set(islice(names, len(weights) + MAX_LACKING))


def _without_config(source: Source) -> CheckpointError:
    """The error for a folder without config.json, which may hold a format that vLLM reads and sparkd cannot count."""
    reason = f"there is no {CONFIG} in it"
    other = next((name for name in sorted(source.names) if name.endswith(".gguf")), None)
    if other is not None:
        cure = "vLLM may still serve it: set memory_gib in its entry"
        return CheckpointUncounted(f"{reason}, only {shown(other)}, which is not counted", file=source.place, cure=cure)
    return CheckpointIncomplete(reason, file=source.place, cure=COMPLETE)


def _first_copy(names: list[str], beside: Collection[str] = ()) -> list[str]:
    """The names without consolidated*, Mistral's second copy, where model* exists too."""
    if any(name.startswith("model") for name in (*names, *beside)):
        return [name for name in names if not name.startswith("consolidated")]
    return names


def _counting(later: TensorRef, earlier: TensorRef, index: Mapping[str, str]) -> TensorRef:
    """The one of two tensors of a name that counts: the index names its file. Raises CheckpointError where the index names neither's."""
    file = index.get(later.name)
    for tensor in (later, earlier):
        if os.path.basename(tensor.path) == file:
            return tensor
    problem = f"the same tensor is in {os.path.basename(earlier.path)} too, and no index says which one counts"
    raise CheckpointError(problem, file=later.path, tensor=shown(later.name), cure="Remove the leftover file")


def _listing(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (OSError, ValueError) as error:
        reason = f"the folder cannot be read: {getattr(error, 'strerror', None) or error}"
        is_wrong = isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
        kind, cure = (CheckpointError, "Correct the path") if is_wrong else (CheckpointUnread, "Check its owner and mode")
        raise kind(reason, file=shown(folder), cure=cure) from None


def _weight_files(source: Source) -> list[str]:
    """The weights files of a source without an index, in order."""
    files = _first_copy(sorted(name for name in source.names if name.endswith(".safetensors")))
    if lacking := sorted(_numbered(files) - set(source.names)):
        more = f" and {len(lacking) - 1} more files" if len(lacking) > 1 else ""
        raise CheckpointIncomplete(f"{shown(lacking[0])}{more} of its weights are not there", file=source.place, cure=COMPLETE)
    if files:
        return files
    others = sorted({os.path.splitext(name)[1] for name in source.names if is_weights(name)})
    if not others:
        raise CheckpointIncomplete("it holds no weights", file=source.place, cure="Download the model's safetensors files")
    only = ", ".join(f"*{end}" for end in others)
    cure = "Download the model's safetensors files, or convert it to them"
    raise CheckpointUncounted(f"there is no *.safetensors file in it, only {only}", file=source.place, cure=cure)
