"""The admin API: thin verbs over the supervisor, and their OpenAPI document."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Query, Request, Security
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Match

from sparkd import __version__
from sparkd.admin.answers import (
    Accepted,
    Events,
    LogPage,
    Memory,
    Models,
    Nodes,
    Operations,
    Status,
    TakenIn,
    accepted,
    answers,
)
from sparkd.admin.bandwidth import Bandwidth
from sparkd.admin.bench_routes import register_benches
from sparkd.admin.benches import Benches
from sparkd.admin.bodies import MAX_NAME, BoundedRoute, ChangedModel, Loading, NewModel, Pulling, Refusal
from sparkd.admin.disk import Disk, register_disk
from sparkd.admin.fabric import fabric_of, register_fabric
from sparkd.admin.jobs import Jobs
from sparkd.admin.live import Live, register_live
from sparkd.admin.model_details import register_model_details, unmasked
from sparkd.admin.operator import Operator
from sparkd.admin.planner import Planner, register_plan
from sparkd.admin.pulls import Pulls
from sparkd.admin.recipes import register_recipes
from sparkd.admin.requests import register_requests
from sparkd.admin.streams import Endless, event_page, event_stream, followed_log, log_of
from sparkd.admin.upkeep import Reload, register_upkeep
from sparkd.capacity.plan_for_node import planning_hardware
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.ray_head import Costs
from sparkd.config.refusal import fault
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.errors import REQUEST_ID, BadRequest, MethodNotAllowed, SparkdError, UnknownRoute, error_body
from sparkd.execution.shared_answer import SharedAnswer
from sparkd.fabric.report import Offered
from sparkd.gateway.request_log import RequestLog
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.state.nouns import Operation, OperationState, Want
from sparkd.state.snapshot import ModelView, Snapshot
from sparkd.unexpected import unexpected

MAX_WAIT_S, POLL_S = 3600.0, 0.2
# A look at the cables asks every node: too slow for a client that polls each second, and it must not wait for a machine that is gone.
PEERS_KEPT_S, PEERS_TIMEOUT_S = 10.0, 1.5
MAX_LOG_BYTES = 1 << 20
MAX_SEQ = (1 << 63) - 1  # SQLite's integers
SHOWN_CHARS = 48
_BEARER = HTTPBearer(scheme_name="bearer", description="An admin key: `Authorization: Bearer KEY`", auto_error=False)
_API_KEY = APIKeyHeader(name="x-api-key", scheme_name="key", description="The same key in a header of its own", auto_error=False)
_EVENT_ID = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the daemon besides the supervisor's. `reload` is Reloader.now."""

    pulls: Pulls
    reload: Reload
    bandwidth: Bandwidth
    requests: RequestLog
    live: Live
    benches: Benches
    jobs: Jobs


def admin_app(supervisor: Supervisor, registry: Registry, journal: Journal, cluster: Cluster, parts: Parts) -> FastAPI:
    """The ASGI app for /admin/v1. The edge in front of it has checked the key and bounded the body."""
    app = FastAPI(
        title="sparkd admin API",
        version=__version__,
        openapi_url=f"{ADMIN_ROOT}/openapi.json",
        # FastAPI's page takes its script from elsewhere: empty without a network, and a stranger's code on an origin that has a key.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # The names of a generated client's functions.
        generate_unique_id_function=lambda route: route.name,
        # The edge checks the key: these are for the document.
        dependencies=[Depends(_refuse_unknown), Security(_BEARER), Security(_API_KEY)],
        responses={
            "4XX": {"model": Refusal, "description": "The request is refused; `error.message` says why and what to do"},
            "5XX": {"model": Refusal, "description": "sparkd or the cluster cannot do it now"},
        },
    )
    # Each route of a router that an app includes is made twice, and the routes are what an app takes its time for.
    app.router.prefix, app.router.route_class = ADMIN_ROOT, BoundedRoute
    _register(app.router, supervisor, registry, journal, cluster, parts)
    app.add_exception_handler(SparkdError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_route)
    return app


def _register(api: APIRouter, supervisor: Supervisor, registry: Registry, journal: Journal, cluster: Cluster, parts: Parts) -> None:
    jobs = parts.jobs
    fabrics = SharedAnswer(supervisor.boundary, PEERS_KEPT_S)
    operator = Operator(supervisor.want, registry, journal, cluster)

    @api.get("/status", summary="The daemon, its cluster and its conditions")
    async def status() -> Status:
        return _status(supervisor.snapshot(), await asyncio.to_thread(cluster.costs))

    @api.get(
        "/nodes",
        summary="Nodes, their agents and their last reading, and machines at the end of a cable that could join",
    )
    async def nodes() -> Nodes:
        snapshot = supervisor.snapshot()
        hardware = await asyncio.to_thread(planning_hardware, "node", registry.config)
        try:
            async with asyncio.timeout(PEERS_TIMEOUT_S):
                offered = (await fabrics.get("", partial(fabric_of, registry, cluster)))["offered"]
        except TimeoutError:
            offered = []
        # One that has just left is among the nodes until Ray has forgotten it.
        listed = {node.node_id for node in snapshot.nodes}
        others = [Offered(**machine) for machine in offered if not any(address in listed for _, address, _ in machine["seen"])]
        return Nodes(nodes=[*snapshot.nodes], offered=others, head=snapshot.cluster.get("address"), hardware=hardware)

    register_upkeep(api, supervisor, registry, cluster, parts.reload)
    register_requests(api, parts.requests, registry)
    register_fabric(api, registry, cluster, parts.bandwidth)
    register_plan(api, Planner(supervisor, registry, journal, cluster, operator, jobs))
    register_recipes(api, registry, operator)
    register_live(api, parts.live)
    register_disk(api, Disk(registry, journal, cluster, jobs))
    register_benches(api, parts.benches)
    register_model_details(api, registry, cluster, parts.live.starts, supervisor.boundary)

    @api.get("/memory", summary="The last memory reading of every node, bytes")
    async def memory() -> Memory:
        return Memory(readings=[node.reading for node in supervisor.snapshot().nodes if node.reading])

    @api.get("/models", summary="Every known model")
    async def models() -> Models:
        return Models(models=[*supervisor.snapshot().models.values()])

    @api.post("/models", status_code=202, summary="Add a model that the configuration file does not have, and load it")
    async def add(new: NewModel) -> Accepted | TakenIn:
        return await take_in(new.name, new.spec, load=new.load, replace=False)

    async def take_in(name: str, spec: dict[str, Any], *, load: bool, replace: bool) -> Accepted | TakenIn:
        await operator.take_in(name, spec, replace=replace)
        if not load:
            return TakenIn(model=supervisor.snapshot().models[name])
        return accepted(supervisor.want(name, Want.RUNNING, "admin"))

    @api.post("/models/{name:path}/load", status_code=202, summary="Load a model, with the recipe that the body names")
    async def load(name: str, how: Annotated[Loading, Body(default_factory=Loading)]) -> Accepted:
        model = await operator.set_recipe(name, how.recipe) if how.recipe is not None else name
        return accepted(supervisor.want(model, Want.RUNNING, "admin"))

    @api.post("/models/{name:path}/unload", status_code=202, summary="Unload a model; requests in flight may finish")
    async def unload(name: str) -> Accepted:
        return accepted(supervisor.want(name, Want.STOPPED, "admin"))

    @api.post("/models/{name:path}/pull", status_code=202, summary="Bring a model's files to the nodes; a known model, or a hub id")
    async def pull(name: str, where: Annotated[Pulling, Body(default_factory=Pulling)]) -> Accepted:
        return accepted(await parts.pulls.start(name, where.nodes, where.revision))

    @api.get(
        "/models/{name:path}/log",
        **answers(LogPage, media_type="text/plain"),
        summary="The engine's log; follow=true streams it as plain text",
    )
    async def log(
        name: str,
        cursor: str | None = None,
        follow: bool = False,
        max_bytes: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = 65536,
        rank: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, str] | Endless:
        if not follow:
            return await log_of(registry, cluster, name, cursor, max_bytes, rank)
        registry.find(name)
        return Endless(followed_log(registry, cluster, name, cursor, rank), media_type="text/plain; charset=utf-8")

    @api.get("/models/{name:path}", summary="One model")
    async def model(name: str) -> ModelView:
        return supervisor.snapshot().models[registry.find(name).name]

    @api.put("/models/{name:path}", status_code=202, summary="Change a model that was added here, or add it")
    async def change(name: Annotated[str, PathParameter(max_length=MAX_NAME)], changed: ChangedModel) -> Accepted | TakenIn:
        return await take_in(name, unmasked(changed.spec, registry, name), load=changed.load, replace=True)

    @api.delete("/models/{name:path}", status_code=202, summary="Unload and forget a model that was added here")
    async def remove(name: str) -> Accepted:
        return accepted(operator.remove(name))

    @api.get("/operations", summary="Long actions, newest first")
    async def operations() -> Operations:
        return Operations(operations=[*supervisor.snapshot().operations.values()][::-1])

    @api.get("/operations/{operation_id}", summary="One long action; wait_s waits for its end")
    async def operation(operation_id: str, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Operation:
        return await _wait(operator, operation_id, wait_s)

    @api.delete("/operations/{operation_id}", status_code=202, summary="Cancel a long action")
    async def cancel(operation_id: str) -> Operation:
        return jobs.cancel(operation_id) or operator.cancel(operation_id)

    @api.get(
        "/events",
        **answers(Events, media_type="text/event-stream"),
        summary="History; with Accept: text/event-stream also what happens from now on",
    )
    async def events(
        request: Request, after: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 200
    ) -> Response:
        if "text/event-stream" not in request.headers.get("accept", ""):
            return Response(await event_page(journal, after, limit), media_type="application/json")
        last = request.headers.get("last-event-id", "")
        start = int(last) if _EVENT_ID.fullmatch(last) else after
        stream = event_stream(journal, start, limit)
        return Endless(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _status(snapshot: Snapshot, costs: Costs) -> Status:
    return Status(
        version=__version__,
        settled=snapshot.settled,
        draining=snapshot.draining,
        tick_age_s=round(snapshot.tick_age_s, 3),
        cluster=dict(snapshot.cluster),
        conditions=[str(condition) for condition in snapshot.conditions],
        typed_conditions=[*snapshot.conditions],
        models={name: view.state for name, view in snapshot.models.items()},
        nodes=[*snapshot.nodes],
        costs=costs,
    )


async def _wait(operator: Operator, operation_id: str, wait_s: float) -> Operation:
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                operation = operator.operation(operation_id)
                if operation.state is not OperationState.RUNNING:
                    return operation
                await asyncio.sleep(POLL_S)
    return operator.operation(operation_id)


async def _refuse_unknown(request: Request) -> None:
    """Refuse what the route would ignore: a query parameter that it lacks, and a body where it takes none; `{}` asks for nothing."""
    route = request.scope["route"]
    parameters = {field.alias for field in route.dependant.query_params}
    if unknown := next((name for name in request.query_params if name not in parameters), None):
        takes = f"takes {', '.join(sorted(parameters))}" if parameters else "takes none"
        raise BadRequest(f"{unknown[:SHOWN_CHARS]} is not a known query parameter: this path {takes}.", param=unknown[:SHOWN_CHARS])
    if route.body_field is None and (await request.body()).strip() not in (b"", b"{}"):
        raise BadRequest("This path takes no body: send it without.", param="body")


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refusal = error if isinstance(error, SparkdError) else unexpected(error)
    return JSONResponse(error_body(refusal, request.scope.get(REQUEST_ID)), status_code=refusal.status, headers=refusal.headers())


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    """Answer 400 with the place and the reason of each fault. FastAPI's own text repeats the input, which may hold a secret."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    # The first part of a place is where in the request it is: body, query or path.
    places = [".".join(str(part)[:SHOWN_CHARS] for part in problem["loc"][1:]) for problem in problems[:5]]
    faults = " ".join(fault(place or str(problem["loc"][0]), problem) for place, problem in zip(places, problems, strict=False))
    return await _refuse(request, BadRequest(faults or "The request cannot be read.", param=next(iter(places), "") or None))


async def _refuse_route(request: Request, error: Exception) -> JSONResponse:
    """Answers for requests that Starlette and FastAPI refuse themselves: a wrong path or method, or a body that is not JSON."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status == 404:
        return await _refuse(request, UnknownRoute(f"The admin API has no such path. {ADMIN_ROOT}/openapi.json lists it."))
    if status == 405:
        return await _refuse(request, MethodNotAllowed(request.method, _allowed(request)))
    return await _refuse(request, BadRequest("The body cannot be read as JSON."))


def _allowed(request: Request) -> list[str]:
    """Every method of the path: Starlette names those of the first route only, and RFC 9110 (10.2.1) asks for all."""
    routes = request.app.router.routes
    tried = ("GET", "POST", "PUT", "PATCH", "DELETE")
    return [method for method in tried if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)]
