"""The admin API's routes about one model that the page shows: its last start, its settings, its layers."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from sparkd.admin.starts import ModelStart, Starts
from sparkd.capacity.formats import mix_of
from sparkd.capacity.layers import LayerListing, layers_of
from sparkd.capacity.plan_for_node import planning_hardware
from sparkd.checkpoint.bounded_read import read_bounded
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config
from sparkd.config.engine_args import engine_args
from sparkd.config.model import ModelConfig
from sparkd.config.overlay import MASK
from sparkd.control.registry import Registry
from sparkd.errors import ClusterError, Unavailable
from sparkd.execution.boundary import Boundary
from sparkd.execution.shared_answer import SharedAnswer
from sparkd.gateway.scraper import page_of
from sparkd.recipes.admin_policy import KEYS
from sparkd.state.nouns import RankHandle
from workers.rank.log import NON_DEFAULT, STARTED

LAYERS_KEPT_S = 30.0
LINES_TIMEOUT_S = 10.0

_PLAIN = (bool, int, float, str, type(None))
_COMMAND = re.compile(rf"{STARTED} \d+: (.+)$")
_ARGUMENTS = re.compile(rf"{NON_DEFAULT}(\{{.*\}})\s*$")


class EnginePage(BaseModel):
    """text: in Prometheus's text format."""

    text: str


class RankSettings(BaseModel):
    """Null without an engine.

    command: as it was started.
    engine: the arguments that vLLM itself says are not its defaults.
    """

    rank: int
    node: str
    command: list[str] | None
    engine: dict[str, Any] | None


class SettingsAnswer(BaseModel):
    """Values of `env` are masked.

    configured: the entry as it was given, `recipe` and not what it brings, by our names of keys; PUT takes it back.
    resolved: every key, with those of its recipe and the defaults.
    keys: those that an added model may have.
    """

    configured: dict[str, Any]
    resolved: dict[str, Any]
    keys: list[str]
    ranks: list[RankSettings]


def register_model_details(api: APIRouter, registry: Registry, cluster: Cluster, starts: Starts, boundary: Boundary) -> None:
    """Register them before the route of a model itself, whose name may have slashes."""

    @api.get("/models/{name:path}/start", summary="How the last start of a model went, phase by phase")
    async def start(name: str) -> ModelStart:
        disk_bytes_s = (await asyncio.to_thread(planning_hardware, "node", registry.config)).disk_bytes_s
        return starts.of(registry.find(name).name, disk_bytes_s)

    @api.get("/models/{name:path}/metrics", summary="The metrics of a model's engine, asked now")
    async def engine_metrics(name: str) -> EnginePage:
        record = registry.find(name)
        page = await page_of(record.upstream) if record.upstream is not None else None
        if page is None:
            raise Unavailable(f"The engine of {record.name} gives no metrics now: `sparkd ps` says whether it is READY.")
        return EnginePage(text=page)

    @api.get(
        "/models/{name:path}/settings",
        summary="A model's keys as configured and as resolved, and what its engine says of itself, rank by rank",
    )
    async def settings(name: str) -> SettingsAnswer:
        spec = registry.spec(name)
        ranks = await asyncio.gather(*(_rank_settings(cluster, handle) for handle in registry.find(name).attempt.handles))
        return SettingsAnswer(configured=dict(spec.given), resolved=_resolved(spec), keys=sorted(KEYS), ranks=ranks)

    read_layers, turn = SharedAnswer(boundary, LAYERS_KEPT_S), asyncio.Lock()

    async def read(spec: ModelConfig) -> LayerListing:
        async with turn:  # each takes a process, and a thread that others need
            return await asyncio.to_thread(_layers, spec, registry.config)

    @api.get("/models/{name:path}/layers", summary="A model's layers, and the format that each gets")
    async def layers(name: str) -> LayerListing:
        spec = registry.spec(name)
        return await read_layers.get(spec.name, partial(read, spec))


def unmasked(raw: Mapping[str, Any], registry: Registry, name: str) -> dict[str, Any]:
    """A specification whose variables may be masked as `settings` shows them: those of the model as it is stand for them."""
    record, env = registry.records.get(name), raw.get("env")
    if record is None or record.spec is None or not isinstance(env, Mapping):
        return dict(raw)
    own = {variable: value.get_secret_value() for variable, value in record.spec.env.items()}
    return {**raw, "env": {variable: own.get(variable, value) if value == MASK else value for variable, value in env.items()}}


def _layers(spec: ModelConfig, config: Config) -> LayerListing:
    """Raises CheckpointError. Headers that this node lacks come from the hub."""
    env = {**os.environ, **spec.environment(config.engine)}
    checkpoint = read_bounded(checkpoint_at, spec.model, spec.revision, env)
    args = engine_args(spec, env)
    recipe = args.recipe if args.wish is None or args.wish.gib is None else mix_of(checkpoint, args.wish)
    return layers_of(checkpoint, recipe)


def _resolved(spec: ModelConfig) -> dict[str, Any]:
    """A variable may hold a secret."""
    keys: dict[str, Any] = spec.model_dump(mode="json", exclude={"name"})
    if keys.get("env"):
        keys["env"] = dict.fromkeys(keys["env"], MASK)
    return keys


async def _rank_settings(cluster: Cluster, handle: RankHandle) -> RankSettings:
    try:
        lines = await cluster.ask(handle.node_id, "setting_lines", handle.log_path, timeout_s=LINES_TIMEOUT_S)
    except ClusterError:
        lines = []
    return RankSettings(rank=handle.rank, node=handle.node_id, **engine_settings(lines))


def engine_settings(lines: Iterable[str]) -> dict[str, Any]:
    """{"command", "engine"} of the lines in which a rank says how it was started; None for what they do not say."""
    started = arguments = None
    for line in lines:
        started, arguments = started or _COMMAND.search(line), arguments or _ARGUMENTS.search(line)
    engine = None
    if arguments is not None:
        # vLLM prints an argument of a class of its own as Python would not read it.
        with suppress(ValueError, SyntaxError):
            engine = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in ast.literal_eval(arguments[1]).items()}
    return {"command": None if started is None else shlex.split(started[1]), "engine": engine}
