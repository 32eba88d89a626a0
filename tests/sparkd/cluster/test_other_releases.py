"""Files and readings of another release: a bad status file or reading is lost alone, never the look at the others."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.cluster.cluster import Cluster
from sparkd.cluster.node_tracker import facts_of
from sparkd.cluster.read_memory import reading
from sparkd.config.config import Config
from sparkd.state.nouns import Progress, Reading
from workers.host import processes
from workers.rank import lifecycle
from workers.rank.status import status_path

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
GOOD, BAD = "good-1-00000000", "bad-1-00000000"
SAMPLE: dict[str, Any] = {
    "at_s": 1.0, "mem_total_bytes": 100, "mem_available_bytes": 50, "mem_free_bytes": 40, "cached_bytes": 5, "swap_total_bytes": 0,
    "swap_free_bytes": 0, "level": "ok",
}  # fmt: skip


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


def paths(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of every member of an object, and of their members."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*at, name)
        yield from paths(inner, (*at, name))


def changed(value: dict[str, Any], path: tuple[str, ...], other: Any) -> dict[str, Any]:
    name, *rest = path
    return {**value, name: changed(value[name], tuple(rest), other) if rest else other}


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        status_path(name, GOOD).write_text(json.dumps(status_of(GOOD)))
        yield Path(name)


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(sorted(paths(status_of(BAD)))), value=JSON)
def test_a_status_file_of_another_release_costs_itself_alone(run_dir: Path, path: tuple[str, ...], value: Any) -> None:
    status_path(str(run_dir), BAD).write_text(json.dumps(changed(status_of(BAD), path, value)))
    left_out: dict[str, str] = {}

    found = {fact.handle.rank_id: fact for fact in facts_of(lifecycle.scan(str(run_dir)), left_out)}

    assert found[GOOD].alive and found[GOOD].progress.phase == "warming"
    assert len(found) == 2 or list(left_out) == [BAD]


@settings(max_examples=25, deadline=None)
@given(text=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_status_file_of_anything_costs_itself_alone(run_dir: Path, text: bytes) -> None:
    status_path(str(run_dir), BAD).write_bytes(text)
    left_out: dict[str, str] = {}

    assert [fact.handle.rank_id for fact in facts_of(lifecycle.scan(str(run_dir)), left_out)] == [GOOD]
    assert list(left_out) == [BAD]


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from([*sorted(SAMPLE), "floor_in_s", "level_why", "new"]), value=JSON)
def test_a_reading_is_one_or_is_refused(name: str, value: Any) -> None:
    found: Reading | None = None
    with contextlib.suppress(ValueError):
        found = reading("n", SAMPLE | {name: value}, 2.0)
    assert found is None or (isinstance(found, Reading) and found.node_id == "n")


def test_progress_that_cannot_be_used_is_nothing_said(run_dir: Path) -> None:
    status_path(str(run_dir), BAD).write_text(json.dumps(status_of(BAD) | {"progress": {"phase": 7, "kv_tokens": "many"}}))

    found = {fact.handle.rank_id: fact for fact in facts_of(lifecycle.scan(str(run_dir)))}

    assert (found[BAD].alive, found[BAD].progress) == (True, Progress())


async def test_what_cannot_be_used_is_a_condition_and_the_rest_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"), {})
    try:
        folder = cluster._here.run_dir
        status_path(folder, GOOD).write_text(json.dumps(status_of(GOOD)))
        status_path(folder, BAD).write_text(json.dumps(changed(status_of(BAD), ("handle", "pid"), "many")))
        cluster._trouble = None
        observation = await cluster.observe()
        assert [fact.handle.rank_id for fact in observation.ranks or ()] == [GOOD]
        assert observation.reading is not None
        assert observation.trouble is not None and observation.trouble.reason == "NodeUnreadable" and BAD in observation.trouble.message

        status_path(folder, BAD).unlink()
        cluster._here.sentry.stop()
        cluster._here.sentry._last_look = SAMPLE | {"level": "calm"}
        observation = await cluster.observe()
        assert observation.reading is None and len(observation.ranks or ()) == 1
        assert "calm" in str(observation.trouble)
    finally:
        cluster._here.sentry.stop()
