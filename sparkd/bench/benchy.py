"""Runs llama-benchy for one cell: its command, its text, its progress and its result."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkd.bench import benchy_program
from sparkd.bench.power import Span
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell
from sparkd.errors import RankError
from sparkd.execution import tool_process

NAME = "llama-benchy"
# A text of our own has that many words: more tokens than the deepest cell of the arena asks for at once.
WORDS = 200_000
BOOK_URL = "file:text"
MADE_UP, OWN = "words of a fixed seed", "own text"
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprst" for vowel in "aeio"]

Heard = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Where requests go.

    base_url: ends in /v1.
    tokenizer: a folder, or a hub id.
    interpreter: a Python that has the tool.
    """

    base_url: str
    model: str
    tokenizer: str
    interpreter: str
    key: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class MeasuredRequests:
    """The requests of a cell that count, out of its progress events. Times are wall-clock seconds."""

    began: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    output_tokens: int = 0
    prompt_tokens: int = 0
    run: int = 0
    errors: list[str] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> bool:
        """Whether it was the first request of all."""
        kind, number, at_s = event.get("type"), event.get("request_id"), event.get("ts")
        if not isinstance(number, int) or not isinstance(at_s, int | float):
            return False
        match kind:
            case "request_start":
                self.began[number] = float(at_s)
                self.run = int(event.get("run_index") or 0)
                return len(self.began) == 1
            case "request_first_token":
                self.first[number] = float(at_s)
            case "request_end":
                self.ended[number] = float(at_s)
                self.output_tokens += int(event.get("total_tokens") or 0)
                self.prompt_tokens += int(event.get("prompt_tokens") or 0)
                if event.get("error"):
                    self.errors.append(str(event["error"])[:300])
        return False

    def span(self) -> Span | None:
        """From the first request to the last end; None where none has ended."""
        return (min(self.began.values()), max(self.ended.values())) if self.began and self.ended else None

    def prompts(self) -> list[Span]:
        """The times in which a request had no token yet."""
        return _union((self.began[number], at_s) for number, at_s in self.first.items() if number in self.began)

    def running(self) -> list[Span]:
        """The times in which a request ran."""
        return _union((self.began[number], at_s) for number, at_s in self.ended.items() if number in self.began)


def put_text(home: Path, text: str) -> None:
    """Put a text where llama-benchy in this home looks for that of BOOK_URL before it asks the address. Blocks."""
    name = hashlib.md5(BOOK_URL.encode(), usedforsecurity=False).hexdigest()
    path = home / ".cache" / "llama-benchy" / f"{name}.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode())


def made_up() -> str:
    """Words that mean nothing, the same ones each time. No long part of them comes twice, so no prompt is in the prefix cache by chance."""
    dice = random.Random(0)
    words = ("".join(dice.choices(_SYLLABLES, k=dice.randint(1, 4))) for _ in range(WORDS))
    return " ".join(words)


def command(target: BenchTarget, cell: Cell, args: Arguments, result: Path) -> list[str]:
    flags: list[str | int] = ["--base-url", target.base_url, "--model", target.model, "--tokenizer", target.tokenizer]
    flags += ["--pp", cell.prompt_tokens, "--tg", cell.output_tokens, "--depth", cell.depth, "--concurrency", cell.concurrency]
    flags += ["--runs", args.runs, "--latency-mode", args.latency_mode, "--book-url", BOOK_URL]
    flags += ["--format", "json", "--save-result", str(result), "--emit-progress", "-"]
    switches = {
        "--enable-prefix-caching": args.prefix_caching,
        "--no-cache": args.no_cache,
        "--exact-tg": args.exact_tg,
        "--skip-coherence": args.skip_coherence,
        "--no-warmup": args.no_warmup,
        "--no-adapt-prompt": not args.adapt_prompt,
    }
    flags += [flag for flag, on in switches.items() if on]
    for extra in args.extra_body:
        flags += ["--extra-body", extra]
    return [target.interpreter, "-I", benchy_program.__file__, *map(str, flags)]


async def measure(target: BenchTarget, cell: Cell, args: Arguments, text: str, heard: Heard) -> list[dict[str, Any]]:
    """The rows of one cell: `benchmarks` of llama-benchy's JSON. Cancelled, it ends llama-benchy. Raises RankError with the reason.

    text: that prompts come from.
    heard: gets every progress event.
    """
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as folder:
        result, said = Path(folder, "result.json"), Path(folder, "said")

        await asyncio.to_thread(put_text, Path(folder), text)

        async def line_heard(line: bytes) -> None:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    await heard(event)

        words, env = command(target, cell, args, result), tool_process.environment(Path(folder), Path(folder))
        reason = await tool_process.run(NAME, words, env, said, line_heard, f"{target.key or ''}\n".encode())
        rows = await asyncio.to_thread(_read, result)
    if not rows:
        raise RankError(f"llama-benchy measured nothing: {reason}")
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _union(spans: Iterator[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined
