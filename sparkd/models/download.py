"""Downloads what an engine needs of a hub's repository into this node's hub cache. Never runs inside the daemon: a download is ended by
ending its process.

A program: `python -m sparkd.models.download` reads one line of JSON from stdin, {"hub_id", "revision"}; HF_* come by its
environment. It prints {"done_bytes", "total_bytes"} each PROGRESS_S, at the end {"ended": true, "commit", "note"} or {"error"},
with "unasked" where it was the hub that said nothing, and ends when stdin does.
"""

from __future__ import annotations

import fnmatch
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sparkd.errors import CheckpointError, SparkdError
from sparkd.models.hub import Hub, RepositoryListing
from sparkd.models.remote_headers import complete
from workers.files.chunks import Buffer, sha256_of
from workers.files.manifest import File, ModelManifest, lacking, refuse_without_room
from workers.host.hub_cache import hub_cache, snapshot_of
from workers.host.line_writer import ordered

THREADS = 4
PROGRESS_S = 0.3
SHA256_DIGITS = 64
# Files that no engine reads where the same weights are there as safetensors, and folders of other programs' copies.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
OTHER_FOLDERS = ("original/*", "metal/*", "onnx/*", "openvino/*", "coreml/*", ".*")
# Mistral's repositories have the same weights twice.
CONSOLIDATED = "consolidated*.safetensors"

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
    """(commit, a note) once all of it is in the cache. Files that are there already are not fetched again; where the hub cannot be asked,
    what is in the cache will do if it is whole. Raises SparkdError; NotAsked where the hub said nothing and it is not."""
    try:
        hub = Hub(hub_id, revision, environ)
        listing = hub.listing(nested=True)
    except CheckpointError as error:
        commit = _whole(hub_id, revision, environ)
        if commit is None:
            raise NotAsked(error) from None
        return commit, f"The hub was not contacted ({error.reason}); what is in the cache is whole."
    folder = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / listing.commit
    names = wanted(listing.sizes)
    missing = [name for name in names if not _is_there(snapshot / name, listing.sizes[name])]
    _refuse_without_room(hub_id, listing, missing, environ)
    total = sum(listing.sizes[name] or 0 for name in names)
    done = {name: listing.sizes[name] or 0 for name in names if name not in missing}
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            begun = [*(folder / "blobs").glob("*.incomplete")]
            partial = sum(_size(path) for path in begun)
            for path in begun:
                _drop(path)
            tell({"done_bytes": min(total, sum(done.values()) + partial), "total_bytes": total})

    threading.Thread(target=report, name="fetch progress", daemon=True).start()
    pool = ThreadPoolExecutor(THREADS)
    try:
        download = partial(_download, hub, environ.get("HF_TOKEN"), listing.commit, folder)
        for name in pool.map(download, missing):
            done[name] = listing.sizes[name] or 0
    finally:
        ended.set()
        # After an error the other downloads are not awaited: they end with the process.
        pool.shutdown(wait=False, cancel_futures=True)
    _name_revision(folder, revision or "main", listing.commit)
    return listing.commit, ""


def _download(hub: Hub, token: str | None, commit: str, folder: Path, name: str) -> str:
    """One file into the cache, held against the SHA-256 that the hub names, and out of the page cache again."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cache = str(folder.parent)
    try:
        path = Path(hf_hub_download(hub.hub_id, name, revision=commit, cache_dir=cache, endpoint=hub.endpoint, token=token))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        # Its message may hold an address with a signature.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        cure = "Check the network and the disk, then run the same command again to resume."
        raise CheckpointError(f"{name} could not be downloaded: {reason}", file=hub.hub_id, cure=cure) from None
    blob = Path(os.path.realpath(path))
    if len(blob.name) == SHA256_DIGITS:
        buffer = Buffer()
        if sha256_of(blob, buffer) != blob.name:
            for file in (path, blob):
                with suppress(OSError):
                    file.unlink()
            problem = f"{name} does not have the SHA-256 that the hub names and was removed"
            raise CheckpointError(problem, file=hub.hub_id, cure="Run the same command again; if the error stays, check memory and disk")
        buffer.close()
    _drop(blob, wait=True)
    return name


def _drop(path: Path, *, wait: bool = False) -> None:
    """Out of the page cache, as far as it is on the disk; wait: all of it."""
    with suppress(OSError), open(path, "rb") as file:
        if wait:
            os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(hub_id: str, revision: str | None, environ: Mapping[str, str]) -> str | None:
    snapshot = snapshot_of(hub_id, revision, environ)
    return snapshot.name if snapshot is not None and complete(snapshot) is not None else None


def _refuse_without_room(hub_id: str, listing: RepositoryListing, missing: list[str], environ: Mapping[str, str]) -> None:
    files = tuple(File(name, listing.sizes[name] or 0, 0) for name in missing)
    refuse_without_room(hub_id, lacking(ModelManifest(hub_id, None, listing.commit, "", files), environ))


def _name_revision(folder: Path, revision: str, commit: str) -> None:
    """Write the ref of a revision, after all files: until then no reader finds an incomplete snapshot."""
    if revision == commit or ".." in revision:
        return
    ref = folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(ref)


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_there(path: Path, size: int | None) -> bool:
    return path.exists() and size in (None, _size(path))


def _size(path: Path) -> int:
    """The bytes of it that are on the disk: a file may be made with its whole length at once."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return min(status.st_size, status.st_blocks * 512) if path.suffix == ".incomplete" else status.st_size


def main() -> None:
    order, tell = ordered("fetch end")
    try:
        commit, note = fetch(order["hub_id"], order["revision"], os.environ, tell)
        tell({"ended": True, "commit": commit, "note": note})
    except NotAsked as unasked:
        tell({"error": unasked.error.message, "unasked": unasked.error.reason})
    except SparkdError as error:
        tell({"error": error.message})
    except OSError as error:
        tell({"error": f"{error.filename or 'The hub cache'} cannot be written: {error.strerror or error}. Check its owner and the disk."})
    # Its threads may still wait for a server.
    os._exit(0)


if __name__ == "__main__":
    main()
