"""Holds one conversation with workers.vllm.ask.model_answer in an engine's Python, until it ends: its questions' files and its lines."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from sparkd.errors import EngineError
from workers.host.interpreter import PACKAGE_DIR, inherited_environment, module_command
from workers.host.plugin_folder import expose

# Import of vLLM from a cold disk on two slow cores; then each question has its own limit.
IMPORT_S = 180.0
# The files that vLLM and transformers read of a model beside its weights.
FILES = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
)
WEIGHTS = ".safetensors"
# A draft's model in a question's arguments, where its files come with the question.
DRAFT = "draft-of-this-question"
_LOOK_S = 0.2


def conversation(python: Path, request: Mapping[str, Any], cancel: threading.Event) -> Iterator[dict[str, Any]]:
    """The program's answers, object by object, until it ends, is cancelled or is silent for too long; then nothing of it is left. Blocks.

    request: as workers.vllm.ask.model_answer reads it. A question without a folder (None) has `files` instead, texts by the names of FILES,
    and `headers`, of safetensors files by their names; a `draft` has both, and is DRAFT in the arguments. The last object is {"ended": the
    last line that it wrote on stderr}. Raises EngineError for a Python that cannot be run, OSError where the files cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="sparkd-ask-") as name:
        folder = Path(name)
        questions = list(request["questions"])
        asked = [_placed(question, folder / str(number)) for number, question in enumerate(questions)]
        for line in _lines(python, folder, {**request, "questions": asked}, cancel):
            answer = line.get("answer")
            if answer and answer["refusal"]:
                place, message = f"{folder}/{line['question']}", answer["refusal"]["message"]
                answer["refusal"]["message"] = message.replace(f"{place}-draft", "its draft").replace(place, "its folder")
            yield line
        tail = _last_line(folder)
    yield {"ended": tail}


def told(python: Path, module: str, request: Mapping[str, Any], cancel: threading.Event, silence_s: float) -> Iterator[dict[str, Any]]:
    """The same with another program of sparkd's, which reads one request from stdin. silence_s: the longest time between two answers."""
    with tempfile.TemporaryDirectory(prefix="sparkd-ask-") as name:
        yield from _lines(python, Path(name), request, cancel, module, silence_s)
        tail = _last_line(Path(name))
    yield {"ended": tail}


def _placed(question: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The question as the program reads it, with its files in that folder where it has none of its own."""
    placed = {key: value for key, value in question.items() if key not in ("files", "headers", "draft")}
    if question.get("draft") is not None:
        beside = folder.with_name(f"{folder.name}-draft")
        _write(beside, question["draft"])
        placed["args"] = [arg.replace(DRAFT, str(beside)) for arg in question["args"]]
    if question["folder"] is not None:
        return placed
    _write(folder, question)
    return placed | {"folder": str(folder)}


def _write(folder: Path, model: Mapping[str, Any]) -> None:
    """model: its `files` and `headers`."""
    folder.mkdir()
    for name, text in model["files"].items():
        if name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, errors="surrogateescape")
    for name, header in model["headers"].items():
        if os.path.basename(name) == name and name.endswith(WEIGHTS):
            _write_header(folder / name, header)


def _write_header(path: Path, header: Mapping[str, Mapping[str, Any]]) -> None:
    """A safetensors file whose bytes are holes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _last_line(folder: Path) -> str:
    """The child's last line on stderr."""
    return (folder / "stderr").read_bytes()[-300:].decode(errors="replace").strip().rpartition("\n")[2]


def _lines(
    python: Path,
    folder: Path,
    question: Mapping[str, Any],
    cancel: threading.Event,
    module: str = "workers.vllm.ask.model_answer",
    silence_s: float = IMPORT_S,
) -> Iterator[dict[str, Any]]:
    """folder: of this conversation alone; the question and the child's stderr are kept there until it ends."""
    (folder / "request").write_text(json.dumps(question))
    (folder / "plugin").mkdir()
    expose(folder / "plugin")
    packages = PACKAGE_DIR if python == Path(sys.executable) else str(folder / "plugin")
    # A question brings its own.
    environment = {name: value for name, value in inherited_environment(os.environ).items() if not name.startswith("VLLM_")}
    environment["PYTHONPATH"] = packages
    with open(folder / "request", "rb") as request, open(folder / "stderr", "wb") as stderr:
        try:
            child = subprocess.Popen(
                module_command(str(python), module),
                stdin=request, stdout=subprocess.PIPE, stderr=stderr, cwd="/", env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EngineError(f"The runtime {python} cannot be run: {error.strerror or error}.") from error
    stdout = cast(IO[bytes], child.stdout)
    with child, selectors.DefaultSelector() as selector:
        try:
            selector.register(stdout, selectors.EVENT_READ)
            rest = b""
            silent_until = time.monotonic() + silence_s
            while not cancel.is_set() and time.monotonic() < silent_until:
                if not selector.select(_LOOK_S):
                    continue
                part = os.read(stdout.fileno(), 1 << 20)
                if not part:
                    return
                silent_until = time.monotonic() + silence_s
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
