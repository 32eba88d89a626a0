"""The verb `pull`: a model's files on every node that shall serve it."""

from __future__ import annotations

from typing import Annotated

import typer

from sparkd.admin.client import model_path
from sparkd.cli.options import argument, option
from sparkd.cli.session import NoWait, Session, Timeout, copying, how_on, verb
from sparkd.errors import ConfigError, RankError


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
    text = f"{operation['model']}: the pull is running. {how_on(operation)}"
    if not no_wait:
        operation = session.follow(operation, f"the pull of {operation['model']}", copying(session), timeout)
        if operation["state"] == "FAILED":
            raise RankError(operation["message"])
        text = operation["message"]
    session.answer({"operations": [operation]}, text)
