"""The complete list of the gateway's routes: path, methods, required role."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

from sparkd.gateway.keys import Role
from sparkd.nearest import nearest as nearest_word
from sparkd.state.abilities import GENERATE, POOL, TRANSCRIBE, RequestNeeds

ADMIN_ROOT = "/admin/v1"


class RouteKind(Enum):
    """The handler of a route."""

    ROOT = "root"
    LIVE = "live"
    READY = "ready"
    METRICS = "metrics"
    MODELS = "models"
    MODEL = "model"
    ENGINE = "engine"
    JSON = "json"
    FORM = "form"
    RESPONSE = "response"
    ADMIN = "admin"
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    label: its name in metrics and logs.
    methods: in the order of the Allow header.
    need: the abilities that a model must have.
    asks: the members of the body of which an engine needs at least one.
    """

    label: str
    kind: RouteKind
    methods: tuple[str, ...]
    role: Role
    need: RequestNeeds | None = None
    asks: tuple[str, ...] = ()


def find(path: str, raw_path: bytes) -> tuple[Route, str] | None:
    """The route of an ASGI `path` and its variable part ("" if it has none), or None.

    An exact path needs no percent-encoding, so an encoded one matches nothing. Only a model's name and the part behind the admin root may
    be encoded, once.
    """
    route = EXACT.get(path)
    if route is not None:
        return None if b"%" in raw_path else (route, "")
    if raw_path.startswith(b"/v1/models/"):
        return _MODEL, path[len("/v1/models/") :]
    if raw_path.startswith(b"/v1/responses/"):
        return _response(path) if b"%" not in raw_path else None
    if raw_path.startswith(b"/admin/v1/"):
        return (_ADMIN, "") if _ADMIN_PATH.fullmatch(path) else None
    if raw_path.startswith(b"/ui/"):
        return (_PAGE_FILE, "") if b"%" not in raw_path and _PAGE_PATH.fullmatch(path) else None
    return None


def model_path(name: str) -> str:
    """A model's path below the admin API; names may hold '/' and ':'."""
    return f"/models/{quote(name, safe='/:')}"


def nearest(path: str) -> str | None:
    """The exact path most like `path`, or None if none is alike."""
    return nearest_word(path.rstrip("/").lower(), EXACT, _ALIKE) if len(path) <= _LONGEST_MEANT else None


_ALIKE, _LONGEST_MEANT = 0.7, 64
_GET = ("GET", "HEAD")
_POST = ("POST",)
_STORED = RequestNeeds("/v1/responses", GENERATE)
_MODEL = Route("/v1/models/{name}", RouteKind.MODEL, _GET, Role.INFERENCE)
_RESPONSE = Route("/v1/responses/{id}", RouteKind.RESPONSE, ("GET",), Role.INFERENCE, _STORED)
_CANCEL = Route("/v1/responses/{id}/cancel", RouteKind.RESPONSE, _POST, Role.INFERENCE, _STORED)
_ADMIN = Route(ADMIN_ROOT, RouteKind.ADMIN, ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"), Role.ADMIN)
# Its files show nothing of this machine.
_PAGE = Route("/ui/", RouteKind.PAGE, _GET, Role.NOBODY)
_PAGE_FILE = Route("/ui/{file}", RouteKind.PAGE, _GET, Role.NOBODY)

# One or more segments, none empty, none "." or "..", no parameters (;), no backslash, no control character.
_ADMIN_PATH = re.compile(r"/admin/v1(?:/(?!\.{1,2}(?:/|$))[^/;\\\x00-\x1f\x7f]+)+")
_PAGE_PATH = re.compile(r"/ui/[0-9a-f]{16}(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+")
_RESPONSE_PATH = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")

# The paths of vLLM 0.32 that any client may use: inference, and reports about the model. Left out are its documentation and the paths that
# control the engine or other clients' requests: sleep, weights, adapters, caches, profiles, aborts, elastic experts.
_JSON: Mapping[str | None, tuple[str, ...]] = {
    GENERATE: (
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/systemone",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/generative_scoring",
    ),
    POOL: (
        "/v1/embeddings",
        "/v2/embed",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
    ),
    None: ("/tokenize", "/detokenize", "/invocations"),
}
# On the paths that people use a body without any of these loads no model, nor evicts another, for the engine's refusal.
_ASKS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages",),
    "/v1/embeddings": ("input", "messages"),
}
# vLLM serves these only with --enable-scale-out; without it, vLLM's own answer names the flag.
_SCALE_OUT = (
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/responses/render",
    "/v1/messages/render",
    "/inference/v1/generate",
)
_FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_TOLD_BY_ENGINE = ("/version", "/load", "/tokenizer_info")
_PROBES = (
    ("/livez", RouteKind.LIVE),
    ("/healthz", RouteKind.LIVE),
    ("/health", RouteKind.LIVE),
    ("/health/liveliness", RouteKind.LIVE),
    ("/health/liveness", RouteKind.LIVE),
    ("/readyz", RouteKind.READY),
    ("/health/readiness", RouteKind.READY),
)

EXACT: Mapping[str, Route] = {
    "/": Route("/", RouteKind.ROOT, _GET, Role.NOBODY),
    "/metrics": Route("/metrics", RouteKind.METRICS, _GET, Role.NOBODY),
    "/ui": _PAGE,
    "/ui/": _PAGE,
    "/ping": Route("/ping", RouteKind.LIVE, (*_GET, *_POST), Role.NOBODY),
    "/v1/models": Route("/v1/models", RouteKind.MODELS, _GET, Role.INFERENCE),
    "/v1/models/": Route("/v1/models", RouteKind.MODELS, _GET, Role.INFERENCE),
    ADMIN_ROOT: _ADMIN,
    **{path: Route(path, kind, _GET, Role.NOBODY) for path, kind in _PROBES},
    **{path: Route(path, RouteKind.ENGINE, ("GET",), Role.INFERENCE, RequestNeeds(path, None)) for path in _TOLD_BY_ENGINE},
    **{
        path: Route(path, RouteKind.JSON, _POST, Role.INFERENCE, RequestNeeds(path, task), _ASKS.get(path, ()))
        for task, paths in _JSON.items()
        for path in paths
    },
    **{path: Route(path, RouteKind.JSON, _POST, Role.INFERENCE, RequestNeeds("/v1/completions", GENERATE)) for path in _SCALE_OUT},
    **{path: Route(path, RouteKind.FORM, _POST, Role.INFERENCE, RequestNeeds(path, TRANSCRIBE)) for path in _FORMS},
}


def _response(path: str) -> tuple[Route, str] | None:
    match = _RESPONSE_PATH.fullmatch(path)
    if match is None:
        return None
    return (_CANCEL if match[2] else _RESPONSE), match[1]
