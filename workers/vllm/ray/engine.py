"""Leads an engine on vLLM's Ray executor, in its own processes, to take sparkd's placement group for its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sparkd.errors import MissingSymbol
from workers.rank.ray_environment import GROUP, ON_CPU, OWN
from workers.vllm.symbols import symbol


def settle(environ: Mapping[str, str]) -> None:
    """In an engine that is to be placed: the group of GROUP is the current one, and nothing of OWN goes to the workers.

    Raises RuntimeError where the runtime has no Ray, or its vLLM no list of such variables.
    """
    if not environ.get(GROUP):
        return
    try:
        import ray
        from ray.util.placement_group import PlacementGroup

        variables = symbol("RAY_NON_CARRY_OVER_ENV_VARS")
    except (ImportError, MissingSymbol) as error:
        raise RuntimeError(
            f"executor: ray cannot work in this runtime: {error}. Install Ray there, of the version that sparkd has, or leave executor out."
        ) from error

    variables.update(environ.get(OWN, "").split(","))
    placed = PlacementGroup(ray.PlacementGroupID.from_hex(environ[GROUP]))
    ray.util.get_current_placement_group = lambda: placed


def platform() -> str | None:
    """The entry point in group `vllm.platform_plugins`: vLLM's CPU platform, where it shall run in Ray, with a device that Ray can count.

    Without one the executor refuses the platform; it is read before any general plugin is loaded.
    """
    return "workers.vllm.ray.cpu_platform.CpuPlatform" if os.environ.get(ON_CPU) else None
