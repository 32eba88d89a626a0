"""End to end: one model of real vLLM over two network namespaces, in each way that its ranks can be shared, beside the same on one node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pair import Pair, Stream, two_sparks
from tests.support.pair_vllm import AGREED, furthest, log_probabilities, vllm_models
from tests.support.processes import alive, command_of
from tests.support.waiting import until
from workers.rank.status import worker_of

pytestmark = pytest.mark.rest

WAYS = ("split", "rayed", "whole")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pv")
    models = vllm_models(folder)
    with two_sparks(folder, {name: models[name] for name in WAYS}) as made:
        yield made


def test_vllm_splits_what_no_node_holds_alone_and_says_what_it_says_on_one(pair: Pair) -> None:
    """Teacher-forced: sampled text of a random model would diverge on rounding."""
    said = {}
    for name in WAYS:
        pair.both()
        pair.daemon.load(name)
        ready = pair.daemon.wait_for(name, "READY")
        assert len(ready["ranks"]) == (1 if name == "whole" else 2)
        assert pair.daemon.chat(name, "hello", max_tokens=4).status_code == 200
        said[name] = log_probabilities(pair, name)
        if name == "split":
            assert "ranks do not share the same SHM group name" in pair.daemon.get("/admin/v1/models/split/log")["text"]
            _killed_and_back(pair, ready["ranks"])
        if name == "rayed":
            _adopted_and_lost(pair, ready["ranks"])
        pair.daemon.unload(name)
        pair.daemon.wait_for(name, "STOPPED")

    for name in ("split", "rayed"):
        assert furthest(said[name], said["whole"]) < AGREED
    commands = [" ".join(command_of(pid)) for node in (pair.here, pair.there) for pid in node.pids()]
    assert [command for command in commands if "vllm" in command or "RayWorkerProc" in command] == []


def _killed_and_back(pair: Pair, ranks: list[dict[str, Any]]) -> None:
    """The second rank is killed: both end, and both are started again."""
    stream, at_s = Stream(pair, "split", max_tokens=1000, ignore_eos=True).start(), time.time()
    os.kill(pair.child_of(ranks[1]), signal.SIGKILL)
    assert pair.failure(at_s, "split")[0] == "EngineExited"
    assert '"error"' in stream.end(), "the client is told"
    until(lambda: not any(alive(rank["pid"]) for rank in ranks), "both have ended")
    after = pair.daemon.wait_for("split", "READY")["ranks"]
    assert {rank["pid"] for rank in after}.isdisjoint(rank["pid"] for rank in ranks)
    assert pair.daemon.chat("split", "hello", max_tokens=4).status_code == 200


def _adopted_and_lost(pair: Pair, ranks: list[dict[str, Any]]) -> None:
    """vLLM's Ray executor: its workers are Ray's children, and ranks like others to a daemon that comes back, and when one is lost."""
    pair.daemon.kill()
    pair.daemon.start()
    pair.daemon.settled()
    pair.both()
    assert [rank["pid"] for rank in pair.daemon.wait_for("rayed", "READY")["ranks"]] == [rank["pid"] for rank in ranks]
    assert pair.daemon.chat("rayed", "hello", max_tokens=4).status_code == 200

    # Whose parent is the second node's raylet.
    (folder,) = {path.parent for path in pair.ray_node.runtime_dir.rglob(f"{ranks[1]['rank_id']}.worker")}
    worker, at_s = worker_of(str(folder), ranks[1]["rank_id"]), time.time()
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert pair.failure(at_s, "rayed")[0] == "EngineExited"
