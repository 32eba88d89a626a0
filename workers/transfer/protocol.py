"""Owns what two nodes say to each other while files are copied: the proof of the key, a request, an answer. Never opens a file.

The side that connects sends a nonce; the other one answers with its proof and a nonce; then the first proves itself. The key never travels.
Then each request names a file, an offset and a length, and is answered by the bytes and their SHA-256, or by the reason why not.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

NONCE_BYTES = 32
TIMEOUT_S = 60.0
MAX_NAME_BYTES = 4096
DATA, SUMS = 1, 2  # the bytes and their sum; their sum alone
_REQUEST = struct.Struct("!BHQI")
_ANSWER = struct.Struct("!BI")
_FINE, _REFUSED = 0, 1


class WireError(Exception):
    """The other end is gone, is not who it says, or does not speak this."""


class RemoteRefusal(Exception):
    """The other end's reason, one sentence."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    what: int
    name: str
    offset: int
    size: int


def greet_as_client(link: socket.socket, key: bytes) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    link.sendall(nonce)
    proof, theirs = _exactly(link, NONCE_BYTES), _exactly(link, NONCE_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"listens", nonce)):
        raise WireError("the other end does not have the key")
    link.sendall(_proof(key, b"connects", theirs))


def greet_as_server(link: socket.socket, key: bytes) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    link.sendall(_proof(key, b"listens", _exactly(link, NONCE_BYTES)) + nonce)
    if not hmac.compare_digest(_exactly(link, NONCE_BYTES), _proof(key, b"connects", nonce)):
        raise WireError("the other end does not have the key")


def ask(link: socket.socket, request: TransferRequest, into: memoryview) -> str:
    """The SHA-256 that the other end worked out, hex; `into` has the bytes where they were asked for. Raises RemoteRefusal, WireError."""
    name = request.name.encode()
    try:
        link.sendall(_REQUEST.pack(request.what, len(name), request.offset, request.size) + name)
        verdict, size = _ANSWER.unpack(_exactly(link, _ANSWER.size))
        if verdict != _FINE:
            raise RemoteRefusal(_exactly(link, min(size, MAX_NAME_BYTES)).decode("utf-8", "replace"))
        if size != (request.size if request.what == DATA else 0):
            raise WireError("the other end sends another number of bytes than it was asked for")
        _fill(link, into[:size])
        return _exactly(link, hashlib.sha256().digest_size).hex()
    except OSError as error:
        raise WireError(error.strerror or type(error).__name__) from error


def next_request(link: socket.socket) -> TransferRequest | None:
    """None where the other end has gone. Raises WireError."""
    try:
        first = link.recv(1)
        if not first:
            return None
        what, length, offset, size = _REQUEST.unpack(first + _exactly(link, _REQUEST.size - 1))
        if length > MAX_NAME_BYTES or what not in (DATA, SUMS):
            raise WireError("the request is none")
        return TransferRequest(what, _exactly(link, length).decode("utf-8"), offset, size)
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise WireError(type(error).__name__) from error


def answer(link: socket.socket, data: memoryview | bytes, digest: bytes) -> None:
    link.sendall(_ANSWER.pack(_FINE, len(data)))
    link.sendall(data)
    link.sendall(digest)


def refuse(link: socket.socket, why: str) -> None:
    told = why.encode()[:MAX_NAME_BYTES]
    link.sendall(_ANSWER.pack(_REFUSED, len(told)) + told)


def _proof(key: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who + nonce, "sha256")


def _exactly(link: socket.socket, size: int) -> bytes:
    taken = bytearray(size)
    _fill(link, memoryview(taken))
    return bytes(taken)


def _fill(link: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        try:
            more = link.recv_into(into[got:])
        except OSError as error:
            raise WireError(error.strerror or type(error).__name__) from error
        if not more:
            raise WireError("it closed the connection")
        got += more
