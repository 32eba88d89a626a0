"""Owns reading from a vLLM log how far one rank is, line by line. Never opens a file, never asks a process.

The strings are those of vLLM 0.5 to 0.33, read in its source and in captured logs (tests/fixtures/vllm-logs). A line that is not known
changes nothing, so a new release costs detail and not correctness: READY is decided by asking the engine, never by its log.
"""

from __future__ import annotations

import re
import signal
from typing import Any

from workers.rank.signatures import HINT, Diagnosis, diagnose

PHASES = ("starting", "loading", "warming", "sizing", "serving")
LAST_ERROR_CHARS = 300
ROOT_CAUSE_WINDOW_S = 60.0
ETA_POINTS = 8
SMALLEST_TOLD_GIB = 0.1  # vLLM rounds sizes to 0.01 GiB: below this the number says little

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"^\(([A-Za-z][\w:.-]*)?(?: ?pid=\d+)?(?:, ip=[^)]*)?\) ?")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./<>-]+:\d+\] ?")

# The first is vLLM's own bar with a line end (weight_utils._BAR_FORMAT), for every loader it has; the second is plain tqdm.
_SHARDS = re.compile(r"^(?:Loading|Multi-thread loading)\b[^|]*:\s+\d+% Completed \| (\d{1,9})/(\d{1,9})(?!\d)")
_CAPTURE = re.compile(r"^Capturing\b.*?\bCUDA graph[^|]*:\s+\d+%\|[^|]*\| *(\d{1,9})/(\d{1,9})(?!\d)")

# As many digits as a number of bytes, tokens or shards may have: one of hundreds is none, and Python would refuse it or make it infinite.
_NUMBER = r"(\d[\d,]{0,23}(?:\.\d{1,12})?)"
_CONCURRENCY = rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x"
_FACTS: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = (
    (re.compile(r"^Starting to load model "), "loading", ()),
    (re.compile(rf"^Loading model weights took {_NUMBER} ?GB"), "warming", ("weights_gib",)),
    (re.compile(rf"\bCheckpoint size: {_NUMBER} GiB"), "loading", ("checkpoint_gib",)),
    (re.compile(rf"^Loading weights took {_NUMBER} seconds"), "loading", ("weights_s",)),
    (re.compile(rf"^Model loading took {_NUMBER} Gi?B(?: memory)? and {_NUMBER} seconds"), "warming", ("weights_gib", "load_s")),
    (re.compile(r"Using cache directory: .* for vLLM's torch\.compile"), "warming", ()),
    (re.compile(r"Dynamo bytecode transform time: "), "warming", ()),
    (re.compile(r"Compiling a graph for "), "warming", ()),
    (re.compile(r"torch\.compile takes "), "warming", ()),
    (re.compile(r"^Warming up model for the compilation"), "warming", ()),
    (re.compile(r"\bprofiling/warmup run took "), "warming", ()),
    (re.compile(rf"Available KV cache memory: {_NUMBER} Gi?B"), "sizing", ("kv_gib",)),
    (re.compile(rf"\b(?:Explicitly|Auto) set \({_NUMBER}/[\d.,]+\) GiB for KV cache"), "sizing", ("kv_gib",)),
    (re.compile(rf"reserved {_NUMBER} GiB memory for KV Cache as specified"), "sizing", ("kv_gib",)),
    (re.compile(r"^Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override="), "sizing", ("kv_gib",)),
    (re.compile(rf"\bKV cache size: {_NUMBER} tokens(?:, {_CONCURRENCY})?"), "sizing", ("kv_tokens", "kv_requests")),
    (re.compile(rf"^{_CONCURRENCY}"), "sizing", ("kv_requests",)),
    (re.compile(rf"\bCurrent kv cache memory in use is {_NUMBER} GiB"), "sizing", ("kv_gib",)),
    (re.compile(r"^Graph capturing finished in "), "sizing", ()),
    (re.compile(rf"^init engine \(profile, create kv cache, warmup model\) took {_NUMBER} s"), "sizing", ("init_s",)),
    (re.compile(r"^Starting vLLM (?:API )?server\b"), "sizing", ()),
)  # fmt: skip
_SERVING = re.compile(r"^(?:INFO: +)?(?:Application startup complete\.|Uvicorn running on )")

# How much a line tells. Among equals the first one wins: later ones are what followed from it.
_CONSEQUENCE, _CAUSE, _MEMORY = 1, 2, 3
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Timeout|Failure)(?::\s|:?$)")
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|NV_ERR_NO_MEMORY|Cannot allocate memory|MemoryError"
    r"|Free memory on device .* less than|Available memory on node .* less than|Externally held weights on device"
    r"|No available memory for the cache blocks|larger than the (?:available KV cache memory|maximum number of tokens that can be stored)"
    r"|not enough GPU memory available"
)
_FOLLOWED = re.compile(
    r"EngineDeadError|Engine core initialization failed|Engine process failed to start|Executor failed\.|WorkerProc initialization failed"
    r"|Worker failed with error|Failed core proc|EngineCore encountered|BrokenPipeError|CancelledError|EngineGenerateError"
)
_KNOWN_CAUSE = re.compile(
    r"^World size \(\d+\) is larger than|^Total number of attention heads |^Invalid data-parallel launch options|^RPC call to \w+ timed out"
    r"|: error: |: No module named |^Fatal Python error|^Segmentation fault|^Bus error|^ *what\(\): |^terminate called after"
    r"|^ptxas fatal|is not defined for option 'gpu-name'|^NVRM: |^ *Value error, "
)
_FATAL_LOG = re.compile(r"EngineCore (?:encountered a fatal error|failed to start)|WorkerProc (?:failed to start|hit an exception)")
# The end of a process inside the engine. Its API server ends in order after it, with exit code 0 (vLLM 0.32, v1/engine/core_client.py);
# vLLM may log the signal of a core that never came up (v1/engine/utils.py) and of a worker (v1/executor/multiproc_executor.py). Both look
# at a process that may not have been waited for yet, and then log {} and None, also for a process that failed with an error of its own.
_CORE_LOST = re.compile(
    r"^\[shutdown\] MPClient: engine core exited unexpectedly|^Engine core proc \S+ died unexpectedly|^(?:[A-Za-z_]\w*\.)*EngineDeadError\b"
)
_CORE_SIGNAL = re.compile(r"Engine core initialization failed\..*Failed core proc\(s\): \{'[^']*': -(\d{1,3})\b")
_CORE_UNTOLD = re.compile(r"Engine core initialization failed\..*Failed core proc\(s\): \{\}")
_WORKER_LOST = re.compile(r"^(?:Worker proc|RayWorkerProc) ([\w.=-]{1,64}) died unexpectedly(?: \(exit code: (?:-(\d{1,3})|None)\))?,")
_ERROR_HINTS = (
    "rror",
    "died unexp",
    "exited unexp",
    "xception",
    "imeout",
    "imed out",
    "ailure",
    "atal",
    "emory",
    "ault",
    "NVRM",
    "what():",
    "terminate called",
)
_INSIDE_ENGINE = re.compile(r"^(?:EngineCore|Worker|VllmWorker|RayWorker|MainProcess)")
_REMARKS = ("DEBUG", "INFO", "WARNING")
_INPUT_VALUE = re.compile(r"\s*\[type=.*$")


class Parser:
    """Feed it every line of a rank's log in order; `progress` has the fields of sparkd.state.nouns.Progress.

    fraction and eta_s belong to the current phase: shards while loading, graphs while sizing. weights_gib and kv_gib are this
    rank's; eta_s counts from line_at_s. phase moves forward only. kv_requests is requests of full length at once, where said.
    diagnosis is what the weightiest known line means, the first among equals.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self._known: dict[str, Any] = {
            "phase": PHASES[0],
            "fraction": None,
            "shards_done": None,
            "shards_total": None,
            "bytes_done": None,
            "bytes_total": None,
            "eta_s": None,
            "weights_gib": None,
            "weights_s": None,
            "kv_tokens": None,
            "kv_gib": None,
            "kv_requests": None,
            "init_s": None,
            "server_up": False,
            "last_error": None,
            "lost": None,
            "error_at_s": None,
        }
        self._line_at_s: float | None = None
        self._points: list[tuple[float, int]] = []
        self._error_weight = 0
        self._error_at_s = 0.0

    @property
    def phase(self) -> str:
        return str(self._known["phase"])

    @property
    def error_at_s(self) -> float | None:
        """When the error came that last_error and diagnosis tell of."""
        return self._known["error_at_s"]

    @property
    def progress(self) -> dict[str, Any]:
        return {**self._known, "line_at_s": self._line_at_s}

    def feed(self, line: str, now_s: float) -> bool:
        """Takes one line, without its end. now_s: seconds, any clock that does not jump. True when more than line_at_s changed."""
        self._line_at_s = now_s
        if self._known["server_up"] and not any(hint in line for hint in _ERROR_HINTS):
            return False  # a line for every request, thousands in a second
        process, level, text = _bare(line)
        if not text:
            return False
        before, diagnosed = self._known.copy(), self.diagnosis
        self._diagnose(process, level, text)
        self._known["lost"] = self._known["lost"] or _loss_of(text, caused=self._error_weight > _CONSEQUENCE)
        if self._known["server_up"] or not (self._take_bar(text, now_s) or self._take_fact(text)):
            self._take_error(process, level, text, now_s)
        if self.diagnosis is not diagnosed or self._known["last_error"] != before["last_error"]:
            self._known["error_at_s"] = now_s
        return self._known != before or self.diagnosis is not diagnosed

    def _take_bar(self, text: str, now_s: float) -> bool:
        if match := _SHARDS.match(text):
            self._enter("loading")
            if self._known["phase"] == "loading":
                self._take_shards(int(match[1]), int(match[2]), now_s)
            return True
        if match := _CAPTURE.match(text):
            self._enter("sizing")
            if self._known["phase"] == "sizing" and int(match[2]):
                self._known["fraction"] = int(match[1]) / int(match[2])
            return True
        return False

    def _take_shards(self, done: int, total: int, now_s: float) -> None:
        if done < (self._known["shards_done"] or 0) or total != self._known["shards_total"]:
            self._points.clear()  # a second checkpoint, such as a draft model, begins again
        self._known.update(shards_done=done, shards_total=total, fraction=done / total if total else None)
        if done and (not self._points or done > self._points[-1][1]):
            self._points = [*self._points[-ETA_POINTS + 1 :], (now_s, done)]
        self._known["eta_s"] = self._eta_s(total)

    def _eta_s(self, total: int) -> float | None:
        """From measured shards only: the line at 0 is printed before anything was read."""
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        if last_s <= first_s:
            return None
        return round((total - last) * (last_s - first_s) / (last - first), 1)

    def _take_fact(self, text: str) -> bool:
        if _SERVING.match(text):
            self._enter("serving")
            self._known["server_up"] = True
            self.diagnosis = None  # what made the start slow says nothing of a later end
            return True
        for pattern, phase, names in _FACTS:
            if match := pattern.search(text):
                self._enter(phase)
                if names and not match.groups():  # what was said of it before does not hold
                    self._known.update(dict.fromkeys(names))
                    return True
                for name, value in zip(names, match.groups(), strict=True):
                    if value is not None:
                        self._learn(name, float(value.replace(",", "")))
                return True
        return False

    def _learn(self, name: str, value: float) -> None:
        match name:
            case "kv_tokens":
                self._known[name] = int(value)
            case "checkpoint_gib":
                if value >= SMALLEST_TOLD_GIB:
                    self._known["bytes_total"] = round(value * 2**30)
            case "load_s":  # the whole load, where the release does not say what the weights alone took
                if self._known["weights_s"] is None:
                    self._known["weights_s"] = value
            case _:
                self._known[name] = value

    def _enter(self, phase: str) -> None:
        if PHASES.index(phase) > PHASES.index(self._known["phase"]):
            self._known.update(phase=phase, fraction=None, eta_s=None)

    def _diagnose(self, process: str, level: str, text: str) -> None:
        if self._known["server_up"] and not (_INSIDE_ENGINE.match(process) or not (process or level)):
            return
        diagnosis = diagnose(text)
        if diagnosis is None or (level in _REMARKS and diagnosis.weight > HINT):
            return
        if self.diagnosis is None or diagnosis.weight > self.diagnosis.weight:
            self.diagnosis = diagnosis

    def _take_error(self, process: str, level: str, text: str, now_s: float) -> None:
        weight = _weight(level, text)
        if not weight:
            return
        # Once it serves, the API server's errors are those of single requests, and their texts can quote a prompt.
        if self._known["server_up"] and not (_INSIDE_ENGINE.match(process) or "EngineDeadError" in text):
            return
        stale = now_s - self._error_at_s > ROOT_CAUSE_WINDOW_S
        if weight <= self._error_weight and not (stale and weight > _CONSEQUENCE):
            return
        self._known["last_error"] = _INPUT_VALUE.sub("", text).strip()[:LAST_ERROR_CHARS]
        self._error_weight, self._error_at_s = weight, now_s


def _loss_of(text: str, *, caused: bool) -> str | None:
    """The part of the engine that is gone, and the signal where the line has one; None for another line. caused: an error was logged
    before, which may be the cause."""
    if match := _WORKER_LOST.match(text):
        number = int(match[2] or 0)
        # By SIGTERM an engine that fails ends its workers itself.
        if number == signal.SIGTERM or (caused and not number):
            return None
        return f"its worker {match[1]} was lost" + (f", by {signal_name(number)}" if number else "")
    if _CORE_UNTOLD.search(text):
        return None if caused else "its engine core was lost"
    if match := _CORE_SIGNAL.search(text):
        return f"its engine core was lost, by {signal_name(int(match[1]))}"
    return "its engine core was lost" if _CORE_LOST.match(text) else None


def signal_name(number: int) -> str:
    """`SIGKILL` of 9; `signal 99` of one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _bare(line: str) -> tuple[str, str, str]:
    """(innermost process name, level, text): without colours, Ray's and vLLM's process prefixes and the time stamp."""
    text = _ANSI.sub("", line).rpartition("\r")[2] if "\r" in line.rstrip("\r") else _ANSI.sub("", line)
    text = text.rstrip()
    process = level = ""
    while match := _PROCESS.match(text):
        process, text = match[1] or process, text[match.end() :]
    if match := _LEVEL.match(text):
        level, text = match[1], text[match.end() :]
    return process, level, text


def _weight(level: str, text: str) -> int:
    """0 where the line is no error. Text logged below ERROR is a remark, whatever it quotes."""
    if level in _REMARKS:
        return 0
    if _EXCEPTION.match(text) or _KNOWN_CAUSE.search(text):
        if _OUT_OF_MEMORY.search(text):
            return _MEMORY
        if _FOLLOWED.search(text):
            return _CONSEQUENCE
        # pydantic names the field's rule on the line after its own.
        return _CAUSE if "validation error" not in text else _CONSEQUENCE
    if _OUT_OF_MEMORY.search(text) and not text.startswith(" "):
        return _MEMORY
    return _CONSEQUENCE if _FATAL_LOG.search(text) else 0
