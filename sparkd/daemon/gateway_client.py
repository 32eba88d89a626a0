"""Puts one real question to a model through sparkd's own gateway, on the path that users take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from sparkd.errors import EngineError, Unavailable, message_of_body

WARM_QUESTION = "Reply with the word ready."
# A model answers on one of these: chat, then plain completion, then the pooling kinds.
_WAYS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WARM_QUESTION}], "max_tokens": 4, "temperature": 0}, "choices"),
    ("/v1/completions", {"prompt": WARM_QUESTION, "max_tokens": 4, "temperature": 0}, "choices"),
    ("/v1/embeddings", {"input": WARM_QUESTION}, "data"),
    ("/v1/score", {"text_1": "ready", "text_2": "steady"}, "data"),
    ("/v1/rerank", {"query": "ready", "documents": ["steady"]}, "results"),
)
_NOT_THIS_WAY = (400, 404, 405, 422, 501)
# The gateway's answers before an engine has heard anything.
_NOT_PUT = (429, 503)


class GatewayClient:
    """The daemon as a client of its own gateway.

    key: authorises it.
    probe_token: lets it use a model that is not READY yet.
    """

    def __init__(self, base_url: str, key: str | None, probe_token: str | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if probe_token:
            headers["x-sparkd-probe"] = probe_token
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=None)

    async def warm(self, model: str, timeout_s: float) -> None:
        """Return once the model has answered in one of the ways that engines answer, all of them within timeout_s.

        Raises EngineError or Unavailable.
        """
        refusals = []
        async with _deadline(timeout_s):
            for path, fields, expected in _WAYS:
                status, answer = await self._post(path, {"model": model, **fields})
                if status == 200 and answer.get(expected):
                    return
                if status in _NOT_PUT:
                    raise Unavailable(f"The gateway could not put a question to {model}: {path} answered {status}.")
                refusals.append(f"{path} answered {status}" + (f" without {expected}" if status == 200 else ""))
                if status not in _NOT_THIS_WAY:
                    break
        raise EngineError(f"The model {model} did not answer its first question: {', '.join(refusals)}.")

    async def chat(self, model: str, question: str, timeout_s: float, max_tokens: int = 64) -> str:
        """The text of one chat answer, temperature 0; of a model that is still thinking at max_tokens, its thoughts.

        Raises EngineError or Unavailable.
        """
        fields = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
        async with _deadline(timeout_s):
            status, answer = await self._post("/v1/chat/completions", fields)
        if status != 200:
            raise EngineError(f"The model {model} answered {status} to its question: {message_of_body(answer) or 'no reason given.'}")
        message = answer["choices"][0]["message"]
        # vLLM's reasoning parsers leave content null until the thinking has ended.
        return message.get("content") or message.get("reasoning") or ""

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            response = await self._client.post(path, json=fields)
        except httpx.HTTPError as error:
            raise Unavailable(f"The gateway did not answer on {path}: {type(error).__name__}.") from error
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, {}  # an engine's 500 in plain text


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    """httpx's own timeouts are for each read: an answer that trickles in would never end."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(f"There was no answer within {timeout_s:.0f} s.") from None
