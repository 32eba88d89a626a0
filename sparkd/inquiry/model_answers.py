"""Owns the answers of the installed vLLM about models: asked in a child of its Python environment, and kept on disk. Never imports vLLM.

A question is a model's configuration, its split, the engine's flags and variables, and the platform. workers.vllm.ask.model_answer says
the JSON of the answer. `kept_answers` reads the disk only, in milliseconds; `ask` starts a child for answers that are not on disk, which
takes as long as vLLM's import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import workers
from sparkd.checkpoint import MODELOPT, Checkpoint
from sparkd.checkpoint.tensors import TensorRef
from sparkd.errors import EngineError, StateError
from sparkd.inquiry import parser_answers
from sparkd.inquiry.parser_answers import neighbours, put
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.translate import release_of, speculative_config, translated, without_any
from workers.host import regular_file
from workers.host.interpreter import inherited_environment
from workers.host.runtime import cpu_abilities
from workers.vllm.ask.model_question import FILES, conversation

OWN = "own"
SPARK = "cuda:12.1"
# The time limit of one question, after the child has imported vLLM.
QUESTION_S = 120.0
MEMORY_BYTES = 8 * 2**30
# Limit of an answer's file. The largest one so far has 200 kB.
MOST_FILE_BYTES = 16 << 20
# The weights file of a model that has no folder on this machine.
WEIGHTS = "model.safetensors"
# The name by which vLLM recognizes Mistral's own format.
MISTRAL_WEIGHTS = "consolidated.safetensors"
# Only variables with this prefix change how vLLM builds a model.
_VARIABLES = "VLLM_"
# Flags of the front end: none of them changes a model, some are secrets, and the names of a served model differ from start to start.
_FRONT_END = frozenset({
    "api-key", "hf-token", "served-model-name", "host", "port", "uds", "root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs",
    "chat-template", "tool-call-parser", "reasoning-parser", "tool-parser-plugin", "response-role", "middleware", "allowed-origins",
    "uvicorn-log-level", "max-log-len", "otlp-traces-endpoint", "lora-modules", "tensor-parallel-size", "tp", "pipeline-parallel-size",
    "pp", "model", "tokenizer", "distributed-executor-backend", "nnodes", "node-rank", "master-addr", "master-port",
    "data-parallel-address", "download-dir", "generation-config",
})  # fmt: skip
_PROGRAMS = tuple(
    Path(workers.__file__).parent / "vllm" / "ask" / name for name in ("model_answer.py", "meta_model.py", "cuda_stand_in.py")
)


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A question about a model. folder: the checkpoint's folder. files: without a folder, the texts of FILES by name; tensors: the headers
    of its weights, which sparkd's load format and some quantization methods read. args, env: the engine's flags and variables at its start.
    draft: the headers of a draft that is not on this disk, whose model is DRAFT in args. platform: OWN for the runtime's own, SPARK for a
    Spark's GPU, which a runtime without CUDA imitates."""

    folder: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: Collection[TensorRef] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    platform: str = OWN
    draft: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class ModelRefusal:
    """The step at which vLLM failed: `arguments`, `config`, `model`, `cache` (the layers' KV cache), `sizes` (bytes of requests in it),
    `deadline`, `memory` or `died`. certain: vLLM refuses to serve this model; otherwise this machine may only be unable to build it, and
    nothing is known about the model."""

    step: str
    type: str
    message: str
    certain: bool


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer on one rank. token_bytes: bytes of each token, up to `window` or `chunk` tokens where one is set. state_bytes:
    bytes of a request of any length; page_bytes: the same with padding. spec: vLLM's class."""

    name: str
    spec: str
    block: int
    page_bytes: int
    token_bytes: float = 0.0
    state_bytes: int = 0
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of one rank. purpose: `model` or `draft`. dtype: torch's name."""

    purpose: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage, as each of its tensor-parallel ranks has it. block_bytes: bytes of a block of the pool in all its layers, 0 where
    unknown. requests: (tokens, bytes of one request of that length), the longest request last."""

    layers: tuple[LayerCache, ...]
    parameters: tuple[Tensor, ...]
    parameter_bytes: int
    buffer_bytes: int
    block_bytes: int = 0
    requests: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """vLLM's answer about a model. platform: `cpu` or `cuda:12.1`; stand_in: whether the child imitated that platform. facts: the other
    fields of workers.vllm.ask.model_answer, up to the step that failed (`max_model_len`, `cache_dtype`, `quantization`, `layers`, ..).
    groups: the groups of vLLM's block pool, as JSON."""

    vllm: str
    platform: str
    stand_in: bool
    seconds: float
    refusal: ModelRefusal | None
    stages: tuple[Stage, ...]
    facts: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Away:
    """A runtime that only another node has, which is not asked. vllm: its version; packages: a digest of all its distributions."""

    node: str
    vllm: str
    packages: str


@dataclass(frozen=True, slots=True)
class InquiryRuntime:
    """The runtime that is asked. interpreter: the engine's Python, None for sparkd's own. folders: they keep answers, see `places`. away:
    set for a runtime of another node."""

    interpreter: Path | None
    folders: Sequence[Path]
    away: Away | None = None

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.interpreter is None else self.interpreter

    @property
    def place(self) -> str:
        """The runtime's name for a message."""
        return str(self.python) if self.away is None else f"{self.python} on {self.away.node}"

    @property
    def version(self) -> str | None:
        """The version of the runtime's vLLM; None where it has none or the version is unknown."""
        if self.away is None:
            return full_version_in(self.interpreter)
        return self.away.vllm if release_of(self.away.vllm) is not None else None

    @property
    def neighbours(self) -> Iterable[str]:
        """The packages in the runtime's environment."""
        return neighbours(self.python) if self.away is None else ("away", self.away.packages)


def places(state_dir: Path) -> list[Path]:
    """The folders that keep answers: the daemon's where it exists, and the user's own."""
    return [folder.with_name("vllm-answers") for folder in parser_answers.places(state_dir)]


def kept_answers(questions: Sequence[ModelQuestion], runtime: InquiryRuntime) -> list[ModelAnswer | None]:
    """The answers on disk, one for each question; None where there is none or its file is damaged."""
    version = runtime.version
    if version is None:
        return [None for _ in questions]
    keys = _Keys(runtime, version)
    return [_on_disk(keys.of(question), runtime) for question in questions]


def kept_here(questions: Sequence[ModelQuestion], runtime: InquiryRuntime) -> list[ModelAnswer | None]:
    """Like `kept_answers`. Answers for the runtime's own platform count too: a plan for this node asks that way."""
    answers = kept_answers([*questions, *(replace(question, platform=OWN) for question in questions)], runtime)
    return [answer or own for answer, own in zip(answers[: len(questions)], answers[len(questions) :], strict=True)]


def ask(
    questions: Sequence[ModelQuestion],
    runtime: InquiryRuntime,
    *,
    progress: Callable[[str, int], None] = lambda step, question: None,
    cancel: threading.Event | None = None,
) -> list[ModelAnswer | None]:
    """An answer for each question in turn, from the disk where it is kept; None for a question that was cancelled before. Blocks.

    progress: called with `importing`, `ready` or `asking` and the question's number, -1 without a question. Raises EngineError where there
    is no vLLM, or it cannot be asked at all.
    """
    version = runtime.version
    if version is None:
        raise EngineError(f"The environment of {runtime.place} has no vLLM: set engine.runtime to the Python that has it.")
    cancel = cancel or threading.Event()
    hashes = _Keys(runtime, version)
    keys = [hashes.of(question) for question in questions]
    answers: list[ModelAnswer | None] = [_on_disk(key, runtime) for key in keys]
    for platform in sorted({question.platform for question in questions}):
        numbers = [number for number, question in enumerate(questions) if answers[number] is None and question.platform == platform]
        asking = [questions[number] for number in numbers]
        for place, raw in _run(asking, platform, runtime, version, _numbered(progress, numbers), cancel):
            try:
                answers[numbers[place]] = _answer(raw)
            except (ValueError, TypeError, KeyError, AttributeError):
                raise EngineError(f"The vLLM of {runtime.place} gave an unreadable answer about a model.") from None
            _keep(keys[numbers[place]], raw, runtime)
    return answers


def _numbered(progress: Callable[[str, int], None], numbers: Sequence[int]) -> Callable[[str, int], None]:
    """`progress` for a child that has only the questions with these numbers."""
    return lambda step, place: progress(step, numbers[place] if place >= 0 else -1)


def _run(
    questions: Sequence[ModelQuestion],
    platform: str,
    runtime: InquiryRuntime,
    version: str,
    progress: Callable[[str, int], None],
    cancel: threading.Event,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, answer) for each question, from one child. Raises EngineError where the child ends before the last answer."""
    if not questions:
        return
    request = {
        "platform": platform,
        "seconds": QUESTION_S,
        "memory_bytes": MEMORY_BYTES,
        "questions": [_wire(question, runtime, version) for question in questions],
    }
    done, tail = 0, ""
    for line in conversation(runtime.python, request, cancel):
        if "failed" in line:
            raise EngineError(f"The vLLM of {runtime.place} cannot be asked about models: {line['failed']}")
        if "progress" in line:
            progress(line["progress"], line.get("question", -1))
        elif "answer" in line:
            done += 1
            yield line["question"], line["answer"]
        tail = line.get("ended", tail)
    if done < len(questions) and not cancel.is_set():
        raise EngineError(f"The vLLM of {runtime.place} gave no answer about a model: {tail or 'it ended without a message'}")


def _wire(question: ModelQuestion, runtime: InquiryRuntime, version: str) -> dict[str, Any]:
    """The question in the JSON of workers.vllm.ask.model_question."""
    args, env = _engine(question, runtime, version)
    wire: dict[str, Any] = {
        "folder": None if question.folder is None else str(question.folder),
        "args": args,
        "env": env,
        "tensor_parallel": question.tensor_parallel,
        "pipeline_parallel": question.pipeline_parallel,
    }
    if wire["folder"] is None:
        wire["files"] = {name: text.decode(errors="surrogateescape") for name, text in question.files.items()}
        wire["headers"] = _headers(question.tensors, WEIGHTS if "config.json" in question.files else MISTRAL_WEIGHTS)
    if question.draft is not None:
        wire["draft"] = _draft(files_of(question.draft), question.draft.tensors.values())
    return wire


def files_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The configuration files, by name, that vLLM reads for a model that is not on this machine."""
    source = checkpoint.quantization
    apart = {MODELOPT: source.modelopt_file()} if source is not None and source.apart else {}
    return {name: json.dumps(content).encode() for name, content in {checkpoint.config_file: checkpoint.config, **apart}.items()}


def _draft(files: Mapping[str, bytes], tensors: Iterable[TensorRef]) -> dict[str, Any]:
    texts = {name: text.decode(errors="surrogateescape") for name, text in files.items()}
    return {"files": texts, "headers": _headers(tensors, WEIGHTS)}


def _draft_folder(args: Sequence[str]) -> Path | None:
    """The folder of the draft that these arguments name; None where it is no folder of this machine."""
    folder = Path(str((speculative_config(args) or {}).get("model", "")))
    return folder if folder.is_absolute() and folder.is_dir() else None


def _headers(tensors: Iterable[TensorRef], file: str) -> dict[str, dict[str, Any]]:
    """The header of one file of this name that holds all these tensors; empty without any."""
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    return {file: header} if header else {}


def _texts_in(folder: Path) -> dict[str, bytes]:
    """The texts of the FILES that exist in the folder, by name."""
    texts = {name: _text(folder / name) for name in FILES}
    return {name: text for name, text in texts.items() if text is not None}


def _engine(question: ModelQuestion, runtime: InquiryRuntime, version: str) -> tuple[list[str], dict[str, str]]:
    """(flags, variables) that matter to the answer, in the spelling of that release. The variables include those that an engine on this
    node would inherit."""
    spelled = translated(question.args, question.env, release_of(version))
    args = without_any(spelled.args, _FRONT_END)
    env = inherited_environment({**(os.environ if runtime.away is None else {}), **spelled.env})
    return args, {name: value for name, value in env.items() if name.startswith(_VARIABLES)}


class _Keys:
    """The file names of answers. The questions of one plan differ in split and format; their common part, up to 20 MB, is hashed once."""

    def __init__(self, runtime: InquiryRuntime, version: str) -> None:
        self._runtime, self._version = runtime, version
        self._digests: dict[Hashable, bytes] = {}

    def of(self, question: ModelQuestion) -> str:
        runtime = self._runtime
        args, env = _engine(question, runtime, self._version)
        parts = [
            str(runtime.python),
            self._version,
            *runtime.neighbours,
            question.platform,
            # Several machines may share a folder of answers. For another node the digest of its packages includes its CPU.
            cpu_abilities() if question.platform == OWN and runtime.away is None else "",
            f"{question.tensor_parallel} {question.pipeline_parallel}",
            json.dumps([args, sorted(env.items())]),
        ]
        digest = hashlib.sha256("\0".join(parts).encode())
        digest.update(self._once(_PROGRAMS, _programs))
        digest.update(self._once(id(question.tensors), lambda: _tensors(question.tensors)))
        if (draft := question.draft) is not None:
            digest.update(self._once(id(draft), lambda: _files(files_of(draft)) + _tensors(draft.tensors.values())))
        for folder in (question.folder, _draft_folder(args)):
            if folder is not None and folder.is_absolute():
                digest.update(self._once(folder, partial(_folder, folder)))
        if question.folder is None:
            digest.update(self._once(id(question.files), lambda: _files(question.files)))
        return digest.hexdigest()[:32]

    def _once(self, what: Hashable, digest: Callable[[], bytes]) -> bytes:
        """what: a value, or the id of an object that the caller's questions hold."""
        if what not in self._digests:
            self._digests[what] = digest()
        return self._digests[what]


def _programs() -> bytes:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in _PROGRAMS)).digest()


def _tensors(tensors: Iterable[TensorRef]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"\0{tensor.name} {tensor.dtype} {tensor.shape}".encode())
    return digest.digest()


def _folder(folder: Path) -> bytes:
    beside = sorted([*folder.glob("*.safetensors"), *folder.glob("*.py")])
    return hashlib.sha256("\0".join(f"{path.name} {_size(path)}" for path in beside).encode()).digest() + _files(_texts_in(folder))


def _files(files: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for name in FILES:
        if (text := files.get(name)) is not None:
            digest.update(f"\0{name}\0{len(text)}\0".encode())
            digest.update(text)
    return digest.digest()


def _size(path: Path) -> int | None:
    """The size of a file; None for a broken link."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _text(path: Path) -> bytes | None:
    try:
        return regular_file.read(path)
    except OSError:
        return None


def _on_disk(key: str, runtime: InquiryRuntime) -> ModelAnswer | None:
    return next(filter(None, (_read(folder / f"{key}.json") for folder in runtime.folders)), None)


def _read(path: Path) -> ModelAnswer | None:
    """The answer in a file; None for a missing or invalid one. Another user may write to the folder, and root reads the daemon's."""
    try:
        return _answer(json.loads(regular_file.read(path, MOST_FILE_BYTES)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _keep(key: str, raw: Mapping[str, Any], runtime: InquiryRuntime) -> None:
    """Keep an answer on disk, except one that a limit of this machine ended, because the next try may succeed."""
    if raw["refusal"] and raw["refusal"]["step"] in ("deadline", "memory", "died"):
        return
    for folder in runtime.folders:
        with contextlib.suppress(OSError, StateError):
            put(folder / f"{key}.json", json.dumps(raw, separators=(",", ":")))
            break


def _answer(raw: Mapping[str, Any]) -> ModelAnswer:
    """The answer in this JSON. Raises KeyError, TypeError or AttributeError for JSON that is no answer."""
    pool = raw["cache"] or {"groups": [], "stages": [{}] * len(raw["stages"])}
    fields = {"vllm", "platform", "stand_in", "seconds", "refusal", "stages", "cache"}
    return ModelAnswer(
        vllm=raw["vllm"],
        platform=raw["platform"],
        stand_in=raw["stand_in"],
        seconds=raw["seconds"],
        refusal=ModelRefusal(**raw["refusal"]) if raw["refusal"] else None,
        stages=tuple(_stage(stage, own) for stage, own in zip(raw["stages"], pool["stages"], strict=True)),
        facts={name: value for name, value in raw.items() if name not in fields},
        groups=tuple(_group(group) for group in pool["groups"]),
    )


def _stage(raw: Mapping[str, Any], pool: Mapping[str, Any]) -> Stage:
    return Stage(
        layers=tuple(_layer(layer) for layer in raw["layers"]),
        parameters=tuple(_tensor(row) for row in raw["parameters"]),
        parameter_bytes=_whole(raw["parameter_bytes"]),
        buffer_bytes=_whole(raw["buffer_bytes"]),
        block_bytes=_whole(pool.get("block_bytes", 0)),
        requests=tuple((_whole(tokens), _whole(size)) for tokens, size in pool.get("requests", ())),
    )


def _group(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, "block": _whole(raw["block"]), "layers": [str(name) for name in raw["layers"]]}


def _layer(raw: Mapping[str, Any]) -> LayerCache:
    sizes = {key: _whole(raw[key]) for key in ("page_bytes", "state_bytes", "window", "chunk") if raw.get(key) is not None}
    return LayerCache(**{**raw, **sizes})


def _whole(value: Any) -> int:
    """A size in bytes. Raises TypeError for a value that is none."""
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"{type(value).__name__} is not a size")
    return value


def _tensor(row: Sequence[Any]) -> Tensor:
    purpose, name, shape, dtype = row
    return Tensor(purpose, name, tuple(shape), dtype)
