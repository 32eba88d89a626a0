"""When an engine's failures are counted anew: after it served for reset_after_s, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.state.model_state import STARTING
from sparkd.state.nouns import Progress, Want
from tests.support.fakes import Scene, stage

UP = Progress(phase="serving", server_up=True)


async def serve_and_fail(made: Scene, served_s: float) -> int:
    """The failures that are counted once an engine has served so long and ended by itself."""
    made.supervisor.want("m", Want.RUNNING, "admin")
    await made.tick()
    made.cluster.names = ["m"]
    made.cluster.show(progress=UP)
    await made.tick(3)
    assert made.state() == "READY"
    await made.tick(seconds=served_s)
    made.cluster.show(alive=False, processes=0, exit_code=1)
    await made.tick()
    view = made.supervisor.snapshot().models["m"]
    assert view.state == "FAILED"
    await made.tick(2, seconds=view.retry_in_s or 0)
    return view.failures


async def test_the_last_failure_stays_in_sight_until_it_is_ready_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await serve_and_fail(made, 10.0)
        view = made.supervisor.snapshot().models["m"]
        assert view.state in STARTING and view.last_failure is not None
        assert view.last_failure["reason"] == "EngineExited" and view.last_failure["at_s"] > 0

        made.cluster.show(progress=UP)
        await made.tick(3)
        view = made.supervisor.snapshot().models["m"]
        assert (view.state, view.last_failure) == ("READY", None)


@pytest.mark.parametrize(("served_s", "counted"), [(500.0, 2), (700.0, 1)])
async def test_failures_are_counted_anew_after_ten_stable_minutes(served_s: float, counted: int, tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        assert await serve_and_fail(made, 10.0) == 1
        assert await serve_and_fail(made, served_s) == counted
