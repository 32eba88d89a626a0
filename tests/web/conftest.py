"""One browser and one daemon with the stub engine, shared by the tests of the page in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.checkpoints import dense, tensors_of, write
from tests.support.daemon_process import DaemonProcess, daemon
from tests.support.hub_server import Repository, serving

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

    from tests.web.browser import Tab

INFERENCE, ADMIN = "a-key-for-inference-only", "a-key-for-administration"
GIB = 1 << 30


def settings(folder: Path) -> dict[str, Any]:
    """quick answers at once; slow loads for some seconds; endless writes until it is stopped; crash never gets ready."""
    model = {"model": str(folder / "checkpoint"), "memory_gib": 2}
    return {
        "keys": {"inference": [f"laptop: {INFERENCE}"], "admin": [f"desk: {ADMIN}"]},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2, "env": {"SPARKD_STUB_CHUNK_INTERVAL_S": "0.05"}},
        "backoff": {"initial_s": 60},
        "models": {
            "quick": model | {"env": {"SPARKD_STUB_TOKENS": "30"}, "aliases": ["gpt-4o"], "pin": True},
            "slow": model | {"quantize": "int4-g64", "env": {"SPARKD_STUB_START_DELAY_S": "5", "SPARKD_STUB_LOAD_BYTES": str(4 * GIB)}},
            "endless": model | {"env": {"SPARKD_STUB_TOKENS": "100000"}},
            "crash": model | {"env": {"SPARKD_STUB_EXIT_AT": "load"}},
        },
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("page")
    write(folder / "checkpoint", dense(), tensors_of(dense()))
    with (
        serving(Repository(folder / "checkpoint")) as hub,
        daemon(folder, settings(folder), environ={"HF_ENDPOINT": hub.hub, "HF_HOME": str(folder / "hub")}) as made,
    ):
        made.client.headers["authorization"] = f"Bearer {ADMIN}"
        yield made


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    from tests.web.browser import chromium, context_of

    with chromium() as browser:
        yield context_of(browser)


@pytest.fixture(scope="module")
def shared(context: BrowserContext, served: DaemonProcess) -> Tab:
    """A tab with an admin key that stays open from test to test, as a user's does."""
    from tests.web.browser import Tab

    return Tab(context, served.url, ADMIN)


@pytest.fixture
def tab(shared: Tab) -> Iterator[Tab]:
    """The shared tab; a test's end looks at what the page must not do."""
    shared.faults.clear()
    shared.refused.clear()
    yield shared
    assert shared.faults == []
    assert shared.foreign == []
