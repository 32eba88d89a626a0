"""Makes a checkpoint's folder appear only when it is complete.

A new folder appears by one rename. An existing empty folder may be a mount point, the target of a link, or inside a folder that this user
may not write to, so nothing is renamed onto it: the files are written in a folder inside it and move up, `config.json` last, because no
program takes a folder without it for a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from sparkd.errors import CheckpointError
from workers.cache.writer import sync_folder

LAST = "config.json"
WRITING = ".writing-"
# A folder that mke2fs makes in every new file system.
_NOTHING = "lost+found"


@contextlib.contextmanager
def appearing(target: str) -> Iterator[str]:
    """Yield the folder to write in. At the end of the block `target` has all files; if the block raises, nothing stays.

    Raises, before anything is written, CheckpointError for a target that is not empty, and OSError where the target cannot be made.
    """
    place = os.path.realpath(target)
    if os.path.lexists(place) and not os.path.isdir(place):
        raise _is_there(target)
    with _into_empty(place, target) if os.path.isdir(place) else _into_new(place, target) as writing:
        yield writing


@contextlib.contextmanager
def _into_new(place: str, target: str) -> Iterator[str]:
    parent, name = os.path.split(place)
    writing = os.path.join(parent, f".{name}{WRITING.rstrip('-')}")
    os.makedirs(writing, exist_ok=True)
    with _alone(writing, target):
        for left in os.listdir(writing):  # left by an export that was killed
            _remove(os.path.join(writing, left))
        try:
            yield writing
            sync_folder(writing)
            os.rename(writing, place)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
    sync_folder(parent)


@contextlib.contextmanager
def _into_empty(place: str, target: str) -> Iterator[str]:
    with _alone(place, target) as locked:
        for name in os.listdir(place) if locked else ():
            if name.startswith(WRITING):  # left by an export that was killed: a live one would hold the lock
                shutil.rmtree(os.path.join(place, name))
        if set(os.listdir(place)) - {_NOTHING}:
            raise _is_there(target)
        with _moving_up(place) as writing:
            yield writing


@contextlib.contextmanager
def _alone(folder: str, target: str) -> Iterator[bool]:
    """Hold the folder's lock; yields False on a network file system without locks. Raises CheckpointError where another export holds it."""
    taken = CheckpointError("another export writes into it", file=target, cure="Wait for it, or give another folder")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            raise taken from None
        except OSError:
            locked = False
        # An export that has just ended may have renamed this folder.
        if not os.path.isdir(folder) or not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise taken
        yield locked
    finally:
        os.close(fd)


@contextlib.contextmanager
def _moving_up(place: str) -> Iterator[str]:
    writing = os.path.join(place, f"{WRITING}{os.getpid()}")
    os.mkdir(writing)
    moved: list[str] = []
    try:
        yield writing
        sync_folder(writing)
        for name in sorted(os.listdir(writing), key=lambda name: (name == LAST, name)):
            if name == LAST:
                sync_folder(place)
            moved.append(os.path.join(place, name))
            os.rename(os.path.join(writing, name), moved[-1])
        os.rmdir(writing)
    except BaseException:
        for path in reversed(moved):
            _remove(path)
        shutil.rmtree(writing, ignore_errors=True)
        raise
    sync_folder(place)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _is_there(target: str) -> CheckpointError:
    return CheckpointError("it is there already", file=target, cure="Give a folder that is not there yet, or an empty one")
