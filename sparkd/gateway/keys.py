"""Maps an API key to a role and a name by SHA-256 digests, compared in constant time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hmac import compare_digest


class Role(IntEnum):
    """The role of a caller. A greater role includes the smaller ones."""

    NOBODY = 0
    INFERENCE = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class KeyDigests:
    """Digests of the keys of each role. Without any key the gateway is open, which the daemon allows on loopback only.

    names: what a key is called in the record of requests, by its digest.
    """

    inference: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()
    names: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, inference: Iterable[str] = (), admin: Iterable[str] = ()) -> KeyDigests:
        """Digest keys that are in clear text."""
        return cls(tuple(map(digest, inference)), tuple(map(digest, admin)))

    @property
    def open(self) -> bool:
        return not self.inference and not self.admin

    def role(self, headers: Mapping[bytes, bytes]) -> Role:
        return self.caller(headers)[0]

    def caller(self, headers: Mapping[bytes, bytes]) -> tuple[Role, str | None]:
        """The greatest role of the keys in `Authorization: Bearer` and `x-api-key`, and the name of the key that has it.

        Every presented key is compared with every digest, without an early exit, so that the time does not show which one matched
        (vLLM's authenticate.py does the same).
        """
        role, matched = Role.NOBODY, b""
        for key in _presented(headers):
            presented = hashlib.sha256(key).digest()
            for configured in self.inference:
                if compare_digest(presented, configured) and role < Role.INFERENCE:
                    role, matched = Role.INFERENCE, configured
            for configured in self.admin:
                if compare_digest(presented, configured) and role < Role.ADMIN:
                    role, matched = Role.ADMIN, configured
        return role, self.names.get(matched)


def digest(key: str) -> bytes:
    """SHA-256 of a key in clear text. Keys are random and long, so they need no salt and no slow hash."""
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
