"""A node's conversation with its own vLLM about models, for a daemon on another node: started, read, ended. Never two at once, and never
one that the daemon has stopped reading.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from sparkd.errors import EngineError, RankError
from workers.agent.latest import Latest
from workers.engine.model_question import conversation

# A daemon reads each second. One that is gone for so long does not come back for this conversation.
UNREAD_S = 30.0
LOOK_S = 1.0


class Inquiries:
    """Thread-safe."""

    def __init__(self) -> None:
        self._inquiries: Latest[_Inquiry] = Latest(
            "The question was ended with the agent of that node, or by another one: it is asked again later."
        )

    def start(self, interpreter: str, request: str) -> str:
        """The conversation's name. request: JSON, see workers.engine.model_question.conversation; a folder of its own is not looked at.
        Raises RankError for what is no such request."""
        questions = _request(request)
        return self._inquiries.begin(lambda: _Inquiry(Path(interpreter), questions))

    def read(self, name: str, first: int) -> dict[str, Any]:
        """{"running": bool, "lines": [a text of JSON for each object that was said, from the one with that number]}. Raises RankError for
        one that is not known."""
        return self._inquiries.find(name).read(first)

    def end(self, name: str) -> None:
        """End and forget it, if it is there."""
        self._inquiries.end(name)


class _Inquiry:
    def __init__(self, python: Path, request: dict[str, Any]) -> None:
        self._python, self._request = python, request
        self._cancel = threading.Event()
        self._lines: list[str] = []
        self._read_s = time.monotonic()
        self.thread = threading.Thread(target=self._converse, name="questions to vLLM", daemon=True)
        self.thread.start()

    def read(self, first: int) -> dict[str, Any]:
        self._read_s = time.monotonic()
        running = self.thread.is_alive()  # first: what it says at its end must not be missed
        return {"running": running, "lines": self._lines[first:]}

    def end(self) -> None:
        self._cancel.set()

    def _converse(self) -> None:
        threading.Thread(target=self._watch, name="questions to vLLM, read", daemon=True).start()
        try:
            for line in conversation(self._python, self._request, self._cancel):
                self._lines.append(json.dumps(line))
        except (EngineError, OSError) as error:
            self._lines.append(json.dumps({"failed": error.message if isinstance(error, EngineError) else f"{error.strerror or error}"}))
        finally:
            self._cancel.set()

    def _watch(self) -> None:
        while not self._cancel.wait(LOOK_S):
            if time.monotonic() - self._read_s > UNREAD_S:
                self._cancel.set()


def _request(text: str) -> dict[str, Any]:
    try:
        request: dict[str, Any] = json.loads(text)
        request["questions"] = [{**question, "folder": None} for question in request["questions"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RankError(f"What vLLM is to be asked cannot be read: {type(error).__name__}.") from None
    return request
