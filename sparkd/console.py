"""What `sparkd serve` shows in the terminal: how far the models are, one answer, and how to go on. Never controls anything."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from rich.console import Console as Terminal
from rich.markup import escape

from sparkd.errors import SparkdError
from sparkd.question import Asker
from sparkd.snapshot import ModelView
from sparkd.state import STARTING, ModelState, Want
from sparkd.supervisor import Supervisor

EVERY_S = 0.25
ANSWER_TIMEOUT_S = 300.0
_WORDS = {
    ModelState.PLANNED: "finding room",
    ModelState.LOADING: "loading weights",
    ModelState.WARMING: "warming up",
    ModelState.SIZING: "sizing the KV cache",
}


class Console:
    """A live line on a terminal, one line for each change elsewhere (a journal, a pipe)."""

    def __init__(self, base_url: str, supervisor: Supervisor, asker: Asker, *, needs_key: bool) -> None:
        self._base_url = base_url
        self._supervisor = supervisor
        self._asker = asker
        self._needs_key = needs_key
        self._terminal = Terminal(stderr=False, highlight=False, soft_wrap=True)
        self._started_at_s = time.monotonic()

    async def run(self, question: str | None) -> None:
        """Follow the loads that are on their way at start; then, with a question, put it to the first model and say how to go on."""
        self._terminal.print(f"sparkd listens on [bold]{self._base_url}[/bold]")
        names = await self._follow()
        if question is None or not names:
            return
        for name in names:
            view = self._supervisor.snapshot().models[name]
            if view.state is ModelState.READY:
                await self._ask(name, question)
                return
        self._terminal.print("[red]No model is ready, so nothing was asked. `sparkd ps` and `sparkd logs MODEL` tell more.[/red]")

    def say_ending(self, stop_engines: bool) -> None:
        self._terminal.print("Stopping: engines and Ray end now." if stop_engines else "Letting go: engines keep running for the next daemon.")

    def say_ended(self, stop_engines: bool) -> None:
        self._terminal.print("Everything that was started has ended." if stop_engines else "Engines run on.")

    async def _follow(self) -> list[str]:
        """Names of the models that were wished for, in order, once none of them is on its way any more."""
        said: dict[str, str] = {}
        status = self._terminal.status("starting") if self._terminal.is_terminal else None
        if status:
            status.start()
        try:
            while True:
                views = [view for view in self._supervisor.snapshot().models.values() if view.want is Want.RUNNING]
                for view in views:
                    self._say_change(view, said)
                if status:
                    status.update(escape(" | ".join(self._line(view) for view in views) or "no model is wished for"))
                if not any(view.state in STARTING | {ModelState.STOPPED} for view in views):
                    return [view.name for view in views]
                await asyncio.sleep(EVERY_S)
        finally:
            if status:
                status.stop()

    def _say_change(self, view: ModelView, said: dict[str, str]) -> None:
        key = f"{view.state}{view.message or ''}" if view.state is ModelState.FAILED else view.state.value
        if said.get(view.name) == key:
            return
        said[view.name] = key
        if view.state is ModelState.READY:
            loaded = f" after {view.load_s:.1f} s" if view.load_s else ""
            self._terminal.print(f"[green]{escape(view.name)} is ready{loaded}[/green]")
        elif view.state is ModelState.FAILED:
            self._terminal.print(f"[red]{escape(f'{view.name} failed ({view.reason}): {view.message}')}[/red]")
        elif not self._terminal.is_terminal:
            self._terminal.print(escape(self._line(view)))

    def _line(self, view: ModelView) -> str:
        parts = [view.name, _WORDS.get(view.state, view.state.value.lower())]
        progress = view.progress
        if progress and view.state in STARTING:
            if progress.fraction is not None and progress.phase == "loading":
                parts.append(f"{progress.fraction:.0%}")
            if progress.weights_gib is not None:
                parts.append(f"weights {progress.weights_gib:.2f} GiB")
            if progress.kv_tokens is not None:
                parts.append(f"KV cache {progress.kv_tokens:,} tokens")
            if progress.eta_s is not None:
                parts.append(f"about {progress.eta_s:.0f} s left")
        return f"{'  '.join(parts)}  ({time.monotonic() - self._started_at_s:.0f} s)"

    async def _ask(self, name: str, question: str) -> None:
        try:
            answer = await self._asker.chat(name, question, ANSWER_TIMEOUT_S)
        except SparkdError as error:
            self._terminal.print(f"[red]{escape(error.message)}[/red]")
            return
        took_s = time.monotonic() - self._started_at_s
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": question}]})
        key = " -H 'Authorization: Bearer '\"$SPARKD_API_KEY\"" if self._needs_key else ""
        lines = [
            "",
            f"[bold]You asked[/bold]   {escape(question)}",
            f"[bold]It answered[/bold] {escape(answer.strip())}",
            "",
            f"[bold]Base URL[/bold]    {self._base_url}/v1    [bold]model[/bold] {escape(name)}    ({took_s:.0f} s from start to answer)",
            f"  curl {self._base_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {escape(_quoted(body))}",
            "",
            "Ctrl-C ends it, and everything it started.",
        ]
        self._terminal.print("\n".join(lines))
        sys.stdout.flush()


def _quoted(text: str) -> str:
    """For a POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"
