"""The verbs that ask a running daemon: load, unload, cancel, rm, ps, ls, logs, status, events. Never imports the daemon or its parts."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparkd.admin.client import DEFAULT_URL, Client, admin_key, base_url, model_path
from sparkd.cli.options import CommonOptions, Json, KeyFile, Url, argument, option
from sparkd.condition import Condition
from sparkd.errors import ABSENT, ConfigError, Conflict, ModelFailed, Unauthorized, Unavailable, UnknownModel, UnknownRoute
from sparkd.render import models as show
from sparkd.units import MOST, real, whole

POLL_S = 1.0
LOG_LINES = 200
# States that say nothing about how far an operation is.
_STILL = {"load": ("READY",), "unload": ("READY", "STOPPED", "FAILED")}

Model = Annotated[str, argument(metavar="MODEL", help="Name or alias of a known model.")]
NoWait = Annotated[bool, option("--no-wait", help="Return without waiting.")]
Timeout = Annotated[
    float | None, option("--timeout", metavar="S", parser=real("--timeout", 0, None, "seconds"), help="Stop waiting after S seconds.")
]
Follow = Annotated[bool, option("-f", "--follow", help="Keep printing new lines until Ctrl-C.")]


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

    def of_cluster(self, path: str) -> dict[str, Any] | None:
        """The daemon's answer about all nodes. None, after a line on stderr, where the caller must read this node alone: no daemon answers,
        or the daemon requires a key, or its release lacks the route."""
        try:
            return self.client.get(path)
        except Unavailable:
            alone = "no daemon answers"
        except (Unauthorized, UnknownRoute) as error:
            alone = error.clause
        if not self.json:
            self.err.print(f"Shows this node only: {alone}.", style="dim", markup=False)
        return None

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
                        raise Unavailable(f"The {kind} of {model} has not ended after {timeout_s:g} s and continues. {_how_on(operation)}")
                    view = self._seen(model)
                    if view is not None and not self.json and view["state"] not in _STILL[operation["kind"]]:
                        bar = self._bar(view)
                        message = bar.message if bar is not None else view["message"]
                        progress = show.stage(view["state"], view["progress"], self.err, message)
                        step = show.step(view["state"], bar.reason if bar is not None else view["reason"], view.get("wait"))
                        line(f"{model}: {progress}  ({waited_s:.0f} s)", step)
                    operation = self.client.get(f"/operations/{operation['id']}", wait_s=left_s)
        except KeyboardInterrupt:
            self.err.print(f"\nNo longer waiting; the {operation['kind']} of {model} continues. {_how_on(operation)}", markup=False)
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


def register(app: typer.Typer) -> None:
    for function in (load, unload, cancel, rm, ps, ls, logs, status, events):
        app.command(function.__name__)(verb(function))


def load(
    session: Session,
    model: Model,
    recipe: Annotated[str | None, option("--recipe", metavar="NAME", help="Use this recipe from now on: NAME or NAME@VARIANT.")] = None,
    no_wait: NoWait = False,
    timeout: Timeout = None,
) -> None:
    """Load a known model and wait until it answers.

    With --recipe, an unknown name becomes a model of that recipe. Ctrl-C stops waiting, not the load; `sparkd cancel OPERATION` cancels the
    load.
    """
    operation = session.client.post(f"{model_path(model)}/load", {"recipe": recipe} if recipe is not None else None)
    _finish(session, [operation], no_wait, timeout)


def unload(
    session: Session,
    model: Annotated[str | None, argument(metavar="MODEL", help="Name or alias of a model.")] = None,
    everything: Annotated[bool, option("--all", help="Unload every model.")] = False,
    no_wait: NoWait = False,
    timeout: Timeout = None,
) -> None:
    """Let the requests of a model finish, then unload it."""
    if (model is None) == (not everything):
        raise ConfigError("Name a model, or give --all.")
    names = [model] if model is not None else [view["name"] for view in session.client.models() if _resident(view)]
    _finish(session, [session.client.post(f"{model_path(name)}/unload") for name in names], no_wait, timeout)
    if not names and not session.json:
        session.err.print("No model is loaded.")


def cancel(session: Session, operation: Annotated[str, argument(metavar="OPERATION", help="Id of the operation.")]) -> None:
    """Cancel a running load, unload or pull.

    After a cancelled load the model is stopped; after a cancelled unload it is loaded again.
    """
    ended = session.client.delete(f"/operations/{operation}")
    if session.json:
        show.say_json(ended)
    else:
        session.out.print(f"The {ended['kind']} of {ended['model']}: {ended['state'].lower()}. {ended['message']}", markup=False)


def rm(
    session: Session,
    model: Model,
    no_wait: NoWait = False,
    timeout: Timeout = None,
    cached: Annotated[bool, option("--cached", help="Remove its quantized weights on this node instead.")] = False,
    config: Annotated[Path | None, option("--config", metavar="FILE", help="With --cached: path of sparkd.yaml.")] = None,
) -> None:
    """Unload and remove a model that `sparkd run` added.

    With --cached, removes the model's quantized weights from this node, of a configured model those in its own format. This needs no
    daemon, and MODEL may also be a folder or a hub id.
    """
    if cached:
        _remove_cached(session, model, config)
        return
    if config is not None:
        raise ConfigError("--config needs --cached.")
    operation = session.client.delete(model_path(model))
    _finish(session, [operation], no_wait, timeout)
    if not session.json:
        session.out.print(f"{operation['model']} is removed.", markup=False)


def ps(
    session: Session,
    wide: Annotated[bool, option("--wide", "-w", help="Also show how each KV cache was sized and what is free.")] = False,
) -> None:
    """List resident models: state, memory, requests, process."""
    models = session.client.models()
    if session.json:
        show.say_json({"models": [view for view in models if _resident(view)]})
    else:
        show.resident(models, session.out, wide=wide)


def ls(
    session: Session,
    of: Annotated[str | None, option("--layers", metavar="MODEL", help="List the layers of a model (name, folder or hub id).")] = None,
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="With --layers: try this format or recipe.")] = None,
    cached: Annotated[bool, option("--cached", help="List the quantized weights kept on this node.")] = False,
    quick: Annotated[bool, option("--quick", help="With --layers: do not start vLLM to ask it.")] = False,
    config: Annotated[Path | None, option("--config", metavar="FILE", help="With --layers or --cached: path of sparkd.yaml.")] = None,
) -> None:
    """List all known models, resident or not.

    --layers lists a model's weights, what `quantize` makes of them, and what vLLM says a GPU holds of them. It needs no daemon if MODEL is
    a folder or a configured name; --cached never needs one.
    """
    if cached:
        if of is not None or quantize is not None:
            raise ConfigError("--cached cannot be combined with --layers or --quantize.")
        _list_cached(session, config)
        return
    if of is not None:
        _list_layers(session, of, quantize, config, quick=quick)
        return
    if quantize is not None or config is not None or quick:
        raise ConfigError("--quantize and --quick need --layers MODEL; --config needs --layers or --cached.")
    models = session.client.models()
    if session.json:
        show.say_json({"models": models})
    else:
        show.known(models, session.out)


def logs(
    session: Session,
    model: Model,
    follow: Follow = False,
    lines: Annotated[
        int,
        option("-n", "--lines", metavar="N", parser=whole("--lines", 0, LOG_LINES), help="Print the last N lines, at most 200."),
    ] = LOG_LINES,
    rank: Annotated[
        int,
        option("--rank", metavar="N", parser=whole("--rank", 0, MOST["nodes"]), help="Rank of a model on several nodes; rank 0 serves."),
    ] = 0,
) -> None:
    """Show the log of a model's engine."""
    page = session.client.get(f"{model_path(model)}/log", rank=rank)
    text = "".join(page["text"].splitlines(keepends=True)[-lines:] if lines else [])
    if session.json and not follow:
        show.say_json({"text": text, "cursor": page["cursor"]})
        return
    _write_log(session, text)
    if not page["text"]:
        session.err.print(f"The engine of {model} has written nothing yet.", markup=False)
    if not follow:
        return
    for piece in session.client.follow_log(model, page["cursor"], rank):
        _write_log(session, piece)
    raise Unavailable(f"sparkd at {session.client.base_url} ended, so the log ends here.")


def status(session: Session) -> None:
    """Show the daemon, its conditions, nodes, memory and Ray's cost."""
    answer = session.client.get("/status")
    if session.json:
        show.say_json(answer)
    else:
        show.overview(answer, session.client.base_url, session.out)


def events(
    session: Session,
    follow: Follow = False,
    lines: Annotated[
        int, option("-n", "--lines", metavar="N", parser=whole("--lines", 1, 1000), help="Print the last N events; default 50.")
    ] = 50,
) -> None:
    """Show the history: states, loads, failures, restarts."""
    past = session.client.get("/events", limit=lines)["events"]
    if session.json and not follow:
        show.say_json({"events": past})
        return
    for event in past:
        _write_event(session, event)
    if not follow:
        return
    for event in session.client.follow_events(past[-1]["seq"] if past else 0):
        _write_event(session, event)
    raise Unavailable(f"sparkd at {session.client.base_url} ended, so its events end here.")


def _list_layers(session: Session, model: str, quantize: str | None, config: Path | None, *, quick: bool) -> None:
    from sparkd.cli.layers import listing_of
    from sparkd.cli.plan import consult
    from sparkd.render.terminal import headers_of

    unheard: list[str] = []
    with headers_of(model) as progress:
        vllm = partial(consult, quick=quick, unheard=unheard)
        answer = listing_of(model, quantize, config, os.environ, session.client.models, progress, vllm).to_json()
    answer["notes"] += unheard
    if session.json:
        show.say_json(answer)
    else:
        show.layers(answer, session.out)


def _list_cached(session: Session, config: Path | None) -> None:
    from sparkd.cli.config_file import config_of
    from sparkd.cli.folder_owner import refuse_another_users
    from sparkd.cli.quantized import listing

    loaded = config_of(config, os.environ)
    refuse_another_users(loaded.quantized_path)
    rows = listing(loaded)
    if session.json:
        show.say_json(rows)
    else:
        show.cached(rows, session.out)


def _remove_cached(session: Session, model: str, config: Path | None) -> None:
    from sparkd.cli.config_file import config_of
    from sparkd.cli.folder_owner import refuse_another_users
    from sparkd.cli.quantized import remove

    loaded = config_of(config, os.environ)
    refuse_another_users(loaded.quantized_path)
    removed, swept_bytes = remove(model, loaded)
    if session.json:
        show.say_json({"removed": removed, "swept_bytes": swept_bytes})
        return
    for row in removed:
        session.out.print(f"{row['name']}: removed, {show.size(row['size_bytes'])} freed.", markup=False)
    if swept_bytes:
        session.out.print(show.swept(swept_bytes), markup=False)


def _finish(session: Session, operations: list[dict[str, Any]], no_wait: bool, timeout_s: float | None) -> None:
    """Wait for what was asked for, and say how it ended."""
    ended = operations if no_wait else [session.wait(operation, timeout_s) for operation in operations]
    if session.json:
        show.say_json({"operations": ended})
        return
    for operation in ended:
        if no_wait:
            session.out.print(f"{operation['model']}: the {operation['kind']} is running. {_how_on(operation)}", markup=False)
        else:
            session.out.print(f"{operation['model']}: {operation['message']}", markup=False)


def _how_on(operation: dict[str, Any]) -> str:
    return f"`sparkd ps` shows it; `sparkd cancel {operation['id']}` cancels it."


def _resident(view: dict[str, Any]) -> bool:
    return bool(view["state"] != "STOPPED" or view["want"] == "RUNNING")


def _write_log(session: Session, text: str) -> None:
    if session.json:
        show.say_json_line({"text": text})
    else:
        session.out.file.write(show.printable(text) if session.out.is_terminal else text)
        session.out.file.flush()


def _write_event(session: Session, event: dict[str, Any]) -> None:
    if session.json:
        show.say_json_line(event)
    else:
        show.event_line(event, session.out)
