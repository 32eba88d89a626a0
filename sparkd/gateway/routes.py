"""The complete list of what the gateway answers: path, methods, who may ask. Never matches by prefix where a path can be exact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sparkd.gateway.keys import Role

ADMIN_ROOT = "/admin/v1"


class Kind(Enum):
    """Who answers."""

    ROOT = "root"
    LIVE = "live"
    READY = "ready"
    METRICS = "metrics"
    MODELS = "models"
    MODEL = "model"
    JSON = "json"
    FORM = "form"
    RESPONSE = "response"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Route:
    """`label` is the metric's and the log's name of the route; `methods` are the allowed ones, in the order of the Allow header."""

    label: str
    kind: Kind
    methods: tuple[str, ...]
    role: Role

    @property
    def anthropic(self) -> bool:
        return self.label.startswith("/v1/messages")


def find(path: str, raw_path: bytes) -> tuple[Route, str] | None:
    """The route of an ASGI `path` and its variable part ("" where there is none), or None.

    Exact paths have no need of percent-encoding: an encoded one is a trick and matches nothing. Only a model's name and
    what lies behind the admin root may be encoded, once.
    """
    route = EXACT.get(path)
    if route is not None:
        return None if b"%" in raw_path else (route, "")
    if raw_path.startswith(b"/v1/models/"):
        name = path[len("/v1/models/") :]
        return (_MODEL, name) if name else None
    if raw_path.startswith(b"/v1/responses/"):
        return _response(path) if b"%" not in raw_path else None
    if raw_path.startswith(b"/admin/v1/"):
        return (_ADMIN, "") if _ADMIN_PATH.fullmatch(path) else None
    return None


_GET = ("GET", "HEAD")
_POST = ("POST",)
_MODEL = Route("/v1/models/{name}", Kind.MODEL, _GET, Role.INFERENCE)
_RESPONSE = Route("/v1/responses/{id}", Kind.RESPONSE, ("GET",), Role.INFERENCE)
_CANCEL = Route("/v1/responses/{id}/cancel", Kind.RESPONSE, _POST, Role.INFERENCE)
_ADMIN = Route(ADMIN_ROOT, Kind.ADMIN, ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"), Role.ADMIN)

# One or more segments, none empty, none "." or "..", no parameters (;), no backslash, no control character.
_ADMIN_PATH = re.compile(r"/admin/v1(?:/(?!\.{1,2}(?:/|$))[^/;\\\x00-\x1f\x7f]+)+")
_RESPONSE_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")

_FORWARDED = (
    ("/v1/chat/completions", Kind.JSON),
    ("/v1/completions", Kind.JSON),
    ("/v1/embeddings", Kind.JSON),
    ("/v1/responses", Kind.JSON),
    ("/v1/messages", Kind.JSON),
    ("/v1/messages/count_tokens", Kind.JSON),
    ("/v1/rerank", Kind.JSON),
    ("/rerank", Kind.JSON),
    ("/v1/score", Kind.JSON),
    ("/score", Kind.JSON),
    ("/v1/audio/transcriptions", Kind.FORM),
    ("/v1/audio/translations", Kind.FORM),
    ("/tokenize", Kind.JSON),
    ("/detokenize", Kind.JSON),
)
_PROBES = (
    ("/livez", Kind.LIVE),
    ("/healthz", Kind.LIVE),
    ("/health", Kind.LIVE),
    ("/health/liveliness", Kind.LIVE),
    ("/health/liveness", Kind.LIVE),
    ("/readyz", Kind.READY),
    ("/health/readiness", Kind.READY),
)

EXACT: Mapping[str, Route] = {
    "/": Route("/", Kind.ROOT, _GET, Role.NOBODY),
    "/metrics": Route("/metrics", Kind.METRICS, _GET, Role.NOBODY),
    "/v1/models": Route("/v1/models", Kind.MODELS, _GET, Role.INFERENCE),
    ADMIN_ROOT: _ADMIN,
    **{path: Route(path, kind, _GET, Role.NOBODY) for path, kind in _PROBES},
    **{path: Route(path, kind, _POST, Role.INFERENCE) for path, kind in _FORWARDED},
}


def _response(path: str) -> tuple[Route, str] | None:
    match = _RESPONSE_PATH.fullmatch(path)
    if match is None:
        return None
    return (_CANCEL if match[2] else _RESPONSE), match[1]
