"""Bounds the bodies of requests to the admin API, and has the types of those that add and load models, and of a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, Field

from sparkd.config.yaml_file import MAX_DEPTH
from sparkd.errors import BadRequest
from workers.host.hub_cache import is_revision

# In a whole body. A long entry with its mix, its variables and its arguments has some hundred.
MOST_MARKS = 8192
# A string without an end reaches to the end, so that no byte is looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_ALL_BUT_MARKS = bytes(set(range(256)) - set(b",[]{}"))


def _revision(value: str) -> str:
    if not is_revision(value):
        raise ValueError("a branch, a tag or a commit of the hub is expected")
    return value


MAX_NAME = 128
ALL = "all"


class BoundedRoute(APIRoute):
    """A route whose body is bounded before it is parsed. It keeps the holder of an admin key from holding the event loop.

    Within the bounds a body costs the loop in proportion to its length, at most some 60 ms. So it is judged there, without a time limit.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def bounded(request: Request) -> Response:
            _check_bounds(await request.body())
            return await handle(request)

        return bounded


def _check_bounds(body: bytes) -> None:
    """Raise BadRequest for JSON that is nested more deeply than a configuration file may be, or of more values than any request needs."""
    if b"\0" in body:  # Python's parser takes UTF-16 and UTF-32 too, in which another sign may hold the byte of a quotation mark
        raise BadRequest("The body is not JSON in UTF-8: send it so.")
    # JSON with more texts than that has more marks as well, so the rest need not be read.
    marks = _STRING.sub(b"", body, 4 * MOST_MARKS).translate(None, _ALL_BUT_MARKS)
    if len(marks) > MOST_MARKS:
        raise BadRequest(f"The body has more than {MOST_MARKS:,} commas and brackets outside its texts: send less at once.")
    if max(accumulate({"[": 1, "{": 1, ",": 0}.get(chr(mark), -1) for mark in marks), default=0) > MAX_DEPTH:
        raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels: send it with fewer.")


class NewModel(BaseModel, extra="forbid"):
    """A model that the configuration file does not have. `spec` has the keys of a model in sparkd.yaml."""

    name: str = Field(max_length=MAX_NAME)
    spec: dict[str, Any]
    load: bool = True


class ChangedModel(BaseModel, extra="forbid"):
    """The keys of an added model from now on; a new name is added. load: request RUNNING. A running engine is started again."""

    spec: dict[str, Any]
    load: bool = False


class Loading(BaseModel, extra="forbid"):
    """How a model is loaded. recipe: NAME or NAME@REGISTRY of the recipes on this machine; null for what the model has."""

    recipe: str | None = Field(default=None, min_length=1, max_length=256)


class Pulling(BaseModel, extra="forbid"):
    """Where a model's files shall be.

    nodes: `all` in sight, or their addresses.
    revision: of a hub id, null for what the model has.
    """

    nodes: Literal["all"] | Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=64)] = "all"
    revision: Annotated[str, AfterValidator(_revision)] | None = None


def chosen_nodes(nodes: Sequence[str] | str, there: Sequence[str]) -> list[str]:
    """Each named node once, in the order of the request.

    nodes: addresses, or ALL.
    there: the nodes that answer.

    Raises BadRequest for a node that is not there.
    """
    if nodes == ALL:
        return list(there)
    chosen = list(dict.fromkeys(nodes))
    if unknown := [node for node in chosen if node not in there]:
        raise BadRequest(f"{', '.join(unknown)[:200]} is not in this cluster, whose nodes are {', '.join(there)}: see `sparkd nodes`.")
    return chosen


class Problem(BaseModel):
    """Why a request was refused. `src` tells that sparkd says so, not an engine."""

    message: str
    type: str
    param: str | None
    code: str
    src: str
    request_id: str | None = None


class Refusal(BaseModel):
    """The body of every 4xx and 5xx."""

    error: Problem
