"""Root works in root's folders alone.

Hostile side: an engine with a model's own code, which runs as the daemon's user. A status file, a record or a link that it leaves in the
daemon's folder would make root end a process or write a file for it.
"""

from __future__ import annotations

import pwd
from pathlib import Path

from sparkd.errors import StateError
from workers.host.private_files import in_others_hands


def refuse_another_users(folder: Path) -> None:
    """Raises StateError where this is root, and another user can replace the folder, a part of its path or what is in it."""
    if (path := in_others_hands(folder)) is None:
        return
    if user := path.lstat().st_uid:
        name = _name_of(user)
        raise StateError(
            f"The folder {folder} belongs to the user {name}, and this is root. Run it as that user (`sudo -u {name}`; the system's own "
            f"daemon by `systemctl start sparkd`), or run `chown -R root: {folder}`."
        )
    raise StateError(f"Users other than root may write to {path}, and this is root, which would work in {folder}. Run `chmod go-w {path}`.")


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
