"""Runs llama-benchy for one cell: its command, its text, its progress and its result. Never reads a power or a counter of an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sparkd.bench import benchy_program
from sparkd.bench.power import Span
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell
from sparkd.errors import RankError

# llama-benchy's own (config.py, --book-url).
BOOK = "https://www.gutenberg.org/files/1661/1661-0.txt"
# A text of our own has that many words: more tokens than the deepest cell of the arena asks for at once.
WORDS = 200_000
MADE_UP = "words of a fixed seed"
_LINE_BYTES = 1 << 20
_LAST_LINES = 20
_END_S = 10.0
_SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprst" for vowel in "aeio"]

Heard = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Where requests go. base_url: ends in /v1; tokenizer: a folder, or a hub id; interpreter: a Python that has llama-benchy; home: a
    folder for its text."""

    base_url: str
    model: str
    tokenizer: str
    interpreter: str
    home: Path
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

    def outputs(self) -> list[Span]:
        """The times in which requests ran, and each had a token."""
        return _without(_union((self.began[number], at_s) for number, at_s in self.ended.items() if number in self.began), self.prompts())


@dataclass(frozen=True, slots=True)
class Measured:
    """rows: `benchmarks` of llama-benchy's JSON; about: the rest of it."""

    rows: list[dict[str, Any]]
    about: dict[str, Any]


def text_file(home: Path, book: Path | None = None) -> tuple[str, str]:
    """(the address under which llama-benchy finds its text in `home`, what the text is). Blocks.

    book: a text file in place of it. llama-benchy's own text is used where this user's llama-benchy has fetched it once.
    """
    folder = home / ".cache" / "llama-benchy"
    folder.mkdir(parents=True, exist_ok=True)
    fetched = Path.home() / ".cache" / "llama-benchy" / _name(BOOK)
    source = book or (fetched if fetched.is_file() else None)
    content = source.read_text(encoding="utf-8", errors="replace") if source is not None else made_up()
    address = f"file:{hashlib.sha256(content.encode()).hexdigest()}"
    (folder / _name(address)).write_text(content, encoding="utf-8")
    return address, str(source) if source is not None else MADE_UP


def made_up() -> str:
    """Words that mean nothing, the same ones each time. No long part of them comes twice, so no prompt is in the prefix cache by chance."""
    dice = random.Random(0)
    words = ("".join(dice.choices(_SYLLABLES, k=dice.randint(1, 4))) for _ in range(WORDS))
    return " ".join(words)


def command(target: BenchTarget, cell: Cell, args: Arguments, book_url: str, result: Path) -> list[str]:
    flags: list[str | int] = ["--base-url", target.base_url, "--model", target.model, "--tokenizer", target.tokenizer]
    flags += ["--pp", cell.prompt_tokens, "--tg", cell.output_tokens, "--depth", cell.depth, "--concurrency", cell.concurrency]
    flags += ["--runs", args.runs, "--latency-mode", args.latency_mode, "--book-url", book_url]
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


async def measure(target: BenchTarget, cell: Cell, args: Arguments, book_url: str, heard: Heard) -> Measured:
    """One cell. heard: gets every progress event. Cancelled, it ends llama-benchy. Raises RankError with the reason."""
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as folder:
        result, said = Path(folder, "result.json"), Path(folder, "said")
        # An environment of our own: the daemon's may hold keys, and a proxy would be asked for 127.0.0.1.
        env = {"HOME": str(target.home), "PATH": os.environ.get("PATH", os.defpath), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with await asyncio.to_thread(said.open, "wb") as words:
            process = await asyncio.create_subprocess_exec(
                *command(target, cell, args, book_url, result),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=words,
                env=env,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        try:
            await _follow(process, target.key or "", heard)
        finally:
            await asyncio.shield(_end(process))
        reason = await asyncio.to_thread(_reason, said)
        if process.returncode != 0:
            raise RankError(f"llama-benchy ended with {process.returncode}: {reason}")
        measured = await asyncio.to_thread(_read, result)
    if not measured.rows:
        raise RankError(f"llama-benchy measured nothing: {reason}")
    return measured


def installed() -> str | None:
    """llama-benchy's version in this Python; None where it is not installed."""
    try:
        return version("llama-benchy")
    except PackageNotFoundError:
        return None


async def _follow(process: asyncio.subprocess.Process, key: str, heard: Heard) -> None:
    """Until it ends."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise RankError("llama-benchy could not be started.")
    stdin.write(f"{key}\n".encode())
    stdin.close()
    async for line in stdout:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            await heard(event)
    await process.wait()


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()


def _read(path: Path) -> Measured:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [dict(row) for row in content.pop("benchmarks")]
        return Measured(rows, content)
    except (OSError, ValueError, KeyError, TypeError):
        return Measured([], {})


def _reason(said: Path) -> str:
    """The last line that speaks of an error, else the last one."""
    lines = [line.strip()[:500] for line in said.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:] if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1]


def _name(address: str) -> str:
    return f"{hashlib.md5(address.encode(), usedforsecurity=False).hexdigest()}.txt"


def _union(spans: Iterator[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """`spans` less `holes`; both by time, without overlaps."""
    left: list[Span] = []
    for begin, end in spans:
        at = begin
        for hole_begin, hole_end in holes:
            if hole_end <= at or hole_begin >= end:
                continue
            if hole_begin > at:
                left.append((at, hole_begin))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left
