"""`python -m tests.bench.team`: real vLLM over two nodes, in each way that it can be shared, and what it says after a rank was killed.

Two network namespaces, a real daemon, two raylets, vLLM's CPU build: tensor parallelism by native ranks and by vLLM's Ray executor, and a
pipeline of two stages. For each: seconds until READY; the largest difference of a log-probability from the same model on one node; then
rank 1 is killed: as what and when that was noticed, READY again after how long, the difference then, and processes left behind. Exit code
1 where a difference is 0.05 or more, nothing was noticed within 10 s, or anything was left. --stub: the first way alone with the stub
engine, which differs by 1 where its answer does. --gpu: two GPUs, one for each node, and NCCL over sockets through the cable between the
namespaces, for these have no RDMA. --only: a regular expression that finds the ways by name.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.arguments import Parser, pattern
from tests.stub import stub_engine
from tests.support.pair import Pair, two_sparks
from tests.support.pair_vllm import AGREED, furthest, log_probabilities, vllm_models
from tests.support.processes import command_of
from workers.host.runtime import API_SERVER
from workers.rank.status import worker_of

DETECTED_S = 10.0
HEAD = "way                     READY s    apart noticed         after s  again s    apart  left"
WAYS = (("split", "whole", "TP=2, native ranks"), ("rayed", "whole", "TP=2, executor: ray"), ("piped", "alone", "PP=2, native ranks"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds, and differences of log-probabilities."""

    way: str
    ready_s: float
    before: float
    reason: str
    noticed_s: float
    again_s: float
    after: float
    left: int

    @property
    def is_well(self) -> bool:
        return max(self.before, self.after) < AGREED and self.noticed_s < DETECTED_S and not self.left


@dataclass(frozen=True, slots=True)
class Engine:
    """keys: of an entry; says: what a model answers; apart: how far two of these differ; parts: of the command lines of its processes."""

    keys: dict[str, Any]
    says: Callable[[Pair, str], Any]
    apart: Callable[[Any, Any], float]
    parts: tuple[str, ...]


def _text(pair: Pair, model: str) -> str:
    answer = pair.daemon.chat(model, "hello", max_tokens=8)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


VLLM = Engine({"entrypoint": API_SERVER}, log_probabilities, furthest, ("vllm.entrypoints", "RayWorkerProc"))
STUB = Engine(stub_engine(), _text, lambda one, other: float(one != other), ("tests.stub",))


def main() -> int:
    parser = Parser("tests.bench.team", __doc__, stub=True)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", type=pattern, default="")
    asked = parser.parse_args()
    engine, ways = (STUB, WAYS[:1]) if asked.stub else (VLLM, WAYS[:2] if asked.gpu else WAYS)
    chosen = parser.chosen([way for *_, way in ways], asked.only)
    ways = tuple(each for each in ways if each[-1] in chosen)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="st") as name:
        folder = Path(name)
        models = {model: entry | engine.keys for model, entry in vllm_models(folder, on_gpu=asked.gpu).items()}
        with two_sparks(folder, models, gpus=asked.gpu) as pair:
            alone = {model: _said_by(pair, engine, model) for model in dict.fromkeys(single for _, single, _ in ways)}
            print(HEAD, flush=True)
            for model, single, way in ways:
                one = _broken(pair, engine, model, alone[single], way)
                outcomes.append(one)
                told = f"{one.ready_s:>8.1f} {one.before:>8.4f} {one.reason:14} {one.noticed_s:>8.1f} {one.again_s:>8.1f} {one.after:>8.4f}"
                print(f"{way:22} {told} {one.left:>5}", flush=True)
    if asked.smallest:
        return int(any(one.left for one in outcomes))
    well = all(one.is_well for one in outcomes)
    print(f"{'held  ' if well else 'MISSED'} differences under {AGREED}, noticed within {DETECTED_S:.0f} s, nothing left behind")
    return 0 if well else 1


def _said_by(pair: Pair, engine: Engine, model: str) -> Any:
    pair.daemon.load(model)
    pair.daemon.wait_for(model, "READY")
    said = engine.says(pair, model)
    _unloaded(pair, model)
    return said


def _broken(pair: Pair, engine: Engine, model: str, alone: Any, way: str) -> Outcome:
    """alone: what one node says."""
    pair.both()
    began_s = time.time()
    pair.daemon.load(model)
    ranks = pair.daemon.wait_for(model, "READY")["ranks"]
    ready_s = time.time() - began_s
    if len(ranks) != 2:
        raise RuntimeError(f"{model} has {len(ranks)} ranks where two are asked for")
    before = engine.apart(engine.says(pair, model), alone)

    victim, at_s = _process_of(pair, ranks[1], of_ray=model == "rayed"), time.time()
    os.kill(victim, signal.SIGKILL)
    reason, noticed_s = pair.failure(at_s, model)
    after_ranks = pair.daemon.wait_for(model, "READY")["ranks"]
    again_s = time.time() - at_s
    after = engine.apart(engine.says(pair, model), alone)
    kept = {rank["pid"] for rank in after_ranks}
    left = sum(len(pair.members(rank)) for rank in ranks if rank["pid"] not in kept)
    _unloaded(pair, model)
    everywhere = (*pair.here.pids(), *pair.there.pids())
    left += sum(any(part in " ".join(command_of(pid)) for part in engine.parts) for pid in everywhere)
    return Outcome(way, ready_s, before, reason, noticed_s, again_s, after, left)


def _process_of(pair: Pair, rank: dict[str, object], *, of_ray: bool) -> int:
    """The engine below the rank's shim; with vLLM's Ray executor the worker, whose parent is the second node's raylet."""
    if not of_ray:
        return pair.child_of(rank)
    (folder,) = {path.parent for path in pair.ray_node.runtime_dir.rglob(f"{rank['rank_id']}.worker")}
    worker = worker_of(str(folder), str(rank["rank_id"]))
    if worker is None:
        raise RuntimeError(f"rank {rank['rank_id']} has no worker")
    return worker.pid


def _unloaded(pair: Pair, model: str) -> None:
    pair.daemon.unload(model)
    pair.daemon.wait_for(model, "STOPPED")


if __name__ == "__main__":
    sys.exit(main())
