"""Asks a Ray head what it is, before a node joins it: versions, living nodes. Never joins, never starts a process of Ray.

A program of its own, `python -m workers.agent.ray_probe HOST:PORT`, since Ray's import stays in its process's memory. The token comes
by RAY_AUTH_TOKEN_PATH. One line of JSON on stdout: {"ray", "python", "nodes": {address: labels}, "agent"}, the last the version of the
agent that the head's daemon has, null where none tells it; or {"refused": "token"}, {"refused": "silent", "why"}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ANSWER_TIMEOUT_S = 10
# Where the head's daemon writes its agent's version.
AGENT_KEY, KEYS_NAMESPACE = b"agent", b"sparkd"


def probe(address: str) -> dict[str, Any]:
    """See above; blocks for some ANSWER_TIMEOUT_S at most. Keys and namespaces of the head's store are those of Ray 2.60.

    (ray/_common/usage/usage_lib.py, put_cluster_metadata.)
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RaySystemError, RpcError

    try:
        head = GcsClient(address=address)
        nodes = head.get_all_node_info(timeout=ANSWER_TIMEOUT_S)
        versions = json.loads(head.internal_kv_get(b"CLUSTER_METADATA", b"cluster", ANSWER_TIMEOUT_S) or b"{}")
        agent = head.internal_kv_get(AGENT_KEY, KEYS_NAMESPACE, ANSWER_TIMEOUT_S)
    except AuthenticationError:
        return {"refused": "token"}
    except (RpcError, RaySystemError, ConnectionError, RuntimeError, ValueError) as error:
        return {"refused": "silent", "why": type(error).__name__}
    return {
        "ray": versions.get("ray_version"),
        "python": versions.get("python_version"),
        "agent": None if agent is None else agent.decode(),
        # 0 is ALIVE of GcsNodeInfo.GcsNodeState (src/ray/protobuf/gcs.proto).
        "nodes": {node.node_manager_address: dict(node.labels) for node in nodes.values() if node.state == 0},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1])) + "\n")
