"""Asks an installed vLLM about models in a child of its Python environment. Answers are kept on disk.

A question is a model's configuration, its split, the engine's flags and variables, and the platform. `kept_answers` reads the disk only, in
milliseconds; `ask` starts a child for answers that are not on disk, which takes as long as vLLM's import.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import workers
from sparkd.checkpoint import MODELOPT, Checkpoint
from sparkd.checkpoint.tensors import TensorRef
from sparkd.errors import EngineError
from sparkd.vllm.ask.answers import OWN, ModelAnswer, ModelQuestion, answer_of
from sparkd.vllm.ask.cache import environment, keep, kept, neighbours
from sparkd.vllm.flags import speculative_config, without
from sparkd.vllm.installed import full_version_in, release_of
from workers.host import regular_file
from workers.host.interpreter import inherited_environment
from workers.vllm.ask.model_question import FILES, conversation

# The time limit of one question, after the child has imported vLLM.
QUESTION_S = 120.0
MEMORY_BYTES = 8 * 2**30
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
    "uvicorn-log-level", "max-log-len", "otlp-traces-endpoint", "lora-modules", "tensor-parallel-size", "pipeline-parallel-size",
    "model", "tokenizer", "distributed-executor-backend", "nnodes", "node-rank", "master-addr", "master-port",
    "data-parallel-address", "download-dir", "generation-config",
})  # fmt: skip
_PROGRAMS = tuple(
    Path(workers.__file__).parent / "vllm" / "ask" / name for name in ("model_answer.py", "meta_model.py", "cuda_stand_in.py")
)


@dataclass(frozen=True, slots=True)
class Away:
    """A runtime that only another node has, which is not asked. vllm: its version; packages: a digest of all its distributions."""

    node: str
    vllm: str
    packages: str


@dataclass(frozen=True, slots=True)
class InquiryRuntime:
    """The runtime that is asked.

    interpreter: the engine's Python, None for sparkd's own.
    folders: they keep answers, see `places`.
    away: set for a runtime of another node.
    """

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
    memory_bytes: int = MEMORY_BYTES,
) -> list[ModelAnswer | None]:
    """An answer for each question in turn, from the disk where it is kept; None for a question that was cancelled before. Blocks.

    memory_bytes: the most that the process of a question may take.
    progress: called with `importing`, `ready` or `asking` and the question's number among those of its platform that are not kept, -1
        without a question.

    Raises EngineError where there is no vLLM, or it cannot be asked at all.
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
        for place, raw in _run(asking, platform, runtime, progress, cancel, memory_bytes):
            answers[numbers[place]] = answer_of(raw)
            if _is_lasting(raw):
                keep(keys[numbers[place]], raw, runtime.folders)
    return answers


def _run(
    questions: Sequence[ModelQuestion],
    platform: str,
    runtime: InquiryRuntime,
    progress: Callable[[str, int], None],
    cancel: threading.Event,
    memory_bytes: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, answer) for each question, from one child. Raises EngineError where the child ends before the last answer."""
    if not questions:
        return
    request = {
        "platform": platform,
        "seconds": QUESTION_S,
        "memory_bytes": memory_bytes,
        "questions": [_wire(question, runtime) for question in questions],
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


def _wire(question: ModelQuestion, runtime: InquiryRuntime) -> dict[str, Any]:
    """The question in the JSON of workers.vllm.ask.model_question."""
    args, env = _engine(question, runtime)
    wire: dict[str, Any] = {
        "folder": None if question.folder is None else str(question.folder),
        "args": args,
        "env": env,
        "tensor_parallel": question.tensor_parallel,
        "pipeline_parallel": question.pipeline_parallel,
    }
    if wire["folder"] is None:
        wire["files"] = _decoded(question.files)
        wire["headers"] = _headers(question.tensors, WEIGHTS if "config.json" in question.files else MISTRAL_WEIGHTS)
    if (draft := question.draft) is not None:
        wire["draft"] = {"files": _decoded(files_of(draft)), "headers": _headers(draft.tensors.values(), WEIGHTS)}
    return wire


def files_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The configuration files, by name, that vLLM reads for a model that is not on this machine."""
    source = checkpoint.quantization
    apart = {MODELOPT: source.modelopt_file()} if source is not None and source.apart else {}
    return {name: json.dumps(content).encode() for name, content in {checkpoint.config_file: checkpoint.config, **apart}.items()}


def _decoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: text.decode(errors="surrogateescape") for name, text in files.items()}


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


def _engine(question: ModelQuestion, runtime: InquiryRuntime) -> tuple[list[str], dict[str, str]]:
    """(flags, variables) that matter to the answer. The variables include those that an engine on this node would inherit."""
    args = without(question.args, *_FRONT_END)
    env = inherited_environment({**(os.environ if runtime.away is None else {}), **question.env})
    return args, {name: value for name, value in env.items() if name.startswith(_VARIABLES)}


class _Keys:
    """Digests of questions. The questions of one plan differ in split and format; their common part, up to 20 MB, is read once."""

    def __init__(self, runtime: InquiryRuntime, version: str) -> None:
        self._runtime = runtime
        self._environment = environment(version, runtime.neighbours, _PROGRAMS)
        self._digests: dict[Hashable, bytes] = {}

    def of(self, question: ModelQuestion) -> str:
        args, env = _engine(question, self._runtime)
        split = [question.tensor_parallel, question.pipeline_parallel]
        digest = hashlib.sha256(json.dumps([self._environment, question.platform, split, args, sorted(env.items())]).encode())
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


def _tensors(tensors: Iterable[TensorRef]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"\0{tensor.name} {tensor.dtype} {tensor.shape}".encode())
    return digest.digest()


def _folder(folder: Path) -> bytes:
    beside = sorted([*folder.glob("*.safetensors"), *folder.glob("*.py")])
    texts = {name: text for name in FILES if (text := _text(folder / name)) is not None}
    return hashlib.sha256("\0".join(f"{path.name} {_size(path)}" for path in beside).encode()).digest() + _files(texts)


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
    """The kept answer; None for a missing one."""
    raw = kept(key, runtime.folders)
    return None if raw is None else answer_of(raw)


def _is_lasting(raw: Mapping[str, Any]) -> bool:
    """Whether no limit of this machine ended the answer: the next try may succeed."""
    return not raw["refusal"] or raw["refusal"]["step"] not in ("deadline", "memory", "died")
