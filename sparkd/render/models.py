"""How the command line looks: tables, bars, progress lines and plain words for what the admin API answers. It asks no daemon."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from sparkd.render.page import PIPE_WIDTH, date, duration, json_text, printable, say_json
from sparkd.render.table import Table
from sparkd.units import GIB, MIB

# Beside what is written here, so that a verb needs one module for both.
__all__ = ["date", "duration", "printable", "say_json"]

# Columns of `sparkd ps --wide` alone.
_WIDE = ("KV CACHE", "FULL REQUESTS", "A TOKEN", "MARGIN", "FREE", "SIZED BY", "TOOLS", "REASONING")
BAR_CELLS = 20
# Takes the text of a progress line, and the step that must differ from the last one for a line in a pipe or a journal.
Line = Callable[[str, str], None]
_STYLES = {"READY": "green", "FAILED": "red", "STOPPED": "dim"}
_STAGES = {
    "STOPPED": "about to begin",
    "PLANNED": "finding room",
    "LOADING": "loading",
    "WARMING": "warming up",
    "SIZING": "sizing the KV cache",
    "READY": "ready",
    "DRAINING": "finishing its requests",
    "STOPPING": "stopping",
    "FAILED": "failed",
}


def terminal(*, stderr: bool = False) -> Console:
    """stdout or stderr as rich sees it, as wide as its terminal, or as wide as needed where it is none."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, emoji=False, width=None if stream.isatty() else PIPE_WIDTH)


def say_json_line(value: Any) -> None:
    """One document of a stream, on a line of its own."""
    sys.stdout.write(json_text(value) + "\n")
    sys.stdout.flush()


@contextmanager
def progress(console: Console) -> Iterator[Line]:
    """A line that changes in place on a terminal, from its first text on; elsewhere one line for each step."""
    last = ""

    def print_step(text: str, step: str) -> None:
        nonlocal last
        if step != last:
            last = step
            console.print(printable(text), markup=False)

    if not console.is_terminal:
        yield print_step
        return
    status = console.status("")

    def show(text: str, _step: str) -> None:
        status.update(escape(printable(text)))
        status.start()

    try:
        yield show
    finally:
        status.stop()


@contextmanager
def headers_of(source: str) -> Iterator[Callable[[int, int], None]]:
    """A line about headers that come from the hub, (read, to read)."""
    with progress(terminal(stderr=True)) as line:
        yield lambda done, total: line(f"{source}: headers of {done} of {total} files", "")


def stage(state: str, progress: Mapping[str, Any] | None, console: Console | None = None, reason: str | None = None) -> str:
    """`loading 50% as nvfp4, 31.7 of 63.4 GiB, 5.82 GB/s, about 5 s left`: only what is known, with a bar where `console` is a terminal.

    reason: what it waits for, or why it failed, as the daemon says it."""
    facts = dict(progress or {}) if state in ("LOADING", "WARMING", "SIZING") else {}
    words = _STAGES.get(state, state.lower())
    if reason and state in ("STOPPED", "FAILED"):
        words = reason if state == "STOPPED" else f"{words}: {reason}"
    kv = facts.get("kv") or {}
    if state == "SIZING" and kv.get("phase") == "rehearsing" and kv.get("source") in (None, "rehearsal"):
        words = "rehearsing the largest batches, to size the KV cache"
    if state == "LOADING" and facts.get("phase") == "starting":
        words = "starting its engine"
    if state == "LOADING" and facts.get("source") == "calibration":
        words = "measuring the inputs of its layers over a text, once"
    if facts.get("fraction") is not None and facts.get("phase") == "loading":
        cells = f" {bar(facts['fraction'], BAR_CELLS, console)}" if console and console.is_terminal else ""
        words += f"{cells} {facts['fraction']:.0%}{_origin(facts)}"
    parts = [words]
    if state == "LOADING":
        parts += _amounts(facts)
    if facts.get("weights_gib") is not None and len(parts) == 1:
        parts.append(f"{facts['weights_gib']:.2f} GiB of weights")
    if facts.get("kv_tokens") is not None:
        parts.append(f"KV cache of {facts['kv_tokens']:,} tokens")
    if facts.get("eta_s") is not None:
        parts.append(f"about {facts['eta_s']:.0f} s left")
    if facts.get("cache_state") == "writing" and facts.get("cache_why"):
        parts.append(facts["cache_why"])
    return ", ".join(parts)


def step(state: str, reason: str | None, wait: Mapping[str, Any] | None) -> str:
    """A step of a Line, which stays equal while a model's state, failure and wait stay, whatever its numbers.

    reason: of its failure.
    """
    return " ".join((state, *((wait["reason"], *wait["models"]) if wait else (reason or "",))))


def copying(what: str, progress: Mapping[str, Any], console: Console) -> str:
    """`copying from A to B 35%, 19.9 of 56.9 GiB, 5.82 GB/s, about 7 s left`: only what is known."""
    cells = f" {bar(progress['fraction'], BAR_CELLS, console)}" if console.is_terminal and progress["fraction"] is not None else ""
    share = "" if progress["fraction"] is None else f" {progress['fraction']:.0%}"
    left = [] if progress["eta_s"] is None else [f"about {progress['eta_s']:.0f} s left"]
    return ", ".join([f"{what}{cells}{share}", *_amounts(progress), *left])


def resident(models: Iterable[Mapping[str, Any]], console: Console, now_s: float | None = None, wide: bool = False) -> None:
    """`sparkd ps`: what runs, starts, stops or failed; below the table, why.

    wide: also how each KV cache was sized.
    """
    now_s = time.time() if now_s is None else now_s
    shown = list(models)
    if not shown:
        console.print("No model is resident. `sparkd ls` lists the known models; `sparkd load MODEL` loads one.")
        return
    rows = [{title: cell for title, cell in _cells(model, now_s).items() if wide or title not in _WIDE} for model in shown]
    # A process number is missed least; which node a model is on says where to look.
    spare = () if wide else ("PID", "LOAD", "KV TOKENS", "FOR", "MEMORY")
    table = Table(*rows[0], right=[title for title in rows[0] if title not in ("MODEL", "STATE", "NODE")], spare=spare)
    for row in rows:
        table.add(*row.values())
    table.show(console)
    for model in shown:
        progress = model["progress"] or {}
        if model["state"] == "PLANNED" or (model["state"] in ("LOADING", "WARMING", "SIZING") and progress):
            say(console, f"{model['name']}: {stage(model['state'], progress, console)}", "yellow")
        kv = progress.get("kv") or {}
        if kv.get("why") and model["state"] != "FAILED" and (wide or kv.get("phase") == "stock"):
            say(console, f"{model['name']}: KV cache: {kv['why']}", "yellow")
        for word in ("source_why", "peak_why") if wide else ():
            if kv.get(word):
                say(console, f"{model['name']}: KV cache: {_sized_why(word, str(kv[word]))}", "yellow")
        if progress.get("cache_state") in ("failed", "skipped"):
            reason = progress.get("cache_why") or "no reason was given"
            say(console, f"{model['name']}: its quantized weights were not cached: {reason}", "yellow")
        if message := " ".join(filter(None, (model["message"], model.get("doubt")))):
            reason = f" ({model['reason']})" if model["reason"] else ""
            failed = f" failed {duration(now_s - model['since_s'])} ago" if model["state"] == "FAILED" else ""
            retry = f" Next try in {model['retry_in_s']:.0f} s." if model["retry_in_s"] is not None else ""
            say(console, f"{model['name']}{failed}{reason}: {message}{retry}", _STYLES.get(model["state"], "yellow"))
        if last := model.get("last_failure"):
            ago = duration(now_s - last["at_s"])
            say(console, f"{model['name']} failed {ago} ago ({last['reason']}): {last['message']}", "red")


def _cells(model: Mapping[str, Any], now_s: float) -> dict[str, str | Text]:
    """By the title of the column. MARGIN and FREE: what was to stay free beside the KV cache, and what does."""
    progress, parsers = model["progress"] or {}, model.get("parsers") or {}
    kv = progress.get("kv") or {}
    return {
        "MODEL": model["name"],
        "STATE": _state(model["state"], progress, model.get("turn"), bool(model.get("doubt"))),
        "FOR": duration(now_s - model["since_s"]),
        "LOAD": _or_dash(model["load_s"], lambda s: f"{s:.1f} s") + (" (cache)" if progress.get("source") == "cache" else ""),
        "MEMORY": _or_dash(model["memory_gib"], lambda gib: f"{gib:g} GiB"),
        "KV TOKENS": _or_dash(progress.get("kv_tokens"), lambda tokens: f"{tokens:,}"),
        "KV CACHE": _or_dash(kv.get("pool_bytes"), size),
        "FULL REQUESTS": _or_dash(kv.get("sequences"), lambda number: f"{number:,.1f}"),
        "A TOKEN": _or_dash(kv.get("bytes_per_token"), lambda number: size(int(number))),
        "MARGIN": _or_dash(kv.get("margin_bytes"), size),
        "FREE": _or_dash(kv.get("slack_bytes"), lambda number: size(max(0, number))),
        "SIZED BY": "vLLM" if kv.get("phase") == "stock" else kv.get("source") or "-",
        "TOOLS": parsers.get("tool") or "-",
        "REASONING": parsers.get("reasoning") or "-",
        "REQUESTS": f"{model['in_flight']}" + (f" +{model['queued']}" if model["queued"] else ""),
        "PID": str(model["ranks"][0]["pid"]) if model["ranks"] else "-",
        "NODE": ", ".join(rank["node"] for rank in model["ranks"]) or model["node"] or "-",
    }


def known(models: Iterable[Mapping[str, Any]], console: Console) -> None:
    """`sparkd ls`: every model that can be served, whether it runs or not."""
    rows = list(models)
    if not rows:
        console.print("No model is known. Configure one in sparkd.yaml, or add one with `sparkd run FOLDER_OR_HUB_ID`.")
        return
    spare = ("CONTEXT", "WANT", "ALIASES", "SOURCE")
    table = Table("MODEL", "STATE", "WANT", "CONTEXT", "SOURCE", "ALIASES", right={"CONTEXT"}, folds={"ALIASES"}, spare=spare)
    for model in rows:
        table.add(
            model["name"],
            _state(model["state"], model["progress"] or {}),
            model["want"],
            _or_dash(model.get("max_model_len"), lambda tokens: f"{tokens:,}"),
            model["source"],
            ", ".join(model["aliases"]) or "-",
        )
    table.show(console)


def layers(listing: Mapping[str, Any], console: Console) -> None:
    """`sparkd ls --layers`: the classes of tensors, what is made of each, and the sums."""
    columns = ("NAME", "CLASS", "COUNT", "SHAPE", "DTYPE", "BYTES", "FORMAT", "RESULT")
    table = Table(*columns, right={"COUNT", "BYTES", "RESULT"}, spare=("SHAPE", "DTYPE", "CLASS"))
    for layer in listing["layers"]:
        table.add(
            layer["name"],
            layer["class"],
            f"{layer['count']:,}",
            "x".join(map(str, layer["shape"])) or "1",
            layer["dtype"],
            size(layer["bytes"]),
            Text(f"not {layer['refused']}", style="red") if layer["refused"] else layer["format"] or "-",
            _or_dash(layer["result_bytes"], size),
        )
    total = listing["result_bytes"]
    share = "-" if total is None else f"{total / listing['bytes'] if listing['bytes'] else 1.0:.0%}"
    table.add("all", "", f"{listing['count']:,}", "", "", size(listing["bytes"]), share, _or_dash(total, size), style="bold")
    table.show(console)
    if listing["quantization"]:
        console.print(f"The checkpoint is quantized already: {listing['quantization']}.", markup=False)
    if held := listing["held"]:
        if held["refusal"]:
            say(console, f"vLLM refuses it: {held['refusal']}.", "red")
        else:
            console.print(f"One node then holds {size(held['bytes'])} ({held['sureness']}).", markup=False)
        if held["unloaded"]:
            parts = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in held["unloaded"].items())
            console.print(f"vLLM leaves these parts on the disk: {parts}.", markup=False)
    for note in listing["notes"]:
        say(console, note, "yellow")


def cached(kept: Mapping[str, Any], console: Console, now_s: float | None = None) -> None:
    """`sparkd ls --cached`: the entries, below them why some would not be used, and the sums."""
    now_s = time.time() if now_s is None else now_s
    table = Table("ENTRY", "NODE", "SIZE", "USED", "VALID", "USED BY", right={"SIZE", "USED"}, folds={"USED BY"}, spare=("USED", "NODE"))
    for row in kept["entries"]:
        valid = Text("yes", style="green") if row["valid"] else Text("no", style="red")
        used = _or_dash(row["used_s"], lambda at: duration(now_s - at))
        table.add(row["id"], row["node"], size(row["size_bytes"]), used, valid, ", ".join(row["used_by"]) or "-")
    if kept["entries"]:
        table.show(console)
    else:
        console.print("No quantized weights are kept.")
    for row in (row for row in kept["entries"] if not row["valid"]):
        say(console, f"{row['id']} on {row['node']}: {row['fault']}", "yellow")
    for folder in kept["folders"]:
        limit = "" if folder["limit_bytes"] is None else f" of {size(folder['limit_bytes'])}"
        say(console, f"{size(folder['size_bytes'])}{limit} in {folder['path']} on {folder['node']}")


def size(count: int) -> str:
    """`1.50 GiB`, `213.4 MiB`, `12 KiB`, `22.5 KiB`, `96 B`."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1)):
        if count >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count / 1024:,.1f}".removesuffix(".0") + " KiB" if count >= 1024 else f"{count} B"


def overview(status: Mapping[str, Any], base_url: str, console: Console) -> None:
    """`sparkd status`: the daemon, its conditions, nodes, Ray and models, one line each."""
    health = "going down" if status["draining"] else "serving" if status["settled"] else "starting"
    rows = Table("", "", folds={""})
    costs = status["costs"]

    def add(name: str, text: str | Text) -> None:
        rows.add(Text(name, "bold"), text)

    add("sparkd", Text.assemble(f"{status['version']} at {base_url}, ", (health, "green" if health == "serving" else "yellow")))
    for condition in status["conditions"]:
        add("condition", Text(printable(condition), style="red"))
    for node in status["nodes"]:
        add("node", _node(node))
    add("models", _count(status["models"]))
    add("cost", _cost(costs))
    cluster = status["cluster"]
    joined = "not connected" if not cluster.get("connected") else f"connected to {cluster.get('address')}"
    add("Ray", f"{'own head' if cluster.get('own_head') else 'another head'}, {joined}")
    for listener in costs["ray_listeners"]:
        address, _, name = listener.partition(" ")
        add("", Text.assemble(f"listens on {address}  ", (name, "dim")))
    rows.show(console)


def event_line(event: Mapping[str, Any], console: Console) -> None:
    """One line of history: local time, kind, model, message."""
    line = Text.assemble(
        (date(event["at_s"]), "dim"), "  ", (f"{event['kind']:<9}", "bold"), f" {event['model'] + ': ' if event['model'] else ''}"
    )
    say(console, line.append(printable(event["message"])))


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a sentence: folded on a terminal, one whole line in a pipe."""
    console.print(Text(printable(text), style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)


def curl(base_url: str, model: str, question: str, needs_key: bool) -> str:
    """A command for a POSIX shell that puts `question` to `model`. The key is taken from SPARKD_API_KEY.

    Bounded and without chance: a small model that is left to itself may go on to the end of its context, minutes on a CPU.
    """
    request = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 512, "temperature": 0}
    body = json.dumps(request, ensure_ascii=False)
    lines = [f"curl {base_url}/v1/chat/completions", "-H 'Content-Type: application/json'", f"-d {shlex.quote(body)}"]
    if needs_key:
        lines.insert(1, '-H "Authorization: Bearer $SPARKD_API_KEY"')
    return " \\\n  ".join(lines)


def bar(fraction: float, width: int, console: Console) -> str:
    """`width` cells, filled in proportion."""
    full, empty = ("#", ".") if console.encoding not in ("utf-8", "utf8") else ("█", "░")
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return full * filled + empty * (width - filled)


def _sized_why(word: str, reason: str) -> str:
    return f"sized as it was because {reason}" if word == "source_why" else f"{reason}; its profile was corrected"


def _origin(progress: Mapping[str, Any]) -> str:
    if progress.get("source") == "cache":
        return " from the quantized cache"
    return f" as {progress['format']}" if progress.get("format") else ""


def _amounts(progress: Mapping[str, Any]) -> list[str]:
    """Bytes, rate and units, as far as they are known."""
    parts = []
    if progress.get("bytes_total") and progress.get("bytes_done") is not None:
        unit, name = (GIB, "GiB") if progress["bytes_total"] >= GIB else (MIB, "MiB")
        parts.append(f"{progress['bytes_done'] / unit:.1f} of {progress['bytes_total'] / unit:.1f} {name}")
    if progress.get("bytes_per_s"):
        parts.append(f"{progress['bytes_per_s'] / 1e9:.2f} GB/s")
    if progress.get("units_total") and progress.get("units_done") is not None:
        parts.append(f"{progress['units_done']} of {progress['units_total']} units")
    return parts


def _state(state: str, progress: Mapping[str, Any], turn: int | None = None, doubted: bool = False) -> Text:
    """
    turn: its place among those that wait.
    doubted: the watchdog has asked its engine a question; where it goes, that matters more.
    """
    if turn is not None or (doubted and state == "READY"):
        return Text("SUSPECT" if turn is None else f"WAITS {turn}", style="yellow")
    fraction = progress.get("fraction")
    percent = f" {fraction:.0%}" if state == "LOADING" and fraction is not None else ""
    return Text(state + percent, style=_STYLES.get(state, "yellow"))


def _node(node: Mapping[str, Any]) -> Text:
    reading = node["reading"]
    agent = "" if node["agent"] else ", its agent does not answer"
    if reading is None:
        return Text(f"{node['address']}: no reading yet{agent}")
    total, available = reading["mem_total_bytes"], reading["mem_available_bytes"]
    text = Text(f"{node['address']}  ")
    used = 1 - available / total
    cells = bar(used, BAR_CELLS, Console())
    text.append(cells, style="red" if used > 0.95 else "yellow" if used > 0.85 else "green")
    text.append(f"  {(total - available) / GIB:.1f} of {total / GIB:.1f} GiB in use, {reading['mem_free_bytes'] / GIB:.1f} GiB wholly free")
    text.append(f"; models hold {node['reserved_gib']:g} of {node['unified_memory_gib'] or 0:g} GiB{agent}")
    return text


def _count(states: Mapping[str, str]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(Counter(states.values()).items())) or "none is known"


def _cost(costs: Mapping[str, Any]) -> str:
    ray = ", ".join(f"{process['name']} {process['anonymous_bytes'] // MIB}" for process in costs["ray"])
    daemon = f"daemon {costs['daemon']['anonymous_bytes'] // MIB} MiB"
    ray_bytes = sum(process["anonymous_bytes"] for process in costs["ray"])
    return f"{daemon}, Ray {ray_bytes // MIB} MiB ({ray})" if ray else daemon


def _or_dash(value: Any, shown: Any) -> str:
    return "-" if value is None else shown(value)
