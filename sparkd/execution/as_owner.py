"""Owns how root works in a folder of another user: as that user. Never follows a link below the folder in question.

A status file, a record and a socket's path in a folder are the words of the user who can write there. Root that acts on them kills the
process and removes the file that the user names; the user's own process cannot.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from sparkd.errors import StateError

T = TypeVar("T")

_SHARED = stat.S_IWGRP | stat.S_IWOTH


def as_owner(folder: Path, work: Callable[[], T]) -> T:
    """Do `work` and return its value. If this is root and the folder is another user's, the whole process is that user until it is done:
    for the command line, which has one thread.

    Raises StateError for an OSError of `work`, and if the folder has no clear owner.
    """
    user = lesser_owner(folder) if os.geteuid() == 0 else 0
    try:
        with _as(user) if user else nullcontext():
            return work()
    except OSError as error:
        raise StateError(f"{error.filename or 'A system call'}: {error.strerror or error}.") from error


def refuse_another_users(folder: Path) -> None:
    """Raises StateError where this is root and another user can change the folder: what root makes there could be changed under it."""
    if os.geteuid() == 0 and (user := lesser_owner(folder)):
        raise StateError(
            f"The folder {folder} belongs to the user {_name_of(user)}, and this is root. Run it as that user (`sudo -u {_name_of(user)}`; "
            f"the system's own daemon by `systemctl start sparkd`), or run `chown -R root: {folder}`."
        )


def lesser_owner(folder: Path) -> int:
    """The user other than root who can change what this path leads to, 0 where none can. A folder that is missing counts as those above it.

    Raises StateError where several can.
    """
    users = set[int]()
    for path in _on_the_way(folder):
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            continue
        users.add(facts.st_uid)
        shared = facts.st_mode & (stat.S_IWOTH if facts.st_gid == 0 else _SHARED)
        # In a sticky folder, such as /tmp, only the owner of an entry can replace it.
        if shared and not facts.st_mode & stat.S_ISVTX:
            raise StateError(f"{path}, on the way to {folder}, can be changed by several users: chmod go-w {path}")
    lesser = sorted(users - {0})
    if len(lesser) > 1:
        raise StateError(f"{folder} can be changed by several users ({', '.join(map(_name_of, lesser))}): chown it and what is above it.")
    return lesser[0] if lesser else 0


def create_below(root: Path, relative: str, text: str) -> None:
    """Make a new file and the folders above it, through no link that lies below `root`. Raises OSError, FileExistsError for one that is
    there."""
    *folders, name = Path(relative).parts
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o755, dir_fd=at)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=at)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    finally:
        os.close(at)


def _on_the_way(folder: Path) -> Iterator[Path]:
    """Every part of the path that is there, as it is written and as it is resolved."""
    written = Path(os.path.abspath(folder))
    seen = dict.fromkeys([*written.parents, written, *(real := written.resolve()).parents, real])
    for path in seen:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
            yield path


@contextmanager
def _as(user: int) -> Iterator[None]:
    """This process is the user's: its real ids too, by which root's processes could be signalled. The saved ones alone lead back, and no
    program that is started has them (execve(2))."""
    "x".encode("idna")  # imported now: the user need not be able to read root's Python, and addresses are looked up by it
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        group, home = user, os.environ.get("HOME", "/")
    else:
        group, home = entry.pw_gid, entry.pw_dir
    groups, roots_group, roots_home, mask = os.getgroups(), os.getegid(), os.environ.get("HOME", "/"), os.umask(0o077)
    try:
        os.environ["HOME"] = home
        os.setgroups([])
        os.setresgid(group, group, roots_group)
        os.setresuid(user, user, 0)
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(roots_group, roots_group, roots_group)
        os.setgroups(groups)
        os.environ["HOME"] = roots_home
        os.umask(mask)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
