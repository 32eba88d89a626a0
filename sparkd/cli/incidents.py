"""`sparkd incidents`: ls, show. They show each engine that a memory guard of any node killed, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from sparkd.cli.options import DefaultVerb, argument, group
from sparkd.cli.session import Session, verb
from sparkd.errors import NotFound
from sparkd.render import models as show
from sparkd.render.table import Table
from sparkd.units import GIB

ROWS = 30
LOG_LINES = 20


def register(app: typer.Typer) -> None:
    incidents = group("incidents", cls=DefaultVerb, help="Show what the memory guard did, and why.")
    incidents.command("ls")(verb(ls))
    incidents.command("show")(verb(show_one))
    app.add_typer(incidents)


def ls(session: Session) -> None:
    """List the incidents of all nodes, newest first."""
    answer = session.client.get("/incidents")
    session.answer(answer, lambda: _listed(answer["incidents"], session.out))
    for node in () if session.json else answer["silent"]:
        session.err.print(f"{node} does not answer.", markup=False)


def _listed(rows: list[Mapping[str, Any]], console: Console) -> None:
    table = Table("INCIDENT", "MODEL", "NODE", "PHASE", "WHY", folds={"WHY"}, spare=("PHASE", "NODE"))
    for incident in rows:
        table.add(*(str(incident.get(name) or "") for name in ("id", "model", "node", "phase", "why")))
    if rows:
        table.show(console)
    else:
        console.print("The guard has killed no engine.")


def show_one(
    session: Session, incident: Annotated[str, argument(metavar="INCIDENT", help="Id of the incident, from `sparkd incidents ls`.")]
) -> None:
    """Show one incident in full.

    Shows two minutes of memory readings, the processes that held the memory, and the engine's last lines.
    """
    from workers.guard.incidents import INCIDENT_ID

    if not INCIDENT_ID.fullmatch(incident):
        # Else a part of a path might be asked for.
        raise NotFound(f"There is no incident {incident[:128]!r} on the nodes that answer. `sparkd incidents ls` lists them.")
    bundle = session.client.get(f"/incidents/{quote(incident, safe='')}")
    session.answer(bundle, lambda: _draw(bundle, session.out))


def _draw(bundle: Mapping[str, Any], console: Console) -> None:
    limits, request = bundle["limits"], bundle.get("told") or {}
    lines = [
        ("Killed", f"{bundle['model']} ({bundle['rank_id']}) on {bundle['node']}, {show.date(bundle['at_s'])}, phase {bundle['phase']}"),
        ("Why", bundle["why"]),
        ("Limits", ", ".join(f"{name} {limits[f'{name}_bytes'] / GIB:.2f}" for name in ("soft", "hard", "floor")) + " GiB"),
        ("Came back", show.size(bundle["freed_bytes"])),
        ("Asked for by", request.get("by") or "not known"),
        ("Predicted", f"{request['predicted_gib']:g} GiB" if request.get("predicted_gib") else "not known"),
    ]
    for engine in bundle["engines"]:
        device = "not known" if engine["device_bytes"] is None else show.size(engine["device_bytes"])
        lines.append(("Engine", f"{engine['model']}, {engine['phase']}: host {show.size(engine['host_bytes'])}, device {device}"))
    if bundle.get("survivors"):
        lines.append(("Survived", f"processes {', '.join(map(str, bundle['survivors']))}: they hang in the kernel"))
    for title, text in lines:
        show.say(console, f"{title:<13}{text}")
    _readings(bundle, console)
    console.print()
    for line in bundle["log"][-LOG_LINES:]:
        console.print(show.printable(line), markup=False, style="dim", soft_wrap=True)


def _readings(bundle: Mapping[str, Any], console: Console) -> None:
    """The last moments in full, what went before thinned out."""
    columns, rows = list(bundle["columns"]), bundle["readings"]
    if not rows:
        return
    step = max(1, (len(rows) - ROWS // 2) // (ROWS // 2))
    shown = [*rows[: max(0, len(rows) - ROWS // 2) : step], *rows[-(ROWS // 2) :]]
    titles = ("SECONDS", "AVAILABLE", "FREE", "CACHED", "SCANNED", "SWAPPED")
    table = Table(*titles, right=titles)
    for row in shown:
        value = dict(zip(columns, row, strict=True))
        sizes = (f"{value[name] / GIB:.2f}" for name in ("available", "free", "cached"))
        table.add(f"{value['at_s'] - rows[-1][0]:.1f}", *sizes, f"{value['scanned']:.0f}", f"{value['swapped']:.0f}")
    console.print()
    table.show(console)
