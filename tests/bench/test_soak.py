"""What the soak takes for a fault, and for a document of /v1."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from sparkd.errors import BadRequest
from sparkd.gateway.routes import find
from tests.bench import soak, soak_parsers, soak_schema
from tests.bench.soak_answers import fault_of
from tests.bench.soak_parsers import Target, read_random_inputs
from tests.bench.soak_watch import Beside
from tests.web.types import document

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
        ("/v1/models", 504, PLAIN, refused(OURS)),
        ("/v1/models", 404, {}, refused(OURS)),
        ("/v1/models", 404, PLAIN, b"Not Found"),
        ("/v1/models", 404, PLAIN, b'{"detail": "Not Found"}'),
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


def test_the_stream_that_never_ends_is_left_out_of_the_admin_api() -> None:
    assert soak_schema.ENDLESS in document()["paths"]
    admin = soak_schema.command_of("st", "http://daemon", soak_schema.ADMIN, 1.0)
    assert admin[admin.index("--exclude-path") + 1] == soak_schema.ENDLESS
    assert "--exclude-path" not in soak_schema.command_of("st", "http://daemon", str(soak_schema.V1), 1.0)


def test_a_parser_may_raise_a_sparkd_error() -> None:
    def parse(value: int) -> None:
        raise BadRequest("no")

    inputs, fault = read_random_inputs(Target(st.integers(), parse), 0.01)
    assert inputs and fault is None


def test_a_parser_that_raises_anything_else_is_told_of_with_its_smallest_input() -> None:
    def parse(value: int) -> None:
        if value >= 7:
            raise KeyError(value)

    _, fault = read_random_inputs(Target(st.integers(), parse), 60.0)
    assert fault is not None and fault.startswith("KeyError") and fault.endswith(" for 7")


def test_a_parser_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(value: int) -> None:
        while True:
            try:
                time.monotonic()
            except Exception:  # noqa: BLE001 - as a parser may have it
                continue

    monkeypatch.setattr(soak_parsers, "LIMIT_S", 0.02)
    _, fault = read_random_inputs(Target(st.integers(), parse), 60.0)
    assert fault is not None and fault.startswith("TooSlow")


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


class Steps(Beside):
    """`ends_at`: the step that raises."""

    every_s = 0.0

    def __init__(self, ends_at: int) -> None:
        super().__init__()
        self._ends_at = ends_at
        self.steps = 0
        self.third = threading.Event()

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.third.set()
        if self.steps == self._ends_at:
            raise KeyError(self.steps)


def test_what_goes_on_beside_a_part_ends_with_it() -> None:
    with Steps(0) as beside:
        assert beside.third.wait(30)
    assert not beside.is_running


def test_an_error_beside_a_part_is_raised_where_the_part_ends() -> None:
    with pytest.raises(KeyError), Steps(3) as beside:
        assert beside.third.wait(30)
