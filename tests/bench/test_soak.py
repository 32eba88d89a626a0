"""What the soak takes for a fault, and for a document of /v1."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import yaml

from sparkd.gateway.routes import find
from tests.bench import soak, soak_schema
from tests.bench.soak_answers import fault_of

OURS = {"message": "x", "type": "x", "code": "x", "src": "sparkd", "request_id": "r"}
PLAIN = {"x-request-id": "r"}


def refused(error: Any) -> bytes:
    return json.dumps({"error": error}).encode()


@pytest.mark.parametrize(
    ("path", "status", "headers", "body"),
    [
        ("/v1/models", 200, {}, b"{}"),
        ("/admin/v1/status", 404, PLAIN, refused(OURS)),
        ("/v1/models", 503, PLAIN, refused(OURS)),
        ("/v1/completions", 400, PLAIN, refused({"message": "an engine's own"})),
    ],
)
def test_answers_that_may_be_given(path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    assert fault_of(path, "GET", status, headers, body) is None


@pytest.mark.parametrize(
    ("path", "status", "headers", "body"),
    [
        ("/v1/models", 200, {}, b"Traceback (most recent call last)"),
        ("/v1/models", 500, PLAIN, refused(OURS)),
        ("/v1/models", 404, {}, refused(OURS)),
        ("/v1/models", 404, PLAIN, b"Not Found"),
        ("/v1/models", 404, PLAIN, refused({**OURS, "code": None})),
        ("/v1/models", 404, {"x-request-id": "another"}, refused(OURS)),
        ("/admin/v1/status", 404, PLAIN, refused({"message": "x", "type": "x", "code": "x"})),
    ],
)
def test_answers_that_are_faults(path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    assert fault_of(path, "GET", status, headers, body)


def test_the_document_of_v1_names_routes_that_there_are() -> None:
    paths = yaml.safe_load(soak_schema.V1.read_text())["paths"]
    for path, methods in paths.items():
        route = find(path.format(name="m", id="r"), path.format(name="m", id="r").encode())
        assert route is not None, path
        assert {method.upper() for method in methods} <= set(route[0].methods), path


def test_without_schemathesis_nothing_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak_schema, "program", lambda: None)
    monkeypatch.setattr(soak, "_one_daemon", None)
    monkeypatch.setattr(sys, "argv", ["soak", "--only", "admin"])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [((230, 231, 237, 237.4), False), ((230, 237, 237.1, 237.2), False), ((230, 235, 240, 245), True), ((230, 236, 231, 237), True)],
)
def test_a_leak_grows_in_most_rounds(sizes: tuple[float, ...], is_leak: bool) -> None:
    """MiB."""
    assert (soak.growth(sizes) * 1024 > soak.MEMORY_BAR_KIB) is is_leak
