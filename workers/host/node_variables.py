"""Names of the variables by which a node's Ray passes that node's paths to the agent, which it starts."""

from __future__ import annotations

# In the environment of a Ray that `sparkd ray-node` or the daemon started: this node's folders, from the node's own configuration.
NODE_RUN_DIR = "SPARKD_RAY_RUN_DIR"
NODE_LOG_DIR = "SPARKD_RAY_LOG_DIR"
NODE_CACHE_DIR = "SPARKD_RAY_CACHE_DIR"
NODE_KV_DIR = "SPARKD_RAY_KV_DIR"
# The interpreter of that Ray, with which its workers start.
NODE_PYTHON = "SPARKD_RAY_PYTHON"
# Names of the variables that sparkd computed for that Ray's own children.
NODE_LINKS = "SPARKD_RAY_LINKS"
