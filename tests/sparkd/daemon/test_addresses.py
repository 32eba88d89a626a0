"""Where a daemon listens, and the URL by which this machine reaches it."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import httpx
import pytest

from sparkd.config.config import Config
from sparkd.daemon.daemon import _base_url, _check_inherited
from sparkd.errors import ConfigError
from sparkd.gateway.server import bind


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")])
def test_this_machine_reaches_it(host: str, reached: str) -> None:
    with bind(host, 0) as listening:
        assert _base_url(listening) == f"http://{reached}:{listening.getsockname()[1]}"


def test_a_link_local_address_keeps_its_interface() -> None:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    found = next(((address, name) for address, _, _, scope, _, name in rows if scope == "20"), None)
    if found is None:
        pytest.skip("this machine has no link-local address")
    address = f"{ipaddress.IPv6Address(int(found[0], 16))}%{found[1]}"
    with bind(address, 0) as listening:
        url = httpx.URL(_base_url(listening))
        assert url.host == address
        socket.create_connection((url.host, url.port or 0)).close()
        with pytest.raises(ConfigError, match="no key is set"):
            _check_inherited(Config(), listening, {})
