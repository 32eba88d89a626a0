"""The hook that `ray start` calls before it starts a node for sparkd: turns off what no option can. Never starts or stops anything.

Ray calls the function that RAY_START_HOOK names with its parameters (ray/scripts/scripts.py, 2.60). The client server is on whenever
grpcio can be imported, listens on every address, and `--ray-client-server-port=0` is refused.
"""

from __future__ import annotations

from typing import Any


def trim(parameters: Any, head: bool) -> None:
    """Turn off the Ray client server. Ray passes `head`, which is unused."""
    parameters.ray_client_server_port = None
