"""Shows in the terminal of `sparkd serve` the progress of the models, one answer, and the next commands. It controls nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict

from rich.console import Console as Terminal
from rich.markup import escape
from rich.text import Text

from sparkd.admin.client import DEFAULT_URL
from sparkd.control.supervisor import Supervisor
from sparkd.daemon.gateway_client import GatewayClient
from sparkd.errors import SparkdError
from sparkd.render import models as show
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.nouns import Want
from sparkd.state.snapshot import ModelView

EVERY_S = 0.25
WATCH_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 300.0
GREETING = "Hello!"
_WAITING = STARTING | {ModelState.STOPPED}


class Console:
    """A live line for each model on a terminal, one line for each change elsewhere (a journal, a pipe)."""

    def __init__(
        self,
        base_url: str,
        supervisor: Supervisor,
        client: GatewayClient,
        *,
        needs_key: bool,
        has_page: bool = True,
        lan_url: str | None = None,
        models: Collection[str] = (),
    ) -> None:
        """
        lan_url: how other machines reach the gateway, where they do so by another address.
        models: those of the command line, which are followed and asked; all that are loaded at start where there are none.
        """
        self._base_url = base_url
        self._lan_url = lan_url
        self._supervisor = supervisor
        self._client = client
        self._needs_key = needs_key
        self._has_page = has_page
        self._models = models
        self._terminal = show.terminal()
        self._said: dict[str, str] = {}
        self._started_at_s = time.monotonic()

    async def run(self, question: str | None) -> None:
        """Follow the loads that are on their way at start, put the question to the first model that is ready, say how to go on.

        On a terminal it goes on with later changes of models; a journal has the log for that. It ends quietly once its reader is gone.
        """
        with contextlib.suppress(OSError, SystemExit):
            await self._tell(question)

    async def _tell(self, question: str | None) -> None:
        lan = f", for other machines on [bold]{self._lan_url}[/]" if self._lan_url else ""
        self._say(f"sparkd listens on [bold]{self._base_url}[/]{lan}")
        names = await self._follow(question)
        ready = self._first_ready()
        if question is not None and names and not ready:
            self._say("[red]No model is ready, so no question was asked. `sparkd ps` and `sparkd logs MODEL` show why.[/]")
        if question is not None or self._terminal.is_terminal:
            self._say_how_to_go_on(ready, question or GREETING, any_models=bool(names))
        while self._terminal.is_terminal:
            self._say_changes(self._supervisor.snapshot().models.values())
            await asyncio.sleep(WATCH_EVERY_S)

    def say_ending(self, stop_engines: bool, running: int = 0, patience_s: float = 0.0) -> None:
        """running: requests that may finish, for so long at most."""
        # The terminal has shown ^C at the beginning of this line.
        end = "Stopping: engines and Ray end" if stop_engines else "Ending: engines keep running for the next daemon"
        if running:
            first = f"{running} request{'' if running == 1 else 's'} may finish first, for at most {patience_s:.0f} s"
            text = f"{end}. {first}; a second signal (Ctrl-C) ends it at once."
        else:
            text = f"{end} now." if stop_engines else f"{end}."
        self._say(f"\n{text}" if self._terminal.is_terminal else text)

    def say_ended(self, stop_engines: bool) -> None:
        self._say("Everything that was started has ended." if stop_engines else "Engines run on.")

    async def _follow(self, question: str | None) -> list[str]:
        """Names of the models that were wished for, in order, once none of them is on its way. The first that is ready is asked."""
        with show.progress(self._terminal) as line:
            while True:
                views = self._wished()
                self._say_changes(views)
                if question is not None and (ready := self._first_ready()):
                    await self._ask(ready, question)
                    question = None
                moving = [view for view in views if view.state in _WAITING]
                if not moving:
                    return [view.name for view in views]
                spent = f"  ({time.monotonic() - self._started_at_s:.0f} s)"
                progress = "\n  ".join(_line(view, self._terminal) for view in moving)
                line(progress + spent, "\n".join(_step(view) for view in moving))
                await asyncio.sleep(EVERY_S)

    def _wished(self) -> list[ModelView]:
        views = self._supervisor.snapshot().models.values()
        return [view for view in views if view.want is Want.RUNNING and (not self._models or view.name in self._models)]

    def _first_ready(self) -> str | None:
        return next((view.name for view in self._wished() if view.state is ModelState.READY), None)

    def _say_changes(self, views: Iterable[ModelView]) -> None:
        """A line for each model that became ready, failed or stopped since the last call."""
        for view in views:
            news = f"{view.state} {view.since_s}" if view.state is ModelState.FAILED else view.state.value
            before = self._said.get(view.name)
            self._said[view.name] = news
            if news == before:
                continue
            if view.state is ModelState.READY:
                loaded = f" after {view.load_s:.1f} s" if view.load_s and not view.adopted else ""
                self._say(f"[green]{escape(view.name)} is ready{loaded}[/]")
            elif view.state is ModelState.FAILED:
                retry = f" Next try in {view.retry_in_s:.0f} s." if view.retry_in_s else ""
                self._say(f"[red]{escape(show.printable(f'{view.name} failed ({view.reason}): {view.message}{retry}'))}[/]")
            elif view.state is ModelState.STOPPED and before:
                self._say(f"[dim]{escape(view.name)} is stopped[/]")

    async def _ask(self, name: str, question: str) -> None:
        try:
            answer = await self._client.chat(name, question, ANSWER_TIMEOUT_S)
        except SparkdError as error:
            self._say(f"[red]{escape(show.printable(error.message))}[/]")
            return
        took_s = time.monotonic() - self._started_at_s
        # As text, not markup: escape() doubles a backslash at the end.
        self._terminal.print(Text.assemble("\n", ("You asked", "bold"), f"    {question}"))
        self._terminal.print(Text.assemble(("It answered", "bold"), f"  {show.printable(answer.strip())}"))
        self._say(f"[dim]             {took_s:.0f} s after the start[/]")

    def _say_how_to_go_on(self, model: str | None, question: str, *, any_models: bool) -> None:
        self._say(f"\n[bold]Base URL[/]     {self._base_url}/v1")
        if self._has_page:
            self._say(f"[bold]Page[/]         {self._base_url}/")
        if model:
            self._say(f"[bold]Model[/]        {escape(model)}\n")
            # Not folded, so that it can be copied as it stands.
            self._terminal.print(show.curl(self._base_url, model, question, self._needs_key), markup=False, soft_wrap=True)
        elif not any_models:
            there = ", ".join(sorted(self._supervisor.snapshot().models))
            how = f"the first request for one loads it: {escape(there)}" if there else "`sparkd run FOLDER_OR_HUB_ID` adds one"
            self._say(f"No model is loaded at start; {how}.")
        if self._base_url != DEFAULT_URL:
            self._say(f"\nOther commands find it by [bold]export SPARKD_URL={self._base_url}[/]")
        self._say("\nCtrl-C ends it, and everything it started.")

    def _say(self, marked_up: str) -> None:
        # The reader may be gone, and the terminal too: the engines must be stopped all the same.
        with contextlib.suppress(OSError, SystemExit):
            self._terminal.print(marked_up)
            self._terminal.file.flush()


def _line(view: ModelView, terminal: Terminal) -> str:
    """How far a model is; while it cannot even begin, what it waits for."""
    return f"{view.name}: {show.stage(view.state.value, asdict(view.progress) if view.progress else None, terminal, view.message)}"


def _step(view: ModelView) -> str:
    return show.step(view.state.value, view.reason, asdict(view.wait) if view.wait else None)
