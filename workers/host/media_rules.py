"""Owns an engine's rules on the sources of media, and which addresses are public. Needs only the standard library."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass

# JSON: {"domains": [..], "local": false}; see Rules.
VARIABLE = "SPARKD_MEDIA"
CONNECTOR_VARIABLE = "VLLM_MEDIA_CONNECTOR"
CONNECTOR = "sparkd"
# All that IANA has given out as global unicast (RFC 4291 2.4). Outside of it are NAT64, SRv6 and addresses that carry an IPv4 address.
_UNICAST = ipaddress.IPv6Network("2000::/3")
# `is_global` of Python 3.11 to 3.13 lets these of IANA's special-purpose registries through: 6to4, its relays, IETF's own, documentation.
_SPECIAL = tuple(map(ipaddress.ip_network, ("2002::/16", "192.88.99.0/24", "192.0.0.0/24", "3fff::/20")))


@dataclass(frozen=True, slots=True)
class Rules:
    """domains: allowed hosts, in lower case; local: whether they may be on this machine or in its networks."""

    domains: frozenset[str] = frozenset()
    local: bool = False

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> Rules:
        """The rules in the environment. Without the variable no source is allowed."""
        settings = json.loads(environ.get(VARIABLE) or "{}")
        return cls(frozenset(map(str.lower, settings.get("domains", ()))), bool(settings.get("local", False)))

    def allows(self, host: str) -> bool:
        return host.lower() in self.domains

    def reaches(self, address: str) -> bool:
        """Whether an address may be connected to."""
        return self.local or is_public(address)


def is_public(text: str) -> bool:
    """Whether the address is public: neither private, loopback, link-local, shared, multicast nor reserved."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)
