"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): judges every answer and counts what it saw into the file SPARKD_SOAK_TALLY."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

from tests.bench.soak_answers import fault_of

SHOWN_FAULTS, WAIT_S = 20, 0.2
statuses: Counter[str] = Counter()
faults: dict[str, str] = {}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """An answer that does not end, or only after an hour, is not what is tried here."""
    query = case.query
    if not isinstance(query, dict):
        return
    query.pop("follow", None)
    if isinstance(query.get("wait_s"), int | float):
        query["wait_s"] = min(query["wait_s"], WAIT_S)


@schemathesis.hook
def after_network_error(context: Any, case: Any, request: Any) -> None:
    statuses["none"] += 1
    _keep("no answer", request)


@schemathesis.check
def soak(ctx: Any, response: Any, case: Any) -> None:
    headers = {name.lower(): ", ".join(values) for name, values in response.headers.items()}
    statuses[str(response.status_code)] += 1
    fault = fault_of(case.path, response.request.method or "", response.status_code, headers, response.content)
    if fault is not None:
        _keep(fault, response.request)
        raise AssertionError(fault)


def _keep(fault: str, request: Any) -> None:
    """The first request of each fault on each route."""
    body = request.body if isinstance(request.body, bytes) else str(request.body or "").encode()
    place = f"{fault}: {request.method} {request.url.partition('?')[0]}"
    if place not in faults and len(faults) < SHOWN_FAULTS:
        faults[place] = f"{request.url[:300]} {body[:300]!r}"


@atexit.register
def _write() -> None:
    tally = {"statuses": statuses, "faults": [f"{place} ({request})" for place, request in faults.items()]}
    Path(os.environ["SPARKD_SOAK_TALLY"]).write_text(json.dumps(tally))
