"""Downloads what an engine needs of a hub's repository into this node's hub cache, by huggingface_hub.

A program of its own, so that a download is ended by ending its process: `python -m sparkd.checkpoint.download` reads one line of JSON from
stdin, {"hub_id", "revision"}; HF_* come by its environment. It prints {"done_bytes", "total_bytes"} each PROGRESS_S, at the end
{"ended": true, "commit", "note"} or {"error"}, with "unasked" where it was the hub that said nothing, and ends when stdin does.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparkd.checkpoint import read_checkpoint
from sparkd.checkpoint.hub import Hub, client_errors
from sparkd.errors import CheckpointError, SparkdError
from workers.files.manifest import File, ModelManifest, lacking, refuse_without_room
from workers.host.hub_cache import hub_cache, snapshot_of
from workers.host.line_writer import ordered

THREADS = 4
PROGRESS_S = 0.3
# A part that was last written so long ago belongs to a download that has ended: the library gives up after 10 s without data.
ABANDONED_S = 600.0
# Files that no engine reads where the same weights are there as safetensors, and folders of other programs' copies.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
OTHER_FOLDERS = ("original/*", "metal/*", "onnx/*", "openvino/*", "coreml/*", ".*")
# Mistral's repositories have the same weights twice.
CONSOLIDATED = "consolidated*.safetensors"
_AGAIN = "Check the network and the disk, then run the same command again; complete files stay"

Tell = Callable[[Mapping[str, Any]], None]


class NotAsked(Exception):
    """The hub did not say what it has, and this node has not all of it."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error


def wanted(names: Iterable[str]) -> list[str]:
    """The files of a repository to fetch, in their order. GGUF and the like only where there are no safetensors."""
    listed = [name for name in names if not _any(name, OTHER_FOLDERS)]
    weights = [name for name in listed if name.endswith(".safetensors") and "/" not in name]
    if not weights:
        return listed
    twice = [name for name in weights if fnmatch.fnmatch(name, CONSOLIDATED)]
    left_out = set(twice) if len(twice) < len(weights) else set()
    return [name for name in listed if name not in left_out and not _any(name, OTHER_WEIGHTS)]


def fetch(hub_id: str, revision: str | None, environ: Mapping[str, str], tell: Tell) -> tuple[str, str]:
    """(commit, a note) once all of it is in the cache. Where the hub cannot be asked, what is in the cache will do if it is whole.

    Raises SparkdError; NotAsked where the hub said nothing and the cache is not whole.
    """
    from huggingface_hub import snapshot_download

    try:
        hub = Hub(hub_id, revision, environ)
        listing = hub.listing()
    except CheckpointError as error:
        snapshot = snapshot_of(hub_id, revision, environ)
        if snapshot is None or not _is_whole(snapshot):
            raise NotAsked(error) from None
        return snapshot.name, f"The hub was not contacted ({error.problem}); what is in the cache is whole."
    folder = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / listing.commit
    sizes = {name: listing.sizes[name] or 0 for name in wanted(listing.sizes)}
    missing = tuple(File(name, size, 0) for name, size in sizes.items() if not (snapshot / name).exists())
    refuse_without_room(hub_id, lacking(ModelManifest(hub_id, None, listing.commit, "", missing), environ))
    _remove_abandoned(folder)
    try:
        with _progress(folder, snapshot, sizes, tell):
            snapshot_download(
                hub_id,
                revision=listing.commit,
                cache_dir=folder.parent,
                endpoint=hub.endpoint,
                token=environ.get("HF_TOKEN"),
                allow_patterns=list(map(glob.escape, sizes)),
                max_workers=THREADS,
            )
    except client_errors() as error:
        # Its message may hold an address with a signature.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise CheckpointError(f"it could not be downloaded: {reason}", file=hub_id, cure=_AGAIN) from None
    # The library is content with a part of it where the hub fails in between.
    if lost := [name for name in sizes if not (snapshot / name).exists()]:
        raise CheckpointError(f"{lost[0]} could not be downloaded", file=hub_id, cure=_AGAIN)
    _name_revision(folder, revision or "main", listing.commit)
    return listing.commit, ""


def _is_whole(snapshot: Path) -> bool:
    try:
        read_checkpoint(snapshot)
    except CheckpointError:
        return False
    return True


@contextmanager
def _progress(folder: Path, snapshot: Path, sizes: Mapping[str, int], tell: Tell) -> Iterator[None]:
    """Tell how much of the files is on the disk, and keep it out of the page cache: CUDA cannot use memory that files fill."""
    ended, began_s = threading.Event(), time.time()

    def look() -> None:
        begun = [path for path in (folder / "blobs").glob("*.incomplete") if _written_s(path) >= began_s]
        done = sum(size for name, size in sizes.items() if (snapshot / name).exists())
        tell({"done_bytes": min(sum(sizes.values()), done + sum(map(_size, begun))), "total_bytes": sum(sizes.values())})
        for path in begun:
            _drop(path)

    def watch() -> None:
        while not ended.wait(PROGRESS_S):
            look()

    threading.Thread(target=watch, name="fetch progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
    for name in sizes:
        _drop(snapshot / name, wait=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove parts of files that a download left which was ended: the library begins each file anew, under another name."""
    for path in (folder / "blobs").glob("*.incomplete"):
        if _written_s(path) < time.time() - ABANDONED_S:
            path.unlink(missing_ok=True)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _drop(path: Path, *, wait: bool = False) -> None:
    """Out of the page cache, as far as it is on the disk; wait: all of it."""
    with suppress(OSError), open(path, "rb") as file:
        if wait:
            os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _name_revision(folder: Path, revision: str, commit: str) -> None:
    """Write the ref of a revision, after all files: until then no reader finds an incomplete snapshot."""
    if revision == commit:
        return
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(ref)


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _size(path: Path) -> int:
    """The bytes of it that are on the disk: a file may be made with its whole length at once."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return min(status.st_size, status.st_blocks * 512)


def main() -> None:
    order, tell = ordered("fetch end")
    # Its threads may wait for a server, and Python would wait for them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        commit, note = fetch(order["hub_id"], order["revision"], os.environ, tell)
        tell({"ended": True, "commit": commit, "note": note})
    except NotAsked as unasked:
        tell({"error": unasked.error.message, "unasked": unasked.error.problem})
    except SparkdError as error:
        tell({"error": error.message})
    except OSError as error:
        tell({"error": f"{error.filename or 'The hub cache'} cannot be written: {error.strerror or error}. Check its owner and the disk."})
    # Its threads may still wait for a server.
    os._exit(0)


if __name__ == "__main__":
    main()
