"""The tools of a verb that asks the daemon: its client, its two streams, and waiting for an operation."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparkd.admin.client import DEFAULT_URL, Client, admin_key, base_url, model_path
from sparkd.cli.options import CommonOptions, Json, KeyFile, Url, option
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

    def __init__(self, url: str | None, key_file: Path | None, *, json: bool) -> None:
        self._url, self._key_file = url, key_file
        self.json = json
        self.out: Console = show.terminal()
        self.err: Console = show.terminal(stderr=True)

    @cached_property
    def client(self) -> Client:
        """Raises ConfigError for an address or a key file that is none."""
        address = base_url(self._url or os.environ.get("SPARKD_URL") or DEFAULT_URL)
        return Client(address, admin_key(self._key_file, os.environ))

    def close(self) -> None:
        if "client" in vars(self):
            self.client.close()

    def answer(self, value: Any, text: str | Callable[[], object]) -> None:
        """Print the value with --json, else the sentence, or what `text` draws."""
        if self.json:
            show.say_json(value)
        elif callable(text):
            text()
        elif text:
            show.say(self.out, text)

    def follow(
        self,
        operation: dict[str, Any],
        name: str,
        shown: Callable[[dict[str, Any]], tuple[str, str] | None],
        timeout_s: float | None = None,
        again: str = "",
    ) -> dict[str, Any]:
        """The operation at its end, followed on stderr. Ctrl-C and a time-out end the waiting only.

        name: what it is, such as "the load of m".
        shown: a line, and the step that it tells.
        again: how to go on with one that was cancelled.

        Raises Conflict where it was cancelled, Unavailable on time-out.
        """
        began_s = time.monotonic()
        try:
            with show.progress(self.err) as line:
                while operation["state"] == "RUNNING":
                    left_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s - (time.monotonic() - began_s))
                    if left_s <= 0:
                        raise Unavailable(f"After {timeout_s:g} s {name} has not ended and continues. {how_on(operation)}")
                    if not self.json and (texts := shown(operation)) is not None:
                        line(f"{texts[0]}  ({time.monotonic() - began_s:,.0f} s)", texts[1])
                    operation = self.client.get(f"/operations/{operation['id']}", wait_s=left_s)
        except KeyboardInterrupt:
            show.say(self.err, f"\nNo longer waiting; {name} continues. {how_on(operation)}")
            raise
        if operation["state"] == "CANCELLED":
            raise Conflict(f"{name[0].upper()}{name[1:]} did not finish. {operation['message']} {again}".rstrip())
        return operation

    def wait(self, operation: dict[str, Any], timeout_s: float | None = None, *, brought_in: bool = False) -> dict[str, Any]:
        """Follow a load or an unload to its end. Raises ModelFailed, and as `follow` does.

        brought_in: whether this command added the model, which is removed again where it does not exist or cannot be reached.
        """
        model = operation["model"]

        def shown(now: dict[str, Any]) -> tuple[str, str] | None:
            view = self._seen(model)
            if view is None or view["state"] in _STILL[now["kind"]]:
                return None
            progress = show.stage(view["state"], view["progress"], self.err, view["message"])
            return f"{model}: {progress}", show.step(view["state"], view["reason"], view.get("wait"))

        operation = self.follow(operation, f"the {operation['kind']} of {model}", shown, timeout_s)
        if operation["state"] == "FAILED":
            view = self._seen(model)
            if brought_in and view is not None and view["reason"] in ABSENT:
                removal = self.client.delete(model_path(model))
                self.client.get(f"/operations/{removal['id']}", wait_s=POLL_S)
                raise ModelFailed(f"{model}: {operation['message']} {model} was removed again.")
            more = f"`sparkd logs {model}` shows more; " if view is not None and view["reason"] in _LOG_TELLS else ""
            raise ModelFailed(f"{model}: {operation['message']} {more}`sparkd unload {model}` stops further attempts.")
        return operation

    def _seen(self, model: str) -> dict[str, Any] | None:
        """None for one that was removed meanwhile: its operation is still there, and ends."""
        try:
            return self.client.model(model)
        except UnknownModel:
            return None


def verb(function: Callable[..., None], *, daemon: bool = True) -> Callable[..., None]:
    """A command whose first parameter is a Session: adds --json to the ones it declares itself, and of a daemon --url and --key-file."""
    own = inspect.signature(function, eval_str=True)

    def command(ctx: typer.Context, json: bool, url: str | None = None, key_file: Path | None = None, **arguments: Any) -> None:
        before = ctx.find_root().obj or CommonOptions()
        session = Session(url or before.url, key_file or before.key_file, json=json or before.json)
        try:
            function(session, **arguments)
        finally:
            session.close()

    named = inspect.Parameter.KEYWORD_ONLY
    common = ({"url": Url, "key_file": KeyFile} if daemon else {}) | {"json": Json}
    parameters = [
        inspect.Parameter("ctx", named, annotation=typer.Context),
        *(parameter.replace(kind=named) for parameter in list(own.parameters.values())[1:]),
        *(inspect.Parameter(name, named, default=False if name == "json" else None, annotation=kind) for name, kind in common.items()),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def copying(session: Session) -> Callable[[dict[str, Any]], tuple[str, str] | None]:
    """How far an operation is that copies bytes, for `Session.follow`."""

    def shown(now: dict[str, Any]) -> tuple[str, str] | None:
        return (show.copying(now["message"], now["progress"], session.err), now["message"]) if now["progress"] else None

    return shown


def how_on(operation: dict[str, Any]) -> str:
    seen = "`sparkd ps` shows it; " if operation["kind"] in _STILL else ""
    return f"{seen}`sparkd cancel {operation['id']}` cancels it."
