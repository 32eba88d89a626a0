"""The tools of a verb that asks the daemon: its client, its two streams, and waiting for an operation."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparkd.admin.client import DEFAULT_URL, Client, admin_key, base_url, model_path
from sparkd.cli.options import CommonOptions, Json, KeyFile, Url, option
from sparkd.condition import Condition
from sparkd.errors import ABSENT, Conflict, ModelFailed, Unavailable, UnknownModel
from sparkd.render import models as show
from sparkd.units import real

POLL_S = 1.0

NoWait = Annotated[bool, option("--no-wait", help="Return without waiting.")]
Timeout = Annotated[
    float | None, option("--timeout", metavar="S", parser=real("--timeout", 0, None, "seconds"), help="Stop waiting after S seconds.")
]
Follow = Annotated[bool, option("-f", "--follow", help="Keep printing new lines until Ctrl-C.")]

# States that say nothing about how far an operation is.
_STILL = {"load": ("READY",), "unload": ("READY", "STOPPED", "FAILED")}
# Failures of an engine that was started, whose messages do not name its log.
_LOG_TELLS = frozenset(("EngineFrozen", "InternalError", "MemoryGuard", "NodeLost", "RankHangs", "RankLost", "RankMissing", "WrongModel"))


class Session:
    """The tools of a verb: the client, whether JSON is wanted, and the two streams."""

    def __init__(self, options: CommonOptions) -> None:
        url = base_url(options.url or os.environ.get("SPARKD_URL") or DEFAULT_URL)
        self.client = Client(url, admin_key(options.key_file, os.environ))
        self.json = options.json
        self.out: Console = show.terminal()
        self.err: Console = show.terminal(stderr=True)

    def answer(self, value: Any, text: str | Callable[[], object]) -> None:
        """Print the value with --json, else the sentence, or what `text` draws."""
        if self.json:
            show.say_json(value)
        elif isinstance(text, str):
            show.say(self.out, text)
        else:
            text()

    def follow(
        self, operation: dict[str, Any], shown: Callable[[dict[str, Any]], tuple[str, str] | None], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The operation at its end, or as it is after timeout_s, still RUNNING. shown: a line for stderr, and the step that it tells."""
        began_s = time.monotonic()
        with show.progress(self.err) as line:
            while operation["state"] == "RUNNING":
                left_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s - (time.monotonic() - began_s))
                if left_s <= 0:
                    break
                if not self.json and (texts := shown(operation)) is not None:
                    line(*texts)
                operation = self.client.get(f"/operations/{operation['id']}", wait_s=left_s)
        return operation

    def wait(self, operation: dict[str, Any], timeout_s: float | None = None, *, brought_in: bool = False) -> dict[str, Any]:
        """Follow a load or an unload to its end on stderr. Raises ModelFailed, Conflict where it was cancelled, Unavailable on time-out.

        Ctrl-C ends the waiting only. brought_in: whether this command added the model, which is removed again where it does not exist or
        cannot be reached.
        """
        model, began_s = operation["model"], time.monotonic()
        try:
            with show.progress(self.err) as line:
                while operation["state"] == "RUNNING":
                    waited_s = time.monotonic() - began_s
                    left_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s - waited_s)
                    if left_s <= 0:
                        kind = operation["kind"]
                        raise Unavailable(f"The {kind} of {model} has not ended after {timeout_s:g} s and continues. {how_on(operation)}")
                    view = self._seen(model)
                    if view is not None and not self.json and view["state"] not in _STILL[operation["kind"]]:
                        bar = self._bar(view)
                        message = bar.message if bar is not None else view["message"]
                        progress = show.stage(view["state"], view["progress"], self.err, message)
                        step = show.step(view["state"], bar.reason if bar is not None else view["reason"], view.get("wait"))
                        line(f"{model}: {progress}  ({waited_s:.0f} s)", step)
                    operation = self.client.get(f"/operations/{operation['id']}", wait_s=left_s)
        except KeyboardInterrupt:
            self.err.print(f"\nNo longer waiting; the {operation['kind']} of {model} continues. {how_on(operation)}", markup=False)
            raise
        if operation["state"] == "FAILED":
            view = self._seen(model)
            if brought_in and view is not None and view["reason"] in ABSENT:
                removal = self.client.delete(model_path(model))
                self.client.get(f"/operations/{removal['id']}", wait_s=POLL_S)
                raise ModelFailed(f"{model}: {operation['message']} {model} was removed again.")
            more = f"`sparkd logs {model}` shows more; " if view is not None and view["reason"] in _LOG_TELLS else ""
            raise ModelFailed(f"{model}: {operation['message']} {more}`sparkd unload {model}` stops further attempts.")
        if operation["state"] == "CANCELLED":
            raise Conflict(f"The {operation['kind']} of {model} was cancelled: {operation['message']}")
        return operation

    def _bar(self, view: dict[str, Any]) -> Condition | None:
        """The condition that keeps the daemon from loading anything, for a model that the daemon has not looked at yet."""
        if view["state"] != "STOPPED" or view["message"]:
            return None
        return show.bar_in(Condition(**row) for row in self.client.get("/status")["typed_conditions"])

    def _seen(self, model: str) -> dict[str, Any] | None:
        """None for one that was removed meanwhile: its operation is still there, and ends."""
        try:
            return self.client.model(model)
        except UnknownModel:
            return None


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is a Session: adds --url, --key-file and --json to the ones it declares itself."""
    own = inspect.signature(function, eval_str=True)

    def command(ctx: typer.Context, url: str | None, key_file: Path | None, json: bool, **arguments: Any) -> None:
        session = Session(given_options(ctx, url, key_file, json=json))
        try:
            function(session, **arguments)
        finally:
            session.client.close()

    named = inspect.Parameter.KEYWORD_ONLY
    common = {"url": Url, "key_file": KeyFile, "json": Json}
    parameters = [
        inspect.Parameter("ctx", named, annotation=typer.Context),
        *(parameter.replace(kind=named) for parameter in list(own.parameters.values())[1:]),
        *(inspect.Parameter(name, named, default=False if name == "json" else None, annotation=kind) for name, kind in common.items()),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def given_options(ctx: typer.Context, url: str | None, key_file: Path | None, *, json: bool) -> CommonOptions:
    """The options of a verb, with those in front of it."""
    before = ctx.find_root().obj or CommonOptions()
    return replace(before, url=url or before.url, key_file=key_file or before.key_file, json=json or before.json)


def how_on(operation: dict[str, Any]) -> str:
    return f"`sparkd ps` shows it; `sparkd cancel {operation['id']}` cancels it."
