"""The daemon as a bench sees it: a client of /v1 and the admin API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx

from sparkd.errors import RankError, message_of_body
from sparkd.gateway.rates import Sample as Counters
from sparkd.gateway.rates import sample_of
from sparkd.gateway.routes import ADMIN_ROOT, model_path

ANSWER_S, WAIT_S = 120.0, 60.0
Model = dict[str, Any]  # as GET /models has it


class Client:
    """key: an admin key, empty where the daemon is open. Nothing of the environment's proxies is used."""

    def __init__(self, base_url: str, key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        # A daemon without keys takes a POST from what no web page can be (sparkd.gateway.pages).
        headers = {"x-sparkd-client": "bench"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=None, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """`path` below the admin API. Raises RankError with the daemon's own sentence."""
        return await self._asked("GET", path, params=parameters)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._asked("POST", path, json=body)

    async def delete(self, path: str, **parameters: Any) -> dict[str, Any]:
        return await self._asked("DELETE", path, params=parameters)

    async def finished(self, operation: dict[str, Any]) -> None:
        """Wait for the end of a long action. Raises RankError with its message where it did not succeed."""
        while operation["state"] == "RUNNING":
            operation = await self.get(f"/operations/{operation['id']}", wait_s=WAIT_S)
        if operation["state"] != "SUCCEEDED":
            raise RankError(operation["message"])

    async def models(self) -> dict[str, Model]:
        return {model["name"]: model for model in (await self.get("/models"))["models"]}

    async def model(self, name: str) -> Model:
        """Raises RankError for one that is not configured any more."""
        return await self.get(model_path(name))

    async def counters(self, model: str) -> Counters | None:
        """The counters of a model's engine, asked now; None where it gives none."""
        try:
            page = (await self.get(f"{model_path(model)}/metrics"))["text"]
        except RankError:
            return None
        return sample_of(page, time.monotonic())

    async def live(self) -> AsyncIterator[dict[str, Any]]:
        """The page's document (sparkd.admin.live_document), once a second until the daemon ends. Raises what httpx raises."""
        async with self._http.stream("GET", f"{ADMIN_ROOT}/live") as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    @asynccontextmanager
    async def completion(self, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """An answer of /v1/completions while it comes. Raises what httpx raises."""
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            yield response

    async def _asked(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, ADMIN_ROOT + path, timeout=ANSWER_S, **request)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RankError(f"The daemon did not answer {method} {path} ({type(error).__name__}): see its log.") from None
        if response.is_success and isinstance(answer, dict):
            return answer
        raise RankError(message_of_body(answer) or f"The daemon refused {method} {path} with status {response.status_code}: see its log.")


def has_token(line: str) -> bool:
    """Whether a line of a streamed completion brings a piece of the answer."""
    if not line.startswith("data: {"):
        return False
    try:
        choices = json.loads(line.removeprefix("data: ")).get("choices") or []
    except ValueError:
        return False
    return any(choice.get("text") for choice in choices)
