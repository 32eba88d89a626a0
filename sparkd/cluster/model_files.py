"""Learns about a model from its files before the start and from its engine after it: presence, abilities and parsers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from sparkd.checkpoint.model_folder import unusable_of
from sparkd.cluster.placer import HUB, Placer
from sparkd.config.config import Config, ModelConfig
from sparkd.config.parser_choice import expected
from sparkd.config.tasks import abilities_of
from sparkd.errors import ClusterError, ModelUnusable
from sparkd.gateway.upstream import ServedModels, Upstream, served_models, served_routes
from sparkd.state.abilities import Abilities
from sparkd.vllm.parsers import Parsers


class ModelFiles:
    """config: returns the present one
    placer: asks the other nodes for the model's files
    """

    def __init__(self, config: Callable[[], Config], placer: Placer) -> None:
        self._config = config
        self._placer = placer

    async def unusable(self, spec: ModelConfig) -> ModelUnusable | None:
        """Why there is no model to start, by its folder or its hub; None if there is one, or if that is unknown."""
        config = self._config()
        if fault := await asyncio.to_thread(unusable_of, spec, config.engine, config.model_places()):
            return fault
        try:
            await self._placer.refuse_absent(spec)
        except ModelUnusable as error:
            return error
        except ClusterError:
            return None
        return None

    async def abilities(self, spec: ModelConfig) -> Abilities:
        """The abilities that the model's files on this node show. Another engine than vLLM has only its max_model_len."""
        if not spec.runs_vllm(self._config().engine):
            return Abilities(max_model_len=spec.max_model_len if isinstance(spec.max_model_len, int) else None)
        return await asyncio.to_thread(abilities_of, spec, spec.environment(self._config().engine))

    async def parsers(self, spec: ModelConfig) -> Parsers | None:
        """The parsers that its engine will have; None where that is unknown, or it is no vLLM."""
        engine = self._config().engine
        if not spec.runs_vllm(engine):
            return None
        return await HUB.run(expected, spec, spec.environment(engine))

    async def served_abilities(self, upstream: Upstream, abilities: Abilities, models: ServedModels) -> Abilities:
        """`abilities` with what the engine itself tells. models: its model list."""
        return replace(abilities, routes=await served_routes(upstream), max_model_len=models.max_model_len or abilities.max_model_len)

    async def served_models(self, upstream: Upstream) -> ServedModels | None:
        """See upstream.served_models."""
        return await served_models(upstream)
