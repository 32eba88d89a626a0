"""How a plan looks: the table of what fits, a bar of the memory of each node, and the choice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sparkd.capacity.evidence import EXACT, GUESS
from sparkd.capacity.weights import AHEAD
from sparkd.checkpoint.source import name_of
from sparkd.render.models import say
from sparkd.render.page import duration, printable
from sparkd.render.table import Table
from sparkd.units import GIB, gib

# The parts of a node's memory, in the order of the bar; a letter each, so that it reads without colours too.
SEGMENTS = (
    ("system", "S", "bright_black"),
    ("weights", "W", "blue"),
    ("kv", "K", "green"),
    ("peak", "B", "yellow"),
    ("graphs", "G", "magenta"),
    ("context", "C", "cyan"),
    ("processes", "P", "cyan"),
    ("margin", "M", "red"),
    ("upper", "?", "yellow"),
    ("withheld", "-", "bright_black"),
    ("free", ".", "dim"),
)
_WORDS = {
    "system": "system",
    "weights": "weights",
    "kv": "KV cache",
    "peak": "largest batch",
    "graphs": "CUDA graphs",
    "context": "CUDA context",
    "processes": "processes",
    "margin": "margin",
    "upper": "reserve for an uncertain estimate",
    "withheld": "beyond the entry's limit",
    "free": "free",
}
_FIGURES = ("WEIGHTS", "KV CACHE", "REST", "FREE", "CONTEXT", "TOKENS/S", "FIRST LOAD", "NEXT")
_SURENESS = {
    EXACT: "vLLM's own answer, or what a start measured",
    GUESS: "a rough estimate, because vLLM has not answered",
}
_BRACKETS = "in brackets the cache that a load reserves"
BAR_CELLS = 64
OWN_WORDS = "HEAD is the address of node 0; ADDRESS, LINK and DEVICES are each node's own, which `sparkd fabric --env` prints there"
GENEROUS, NAMED = 12, 4


def plan(answer: Mapping[str, Any], console: Console, *, every: bool = False) -> None:
    """every: also the ways that are not legal, one line each."""
    _head(answer, console)
    choice, refusal = answer["choice"], answer["refusal"]
    if refusal is not None:
        say(console, refusal["message"] + "\n", "red")
    _options(answer, console, every)
    if choice is not None:
        _bars(choice, console)
        _how(choice, console)
    for note in answer["notes"]:
        say(console, note, "yellow")


class Preview:
    """The table of a plan whose numbers vLLM has yet to confirm, until the next one or `erase`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows = 0

    def draw(self, answer: Mapping[str, Any]) -> None:
        self.erase()
        self._console.record = True
        _head(answer, self._console)
        _options(answer, self._console, every=False)
        self._rows = self._console.export_text().count("\n")
        self._console.record = False

    def erase(self) -> None:
        """Lines that have left the screen stay."""
        if 0 < self._rows < self._console.height:
            self._console.file.write(f"\x1b[{self._rows}A\x1b[J")
        self._rows = 0


def _head(answer: Mapping[str, Any], console: Console) -> None:
    hardware, request = answer["hardware"], answer["asked"]
    stored = f"{answer['quantization']}, " if answer["quantization"] else ""
    say(
        console,
        f"{answer['model']}: {answer['architecture']}, {answer['layers']} layers, {stored}{gib(answer['bytes'])} on disk"
        f"{_unloaded(answer['unloaded'])}, up to {answer['max_len']:,} tokens",
        "bold",
    )
    if experts := answer["unknown_experts"]:
        size, names = gib(sum(experts.values())), ", ".join(list(experts)[:NAMED])
        reason = f"sparkd cannot quantize experts of these names ({names}). Choose a checkpoint that is quantized already"
        say(console, f"{size} keep their precision in every format: {reason}.", "red")
    requests = f"{request['requests']} request{'s' if request['requests'] != 1 else ''} at once"
    length = f"of {request['max_model_len']:,} tokens" if request["max_model_len"] else "of as many tokens as fit"
    length += f", drafting by {request['speculative']}" if request["speculative"] else ""
    whose = hardware.get("of")
    if whose is not None:
        nodes = f"{request['nodes']} nodes of {whose}" if request["nodes"] > 1 else f"the node of {whose}"
    else:
        nodes = f"{request['nodes']} x {hardware['name']}" if request["nodes"] > 1 else hardware["name"]
    if (entry := answer["entry"]) is not None:
        say(console, f"as the entry {entry['name']} of {entry['origin']} has it")
    each = " each" if whose is None or request["nodes"] > 1 else ""
    say(console, f"on {nodes} with {gib(hardware['memory_bytes'])}{each}, {requests} {length}\n")


def _unloaded(sizes: Mapping[str, int]) -> str:
    """The rest of the files, in brackets."""
    words = [f"{name} without speculative decoding" if name == AHEAD else name for name in sizes]
    return f" (vLLM leaves {gib(sum(sizes.values()))} there: {', '.join(words)})" if words else ""


def _options(answer: Mapping[str, Any], console: Console, every: bool) -> None:
    right, spare = {"NODES", *_FIGURES}, ("FIRST LOAD", "NEXT", "REST", "SURE", "SPLIT", "FREE")
    table = Table("FORMAT", "NODES", "SPLIT", "SURE", *_FIGURES, right=right, spare=spare)
    rejected = []
    measured = "bandwidth_bytes_s" in answer["hardware"]["learned"]
    sign = "~" if measured else "<"
    for number, option in enumerate(answer["options"]):
        parts = option["footprint"]
        if not option["fits"]:
            rejected.append(option)
            continue
        rest = sum(parts[name] for name in ("peak", "graphs", "context", "processes"))
        table.add(
            _format(option),
            str(option["nodes"]),
            _split(option),
            parts["sureness"],
            gib(parts["weights"]),
            _cache(parts),
            gib(rest),
            gib(parts["free"]),
            f"{option['max_model_len']:,}",
            f"{sign} {parts['decode_tokens_s']:,.0f}" if parts["decode_tokens_s"] else "-",
            *(_seconds(parts[key]) for key in ("first_load_s", "next_load_s")),
            style="bold green" if number == 0 else "",
        )
    if len(rejected) < len(answer["options"]):
        table.show(console)
        unknown = any(option["fits"] and option["footprint"]["decode_tokens_s"] is None for option in answer["options"])
        bound = "TOKENS/S: upper bound for one request, from memory bandwidth"
        if measured:
            bound = "TOKENS/S: estimate for one request, by the rate of an earlier bench"
        elif unknown:
            bound = "-: the speed of this machine is not known"
        say(console, f"Weights, cache and rest are for one node. {bound}.", "dim")
        say(console, _sureness(answer["options"]), "dim")
        say(console, _answered(answer["vllm"]) + "\n", "dim")
    _rejected(rejected, console, every or len(rejected) == len(answer["options"]))


def _seconds(seconds: float | None) -> str:
    """No load takes none."""
    return "-" if seconds is None else "<1s" if seconds < 1 else duration(seconds)


def _cache(parts: Mapping[str, Any]) -> str:
    """The formula's number, and the bound of a guess."""
    size, upper = parts["kv"], parts["upper_kv"]
    return gib(size) if gib(size) == gib(size + upper) else f"{size / GIB:.1f} (< {gib(size + upper)})"


def _sureness(options: Sequence[Mapping[str, Any]]) -> str:
    """The meaning of the column's words, those that are in it."""
    footprints = [option["footprint"] for option in options if option["fits"]]
    words = {parts["sureness"] for parts in footprints}
    brackets = f"; {_BRACKETS}" if any("(" in _cache(parts) for parts in footprints) else ""
    return " ".join(f"{word}: {meaning}{brackets if word == GUESS else ''}." for word, meaning in _SURENESS.items() if word in words)


def _answered(vllm: Mapping[str, Any]) -> str:
    """The line on the vLLM that was consulted."""
    runtime = vllm["runtime"]
    if vllm["version"] is None:
        return f"vLLM was not consulted: the environment of {runtime} has none."
    outcome = "answered" if vllm["answered"] else "was not asked about it, or could not tell"
    return f"vLLM {vllm['version']} in the environment of {runtime} {outcome}."


def _format(option: Mapping[str, Any]) -> str:
    """`nvfp4`, or `nvfp4 (its name)` of another checkpoint."""
    return f"{option['prequantized']} ({name_of(option['model'])})" if option["prequantized"] else str(option["format"])


def _rejected(options: list[Mapping[str, Any]], console: Console, every: bool) -> None:
    """One line for each reason; without `every` only where there was something to count."""
    ways: dict[str, list[str]] = {}
    for option in options:
        if every or option["footprint"] is not None:
            split = f" ({_split(option)})" if option["nodes"] > 1 else ""
            way = f"{_format(option)} on {option['nodes']} node{'s' if option['nodes'] > 1 else ''}{split}"
            ways.setdefault(option["reason"], []).append(way)
    shown = list(ways.items()) if every else list(ways.items())[:GENEROUS]
    for reason, choices in shown:
        more = f" and {len(choices) - NAMED} more" if len(choices) > NAMED else ""
        say(console, f"{', '.join(choices[:NAMED])}{more}: {reason}.", "yellow")
    if hidden := len(options) - sum(len(choices) for _, choices in shown):
        say(console, f"{hidden} more {'is' if hidden == 1 else 'are'} rejected: --all shows why.", "dim")
    if options:
        say(console, "")


def _bars(choice: Mapping[str, Any], console: Console) -> None:
    parts = choice["footprint"]
    if gib(parts["upper"]) == gib(0):
        parts = {**parts, "upper": 0}
    cells = min(BAR_CELLS, max(20, console.width - 20))
    widths = _widths([max(0, parts[name]) for name, *_ in SEGMENTS], cells)
    bar = [(letter * width, style) for (_, letter, style), width in zip(SEGMENTS, widths, strict=True)]
    for number in range(choice["nodes"]):
        console.print(Text.assemble((f"node {number}  ", ""), *bar, (f"  {gib(parts['memory'])}", "")))
    pairs = [((letter, style), (f" {_WORDS[name]} {gib(parts[name])}", "")) for name, letter, style in SEGMENTS if parts[name]]
    console.print(Text.assemble(*[piece for number, pair in enumerate(pairs) for piece in ([("  ", "")] if number else []) + list(pair)]))
    kv = f"{parts['kv_bytes_per_token'] / 1024:.1f} KiB of cache for a token" if parts["kv_bytes_per_token"] else "no cache"
    disk = f", {gib(parts['disk'])} of disk to keep it quantized" if parts["disk"] else ""
    say(console, f"{kv}, {gib(parts['load_peak'])} at the peak of a load{disk}")
    rest = ", and its cache takes what is free" if parts["cache"] is None else ""
    say(console, f"A start reserves {choice['reserved_gib']} GiB on each node{rest}.")
    console.print()


def _widths(sizes: list[int], cells: int) -> list[int]:
    """Cells of each segment: at least one for what is there, the last has what is left over."""
    total = max(1, sum(sizes))
    widths = [max(1, round(cells * size / total)) if size else 0 for size in sizes[:-1]]
    while sum(widths) > cells:
        widths[widths.index(max(widths))] -= 1
    return [*widths, cells - sum(widths)]


def _how(choice: Mapping[str, Any], console: Console) -> None:
    if choice.get("configured"):
        _decided(choice, console)
    elif choice["config"] is None:
        say(console, "sparkd takes stages of several ranks by tensor_parallel: auto alone; vLLM's own commands for it:", "bold")
    else:
        _entry(choice, console)
    if len(choice["ranks"]) > 1:
        say(console, f"{OWN_WORDS}.", "dim")
    for rank in choice["ranks"]:
        if len(choice["ranks"]) > 1:
            say(console, f"# node {rank['node']}", "dim")
        _whole(console, _command(rank, " \\\n    " if console.is_terminal else " "))
    say(console, "")


def _command(rank: Mapping[str, Any], gap: str) -> str:
    """The shell's command of a rank. gap: between its variables, and before each flag."""
    variables = [f"{name}={shlex.quote(value)}{gap}" for name, value in rank["environment"].items()]
    first, *others = rank["command"]
    return "".join([*variables, first, *(f"{gap if word.startswith('--') else ' '}{shlex.quote(word)}" for word in others)])


def _decided(choice: Mapping[str, Any], console: Console) -> None:
    if choice["config"]:
        say(console, f"Keys that are auto in the entry of {choice['name']} become:", "bold")
        _whole(console, "\n".join(f"    {key}: {_told(value)}" for key, value in choice["config"].items()))
        say(console, "")
    say(console, "The command that sparkd runs for its entry, without the socket and files of each start:", "bold")


def _entry(choice: Mapping[str, Any], console: Console) -> None:
    say(console, "In sparkd.yaml:", "bold")
    lines = ["models:", f"  {choice['name']}:"]
    for key, value in choice["config"].items():
        lines.append(f"    {key}: {_told(value)}")
    _whole(console, "\n".join(lines))
    say(console, "\nThe command that sparkd then runs:", "bold")


def _told(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value).lower() if isinstance(value, bool) else value


def _whole(console: Console, text: str) -> None:
    """A line that can be copied: it is never folded."""
    console.print(Text(printable(text)), soft_wrap=True)


def _split(option: Mapping[str, Any]) -> str:
    words = [f"{name}={option[key]}" for name, key in (("TP", "tensor_parallel"), ("PP", "pipeline_parallel")) if option[key] > 1]
    return " ".join(words) or "-"
