"""The variables that lead an engine on vLLM's Ray executor into sparkd's own Ray. Never imports Ray or vLLM, never starts a process.

vLLM's executor (vllm/v1/executor/ray_executor_v2.py, ray_utils.py) makes its workers Ray actors in the current placement group, which only
a process that Ray started has one of, and lets them take everything of the driver's environment that is not set where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from workers.rank.spec import RankSpec

KEEPER = "workers.vllm.ray.keeper"
GROUP = "SPARKD_RAY_GROUP"
# Names of the rank's whole environment: each worker has its own node's, so none of them crosses.
OWN = "SPARKD_RAY_OWN"
ON_CPU = "SPARKD_RAY_ON_CPU"
# Ray's name of it. Each bundle and each worker asks for it: a node has one GPU, and how many models share it is a matter of its memory.
DEVICE, DEVICE_SHARE = "GPU", 0.01
# Run by a shell of each node (ray/_private/runtime_env/context.py), so that each takes its own interpreter.
_WORKER = "${SPARKD_RAY_PYTHON} -P -m workers.vllm.ray.worker"


def environment(spec: RankSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The rank's variables that connect it to Ray. inherited: variables of a process that is connected already, for its token."""
    if spec.ray is None:
        return {}
    attempt = spec.attempt or spec.rank_id
    token = {name: inherited[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH") if name in inherited}
    return token | {
        "RAY_ADDRESS": spec.ray["address"],
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": f"{_WORKER} {attempt}"}, "metadata": {}}),
        # The worker's own statistics would be in the rank's log otherwise.
        "RAY_BACKEND_LOG_LEVEL": "error",
        "RAY_USAGE_STATS_ENABLED": "0",
        GROUP: spec.ray["group"],
        ON_CPU: "1" if spec.platform == "cpu" else "",
        "VLLM_RAY_PER_WORKER_GPUS": str(DEVICE_SHARE),
        # Rank n in bundle n; vLLM would sort the others by the names that Ray gave their nodes.
        "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, range(spec.world))),
    }
