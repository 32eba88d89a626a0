"""`python -m tests.bench.change [--model FOLDER ..] [--pause-s N] [--changes N]`: what a change of model waits for.

A real daemon whose node has room for one model at a time, and requests by its gateway, for one model after the other. The daemon's events
take each change apart: `stays`, until the resident model goes (swap_idle_s, or its stay against models that evict each other in turns),
`ends`, its requests and its end, `returns`, from its end until the next model is placed (memory that comes back), `loads`, until that is
READY, and `answers`. Stays and returns are waiting, the rest is work. The daemon's reasons stand below the table.

Without --model it starts the stub engine, whose load takes --load-s. With it, real vLLM: a folder or a hub id for each model; with fewer of
them than --models several entries are the same one. --pause-s is the time between an answer and the next request: with more than 5
(swap_idle_s) the resident model counts as idle; with less than half a load the models count as taking turns. Exit status 1: a request was
not answered, or a change to a model that was not loaded before waited for more than 2 s beyond what was left of swap_idle_s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sparkd.capacity.requirement import offered_gib
from sparkd.config.config import load_config
from tests.bench.arguments import Parser, count, folder
from tests.stub import stub_engine
from tests.support.daemon_process import DaemonProcess, daemon

STOPS = ("DRAINING", "STOPPING")
BAR_S = 2.0
LIMIT_S = 1800.0
PARTS = ("stays", "ends", "returns", "loads", "answers")


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds. first: whether the model was not loaded before. reasons: why it waited, as the daemon says it."""

    model: str
    first: bool
    status: int
    stays: float
    ends: float
    returns: float
    loads: float
    answers: float
    reasons: tuple[str, ...]

    @property
    def waiting(self) -> float:
        return self.stays + self.returns

    @property
    def working(self) -> float:
        return self.ends + self.loads + self.answers


def change_of(model: str, first: bool, status: int, asked_s: float, answered_s: float, events: Sequence[Mapping[str, Any]]) -> Change:
    """events: those since it was asked for, in their order. A part that did not happen takes no time."""
    states = [(event["at_s"], event["model"], event["data"]["new"]) for event in events if event["kind"] == "state"]
    goes_s = next((at_s for at_s, name, state in states if name != model and state in STOPS), asked_s)
    gone_s = next((at_s for at_s, name, state in reversed(states) if name != model and state == "STOPPED"), goes_s)
    # One that finds no room is placed once more.
    placed_s = next((at_s for at_s, name, state in reversed(states) if name == model and state == "PLANNED"), gone_s)
    ready_s = next((at_s for at_s, name, state in reversed(states) if name == model and state == "READY"), placed_s)
    times = (asked_s, goes_s, gone_s, placed_s, ready_s, answered_s)
    parts = [max(0.0, after - before) for before, after in pairwise(times)]
    reasons = tuple(dict.fromkeys(event["message"] for event in events if event["kind"] in ("waits", "release")))
    return Change(model, first, status, *parts, reasons)


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="sc") as name, daemon(Path(name), _settings(Path(name), options)) as made:
        made.ray_connected()
        changes = _measure(made, options)
    _show(changes)
    allowed_s = BAR_S + max(0.0, load_config(None, environ={}).swap_idle_s - options.pause_s)
    late = [one for one in changes if one.first and one.waiting > allowed_s]
    lost = [one for one in changes if one.status != 200]
    for one in (*late, *lost):
        print(
            f"MISSED: {one.model} was answered with {one.status} and waited for {one.waiting:.1f} s; the bar is {allowed_s:.1f} s",
            file=sys.stderr,
        )
    return int(bool(lost or (late and not options.smallest)))


def _options() -> argparse.Namespace:
    parser = Parser("tests.bench.change", __doc__, model=[], models=2, changes=1, load_s=1.0)
    parser.add_argument(
        "--model", type=_source, action="append", default=[], help="a folder or a hub id, for real vLLM; may be given again"
    )
    parser.add_argument("--models", type=count, default=2, help="how many models take turns (2)")
    parser.add_argument("--changes", type=count, default=4, help="how many changes are measured (4)")
    parser.add_argument("--pause-s", type=float, default=6.0, help="seconds between an answer and the next request (6)")
    parser.add_argument("--load-s", type=float, default=4.0, help="how long the stub engine loads (4)")
    options: argparse.Namespace = parser.parse_args()
    if options.models < 2:
        parser.error("argument --models: a change needs at least two models")
    return options


def _source(text: str) -> str:
    """A folder that is there, absolute, or a hub id."""
    if text.startswith(("/", ".", "~")) or Path(text).is_dir():
        return str(folder(str(Path(text).expanduser())))
    return text


def _settings(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    sources = options.model
    if not sources:
        (scratch / "model").mkdir()
        sources = [str(scratch / "model")]
        given["engine"] = stub_engine(SPARKD_STUB_START_DELAY_S=str(options.load_s))
    # More than half of what the node lends: no two have room.
    room = offered_gib(load_config(None, environ={})) // 2 + 1
    keys = {"memory_gib": room, "wait_for_load_s": LIMIT_S}
    models = {f"m{number}": {"model": sources[number % len(sources)]} | keys for number in range(options.models)}
    return given | {"models": models}


def _measure(made: DaemonProcess, options: argparse.Namespace) -> list[Change]:
    changes: list[Change] = []
    for number in range(options.changes + 1):
        model = f"m{number % options.models}"
        if number:
            time.sleep(options.pause_s)
        after = max((event["seq"] for event in _events(made, 0)), default=0)
        asked_s = time.time()
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        response = made.client.post("/v1/chat/completions", json=body, timeout=LIMIT_S + 60)
        answered_s = time.time()
        events = [event for event in _events(made, after) if event["at_s"] <= answered_s]
        changes.append(change_of(model, number < options.models, response.status_code, asked_s, answered_s, events))
    # The first one found an empty node: that is no change.
    return changes[1:]


def _events(made: DaemonProcess, after: int) -> list[dict[str, Any]]:
    """Those that came after the one with this number."""
    events: list[dict[str, Any]] = []
    while page := made.client.get("/admin/v1/events", params={"after": after, "limit": 1000}).json()["events"]:
        events += page
        after = page[-1]["seq"]
    return events


def _show(changes: Sequence[Change]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("change to", *PARTS, "waiting s", "work s"):
        table.add_column(name, justify="left" if name == "change to" else "right")
    for one in changes:
        parts = (f"{getattr(one, name):.1f}" for name in PARTS)
        table.add_row(one.model + (", for the first time" if one.first else ""), *parts, f"{one.waiting:.1f}", f"{one.working:.1f}")
    console = Console(width=120)
    console.print(table)
    for number, one in enumerate(changes, 1):
        for message in one.reasons:
            console.print(f"{number}. {one.model}: {message}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
