"""Judges whether an engine still computes while requests run: by its counters, its ranks' CPU time and the GPUs' power.

An engine that has lost a rank without a message (a driver that hangs, packets that are dropped) answers /health with 200 for minutes, while
its counters stand still at once. An engine that broke while idle counts no request as begun: then the watchdog sends a test question.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.condition import Condition
from sparkd.control.record import Record
from sparkd.errors import SparkdError, Unavailable
from sparkd.gateway.rates import sample_of
from sparkd.gateway.scraper import page_of
from sparkd.gateway.upstream import Upstream
from sparkd.state.model_state import SERVING, STARTING, ModelState
from sparkd.state.nouns import Reading

# The draw of a GB10 with a kernel that hangs is 10 to 27 W at 95 % "utilisation"; one that computes draws 38 W and more, one that waits
# for a compiler shows no kernel. The limit is one owner's (eugr's spark-vllm-docker, issue 260): never a proof by itself.
HANGING_W, HANGING_PERCENT = 30.0, 90.0
# An engine that uses CPU time in an uncounted first step may compile kernels for a shape that is new to it.
FIRST_STEP_S = 600.0
# An answer older than this shows that the daemon was held up (a signal, a machine that slept), not how the engine is.
HEARD_S = 6.0
# A share of one core; a process that waits wakes up now and then.
IDLE_SHARE = 0.2

GUARD_ABSENT = "GuardAbsent"
UNGUARDED = (
    "no memory guard watches this node, so a model that takes too much freezes it: the guard's process hangs, or its lock is held by one "
    "that does. If this stays for a minute, restart the node."
)

_STEPS = ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_sum")
_IN_HAND = ("num_requests_running", "num_requests_waiting")


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds until a sign of a hang counts.

    idle_s: without a step while no rank computes.
    busy_s: without a step while ranks use CPU time: they may compile a kernel, or wait for a GPU in a loop.
    ask_every_s: between two looks at the engine's counters.
    question_s: until the watchdog sends a test question to an engine that counts no request although the gateway has some in flight. vLLM
        counts a request after its first step, so an engine that hangs in that step, and one that only waits for a slow client, count none.
    answer_s: to answer the question.
    """

    idle_s: float
    busy_s: float
    ask_every_s: float
    question_s: float
    answer_s: float


# 8 s without a step: 1 s more than the longest step seen on a Spark (8,192 tokens of a prompt).
TEAM = HangLimits(idle_s=8.0, busy_s=120.0, ask_every_s=0.0, question_s=3.0, answer_s=4.0)
# An engine on one node has no link between ranks that could hang, and a longer wait costs no second node.
ALONE = HangLimits(idle_s=60.0, busy_s=300.0, ask_every_s=5.0, question_s=15.0, answer_s=30.0)


@dataclass(slots=True)
class EngineProgress:
    """The progress of one engine that has requests. Times are monotonic seconds.

    at_s: the last sign of progress.
    cpu_s: by rank, at that time.
    steps: sum of the engine's counters; None before the first reading.
    asked_at_s: when its counters were asked for last.
    asking: whether they are being asked for.
    heard_at_s: when they came last.
    question_at_s: when an engine that counts no request in hand was sent a test question, infinity before that; None for another engine.
    """

    at_s: float
    cpu_s: Mapping[int, float]
    asked_at_s: float
    steps: float | None = None
    asking: bool = False
    heard_at_s: float = -math.inf
    question_at_s: float | None = None


class Watchdog:
    """Looks at the counters of every engine that has requests.

    spawn: runs a task beside the loop, by its work and its name.
    ask: puts one question to a model, with a time limit.
    clock: monotonic seconds.
    page_of: returns the metrics page of an engine; None for one that does not answer.
    """

    def __init__(
        self,
        spawn: Callable[[Any, str], object],
        ask: Callable[[str, float], Awaitable[None]],
        clock: Callable[[], float],
        page_of: Callable[[Upstream], Awaitable[str | None]] = page_of,
    ) -> None:
        self._spawn = spawn
        self._put = ask
        self._clock = clock
        self._page_of = page_of
        self._progress: dict[str, EngineProgress] = {}
        self._readings: Mapping[str, Reading] = {}

    def look(self, records: Iterable[Record], readings: Mapping[str, Reading] | None = None) -> None:
        """Read the metrics of every engine that has requests; the answer counts from a later call on. readings: the newest, by node."""
        self._readings, now_s = readings or {}, self._clock()
        for record in records:
            if not _works(record):
                self._progress.pop(record.name, None)
                continue
            # A request that is answered within seconds never leads to a question.
            progress = self._progress.setdefault(record.name, EngineProgress(now_s, _cpu_s(record), asked_at_s=now_s))
            if not progress.asking and now_s - progress.asked_at_s >= _limits(record).ask_every_s:
                progress.asking, progress.asked_at_s = True, now_s
                self._spawn(self._ask(record, progress), f"counters {record.name}")

    def frozen(self, record: Record) -> str | None:
        """The message of a hang; None while the engine makes progress or may be making some."""
        progress = self._progress.get(record.name)
        if progress is None or self._clock() - progress.heard_at_s > HEARD_S:
            return None
        silent_s, now = self._clock() - progress.at_s, _cpu_s(record)
        gpus = [gpu for node in record.attempt.nodes if (gpu := self._readings.get(node)) and gpu.gpu_power_w is not None]
        computes = any(gpu.gpu_power_w >= HANGING_W for gpu in gpus if gpu.gpu_power_w is not None)
        hangs = bool(gpus) and not computes and all((gpu.gpu_busy_percent or 0.0) >= HANGING_PERCENT for gpu in gpus)
        is_idle = all(used - progress.cpu_s.get(rank, 0.0) <= IDLE_SHARE * silent_s for rank, used in now.items())
        limits, question_at_s = _limits(record), progress.question_at_s
        quiet = hangs or (is_idle and not computes)
        if silent_s < (limits.idle_s if quiet else limits.busy_s if question_at_s is None else FIRST_STEP_S):
            return None
        if question_at_s is None and not _is_asked(record):
            return None
        if question_at_s is not None and self._clock() - question_at_s < limits.answer_s:
            return None
        how = "its GPU holds a kernel that draws no power" if hangs else "none of its ranks computes" if quiet else "its ranks only wait"
        requests = record.queue.in_flight + record.queue.questions
        sign = f"{requests} requests run" if question_at_s is None else "it does not answer a question"
        problem = f"{sign}, and for {silent_s:.0f} s no token came and {how}"
        return f"{problem}: {'a rank or the way to it' if record.attempt.world > 1 else 'it'} hangs; all of it is started again."

    def doubt(self, record: Record) -> str | None:
        """The message about an engine that has not answered the test question yet; None for an engine that is not under suspicion."""
        progress = self._progress.get(record.name)
        if progress is None or progress.question_at_s is None or progress.question_at_s == math.inf or not _works(record):
            return None
        silent_s, asked_s = self._clock() - progress.at_s, self._clock() - progress.question_at_s
        return f"No token came for {silent_s:.0f} s, and a test question has had no answer for {asked_s:.0f} s."

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """A condition for each node that no guard watches, and for each where nvidia-smi fails or hangs: then power and memory of that GPU
        are unknown."""
        unknown = "The GPU's power and kernels are not known; see `sparkd doctor`."
        absent = [
            Condition(GUARD_ABSENT, f"{node}: {UNGUARDED}", node) for node, reading in self._readings.items() if reading.guarded is False
        ]
        silent = [
            Condition("GpuSilent", f"{node}: {reading.device_trouble}. {unknown}", node)
            for node, reading in self._readings.items()
            if reading.device_trouble
        ]
        return (*absent, *silent)

    async def _ask(self, record: Record, progress: EngineProgress) -> None:
        put_at_s = self._clock()
        try:
            page = await self._page_of(record.upstream) if record.upstream else None
        finally:
            progress.asking = False
        # An answer that was on its way while the daemon was held up is as old as its question.
        if self._progress.get(record.name) is not progress or self._clock() - put_at_s > HEARD_S:
            return
        progress.heard_at_s = self._clock()
        # Without a waiting client, neither silence nor a constant count proves a hang: vLLM's gauges show an abort after the next step.
        nobody_waits = record.state is ModelState.READY and record.queue.in_flight == 0
        if page is None:
            if nobody_waits:
                self._question(record, progress)
            elif progress.question_at_s == math.inf:
                progress.question_at_s = None
            return
        values = sample_of(page, put_at_s).values
        steps = sum(values.get(name, 0.0) for name in _STEPS)
        if progress.steps is None:
            progress.steps, progress.at_s, progress.cpu_s = steps, self._clock(), _cpu_s(record)
        elif steps != progress.steps:
            self._moves(record, progress, steps)
        elif any(values.get(name) for name in _IN_HAND) and not nobody_waits:
            progress.question_at_s = None
        elif record.state is not ModelState.READY or not any(name in values for name in _IN_HAND):
            self._moves(record, progress, steps)  # without counters (--disable-log-stats) a question may wait behind many others
        else:
            self._question(record, progress)

    def _moves(self, record: Record, progress: EngineProgress, steps: float | None) -> None:
        progress.steps, progress.at_s, progress.cpu_s, progress.question_at_s = steps, self._clock(), _cpu_s(record), None
        record.queue.unanswered = False

    def _question(self, record: Record, progress: EngineProgress) -> None:
        if progress.question_at_s is None:
            progress.question_at_s = math.inf
        if progress.question_at_s == math.inf and self._clock() - progress.at_s >= _limits(record).question_s:
            progress.question_at_s = self._clock()
            self._spawn(self._answered(record, progress, progress.at_s), f"question {record.name}")

    async def _answered(self, record: Record, progress: EngineProgress, at_s: float) -> None:
        """Ask the test question. Any answer, an error too, proves that the engine lives. A question that could not be sent is sent again;
        `frozen` judges an unanswered one. at_s: the engine's last sign of progress."""
        could_be_sent = True
        try:
            await self._put(record.name, FIRST_STEP_S)
        except Unavailable:
            could_be_sent = False
        except SparkdError:
            pass
        if self._progress.get(record.name) is not progress or progress.at_s != at_s:
            return
        if could_be_sent:
            self._moves(record, progress, progress.steps)
        elif progress.question_at_s is not None and self._clock() - progress.question_at_s < FIRST_STEP_S:
            progress.question_at_s = math.inf


def _works(record: Record) -> bool:
    """Whether a client waits for the engine or has given up waiting."""
    serving = record.state in STARTING or record.state in SERVING
    left = record.queue.unanswered and record.state is ModelState.READY
    return serving and (_is_asked(record) or left) and record.upstream is not None


def _limits(record: Record) -> HangLimits:
    return TEAM if record.attempt.world > 1 else ALONE


def _is_asked(record: Record) -> bool:
    return record.queue.in_flight + record.queue.questions > 0


def _cpu_s(record: Record) -> dict[int, float]:
    return {fact.handle.rank: fact.cpu_s for fact in record.observed.ranks or () if fact.handle.start == record.attempt.rank_id}
