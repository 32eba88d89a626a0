"""Pulls as the daemon runs them: over agents that answer as told, and from a hub on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants

from sparkd.admin import pulls
from sparkd.admin.app import admin_app
from sparkd.admin.jobs import Jobs
from sparkd.admin.pulls import Pulls
from sparkd.checkpoint import download
from sparkd.checkpoint.download import wanted
from sparkd.config.config import load_config
from sparkd.control.journal import Journal
from sparkd.errors import BadRequest, CheckpointError, ClusterError, Conflict, RankError, UnknownModel
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import Operation, OperationState
from sparkd.state.store import Store
from tests.support.admin_parts import parts_of
from tests.support.checkpoints import layered, write_folder
from tests.support.fabric_tree import readings
from tests.support.facts import lacking
from tests.support.fakes import scene as supervised
from tests.support.hub_server import COMMIT, Repository, serving
from tests.support.waiting import eventually, until
from workers.files import manifest
from workers.host.hub_cache import snapshot_of

A, B = "192.168.100.11", "192.168.100.12"
FOLDER = "/models/plain"
FILES = [
    {"name": "config.json", "size": 10, "mtime_ns": 1, "blob": None},
    {"name": "w.safetensors", "size": 90, "mtime_ns": 1, "blob": None},
]
MANIFEST = {"model": FOLDER, "revision": None, "commit": None, "root": FOLDER, "files": FILES}
SHARDS = {f"model-{number}.safetensors": layered(1, {"weight": (64, 64)}, f"part{number}") for number in (1, 2)}


class FakeNodes:
    """Agents whose answers are in `said`, by method; a callable is asked with the node and the arguments."""

    node_ip = A

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[Any, ...]]] = []
        self.steps = [{"done_bytes": 50, "total_bytes": 100, "fetched_bytes": 50}, {"done_bytes": 100, "fetched_bytes": 90, "ended": True}]
        self.fabrics: dict[str, Mapping[str, Any] | None] = dict(zip((A, B), readings("pair-different-ports").values(), strict=True))
        self.said: dict[str, Any] = {
            "staged": lambda node, *_: MANIFEST if node == A else None,
            "lacking": {"path": "/models", "bytes": 100, "free_bytes": 1 << 50},
            "copy": lambda node, program, order, places: {"job": program, "ports": dict.fromkeys(order.get("binds", ()), 7000)},
            "job_state": lambda node, job: {"running": True} | (self.step() if job == "sink" else {}),
            "end_job": None,
        }

    def step(self) -> dict[str, Any]:
        return {"total_bytes": 100} | (self.steps.pop(0) if len(self.steps) > 1 else self.steps[0])

    def in_sight(self) -> list[str]:
        return [A, B]

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.asked.append((node_ip, method, arguments))
        said = self.said[method]
        if isinstance(said, BaseException):
            raise said
        return said(node_ip, *arguments) if callable(said) else said

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        return self.fabrics

    def of(self, method: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [(node, arguments) for node, asked, arguments in self.asked if asked == method]


class Scene:
    def __init__(self, folder: Path, **settings: Any) -> None:
        models = {"plain": {"model": FOLDER, "aliases": ["gpt-4o"]}, "hub": {"model": "owner/name"}}
        config = load_config(None, flags={"models": models, "state_dir": str(folder / "state"), **settings}, environ={})
        self.store = Store(folder / "state.db")
        self.journal, self.nodes = Journal(self.store, lambda: 5.0), FakeNodes()
        self.jobs = Jobs(self.journal, Boundary(time.monotonic))
        self.pulls = Pulls(self.nodes, self.journal, self.jobs, lambda: config)

    async def ended(self, operation: Operation) -> Operation:
        await eventually(lambda: self.journal.operations.find(operation.id).state is not OperationState.RUNNING, "its end", 0)
        return self.journal.operations.find(operation.id)


@asynccontextmanager
async def scene(folder: Path, **settings: Any) -> AsyncIterator[Scene]:
    made = Scene(folder, **settings)
    running = asyncio.create_task(made.jobs.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made.store.close()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "POLL_S", 0.0)
    monkeypatch.setattr(download, "PROGRESS_S", 0.01)


async def test_a_folder_is_copied_over_the_rails_and_everything_started_is_ended(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        began = await made.pulls.start("gpt-4o")
        ended = await made.ended(began)
        events = made.journal.events(0, 100)

    assert (began.kind, began.model, began.state) == ("pull", "plain", OperationState.RUNNING)
    assert ended.state is OperationState.SUCCEEDED
    assert lacking(ended.message, FOLDER, f"{A}, {B}") == []
    (source, (_, order, _)), (sink, (_, theirs, places)) = made.nodes.of("copy")
    assert (source, sink, places) == (A, B, {})
    assert order["binds"] == ["192.168.100.11", "192.168.200.17"], "both twins"
    assert theirs["ways"] == [["192.168.100.12", "192.168.100.11", 7000], ["192.168.200.18", "192.168.200.17", 7000]]
    assert theirs["key"] == order["key"] and len(order["key"]) == 64
    assert [(node, job) for node, (job,) in made.nodes.of("end_job")] == [(A, "source"), (B, "sink")]
    assert order["key"] not in repr([ended, events])


async def test_progress_goes_into_the_operation(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.steps = [{"done_bytes": 50, "fetched_bytes": 50}]
        began = await made.pulls.start("plain")
        await eventually(lambda: made.journal.operations.find(began.id).progress, "progress", 0)
        found = made.journal.operations.find(began.id)
        assert (await made.pulls.start("plain", [B])).id == began.id, "one is under way"
        with pytest.raises(Conflict, match="revision"):
            await made.pulls.start("plain", [B], "v2")
        cancelled = made.jobs.cancel(began.id)

    assert found.message == f"copying from {A} to {B}"
    assert found.progress is not None
    assert (found.progress.bytes_done, found.progress.bytes_total, found.progress.fraction) == (50, 100, 0.5)
    assert cancelled is not None and cancelled.state is OperationState.CANCELLED
    assert made.jobs.cancel(began.id) is None and made.jobs.cancel("no-such") is None
    assert [job for _, (job,) in made.nodes.of("end_job")] == ["source", "sink"]


@pytest.mark.parametrize(
    ("method", "answer", "facts"),
    [
        ("staged", None, [FOLDER, f"{A}, {B}"]),
        ("lacking", {"path": "/disk", "bytes": 5_000, "free_bytes": 1_000}, [f"{B}: /disk", "1,000 bytes", FOLDER, "5,000"]),
        ("job_state", lambda node, job: {"error": "The disk is on fire."}, [f"{A}: The disk is on fire."]),
        ("job_state", ValueError("a bug"), ["(ValueError)"]),
    ],
)
async def test_what_goes_wrong_is_the_operations_end(method: str, answer: Any, facts: list[str], tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.said[method] = answer
        ended = await made.ended(await made.pulls.start("plain"))
        assert made.journal.events(0, 10)[-1].message == ended.message

    assert (ended.state, lacking(ended.message, *facts)) == (OperationState.FAILED, []), ended.message
    assert "a bug" not in ended.message
    assert len(made.nodes.of("end_job")) == (2 if method == "job_state" else 0)


async def test_the_node_that_has_it_serves_it_and_without_a_cable_the_nodes_addresses_do(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.said["staged"] = lambda node, *_: MANIFEST if node == B else None
        made.nodes.fabrics = {A: None, B: None}
        ended = await made.ended(await made.pulls.start("plain", [A]))

    assert ended.state is OperationState.SUCCEEDED
    assert [(node, program) for node, (program, *_) in made.nodes.of("copy")] == [(B, "source"), (A, "sink")]
    assert made.nodes.of("copy")[1][1][1]["ways"] == [[A, B, 7000]]


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ({"files": FILES[:1]}, B),
        ({"partial": True}, B),
        ({"files": [FILES[0], FILES[1] | {"name": "model.safetensors", "size": 40}]}, A),
        ({"files": [FILES[0], FILES[1] | {"name": "a-00001-of-00002.safetensors", "size": 40}], "lacks": True}, B),
    ],
    ids=["less of it", "an interrupted copy", "a whole set of other weights", "half a set of other weights"],
)
async def test_the_node_that_has_most_of_it_serves_it(here: dict[str, Any], source: str, tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.said["staged"] = lambda node, *_: MANIFEST | (here if node == A else {})
        ended = await made.ended(await made.pulls.start("plain", [A, B]))

    assert ended.state is OperationState.SUCCEEDED
    assert made.nodes.of("copy")[0][0] == source


async def test_an_interrupted_copy_alone_is_not_the_model(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.said["staged"] = lambda node, *_: MANIFEST | {"partial": True} if node == A else None
        ended = await made.ended(await made.pulls.start("plain", [A]))

    assert ended.state is OperationState.FAILED
    assert lacking(ended.message, FOLDER, A) == []


async def test_who_has_it_already_gets_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        ended = await made.ended(await made.pulls.start("plain", [A]))

    assert (ended.state, made.nodes.of("copy")) == (OperationState.SUCCEEDED, [])


async def test_what_cannot_begin_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        for name in ("nobody", "../../etc", "a/b/c", "/etc"):
            with pytest.raises(UnknownModel, match="plain"):
                await made.pulls.start(name)
        with pytest.raises(BadRequest, match=r"10\.9\.9\.9"):
            await made.pulls.start("plain", ["10.9.9.9", A])
    fresh = Scene(tmp_path / "later")
    with pytest.raises(ClusterError):
        await fresh.pulls.start("plain")
    fresh.store.close()


async def test_a_pull_that_was_cancelled_has_ended_before_the_next_of_its_model_begins(tmp_path: Path) -> None:
    """Before: the next one was the cancelled one, as long as that ended its programs."""
    ends, may_end = asyncio.Event(), asyncio.Event()

    async with scene(tmp_path) as made:
        ask = made.nodes.ask

        async def held(node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
            if method == "end_job":
                ends.set()
                await may_end.wait()
            return await ask(node_ip, method, *arguments, timeout_s=timeout_s)

        made.nodes.ask = held  # type: ignore[method-assign]
        made.nodes.steps = [{"done_bytes": 0, "fetched_bytes": 0}]
        first = await made.pulls.start("plain")
        await eventually(lambda: made.nodes.of("job_state"), "the copy", 0)
        made.jobs.cancel(first.id)
        await ends.wait()
        starting = asyncio.create_task(made.pulls.start("plain"))
        await asyncio.sleep(0)
        assert not starting.done()

        may_end.set()
        second = await starting
        assert (second.id != first.id, len(made.nodes.of("end_job"))) == (True, 2)


async def test_the_daemons_end_ends_a_pull(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.nodes.steps = [{"done_bytes": 0, "fetched_bytes": 0}]
        began = await made.pulls.start("plain")
    found = made.journal.operations.find(began.id)

    assert found.state is OperationState.CANCELLED


async def test_the_admin_api_begins_shows_and_cancels_a_pull(tmp_path: Path) -> None:
    made, nodes = supervised(tmp_path), FakeNodes()
    nodes.steps = [{"done_bytes": 50, "fetched_bytes": 50}]
    jobs = Jobs(made.supervisor.journal, made.supervisor.boundary)
    pulling = Pulls(nodes, made.supervisor.journal, jobs, lambda: made.config)
    running = asyncio.create_task(jobs.run())
    await asyncio.sleep(0)
    app = admin_app(made.supervisor, made.supervisor.registry, made.supervisor.journal, made.cluster, parts_of(pulls=pulling, jobs=jobs))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost/admin/v1") as client:
        began = (await client.post("/models/gpt-4o/pull")).json()
        refused = [
            (await client.post(f"/models/{name}/pull", json=body)).status_code
            for name, body in (("nobody", {}), ("m", {"nodes": ["10.9.9.9"]}), ("m", {"nodes": []}), ("m", {"odd": 1}))
        ]
        await eventually(lambda: made.supervisor.journal.operations.find(began["operation"]).progress, "progress", 0)
        shown = (await client.get(began["href"].removeprefix("/admin/v1"))).json()
        cancelled = (await client.delete(f"/operations/{began['operation']}")).json()
        again = (await client.delete(f"/operations/{began['operation']}")).json()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    made.store.close()

    assert (began["kind"], began["model"], began["state"]) == ("pull", "m", "RUNNING")
    assert refused == [404, 400, 400, 400]
    assert (shown["message"], shown["progress"]["fraction"]) == (f"copying from {A} to {B}", 0.5)
    assert [one["state"] for one in (cancelled, again)] == ["CANCELLED"] * 2


# The download


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    with serving(Repository(write_folder(tmp_path / "there", SHARDS, {"model_type": "llama"}, index=True))) as there:
        yield there
    huggingface_hub.close_session()


@pytest.fixture
def environ(hub: Repository, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.hub, "HF_HOME": str(tmp_path / "home")}


async def test_a_hub_id_is_downloaded_by_a_program_of_its_own(hub: Repository, environ: dict[str, str], tmp_path: Path) -> None:
    (hub.folder / "pytorch_model.bin").write_bytes(b"nobody reads it")
    secret = "hf_thetokenthatnobodymaysee"
    env = environ | {"NO_PROXY": "127.0.0.1", "HF_TOKEN": secret, "HF_HUB_OFFLINE": "0"}
    async with scene(tmp_path, **{"engine.env": env}) as made:
        made.nodes.said["staged"] = lambda node, model, revision, places: (
            found.to_dict() if (found := manifest.manifest_of(model, revision, places)) else None
        )
        ended = await made.ended(await made.pulls.start("owner/name", [A]))
        again = await made.ended(await made.pulls.start("hub", [A]))
        events = made.journal.events(0, 100)

    assert ended.state is OperationState.SUCCEEDED, ended.message
    assert again.message == ended.message
    snapshot = snapshot_of("owner/name", None, environ)
    assert snapshot is not None and snapshot.name == COMMIT
    names = ["config.json", *sorted(SHARDS), "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(names)
    assert all((snapshot / name).read_bytes() == (hub.folder / name).read_bytes() for name in names)
    assert len([asked for asked in hub.asked if asked.server == "store" and asked.sent]) == len(SHARDS)
    assert secret not in repr([ended, events])


@pytest.mark.parametrize(("commit", "source", "sink"), [("1" * 40, A, B), (COMMIT, B, A)], ids=["earlier", "with more files"])
async def test_what_the_hub_gave_goes_to_the_others_and_not_what_another_node_had_before(
    commit: str, source: str, sink: str, hub: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    """More files of the same commit do: all nodes must have the same (workers.host.identity)."""
    env = environ | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    async with scene(tmp_path, **{"engine.env": env}) as made:

        def staged(node: str, model: str, revision: str | None, places: Mapping[str, str]) -> dict[str, Any] | None:
            found = manifest.manifest_of(model, revision, places)
            assert found is not None
            more = [{"name": "pytorch_model.bin", "size": 1 << 30, "mtime_ns": 1, "blob": None}] if node == B else []
            raw = found.to_dict()
            return raw | {"files": [*raw["files"], *more]} | ({"commit": commit} if node == B else {})

        made.nodes.said["staged"] = staged
        ended = await made.ended(await made.pulls.start("owner/name"))

    assert ended.state is OperationState.SUCCEEDED, ended.message
    (here, (_, order, _)), (there, (_, theirs, _)) = made.nodes.of("copy")
    assert (here, there) == (source, sink)
    assert order["manifest"]["commit"] == theirs["manifest"]["commit"] == COMMIT


def _lose_a_shard(environ: Mapping[str, str]) -> None:
    snapshot = snapshot_of("owner/name", None, environ)
    assert snapshot is not None
    next(snapshot.glob("*.safetensors")).unlink()


@pytest.mark.parametrize("whole", [True, False])
async def test_where_the_hub_is_silent_another_nodes_whole_snapshot_is_copied(
    whole: bool, hub: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    """Before: a hub id that the second node had could not be brought to the first without the hub. Half a download is no source."""
    other = environ | {"HF_HOME": str(tmp_path / "others")}
    assert download.fetch("owner/name", None, other, lambda _: None) == (COMMIT, "")
    if not whole:
        _lose_a_shard(other)
    hub.listing = {"nothing": "of use"}
    async with scene(tmp_path, **{"engine.env": environ | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}}) as made:
        made.nodes.said["staged"] = lambda node, model, revision, places: (
            found.to_dict() if (found := manifest.manifest_of(model, revision, other if node == B else places)) else None
        )
        ended = await made.ended(await made.pulls.start("owner/name"))

    if whole:
        assert ended.state is OperationState.SUCCEEDED, ended.message
        assert lacking(ended.message, B) == []
        assert [node for node, _ in made.nodes.of("copy")] == [B, A]
    else:
        assert ended.state is OperationState.FAILED and "listing" in ended.message
        assert made.nodes.of("copy") == []


def test_a_hub_that_cannot_be_asked_is_no_trouble_where_the_cache_is_whole(hub: Repository, environ: dict[str, str]) -> None:
    told: list[Mapping[str, Any]] = []
    assert download.fetch("owner/name", None, environ, told.append) == (COMMIT, "")
    hub.listing = {"nothing": "of use"}
    commit, note = download.fetch("owner/name", None, environ, told.append)

    assert commit == COMMIT and note
    with pytest.raises(download.NotAsked) as silent:
        download.fetch("owner/name", "other", environ, told.append)
    assert "listing" in silent.value.error.message


def test_a_download_tells_how_far_it_is(hub: Repository, environ: dict[str, str]) -> None:
    *_, last = sorted(SHARDS)
    goes_on = hub.held[last] = threading.Event()
    told: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(download.fetch, "owner/name", None, environ, told.append)
        until(lambda: told and 0 < told[-1]["done_bytes"] < told[-1]["total_bytes"], "a part of it is on the disk")
        goes_on.set()
        assert fetching.result() == (COMMIT, "")
    sizes = {path.name: path.stat().st_size for path in hub.folder.iterdir()}
    assert told[0]["total_bytes"] == sum(sizes.values())


def test_parts_that_an_ended_download_left_are_removed_and_not_counted(hub: Repository, environ: dict[str, str]) -> None:
    blobs = Path(environ["HF_HOME"], "hub", "models--owner--name", "blobs")
    blobs.mkdir(parents=True)
    old, of_another = blobs / "a.1.incomplete", blobs / "b.2.incomplete"
    for path, age_s in ((old, download.ABANDONED_S + 60), (of_another, 60.0)):
        path.write_bytes(b"x" * 5000)
        os.utime(path, (time.time() - age_s,) * 2)
    goes_on = threading.Event()
    hub.held |= dict.fromkeys(SHARDS, goes_on)
    told: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(download.fetch, "owner/name", None, environ, told.append)
        until(lambda: told, "a first look")
        goes_on.set()
        assert fetching.result() == (COMMIT, "")

    assert of_another.exists() and not old.exists()
    small = sum(path.stat().st_size for path in hub.folder.iterdir() if path.name not in SHARDS)
    assert told[0]["done_bytes"] <= small


def test_a_hub_that_fails_in_between_leaves_no_half_model_behind(hub: Repository, environ: dict[str, str]) -> None:
    hub.refusals = {f"/tree/{COMMIT}": [(404, {})]}
    with pytest.raises(CheckpointError, match="again"):
        download.fetch("owner/name", None, environ, lambda told: None)
    assert snapshot_of("owner/name", None, environ) is None


def test_a_full_disk_is_told_before_the_download(hub: Repository, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_free", lambda path: 1000)
    with pytest.raises(RankError, match=r"1,000 bytes free .*owner/name .*[\d,]+ more"):
        download.fetch("owner/name", None, environ, lambda told: None)
    assert not [asked for asked in hub.asked if asked.server == "store"]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin", "tf.h5"], ["config.json", "model.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        (["a.safetensors", "original/a.pth", ".gitattributes", "1_Pooling/config.json"], ["a.safetensors", "1_Pooling/config.json"]),
    ],
)
def test_what_of_a_repository_is_wanted(names: list[str], kept: list[str]) -> None:
    assert wanted(names) == kept
