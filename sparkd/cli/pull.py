"""The verb `pull`: a model's files on every node that shall serve it. Never loads one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparkd.admin.client import model_path
from sparkd.cli.options import argument, option
from sparkd.cli.session import NoWait, Session, Timeout, verb
from sparkd.errors import ConfigError, Conflict, RankError, Unavailable
from sparkd.render import models as show


def register(app: typer.Typer) -> None:
    app.command("pull")(verb(pull))


def pull(
    session: Session,
    model: Annotated[str, argument(metavar="MODEL", help="A known name, or a hub id (owner/name).")],
    nodes: Annotated[str, option("--nodes", metavar="A,B", help="Addresses of the target nodes; default: all.")] = "all",
    revision: Annotated[str | None, option("--revision", metavar="REV", help="Commit, tag or branch of a hub id.")] = None,
    no_wait: NoWait = False,
    timeout: Timeout = None,
) -> None:
    """Copy a model's files to the nodes.

    The daemon's node downloads a hub id once, and the nodes copy it from each other over the cable. The folder of a known model is copied
    to the same path. Files that are there already are skipped; an interrupted file resumes. Ctrl-C stops waiting; `sparkd cancel OPERATION`
    cancels the pull.
    """
    chosen = [name.strip() for name in nodes.split(",") if name.strip()]
    if not chosen:
        raise ConfigError("--nodes names nodes, separated by commas, or all.")
    body = {"nodes": "all" if chosen == ["all"] else chosen, "revision": revision}
    operation = session.client.post(f"{model_path(model)}/pull", body)
    if not no_wait:
        operation = _wait(session, operation, timeout)
    text = f"{operation['model']}: the pull is running. {_how_on(operation)}" if no_wait else operation["message"]
    session.answer({"operations": [operation]}, text)


def _wait(session: Session, operation: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """Raises RankError where it failed, Conflict where it was cancelled, Unavailable on time-out."""
    model = operation["model"]

    def shown(now: dict[str, Any]) -> tuple[str, str] | None:
        return (f"{model}: {show.copying(now['message'], now['progress'], session.err)}", now["message"]) if now["progress"] else None

    try:
        operation = session.follow(operation, shown, timeout_s)
    except KeyboardInterrupt:
        session.err.print(f"\nNo longer waiting; the pull of {model} continues. {_how_on(operation)}", markup=False)
        raise
    if operation["state"] == "RUNNING":
        raise Unavailable(f"The pull of {model} has not ended after {timeout_s:g} s and continues. {_how_on(operation)}")
    if operation["state"] == "FAILED":
        raise RankError(operation["message"])
    if operation["state"] == "CANCELLED":
        raise Conflict(f"The pull of {model} was cancelled: {operation['message']}")
    return operation


def _how_on(operation: dict[str, Any]) -> str:
    return f"`sparkd cancel {operation['id']}` cancels it; the same command resumes it."
