"""Reads from the lines of a vLLM log how far one rank is.

The strings are those of vLLM 0.32 and 0.33, read in its source and in captured logs (tests/fixtures/vllm-logs). A line that is not known
changes nothing, so a new release costs detail and not correctness: READY is decided by asking the engine, never by its log. Bytes and
time left of a load are its loader's to tell (workers.rank.report).
"""

from __future__ import annotations

import re
import signal
from typing import Any

from workers.rank.signatures import HINT, ROOT, Diagnosis, diagnose

PHASES = ("starting", "loading", "warming", "sizing", "serving")
LAST_ERROR_CHARS = 300
ROOT_CAUSE_WINDOW_S = 60.0

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"^\(([A-Za-z][\w:.-]*)?(?: ?pid=\d+)?(?:, ip=[^)]*)?\) ?")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./<>-]+:\d+\] ?")

# As many digits as a number of bytes or tokens may have: one of hundreds is none, and Python would refuse it or make it infinite.
_NUMBER = r"\d[\d,]{0,23}(?:\.\d{1,12})?"
# The counts of a progress bar.
_COUNTS = r"\| *(?P<done>\d{1,9})/(?P<total>\d{1,9})(?!\d)"
_CONCURRENCY = rf"Maximum concurrency for [\d,]+ tokens per request: (?P<kv_requests>{_NUMBER})x"
# The phase of each line; a group has the name of the field that it tells.
_FACTS = [
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("loading", r"^Starting to load model "),
        # vLLM's own bar with a line end (weight_utils._BAR_FORMAT), for every loader it has.
        ("loading", rf"^(?:Loading|Multi-thread loading)\b[^|]*:\s+\d+% Completed {_COUNTS}"),
        ("warming", rf"^Model loading took (?P<weights_gib>{_NUMBER}) GiB memory and "),
        ("warming", r"^Warming up model for the compilation"),
        ("sizing", rf"\bAvailable KV cache memory: (?P<kv_gib>{_NUMBER}) GiB"),
        ("sizing", rf"\b(?:Explicitly|Auto) set \((?P<kv_gib>{_NUMBER})/[\d.,]+\) GiB for KV cache"),
        ("sizing", rf"\breserved (?P<kv_gib>{_NUMBER}) GiB memory for KV Cache as specified"),
        ("sizing", rf"\bKV cache size: (?P<kv_tokens>{_NUMBER}) tokens(?:, {_CONCURRENCY})?"),
        ("sizing", rf"^Capturing\b.*?\bCUDA graph[^|]*:\s+\d+%\|[^|]*{_COUNTS}"),
        ("sizing", r"^init engine \(profile, create kv cache, warmup model\) took "),
    )
]
# The size of the cache that was logged before does not hold then.
_OVERRIDDEN = re.compile(r"^Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=")
_SERVING = re.compile(r"^(?:INFO: +)?(?:Application startup complete\.|Uvicorn running on )")

# A consequence of another error tells least, a known root cause (signatures.ROOT) most. Among equals the first one wins.
_CONSEQUENCE, _CAUSE = 1, 2
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Timeout|Failure)(?::\s|:?$)")
_FOLLOWED = re.compile(
    r"EngineDeadError|Engine core initialization failed|Engine process failed to start|Executor failed\.|WorkerProc initialization failed"
    r"|Worker failed with error|Failed core proc|EngineCore encountered|BrokenPipeError|CancelledError|EngineGenerateError"
    r"|validation error"  # pydantic names the field's rule on the line after its own
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
_CORE_LOST = re.compile(r"^\[shutdown\] MPClient: engine core exited unexpectedly|^(?:[A-Za-z_]\w*\.)*EngineDeadError\b")
_CORE_SIGNAL = re.compile(r"Engine core initialization failed\..*Failed core proc\(s\): \{'[^']*': -(\d{1,3})\b")
_CORE_UNTOLD = re.compile(r"Engine core initialization failed\..*Failed core proc\(s\): \{\}")
_WORKER_LOST = re.compile(r"^(?:Worker proc|RayWorkerProc) ([\w.=-]{1,64}) died unexpectedly(?: \(exit code: (?:-(\d{1,3})|None)\))?,")
_ERROR_HINTS = (
    "rror", "died unexp", "exited unexp", "xception", "imeout", "imed out", "ailure", "atal", "emory", "ault", "NVRM", "what():",
    "terminate called",
)  # fmt: skip
_INSIDE_ENGINE = re.compile(r"^(?:EngineCore|Worker|VllmWorker|RayWorker|MainProcess)")
_REMARKS = ("DEBUG", "INFO", "WARNING")
_INPUT_VALUE = re.compile(r"\s*\[type=.*$")
# Bytes and the time left are the loader's.
_FIELDS = (
    "fraction", "bytes_done", "bytes_total", "eta_s", "weights_gib", "kv_tokens", "kv_gib", "kv_requests",
)  # fmt: skip
_ERROR_FIELDS = ("last_error", "lost", "error_at_s")


class Parser:
    """Feed it every line of a rank's log in order; `progress` has fields of sparkd.state.nouns.Progress, and kv_requests.

    fraction belongs to the current phase: shards while loading, graphs while sizing. weights_gib and kv_gib are this rank's. phase moves
    forward only; began_s is when each began. kv_requests is requests of full length at once, where vLLM says it. diagnosis is what the
    weightiest known line means, the first among equals.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self._known: dict[str, Any] = {"phase": PHASES[0]} | dict.fromkeys(_FIELDS) | {"server_up": False} | dict.fromkeys(_ERROR_FIELDS)
        self._line_at_s: float | None = None
        self._began_s: dict[str, float | None] = {}
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
        return {**self._known, "line_at_s": self._line_at_s, "began_s": dict(self._began_s)}

    def feed(self, line: str, now_s: float) -> bool:
        """Takes one line, without its end. now_s: seconds, any clock that does not jump. True when more than line_at_s changed."""
        self._line_at_s = now_s
        if self._known["server_up"] and not any(hint in line for hint in _ERROR_HINTS):
            return False  # a line for every request, thousands in a second
        process, level, text = _bare(line)
        if not text:
            return False
        before, diagnosed = self._known.copy(), self.diagnosis
        diagnosis = diagnose(text)
        self._take_diagnosis(process, level, diagnosis)
        self._known["lost"] = self._known["lost"] or _loss_of(text, caused=self._error_weight > _CONSEQUENCE)
        if self._known["server_up"] or not self._take_fact(text):
            self._take_error(process, text, _weight(level, text, diagnosis), now_s)
        if self.diagnosis is not diagnosed or self._known["last_error"] != before["last_error"]:
            self._known["error_at_s"] = now_s
        return self._known != before or self.diagnosis is not diagnosed

    def _take_fact(self, text: str) -> bool:
        if _SERVING.match(text):
            self._enter("serving")
            self._known["server_up"] = True
            self.diagnosis = None  # what made the start slow says nothing of a later end
            return True
        if _OVERRIDDEN.match(text):
            self._known["kv_gib"] = None
            return True
        for phase, pattern in _FACTS:
            if match := pattern.search(text):
                self._enter(phase)
                values = {name: float(value.replace(",", "")) for name, value in match.groupdict().items() if value is not None}
                self._take_counts(phase, int(values.pop("done", 0)), int(values.pop("total", 0)))
                self._known.update({name: int(value) if name == "kv_tokens" else value for name, value in values.items()})
                return True
        return False

    def _take_counts(self, phase: str, done: int, total: int) -> None:
        if phase == self._known["phase"] and total:
            self._known["fraction"] = done / total

    def _enter(self, phase: str) -> None:
        if PHASES.index(phase) > PHASES.index(self._known["phase"]):
            self._known.update(phase=phase, fraction=None)
            self._began_s[phase] = self._line_at_s

    def _take_diagnosis(self, process: str, level: str, diagnosis: Diagnosis | None) -> None:
        if diagnosis is None or (level in _REMARKS and diagnosis.weight > HINT):
            return
        if self._known["server_up"] and not (_INSIDE_ENGINE.match(process) or not (process or level)):
            return
        if self.diagnosis is None or diagnosis.weight > self.diagnosis.weight:
            self.diagnosis = diagnosis

    def _take_error(self, process: str, text: str, weight: int, now_s: float) -> None:
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


def _weight(level: str, text: str, diagnosis: Diagnosis | None) -> int:
    """0 where the line is no error. Text logged below ERROR is a remark, whatever it quotes."""
    if level in _REMARKS:
        return 0
    names_cause = _EXCEPTION.match(text) or _KNOWN_CAUSE.search(text)
    if diagnosis and diagnosis.weight == ROOT and (names_cause or not text.startswith(" ")):
        return ROOT
    if names_cause:
        return _CONSEQUENCE if _FOLLOWED.search(text) else _CAUSE
    return _CONSEQUENCE if _FATAL_LOG.search(text) else 0
