"""Owns asking another node's vLLM about models, through that node's agent. Never accepts an unchecked answer, and leaves no process running
on that node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Protocol

from sparkd.errors import AgentLost, ClusterError, EngineError
from sparkd.inquiry.answer_schema import MOST_BYTES, checked
from workers.engine.model_question import IMPORT_S

POLL_S = 1.0
CALL_S = 15.0
# Limit for a request with all files of its questions.
MOST_ASKED_BYTES = 64 << 20

log = logging.getLogger(__name__)


class Agents(Protocol):
    """The nodes of a daemon: the part of sparkd.cluster.cluster.Cluster that is needed here. ask: raises ClusterError."""

    def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Coroutine[Any, Any, Any]: ...


class NodeInquiry:
    """The conversation of sparkd.inquiry.model_answers.Away. interpreter: the Python on that node. loop: the daemon's event loop, which
    calls the agents; the conversation itself runs on another thread."""

    def __init__(self, agents: Agents, node: str, interpreter: str, loop: asyncio.AbstractEventLoop) -> None:
        self._agents, self._node, self._interpreter, self._loop = agents, node, interpreter, loop

    def __call__(self, request: Mapping[str, Any], cancel: threading.Event) -> Iterator[dict[str, Any]]:
        """Yield the lines of the child on that node. Raises EngineError for a request that is too long or an invalid answer, ClusterError
        where the agent does not answer. The child is ended in any case."""
        text = json.dumps(request)
        if len(text) > MOST_ASKED_BYTES:
            raise EngineError(f"The headers of the model are {len(text):,} bytes; {MOST_ASKED_BYTES:,} are sent to another node at most.")
        name = str(self._call("inquire", self._interpreter, text))
        try:
            yield from self._heard(name, request, cancel)
        finally:
            with suppress(ClusterError):
                self._call("end_inquiry", name)

    def _heard(self, name: str, request: Mapping[str, Any], cancel: threading.Event) -> Iterator[dict[str, Any]]:
        first, running = 0, True
        until_s = time.monotonic() + IMPORT_S + len(request["questions"]) * float(request["seconds"])
        while running and time.monotonic() < until_s and not cancel.is_set():
            state = self._call("inquiry", name, first)
            if not isinstance(state, Mapping) or not isinstance(lines := state.get("lines"), list):
                raise self._unreadable()
            running = bool(state.get("running"))
            for line in lines:
                first += 1
                yield self._line(line, len(request["questions"]))
            if running:
                cancel.wait(POLL_S)
        if running and not cancel.is_set():
            log.info("the vLLM of node %s was asked about models and took too long", self._node)

    def _line(self, text: Any, questions: int) -> dict[str, Any]:
        """One checked line of the child. Other parts of the agent's answer are dropped."""
        if not isinstance(text, str) or len(text) > MOST_BYTES:
            raise self._unreadable()
        try:
            line = json.loads(text)
            number = line.get("question", -1)
            if not isinstance(number, int) or not -1 <= number < questions:
                raise ValueError("no such question")
            if "answer" in line and number >= 0:
                return {"question": number, "answer": checked(json.dumps(line["answer"]), self._node)}
            spoken = {key: str(line[key])[:1000] for key in ("progress", "failed", "ended") if key in line}
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._unreadable() from error
        return spoken | ({"question": number} if number >= 0 else {})

    def _unreadable(self) -> EngineError:
        return EngineError(f"The agent of node {self._node} gave an unreadable answer about a model: update sparkd there.")

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._loop.is_closed():
            raise AgentLost(f"The agent of node {self._node} was not asked: the daemon is ending.")
        call = asyncio.run_coroutine_threadsafe(self._agents.ask(self._node, method, *arguments, timeout_s=CALL_S), self._loop)
        try:
            return call.result(2 * CALL_S)
        except (TimeoutError, CancelledError):
            call.cancel()
            raise AgentLost(f"The agent of node {self._node} did not answer, or the daemon is ending.") from None
