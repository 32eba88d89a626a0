"""`python -m tests.bench.chaos [--model FOLDER]`: everything of one Spark broken at random moments, and whether it comes back by itself.

A real daemon under socket activation (restarted as systemd would), its Ray, and engines: the stub for most faults, real vLLM for the last
REAL of them where --model names a small model; the table says which. For each fault: target, the model's state, streams that were open,
seconds until all is well again, processes left behind, two engines of one model, the wish, and how the clients ended. Then what is no kill:
errors inside the daemon, a full disk, a state directory that cannot be written, a clock that jumps, a storm of reloads. Exit code 1: a
bar was missed. The guard's reaction and the growth of memory have benches of their own: tests.bench.hog and tests.bench.soak.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.bench.arguments import Parser, count, model, pattern
from tests.bench.chaos_scene import MODEL, Scene, SmallDisk, ended_well, settings
from tests.bench.clock_shift import ShiftedClock
from tests.support.activated import ActivatedDaemon
from tests.support.waiting import until

STATES = ("READY", "LOADING", "READY", "WARMING", "READY", "SIZING")
LOADS = (0, 4, 16)
RESTART_BAR_S = 3.0
RELOADS, STORM_STREAMS = 50, 128
# The shares of the calls inside the daemon that raise, one trial each; and the seconds of a trial.
INSIDE, INSIDE_S = (0.02, 0.1, 0.3), 15.0
REAL, REAL_PATIENCE = 12, 4.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """well_s: None where it never came. answer_s: of a daemon that was started again, until it answered. lost: streams with no clean end,
    where one was due. killed: processes."""

    engine: str
    target: str
    state: str
    streams: int
    well_s: float | None
    orphans: int
    twins: int
    wish_kept: bool
    lost: int
    answer_s: float | None = None
    killed: int = 0


def main() -> int:
    parser = Parser("tests.bench.chaos", __doc__, faults=1, only="^engine core$", model=None)
    parser.add_argument("--faults", type=count, default=200)
    parser.add_argument("--model", type=model, help="a folder with a small model, for real vLLM")
    parser.add_argument("--only", type=pattern, default="", help="a regular expression for the names of targets and trials")
    asked = parser.parse_args()
    names = parser.chosen((*TARGETS, *TRIALS), asked.only)
    targets, trials = [name for name in names if name in TARGETS], [name for name in names if name in TRIALS]
    faults = asked.faults if targets else 0
    real = min(REAL, faults) if asked.model else 0
    outcomes: list[Outcome] = []
    print(_HEAD, flush=True)
    try:
        for stub, times in ((True, faults - real), (False, real)):
            if times:
                _faults(asked.model, targets, stub=stub, times=times, outcomes=outcomes)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    return _judge(outcomes, _others(trials), timed=not asked.smallest)


def _faults(model: Path | None, names: Sequence[str], *, stub: bool, times: int, outcomes: list[Outcome]) -> None:
    rng = random.Random(SEED)
    with _scene(stub=stub, model=None if stub else model) as scene:
        targets = {name: TARGETS[name](scene) for name in names}
        # Every target in every state before chance decides.
        pairs = [(name, state) for state in STATES for name in targets]
        rng.shuffle(pairs)
        for number, (name, state) in enumerate(itertools.islice(itertools.cycle(pairs), times)):
            one = _one(scene, "stub" if stub else "vLLM", name, targets[name], state, rng)
            outcomes.append(one)
            print(f"{number + 1:>4} {_row(one)}", flush=True)


# The targets of faults. A scene's target is called for one fault and returns the processes that it killed.
TARGETS: Mapping[str, Callable[[Scene], Callable[[], frozenset[int]]]] = {
    "API server": lambda scene: scene.api_server,
    "engine core": lambda scene: scene.engine_core,
    "rank": lambda scene: scene.shim,
    "agent": lambda scene: scene.of_ray("ray::Agent"),
    "raylet": lambda scene: scene.of_ray("raylet"),
    "GCS": lambda scene: scene.of_ray("gcs_server"),
    "daemon": lambda scene: scene.kill_daemon,
}


def _one(scene: Scene, engine: str, name: str, hit: Callable[[], frozenset[int]], state: str, rng: random.Random) -> Outcome:
    if not scene.reach(state):
        return Outcome(engine, name, state, 0, None, 0, 0, False, 0)
    clients = scene.streams(rng.choice(LOADS) if state == "READY" else 0)
    time.sleep(rng.random() * (1.0 if clients else 0.4))
    killed = hit()
    answer_s = _restarted(scene, state) if name == "daemon" else None
    twins = _most_at_once(scene)
    well_s = scene.well(without=killed)
    strange = {session: pids for session, pids in scene.ranks().items() if session != scene.present()}
    # A daemon that is killed takes its connections with it.
    lost = 0 if name == "daemon" else sum(not ended_well(client) for client in clients)
    kept = scene.daemon.model(MODEL).get("want") == "RUNNING"
    return Outcome(engine, name, state, len(clients), well_s, sum(map(len, strange.values())), twins, kept, lost, answer_s, len(killed))


def _restarted(scene: Scene, state: str) -> float | None:
    """As systemd's Restart=always does. Seconds from the start to an answer, of a model that was READY."""
    began_s = time.monotonic()
    scene.daemon.start()
    if state != "READY":
        return None
    with suppress(AssertionError):
        until(scene.answers, "an answer", 0.02)
        return time.monotonic() - began_s
    return None


def _most_at_once(scene: Scene) -> int:
    """Of the engines that are there at one moment, how many there are too many. What dies keeps its session for a moment: seen twice."""
    most, deadline_s = 0, time.monotonic() + 1.5
    before: set[int] = set()
    while time.monotonic() < deadline_s:
        living = {session for session, pids in scene.ranks().items() if session in pids and len(pids) > 1}
        most = max(most, len(living & before) - 1)
        before = living
        time.sleep(0.25)
    return max(0, most)


@contextmanager
def _scene(
    *,
    stub: bool = True,
    model: Path | None = None,
    environ: dict[str, str] | None = None,
    disk: bool = False,
    program: str = ActivatedDaemon.program,
) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="sx") as name:
        folder = Path(name)
        small = SmallDisk(folder / "state") if disk else None
        made = ActivatedDaemon(folder, settings(folder, stub=stub, model=model), environ)
        made.program = program
        made.start()
        try:
            made.settled()
            scene = Scene(made, 1.0 if stub else REAL_PATIENCE)
            if scene.well() is None:
                raise RuntimeError(f"the model never answered: {made.tail()}")
            if small:
                scene.disk = small
            yield scene
        finally:
            if small:
                small.writable(True)
                small.drain()
            if made.process is None or made.process.poll() is not None:
                made.start()
                made.settled()
            made.gone()
            if small:
                small.close()


# What is no kill.


def _others(trials: Sequence[str]) -> dict[str, str | None]:
    """By sentence, why it is bad; None where it is well."""
    found: dict[str, str | None] = {}
    for name in trials:
        try:
            found |= TRIALS[name]()
        except (OSError, RuntimeError, AssertionError) as error:
            found[f"{name}: {str(error).splitlines()[0][:200]}"] = "it could not be tried, or went wrong"
        for told, bad in list(found.items())[-3:]:
            print(f"     {told}{f': {bad}' if bad else ''}", flush=True)
    return found


def _inside() -> dict[str, str | None]:
    """Errors that nobody expects, raised in a share of the calls of the cluster, of Ray's connection and of the store, while engines,
    agents and Ray are killed: the daemon is the same afterwards, and all is well."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "faults"
        with _scene(environ={"FAULTS_FILE": str(file)}, program="tests.support.faulty_sparkd") as scene:
            made, daemon, waits = scene.daemon, scene.daemon.process, list[float | None]()
            hits = [scene.shim, scene.api_server, scene.of_ray("ray::Agent"), scene.of_ray("raylet")]
            for share in INSIDE:
                file.write_text(str(share))
                clients = scene.streams(4)
                time.sleep(INSIDE_S * rng.random())
                rng.choice(hits)()
                time.sleep(INSIDE_S)
                file.unlink()
                waits.append(scene.well())
                if bad := sum(not ended_well(client) for client in clients):
                    return {f"errors inside, one of {1 / share:.0f} calls": f"{bad} streams had no clean end"}
            same = made.process is daemon and daemon is not None and daemon.poll() is None
            kept = made.model(MODEL).get("want") == "RUNNING"
            count = made.sum_of("sparkd_internal_errors_total")
            worst = None if None in waits else max(one for one in waits if one is not None)
            bad = None if same and kept and worst is not None else f"the same daemon {same}, wish kept {kept}"
            return {f"{count:.0f} errors inside: the daemon went on, and all was well after {_s(worst)} at the most": bad}


def _disk() -> dict[str, str | None]:
    """Full: it serves on, starts a killed engine again and says what is not saved. Read-only at a restart: it says so and ends, is started
    again until that is mended, and adopts what runs. Nothing that was wished is lost."""
    found: dict[str, str | None] = {}
    with _scene(disk=True) as scene:
        disk, made = scene.disk, scene.daemon
        if disk is None:
            raise RuntimeError("there is no disk of its own")
        disk.fill()
        scene.shim()
        back_s = scene.well()
        told = any(one.startswith("StateNotSaved") for one in made.status()["conditions"])
        disk.drain()
        made.kill()
        made.start()
        after_s = scene.well()
        kept = made.model(MODEL).get("want") == "RUNNING"
        bad = None if None not in (back_s, after_s) and kept and told else f"told {told}, wish kept {kept}"
        found[f"disk full: a killed engine was back after {_s(back_s)}, a killed daemon, with room again, after {_s(after_s)}"] = bad
        made.kill()
        disk.writable(False)
        rank = max(scene.ranks(), default=0)
        made.start()
        code = made.process.wait(60) if made.process else None
        disk.writable(True)
        made.start()
        again_s = scene.well()
        bad = None if code == 3 and again_s is not None and scene.present() == rank else f"exit code {code}, rank {rank}"
        found[f"state directory read-only: refused, and adopted once it was mended, after {_s(again_s)}"] = bad
    return found


def _clock() -> dict[str, str | None]:
    """An hour on and two back, while streams run and an engine is started again: nothing that waits or counts may follow the calendar."""
    with tempfile.TemporaryDirectory() as folder:
        clock = ShiftedClock(Path(folder))
        with _scene(environ=clock.environ) as scene:
            failures, waits = scene.daemon.model(MODEL)["failures"], []
            for shift_s in (3600, -3600, 0):
                clients = scene.streams(4)
                clock.set(shift_s)
                time.sleep(1)
                bad = sum(not ended_well(client) for client in clients)
                if bad or scene.daemon.model(MODEL)["failures"] != failures:
                    return {f"clock jumps by {shift_s} s": f"{bad} streams were lost, {scene.daemon.model(MODEL)['failures']} failures"}
                scene.shim()
                clock.set(-shift_s)
                waits.append(scene.well())
                failures = scene.daemon.model(MODEL)["failures"]
            worst = None if None in waits else max(one for one in waits if one is not None)
            return {f"clock jumps: a killed engine was back after {_s(worst)} at the most": None if worst is not None else "never"}


def _storm() -> dict[str, str | None]:
    with _scene() as scene:
        made, rank = scene.daemon, scene.present()
        given = settings(made.folder, stub=True, model=None)
        made.configure(given)
        streams = scene.streams(STORM_STREAMS)
        for number in range(RELOADS):
            made.configure(given | {"global_ttl_s": 100_000 + number} if number % 5 else {"modles": number})
            if number % 2:
                made.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
            else:
                made.client.post("/admin/v1/reload")
        whole = sum(ended_well(client) and client.whole() for client in streams)
        made.configure(given)
        made.client.post("/admin/v1/reload").raise_for_status()
        same = scene.present() == rank
        told = f"{RELOADS} reloads, {whole} of {STORM_STREAMS} streams whole"
        return {told: None if whole == STORM_STREAMS and same else f"the engine is the same: {same}"}


TRIALS: Mapping[str, Callable[[], dict[str, str | None]]] = {
    "errors inside": _inside,
    "disk": _disk,
    "clock": _clock,
    "reload storm": _storm,
}


# What came of it.

_HEAD = "     engine target       state    streams  well s orphans  twins  wish  lost answer s"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _row(one: Outcome) -> str:
    well, answer = (f"{seconds:.1f}" if seconds is not None else "-" for seconds in (one.well_s, one.answer_s))
    wish = "kept" if one.wish_kept else "LOST"
    counts = f"{one.orphans:>7} {one.twins:>6} {wish:>5} {one.lost:>5} {answer:>8}"
    return f"{one.engine:6} {one.target:12} {one.state:8} {one.streams:>7} {well:>7} {counts}"


def _judge(outcomes: list[Outcome], others: dict[str, str | None], *, timed: bool) -> int:
    waited = [one.well_s for one in outcomes if one.well_s is not None]
    answers = [one.answer_s for one in outcomes if one.answer_s is not None]
    for target, times in sorted(Counter(one.target for one in outcomes).items()):
        these = [one.well_s for one in outcomes if one.target == target and one.well_s is not None]
        told = f"median {statistics.median(these):.1f} s, worst {max(these):.1f} s" if these else "never well"
        print(f"     {target:12} {times:>4} faults, {told}")
    hits = Counter(one.target for one in outcomes if one.killed)
    missing = [target for target in dict.fromkeys(one.target for one in outcomes) if not hits[target]]
    bars = {
        f"targets that no fault found: {', '.join(missing) or 0}": not missing,
        f"converged without a hand: {len(waited)} of {len(outcomes)}": len(waited) == len(outcomes),
        f"orphans: {sum(one.orphans for one in outcomes)}": not any(one.orphans for one in outcomes),
        f"lost wishes: {sum(not one.wish_kept for one in outcomes)}": all(one.wish_kept for one in outcomes),
        f"two engines of one model: {sum(one.twins for one in outcomes)}": not any(one.twins for one in outcomes),
        f"streams without a clean end: {sum(one.lost for one in outcomes)}": not any(one.lost for one in outcomes),
    }
    if answers and timed:
        median, worst = statistics.median(answers), max(answers)
        told = f"a killed daemon answers after {median:.1f} s (median), {worst:.1f} s (worst), bar {RESTART_BAR_S:.0f} s"
        bars[told] = max(answers) <= RESTART_BAR_S
    bars |= {f"{told}{f': {bad}' if bad else ''}": bad is None for told, bad in others.items()}
    for told, held in bars.items():
        print(f"{'held  ' if held else 'MISSED'} {told}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
