"""The verbs `fabric` and `nodes`: how nodes are linked, what is wrong with it, each one's environment, and which nodes are there."""

from __future__ import annotations

from typing import Annotated

import typer

from sparkd.cli.options import option
from sparkd.cli.session import Session, Timeout, copying, verb
from sparkd.errors import ConfigError, RankError, SparkdError


def register(app: typer.Typer) -> None:
    app.command("fabric")(verb(fabric))
    app.command("nodes")(verb(nodes))


def fabric(
    session: Session,
    env: Annotated[bool, option("--env", help="Show each node's environment variables and their reasons.")] = False,
    measure: Annotated[str | None, option("--measure", metavar="A,B", help="First measure the rate between these nodes, or `all`.")] = None,
    force: Annotated[bool, option("--force", help="Measure even while a model uses the nodes.")] = False,
    timeout: Timeout = None,
) -> None:
    """Show how the nodes are linked, and which links have faults.

    Lists cages, twins, rails and cables of all nodes, and a fix for each fault. Exits with 1 if a check fails. A measurement sends at most
    512 MiB between two nodes. Ctrl-C stops waiting; `sparkd cancel OPERATION` cancels the measurement.
    """
    if measure is not None:
        _measure(session, measure, force, timeout)
    from sparkd.render import fabric as show_fabric

    report = session.client.get("/fabric")
    session.answer(report, lambda: (show_fabric.environment if env else show_fabric.fabric)(report, session.out))
    if report["verdict"] == "fail":
        raise typer.Exit(SparkdError.exit_code)


def nodes(session: Session) -> None:
    """List the nodes, and machines that could join.

    A machine is offered if it answers at the other end of a QSFP cable. It joins only when `sparkd join` runs there.
    """
    from sparkd.render import fabric as show_fabric

    listing = session.client.get("/nodes")
    session.answer(listing, lambda: show_fabric.nodes(listing, session.out))


def _measure(session: Session, nodes: str, force: bool, timeout_s: float | None) -> None:
    """Raises RankError where it failed, and as `Session.follow` does."""
    names = [name.strip() for name in nodes.split(",") if name.strip()]
    between = "all" if names == ["all"] else names
    if between != "all" and len(between) < 2:
        raise ConfigError("--measure names two or more nodes, separated by commas, or all.")
    operation = session.client.post("/fabric/measure", {"nodes": between, "force": force})
    operation = session.follow(operation, "the measurement", copying(session), timeout_s)
    if operation["state"] == "FAILED":
        raise RankError(operation["message"])
