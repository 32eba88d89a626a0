"""The verb `doctor`: how well the nodes are prepared, what is wrong and what helps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.cli.options import option
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, SparkdError, Unauthorized, Unavailable, UnknownRoute
from sparkd.render import models as show

if TYPE_CHECKING:
    from sparkd.fabric.checks import Finding

HERE = Path("/")


def register(app: typer.Typer) -> None:
    app.command("doctor")(verb(doctor))


def doctor(
    session: Session,
    root: Annotated[Path | None, option("--root", metavar="DIR", help="Read this folder in place of this node's /.")] = None,
    fix: Annotated[bool, option("--fix", help="Apply safe, reversible fixes; asks before each.")] = False,
    disk: Annotated[bool, option("--disk", help="Also measure the disk: read a weights file for at most 3 s.")] = False,
    engine: Annotated[bool, option("--engine", help="Also check that sparkd works with the installed vLLM.")] = False,
) -> None:
    """Check how well the nodes are prepared, and suggest fixes.

    Checks kernel, driver, memory settings, page cache, devices, limits, caches, disks and failed models, on all nodes of the daemon's
    cluster. Checks this node alone if no daemon answers, and with --root, --disk, --engine or --fix. Exits with 1 if a check fails.
    """
    if root is not None and not (root / "proc").is_dir():
        raise ConfigError(f"--root {root}: it has no folder proc, so it is not the root of a node.")
    raw: dict[str, Any] = {}
    alone = root is not None or fix or disk or engine
    report = None if alone else _of_cluster(session)
    if report is None:
        raw, report = _of_this_node(root or HERE, disk=disk, engine=engine)
    mended = _mend(session, report, raw, root or HERE) if fix else []
    if session.json:
        show.say_json(report | ({"fixed": mended} if fix else {}))
    elif not fix:
        from sparkd.render import fabric

        fabric.findings(report["findings"], session.out)
    if report["verdict"] == "fail" and not fix:
        raise typer.Exit(SparkdError.exit_code)


def _of_cluster(session: Session) -> dict[str, Any] | None:
    """The daemon's report on all nodes. None, after a line on stderr, if this node must be read alone: no daemon answers, or it requires a
    key, or its release lacks the route."""
    try:
        return session.client.get("/doctor")
    except Unavailable:
        alone = "no daemon answers"
    except (Unauthorized, UnknownRoute) as error:
        alone = error.clause
    if not session.json:
        session.err.print(f"Shows this node only: {alone}.", style="dim", markup=False)
    return None


def _of_this_node(root: Path, *, disk: bool, engine: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from sparkd.doctor.report import report
    from workers.host.inspection import sample

    # Engines' default Python is sparkd's own; a daemon, which knows the configuration, is asked first.
    raw = sample(root, sys.executable if root == HERE else None)
    if disk:
        raw["disk_rate"] = _disk_rate(raw)
    return raw, asdict(report({str(raw["host"]): raw}, _of_engines(str(raw["host"])) if engine else ()))


def _of_engines(node: str) -> Iterator[Finding]:
    """Findings on every vLLM that the configuration names."""
    from sparkd.cli.config_file import config_of
    from sparkd.doctor.engine import findings

    config = config_of(None, os.environ)
    own = (model.runtime_of(config.engine) for model in config.models.values() if model.runs_vllm(config.engine))
    for runtime in dict.fromkeys([config.engine.runtime, *own]):
        yield from findings(node, runtime)


def _disk_rate(raw: dict[str, Any]) -> dict[str, Any]:
    from workers.host.disk_rate import largest, rate

    path = largest([Path(hub["path"]) for hub in raw["hubs"]] + [Path("/models"), Path("/var/lib/sparkd/quantized")])
    if path is None:
        return {"trouble": "no file of weights of 64 MiB or more in the hub's cache, /models or /var/lib/sparkd/quantized"}
    try:
        done, seconds, direct = rate(path)
    except OSError as error:
        return {"trouble": f"{path}: {error.strerror or error}"}
    return {"path": str(path), "bytes": done, "seconds": seconds, "direct": direct}


def _mend(session: Session, report: dict[str, Any], raw: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    from sparkd.doctor.fixes import apply, fixes_of

    fixes = fixes_of(report["findings"], raw)
    if not fixes and not session.json:
        session.out.print("--fix can change nothing here; `sparkd doctor` lists the fixes for you to make.")
    if fixes and root == HERE and os.geteuid() != 0:
        raise ConfigError("--fix changes settings of the system: run it as root, sudo sparkd doctor --fix.")
    mended = []
    for fix in fixes:
        if not typer.confirm(f"{fix.check}: {fix.what}?", default=False, err=True):
            continue
        apply(fix, root)
        mended.append(asdict(fix))
        if not session.json:
            session.out.print(f"{fix.check}: done. To undo it: {fix.undo}", markup=False)
    return mended
