"""Owns asking a hub for parts of a repository's files. Never writes one down, never shows a token or an address that may hold a signature.

Session, token, proxies and offline mode are huggingface_hub's own ("Environment variables" in its documentation). The interface is that of
the hub: `api/models/ID/revision/REVISION?blobs=true` lists commit, files and sizes, `ID/resolve/COMMIT/FILE` leads to the bytes.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from sparkd import __version__
from sparkd.checkpoint.foreign_json import parsed
from sparkd.errors import CheckpointError, ConfigError, HubSilent
from workers.host.hub_cache import is_revision

if TYPE_CHECKING:
    from httpx import Response

THREADS = 16
ATTEMPTS = 3
PAUSE_S = 0.5
# Beside the time-out between two pieces, which is the library's (HF_HUB_DOWNLOAD_TIMEOUT, 10 s): a server that drips must end too.
REQUEST_S = 120.0
MAX_LISTING_BYTES = 64 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NO_RANGE = re.compile(r"bytes \*/(\d{1,18})")
_TRUE = ("1", "ON", "YES", "TRUE")
_NETWORK = "Check the network, HF_ENDPOINT and the proxy's variables, or give a folder"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RepositoryListing:
    """A repository at one commit. sizes: name -> bytes, None where the hub does not tell; files in its folders are left out."""

    commit: str
    sizes: Mapping[str, int | None]


class _Passing(Exception):
    """A failure that may go better at another try."""


class Hub:
    """One repository on a hub, for reading. Raises ConfigError and CheckpointError, which name the repository and never the token."""

    def __init__(self, hub_id: str, revision: str | None, environ: Mapping[str, str]) -> None:
        """environ: of the engine; where it has a token or an address of its own, that counts before this process's."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import build_hf_headers, validate_repo_id

        try:
            validate_repo_id(hub_id)
        except HFValidationError:
            problem = f"{hub_id!r} is neither a folder that is there nor the id of a model on a hub: give a folder, or owner/name."
            raise ConfigError(problem) from None
        if revision is not None and not is_revision(revision):
            raise ConfigError(f"{hub_id}: {revision[:64]!r} cannot be a revision: give a branch, a tag or a commit.", param="revision")
        self.hub_id = hub_id
        self._revision = revision or constants.DEFAULT_REVISION
        self.endpoint = (environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise ConfigError("HF_ENDPOINT is not an address: give one that begins with https://, or unset it.")
        offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        if offline.upper() in _TRUE or constants.HF_HUB_OFFLINE:
            problem = "this machine's hub cache lacks some of its files, and HF_HUB_OFFLINE keeps sparkd from asking the hub"
            raise self.refusal(problem, "Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or give a folder")
        token = environ.get("HF_TOKEN")
        own = token if token and token != os.environ.get("HF_TOKEN") else None
        self._headers = build_hf_headers(token=own, library_name="sparkd", library_version=__version__)
        self._timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def refusal(self, problem: str, cure: str) -> CheckpointError:
        return CheckpointError(problem, file=self.hub_id, cure=cure)

    def listing(self, *, nested: bool = False) -> RepositoryListing:
        """nested: files in its folders too."""
        url = f"{self.endpoint}/api/models/{self.hub_id}/revision/{quote(self._revision, safe='')}?blobs=true"
        # Once: without a network this is where one waits.
        raw = self._tried(lambda: self._whole(url, MAX_LISTING_BYTES, "its listing"), attempts=1)
        value = parsed(raw, self.hub_id, _NETWORK)
        commit, siblings = (value.get("sha"), value.get("siblings")) if isinstance(value, dict) else (None, None)
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise self.refusal(f"the answer of {self._host} is not the listing of a repository", "Check HF_ENDPOINT")
        files = [file for file in siblings if isinstance(file, dict) and isinstance(file.get("rfilename"), str)]
        return RepositoryListing(
            commit, {file["rfilename"]: _size(file.get("size")) for file in files if nested or "/" not in file["rfilename"]}
        )

    def whole(self, commit: str, name: str, limit: int) -> bytes:
        """All of a small file, at most `limit` bytes."""
        return self._tried(lambda: self._whole(self._url(commit, name), limit, name))

    def part(self, commit: str, name: str, start: int, end: int) -> tuple[bytes, int | None]:
        """(bytes from start to before end, fewer where the file ends before; the file's size, None where the server does not tell it)."""
        return self._tried(lambda: self._part(self._url(commit, name), name, start, end))

    @property
    def _host(self) -> str:
        return urlsplit(self.endpoint).hostname or ""

    def _url(self, commit: str, name: str) -> str:
        return f"{self.endpoint}/{self.hub_id}/resolve/{commit}/{quote(name, safe='')}"

    def _tried(self, ask: Callable[[], _Result], attempts: int = ATTEMPTS) -> _Result:
        attempt = 1
        while True:
            try:
                return ask()
            except _Passing as passing:
                if attempt == attempts:
                    raise HubSilent(str(passing), file=self.hub_id, cure=_NETWORK) from None
            time.sleep(PAUSE_S * attempt)
            attempt += 1

    def _whole(self, url: str, limit: int, name: str) -> bytes:
        with self._asked(url, {}) as response:
            taken = bytearray()
            for piece in self._pieces(response, decoded=True):
                taken += piece
                if len(taken) > limit:
                    raise self.refusal(f"{name} is larger than {limit >> 20} MiB", "Choose another revision or repository")
            return bytes(taken)

    def _part(self, url: str, name: str, start: int, end: int) -> tuple[bytes, int | None]:
        # The ranges of a compressed answer would be those of the compressed bytes.
        with self._asked(url, {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}) as response:
            content_range = response.headers.get("Content-Range", "")
            if response.status_code == 416:
                beyond = _NO_RANGE.fullmatch(content_range)
                return b"", int(beyond[1]) if beyond else None
            # A server without ranges begins at the file's first byte; it is left as soon as what was asked for is there.
            at, size = 0, _size(response.headers.get("Content-Length"))
            upto = end if size is None else min(end, size)
            if response.status_code == 206:
                match = _RANGE.fullmatch(content_range)
                if match is None or int(match[1]) != start or not start <= int(match[2]) < end:
                    raise self.refusal(f"{self._host} answers with another range of {name} than was requested", "Check HF_ENDPOINT")
                at, upto, size = start, int(match[2]) + 1, _size(match[3])
            taken = bytearray()
            for piece in self._pieces(response, decoded=False):
                taken += piece[max(0, start - at) :]
                at += len(piece)
                if at >= upto:
                    break
            if at < upto and size is not None:
                raise _Passing(f"{self._host} ended its answer for {name} at byte {at} of {upto}")
            return bytes(taken[: end - start]), size

    def _pieces(self, response: Response, *, decoded: bool) -> Iterator[bytes]:
        until_s = time.monotonic() + REQUEST_S
        for piece in response.iter_bytes() if decoded else response.iter_raw():
            if time.monotonic() > until_s:
                raise _Passing(f"{self._host} was still sending after {REQUEST_S:.0f} s")
            yield piece

    @contextmanager
    def _asked(self, url: str, headers: Mapping[str, str]) -> Iterator[Response]:
        """An answer that is 200, 206 or 416; redirects are followed, to another host without the token."""
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import get_session

        # httpx or httpx2, as the library's version has it: its own error is derived from the client's (huggingface_hub/errors.py).
        http_error = HfHubHTTPError.__bases__[0]
        options = {"headers": {**self._headers, **headers}, "timeout": self._timeout_s, "follow_redirects": True}
        try:
            with get_session().stream("GET", url, **options) as response:
                if response.status_code not in (200, 206, 416):
                    raise self._refused(response)
                yield response
        except UnicodeError:
            raise self.refusal("the token cannot be sent: it has characters that no token has", "Check HF_TOKEN") from None
        except (OSError, http_error) as error:
            raise self._unreached(error) from None

    def _unreached(self, error: BaseException) -> Exception:
        name = type(error).__name__
        if name == "OfflineModeIsEnabled":
            return self.refusal("HF_HUB_OFFLINE keeps sparkd from asking the hub", "Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
        if name in ("LocalProtocolError", "UnsupportedProtocol", "TooManyRedirects"):
            return self.refusal(f"{self._host} cannot be asked ({name})", "Check HF_ENDPOINT, and HF_TOKEN for a blank or a line feed")
        if "Timeout" in name:
            return _Passing(f"{self._host} did not answer within {self._timeout_s:.0f} s")
        if name == "RemoteProtocolError":
            return _Passing(f"{self._host} broke off its answer")
        reason = next((cause.strerror for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror), name)
        return _Passing(f"{self._host} cannot be reached: {reason}")

    def _refused(self, response: Response) -> Exception:
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        has_token = "authorization" in {name.lower() for name in self._headers}
        if code == "GatedRepo":
            whose = "the account of the token has not accepted its terms" if has_token else "no token was sent"
            cure = f"Accept the terms on {self._host}/{self.hub_id}, and set HF_TOKEN to a token of that account"
            return self.refusal(f"it is gated, and {whose} (HTTP {status})", cure)
        if code == "RevisionNotFound":
            return self.refusal(f"it has no revision {self._revision!r}", "Give a branch, a tag or a commit that is there")
        if code == "EntryNotFound":
            return self.refusal("a file that is listed is not served (HTTP 404)", "Choose another revision")
        if response.headers.get("X-Error-Message", "").startswith("Invalid credentials"):
            return self.refusal(f"{self._host} does not accept the token (HTTP {status})", "Set HF_TOKEN to a valid one, or unset it")
        if status in (401, 404):
            cure = "Check the spelling, or set HF_TOKEN to a token that may read it"
            return self.refusal(f"there is no such model on {self._host}, or it is private (HTTP {status})", cure)
        if status == 403:
            return self.refusal(f"{self._host} does not let it be read (HTTP 403)", "Set HF_TOKEN to a token that may read it")
        if status == 429:
            cure = "Wait a few minutes, or set HF_TOKEN for a higher limit"
            return self.refusal(f"{self._host} limits requests from this address (HTTP 429)", cure)
        if status >= 500:
            return _Passing(f"{self._host} is in trouble (HTTP {status})")
        return self.refusal(f"{self._host} answers with HTTP {status}", "Check HF_ENDPOINT")


def in_parallel(jobs: Sequence[Callable[[], _Result]]) -> Iterator[tuple[int, _Result]]:
    """(number of the job, its result), as they get done, by at most THREADS threads. The first error of a job ends it.

    The threads do not keep the process from ending: an interrupt need not wait for a server.
    """
    waiting = iter(enumerate(jobs))
    lock = threading.Lock()
    done: queue.SimpleQueue[tuple[int, _Result | None, BaseException | None]] = queue.SimpleQueue()
    left = threading.Event()

    def work() -> None:
        while not left.is_set():
            with lock:
                number, job = next(waiting, (-1, None))
            if job is None:
                return
            try:
                done.put((number, job(), None))
            except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that asked
                done.put((number, None, error))

    for _ in range(min(THREADS, len(jobs))):
        threading.Thread(target=work, name="hub", daemon=True).start()
    try:
        for _ in jobs:
            number, result, error = done.get()
            if error is not None:
                raise error
            yield number, result  # type: ignore[misc]
    finally:
        left.set()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _size(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19 else None
