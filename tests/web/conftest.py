"""One browser and one daemon with the stub engine for the tests of the page: one model is READY, one has failed, one request was answered,
and there are results of benches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.stub import stub_engine
from tests.support.checkpoints import dense, write
from tests.support.daemon_process import DaemonProcess, daemon
from tests.support.hub_server import Repository, serving
from tests.support.published_tensors import tensors_of
from tests.support.waiting import until
from tests.web.benches import write_benches

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

    from tests.web.browser import Tab

INFERENCE, ADMIN = "a-key-for-inference-only", "a-key-for-administration"
GIB = 1 << 30
GATE, LOAD_GATE = "gate", "load-gate"


def settings(folder: Path) -> dict[str, Any]:
    """quick answers, held behind five pieces while GATE is not there; slow stands half loaded while LOAD_GATE is not there; endless writes
    until it is stopped; crash never gets ready, and is not tried again while the
    tests last: its load would refuse a bench."""
    model = {"model": str(folder / "checkpoint"), "memory_gib": 2}
    gate = {"SPARKD_STUB_GATE": str(folder / GATE), "SPARKD_STUB_GATE_AFTER": "5"}
    load = {"SPARKD_STUB_START_DELAY_S": "1", "SPARKD_STUB_LOAD_BYTES": str(4 * GIB), "SPARKD_STUB_LOAD_GATE": str(folder / LOAD_GATE)}
    return {
        "keys": {"inference": [f"laptop: {INFERENCE}"], "admin": [f"desk: {ADMIN}"]},
        "engine": stub_engine(SPARKD_STUB_CHUNK_INTERVAL_S="0.05") | {"stop_timeout_s": 2},
        "backoff": {"initial_s": 3600, "max_s": 3600},
        "models": {
            "quick": model | {"env": {"SPARKD_STUB_TOKENS": "30"} | gate, "aliases": ["gpt-4o"], "pin": True},
            "slow": model | {"quantize": "int4-g64", "env": load},
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
        (folder / GATE).touch()
        made.ray_connected()
        for name in ("quick", "crash"):
            made.load(name)
        made.wait_for("quick", "READY")
        made.wait_for("crash", "FAILED")
        assert made.chat("quick", "What is the capital of France?").status_code == 200
        write_benches(made.state_dir)
        yield made


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    from tests.web.browser import CHROMIUM, chromium, context_of

    if CHROMIUM is None:
        pytest.skip("chromium is missing: run `make chromium`")
    with chromium() as browser:
        yield context_of(browser)


@pytest.fixture
def tab(context: BrowserContext, served: DaemonProcess) -> Iterator[Tab]:
    """A tab with an admin key, on a daemon that is as `served` made it; a test's end looks at what the page must not do."""
    from tests.web.browser import Tab

    served.settled()
    served.ray_connected()
    (served.folder / GATE).touch()
    (served.folder / LOAD_GATE).unlink(missing_ok=True)
    made = Tab(context, served.url, ADMIN)
    yield made
    (served.folder / GATE).touch()
    made.page.close()
    assert made.faults == []
    assert made.foreign == []
    until(lambda: not served.get("/admin/v1/requests?state=in_flight")["in_flight"], "no request is in flight")
