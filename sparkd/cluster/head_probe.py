"""A node's questions to a head before it joins: whether it is there, takes the token and runs the same releases."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkd import __version__
from sparkd.cluster.ray_head import VERSION_LABEL, is_here, node_environment
from sparkd.config.fields import split_address
from sparkd.errors import ConfigError, RayUnavailable
from workers.agent.version import VERSION
from workers.host.interpreter import inherited_environment, module_command

PORT = 6379
REACH_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 45.0
_SAME = "install the same release of sparkd on both nodes"


@dataclass(frozen=True, slots=True)
class Head:
    """The head behind `sparkd join HEAD`.

    address: its IPv4 address and port
    routed: from which of this node's addresses the kernel talks to it
    """

    address: str
    host: str
    routed: str


def find_head(text: str) -> Head:
    """`host` or `host:port`, looked up and reached. Raises ConfigError for what is no head's address, RayUnavailable where none answers."""
    try:
        bare = ":" not in text or text.endswith("]")
        host, port = split_address(f"{text}:{PORT}" if bare else text)
    except ValueError:
        how = f"give host or host:port, such as 192.168.100.10 or spark-1:{PORT}; a port is at most 65535"
        raise ConfigError(f"{text!r} is not a head's address: {how}.") from None
    if ":" in host:
        raise ConfigError(
            f"{host} is an IPv6 address: the nodes of a cluster talk to each other by IPv4, as RoCE does here; give the head's IPv4 "
            "address on the cable (`sparkd fabric` there shows it)."
        )
    try:
        (*_, target), *_ = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host} has no IPv4 address here ({error.strerror}): give the head's address on the cable instead.") from None
    ip = str(target[0])
    if is_here(ip):
        raise ConfigError(f"{text} is this node itself: run `sparkd join` on the other one, with the address of this one.")
    try:
        with socket.create_connection((ip, port), REACH_TIMEOUT_S) as probe:
            routed = str(probe.getsockname()[0])
    except OSError as error:
        raise RayUnavailable(f"{ip}:{port} does not answer: {_why_not(error, port)}") from None
    return Head(f"{ip}:{port}", ip, routed)


def ask_head(head: Head, token_path: Path, node_ip: str) -> None:
    """Raise RayUnavailable for a wrong token, another release of Ray, Python or sparkd, and silence."""
    answer = probe_head(head.address, token_path, node_ip)
    if answer.get("refused") == "token":
        raise RayUnavailable(
            f"The head at {head.address} does not take this token: `sparkd token` on the head prints its own, "
            "`sparkd token -q | ssh NODE sudo -u sparkd sparkd join HEAD --token -` brings it here."
        )
    if "refused" in answer:
        raise RayUnavailable(f"No Ray head answers at {head.address} ({answer['why']}). `sparkd token` on the head prints its address.")
    ours = {"ray": importlib.metadata.version("ray"), "python": platform.python_version()}
    for name, called, cure in (("ray", "Ray", _SAME), ("python", "Python", "make both environments with the same Python")):
        if answer[name] and answer[name] != ours[name]:
            raise RayUnavailable(f"The head runs {called} {answer[name]} and this node {ours[name]}, which Ray refuses: {cure}.")
    nodes: Mapping[str, Mapping[str, str]] = answer["nodes"]  # type: ignore[assignment]
    version = nodes.get(head.host, {}).get(VERSION_LABEL)
    if version is not None and version != __version__:
        raise RayUnavailable(f"The head runs sparkd {version} and this node {__version__}: {_SAME}, then restart their Ray.")
    agent = answer.get("agent")
    if agent is not None and agent != VERSION:
        raise RayUnavailable(f"The head's daemon has agent {agent} of sparkd {__version__} and this node agent {VERSION}: {_SAME}.")


def probe_head(address: str, token_path: Path, node_ip: str) -> dict[str, object]:
    """The answer of workers.agent.ray_probe, in a child that is gone with its Ray afterwards. Blocks for some seconds, at most
    PROBE_TIMEOUT_S."""
    try:
        done = subprocess.run(
            module_command(sys.executable, "workers.agent.ray_probe", address),
            env=inherited_environment(os.environ) | node_environment(token_path, node_ip) | {"RAY_BACKEND_LOG_LEVEL": "fatal"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"refused": "silent", "why": f"nothing within {PROBE_TIMEOUT_S:.0f} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"refused": "silent", "why": f"exit code {done.returncode}"}


def _why_not(error: OSError, port: int) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came back within {REACH_TIMEOUT_S:.0f} s. Check the cable (`sparkd fabric`) and the head's firewall."
    if error.errno == errno.ECONNREFUSED:
        return (
            f"nothing listens there. The head needs cluster.node_ip and cluster.port ({port}): `sparkd token` there names the missing one."
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"there is no route to it ({error.strerror}). Check the addresses of both ends of the cable: `sparkd fabric`."
    return f"{error.strerror or error}. Check the cable and the addresses of both its ends: `sparkd fabric`."
