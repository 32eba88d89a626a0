"""The data plane: bounded HTTP, keys, routes and the byte-for-byte pass-through to the engines. Never starts or stops an engine."""

from sparkd.gateway.edge import Edge, EdgeSettings
from sparkd.gateway.keys import KeyDigests
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.server import GatewayServer, gateway_server

__all__ = ["ClientLimits", "Edge", "EdgeSettings", "GatewayServer", "KeyDigests", "gateway_server"]
