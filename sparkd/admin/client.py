"""The command line's way to a daemon: an httpx client of the admin API and of /v1."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkd.checkpoint.source import FOLDER_SIGNS
from sparkd.errors import (
    ConfigError,
    EngineError,
    SparkdError,
    Unauthorized,
    Unavailable,
    message_of_body,
)
from sparkd.gateway import routes
from sparkd.gateway.routes import ADMIN_ROOT
from workers.host import regular_file

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:4000"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
# A key has at most 512 letters; the rest is comments.
_KEY_FILE_BYTES = 1 << 16
_KEY = re.compile(r"[!-~]{1,512}")
# The daemon's key files may have a name in front of a key (sparkd.config.api_keys).
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}:[ \t]+")


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer. `thought` is what a reasoning model thinks before it speaks."""

    text: str
    thought: str = ""


class Client:
    """One daemon. Every method raises a SparkdError: the daemon's refusal as the class its code names, Unavailable without an answer.

    Nothing of the environment's proxies is used, and no redirection is followed: the key goes to the host that was named.

    base_url: http://host:port.
    key: the admin key, or None where the daemon is open.
    """

    def __init__(self, base_url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self.base_url = base_url
        # Whether a folder of this machine is one of the daemon's.
        self.is_here = urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")
        self.has_key = key is not None
        self._key = key
        self._transport = transport

    @cached_property
    def _http(self) -> httpx.Client:
        # Not before a daemon is asked: to import it takes longer than most of what needs no daemon.
        import httpx

        return httpx.Client(
            base_url=self.base_url,
            # A daemon without keys takes a POST from what no web page can be (sparkd.gateway.pages).
            headers={"x-sparkd-client": "cli"} | ({"authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            # Without https no certificate is ever looked at, and reading the authorities' takes 50 ms.
            verify=self.base_url.startswith("https:"),
            transport=self._transport,
        )

    def close(self) -> None:
        if "_http" in vars(self):
            self._http.close()

    def listens(self) -> bool:
        """Whether a program listens at the daemon's address; a request to sparkd itself would need the import of httpx."""
        at = urlsplit(self.base_url)
        try:
            socket.create_connection((at.hostname or "", at.port or 443), CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """`path` below the admin API. wait_s among the parameters lengthens the time that the answer may take."""
        return self._ask("GET", path, parameters)

    def post(self, path: str, body: Mapping[str, Any] | None = None, read_s: float = READ_TIMEOUT_S) -> dict[str, Any]:
        """read_s: how long the answer may take."""
        return self._ask("POST", path, {}, body, read_s)

    def delete(self, path: str, **parameters: Any) -> dict[str, Any]:
        return self._ask("DELETE", path, parameters)

    def models(self) -> list[dict[str, Any]]:
        """Raises Unavailable if another server answers at the address: LiteLLM's port is 4000 too."""
        models = self.get("/models").get("models")
        if not isinstance(models, list):
            raise self._stranger(200)
        return models

    def model(self, name: str) -> dict[str, Any]:
        return self.get(model_path(name))

    def settings(self, name: str) -> dict[str, Any]:
        return self.get(f"{model_path(name)}/settings")

    def follow_log(self, name: str, cursor: str, rank: int = 0) -> Iterator[str]:
        """The lines that are written to a model's log from `cursor` on, until the daemon ends."""
        params = {"follow": "true", "cursor": cursor, "rank": str(rank)}
        with self._stream("GET", f"{ADMIN_ROOT}{model_path(name)}/log", params=params) as response:
            yield from response.iter_text()

    def follow_events(self, after: int) -> Iterator[dict[str, Any]]:
        """Events with a `seq` beyond `after` as they happen, until the daemon ends."""
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        with self._stream("GET", f"{ADMIN_ROOT}/events", headers=headers) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield _piece(line)

    def answer(self, model: str, messages: list[dict[str, str]]) -> Iterator[Delta]:
        """A chat answer as it is made. Leaving the iterator ends the request, and with it the engine's work."""
        body = {"model": model, "messages": messages, "stream": True}
        with self._stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = _piece(line)
                if "error" in piece:
                    raise EngineError(f"The answer broke off: {message_of_body(piece) or 'the engine gave no reason'}")
                for choice in piece.get("choices", [])[:1]:
                    delta = choice.get("delta", {})
                    yield Delta(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "")

    def _ask(
        self, method: str, path: str, parameters: Mapping[str, Any], body: Mapping[str, Any] | None = None, read_s: float = READ_TIMEOUT_S
    ) -> dict[str, Any]:
        read_s += float(parameters.get("wait_s", 0.0))
        limits_s = (CONNECT_TIMEOUT_S, read_s, read_s, read_s)
        with self._translated():
            given = {name: value for name, value in parameters.items() if value is not None}
            response = self._http.request(method, ADMIN_ROOT + path, params=given, json=body, timeout=limits_s)
        return self._checked(response)

    @contextmanager
    def _stream(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        limits_s = (CONNECT_TIMEOUT_S, None, None, None)
        with self._translated(), self._http.stream(method, path, timeout=limits_s, **request) as response:
            if response.status_code != 200:
                response.read()
                self._checked(response)
            yield response

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        """The JSON object of a success; a refusal is raised."""
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.is_success and isinstance(body, dict):
            return body
        if response.status_code == 401:
            raise _key_refused(self.base_url, self.has_key)
        # Other servers with OpenAI's API give a number as the code.
        if not isinstance(body, dict) or not isinstance(body.get("error"), dict) or isinstance(body["error"].get("code"), int):
            raise self._stranger(response.status_code)
        raise refusal(body["error"].get("code"), message_of_body(body) or f"sparkd answered {response.status_code} without a reason.", body)

    def _stranger(self, status: int) -> Unavailable:
        return Unavailable(f"The server at {self.base_url} (status {status}) is not sparkd. Give sparkd's address by --url.")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one seam between httpx's exceptions and ours."""
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            detail = f" ({error})" if self.base_url.startswith("https:") else ""
            cure = "Start it with `sparkd serve`, or give its address by --url or SPARKD_URL."
            raise Unavailable(f"No sparkd answers at {self.base_url}{detail}. {cure}") from None
        except httpx.TimeoutException:
            raise Unavailable(f"sparkd at {self.base_url} took too long to answer; try again, or see its log.") from None
        except httpx.TransportError:
            raise Unavailable(f"sparkd at {self.base_url} closed the connection: it ended or was restarted. Try again.") from None


def base_url(text: str) -> str:
    """`host:port`, `host`, or a whole URL, with or without /v1, as scheme://host:port. Raises ConfigError."""
    form = "write it as http://host:port"
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        port = url.port
        (url.hostname or "").encode("idna")  # as a socket reads it
    except ValueError as error:
        raise ConfigError(f"--url: the address cannot be read ({error}); {form}.") from None
    if "@" in url.netloc:
        raise ConfigError("--url: the address must not contain a user or password; give the admin key by SPARKD_ADMIN_KEY or --key-file.")
    if url.scheme not in ("http", "https") or not url.hostname or url.path.rstrip("/") not in ("", "/v1") or url.query:
        raise ConfigError(f"--url: {text!r} is not sparkd's address; {form}.")
    default = ":4000" if url.scheme == "http" and port is None else ""
    return f"{url.scheme}://{url.netloc.rstrip(':')}{default}"


def admin_key(key_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The key from a file (its first line that is no comment), else from SPARKD_ADMIN_KEY, else None. Raises ConfigError, never with it.

    There is no flag with the key itself: every user of a machine can read every command line (/proc/PID/cmdline).
    """
    if key_file is None:
        key, origin = environ.get("SPARKD_ADMIN_KEY", "").strip(), "SPARKD_ADMIN_KEY"
    else:
        key, origin = _NAME.sub("", _first_line(key_file)), str(key_file)
    if not key and key_file is None:
        return None
    if key.startswith("sha256:"):
        raise ConfigError(f"{origin} holds the digest of a key; the key itself is needed to call sparkd.")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{origin} holds no key: 1 to 512 visible ASCII characters are expected.")
    return key


def refusal(code: object, message: str, body: Mapping[str, Any] | None = None) -> SparkdError:
    """The daemon's refusal as the class whose `code` it carries, so that it has that class's exit code; with what else its body says."""
    kind = _BY_CODE.get(str(code), SparkdError)
    error = kind.__new__(kind)
    details = body or {}
    param = details.get("error", {}).get("param")
    SparkdError.__init__(error, message, param=None if param is None else str(param))
    # The attributes that a class's own constructor sets, which cannot be called with a body.
    vars(error).update(loading=details.get("loading") or {}, held_by=details.get("held_by") or [])
    return error


def model_path(name: str) -> str:
    """A model's path below the admin API. Raises ConfigError for a folder."""
    if name.startswith(FOLDER_SIGNS):
        raise ConfigError(
            f"{name} is a folder, and a model's name is expected here: `sparkd ls` lists the names, `sparkd run` adds a model."
        )
    return routes.model_path(name)


def _key_refused(url: str, had_key: bool) -> SparkdError:
    what = "rejected this admin key" if had_key else "needs an admin key"
    return refusal(Unauthorized.code, f"sparkd at {url} {what}: put one into SPARKD_ADMIN_KEY, or into a file and give --key-file FILE.")


def _first_line(path: Path) -> str:
    try:
        lines = regular_file.read(path, _KEY_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The key file cannot be read: {reason}. Name a file that holds one key.", file=str(path)) from None
    return next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")


def _piece(line: str) -> dict[str, Any]:
    """The object of one `data:` line of an event stream."""
    try:
        piece = json.loads(line.removeprefix("data: "))
    except ValueError:
        piece = None
    if not isinstance(piece, dict):
        raise EngineError("A piece of the stream was not a JSON object.")
    return piece


def _tree(kind: type[SparkdError]) -> Iterator[type[SparkdError]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _tree(inner)


# Backwards, because the root of a branch stands before its leaves, and a code that a leaf inherits means the root.
_BY_CODE: dict[str, type[SparkdError]] = {kind.code: kind for kind in reversed(list(_tree(SparkdError)))}
