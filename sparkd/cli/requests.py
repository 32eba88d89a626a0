"""`sparkd requests`: who asked which model for how much, now and lately; `requests cancel` ends one."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from sparkd.cli.options import DefaultVerb, argument, group, option
from sparkd.cli.session import POLL_S, Follow, Session, verb
from sparkd.render import models as show
from sparkd.render import requests as show_requests
from sparkd.units import whole

KEPT = 10_000
PAGE = 1000


def register(app: typer.Typer) -> None:
    about = "Show the requests for models, or cancel one.\n\n`sparkd requests` lists them, with the options of `requests ls`."
    requests = group("requests", cls=DefaultVerb, help=about)
    requests.command("ls")(verb(listed))
    requests.command("cancel")(verb(cancel))
    app.add_typer(requests)


def listed(
    session: Session,
    follow: Follow = False,
    lines: Annotated[
        int, option("-n", "--lines", metavar="N", parser=whole("--lines", 1, KEPT), help="Show the last N finished ones; default 20.")
    ] = 20,
    model: Annotated[str | None, option("--model", metavar="MODEL", help="Only requests for this model, by its name.")] = None,
    failed: Annotated[bool, option("--failed", help="Only requests that ended with an error.")] = False,
) -> None:
    """Show the requests in flight and the last finished ones.

    Shows the time, the model, the name of the key, the status and the tokens, as the engine counted them. The daemon keeps the last 10,000
    finished requests (`request_log`), never a prompt or an answer.
    """
    chosen: dict[str, Any] = {"limit": lines} | ({"model": model} if model else {}) | ({"state": "failed"} if failed else {})
    answer = session.client.get("/requests", **chosen)
    if follow:
        _follow(session, answer, chosen | {"limit": PAGE})
    else:
        session.answer(answer, lambda: show_requests.listed(answer, session.out))


def cancel(session: Session, request: Annotated[str, argument(metavar="ID", help="Id of the request, from `sparkd requests`.")]) -> None:
    """Cancel a request in flight; its client gets an error."""
    row = session.client.delete(f"/requests/{quote(request, safe='')}")
    session.answer(row, f"The request {row['request_id']} for {row['model']} is cancelled.")


def _follow(session: Session, answer: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Print the finished requests of an answer, and then each one that ends."""
    shown = 0
    while True:
        for row in reversed(answer["finished"]):
            if row["number"] > shown:
                shown = row["number"]
                _write(session, row)
        time.sleep(POLL_S)
        answer = session.client.get("/requests", **chosen)


def _write(session: Session, row: dict[str, Any]) -> None:
    if session.json:
        show.say_json_line(row)
    else:
        show_requests.line(row, session.out)
