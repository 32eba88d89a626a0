"""Reads parts of a repository's files on a hub, with huggingface_hub's session, token, proxies and offline mode.

Hostile side: the author of a repository, and a server that answers with more than was asked for. An answer is read only as far as it was
asked for, whatever its length: `HfApi.get_safetensors_metadata` reads a whole file from a server without ranges.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from sparkd import __version__
from sparkd.checkpoint.foreign_json import MAX_JSON_BYTES, parsed
from sparkd.errors import CheckpointError, CheckpointUnread, ConfigError
from workers.host.hub_cache import is_revision

if TYPE_CHECKING:
    from httpx import Response

ATTEMPTS = 3
PAUSE_S = 0.5
# The library's time-out (HF_HUB_DOWNLOAD_TIMEOUT, 10 s) is between two pieces: a server that drips must end too.
REQUEST_S = 120.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
_TRUE = ("1", "ON", "YES", "TRUE")
_NETWORK = "Check the network, HF_ENDPOINT and the proxy's variables, or give a folder"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RepositoryListing:
    """A repository at one commit. sizes: name -> bytes, None where the hub does not tell."""

    commit: str
    sizes: Mapping[str, int | None]


class _Passing(Exception):
    """A failure that may go better at another try."""


class Hub:
    """One repository on a hub, for reading. Raises ConfigError and CheckpointError, which name the repository and never the token."""

    def __init__(self, hub_id: str, revision: str | None, environ: Mapping[str, str]) -> None:
        """environ: of the engine; where it has a token, an address or an offline mode of its own, that counts before this process's."""
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
        self._host = urlsplit(self.endpoint).hostname or ""
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not self._host:
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

    def listing(self) -> RepositoryListing:
        url = f"{self.endpoint}/api/models/{self.hub_id}/revision/{quote(self._revision, safe='')}?blobs=true"
        # Once: without a network this is where one waits.
        raw = self._tried(lambda: self._whole(url, "its listing"), attempts=1)
        value = parsed(raw, self.hub_id, _NETWORK)
        commit, siblings = (value.get("sha"), value.get("siblings")) if isinstance(value, dict) else (None, None)
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise self.refusal(f"the answer of {self._host} is not the listing of a repository", "Check HF_ENDPOINT")
        files = [file for file in siblings if isinstance(file, dict) and isinstance(file.get("rfilename"), str)]
        sizes = {file["rfilename"]: size if isinstance(size := file.get("size"), int) and size >= 0 else None for file in files}
        return RepositoryListing(commit, sizes)

    def whole(self, commit: str, name: str) -> bytes:
        """All of a small file, at most MAX_JSON_BYTES."""
        return self._tried(lambda: self._whole(self._url(commit, name), name))

    def part(self, commit: str, name: str, start: int, end: int) -> tuple[bytes, int | None]:
        """(bytes from start to before end, fewer where the file ends before; the file's size, None where the server does not tell it)."""
        return self._tried(lambda: self._part(self._url(commit, name), start, end))

    def _url(self, commit: str, name: str) -> str:
        return f"{self.endpoint}/{self.hub_id}/resolve/{commit}/{quote(name, safe='')}"

    def _tried(self, ask: Callable[[], _T], attempts: int = ATTEMPTS) -> _T:
        for attempt in range(1, attempts):
            try:
                return ask()
            except _Passing:
                time.sleep(PAUSE_S * attempt)
        try:
            return ask()
        except _Passing as passing:
            raise CheckpointUnread(str(passing), file=self.hub_id, cure=_NETWORK) from None

    def _whole(self, url: str, name: str) -> bytes:
        with self._asked(url, {}) as response:
            raw = self._first(response, MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise self.refusal(f"{name} is larger than {MAX_JSON_BYTES >> 20} MiB", "Choose another revision or repository")
        return raw

    def _part(self, url: str, start: int, end: int) -> tuple[bytes, int | None]:
        # The ranges of a compressed answer would be those of the compressed bytes.
        with self._asked(url, {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}) as response:
            if match := _RANGE.fullmatch(response.headers.get("Content-Range", "")):
                return self._first(response, end - start), int(match[2])
            # A server without ranges begins at the file's first byte; it is left as soon as what was asked for is there.
            size = response.headers.get("Content-Length", "")
            return self._first(response, end)[start:], int(size) if size.isdecimal() else None

    def _first(self, response: Response, nbytes: int) -> bytes:
        """The first bytes of an answer; all of one that is shorter."""
        until_s, taken = time.monotonic() + REQUEST_S, bytearray()
        for piece in response.iter_bytes():
            taken += piece
            if time.monotonic() > until_s:
                raise _Passing(f"{self._host} was still sending after {REQUEST_S:.0f} s")
            if len(taken) >= nbytes:
                break
        return bytes(taken[:nbytes])

    @contextmanager
    def _asked(self, url: str, headers: Mapping[str, str]) -> Iterator[Response]:
        """An answer that is 200 or 206; redirects are followed, to another host without the token."""
        from huggingface_hub.utils import get_session

        try:
            with get_session().stream(
                "GET", url, headers={**self._headers, **headers}, timeout=self._timeout_s, follow_redirects=True
            ) as response:
                if response.status_code not in (200, 206):
                    raise self._refused(response)
                yield response
        except UnicodeError:
            raise self.refusal("the token cannot be sent: it has characters that no token has", "Check HF_TOKEN") from None
        except client_errors() as error:
            raise self._unreached(error) from None

    def _unreached(self, error: BaseException) -> Exception:
        name = type(error).__name__
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
        if code == "GatedRepo":
            whose = "the account of the token has not accepted its terms" if "authorization" in self._headers else "no token was sent"
            cure = f"Accept the terms on {self._host}/{self.hub_id}, and set HF_TOKEN to a token of that account"
            return self.refusal(f"it is gated, and {whose} (HTTP {status})", cure)
        if code == "RevisionNotFound":
            return self.refusal(f"it has no revision {self._revision!r}", "Give a branch, a tag or a commit that is there")
        if response.headers.get("X-Error-Message", "").startswith("Invalid credentials"):
            return self.refusal(f"{self._host} does not accept the token (HTTP {status})", "Set HF_TOKEN to a valid one, or unset it")
        if status in (401, 403, 404):
            cure = "Check the spelling, or set HF_TOKEN to a token that may read it"
            return self.refusal(f"there is no such model on {self._host}, or it is private (HTTP {status})", cure)
        if status == 429:
            cure = "Wait a few minutes, or set HF_TOKEN for a higher limit"
            return self.refusal(f"{self._host} limits requests from this address (HTTP 429)", cure)
        if status >= 500:
            return _Passing(f"{self._host} is in trouble (HTTP {status})")
        return self.refusal(f"{self._host} answers with HTTP {status}", "Check HF_ENDPOINT")


def client_errors() -> tuple[type[BaseException], ...]:
    """The errors of the library's HTTP client: httpx or httpx2, as its version has it; its own error is derived from the client's."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, HfHubHTTPError.__bases__[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
