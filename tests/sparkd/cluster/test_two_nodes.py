"""A rank on a second node: two network namespaces joined by a cable, the daemon in one, `sparkd join` in the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd.cluster.membership import RECORD, TOKEN
from tests.stub import stub_engine
from tests.support.checkpoints import layered, write_folder
from tests.support.daemon_process import alive
from tests.support.facts import lacking
from tests.support.hub_server import COMMIT, Repository, serving
from tests.support.namespaces import Namespace, two_nodes
from tests.support.pair import OFFERED_GIB, Pair, pair_of, started
from tests.support.processes import session_of
from tests.support.ray_node import name_of
from tests.support.stream import held
from tests.support.waiting import until
from workers.host.hub_cache import snapshot_of

pytestmark = pytest.mark.rest

HUB_ID = "owner/name"
THERE_GIB = 6


@dataclass
class Stage(Pair):
    """The test's own thread is on the first node, so it talks to the gateway there as a user of that node does."""

    repository: Repository
    # Before the second node joined.
    offered: list[dict[str, Any]] = field(default_factory=list)
    token: str = ""

    def join(self) -> None:
        """What the operator does: a look, then the token from the head."""
        self.offered = until(lambda: (self.daemon.get("/admin/v1/nodes") or {})["offered"], "a node is offered", 0.5)
        self.token = self.sparkd("token", "--config", str(self.daemon.config), "-q").stdout
        self.join_with_token()

    def join_with_token(self) -> None:
        self.ray_node.start("join", self.head, "--token", "-", stdin=self.token.encode())
        self.both()

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node"]: node for node in (self.daemon.get("/admin/v1/nodes") or {"nodes": []})["nodes"]}

    def loaded(self, name: str) -> dict[str, Any]:
        if self.daemon.model(name)["state"] != "READY":
            self.daemon.load(name)
        return self.daemon.wait_for(name, "READY")

    def emptied(self) -> None:
        """No model is loaded, and both nodes are in sight."""
        self.both()
        for name in ("near", "far", "big"):
            self.unloaded(name)

    def far(self) -> Rank:
        """The model that runs on the second node, because the first is full."""
        self.both()
        self.loaded("near")
        model = self.loaded("far")
        (rank,) = model["ranks"]
        (key,) = self.ray_node.runtime_dir.rglob(f"{rank['rank_id']}.key")
        url = f"http://{rank['host']}:{rank['port']}"
        return Rank(rank["rank_id"], rank["pid"], url, key.read_text(), Path(rank["log_path"]), model["failures"])

    def untouched(self, rank: Rank) -> None:
        """The same process serves, nothing failed, and nothing was started beside it."""
        assert alive(rank.pid)
        assert self.daemon.chat("far", "hello", max_tokens=2).status_code == 200
        seen = self.daemon.model("far")
        assert ([one["pid"] for one in seen["ranks"]], seen["failures"]) == ([rank.pid], rank.failures)
        assert len(self.engines()) == len({"near", "far"})


@dataclass(frozen=True)
class Rank:
    """failures: of its model by then."""

    rank_id: str
    pid: int
    url: str
    key: str
    log: Path
    failures: int

    def running(self) -> float:
        """Requests that the engine itself has in hand."""
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.key}"}, trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """pytest's own paths are too long for Ray's sockets, above all those of its workers."""
    with tempfile.TemporaryDirectory(prefix="two-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    shards = {f"model-{number}.safetensors": layered(2, {"weight": (512, 512 * number)}, f"part{number}") for number in (1, 2)}
    repository = Repository(write_folder(folder / "repository", shards, {"model_type": "llama"}, index=True))
    with two_nodes() as (here, there), here.entered(), serving(repository):
        made = _stage(folder, here, there, repository)
        with started(made):
            made.join()
            yield made


def test_who_is_at_the_end_of_the_cable_is_offered_and_joins_by_the_heads_token_alone(stage: Stage) -> None:
    (offered,) = stage.offered
    assert (offered["cage"], offered["answers"]) == ("cage 0", True)
    # By whichever rail it was heard first.
    assert any(f"on {twin} (" in offered["told"] for twin in stage.here.twins)

    assert f"{stage.there.address} is {stage.there.interface} (QSFP, cage 1" in stage.ray_node.log.read_text()
    kept = {path.name: path.stat().st_mode & 0o777 for path in stage.ray_node.state_dir.glob("join.*")}
    assert kept == {RECORD: 0o600, TOKEN: 0o600}
    secret = stage.token.strip().encode()
    assert [pid for pid in stage.there.pids() if secret in _read(f"/proc/{pid}/cmdline") + _read(f"/proc/{pid}/environ")] == []
    assert secret not in stage.ray_node.log.read_bytes() + stage.daemon.output.read_bytes()


def test_both_nodes_are_seen_with_their_readings(stage: Stage) -> None:
    nodes = stage.nodes()

    assert set(nodes) == {stage.here.address, stage.there.address}
    assert [nodes[node.address]["unified_memory_gib"] for node in (stage.here, stage.there)] == [OFFERED_GIB, THERE_GIB]
    assert all(node["reading"]["mem_available_bytes"] > 0 for node in nodes.values())


def test_the_cable_between_them_is_seen_from_both_ends(stage: Stage) -> None:
    found = stage.daemon.get("/admin/v1/fabric")

    assert found is not None
    assert (found["topology"], found["verdict"], found["tensor_parallel"]["all"]) == ("pair", "ok", True)
    assert [(cable["seen"], len(cable["rails"])) for cable in found["cables"]] == [(True, 2)]
    for node in (stage.here, stage.there):
        values = {one["name"]: one["value"] for one in found["environment"][node.address]}
        assert (values["VLLM_HOST_IP"], values["GLOO_SOCKET_IFNAME"]) == (node.address, node.interface)


def test_the_rate_between_them_is_measured_by_both_agents_and_kept(stage: Stage) -> None:
    """Gloo over the cable, by the programs that measure with NCCL on CUDA."""
    stage.emptied()
    asked = stage.sparkd("fabric", "--measure", "all", "--json")
    assert asked.returncode == 0, asked.stderr
    (rate,) = json.loads(asked.stdout)["rates"]

    assert ({rate["a"], rate["b"]}, rate["backend"], rate["real"]) == ({stage.here.address, stage.there.address}, "gloo", False)
    assert rate["gb_s"] > 0 and 0 < rate["sent_bytes"] <= 512 << 20
    assert lacking(rate["told"], "GB/s", "virtual links", "no normal") == []
    assert "sparkd_fabric_rate_bytes_per_second{a=" in stage.daemon.client.get("/metrics").text
    assert [pid for pid in (*stage.here.pids(), *stage.there.pids()) if b"nccl_rate" in _read(f"/proc/{pid}/cmdline")] == []


def test_a_model_that_only_the_other_node_can_hold_goes_there_and_what_none_can_hold_is_refused(stage: Stage) -> None:
    stage.emptied()
    assert stage.loaded("big")["node"] == stage.there.address
    stage.unloaded("big")
    stage.daemon.load("huge")
    refused = stage.daemon.wait_for("huge", "FAILED")
    stage.unloaded("huge")

    assert refused["reason"] == "DoesNotFit"
    assert lacking(refused["message"], f"{THERE_GIB} GiB") == []


def test_nodes_share_no_model_over_a_cable_that_is_not_sound(stage: Stage) -> None:
    stage.emptied()
    stage.there.set_mtu(1400)
    try:
        stage.daemon.load("shared")
        refused = stage.daemon.wait_for("shared", "FAILED")
        stage.unloaded("shared")
    finally:
        stage.there.set_mtu(1500)

    assert refused["reason"] == "Unlinked"
    assert lacking(refused["message"], "shared", "2 nodes (tensor_parallel)", "MTU 1500", "1400", "mtu: 9000") == []


def test_a_model_that_does_not_fit_beside_another_goes_to_the_other_node(stage: Stage) -> None:
    stage.far()

    assert [stage.daemon.model(name)["node"] for name in ("near", "far")] == [stage.here.address, stage.there.address]
    assert [node["reserved_gib"] for node in stage.nodes().values()] == [3, 3]
    assert stage.daemon.chat("far", "hello", max_tokens=2).json()["choices"][0]["message"]["content"]


def test_its_ray_has_the_names_of_its_interfaces_and_a_rank_alone_needs_none(stage: Stage) -> None:
    rank = stage.far()
    for node in (stage.here, stage.there):
        names = {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}", "TP_SOCKET_IFNAME": node.interface}
        raylet = next(pid for pid in node.pids() if name_of(pid) == "raylet")
        assert _environment(raylet).items() >= (names | {"VLLM_HOST_IP": node.address}).items()
    (engine,) = (pid for pid in stage.engines() if pid in stage.there.pids())
    found = _environment(engine)
    assert (found["VLLM_HOST_IP"], found["MAX_JOBS"], found["SPARKD_RANK_ID"]) == (stage.there.address, "2", rank.rank_id)
    assert not [name for name in found if name.startswith(("NCCL_", "GLOO_", "TP_"))]


def test_its_files_lie_where_the_other_node_keeps_them(stage: Stage) -> None:
    rank = stage.far()

    assert rank.log.parent == stage.ray_node.state_dir / "logs"
    assert list(stage.ray_node.runtime_dir.rglob(f"{rank.rank_id}.json"))
    assert not list(stage.daemon.runtime_dir.rglob(f"{rank.rank_id}*"))


def test_it_listens_on_the_private_address_only_and_wants_its_key(stage: Stage) -> None:
    rank = stage.far()
    listening = {address for address, pid in stage.there.listeners() if pid in stage.engines()}

    assert listening == {rank.url.removeprefix("http://")}
    assert [address for address, pid in stage.here.listeners() if pid in stage.engines()] == []
    for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {rank.key}x"}):
        for path in ("/v1/models", "/health", "/metrics", "/version", "/docs"):
            assert httpx.get(f"{rank.url}{path}", headers=wrong, trust_env=False).status_code == 401
    assert httpx.get(f"{rank.url}/v1/models", headers={"authorization": f"Bearer {rank.key}"}, trust_env=False).status_code == 200


def test_beyond_the_private_address_only_rays_own_processes_and_its_driver_listen(stage: Stage) -> None:
    """Ray's gRPC servers bind every address, whatever node-ip-address says; each wants the token, and the firewall sample closes them."""
    stage.far()
    wide: dict[str, set[str]] = {}
    for node in (stage.here, stage.there):
        inner = ("127.0.0.1:", f"{node.address}:")
        wide[node.address] = {
            name_of(pid).partition(".")[0] for address, pid in node.listeners() if not address.startswith(inner)
        }  # an actor at work is titled ray::Agent.observe

    assert wide[stage.here.address] <= {"gcs_server", "raylet", "ray::Agent", "python", "ray::IDLE"}
    assert wide[stage.there.address] <= {"raylet", "ray::Agent", "ray::IDLE"}


def test_its_key_is_in_no_command_line_environment_log_or_answer(stage: Stage) -> None:
    rank = stage.far()
    key = rank.key.encode()
    pids = {*stage.here.pids(), *stage.there.pids()}
    files = [path for path in stage.daemon.folder.parent.rglob("*") if path.is_file() and path.suffix != ".key"]
    paths = ("/admin/v1/status", "/admin/v1/models", "/admin/v1/models/far", "/admin/v1/events?limit=1000", "/admin/v1/nodes", "/metrics")

    assert len(key) == 64
    assert [pid for pid in pids if key in _read(f"/proc/{pid}/cmdline")] == []
    assert [pid for pid in pids if key in _read(f"/proc/{pid}/environ")] == []
    assert [path for path in files if key in _read(str(path))] == []
    assert [path for path in paths if key in stage.daemon.client.get(path).content] == []
    (kept,) = stage.ray_node.runtime_dir.rglob("*.key")
    assert kept.stat().st_mode & 0o077 == 0


def test_a_client_that_leaves_aborts_on_the_other_node_too(stage: Stage) -> None:
    rank = stage.far()
    body = {"model": "far", "stream": True, "messages": [{"role": "user", "content": "x"}]} | held(stage.daemon.folder / "never")
    with stage.daemon.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # the connection ends with its iterator
        assert next(lines)
        assert rank.running() == 1
    until(lambda: rank.running() == 0, "the engine stops")


def test_its_log_and_its_metrics_come_through_the_first_node(stage: Stage) -> None:
    stage.far()

    assert "Application startup complete" in stage.daemon.get("/admin/v1/models/far/log")["text"]
    labels = ('model="far"', f'node="{stage.there.address}"')
    until(lambda: stage.daemon.metric("vllm:num_requests_running", *labels) >= 0, "a scrape of the other node", 0.3)


def test_a_model_is_downloaded_once_and_copied_to_the_other_node(stage: Stage) -> None:
    told = stage.sparkd("pull", "tiny")
    here, there = (snapshot_of(HUB_ID, None, {"HF_HOME": str(folder / "hub")}) for folder in (stage.daemon.folder, stage.ray_node.folder))

    assert told.stdout.startswith(f"{HUB_ID} (0.00 GB) is on {stage.here.address}, {stage.there.address}: "), told.stderr
    assert here is not None and there is not None
    names = sorted(path.name for path in stage.repository.folder.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    assert all((there / name).read_bytes() == (stage.repository.folder / name).read_bytes() for name in names)
    assert (there.name, (there.parent.parent / "refs" / "main").read_text()) == (COMMIT, COMMIT)
    sent = [asked for asked in stage.repository.asked if asked.server == "store" and asked.sent]
    assert len(sent) == len([name for name in names if name.endswith(".safetensors")])
    assert lacking(stage.sparkd("pull", HUB_ID, "--nodes", stage.there.address).stdout, "nothing", "missing") == []


def test_a_cable_that_is_out_for_a_few_seconds_ends_nothing(stage: Stage) -> None:
    rank = stage.far()
    stage.there.plug(up=False)
    try:
        until(lambda: any("NodeUnseen" in told for told in stage.daemon.status()["conditions"]), "it is noticed", 0.2)
        assert stage.nodes()[stage.there.address]["agent"] is False
        assert stage.daemon.model("far")["state"] == "READY"
        assert stage.daemon.chat("near", "hello").status_code == 200
    finally:
        stage.there.plug(up=True)
    stage.both()

    stage.untouched(rank)
    assert stage.daemon.status()["conditions"] == []


def test_the_agent_of_the_other_node_dies_and_its_rank_does_not_notice(stage: Stage) -> None:
    rank = stage.far()
    agent = stage.ray_node.pid_of("ray::Agent")
    os.kill(agent, signal.SIGKILL)
    until(lambda: stage.ray_node.pid_of("ray::Agent") not in (0, agent), "Ray starts it again", 0.2)
    stage.both()

    stage.untouched(rank)


def test_the_raylet_of_the_other_node_dies_and_its_rank_is_found_again(stage: Stage) -> None:
    rank = stage.far()
    raylet = stage.ray_node.pid_of("raylet")
    os.kill(raylet, signal.SIGKILL)
    assert stage.daemon.chat("far", "hello", max_tokens=2).status_code == 200
    until(lambda: stage.nodes()[stage.there.address]["agent"] is False, "it is noticed", 0.2)
    until(lambda: stage.ray_node.pid_of("raylet") not in (0, raylet), "`sparkd join` starts another", 0.2)
    stage.both()

    stage.untouched(rank)
    stage.daemon.load("big")
    refused = stage.daemon.wait_for("big", "FAILED")
    stage.unloaded("big")
    assert f"{stage.there.address} {THERE_GIB - 3} of {THERE_GIB}" in refused["message"]


def test_the_daemon_is_killed_and_the_next_one_adopts_the_rank_on_the_other_node(stage: Stage) -> None:
    rank = stage.far()
    before = stage.daemon.get("/admin/v1/events?limit=1")["events"][-1]["seq"]
    stage.daemon.kill()
    assert alive(rank.pid)
    stage.start()
    stage.both()
    stage.daemon.wait_for("far", "READY")

    stage.untouched(rank)
    events = stage.daemon.get(f"/admin/v1/events?limit=1000&after={before}")["events"]
    assert [event["kind"] for event in events if event["model"] == "far" and event["kind"] in ("started", "adopted")] == ["adopted"]
    until(lambda: [node["reserved_gib"] for node in stage.nodes().values()] == [3, 3], "its memory is reserved again")


def test_a_raylet_of_an_earlier_head_is_ended_and_its_rank_adopted(stage: Stage) -> None:
    """The whole head and `sparkd join` are killed; the raylet waits for a head that never comes back, until it gives up by itself."""
    rank, raylet = stage.far(), stage.ray_node.pid_of("raylet")
    assert stage.ray_node.process is not None
    stage.ray_node.process.kill()
    stage.ray_node.ended()
    stage.daemon.kill()
    for pid in stage.here.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stage.start()
    stage.ray_node.start("join", stage.head)
    stage.both()

    assert not alive(raylet)
    assert alive(rank.pid)
    stage.daemon.wait_for("far", "READY")
    assert stage.daemon.model("far")["ranks"][0]["pid"] == rank.pid
    stage.daemon.wait_for("near", "READY")


def test_unloading_ends_every_process_of_it(stage: Stage) -> None:
    rank = stage.far()
    members = [pid for pid in stage.there.pids() if session_of(pid) == rank.pid]
    assert len(members) >= 2
    stage.unloaded("far")

    assert [pid for pid in members if alive(pid)] == []
    assert not list(stage.ray_node.runtime_dir.rglob(f"{rank.rank_id}*"))


def test_ctrl_c_ends_the_ranks_of_both_nodes_and_leaving_ends_the_other_nodes_ray(stage: Stage) -> None:
    stage.far()
    assert stage.daemon.end(signal.SIGINT) == 0
    assert stage.engines() == []
    assert stage.here.pids() == []
    left = stage.sparkd("leave", "--config", str(stage.ray_node.config), node=stage.there)

    assert lacking(left.stdout, "left", stage.head) == [], left.stderr
    assert stage.ray_node.ended() == 0
    assert stage.there.pids() == []
    assert list(stage.ray_node.state_dir.glob("join.*")) == []

    stage.start()
    stage.join_with_token()


def _stage(folder: Path, here: Namespace, there: Namespace, repository: Repository) -> Stage:
    (folder / "model").mkdir()
    # Pinned, so that neither goes for the sake of the big one.
    pinned = {"memory_gib": 3, "pin": True}
    sizes: dict[str, dict[str, Any]] = {"near": pinned, "far": pinned, "big": {"memory_gib": 5}}
    sizes["huge"] = {"memory_gib": THERE_GIB + 1}
    sizes["shared"] = {"memory_gib": 3, "tensor_parallel": 2}
    models = {name: stub_engine() | {"model": str(folder / "model")} | keys for name, keys in sizes.items()}
    models["tiny"] = stub_engine() | {"model": HUB_ID}
    hub = {"HF_ENDPOINT": repository.hub, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    pair = pair_of(folder, here, there, models, there_gib=THERE_GIB, environ=hub)
    pair.daemon.program = "tests.support.patient_sparkd"
    return Stage(pair.here, pair.there, pair.daemon, pair.ray_node, repository)


def _environment(pid: int) -> dict[str, str]:
    pairs = (one.partition("=") for one in _read(f"/proc/{pid}/environ").decode("utf-8", "replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""
