"""Owns the configuration's section `traces`: where spans of requests go, and of how many. Never imports OpenTelemetry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from sparkd.schema.fields import Section, no_bool

# Modules that the extra `traces` of pyproject.toml installs.
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SDK = "opentelemetry.sdk.trace"
_PATH = "/v1/traces"
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?")


def _endpoint(value: str) -> str:
    if not _ENDPOINT.fullmatch(value):
        problem = "the collector's address, such as http://127.0.0.1:4318, is expected, without user, password or query"
        raise ValueError(f"{problem}; put a key into OTEL_EXPORTER_OTLP_HEADERS")
    return value.rstrip("/").removesuffix(_PATH)


class TraceSettings(Section):
    """The collector, over OTLP/HTTP, and the share of the traces begun by sparkd that it gets."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = None
    ratio: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = 1.0

    @property
    def url(self) -> str | None:
        """Where spans are posted."""
        return None if self.endpoint is None else self.endpoint + _PATH

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """(place, sentence) if the packages for it are missing."""
        if self.endpoint is not None and not (_is_there(SDK) and _is_there(EXPORTER)):
            missing = "traces.endpoint needs OpenTelemetry's SDK, which is not installed beside sparkd"
            yield ("traces", "endpoint"), f"{missing}: install sparkd[traces], or remove the key."


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
