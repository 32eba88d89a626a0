"""Keeps the URL of a medium out of an engine's log and answers.

vLLM's own connector fetches, and only from the hosts of --allowed-media-domains (workers.rank.command). It writes a URL that fails
into the log with its query, and into the answer with the reason, so that a client could try out which addresses answer.
"""

from __future__ import annotations

import logging
from typing import Any

from workers.vllm.symbols import symbol

# The name of vLLM's own connector: ours takes its place.
NAME = "http"
FAILED = (
    "The medium behind this URL cannot be used: it could not be fetched or read, or this model's `media:` does not name its host. "
    "Send it as a data: URL."
)


def register() -> None:
    """Put our connector into vLLM's registry, in place of vLLM's own. Raises MissingSymbol."""
    registry, base = symbol("MEDIA_CONNECTOR_REGISTRY"), symbol("MediaConnector")

    class QuietConnector(base):  # type: ignore[valid-type,misc]
        def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
            try:
                return super().load_from_url(url, media_io, **options)
            except Exception as error:  # noqa: BLE001 - clients of HTTP and decoders raise what they like
                raise _quiet(url, error) from None

        async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
            try:
                return await super().load_from_url_async(url, media_io, **options)
            except Exception as error:  # noqa: BLE001
                raise _quiet(url, error) from None

    registry.register(NAME)(QuietConnector)
    # It warns of each fetch that it repeats, with the URL (_log_retry).
    logging.getLogger("vllm.connections").setLevel(logging.ERROR)


def _quiet(url: str, error: Exception) -> Exception:
    return error if url[:5].lower() == "data:" else ValueError(FAILED)
