"""Questions about models to the vLLM beside this Python, which it answers without a weight and without a GPU. Never loads a model.

`python -P -m workers.vllm.ask.model_answer` with `workers` to import; sparkd/vllm/ask/model.py runs it. stdin gets one JSON object:

    {"platform": "own" or "cuda:12.1",  # own: the runtime's; else what stands in for such a GPU where the runtime has no CUDA
     "seconds": 60.0,                   # for each question
     "memory_bytes": 8589934592,        # resident in the process of one question
     "questions": [{"folder": "/path",  # with config.json and whatever else vLLM reads of a model beside its weights
                    "args": [],         # flags of `vllm serve`, without the model and its splits; those of its front end are passed over
                    "env": {},          # variables of the engine
                    "tensor_parallel": 1, "pipeline_parallel": 1}]}

stdout gets JSON objects, one a line: {"progress": "importing"}, {"progress": "ready", "seconds": 9.1}, and for each question in turn
{"progress": "asking", "question": 0} and {"question": 0, "answer": ANSWER}; {"failed": SENTENCE} where there can be none at all. ANSWER:

    {"vllm": "0.32.0+cpu",
     "platform": "cpu", "cuda:12.1", ..., "stand_in": false,
     "seconds": 1.2,
     "refusal": null or {"step": "arguments", "config", "model", "cache", "sizes", "deadline", "memory" or "died",
                         "type": the exception's class, "message": vLLM's sentence,
                         "certain": true where it is vLLM's own word on this model, false where this process may merely be unable},
     # as far as it came:
     "max_model_len": tokens, "cache_dtype": "auto" or as vLLM resolved it, "quantization": null or the method's name,
     "layers", "hidden", "heads": of the language model, heads of its queries, "vocabulary": entries,
     "max_num_seqs": requests, "max_num_batched_tokens": tokens,
     "stages": [STAGE for each rank of the pipeline],
     "cache": null where this release cannot say, or {"groups": [{"spec", "block", "page_bytes", "layers": [names]}],
               "stages": [{"block_bytes": of one block of the pool over all layers of a rank,
                           "requests": [[tokens, bytes that one request of so many takes of a rank], ...]}]}}

STAGE, of one rank (tensor rank 0; the others are like it):

    {"rank": in the pipeline,
     "layers": [{"name", "spec": vLLM's class of it, "block": tokens, "page_bytes": of a block,
                 # what grows with each token:
                 "token_bytes": page_bytes / block, "window", "chunk"
                 # or a state of fixed size for each request, page_bytes with its padding:
                 "state_bytes"}],  # none of a layer that reads another's cache
     "parameters": [["model" or "draft", name, shape, dtype], ...],
     "parameter_bytes": where vLLM quantizes while it loads, once it has, "buffer_bytes"}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from workers.host import processes
from workers.vllm.symbols import release, symbol

SECONDS = 60.0
MEMORY_BYTES = 8 * 2**30
_LOOK_S = 0.1
# Nothing is fetched, counted or logged; no thread of torch lives through a fork.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other way to count GPUs does not outlive a fork
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
}


def main() -> None:
    # vLLM greets on stdout, and whatever it starts would too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asker = os.getppid()
    # End with the process that asks: if it is killed, an import or a question would go on for minutes.
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    request = json.load(sys.stdin)
    os.environ.update(_ENVIRONMENT)
    try:
        about = _import(str(request.get("platform", "own")), out)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an import of vLLM raises, nothing can be answered
        _write(out, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"})
        return
    seconds, memory = float(request.get("seconds", SECONDS)), int(request.get("memory_bytes", MEMORY_BYTES))
    for number, question in enumerate(request["questions"]):
        if os.getppid() != asker:
            return
        _write(out, {"progress": "asking", "question": number})
        began = time.monotonic()
        answer = _answer(question, seconds, memory)
        _write(out, {"question": number, "answer": {**about, "seconds": round(time.monotonic() - began, 3), **answer}})


def _import(platform: str, out: TextIO) -> dict[str, Any]:
    """vLLM's release and the platform that it takes itself to be on, once its modules are in memory."""
    _write(out, {"progress": "importing"})
    began = time.monotonic()
    stands_in = False
    if platform != "own":
        from workers.vllm.ask.cuda_stand_in import stand_in

        kind, _, number = platform.partition(":")
        if kind != "cuda":
            raise ValueError(f"unknown platform {platform}: use `own` or `cuda:MAJOR.MINOR`")
        major, minor = number.split(".")
        stands_in = stand_in((int(major), int(minor)))
    import torch

    current_platform = symbol("current_platform")
    load_general_plugins = symbol("load_general_plugins")

    from workers.vllm.ask import meta_model

    torch.set_num_threads(1)
    load_general_plugins()
    meta_model.prepare()
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    name = f"cuda:{capability.major}.{capability.minor}" if capability is not None else str(current_platform.device_name)
    _write(out, {"progress": "ready", "seconds": round(time.monotonic() - began, 3)})
    return {"vllm": release(), "platform": name, "stand_in": stands_in}


def _answer(question: Mapping[str, Any], seconds: float, memory: int) -> dict[str, Any]:
    """By a child of its own, which ends when its time or its memory is used up."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _describe(question, writing)
    os.close(writing)
    try:
        text, over = _read(reading, child, seconds, memory)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if over is None:
        with contextlib.suppress(ValueError):
            answer: dict[str, Any] = json.loads(text)
            return answer
        over = {"step": "died", "type": "Died", "message": f"the process that built it ended with status {status}"}
    return {"refusal": {**over, "certain": False}, "stages": [], "cache": None}


def _read(pipe: int, child: int, seconds: float, memory: int) -> tuple[bytes, dict[str, str] | None]:
    """(everything that it wrote, or which limit it went over)."""
    end = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return b"", {"step": "deadline", "type": "TimeoutError", "message": f"no answer within {seconds:g} s"}
        if select.select([pipe], [], [], min(left, _LOOK_S))[0]:
            part = os.read(pipe, 1 << 20)
            if not part:
                return b"".join(parts), None
            parts.append(part)
        elif processes.anonymous_bytes(child) > memory:
            return b"", {"step": "memory", "type": "MemoryError", "message": f"it took more than {memory / 2**30:g} GiB"}


def _describe(question: Mapping[str, Any], pipe: int) -> None:
    """Never returns."""
    processes.prctl(processes.PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    try:
        from workers.vllm.ask.meta_model import describe

        os.environ.update(question.get("env", {}))
        with os.fdopen(pipe, "w") as out:
            json.dump(describe(question), out)
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _write(out: TextIO, line: Mapping[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
