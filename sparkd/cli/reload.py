"""`sparkd reload`: the daemon reads its configuration again, and says what came of it."""

from __future__ import annotations

import typer

from sparkd.cli.session import Session, verb

_TOLD = (
    ("added", "added"),
    ("removed", "removed"),
    ("restarted", "changed (restarted if running)"),
    ("adjusted", "changed without a restart"),
)


def register(app: typer.Typer) -> None:
    app.command("reload")(verb(reload))


def reload(session: Session) -> None:
    """Make the daemon read its configuration again.

    An invalid file is refused with its problems, and the old configuration stays. So is an entry with which a READY model would not start
    again, by its files. Engines whose settings did not change keep running, and so do all streams.
    """
    changes = session.client.post("/reload")
    lines = [f"Models {how}: {', '.join(changes[key])}." for key, how in _TOLD if changes[key]]
    if now := [key for key in changes["changed"] if key not in changes["later"]]:
        lines.append(f"In force now: {', '.join(now)}.")
    if changes["later"]:
        lines.append(f"In force from the next start of sparkd: {', '.join(changes['later'])}.")
    session.answer(changes, "\n".join(lines) or "The configuration was read again. Nothing changed.")
