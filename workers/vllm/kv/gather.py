"""Exchanges values between the ranks of one engine, through vLLM's own group. Never decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.vllm.symbols import symbol


def over_world(mine: Any) -> Sequence[Any]:
    """The Gather over the engine's processes, through vLLM's CPU group. Blocks until every rank has sent its value. Raises
    MissingSymbol."""
    world = symbol("get_world_group")()
    if world.world_size == 1:
        return [mine]
    import torch

    answers: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(answers, mine, group=world.cpu_group)
    return answers
