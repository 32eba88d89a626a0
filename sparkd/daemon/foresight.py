"""Owns asking vLLM about the configured models in quiet moments, so that loads and plans find its answers.

It asks the vLLM of this node, or that of another node where this one has none. Never delays a load: it asks nothing while a model starts or
ends, or while memory is short.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from sparkd.capacity.account import Ways
from sparkd.capacity.consultation import Consultation
from sparkd.capacity.requirement import platform_of, runtime_of, this_node
from sparkd.checkpoint import read_checkpoint
from sparkd.config.config import Config
from sparkd.entry.node_runtime import NodeRuntime
from sparkd.errors import SparkdError
from sparkd.inquiry.mix_measure import kept_errors, measure, mix_folder
from sparkd.inquiry.model_answers import Away, InquiryRuntime, ModelAnswer, ModelQuestion, ask, places
from sparkd.inquiry.other_node import Agents, NodeInquiry
from sparkd.models.source import folder_of
from sparkd.schema.engine_args import recipe_of
from sparkd.schema.engine_flags import flags_of
from sparkd.schema.model import ModelConfig
from sparkd.schema.quantize import is_best, is_open
from sparkd.state.nouns import ModelState
from sparkd.state.snapshot import Snapshot
from workers.host.meminfo import mem_available_bytes
from workers.kv.profiles import checkpoint_of
from workers.quantization.mix import UNMEASURED
from workers.quantization.recipe import AS_IT_IS

log = logging.getLogger(__name__)

LOOK_S = 10.0
# No model may start or end for this long before the first question.
QUIET_S = 60.0
# After this time the model's files, the release or the nodes may have changed. An answer that is on the disk costs one read.
AGAIN_S = 600.0
# When to look again for a node that had too little free memory.
NO_ROOM_S = 60.0
# How often an open question looks whether a load has begun, to which it gives way.
YIELD_S = 0.5
# A child that answers ends within this time; that of another node too, where its agent answers.
END_S = 5.0
# A child that has imported vLLM holds 1.5 GiB, and one model on the meta device at most MEMORY_BYTES of sparkd.inquiry.model_answers.
LEAST_FREE_BYTES = 12 << 30
# Running a model to measure its weights leaves this to everything else.
_LEFT_FREE_BYTES = 8 << 30
_RESTING = frozenset({ModelState.STOPPED, ModelState.READY, ModelState.FAILED})


class RuntimeNodes(Agents, Protocol):
    """The part of sparkd.cluster.cluster.Cluster that is needed here. runtimes: raises ClusterError."""

    async def runtimes(self, interpreter: str) -> list[NodeRuntime]: ...


class Foresight:
    """Asks about each entry every AGAIN_S. config, snapshot: return the present ones. nodes: of the daemon. rest: waits for some seconds;
    clock: monotonic seconds."""

    def __init__(
        self,
        config: Callable[[], Config],
        snapshot: Callable[[], Snapshot],
        nodes: RuntimeNodes,
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._snapshot = snapshot
        self._nodes = nodes
        self._rest = rest
        self._clock = clock
        # When each entry may be asked about again, by the clock.
        self._after_s: dict[str, float] = {}
        # The question that is open now: the model, the runtime that is asked, and since when (wall clock).
        self.open: Mapping[str, Any] | None = None

    async def run(self) -> None:
        """Run until it is cancelled. A child that answers has ended by then."""
        quiet_s = 0.0
        while True:
            await self._rest(LOOK_S)
            quiet_s = quiet_s + LOOK_S if self._is_quiet() else 0.0
            if quiet_s >= QUIET_S and (spec := self._next()) is not None:
                await self._ask(spec)

    async def _ask(self, spec: ModelConfig) -> None:
        """Give up as soon as a model starts or ends, and when the entry is removed or changed."""
        cancel = threading.Event()
        again_s = AGAIN_S
        try:
            runtimes = await self._nodes.runtimes(runtime_of(spec, self._config()))
            with_room = [runtime for runtime in runtimes if self._has_room(runtime.node)]
            answered = all([await self._answered(spec, runtime, cancel) for runtime in with_room])
            if answered and len(with_room) < len(runtimes):
                again_s = NO_ROOM_S
        except (SparkdError, OSError) as error:
            log.info("vLLM was not asked about %s: %s", spec.name, error)
        finally:
            cancel.set()
        self._after_s[_identity(spec)] = self._clock() + again_s

    async def _answered(self, spec: ModelConfig, runtime: NodeRuntime, cancel: threading.Event) -> bool:
        """Whether the runtime answered every question. cancel: gets set as soon as a model starts or ends."""
        loop, config = asyncio.get_running_loop(), self._config()
        away = None
        if runtime.only is not None:
            inquiry = NodeInquiry(self._nodes, runtime.node, runtime_of(spec, config), loop)
            away = Away(runtime.node, str(runtime.facts["vllm"]), str(runtime.facts["packages"]), inquiry)
        vllm = InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir), away)
        nodes = max(1, len(self._snapshot().nodes if runtime.only is None else runtime.only))
        platform = platform_of(runtime.facts, config)
        self.open = {"model": spec.name, "runtime": vllm.place, "since_s": time.time()}
        try:
            answering = loop.run_in_executor(None, _learned, spec, config, vllm, platform, nodes, cancel)
            while not answering.done():
                await asyncio.wait([answering], timeout=YIELD_S)
                if not self._is_quiet() or self._config().models.get(spec.name) != spec:
                    cancel.set()
        except asyncio.CancelledError:
            cancel.set()
            with suppress(SparkdError, OSError, TimeoutError):
                await asyncio.wait_for(answering, END_S)
            raise
        finally:
            self.open = None
        return bool(answering.result()) and not cancel.is_set()

    def _is_quiet(self) -> bool:
        snapshot = self._snapshot()
        return snapshot.settled and not snapshot.draining and all(model.state in _RESTING for model in snapshot.models.values())

    def _has_room(self, node_id: str) -> bool:
        reading = next((node.reading for node in self._snapshot().nodes if node.node_id == node_id), None)
        return reading is not None and reading.mem_available_bytes >= LEAST_FREE_BYTES

    def _next(self) -> ModelConfig | None:
        config, now_s = self._config(), self._clock()
        specs = (spec for spec in config.models.values() if spec.runs_vllm(config.engine))
        return next((spec for spec in specs if self._after_s.get(_identity(spec), 0.0) <= now_s), None)


def _learned(
    spec: ModelConfig, config: Config, runtime: InquiryRuntime, platform: str, nodes: int, cancel: threading.Event
) -> Sequence[ModelAnswer | None]:
    """As answers_about; afterwards the weights of a model with `quantize: best` are measured."""
    answers = answers_about(spec, config, runtime, platform, nodes, cancel)
    if runtime.away is None and not cancel.is_set():
        measure_mix(spec, config, runtime, cancel)
    return answers


def measure_mix(spec: ModelConfig, config: Config, runtime: InquiryRuntime, cancel: threading.Event) -> None:
    """Measure what each format does to the weights of an entry with `quantize: best`, unless that is kept. Blocks for minutes. Raises
    SparkdError."""
    folder = folder_of(spec.model, spec.revision, spec.environment(config.engine))
    if folder is None or not is_best(spec.quantize):
        return
    identity, kept = checkpoint_of(folder), mix_folder(config.profiles_path)
    if kept_errors(identity, kept) is not UNMEASURED:
        return

    def progress(done: int, total: int) -> None:
        if done % 10 == 0:
            log.info("%s: %d of %d units of weights are measured for quantize: best", spec.name, done, total)

    measure(folder, identity, runtime.python, kept, mem_available_bytes() - _LEFT_FREE_BYTES, cancel=cancel, progress=progress)


def answers_about(
    spec: ModelConfig, config: Config, runtime: InquiryRuntime, platform: str, nodes: int, cancel: threading.Event
) -> Sequence[ModelAnswer | None]:
    """vLLM's answers about an entry as it is stored and in its own format, over the ranks that it may have; none where its files are not on
    this node. platform: of the nodes that have the runtime. Blocks. Raises SparkdError where vLLM cannot be asked."""
    env = spec.environment(config.engine)
    folder = folder_of(spec.model, spec.revision, env)
    if folder is None:
        return []
    answers: list[ModelAnswer | None] = []

    def progress(step: str, question: int) -> None:
        log.info("%s: the vLLM of %s: %s", spec.name, runtime.place, step if question < 0 else f"{step}, question {question + 1}")

    def collect(questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
        answers.extend(ask(questions, runtime, progress=progress, cancel=cancel))
        return answers[-len(questions) :]

    consultation = Consultation(collect, read_checkpoint(folder), flags_of(spec), env, this_node(platform))
    formats = [AS_IT_IS] if is_open(spec.quantize) else list(dict.fromkeys([AS_IT_IS, recipe_of(spec, env)]))
    consultation.ask((recipe, *split) for recipe in formats for split in _splits(spec, nodes))
    return answers


def _splits(spec: ModelConfig, nodes: int) -> list[Ways]:
    if isinstance(spec.tensor_parallel, int):
        return [(spec.tensor_parallel, 1)]
    return [(ranks, 1) for ranks in range(1, nodes + 1)]


def _identity(spec: ModelConfig) -> str:
    return spec.model_dump_json()
