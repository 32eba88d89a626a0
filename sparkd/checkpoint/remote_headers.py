"""Reads a checkpoint's headers wherever they are: in a folder, in the hub cache, or on a hub.

Nothing is written to the hub cache either: a folder there with some files of a newer commit would keep an engine from starting offline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool

from sparkd.checkpoint import INDEX, Checkpoint, Shard, Source, checkpoint_of, read_checkpoint
from sparkd.checkpoint.header import PREFIX_BYTES, header_length, parse_header
from sparkd.checkpoint.hub import Hub, RepositoryListing
from sparkd.checkpoint.model_folder import unusable
from sparkd.checkpoint.source import snapshot_of
from sparkd.checkpoint.tensors import TensorRef
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted

# The first read of a file whose header's length is unknown; most headers are shorter (huggingface_hub, parse_safetensors_file_metadata:
# 97 of 100).
FIRST_BYTES = 100_000
# Requests at a time, and so headers in memory at a time.
THREADS = 16
_CURE = "The hub has it like this: choose a repository or a revision that has config.json and whole *.safetensors files"

# (headers that were read, headers to read)
Progress = Callable[[int, int], None]


def checkpoint_at(source: str, revision: str | None, environ: Mapping[str, str], progress: Progress | None = None) -> Checkpoint:
    """The headers of an absolute folder, or of a hub id: from the local cache where all of it is there, else from the hub.

    environ: of the engine, which says where the cache and the hub are.
    progress: called after each header that the hub sent.

    Raises ConfigError and CheckpointError.
    """
    if source.startswith("/"):
        if fault := unusable(source, vllm=True):
            raise CheckpointError(fault.message)
        return read_checkpoint(source)
    snapshot = snapshot_of(source, revision, environ)
    if snapshot is not None:
        try:
            return read_checkpoint(snapshot)
        except (CheckpointIncomplete, CheckpointUncounted):
            pass  # a download may be on its way, or have been given up
    return read_remote_checkpoint(source, revision, environ, progress)


def read_remote_checkpoint(hub_id: str, revision: str | None, environ: Mapping[str, str], progress: Progress | None = None) -> Checkpoint:
    """The checkpoint of a hub id from its remote headers, with paths hf://ID@COMMIT/FILE and modification time 0.

    All files are from one commit. Raises ConfigError for text that is no hub id, CheckpointError for refusals and faults of the hub.
    """
    hub = Hub(hub_id, revision, environ)
    source = _Repository(hub, hub.listing(), progress)
    try:
        return checkpoint_of(source)
    except CheckpointError as error:
        if not (error.file or "").startswith(source.place):
            raise
        # A fault there is not mended by what helps with a file on this machine.
        raise CheckpointError(error.problem, file=error.file, tensor=error.tensor, cure=_CURE) from None


class _Repository(Source):
    """A repository at one commit as a Source. Files in its folders are left out."""

    def __init__(self, hub: Hub, listing: RepositoryListing, progress: Progress | None) -> None:
        self.place = f"hf://{hub.hub_id}@{listing.commit}"
        self.names = {name for name in listing.sizes if "/" not in name}
        self._hub = hub
        self._listing = listing
        self._progress = progress

    def content(self, name: str) -> bytes:
        return self._hub.whole(self._listing.commit, name)

    def headers(self, files: Sequence[str]) -> Iterator[tuple[Shard, list[TensorRef]]]:
        for file in set(files) - self.names:
            raise CheckpointError(f"{INDEX} names it, and the repository does not have it", file=self.path(file))
        # Its threads do not keep the process from ending, so an interrupt need not wait for a server.
        with ThreadPool(min(THREADS, len(files))) as pool:
            for begin in range(0, len(files), THREADS):
                for done, (file, header, size_bytes) in enumerate(pool.imap(self._header, files[begin : begin + THREADS]), begin + 1):
                    if self._progress is not None:
                        self._progress(done, len(files))
                    yield parse_header(header, self.path(file), size_bytes, 0)

    def _header(self, file: str) -> tuple[str, bytes, int]:
        """(file, its header without the length, bytes of the file), by one request where the header is short, else by two."""
        raw, size = self._hub.part(self._listing.commit, file, 0, FIRST_BYTES)
        size_bytes = self._listing.sizes[file] if size is None else size
        if size_bytes is None:
            raise CheckpointError("the hub does not give its size", file=self.path(file))
        end = PREFIX_BYTES + header_length(raw[:PREFIX_BYTES], self.path(file), size_bytes)
        if end > len(raw):
            raw += self._hub.part(self._listing.commit, file, len(raw), end)[0]
            if len(raw) < end:
                raise CheckpointError("the hub sends less of it than its header", file=self.path(file))
        return file, raw[PREFIX_BYTES:end], size_bytes
