"""`python -m tests.bench.cluster`: a model over two nodes, broken at random moments in random ways, and how it comes back.

Two network namespaces, a real daemon, two raylets, ranks of the stub engine, which need each other as vLLM's do. For each fault: whether
and when it was noticed, when the model answered again, what was left behind, and how the clients ended. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.arguments import Parser, count, pattern
from tests.support.pair import Pair, Stream, shared_model, two_sparks
from tests.support.stream import answers
from tests.support.waiting import until

STATES = ("LOADING", "WARMING", "SIZING", "READY")
STREAMS = 8
MEDIAN_S, WORST_S = 2.0, 10.0
READY_S = 180.0
CLIENT_S = 30.0
NOTICED_S = 45.0
# Long enough for each state to be met.
START_S = "4"


@dataclass(frozen=True, slots=True)
class Fault:
    """break_it(pair, random): does it. survives: the engine is meant to serve on. clients: whether theirs is to be a clean end."""

    name: str
    break_it: Callable[[Pair, random.Random], None]
    survives: bool = False
    clients: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds since the fault, None where it never came. noticed_as: the reason of the failure. orphans: processes."""

    fault: str
    state: str
    noticed_as: str | None
    noticed_s: float | None
    ready_s: float | None
    orphans: int
    clean: int
    clients: int


def main() -> int:
    parser = Parser("tests.bench.cluster", __doc__, faults=1, only="^rank 1 killed")
    parser.add_argument("--faults", type=count, default=30)
    parser.add_argument("--only", type=pattern, default="", help="a regular expression for the faults' names")
    asked = parser.parse_args()
    rng = random.Random(1)
    names = parser.chosen([fault.name for fault in FAULTS], asked.only)
    faults = [fault for fault in FAULTS if fault.name in names]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="sb") as folder:
        slow = {"SPARKD_STUB_TOKENS": "400", "SPARKD_STUB_CHUNK_INTERVAL_S": "0.05", "SPARKD_STUB_START_DELAY_S": START_S}
        with two_sparks(Path(folder), {"pair": shared_model(Path(folder, "model"), **slow)}) as pair:
            print(f"{'fault':44} {'state':8} {'noticed':16} {'after s':>8} {'READY s':>8} {'orphans':>8} {'clients':>8}", flush=True)
            for number in range(asked.faults):
                # Every fault in every state before chance decides.
                fault, state = faults[number % len(faults)], STATES[(number + number // len(faults)) % len(STATES)]
                outcomes.append(_one(pair, fault, state, rng))
                print(_row(outcomes[-1]), flush=True)
    return _judge(outcomes, timed=not asked.smallest)


def _one(pair: Pair, fault: Fault, state: str, rng: random.Random) -> Outcome:
    streams = _bring_to(pair, state)
    time.sleep(rng.random() / 2)
    before, at_s = [int(rank["pid"]) for rank in pair.daemon.model("pair")["ranks"]], time.time()
    fault.break_it(pair, rng)
    if not fault.survives:
        _wait_until_noticed(pair, at_s)
    ready_s = _ready_again(pair, at_s)
    reason, noticed_s = _noticed(pair, at_s)
    for stream in streams:
        stream.ended.wait(CLIENT_S)
    ranks = [int(rank["pid"]) for rank in pair.daemon.model("pair").get("ranks", ())]
    old = [pid for rank in before if rank not in ranks for pid in pair.members({"pid": rank})]
    orphans = len(old) + max(0, len(pair.engines()) - len(ranks))
    asked = streams if fault.clients else []
    return Outcome(fault.name, state, reason, noticed_s, ready_s, orphans, sum(stream.clean for stream in asked), len(asked))


def _bring_to(pair: Pair, state: str) -> list[Stream]:
    pair.both()
    if state == "READY":
        pair.ready()
        return [Stream(pair).start() for _ in range(STREAMS)]
    if pair.daemon.model("pair")["want"] == "RUNNING":
        pair.daemon.unload("pair")
    pair.daemon.wait_for("pair", "STOPPED")
    pair.daemon.load("pair")
    # A busy machine may pass through a state between two looks.
    reached = STATES[STATES.index(state) :]
    until(lambda: pair.daemon.model("pair").get("state") in reached, state, 0.05)
    return []


def _ready_again(pair: Pair, at_s: float) -> float | None:
    """It may still look READY for a moment: it is once it answers, both nodes are in sight and nothing has failed a moment later."""

    def look() -> bool:
        seen = pair.daemon.model("pair")
        return seen.get("state") == "READY" and seen["want"] == "RUNNING" and answers(pair.daemon.client, "pair")

    try:
        pair.both()
        until(look, "READY again", 0.2, limit_s=READY_S)
    except AssertionError:
        return None
    return time.time() - at_s


def _wait_until_noticed(pair: Pair, at_s: float) -> None:
    """Until then it may answer: the ranks have not missed each other yet."""
    try:
        until(lambda: _noticed(pair, at_s)[0], "a failure", 0.1, limit_s=NOTICED_S)
    except AssertionError:
        return


def _noticed(pair: Pair, at_s: float) -> tuple[str | None, float | None]:
    events = (pair.daemon.get("/admin/v1/events?limit=1000") or {"events": []})["events"]
    found = [one for one in events if one["kind"] == "failed" and one["at_s"] >= at_s]
    return (found[0]["data"]["reason"], found[0]["at_s"] - at_s) if found else (None, None)


def _kill(rank: int, number: signal.Signals) -> Callable[[Pair, random.Random], None]:
    def break_it(pair: Pair, rng: random.Random) -> None:
        os.kill(pair.engine_of(pair.daemon.model("pair")["ranks"][rank]), number)

    return break_it


def _kill_shim(pair: Pair, rng: random.Random) -> None:
    os.kill(int(pair.daemon.model("pair")["ranks"][1]["pid"]), signal.SIGKILL)


def _kill_of_ray(name: str) -> Callable[[Pair, random.Random], None]:
    def break_it(pair: Pair, rng: random.Random) -> None:
        os.kill(pair.ray_node.pid_of(name), signal.SIGKILL)
        time.sleep(1.0)

    return break_it


def _kill_daemon(pair: Pair, rng: random.Random) -> None:
    pair.daemon.kill()
    time.sleep(rng.random() * 2)
    pair.daemon.start()
    pair.daemon.settled()


def _kill_node(pair: Pair, rng: random.Random) -> None:
    """What is left of a node whose power went, for as long as it takes to start again."""
    pair.there.plug(up=False)
    for pid in pair.there.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    time.sleep(5 + rng.random() * 5)
    pair.there.plug(up=True)


def _unplug(pair: Pair, rng: random.Random) -> None:
    pair.there.plug(up=False)
    time.sleep(10 + rng.random() * 5)
    pair.there.plug(up=True)


def _impair(pair: Pair, rng: random.Random) -> None:
    """It may hold out, or be given up: then it has to come back."""
    pair.there.impair()
    time.sleep(8 + rng.random() * 4)
    pair.there.mend()


FAULTS = (
    Fault("rank 1 killed", _kill(1, signal.SIGKILL)),
    Fault("rank 0 killed", _kill(0, signal.SIGKILL)),
    Fault("rank 1 hangs (SIGSTOP)", _kill(1, signal.SIGSTOP)),
    Fault("rank 0 hangs (SIGSTOP)", _kill(0, signal.SIGSTOP)),
    Fault("the shim of rank 1 killed", _kill_shim),
    Fault("the second raylet killed", _kill_of_ray("raylet"), survives=True),
    Fault("the second agent killed", _kill_of_ray("ray::Agent"), survives=True),
    Fault("the daemon killed", _kill_daemon, survives=True, clients=False),
    Fault("the cable out for 10 to 15 s", _unplug),
    Fault("the cable loses and delays for 8 to 12 s", _impair, survives=True),
    Fault("the second node without power", _kill_node),
)


def _row(one: Outcome) -> str:
    after, ready = (f"{seconds:.1f}" if seconds is not None else "-" for seconds in (one.noticed_s, one.ready_s))
    clients = f"{one.clean}/{one.clients}"
    return f"{one.fault:44} {one.state:8} {one.noticed_as or '-':16} {after:>8} {ready:>8} {one.orphans:>8} {clients:>8}"


def _judge(outcomes: list[Outcome], *, timed: bool) -> int:
    noticed = [one.noticed_s for one in outcomes if one.noticed_s is not None]
    survives = {fault.name for fault in FAULTS if fault.survives}
    missed = [one for one in outcomes if one.noticed_s is None and one.fault not in survives]
    recovered = sum(one.ready_s is not None for one in outcomes)
    bars = {
        f"recovered {recovered} of {len(outcomes)}": recovered == len(outcomes),
        f"orphans {sum(one.orphans for one in outcomes)}": not any(one.orphans for one in outcomes),
        f"clients with a clean end {sum(one.clean for one in outcomes)} of {sum(one.clients for one in outcomes)}": all(
            one.clean == one.clients for one in outcomes
        ),
        f"never noticed {len(missed)}": not missed,
    }
    if noticed and timed:
        median, worst = statistics.median(noticed), max(noticed)
        bars[f"noticed after {median:.1f} s (median, bar {MEDIAN_S:.0f})"] = median <= MEDIAN_S
        bars[f"noticed after {worst:.1f} s (worst, bar {WORST_S:.0f})"] = worst <= WORST_S
    for told, held in bars.items():
        print(f"{'held  ' if held else 'MISSED'}  {told}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
