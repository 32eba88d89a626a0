"""The verbs `fabric` and `nodes`: how nodes are linked, what is wrong with it, each one's environment, who is there. Never changes one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparkd import show
from sparkd.errors import ConfigError, SparkdError
from sparkd.verbs import Session, option, verb


def register(app: typer.Typer) -> None:
    app.command("fabric")(verb(fabric))
    app.command("nodes")(verb(nodes))


def fabric(
    session: Session,
    env: Annotated[bool, option("--env", help="Each node's environment variables instead, with the reason for each.")] = False,
    root: Annotated[
        list[Path] | None, option("--root", metavar="DIR", help="A folder that stands for a node's /; may be repeated.")
    ] = None,
) -> None:
    """How the nodes are linked, and what is wrong with it.

    Cages, twins and rails, who is cabled to whom, and what helps where something is wrong. All nodes of the daemon's cluster; this node
    alone where no daemon answers. Exit code 1 where a finding fails.
    """
    found = _of_folders(root) if root else session.of_cluster("/fabric") or _of_this_node()
    if session.json:
        show.say_json(found)
    else:
        from sparkd import show_fabric

        (show_fabric.environment if env else show_fabric.fabric)(found, session.out)
    if found["verdict"] == "fail":
        raise typer.Exit(SparkdError.exit_code)


def nodes(session: Session) -> None:
    """The nodes, and who else could join.

    Offered is who answers at the other end of a QSFP cable. Nobody is joined by being found: `sparkd join` on that node does it.
    """
    from sparkd import show_fabric

    found = session.client.get("/nodes")
    if session.json:
        show.say_json(found)
    else:
        show_fabric.nodes(found, session.out)


def _of_folders(roots: list[Path]) -> dict[str, Any]:
    from sparkd.fabric_report import report
    from workers.fabric_reading import sample

    for root in roots:
        if not (root / "sys").is_dir():
            raise ConfigError(f"--root {root}: there is no folder sys in it, so it cannot stand for a node's /.")
    return report({str(root): sample(root) for root in roots})


def _of_this_node() -> dict[str, Any]:
    from sparkd.fabric_report import report
    from workers.fabric_knock import knock
    from workers.fabric_reading import sample

    answers = knock()
    raw = sample() | {"answers": answers}
    return report({str(raw["host"]): raw})
