"""Makes a checkpoint's folder complete at once.

The folder may be there already, as a mount point or the target of a link, so nothing is renamed onto it: the files are written in a folder
inside it and move up, `config.json` last, because no program takes a folder without it for a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from sparkd.errors import CheckpointError
from workers.host.private_files import sync_folder

LAST = "config.json"
WRITING = ".writing"
# A folder that mke2fs makes in every new file system.
_NOTHING = "lost+found"


@contextlib.contextmanager
def appearing(target: str) -> Iterator[str]:
    """Yield the folder to write in. At the end of the block `target` has all files; if the block raises, nothing stays.

    Raises, before anything is written, CheckpointError for a target that is not empty, and OSError where the target cannot be made.
    """
    place = os.path.realpath(target)
    is_new = not os.path.lexists(place)
    if not is_new and (not os.path.isdir(place) or set(os.listdir(place)) - {_NOTHING, WRITING}):
        raise CheckpointError("it is there already", file=target, cure="Give a folder that is not there yet, or an empty one")
    writing = os.path.join(place, WRITING)
    os.makedirs(writing, exist_ok=True)
    moved: list[str] = []
    try:
        for left in os.listdir(writing):  # left by an export that was killed
            _remove(os.path.join(writing, left))
        yield writing
        sync_folder(writing)
        for name in sorted(os.listdir(writing), key=lambda name: (name == LAST, name)):
            if name == LAST:
                sync_folder(place)
            moved.append(os.path.join(place, name))
            os.rename(os.path.join(writing, name), moved[-1])
        os.rmdir(writing)
    except BaseException:
        for path in (*reversed(moved), writing):
            _remove(path)
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(place)
        raise
    sync_folder(place)
    sync_folder(os.path.dirname(place))


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
