"""The verbs that ask a running daemon: load, unload, cancel, rm, ps, ls, logs, status, events."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from sparkd.admin.client import model_path
from sparkd.checkpoint.source import name_of, source_of
from sparkd.cli.options import EntryFile, argument, option
from sparkd.cli.session import Follow, NoWait, Session, Timeout, how_on, verb
from sparkd.errors import ConfigError, NotFound, RankError, Unavailable
from sparkd.render import models as show
from sparkd.units import MOST, whole

LOG_LINES = 200

Model = Annotated[str, argument(metavar="MODEL", help="Name or alias of a known model.")]


def register(app: typer.Typer) -> None:
    for function in (load, unload, cancel, rm, ps, ls, logs, status, events):
        app.command(function.__name__)(verb(function))


def load(
    session: Session,
    model: Model,
    recipe: Annotated[str | None, option("--recipe", metavar="NAME", help="Use this recipe from now on: NAME or NAME@REGISTRY.")] = None,
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
    if not names and not session.json:
        session.err.print("No model is loaded.")
    else:
        _finish(session, [session.client.post(f"{model_path(name)}/unload") for name in names], no_wait, timeout)


def cancel(session: Session, operation: Annotated[str, argument(metavar="OPERATION", help="Id of the operation.")]) -> None:
    """Cancel a load, unload, pull, bench or other long action.

    After a cancelled load the model is stopped; after a cancelled unload it is loaded again.
    """
    ended = session.client.delete(f"/operations/{operation}")
    session.answer(ended, f"The {ended['kind']} of {ended['model']}: {ended['state'].lower()}. {ended['message']}")


def rm(
    session: Session,
    model: Model,
    no_wait: NoWait = False,
    timeout: Timeout = None,
    cached: Annotated[bool, option("--cached", help="Remove its quantized weights on all nodes instead.")] = False,
) -> None:
    """Unload and remove a model that `sparkd run` added.

    With --cached, removes the model's quantized weights from all nodes, of a configured model those in its own format. MODEL may then also
    be a folder, a hub id or an entry of `sparkd ls --cached`.
    """
    if cached:
        _remove_cached(session, model, no_wait, timeout)
        return
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
    resident = [view for view in models if _resident(view)]
    session.answer({"models": resident}, lambda: show.resident(resident, session.out, wide=wide))


def ls(
    session: Session,
    of: Annotated[str | None, option("--layers", metavar="MODEL", help="List the layers of a model (name, folder or hub id).")] = None,
    quantize: Annotated[str | None, option("--quantize", metavar="VALUE", help="With --layers: try this format or recipe.")] = None,
    cached: Annotated[bool, option("--cached", help="List the quantized weights that the nodes keep.")] = False,
    config: EntryFile = None,
) -> None:
    """List all known models, resident or not.

    --layers lists a model's weights and what `quantize` makes of them. It asks the daemon only for a name that nothing else knows.
    """
    if cached:
        if of is not None or quantize is not None:
            raise ConfigError("--cached cannot be combined with --layers or --quantize.")
        disk = session.client.get("/disk")
        kept = {part: [row for row in disk[part] if row["kind"] == "quantized"] for part in ("entries", "folders")}
        session.answer(kept, lambda: show.cached(kept, session.out))
        return
    if of is not None:
        _list_layers(session, of, quantize, config)
        return
    if quantize is not None or config is not None:
        raise ConfigError("--quantize and --config need --layers MODEL.")
    models = session.client.models()
    session.answer({"models": models}, lambda: show.known(models, session.out))


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
    session.answer(answer, lambda: show.overview(answer, session.client.base_url, session.out))


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


def _list_layers(session: Session, model: str, quantize: str | None, config: Path | None) -> None:
    from sparkd.cli.layers import listing_of

    with show.headers_of(model) as progress:
        answer = listing_of(model, quantize, config, os.environ, session.client.settings, progress).to_json()
    session.answer(answer, lambda: show.layers(answer, session.out))


def _remove_cached(session: Session, model: str, no_wait: bool, timeout_s: float | None) -> None:
    from sparkd.bench.load_bench import quantized_of

    entries = session.client.get("/disk")["entries"]
    view = next((view for view in session.client.models() if model in (view["name"], *view["aliases"])), None)
    if view is not None:
        chosen = quantized_of(view["name"], view["quantize"], entries)
    else:
        names = {model, name_of(source_of(model))}
        kept = [entry for entry in entries if entry["kind"] == "quantized"]
        chosen = [entry for entry in kept if names.intersection((entry["id"], entry["name"].partition(" ")[0]))]
    if not chosen:
        raise NotFound(f"No node keeps quantized weights of {model[:128]}. `sparkd ls --cached` lists them.")
    operations = []
    for entry in chosen:
        operation = session.client.delete(f"/disk/quantized/{quote(entry['id'], safe='')}", node=entry["node"])
        if not no_wait:
            operation = session.follow(operation, f"the removal of {entry['id']}", lambda _: None, timeout_s)
        if operation["state"] == "FAILED":
            raise RankError(operation["message"])
        operations.append(operation)
    session.answer({"operations": operations}, "\n".join(operation["message"] for operation in operations))


def _finish(session: Session, operations: list[dict[str, Any]], no_wait: bool, timeout_s: float | None) -> None:
    """Wait for what was asked for, and say how it ended."""
    ended = operations if no_wait else [session.wait(operation, timeout_s) for operation in operations]
    lines = [
        f"{operation['model']}: " + (f"the {operation['kind']} is running. {how_on(operation)}" if no_wait else operation["message"])
        for operation in ended
    ]
    session.answer({"operations": ended}, "\n".join(lines))


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
