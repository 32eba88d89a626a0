"""Root works in root's folders alone.

Hostile side: an engine with a model's own code, which runs as the daemon's user. A status file, a record or a link that it leaves in the
daemon's folder would make root end a process or write a file for it.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from sparkd.errors import StateError


def refuse_another_users(folder: Path) -> None:
    """Raises StateError where this is root and another user can replace the folder, or the first folder above it that is there."""
    if os.geteuid() != 0:
        return
    there = folder.resolve()
    owners = [path.stat().st_uid for path in (there, *there.parents) if path.exists()]
    if user := next(filter(None, owners), 0):
        name = _name_of(user)
        raise StateError(
            f"The folder {folder} belongs to the user {name}, and this is root. Run it as that user (`sudo -u {name}`; the system's own "
            f"daemon by `systemctl start sparkd`), or run `chown -R root: {folder}`."
        )


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
