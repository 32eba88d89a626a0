"""Takes the place of tests/utils.py of vLLM's sdist: a RemoteOpenAIServer that starts nothing and leads to the server of SUITE_URL."""

from __future__ import annotations

import os
from typing import Any

import anthropic
import openai

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = os.getcwd()


class RemoteOpenAIServer:
    """The part of vLLM's class that its tests use. It ignores its arguments: the suite serves the one model with its own."""

    DUMMY_API_KEY = "none"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["SUITE_URL"]
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)
        self.uds = None

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60} | options
