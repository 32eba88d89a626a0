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
# IPv6 that carries an IPv4 address inside: NAT64 (RFC 6052), 6to4 (RFC 3056) and Teredo (RFC 4380) may lead back into this network.
_TUNNELS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))


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
        elif any(address in tunnel for tunnel in _TUNNELS):
            return False
    return address.is_global and not address.is_multicast
