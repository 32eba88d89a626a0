"""Plans for the daemon's own node: its hardware, and the places of configured models.

Each plan is made in its own process. It reads files and asks a hub, which may hang for good, and a thread cannot be ended. It also computes
for seconds, and a thread would keep Python's lock from the gateway for that time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.placed_entry import runtime_of
from sparkd.capacity.plan import plan
from sparkd.capacity.planned_entry import PlannedEntry, PlanRequest, entry_of, made_for
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.model_folder import unusable
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.config.api_keys import KeySettings
from sparkd.config.config import Config
from sparkd.config.model import ModelConfig
from sparkd.config.quantize import AUTO
from sparkd.errors import ClusterError, ConfigError, EngineError, Unavailable
from sparkd.execution.bounded_call import NoAnswer, call
from sparkd.execution.threads import Threads
from sparkd.fabric.environment import wants_rdma
from sparkd.hardware import KNOWN, Hardware, machine
from sparkd.state.documents import Documents
from sparkd.vllm.ask.answers import ModelAnswer
from sparkd.vllm.ask.model import ask, kept_answers
from sparkd.vllm.installed import full_version_in
from workers.host.meminfo import mem_total_bytes
from workers.host.runtime import GPU_SIGNS

LearnedName = Literal["bandwidth_bytes_s", "disk_bytes_s"]
NAMES: tuple[LearnedName, ...] = ("bandwidth_bytes_s", "disk_bytes_s")
# The time limit of a plan, with all headers of a model from the hub, because an HTTP client does not wait for ever.
LIMIT_S = 60.0
# Each thread waits for one plan, even after its client has gone: two plans at once, and two more in the queue.
_PLANS = Threads("plan", 2, 4)
# By number of nodes, why that many of the daemon's nodes cannot share a model. rdma: whether they need it.
Unlinked = Callable[..., Awaitable[Mapping[int, str]]]
# Finds another node's runtime for an interpreter that this node lacks.
Elsewhere = Callable[[str], Awaitable[NodeRuntime]]


def learned_rates(state_dir: Path) -> dict[LearnedName, float]:
    """Bytes a second by name."""
    kept = _learned(state_dir).all()
    return {name: kept[name] for name in NAMES if name in kept}


def learn(state_dir: Path, rates: Mapping[LearnedName, float]) -> None:
    """Keep these rates in place of earlier ones; the others stay. Raises StateError where the disk is full."""
    for name, rate in rates.items():
        _learned(state_dir).put(name, rate)


def _learned(state_dir: Path) -> Documents[float]:
    return Documents(state_dir, "learned_rates", float)


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """All that a plan of this node depends on.

    unlinked: by number of nodes, why that many of the daemon's nodes cannot share a model.
    places: see model_folder.unusable.
    there: the model's runtime on another node, where this node lacks it.
    """

    request: PlanRequest
    hardware: Hardware
    spec: ModelConfig | None
    unlinked: Mapping[int, str]
    config: Config
    places: Collection[str] | None = None
    there: NodeRuntime | None = None


def planning_hardware(name: str, config: Config) -> Hardware:
    """The hardware of a name. `node`: this machine without the reserve for the system, with the rates that benches measured on it."""
    if name in KNOWN:
        return KNOWN[name]
    total = mem_total_bytes()
    platform = "cuda" if any(Path(sign).exists() for sign in GPU_SIGNS) else "cpu"
    if config.engine.platform != "auto":
        platform = config.engine.platform
    node, rates = machine(platform, total, config.memory.os_reserve_bytes(total)), learned_rates(config.state_dir)
    return replace(
        node,
        bandwidth_bytes_s=rates.get("bandwidth_bytes_s", node.bandwidth_bytes_s),
        disk_bytes_s=rates.get("disk_bytes_s", node.disk_bytes_s),
        learned=tuple(sorted(rates)),
    )


async def order_here(
    request: PlanRequest,
    spec: ModelConfig | None,
    unlinked: Unlinked,
    config: Config,
    in_sight: int = 1,
    places: Collection[str] | None = None,
    elsewhere: Elsewhere | None = None,
) -> PlanOrder:
    """The order of a plan, which holds no API keys and no other model's entry.

    spec: the entry of a configured model or a recipe; None for a folder or a hub id.
    unlinked: by number of nodes, why that many of the daemon's nodes cannot share a model.
    in_sight: the number of nodes that answer, over which the daemon would spread an entry without a size.
    places: see model_folder.unusable.
    elsewhere: raises ClusterError where no node has the runtime.
    """
    hardware = await asyncio.to_thread(planning_hardware, request.hardware, config)
    # The nodes and cables of other hardware than this node's are unknown, so only this node's are checked for links.
    if request.hardware == "node" and request.nodes is None and (spec is None or spec.tensor_parallel == AUTO):
        request = request.model_copy(update={"nodes": max(1, in_sight)})
    ours = request.hardware == "node" and _nodes(request, spec) > 1
    links = await unlinked(rdma=_wants_rdma(hardware, spec, config)) if ours else {}
    runtime = await _runtime(spec, config, elsewhere) if spec is not None and elsewhere is not None else None
    config = config.model_copy(update={"keys": KeySettings(), "models": {}})
    return PlanOrder(request, hardware, spec, dict(links), config, places, runtime)


async def planned_here(order: PlanOrder) -> dict[str, Any]:
    """The plan as plain JSON, by the answers of vLLM that are kept.

    Raises ConfigError, CheckpointError, and Unavailable after LIMIT_S or where too many plans are in progress.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _PLANS.run(_answer_of_process, order)
    except TimeoutError:
        raise _too_slow(order.request.model) from None


async def _runtime(spec: ModelConfig, config: Config, elsewhere: Elsewhere) -> NodeRuntime | None:
    """Another node's runtime, for a model whose runtime has no vLLM on this node; else None."""
    if not spec.runs_vllm(config.engine) or await asyncio.to_thread(full_version_in, spec.runtime_of(config.engine)) is not None:
        return None
    try:
        runtime = await elsewhere(runtime_of(spec, config))
    except ClusterError:
        return None
    return None if runtime.only is None else runtime


def _answer_of_process(order: PlanOrder) -> dict[str, Any]:
    """`_answer` in a separate process."""
    try:
        return call(_answer, order, time_s=LIMIT_S)
    except NoAnswer as failure:
        if failure.exceeded is not None:
            raise _too_slow(order.request.model) from None
        raise Unavailable(f"{order.request.model} could not be planned: {failure.reason}. {failure.cure}.") from None


def ask_here(order: PlanOrder, memory_bytes: int, progress: Callable[[str, int], None]) -> None:
    """Have this node's vLLM answer the questions of a plan; the answers are kept. Blocks for the 10 to 40 s of vLLM's import and more.

    memory_bytes, progress: see sparkd.vllm.ask.model.ask.

    Raises EngineError where vLLM gives no answer that is kept, and as planned_here.
    """
    _answer(order, partial(ask, memory_bytes=memory_bytes, progress=progress))
    if _answer(order)["vllm"]["unanswered"]:
        raise EngineError(
            f"vLLM was ended while it answered about {order.request.model}, for time or memory: the plan stays a guess. "
            "Try again when this node has less to do."
        )


def _answer(order: PlanOrder, ask: Callable[..., Sequence[ModelAnswer | None]] = kept_answers) -> dict[str, Any]:
    """The plan. Blocks. Raises like planned_here.

    ask: kept_answers, because the plan is shown at once; `ask` starts a vLLM.
    """
    request, config = order.request, order.config
    env = dict(os.environ)
    until_s = time.monotonic() + LIMIT_S

    def progress(_done: int, _total: int) -> None:
        if time.monotonic() > until_s:
            raise _too_slow(request.model)

    entry, checkpoint = entry_here(request.model, order.spec, config, progress, order.places, order.there)
    return plan(
        request,
        entry,
        checkpoint,
        order.hardware,
        read=lambda draft: checkpoint_at(draft, None, env, progress),
        unlinked=order.unlinked,
        ask=partial(ask, runtime=entry.runtime),
    )


def _nodes(request: PlanRequest, spec: ModelConfig | None) -> int:
    """The number of nodes in the question, else the tensor-parallel size of the entry, else 1."""
    own = spec.tensor_parallel if spec is not None and isinstance(spec.tensor_parallel, int) else 1
    return request.nodes or own


def _wants_rdma(hardware: Hardware, spec: ModelConfig | None, config: Config) -> bool:
    env = {name: value.get_secret_value() for name, value in config.engine.env.items()}
    return wants_rdma(hardware.platform, env if spec is None else spec.environment(config.engine))


def entry_here(
    name: str,
    spec: ModelConfig | None,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
    places: Collection[str] | None = None,
    there: NodeRuntime | None = None,
) -> tuple[PlannedEntry, Checkpoint]:
    """The entry and the headers of its model, which come from the hub where this node's cache is incomplete. Blocks.

    spec: the entry of a configured model; None to make one for a folder or a hub id.
    progress: see sparkd.checkpoint.remote_headers.
    places: see model_folder.unusable.
    there: see sparkd.capacity.planned_entry.entry_of.

    Raises ConfigError, CheckpointError.
    """
    if spec is None and name.startswith((".", "~")):
        raise ConfigError("model must be a known name, a hub id or an absolute path, not one that begins with '.' or '~'.", param="model")
    source = (os.path.abspath(name) if name.startswith("/") else name) if spec is None else spec.model
    if fault := unusable(source, vllm=True, places=places):
        raise ConfigError(fault.message, param="model")
    entry = entry_of(made_for(source) if spec is None else spec, config, there=there, made=spec is None)
    return entry, checkpoint_at(source, entry.spec.revision, {**os.environ, **entry.env}, progress)


def _too_slow(model: str) -> Unavailable:
    reason = f"{model}: its headers were not all read within {LIMIT_S:.0f} s"
    return Unavailable(f"{reason}. Ask again later, or download the model first (`hf download {model}`).")
