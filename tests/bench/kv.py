"""What the KV cache sized after warm-up gains and costs: stock vLLM, the best utilization and ours, side by side. Never asserts; it prints.

    python -m tests.bench.kv [--preset cpu|h200] [--only REGEX] [--starts 10] [--rounds 20] [--margin-gib G] [--ballast-gib G|auto]

Without vLLM in an environment of its own: PYTHONPATH=SITE:$PWD python3 -m tests.bench.kv; torch and vLLM are all it needs.

Steps of each case (a model, eager or with CUDA graphs), which --only chooses by names such as "dense graphs best":
    stock    one start of stock vLLM at --utilization
    best     stock vLLM at the largest gpu_memory_utilization, in steps of 0.005, that starts and survives the load
    starts   --starts starts of ours under the load; the first --reps of them come in threes, which are timed: without a profile, from
             the profile, and stock vLLM at the best utilization without a load
    reserved one start of ours that may take --reserve-gib in all, under the load
The load is --rounds times max_num_seqs prompts of the longest length (kv_case.py). Each start is a process of its own, and before each
one the ballast process (kv_ballast.py) makes what is left the same again.

A GPU that has no memory left says so; a CPU's machine stops instead. There the memory ends where the margin begins: an engine that goes a
quarter of a GiB below it is ended, and a utilization that left less than the margin did not survive (kv_watch.py). On a CPU
gpu_memory_utilization is the share of the whole memory that one worker's process may have. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench import child, kv_figures, kv_models
from tests.bench.arguments import Parser, amount, count, model, new, pattern
from tests.bench.child import ChildFailed
from tests.bench.kv_ballast import Ballast
from tests.bench.kv_figures import GIB, STEP, Machine, Start
from tests.bench.kv_watch import Watch

LIMIT_S = 600.0
NEW_TOKENS = 16
# A process that has reached the device holds so much of it before vLLM looks (CUDA's context and the first kernels).
CONTEXT_BYTES = {True: int(0.6 * GIB), False: 0}
# A start is done again where other processes took more than this meanwhile, so often at most.
NOISE_BYTES, TRIES = GIB // 4, 2
# Of a device: more than the driver and the ballast's own context take.
OTHERS_BYTES = GIB
FLOOR_BYTES = 3 * GIB
STEPS = ("stock", "best", "starts", kv_figures.RESERVED)
WARM_UP, OWN_WARM_UP = "warm-up", "own warm-up"
LAST_PHASES = ("ready", "refused", "stock")
WORKERS = {True: "workers.kv.SparkWorker", False: "workers.kv.SparkCPUWorker"}


class TimeIsUp(Exception):
    """No further start begins."""


class Bench:
    """Runs starts; `starts` are the results so far."""

    def __init__(self, given: argparse.Namespace, folder: Path, logs: Path, ballast: Ballast, *, cuda: bool) -> None:
        self.starts: list[Start] = []
        self._given = given
        self._folder = folder
        self._logs = logs
        self._plugins = child.plugin_folder(folder)
        self._ballast = ballast
        self._cuda = cuda
        self._count = 0
        self._models: dict[str, Path] = {}
        self._margin = int(given.margin_gib * GIB)
        self._deadline = time.monotonic() + given.limit_s
        self._total = self._level()["total"]

    @property
    def machine(self) -> Machine:
        name = "device" if self._cuda else "host"
        return Machine(name, self._cuda, self._total, self._margin, self._given.rounds)

    def case(self, name: str, eager: bool, steps: Sequence[str]) -> None:
        """name: a model of the preset, or --model's."""
        case = _case(name, eager)
        if "stock" in steps:
            self._start(case, "stock", self._given.utilization)
        if "best" in steps:
            kv_figures.largest(lambda step: self._start(case, "tuned", round(step * STEP, 3)).survived, self._guess(), 1, int(1 / STEP))
        if "starts" in steps:
            self._ours(case)
        if kv_figures.RESERVED in steps:
            if not self._given.smallest and not any(self._profiles(case).glob("*.json")):
                self._start(case, OWN_WARM_UP)
            self._start(case, kv_figures.RESERVED)

    def _ours(self, case: str) -> None:
        tuned = kv_figures.best(one for one in self.starts if one.case == case)
        beside = tuned.utilization if tuned else round(self._guess() * STEP, 3)
        if tuned is None:
            self._start(case, WARM_UP, beside)
        # What compilers keep on disk is there before anything is timed; the rehearsal has kernels that stock vLLM compiles later.
        self._start(case, OWN_WARM_UP)
        for kind, rep in kv_figures.schedule(self._given.starts, self._given.reps):
            self._start(case, kind, beside if kind == "timed" else None, rep)

    def _guess(self) -> int:
        """In steps: the utilization that would leave the margin on a CPU, and nothing at all on a GPU, if only the process took memory."""
        free = self._level()["free"] - CONTEXT_BYTES[self._cuda] - (0 if self._cuda else self._margin)
        return math.floor(free / self._total / STEP)

    def _level(self) -> Any:
        """{"held", "free", "total"} of the ballast."""
        given = self._given
        if given.ballast_gib == "auto":
            return self._ballast.leave(int(given.leave_gib * GIB))
        return self._ballast.hold(int(float(given.ballast_gib) * GIB))

    def _start(self, case: str, kind: str, utilization: float | None = None, rep: int = 0) -> Start:
        if time.monotonic() > self._deadline:
            raise TimeIsUp
        for number in range(TRIES):
            start = self._once(case, kind, utilization, rep)
            told = start.failed or f"{start.tokens:,} KV tokens, ready after {start.process_s:.1f} s"
            _say(f"{case}: {kind} {'' if utilization is None else utilization} {told}")
            # Stock reads the machine only to refuse; what its process may have is a fixed share.
            unmoved = abs(start.others_bytes) <= NOISE_BYTES or (kind not in kv_figures.BY_WORKER and not start.ended_for_others)
            if unmoved or number == TRIES - 1 or self._given.smallest:
                break
            _say(f"again: other processes took {start.others_bytes / GIB:+.2f} GiB meanwhile")
        if kind not in (WARM_UP, OWN_WARM_UP):
            self.starts.append(start)
            self.record()
        return start

    def _tell_of_others(self, level: Any) -> None:
        """A kernel of another process shares the device in turns, so times beside it say little."""
        others = level["total"] - level["free"] - level["held"] - CONTEXT_BYTES[True]
        if self._cuda and others > OTHERS_BYTES:
            _say(f"other processes hold {others / GIB:.1f} GiB of the device: times taken beside them do not compare")

    def record(self) -> None:
        """After every start: a lent machine may be gone before the last one."""
        if self._given.json:
            self._given.json.write_text(json.dumps(kv_figures.to_json(self.starts, self.machine), indent=1), encoding="utf-8")

    def _once(self, case: str, kind: str, utilization: float | None, rep: int) -> Start:
        model, eager, dummy = self._model(case)
        given, more = self._given, dict[str, str]()
        arguments = kv_models.arguments(given.preset, cuda=self._cuda, eager=eager, dummy=dummy, attention=given.attention_backend)
        self._count += 1
        report = self._logs / f"{self._count:03d}-{case.replace(' ', '-')}-{kind}.report"
        ours = kind in kv_figures.BY_WORKER or kind == OWN_WARM_UP
        reserved = int(given.reserve_gib * GIB) if kind == kv_figures.RESERVED else 0
        if ours:
            arguments["worker_cls"] = WORKERS[self._cuda]
            known = {"margin_bytes": self._margin, "profiles": str(self._profiles(case)), "report": str(report)}
            known |= {"reserved_bytes": reserved} if reserved else {}
            more["SPARKD_KV"] = json.dumps(known)
        else:
            arguments["gpu_memory_utilization"] = utilization
        env = child.environment(self._plugins, ours=ours, more=more)
        env.pop("VLLM_CPU_KVCACHE_SPACE")  # it would be the cache's size
        rounds = 0 if kind in ("timed", WARM_UP, OWN_WARM_UP) else given.rounds
        question = {"model": str(model), "arguments": arguments, "rounds": rounds, "new_tokens": NEW_TOKENS}
        if kind == "first":
            shutil.rmtree(self._profiles(case), ignore_errors=True)
        level = self._level()
        self._tell_of_others(level)
        free = question["free"] = level["free"]
        watch = None
        if not self._cuda:
            least = self._margin - NOISE_BYTES
            watch = Watch(self._ballast, free, level["held"], least, FLOOR_BYTES, lambda: _told(report).get("phase") in LAST_PHASES)
        began = time.monotonic()
        start = Start(case, kind, utilization, rep, free, reserved=reserved)
        try:
            answer = child.ask(
                "tests.bench.kv_case", question, env, limit_s=given.start_limit_s, log=report.with_suffix(".log"), watch=watch
            )
            said = dict(answer.value)
            process_s = said.pop("ready_at") - began
            start = replace(start, process_s=process_s, **said)
            if rounds and not start.asked:
                start = replace(start, asked=1, failed=child.reason(answer.log.splitlines(), 1))
        except ChildFailed as failed:
            start = replace(start, failed=str(failed))
        start = replace(start, report=_told(report))
        return start if watch is None else _judged(start, watch, self._margin)

    def _model(self, case: str) -> tuple[Path, bool, bool]:
        """(folder, eager, whether its weights are made up)."""
        name, _, mode = case.rpartition(" ")
        if self._given.model:
            return self._given.model, mode == "eager", False
        if name not in self._models:
            # Once: a profile is of a checkpoint, and another time of writing is another checkpoint.
            self._models[name] = kv_models.write_model(self._folder, self._given.preset, name)
        return self._models[name], mode == "eager", True

    def _profiles(self, case: str) -> Path:
        return self._folder / "profiles" / case.replace(" ", "-")


def _told(report: Path) -> dict[str, Any]:
    """What the worker class wrote; {} where it wrote nothing."""
    if not report.exists():
        return {}
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _judged(start: Start, watch: Watch, margin: int) -> Start:
    """With what only a watch on a CPU knows."""
    start = replace(start, others_bytes=watch.others_bytes)
    if watch.over:
        return replace(start, failed=watch.over, ended_for_others=watch.for_others)
    if start.kind not in kv_figures.BY_WORKER and start.failed is None and start.free_lowest is not None and start.free_lowest < margin:
        return replace(start, failed=f"over-commits: {start.free_lowest / GIB:.2f} GiB were left of {margin / GIB:.2f}")
    return start


def _case(name: str, eager: bool) -> str:
    return f"{name} {'eager' if eager else 'graphs'}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(starts: Sequence[Start], machine: Machine) -> int:
    """The number of bars missed."""
    print(f"{machine.name} of {machine.total / GIB:.1f} GiB; margin asked {machine.margin / GIB:.2f} GiB; load: {machine.rounds} rounds\n")
    print(kv_figures.starts_table(starts), end="\n\n")
    rows = list(kv_figures.figures(starts, machine))
    print(kv_figures.table(rows))
    return sum(row.met is False for row in rows)


def arguments() -> argparse.ArgumentParser:
    parser = Parser("tests.bench.kv", __doc__, preset="smallest", only="dense eager reserved", starts=1, reps=1, rounds=1, ballast_gib="0")
    parser.add_argument("--preset", choices=sorted(kv_models.PRESETS))
    parser.add_argument("--model", type=model, help="a checkpoint's folder instead of the preset's models")
    parser.add_argument(
        "--only",
        type=pattern,
        default="",
        help="a regular expression for the steps' names: MODEL eager|graphs stock|best|starts|reserved",
    )
    parser.add_argument("--starts", type=count, default=10, help="of ours, under the load")
    parser.add_argument("--reps", type=count, default=3, help="how often the times are taken")
    parser.add_argument("--rounds", type=count, default=20, help="of the load")
    parser.add_argument("--utilization", type=float, default=0.9, help="of stock vLLM in the step `stock`")
    parser.add_argument("--margin-gib", type=amount, help="what ours is to leave free")
    parser.add_argument("--reserve-gib", type=amount, help="what the whole engine may take in the step `reserved`")
    parser.add_argument("--ballast-gib", default="auto", help="held by another process; auto: all but --leave-gib")
    parser.add_argument("--leave-gib", type=amount, help="what an automatic ballast leaves")
    parser.add_argument("--attention-backend", default="TRITON_ATTN", help="on a GPU; auto: vLLM's choice")
    parser.add_argument("--limit-s", type=amount, default=float("inf"), help="no start begins later")
    parser.add_argument("--start-limit-s", type=amount, default=LIMIT_S, help="a start that takes longer is ended")
    parser.add_argument("--logs", type=new, help="folder for logs and reports; a temporary one without")
    parser.add_argument("--json", type=new)
    return parser


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    import torch

    cuda = torch.cuda.device_count() > 0
    given.preset = given.preset or ("h200" if cuda else "cpu")
    preset = kv_models.PRESETS[given.preset]
    given.margin_gib = preset.margin_gib if given.margin_gib is None else given.margin_gib
    given.leave_gib = preset.leave_gib if given.leave_gib is None else given.leave_gib
    given.reserve_gib = preset.reserve_gib if given.reserve_gib is None else given.reserve_gib
    todo: dict[tuple[str, bool], list[str]] = {}
    for name in [given.model.name] if given.model else preset.models:
        for eager in (True, False) if cuda else (True,):
            steps = [step for step in STEPS if re.search(given.only, f"{_case(name, eager)} {step}")]
            if steps:
                todo[name, eager] = steps
    if not todo:
        parser.error(f"argument --only: {given.only!r} matches no step")
    child.end_with_children()
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        logs = given.logs or Path(temporary) / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        with Ballast(FLOOR_BYTES) as ballast:
            bench = Bench(given, Path(temporary), logs, ballast, cuda=cuda)
            try:
                for (name, eager), steps in todo.items():
                    bench.case(name, eager, steps)
            except TimeIsUp:
                _say("--limit-s is over: what was not begun is not in the table")
        missed = _print(bench.starts, bench.machine)
        if given.smallest:
            return int(any(start.failed for start in bench.starts))
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
