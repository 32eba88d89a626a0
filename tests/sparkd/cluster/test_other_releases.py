"""A status file of another release: it is lost alone, never the look at the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config
from workers.host import processes
from workers.rank.status import status_path

GOOD, BAD = "good-1-00000000", "bad-1-00000000"


def status_of(rank_id: str) -> dict[str, Any]:
    """The status of a rank that lives: this process, which no test signals."""
    who = processes.identity(os.getpid())
    assert who is not None
    handle = {
        "rank_id": rank_id, "model": "m", "generation": 1, "node_id": "n", "rank": 0, "pid": who.pid, "start_ticks": who.start_ticks,
        "boot_id": who.boot_id, "socket_path": "/run/x.sock", "host": None, "port": None, "api_key_path": None, "config_hash": "h",
        "log_path": "/log/m", "started_at_s": 1.0,
    }  # fmt: skip
    engine = {"engine_pid": who.pid, "engine_start_ticks": who.start_ticks}
    return {"handle": handle, "state": "running", "progress": {"phase": "warming", "kv_tokens": 7}, **engine}


async def test_what_cannot_be_used_is_a_condition_and_the_rest_is_seen(tmp_path: Path) -> None:
    cluster = Cluster(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"), {})
    try:
        folder = cluster._here.run_dir
        status_path(folder, GOOD).write_text(json.dumps(status_of(GOOD)))
        bad = status_of(BAD)
        status_path(folder, BAD).write_text(json.dumps(bad | {"handle": bad["handle"] | {"pid": "many"}}))
        cluster._trouble = None
        observation = await cluster.observe()
        assert [fact.handle.rank_id for fact in observation.ranks or ()] == [GOOD]
        assert observation.reading is not None
        assert observation.trouble is not None and observation.trouble.reason == "NodeUnreadable" and BAD in observation.trouble.message
    finally:
        cluster._here.guard.stop()
