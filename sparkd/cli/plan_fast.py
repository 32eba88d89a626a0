"""Owns reading a plain command line of `sparkd plan`. Never says what is wrong with one: any other is left to typer, as all verbs are.

To import typer, and what it imports to check options, takes as long as reading all headers of a large checkpoint (release 0.29 has pydantic
build a validator for each of them).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.units import MOST

if TYPE_CHECKING:
    from sparkd.admin.client import Client

# From 1, and of no more digits than any of these options may have.
_COUNT = re.compile(r"[1-9][0-9]{0,11}")
_SIZE = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
_WORD = re.compile(r"[A-Za-z0-9_./~][\w./~+:-]*", re.ASCII)


def _matching(pattern: re.Pattern[str], kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: kind(text) if pattern.fullmatch(text) else None


def _up_to(most: float, read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if (number := read(text)) is None or number > most else number


_count, _word = _matching(_COUNT, int), _matching(_WORD, str)
# Option -> parameter of sparkd.cli.plan_run.run, and what reads its value: None for one that is not plain.
VALUES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "--nodes": ("nodes", _up_to(MOST["nodes"], _count)),
    "--ctx": ("context", _up_to(MOST["max_model_len"], _count)),
    "--seqs": ("seqs", _up_to(MOST["requests"], _count)),
    "--quantize": ("quantize", _word),
    "--hardware": ("hardware", _word),
    "--batch": ("batch", _up_to(MOST["max_num_batched_tokens"], _count)),
    "--kv-dtype": ("kv_dtype", _word),
    "--margin": ("margin", _up_to(MOST["margin_gib"], _matching(_SIZE, float))),
    "--speculative": ("speculative", _word),
    "--image": ("image", _word),
    "--config": ("config", _matching(_WORD, Path)),
}
SWITCHES: Mapping[str, str] = {
    "--json": "json", "--eager": "eager", "--docker": "docker", "--compose": "compose", "--quick": "quick", "--all": "every",
}  # fmt: skip


def run(words: Sequence[str]) -> int | None:
    """The exit code of `sparkd plan WORDS`; None where they are not plain, and nothing was done. Raises ConfigError and CheckpointError."""
    options = read(words)
    if options is None:
        return None
    if any(os.environ.get(name) for name in ("SPARKD_URL", "SPARKD_ADMIN_KEY")):
        # Refused as any verb refuses them, whether a daemon is asked or not.
        _client()
    from sparkd.cli import plan_run

    try:
        return plan_run.run(_client, **options)
    finally:
        if _client.cache_info().currsize:
            _client().close()
            _client.cache_clear()


@cache
def _client() -> Client:
    from sparkd.admin.client import DEFAULT_URL, Client, admin_key, base_url

    return Client(base_url(os.environ.get("SPARKD_URL") or DEFAULT_URL), admin_key(None, os.environ))


def read(words: Sequence[str]) -> dict[str, Any] | None:
    """The parameters of sparkd.cli.plan_run.run; None for a command line that has anything unusual, such as an option twice."""
    options: dict[str, Any] = {}
    key: str
    value: Any
    rest = iter(words)
    for word in rest:
        if word in SWITCHES:
            key, value = SWITCHES[word], True
        elif word in VALUES:
            key, read_value = VALUES[word]
            value = read_value(next(rest, ""))
        else:
            key, value = "model", _word(word)
        if value is None or key in options:
            return None
        options[key] = value
    return {"json": False} | options if "model" in options else None
