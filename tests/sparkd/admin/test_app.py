"""The admin API over a real supervisor on a fake cluster, behind the gateway's edge: every route, every refusal, streams, odd names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.admin import app as admin
from sparkd.admin.app import MAX_SEQ, admin_app
from sparkd.admin.benches import Benches
from sparkd.admin.jobs import Jobs
from sparkd.capacity import plan_for_node
from sparkd.config.model import ModelConfig
from sparkd.control.journal import SLICE
from sparkd.errors import AgentLost, DoesNotFit, ModelUnusable, SparkdError
from sparkd.gateway.edge import Edge
from sparkd.gateway.exchange import CONNECTION
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.recipes.registry import Registry
from sparkd.state.nouns import Event, Want
from tests.sparkd.control.test_supervisor import UP, make_ready, stage
from tests.sparkd.gateway.fakes import FakeConnection, connected, soon
from tests.support.admin_parts import parts_of
from tests.support.answers import check_answer
from tests.support.checkpoints import write_folder
from tests.support.fabric_tree import readings
from tests.support.fakes import Scene
from tests.support.registries import keep_registry
from tests.support.waiting import HUNG_S

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 128,
}  # fmt: skip
COSTS = {"daemon": {"anonymous_bytes": 1, "cpu_s": 0.5}, "ray": [], "ray_listeners": []}
SECRET = "sk-0123456789abcdef"


@dataclass
class Admin:
    """One scene with a client of its admin API."""

    scene: Scene
    edge: Edge
    client: httpx.AsyncClient
    app: FastAPI
    jobs: Jobs

    async def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        response = await self.client.request(method, ADMIN_ROOT + path, **more)
        assert response.status_code == status, response.text
        if status < 400:
            check_answer(self.app, method, httpx.URL(ADMIN_ROOT + path).path, status, response.json())
        return response.json()

    async def refused(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """The `error` object of a refusal, which must be ours."""
        response = await self.client.request(method, ADMIN_ROOT + path, **more)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        error: dict[str, Any] = response.json()["error"]
        assert (error["src"], error["request_id"]) == ("sparkd", response.headers["x-request-id"])
        return error


@pytest.fixture
def _plans_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are the same as in a process of their own, whose start takes half a second each time."""
    monkeypatch.setattr(plan_for_node, "_answer_of_process", plan_for_node._answer)


@asynccontextmanager
async def admin_of(tmp_path: Path, parts: dict[str, Any] | None = None, **flags: Any) -> AsyncIterator[Admin]:
    async with stage(tmp_path, **flags) as made:
        made.cluster.costs = lambda: COSTS  # type: ignore[method-assign]
        jobs = Jobs(made.supervisor.journal, made.supervisor.boundary)
        made.supervisor.tasks.group.create_task(jobs.run())
        await asyncio.sleep(0)
        controlled: Any = (made.supervisor, made.supervisor.registry, made.supervisor.journal, made.cluster)
        benches = Benches(made.supervisor, made.supervisor.registry, jobs, "http://localhost", ("", ""))
        app = admin_app(*controlled, parts_of(**{"jobs": jobs, "benches": benches} | (parts or {})))
        edge = Edge(made.supervisor, admin=app, live=lambda: (True, {}), ready=lambda: (True, {}))
        transport = httpx.ASGITransport(app=connected(edge))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"x-sparkd-client": "test"}) as client:
            yield Admin(made, edge, client, app, jobs)


@dataclass
class Stream:
    """One request whose answer does not end: what has come so far, and a way to leave."""

    edge: Edge
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    text: str = ""
    ended: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    asked: bool = False
    client: FakeConnection = field(default_factory=FakeConnection)

    async def run(self, path: str, headers: dict[str, str]) -> None:
        raw_path, _, query = (ADMIN_ROOT + path).encode().partition(b"?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": raw_path.decode(), "raw_path": raw_path, "query_string": query, "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
            "extensions": {CONNECTION: self.client},
            "headers": [(b"host", b"localhost"), *((name.encode(), value.encode("latin-1")) for name, value in headers.items())],
        }  # fmt: skip
        await self.edge(scope, self._receive, self._send)
        self.ended = True

    def leave(self) -> None:
        self.gone.set()
        if self.client.when_gone is not None:
            self.client.when_gone()

    async def _receive(self) -> dict[str, Any]:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.text += message["body"].decode()

    @property
    def events(self) -> list[dict[str, Any]]:
        found = [block.split("\n") for block in self.text.split("\n\n") if block.startswith("id: ")]
        for lines in found:
            assert [line.partition(": ")[0] for line in lines] == ["id", "event", "data"]
            data = json.loads(lines[2][6:])
            assert (lines[0], lines[1]) == (f"id: {data['seq']}", f"event: {data['kind']}")
        return [json.loads(lines[2][6:]) for lines in found]


@asynccontextmanager
async def streaming(made: Admin, path: str, **headers: str) -> AsyncIterator[Stream]:
    """Leaves at the end, and the server must notice."""
    stream = Stream(made.edge)
    task = asyncio.create_task(stream.run(path, {name.replace("_", "-"): value for name, value in headers.items()}))
    await soon(lambda: stream.status or task.done())
    yield stream
    stream.leave()
    await task


# What there is


async def test_status_nodes_memory_plan(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        first = await made.ask("GET", "/status")
        assert (first["settled"], first["draining"], first["costs"], first["models"]) == (False, False, COSTS, {"m": "STOPPED"})
        made.scene.cluster.agents = ("n",)
        await made.scene.tick()

        assert (await made.ask("GET", "/status"))["settled"] is True
        nodes = await made.ask("GET", "/nodes")
        assert ([node["node"] for node in nodes["nodes"]], nodes["offered"], nodes["head"]) == (["n"], [], None)
        assert await made.ask("GET", "/memory") == {"readings": []}


async def test_a_node_that_does_not_answer_delays_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[asyncio.Future[dict[str, Any]]] = []

    async def look() -> dict[str, Any]:
        looks.append(asyncio.get_running_loop().create_future())
        return await looks[-1]

    async with admin_of(tmp_path) as made:
        made.scene.cluster.fabric = look  # type: ignore[method-assign]
        monkeypatch.setattr(admin, "PEERS_TIMEOUT_S", 0.0)
        assert [(await made.ask("GET", "/nodes"))["offered"] for _ in range(2)] == [[], []]
        # The next watcher gets what the look says at last, and starts no other.
        monkeypatch.setattr(admin, "PEERS_TIMEOUT_S", HUNG_S)
        looks[0].set_result(readings("cable-to-a-stranger"))
        offered = [(await made.ask("GET", "/nodes"))["offered"] for _ in range(2)]
        assert [[machine["node"] for machine in each] for each in offered] == [["spark-1"]] * 2 and len(looks) == 1


async def test_how_the_nodes_are_linked(tmp_path: Path) -> None:
    async with admin_of(tmp_path, **{"engine.env": {"NCCL_DEBUG": "WARN", "HF_TOKEN": SECRET}}) as made:
        made.scene.cluster.readings = {**readings("pair-by-subnets"), "192.168.1.12": None}
        found = await made.ask("GET", "/fabric")

    assert ([node["node"] for node in found["nodes"]], found["topology"]) == (["spark-1", "spark-2"], "pair")
    assert [(one["node"], one["check"]) for one in found["findings"] if one["verdict"] == "fail"] == [("192.168.1.12", "agent")]
    debug = [one for one in found["environment"]["spark-1"] if one["name"] == "NCCL_DEBUG"]
    assert [(one["value"], one["source"]) for one in debug] == [("WARN", "env in sparkd.yaml")]
    assert SECRET not in json.dumps(found)


async def test_how_the_nodes_are_prepared(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        absent = {
            name: {"text": "", "trouble": f"{name} is not installed", "hung": False, "missing": True} for name in ("nvidia-smi", "dmesg")
        }
        reading = {"files": {"proc/sys/kernel/osrelease": "6.17.0-1008-nvidia\n"}, "commands": absent}
        made.scene.cluster.answers["host"] = {"n": reading, "m": None}
        found = await made.ask("GET", "/doctor")
        made.scene.cluster.answers["host"] = {}
        assert await made.ask("GET", "/doctor") == found  # no second reading so soon: it starts programs on every node

    assert {(one["node"], one["check"]) for one in found["findings"] if one["verdict"] == "fail"} == {("n", "kernel"), ("m", "agent")}


async def test_what_the_guards_did(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        rows = [{"id": f"20261122-00000{number}-m", "model": "m"} for number in (1, 2)]
        ahead = {"id": "20991122-000000-m", "model": "m"}  # of a clock that was set back since
        listed = {"a": [ahead, *rows[:1]], "b": rows[1:], "c": None}
        made.scene.cluster.answers |= {"incidents": listed, "incident": {"a": None, "b": rows[1]}}
        assert await made.ask("GET", "/incidents") == {"incidents": [*rows[::-1], ahead], "silent": ["c"]}
        assert await made.ask("GET", f"/incidents/{rows[1]['id']}") == rows[1]
        made.scene.cluster.answers["incident"] = {"a": None}
        assert (await made.ask("GET", "/incidents/x", status=404))["error"]["code"] == "not_found"


async def test_whether_a_model_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_folder(tmp_path / "tiny", {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}, TINY)
    async with admin_of(tmp_path) as made:
        # In a process of its own.
        asked = {"model": str(folder), "hardware": "spark", "max_model_len": 64, "quick": True}
        found = await made.ask("POST", "/plan", 200, json=asked)
        assert (found["architecture"], found["choice"]["config"]["max_model_len"]) == ("LlamaForCausalLM", 64)
        monkeypatch.setattr(plan_for_node, "_answer_of_process", plan_for_node._answer)
        assert (await made.ask("POST", "/plan", 200, json={"model": str(folder), "quick": True}))["hardware"]["name"] == "node"
        made.scene.cluster.links = {2: "a and b: no cable"}
        options = (await made.ask("POST", "/plan", 200, json={"model": str(folder), "nodes": 2, "quick": True}))["options"]
        assert {one["reason"] for one in options if (one["tensor_parallel"], one["format"]) == (2, "as stored")} == {"a and b: no cable"}


async def test_models_and_one_of_them_by_any_name(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        (listed,) = (await made.ask("GET", "/models"))["models"]
        assert (listed["name"], listed["aliases"], listed["state"], listed["want"]) == ("m", ["gpt-4o"], "STOPPED", "STOPPED")
        assert await made.ask("GET", "/models/m") == await made.ask("GET", "/models/gpt-4o") == listed


async def test_a_rank_is_shown_without_the_path_of_its_key(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        await make_ready(made.scene)

        (rank,) = (await made.ask("GET", "/models/m"))["ranks"]
        assert (rank["pid"], rank["socket_path"]) == (42, "/run/x.sock")
        assert "api_key_path" not in rank


# Long actions


async def test_a_load_answers_202_with_an_operation_that_is_waited_for(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        answer = await made.ask("POST", "/models/m/load", 202)
        assert (answer["kind"], answer["model"], answer["state"]) == ("load", "m", "RUNNING")
        assert answer["href"] == f"{ADMIN_ROOT}/operations/{answer['operation']}"
        assert (await made.ask("POST", "/models/gpt-4o/load", 202))["operation"] == answer["operation"]
        assert (await made.ask("GET", f"/operations/{answer['operation']}"))["state"] == "RUNNING"

        waiting = asyncio.create_task(made.ask("GET", f"/operations/{answer['operation']}?wait_s=60"))
        await made.scene.tick()
        made.scene.cluster.names = ["m"]
        made.scene.cluster.show(progress=UP)
        await made.scene.tick(3)
        done = await waiting
        assert (done["state"], done["finished_at_s"]) == ("SUCCEEDED", 7.0)
        assert (await made.ask("POST", "/models/m/load", 202))["state"] == "SUCCEEDED", "it was READY already"


async def test_unloading_and_cancelling(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        load = await made.ask("POST", "/models/m/load", 202)
        await made.scene.tick()
        assert (await made.ask("DELETE", f"/operations/{load['operation']}", 202))["state"] == "CANCELLED"
        await made.scene.tick(3)
        assert (await made.ask("GET", "/models/m"))["state"] == "STOPPED"

        await make_ready(made.scene)
        unload = await made.ask("POST", "/models/m/unload", 202)
        assert (unload["kind"], unload["state"]) == ("unload", "RUNNING")
        await made.scene.tick(4)
        assert (await made.ask("GET", f"/operations/{unload['operation']}"))["state"] == "SUCCEEDED"
        listed = (await made.ask("GET", "/operations"))["operations"]
        assert [operation["kind"] for operation in listed[:2]] == ["unload", "load"], "newest first"
        again = await made.ask("DELETE", f"/operations/{load['operation']}", 202)
        assert again["state"] == "CANCELLED", "a client may repeat it"
        assert (await made.refused("DELETE", f"/operations/{unload['operation']}", 409))["code"] == "conflict"


async def test_what_is_neither_a_load_nor_an_unload_is_not_cancelled_as_one(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        operation = made.scene.supervisor.journal.operations.open("pull", "m", "admin")
        assert (await made.refused("DELETE", f"/operations/{operation.id}", 409))["code"] == "conflict"
        assert made.scene.supervisor.snapshot().models["m"].want is Want.STOPPED


async def test_unloading_turns_away_those_who_wait_for_their_turn(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        await made.scene.tick()
        made.scene.cluster.connected = False

        async def enter() -> None:
            async with made.scene.supervisor.lease("m"):
                pass

        waiting = asyncio.create_task(enter())
        await made.scene.tick()
        assert (await made.ask("GET", "/models/m"))["queued"] == 1
        await made.ask("POST", "/models/m/unload", 202)
        (error,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(error, SparkdError)


# Adding and removing


@pytest.mark.parametrize(("name", "encoded"), [("org/name:tag", True), ("x/load", False)])
async def test_a_model_with_any_name_is_added_loaded_read_unloaded_and_removed(tmp_path: Path, name: str, encoded: bool) -> None:
    path = "/models/" + (name.replace("/", "%2F").replace(":", "%3a") if encoded else name)
    async with admin_of(tmp_path) as made:
        added = await made.ask("POST", "/models", 202, json={"name": name, "spec": {"model": "/y"}, "load": False})
        assert (added["operation"], added["model"]["name"]) == (None, name)
        assert (await made.ask("GET", path))["name"] == name
        load = await made.ask("POST", f"{path}/load", 202)
        assert (load["kind"], load["model"]) == ("load", name)
        await make_ready(made.scene, name)
        assert (await made.ask("GET", f"{path}/log"))["text"] == f"log of /log/{name}"
        assert (await made.ask("POST", f"{path}/unload", 202))["model"] == name
        gone = await made.ask("DELETE", path, 202)
        assert (gone["kind"], gone["model"]) == ("unload", name)
        await made.scene.tick(4)

        assert [model["name"] for model in (await made.ask("GET", "/models"))["models"]] == ["m"]
        await made.refused("GET", path, 404)


async def test_a_model_is_added_and_loaded_in_one_step_and_again_is_the_same(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        body = {"name": "new", "spec": {"model": "/y", "extra_args": ["--seed", 1], "metadata": {"deep": [[{"er": [1.5, None]}]]}}}
        first = await made.ask("POST", "/models", 202, json=body)
        assert (first["kind"], first["model"], first["state"]) == ("load", "new", "RUNNING")
        assert (await made.ask("POST", "/models", 202, json=body))["operation"] == first["operation"]

        assert (await made.ask("GET", "/models/new"))["metadata"] == {"deep": [[{"er": [1.5, None]}]]}


async def test_a_known_name_is_not_replaced_but_by_put(tmp_path: Path) -> None:
    """Before: POST replaced it without a word."""
    async with admin_of(tmp_path) as made:

        def changes() -> list[tuple[str, str | None, str]]:
            kinds = ("added", "changed", "removed")
            return [(one.kind, one.model, one.data["origin"]) for one in made.scene.store.history.events() if one.kind in kinds]

        body = {"name": "new", "spec": {"model": "/y"}, "load": False}
        for _ in range(2):
            assert (await made.ask("POST", "/models", 202, json=body))["model"]["origin"] == "api"
        assert changes() == [("added", "new", "api")]
        other = {"model": "/z", "ttl": 5}
        error = await made.refused("POST", "/models", 409, json={**body, "spec": other})
        assert error["code"] == "conflict"
        assert (made.scene.store.wishes.specs(), len(changes())) == ({"new": {"model": "/y"}}, 1)

        changed = await made.ask("PUT", "/models/new", 202, json={"spec": other})
        assert (changed["operation"], changed["model"]["source"], changed["model"]["want"]) == (None, "/z", "STOPPED")
        assert (await made.ask("PUT", "/models/new", 202, json={"spec": other, "load": True}))["kind"] == "load"
        assert (await made.ask("PUT", "/models/more", 202, json={"spec": other}))["model"]["name"] == "more"
        await made.ask("DELETE", "/models/more", 202)
        assert changes() == [("added", "new", "api"), ("changed", "new", "api"), ("added", "more", "api"), ("removed", "more", "api")]
        assert (await made.ask("GET", "/models/m"))["origin"] == "file"
        for name in ("m", "gpt-4o"):
            await made.refused("PUT", f"/models/{name}", 409, json={"spec": other})
        await made.refused("PUT", f"/models/{'n' * 129}", 400, json={"spec": other})


async def test_a_model_that_failed_for_good_is_added_again_with_other_keys(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        body = {"name": "new", "spec": {"model": "/y", "max_model_len": 99999}}
        asked = "/entry?source=/y&model=/y&name=new&changes=true"
        await made.ask("POST", "/models", 202, json=body)
        await made.refused("GET", asked, 409)
        made.scene.cluster.place_error = DoesNotFit("99999 is above 8192", lasts=True)
        await made.scene.tick(2)
        assert (await made.ask("GET", "/models/new"))["state"] == "FAILED"

        made.scene.cluster.place_error = None
        assert (await made.ask("GET", asked))["known"] is None
        again = await made.ask("POST", "/models", 202, json={"name": "new", "spec": {"model": "/y", "max_model_len": 4096}})
        assert (again["kind"], again["state"]) == ("load", "RUNNING")
        await make_ready(made.scene, "new")
        assert (await made.ask("GET", "/models/new"))["state"] == "READY"
        await made.refused("POST", "/models", 409, json=body)


async def test_a_model_is_judged_before_anybody_can_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with admin_of(tmp_path) as made:
        scene, seen = made.scene, []

        async def look(spec: ModelConfig) -> ModelUnusable:
            names = {model["name"] for model in (await made.ask("GET", "/models"))["models"]}
            seen.append((spec.name, names, scene.store.wishes.specs()))
            return ModelUnusable("The folder /y is empty, so it holds no model: check the path.")

        monkeypatch.setattr(scene.cluster, "unusable", look)
        before = scene.supervisor.journal.feed.written
        await made.refused("POST", "/models", 422, json={"name": "new", "spec": {"model": "/y", "aliases": ["other"]}})
        assert scene.supervisor.journal.feed.written == before
        await made.refused("PUT", "/models/new", 422, json={"spec": {"model": "/y"}})
        assert seen == [("new", {"m"}, {})] * 2
        assert (await made.ask("GET", "/operations"))["operations"] == [] and scene.store.wishes.desired() == {}
        # What may not be asked for at all is refused before anything is looked at.
        await made.refused("POST", "/models", 422, json={"name": "new", "spec": {"model": "~/y"}})
        await made.refused("POST", "/models", 409, json={"name": "new", "spec": {"model": "/y", "aliases": ["gpt-4o"]}})
        assert len(seen) == 2


async def test_a_model_is_loaded_with_a_recipe(tmp_path: Path) -> None:
    for name, more in (("mine", ""), ("code", ", trust_remote_code: true")):
        text = f"description: d\nmodel: o/{name}\nsources: {{s: s}}\nsettings: {{max_num_seqs: 8{more}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    async with admin_of(tmp_path, recipes_dir=str(tmp_path)) as made:
        for name in ("other", "other"):
            loaded = await made.ask("POST", f"/models/{name}/load", 202, json={"recipe": "mine"})
            assert (loaded["kind"], loaded["model"]) == ("load", "other")
        assert (await made.ask("GET", "/models/other"))["source"] == "o/mine"
        spec = made.scene.supervisor.registry.find("other").spec
        assert spec is not None and (spec.recipe, spec.max_num_seqs) == ("mine", 8)

        await made.ask("POST", "/models", 202, json={"name": "own", "spec": {"model": "/y", "aliases": ["alias"]}, "load": False})
        assert (await made.ask("POST", "/models/alias/load", 202, json={"recipe": "mine"}))["model"] == "own"
        spec = made.scene.supervisor.registry.find("own").spec
        assert spec is not None and (spec.recipe, spec.model, spec.max_num_seqs) == ("mine", "/y", 8)

        assert (await made.ask("POST", "/models/m/load", 202, json={"recipe": None}))["model"] == "m"
        for path, body, status, told in (
            ("m", {"recipe": "mine"}, 409, "`recipe: mine`"),
            ("new", {"recipe": "./mine.yaml"}, 422, "recipes_dir"),
            ("own", {"recipe": "code"}, 422, "code"),
            ("own", {"recipes": "mine"}, 400, "recipes"),
        ):
            assert told in (await made.ask("POST", f"/models/{path}/load", status, json=body))["error"]["message"]
        assert (await made.refused("GET", "/models/new", 404))["code"] == "model_not_found"


async def test_a_removed_model_that_still_stops_is_not_started_again(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        await made.ask("POST", "/models", 202, json={"name": "new", "spec": {"model": "/y"}, "load": False})
        await make_ready(made.scene, "new")
        gone = await made.ask("DELETE", "/models/new", 202)
        assert (await made.ask("GET", "/models/new"))["want"] == "STOPPED"
        assert (await made.refused("POST", "/models/new/load", 404))["code"] == "model_not_found"
        assert (await made.refused("DELETE", f"/operations/{gone['operation']}", 404))["code"] == "model_not_found"
        await made.scene.tick(4)

        assert made.scene.cluster.ranks == {}
        assert (await made.ask("GET", f"/operations/{gone['operation']}"))["state"] == "SUCCEEDED"


# Name, keys, status and what the refusal names. One scene serves each table: a request that is refused leaves nothing behind.
REFUSED_SPECS: list[tuple[str, dict[str, Any], int, str]] = [
    ("m", {"model": "/y"}, 409, "m"),
    ("new", {"model": "../y"}, 422, "model"),
    ("new", {"model": "/y", "env": {"LD_PRELOAD": SECRET}}, 422, "LD_PRELOAD"),
    ("new", {"model": "/y", "extra_args": ["--chat-template", SECRET]}, 422, "--chat-template"),
    ("../etc", {"model": "/y"}, 422, "../etc"),
    ("", {"model": "/y"}, 422, "name"),
]


async def test_specifications_that_are_refused(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for name, spec, status, told in REFUSED_SPECS:
            error = await made.refused("POST", "/models", status, json={"name": name, "spec": spec})
            assert told in error["message"] and SECRET not in error["message"], (name, spec)
        assert [model["name"] for model in (await made.ask("GET", "/models"))["models"]] == ["m"]


REFUSED_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"model": "/y", "kv_cache": {"bytes": "many"}}, "kv_cache.bytes"),
    ({"model": "/y", "max_len": 8}, "max_len"),
    ({"model": "/y", "aliases": ["m"]}, "aliases"),
    ({"ttl": 1}, "model"),
    ({"recipe": "none"}, "recipe"),
]


async def test_a_refused_specification_names_its_key(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for spec, param in REFUSED_KEYS:
            status = 409 if param == "aliases" else 422
            assert (await made.refused("POST", "/models", status, json={"name": "new", "spec": spec}))["param"] == param
            assert (await made.refused("PUT", "/models/new", status, json={"spec": spec}))["param"] == param


@pytest.mark.usefixtures("_plans_of_this_process")
async def test_a_refused_plan_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_folder(tmp_path / "tiny", {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}, TINY)
    async with admin_of(tmp_path, models={"known": {"model": str(folder)}}) as made:
        for body, status, param in (
            ({"model": str(folder), "nodes": 0}, 400, "nodes"),
            ({"model": str(folder), "margin_gib": "x"}, 400, "margin_gib"),
            ({"model": "known", "quantize": {"format": "fp3"}}, 422, "quantize"),
            ({"model": str(tmp_path / "gone")}, 422, "model"),
            ({"model": "owner/nothing"}, 422, "model"),
            ({"model": "knwon"}, 404, "model"),
        ):
            error = await made.refused("POST", "/plan", status, json=body)
            assert error["param"] == param and ".." not in error["message"]
        assert error["message"].endswith("known?")


async def test_recipes_are_listed_shown_and_lent(tmp_path: Path) -> None:
    recipe = "description: d\nmodel: o/m\nsources: {s: s}\nsettings: {max_num_seqs: 8, env: {A: '${env.HOME}'}}\n"
    (tmp_path / "mine.yaml").write_text(recipe)
    (tmp_path / "broken.yaml").write_text("model: [\n")
    async with admin_of(tmp_path, recipes_dir=str(tmp_path)) as made:
        found = await made.ask("GET", "/recipes")
        assert {"mine", "gpt-oss-120b"} <= {row["name"] for row in found["recipes"]} and "broken.yaml" in found["problems"][0]
        shown = await made.ask("GET", "/recipes/mine")
        assert shown["spec"]["max_num_seqs"] == 8 and shown["env"] == {"A": "${env.HOME}"}
        assert (await made.ask("GET", "/recipes/qwen3.6-27b-nvfp4-yarn-1m"))["spec"]["max_model_len"] == 1010000
        for name in ("nobody", "..%2Fmine", "broken%2F.."):
            assert (await made.refused("GET", f"/recipes/{name}", 404))["code"] in ("not_found", "route_not_found")
        for name in ("mine@x", "broken"):
            assert (await made.refused("GET", f"/recipes/{name}", 422))["message"]

        spec = {"recipe": "mine", "kv_cache": "auto"}
        added = await made.ask("POST", "/models", 202, json={"name": "new", "spec": spec, "load": False})
        assert added["model"]["source"] == "o/m"
        spec = made.scene.supervisor.registry.config.models["new"]
        assert (spec.recipe, spec.max_num_seqs, spec.kv_cache) == ("mine", 8, "auto")
        for wrong in ({"recipe": f"{tmp_path}/mine.yaml"}, {"recipe": "nobody"}, {"recipe": "mine@x"}):
            assert (await made.refused("POST", "/models", 422, json={"name": "other", "spec": wrong}))["code"] == "invalid_config"


async def test_the_plan_of_a_model_that_runs_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_for_node, "_answer_of_process", lambda _: {"notes": ["its own"], "vllm": {"unanswered": 0}})
    async with admin_of(tmp_path) as made:
        ask = {"model": "m", "hardware": "spark"}
        assert (await made.client.post(f"{ADMIN_ROOT}/plan", json=ask)).json()["notes"] == ["its own"]
        await make_ready(made.scene)
        (view,) = made.scene.supervisor.snapshot().models.values()
        own, runs = (await made.client.post(f"{ADMIN_ROOT}/plan", json=ask)).json()["notes"]
        assert own == "its own" and f"{view.memory_gib:g} GiB" in runs


async def test_the_daemon_decides_what_a_name_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(plan_for_node, "_answer_of_process", plan_for_node._answer)
    folder = write_folder(tmp_path / "tiny", {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}, TINY)
    for name in ("mine", "m"):
        (tmp_path / f"{name}.yaml").write_text(f"description: d\nmodel: {folder}\nsources: {{s: s}}\nsettings: {{max_model_len: 64}}\n")
    async with admin_of(tmp_path, recipes_dir=str(tmp_path)) as made:
        for source, name, spec in (
            ("mine", "mine", {"recipe": "mine"}),
            ("gpt-oss-120b@x", "gpt-oss-120b-x", {"recipe": "gpt-oss-120b@x"}),
            ("o/Mine", "mine", {"model": "o/Mine"}),
            (str(folder), "tiny", {"model": str(folder)}),
        ):
            meant = await made.ask("GET", "/entry", 200, params={"source": source})
            assert {"quantize", "ttl"} <= set(meant.pop("keys")) and meant == {"name": name, "spec": spec, "known": None}
        planned = await made.ask("POST", "/plan", 200, json={"model": "mine", "hardware": "spark", "quick": True})
        assert (planned["architecture"], planned["choice"]["max_model_len"]) == ("LlamaForCausalLM", 64)
        assert (await made.refused("POST", "/plan", 422, json={"model": "mine@nope"}))["code"] == "invalid_config"


async def test_the_daemon_decides_whether_a_model_is_known(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        made.scene.cluster.answers["stored"] = {}
        await made.ask("POST", "/models", 202, json={"name": "added", "spec": {"model": "o/Mine", "aliases": ["b"]}, "load": False})

        def words(source: str, **more: Any) -> dict[str, Any]:
            return {"source": source, "model": source} | more

        for asked, known in (
            (words("m"), "m"),
            (words("b"), "added"),
            (words("o/Mine"), "added"),
            (words("o/mine", name="other"), None),
            (words("o/Other"), None),
            (words("gpt-oss-120b"), None),
        ):
            assert (await made.ask("GET", "/entry", 200, params=asked))["known"] == known
        assert (await made.refused("GET", "/entry", 404, params=words("ad")))["code"] == "model_not_found"
        for asked in (words("o/another", name="added"), words("b", changes=True), words("m", changes=True)):
            assert (await made.refused("GET", "/entry", 409, params=asked))["code"] == "conflict"


async def test_a_recipe_of_a_registry_is_shown_and_lent_where_it_only_tunes(tmp_path: Path) -> None:
    recipe = "description: d\nmodel: o/m\nsources: {s: s}\nsettings: {max_num_seqs: 8, trust_remote_code: true, extra_args: [%s]}\n"
    texts = {"4x/mine": recipe % "", "loads": recipe % "--worker-cls, evil.Worker"}
    keep_registry(tmp_path / "state", Registry("eugr", "https://host/r", "0" * 40, "2026-09-15", texts))
    async with admin_of(tmp_path) as made:
        for name in ("4x/mine@eugr", "mine@eugr", "loads@eugr"):
            assert (await made.ask("GET", f"/recipes/{name}"))["spec"]["max_num_seqs"] == 8
        for name in ("nobody@eugr", "mine@nobody", "etc/passwd@nobody"):
            assert (await made.refused("GET", f"/recipes/{name}", 404))["code"] == "not_found"

        for name in ("4x/mine@eugr", "mine@eugr"):
            await made.ask("POST", "/models", 202, json={"name": name.replace("@", "-"), "spec": {"recipe": name}, "load": False})
            assert not made.scene.supervisor.registry.config.models[name.replace("@", "-")].trust_remote_code
        for name in ("loads@eugr", "nobody@eugr", "etc/passwd@nobody"):
            body = {"name": "other", "spec": {"recipe": name}}
            assert (await made.refused("POST", "/models", 422, json=body))["code"] == "invalid_config"


# Requests that do not fit


JSON = {"content-type": "application/json"}
DEEP = b'{"name": "new", "spec": {"model": "/y", "metadata": {"a": %s}}, "load": false}'


REFUSED_BODIES: list[tuple[bytes, dict[str, str], str]] = [
    (b"", {}, "body"),
    (b'{"name": "\xff"}', JSON, "JSON"),
    (b"[" * 100_000, JSON, "8,192"),
    (b'{"name": "new"', JSON, "JSON"),
    (('{"\u2200": ' + "[" * 40 + "]" * 40 + "}").encode("utf-16"), JSON, "UTF-8"),
    (DEEP % (b"[" * 40 + b"]" * 40), JSON, "32"),
    (DEEP % b'"\\ud800"', JSON, "surrogate"),
    (b'{"name": "new", "spec": {"model": "/y"}}', {"content-type": "text/plain"}, "JSON"),
    (b'{"name": ["%s"], "spec": "%s", "load": "%s"}' % ((SECRET.encode(),) * 3), JSON, "name"),
    (b'{"name": "%s"}' % (b"x" * 129), JSON, "128"),
    (b'{"name": "new", "model": "/y"}', JSON, "spec is missing"),
]


async def test_bodies_that_do_not_fit(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for content, headers, told in REFUSED_BODIES:
            response = await made.client.post(f"{ADMIN_ROOT}/models", content=content, headers=headers)

            assert response.status_code in (400, 422)
            error = response.json()["error"]
            assert (error["src"], told in error["message"]) == ("sparkd", True), error["message"]
            assert SECRET not in response.text
            assert len(response.text) < 2000
        assert len((await made.ask("GET", "/models"))["models"]) == 1


async def test_queries_that_do_not_fit(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for path in (
            *(f"/operations/x?wait_s={SECRET}", "/operations/x?wait_s=nan", "/models/m/log?max_bytes=0", f"/models/m/log?follow={SECRET}"),
            *("/events?after=9223372036854775808", "/events?limit=1001"),
        ):
            error = await made.refused("GET", path, 400)
            assert f"{error['param']}=" in path and SECRET not in error["message"]


async def test_what_a_route_would_ignore_is_refused_by_name(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        routes = [(path, method) for path, methods in made.app.openapi()["paths"].items() for method in methods]
        assert len(routes) > 30
        for path, method in routes:
            error = await made.refused(method.upper(), f"{path.removeprefix(ADMIN_ROOT)}?fooled=1", 400)
            assert error["param"] == "fooled" and "fooled" in error["message"], path

        assert (await made.refused("POST", "/models/m/unload", 400, json={"force": True}))["param"] == "body"
        assert (await made.refused("POST", "/models/m/unload", 400, content=b"x" * 5000))["param"] == "body"
        await made.ask("POST", "/models/m/unload", 202, json={})


async def test_paths_and_methods_that_are_not_there(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for path in ("/nope", "/models//load", "/models/%2e%2e/load"):
            assert (await made.refused("GET", path, 404))["type"] == "not_found_error"
        for path in ("/models/nope", "/models/nope/log", "/models/nope/log?follow=true", "/operations/nope"):
            assert (await made.refused("GET", path, 404))["code"] in ("model_not_found", "not_found")
        response = await made.client.request("PATCH", f"{ADMIN_ROOT}/models/m")
        assert (response.status_code, response.headers["allow"]) == (405, "GET, PUT, DELETE")
        assert response.json()["error"]["code"] == "method_not_allowed"


# Events


async def test_events_in_pages(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        await make_ready(made.scene)
        everything = (await made.ask("GET", "/events"))["events"]
        assert [event["seq"] for event in everything] == sorted(event["seq"] for event in everything)
        assert [event["data"]["new"] for event in everything if event["kind"] == "state"] == ["PLANNED", "LOADING", "READY"]
        middle = everything[3]["seq"]

        assert (await made.ask("GET", f"/events?after={middle}&limit=2"))["events"] == everything[4:6]
        assert (await made.ask("GET", "/events?limit=2"))["events"] == everything[-2:], "without a place to begin, the newest"
        assert await made.ask("GET", f"/events?after={MAX_SEQ}") == {"events": []}


async def test_the_event_stream_has_what_was_and_what_comes(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        await made.scene.tick()
        before = (await made.ask("GET", "/events"))["events"]
        async with streaming(made, "/events", accept="text/event-stream") as stream:
            assert (stream.status, stream.headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
            assert stream.headers[b"cache-control"] == b"no-cache"
            await soon(lambda: stream.events == before)
            await make_ready(made.scene)
            everything = (await made.ask("GET", "/events"))["events"]
            await soon(lambda: len(stream.events) == len(everything))
            assert stream.events == everything


async def test_a_client_that_comes_back_misses_nothing(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        for number in range(50):
            made.scene.supervisor.journal.say("note", None, f"event {number}")
        everything = (await made.ask("GET", "/events?limit=1000"))["events"]
        seen = everything[4]["seq"]
        for query, headers in (("?limit=7", {"last_event_id": str(seen)}), (f"?limit=7&after={seen}", {})):
            async with streaming(made, f"/events{query}", accept="text/event-stream", **headers) as stream:
                await soon(lambda: len(stream.events) >= len(everything) - 5)
                assert stream.events == everything[5:]


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
async def test_readers_of_a_long_history_leave_the_loop_its_turns(tmp_path: Path, accept: str) -> None:
    """Between two turns of the loop one of them reads one slice, however many ask for however much."""
    async with admin_of(tmp_path) as made:
        store, readers = made.scene.store, 4
        for number in range(1500):
            store.history.add_event(1.0, "note", None, f"event {number}", {})
        read, turns = 0, [0]

        behind = store.history.events_behind

        def counted(seq: int, limit: int) -> tuple[list[Event], int]:
            nonlocal read
            events, last = behind(seq, limit)
            read += len(events)
            return events, last

        store.history.events_behind = counted  # type: ignore[method-assign]

        async def watch() -> None:
            while read < 1000 * readers:
                await asyncio.sleep(0)
                turns.append(read)

        watching = asyncio.create_task(watch())
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(streaming(made, "/events?limit=1000", accept=accept)) for _ in range(readers)]
            await watching
            await soon(lambda: all("event 1499" in stream.text for stream in streams))
        assert max(new - old for old, new in pairwise(turns)) <= SLICE


async def test_an_open_stream_keeps_nothing_of_the_app_and_ends_with_its_client(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        returned = asyncio.Event()

        async def app(*arguments: Any) -> None:
            await made.app(*arguments)
            returned.set()

        made.edge._admin = app  # type: ignore[assignment]
        stream = Stream(made.edge)
        client = stream.client
        open_requests = made.edge._open_requests
        task = asyncio.create_task(stream.run("/events", {"accept": "text/event-stream"}))
        await returned.wait()
        made.scene.supervisor.journal.say("note", None, "it goes on")
        await soon(lambda: stream.text.count("it goes on"))
        assert (stream.status, stream.headers[b"cache-control"]) == (200, b"no-cache") and stream.headers[b"x-request-id"]
        assert client.when_gone is not None and not task.done()

        stream.leave()
        await task
        assert stream.ended and client.when_gone is None and made.edge._open_requests == open_requests


async def test_a_silent_stream_has_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.admin.streams.HEARTBEAT_S", 0.01)
    async with admin_of(tmp_path) as made, streaming(made, "/events", accept="text/event-stream") as stream:
        await soon(lambda: stream.text.count(": still here\n\n") >= 2)


# Logs


async def test_a_log_is_followed_until_the_client_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.admin.streams.FOLLOW_EVERY_S", 0.0)
    async with admin_of(tmp_path) as made:
        await make_ready(made.scene)
        lines = ["one\n", "", "two\n", "three é\n"]
        cursors: list[str | None] = []

        async def read_log(node_id: str | None, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
            cursors.append(cursor)
            if len(cursors) == 3:
                raise AgentLost("The node's agent did not answer.")
            return {"text": lines.pop(0) if lines else "", "cursor": str(len(lines))}

        monkeypatch.setattr(made.scene.cluster, "read_log", read_log)
        async with streaming(made, "/models/m/log?follow=true") as stream:
            await soon(lambda: "three" in stream.text)
            assert stream.headers[b"content-type"] == b"text/plain; charset=utf-8"
            assert stream.text == "one\ntwo\nthree é\n"
        assert cursors[:4] == [None, "3", "2", "2"]


async def test_a_followed_log_ends_with_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.admin.streams.FOLLOW_EVERY_S", 0.0)
    async with admin_of(tmp_path) as made:
        await made.ask("POST", "/models", 202, json={"name": "new", "spec": {"model": "/y"}, "load": False})
        async with streaming(made, "/models/new/log?follow=true") as stream:
            await made.ask("DELETE", "/models/new", 202)
            await soon(lambda: stream.ended)
            assert stream.status == 200


async def test_a_log_that_cannot_be_reached_now_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with admin_of(tmp_path) as made:
        await make_ready(made.scene)

        async def read_log(*_: Any) -> dict[str, str]:
            raise AgentLost("The node's agent did not answer within 3 s.")

        monkeypatch.setattr(made.scene.cluster, "read_log", read_log)
        assert (await made.refused("GET", "/models/m/log", 503))["code"] == "agent_lost"


# The document


async def test_the_openapi_document_is_valid_and_complete(tmp_path: Path) -> None:
    async with admin_of(tmp_path) as made:
        raw = await made.ask("GET", "/openapi.json")
        document = OpenAPI.model_validate(raw)
        assert document.openapi.startswith("3.1")
        found = {(path.removeprefix(ADMIN_ROOT), method) for path, item in raw["paths"].items() for method in item}
        assert found == {
            ("/status", "get"), ("/nodes", "get"), ("/fabric", "get"), ("/doctor", "get"), ("/memory", "get"),
            ("/incidents", "get"), ("/incidents/{incident_id}", "get"), ("/reload", "post"), ("/fabric/measure", "post"),
            ("/plan", "post"), ("/events", "get"), ("/operations", "get"),
            ("/models", "get"), ("/models", "post"), ("/models/{name}", "get"), ("/models/{name}", "delete"),
            ("/models/{name}", "put"), ("/models/{name}/log", "get"),
            ("/models/{name}/load", "post"), ("/models/{name}/unload", "post"),
            ("/models/{name}/pull", "post"), ("/entry", "get"), ("/recipes", "get"), ("/recipes/{name}", "get"),
            ("/operations/{operation_id}", "get"), ("/operations/{operation_id}", "delete"),
            ("/requests", "get"), ("/requests/{request_id}", "delete"),
            ("/bench", "get"), ("/bench", "post"), ("/bench/profiles", "get"), ("/bench/compare", "get"),
            ("/bench/subject", "get"), ("/bench/copy", "post"), ("/bench/{bench_id}", "get"), ("/bench/{bench_id}", "delete"),
            ("/live", "get"), ("/history", "get"), ("/disk", "get"), ("/disk/verify", "post"), ("/disk/{kind}/{id}", "delete"),
            ("/models/{name}/metrics", "get"),
            ("/models/{name}/start", "get"), ("/models/{name}/settings", "get"), ("/models/{name}/layers", "get"),
        }, "a new route is named here and in docs/api.md"  # fmt: skip
        operations = [operation for item in raw["paths"].values() for operation in item.values()]
        assert len({operation["operationId"] for operation in operations}) == len(operations)
        for operation in operations:
            assert operation["summary"]
            assert "422" not in operation["responses"], "our refusals have a body of their own"
            schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Refusal"}
            answers = [answer for status, answer in operation["responses"].items() if status.isdigit()]
            assert answers and all(answer["content"]["application/json"]["schema"] for answer in answers), "each answer has a type"
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert raw["components"]["schemas"][name]["additionalProperties"] is False, f'{name} has no extra="forbid"'
        streams = [operation["summary"] for operation in operations if len(operation["responses"].get("200", {}).get("content", {})) > 1]
        assert len(streams) == 3, "the log, the events, and the page's"
        assert all(operation["security"] == [{"bearer": []}, {"key": []}] for operation in operations)
        assert {scheme["type"] for scheme in raw["components"]["securitySchemes"].values()} == {"http", "apiKey"}
        for reference in _references(raw):
            node = raw
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [v for k, v in value.items() if k == "$ref"] + [r for v in value.values() for r in _references(v)]
    return [r for v in value for r in _references(v)] if isinstance(value, list) else []


# Whatever is sent

KEYS = st.sampled_from([
    "model", "aliases", "ttl", "metadata", "env", "extra_args", "memory_gib", "concurrency_limit", "max_model_len", "preload",
    "tensor_parallel", "served_model_name", "gpu_memory_utilization", "kv_cache", "revision", "dtype", "unlisted", "wait_for_load_s",
    "executor", "quantize",
])  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
    st.sampled_from(["/y", "a/b", "m", "gpt-4o", "auto", "-1", "--seed", "1G", "1e3", "nan", "", "\0", "\ud800", "OMP_NUM_THREADS", 2**70]),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | KEYS, inner, max_size=4))
SPECS = st.dictionaries(KEYS | st.text(max_size=8), VALUES, max_size=6).map(lambda spec: {"model": "/y"} | spec)
WELL_FORMED = st.fixed_dictionaries({"name": st.sampled_from(["new", "a/b", "x:1", "m"]) | st.text(max_size=8), "spec": SPECS})
BODIES = (WELL_FORMED | st.fixed_dictionaries({"name": VALUES, "spec": VALUES | SPECS, "load": VALUES}) | VALUES).map(json.dumps)
SEGMENTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


class Sender:
    """One scene for all examples, on an event loop of its own: hypothesis calls plain functions."""

    def __init__(self, tmp_path: Path) -> None:
        self.runner = asyncio.Runner()
        self.context = admin_of(tmp_path)
        self.made = self.runner.run(self.context.__aenter__())

    def ask(self, method: str, path: str, content: bytes | None = None) -> int:
        async def work() -> int:
            headers = JSON if content is not None else {}
            response = await self.made.client.request(method, ADMIN_ROOT + path, content=content, headers=headers)
            if response.status_code >= 400:
                assert response.json()["error"]["src"] == "sparkd"
            return response.status_code

        return self.runner.run(work())

    def close(self) -> None:
        async def leave() -> None:
            await self.context.__aexit__(None, None, None)

        self.runner.run(leave())
        self.runner.close()


def test_no_body_makes_it_fail(tmp_path: Path) -> None:
    sender = Sender(tmp_path)

    @settings(max_examples=80, deadline=None)
    @given(BODIES)
    def send(body: str) -> None:
        assert sender.ask("POST", "/models", body.encode("utf-8", "surrogatepass")) < 500
        assert sender.ask("GET", "/models") == 200

    try:
        send()
        for path in ("/status", "/operations", "/events", "/openapi.json"):
            assert sender.ask("GET", path) == 200
    finally:
        sender.close()


def test_no_path_makes_it_fail(tmp_path: Path) -> None:
    sender = Sender(tmp_path)

    @settings(max_examples=50, deadline=None)
    @given(
        st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]),
        st.sampled_from(["models", "operations", "events", "plan"]) | SEGMENTS,
        st.lists(SEGMENTS | st.sampled_from(["m", "log", "load", "unload"]), max_size=3),
        st.dictionaries(st.sampled_from(["cursor", "max_bytes", "after", "limit", "x"]), SEGMENTS | st.integers().map(str), max_size=2),
    )
    def send(method: str, first: str, rest: list[str], query: dict[str, str]) -> None:
        path = "/".join(quote(part, safe="") for part in (first, *rest))
        assert sender.ask(method, f"/{path}?{httpx.QueryParams(query)}") < 500

    try:
        send()
    finally:
        sender.close()
