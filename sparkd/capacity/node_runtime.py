"""Finds the nodes that have a model's Python environment: this one, or the others where this one has none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from sparkd.errors import RankError, SparkdError
from workers.host.runtime import PROBE_TIMEOUT_S

# A probe has its own limit on the node.
RUNTIME_S = PROBE_TIMEOUT_S + 10.0
_ALIKE = ("platform", "vllm", "entrypoint")

log = logging.getLogger(__name__)

# A node's agent's answer about an interpreter: workers.host.runtime.Runtime as JSON.
Ask = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class NodeRuntime:
    """A runtime and its nodes.

    facts: workers.host.runtime.Runtime as JSON.
    node: the node that has it.
    only: the nodes with the same runtime, None where this node has it and no other was asked.
    """

    facts: Mapping[str, Any]
    node: str
    only: frozenset[str] | None = None


async def runtime_in_sight(nodes: Sequence[str], ask: Ask, *, vllm: bool) -> NodeRuntime:
    """The runtime by which a model is counted.

    nodes: those in sight, this one first.
    ask: raises ClusterError.
    vllm: its engine is vLLM, and an environment without one is none.

    Raises RankError with the reason of this node where no node has it.
    """
    here, *others = nodes
    trouble: RankError | None = None
    facts: Mapping[str, Any] = {}
    try:
        facts = await ask(here)
        if not vllm or facts["entrypoint"] is not None:
            return NodeRuntime(facts, here)
    except RankError as error:
        trouble = error
    if able := await _able(others, ask, vllm=vllm):
        return _first(able)
    if trouble is not None:
        raise trouble
    return NodeRuntime(facts, here)


def _first(able: Mapping[str, Mapping[str, Any]]) -> NodeRuntime:
    """The runtime of the first of these nodes, with the nodes that have a similar one."""
    node, facts = next(iter(able.items()))
    return NodeRuntime(facts, node, frozenset(other for other, theirs in able.items() if is_alike(theirs, facts)))


async def _able(nodes: Sequence[str], ask: Ask, *, vllm: bool) -> dict[str, Mapping[str, Any]]:
    """The answers of those nodes that have it."""
    answers = await asyncio.gather(*(ask(node) for node in nodes), return_exceptions=True)
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, BaseException):
            unexpected = None if isinstance(answer, SparkdError) else answer
            log.warning("node %s did not say which Python it has: %s", node, answer, exc_info=unexpected)
    there = {node: answer for node, answer in zip(nodes, answers, strict=True) if _is_readable(answer)}
    return {node: facts for node, facts in there.items() if not vllm or facts["entrypoint"] is not None}


def _is_readable(answer: Mapping[str, Any] | BaseException) -> TypeGuard[Mapping[str, Any]]:
    """Whether an answer of another node, which may be anything, is one."""
    return isinstance(answer, Mapping) and all(isinstance(answer.get(key, 0), str | None) for key in (*_ALIKE, "packages"))


def is_alike(facts: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a model is counted alike by both."""
    return all(facts.get(key) == others.get(key) for key in _ALIKE)
