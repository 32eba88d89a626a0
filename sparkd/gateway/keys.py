"""Which key may do what: SHA-256 digests, compared in constant time. Never holds, logs or returns a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hmac import compare_digest


class Role(IntEnum):
    """The role of a caller; a greater role may do everything that a smaller one may."""

    NOBODY = 0
    INFERENCE = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class KeyDigests:
    """Digests of the keys of each role. With no key at all the gateway is open, which the daemon allows on loopback only."""

    inference: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, inference: Iterable[str] = (), admin: Iterable[str] = ()) -> KeyDigests:
        """From keys in clear."""
        return cls(tuple(map(digest, inference)), tuple(map(digest, admin)))

    @property
    def open(self) -> bool:
        return not self.inference and not self.admin

    def role(self, headers: Mapping[bytes, bytes]) -> Role:
        """The greatest role of the keys in `Authorization: Bearer` and `x-api-key`.

        Every presented key is compared with every digest, without an early exit, so that the time tells nothing about which
        one matched (vLLM's authenticate.py does the same).
        """
        role = Role.NOBODY
        for key in _presented(headers):
            presented = hashlib.sha256(key).digest()
            for known in self.inference:
                if compare_digest(presented, known):
                    role = max(role, Role.INFERENCE)
            for known in self.admin:
                if compare_digest(presented, known):
                    role = Role.ADMIN
        return role


def digest(key: str) -> bytes:
    """SHA-256 of a key in clear; keys are random and long, so no salt and no slow hash is needed."""
    return hashlib.sha256(key.encode()).digest()


def _presented(headers: Mapping[bytes, bytes]) -> list[bytes]:
    keys = []
    authorization = headers.get(b"authorization")
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        keys.append(authorization[7:].strip())
    api_key = headers.get(b"x-api-key")
    if api_key is not None:
        keys.append(api_key.strip())
    return keys
