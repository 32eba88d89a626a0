"""`sparkd plan NAME` of a configured model: the daemon's own choice, and the very command and environment that it starts."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.admin.client import Client
from sparkd.admin.planner import Planning
from sparkd.capacity import docker_run, placed_entry, plan_for_node, planned_entry
from sparkd.capacity import plan as plans
from sparkd.capacity.launch import OWN
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.plan_for_node import PlanOrder
from sparkd.capacity.planned_entry import PlanRequest
from sparkd.capacity.requirement import Placement, requirement_of
from sparkd.cluster.launcher import Launcher, StartId
from sparkd.config.config import Config, load_config, parse_model
from sparkd.config.model import ModelConfig
from sparkd.config.parser_choice import with_parsers
from sparkd.config.trusted_commits import pinned
from sparkd.fabric.environment import expected, wants_rdma
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.hardware import JIT_CAPS, SPARK, machine
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.units import GIB
from sparkd.vllm.flags import Value, parsed, speculative_config
from tests.sparkd.cluster.test_launcher import FakeAgents
from tests.support.accounts import requirement, too_large
from tests.support.checkpoints import mixture, write
from tests.support.facts import lacking
from tests.support.hub_server import COMMIT
from tests.support.published_headers import checkpoint_of
from tests.support.published_tensors import tensors_of
from tests.support.waiting import HUNG_S
from workers.host.runtime import API_SERVER, probe
from workers.kv.settings import VARIABLE
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.command import build_command, build_environment
from workers.rank.spec import RankSpec

HEAD, OTHER = "10.0.0.1", "10.0.0.2"
FREE = SPARK.memory_bytes - SPARK.system_bytes
# Of a start: its socket, its files, its addresses, and where a foreign interpreter finds the plugin.
OF_A_START = (*OWN, "PYTHONPATH", "VLLM_HOST_IP")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = mixture(max_position_embeddings=262_144, num_nextn_predict_layers=1, vocab_size=2048)
    return write(tmp_path_factory.mktemp("models") / "tiny", config, [*tensors_of(config), ("mtp.fc.weight", (512, 1024), "BF16")])


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which every hub id that is asked for is the tiny model."""
    for name in ("SPARKD_CONFIG", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    # No answer of vLLM that another test has kept.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPARKD_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(placed_entry, "this_node", lambda platform: machine(platform, SPARK.memory_bytes, SPARK.system_bytes))
    monkeypatch.setattr(planned_entry, "probe", asked)
    monkeypatch.setattr(docker_run, "_plugin", dict)  # of an installed sparkd
    return tmp_path / "hub"


def cached(hub: Path, model: str, folder: Path) -> None:
    if not model.startswith("/"):
        place = hub / f"models--{model.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "snapshots").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(COMMIT)
        if not (place / "snapshots" / COMMIT).exists():
            (place / "snapshots" / COMMIT).symlink_to(folder)


asked = cache(probe)


class Agents(FakeAgents):
    address = f"{HEAD}:6379"

    async def make_group(self, _start: str, _nodes: tuple[str, ...]) -> str:
        return "group"


def facts(interpreter: str = sys.executable) -> Mapping[str, Any]:
    return asked(interpreter).to_dict() | {"platform": "cuda"}


async def started(config: Config, spec: ModelConfig, ways: tuple[int, int]) -> list[RankSpec]:
    """What the agents would start, as a node's own agent completes it."""

    async def read(_node: str) -> Any:
        raise AssertionError("a rank alone asks for no cables")

    entry = placed_entry.placed_entry(pinned(spec, config), config, NodeRuntime(facts(), HEAD))
    need = requirement_of(entry, FREE / GIB, FREE / GIB, ways)
    parsed, _ = with_parsers(need.args.spec, need.args.env)
    agents = Agents()
    peers = (OTHER,) if ways != (1, 1) else ()
    placement = Placement(HEAD, "m", need.gib, entry.node.platform, entry.entrypoint, entry.vllm, parsed, peers, *ways)
    fabric = FabricNodes(read)
    fabric.environment = _network  # type: ignore[method-assign]
    engines = Launcher(lambda: config, agents, fabric, agents.call, HEAD, lambda *_: {})  # type: ignore[arg-type]
    await engines.start(placement, spec, StartId("m-1-abcdef12", 1, "hash"))
    made = []
    for fields in sorted(agents.spawned, key=lambda one: int(one["rank"])):
        where = {"socket_path": "/run/sparkd/x.sock"} if not fields["rank"] else {}
        here: dict[str, Any] = {"run_dir": "/run/sparkd", "log_path": "/dev/null", "pythonpath": ["/plugin"]}
        if "loader_extra_config" in fields:
            here["loader_extra_config"] = fields["loader_extra_config"] | {"progress": "/run/sparkd/p"}
        if "kv_cache" in fields:
            here["kv_cache"] = fields["kv_cache"] | {"report": "/run/sparkd/r"}
        made.append(RankSpec.from_dict({key: value for key, value in fields.items() if key != "private"} | where | here))
    return made


async def _network(_node: str, peers: list[str], *, configured: Mapping[str, str], **_how: object) -> dict[str, str]:
    """As sparkd.fabric.environment says it, but for a node's own names, which a plan does not know
    (tests/sparkd/fabric/test_environment.py)."""
    return JIT_CAPS | (expected(rdma=wants_rdma("cuda", configured)) if peers else {})


def read(command: list[str]) -> tuple[list[str], dict[str, Value]]:
    """The words before the flags, and the flags."""
    begin = next((index for index, word in enumerate(command) if word.startswith("--")), len(command))
    return command[:begin], dict(parsed(["HEAD" if word == HEAD else word for word in command[begin:]]))


def told_of(spec: RankSpec) -> tuple[tuple[list[str], dict[str, Value]], dict[str, str]]:
    """Command and environment without what belongs to one start."""
    first, flags = read(build_command(spec))
    flags.pop("uds", None)
    if isinstance(loader := flags.get("model-loader-extra-config"), str):
        told = {key: value for key, value in json.loads(loader).items() if key != "progress"}
        flags["model-loader-extra-config"] = json.dumps(told, sort_keys=True)
    if "master-port" in flags:
        flags["master-port"] = "29500"
    env = {name: value for name, value in build_environment(spec, {}).items() if name not in OF_A_START}
    if VARIABLE in env:
        env[VARIABLE] = json.dumps({key: value for key, value in json.loads(env[VARIABLE]).items() if key != "report"}, sort_keys=True)
    return (first, flags), env


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = exit_code(["plan", "--quick", "--json", *map(str, argv)])
    out, err = capsys.readouterr()
    assert code == 0, err or json.loads(out)["options"]
    found: dict[str, Any] = json.loads(out)
    return found


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
ENTRIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "auto": {"quantize": "auto", "max_model_len": "auto"},
    "best": {"quantize": {"format": "best", "gib": 0.03}, "max_model_len": 8192},
    "quantized": {"quantize": "nvfp4", "max_model_len": 8192, "max_num_seqs": 4, "quantized_cache": False},
    "sized": {"kv_cache": {"sequences": 3, "at": 4096}, "max_model_len": 8192, "kv_margin_gib": 2.5, "kv_cache_dtype": "fp8"},
    "stock": {"gpu_memory_utilization": 0.5, "max_model_len": 8192, "trust_remote_code": True},
    "numbers": {"extra_args": ["--max-num-seqs", "4", "--max_num_batched_tokens=4k", "--max-model-len", "8192", "--optimization-level=1"]},
    "flags": {
        "aliases": ["gpt-4o"],
        "revision": "main",
        "max_model_len": 4096,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "extra_args": ["--moe-backend", "marlin", "--async-scheduling", "--no-enable-prefix-caching"],
        "env": {"VLLM_LOGGING_LEVEL": "DEBUG", "CUTE_DSL_ARCH": "sm_121a"},
    },
    "drafting": {"extra_args": ["--speculative-config", NGRAM], "max_model_len": 4096, "kv_cache": {"sequences": 2}},
    "split": {"tensor_parallel": 2, "max_model_len": 4096, "quantize": "int4-g32"},
    "ray": {"tensor_parallel": 2, "max_model_len": 4096, "executor": "ray"},
}
RECIPES = {
    "qwen3.6-35b-a3b-nvfp4": {"kv_cache": "auto"},
    "qwen3.5-122b-a10b-nvfp4": {"extra_args": ["--speculative-config", NGRAM]},
}


@pytest.mark.parametrize("name", [*ENTRIES, *RECIPES])
async def test_its_command_and_environment_are_those_that_the_daemon_starts(
    name: str, folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"model": str(folder), **ENTRIES[name]} if name in ENTRIES else {"recipe": name, **RECIPES[name]}
    file = tmp_path / "sparkd.yaml"
    engine = {"env": {"NCCL_DEBUG": "WARN"}, "platform": "cuda"}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "engine": engine, "models": {"m": entry}}))
    config = load_config(file, environ={})
    spec = config.models["m"]
    cached(hub, spec.model, folder)

    choice = plan(capsys, "m", "--config", file)["choice"]
    ways = choice["tensor_parallel"], choice["pipeline_parallel"]
    assert len(choice["ranks"]) == ways[0] * ways[1] == (spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else 1)
    for rank, real in zip(choice["ranks"], await started(config, spec, ways), strict=True):
        command, environment = told_of(real)
        shown = {key: value for key, value in rank["environment"].items() if key not in OF_A_START}
        assert read(rank["command"]) == command
        told = {key: value for key, value in shown.items() if value != f"${{{key}}}" and "RAY" not in key}
        assert told.items() <= environment.items()
        assert {key for key in environment if "RAY" not in key} == {key for key in shown if "RAY" not in key}


def test_what_is_secret_is_no_part_of_a_plan(folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sparkd.yaml"
    env = {"HF_TOKEN": "s3cret", "MY_WORD": "s3cret", "VLLM_API_KEY_FILE": "s3cret", "VLLM_ATTENTION": "shown"}
    file.write_text(json.dumps({"models": {"m": {"model": str(folder), "max_model_len": 4096, "env": env}}}))
    found = plan(capsys, "m", "--config", file)["choice"]["ranks"][0]["environment"]
    assert {name: found[name] for name in env} == {name: f"${{{name}}}" for name in env} | {"VLLM_ATTENTION": "shown"}

    assert exit_code(["plan", "--quick", "m", "--config", str(file), "--docker", "--image", "vllm/vllm-openai:v1"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert [words[at + 1] for at, word in enumerate(words) if word == "-e" and "VLLM_ATTENTION" in words[at + 1]] == [
        "VLLM_ATTENTION=shown"
    ]
    assert {"HF_TOKEN", "MY_WORD", "VLLM_API_KEY_FILE"} <= {words[at + 1] for at, word in enumerate(words) if word == "-e"}


def fits(capsys: pytest.CaptureFixture[str], file: Path, *argv: object) -> tuple[bool, list[str], dict[str, Any]]:
    exit_code(["plan", "--quick", "--json", "m", "--config", str(file), *map(str, argv)])
    found = json.loads(capsys.readouterr().out)
    return found["choice"] is not None, [one["reason"] for one in found["options"]], found


@pytest.mark.parametrize(
    ("keys", "argv", "why"),
    [
        ({"memory_gib": 2}, (), ["memory_gib of 2"]),
        ({"gpu_memory_utilization": 0.001}, (), ["gpu_memory_utilization 0.001"]),
        ({"kv_cache": {"tokens": 1024}}, (), ["kv_cache", "1,024 tokens", "4,096"]),
        ({"kv_margin_gib": 120}, (), ["120.0 GiB margin"]),
        ({"tensor_parallel": 3}, (), ["heads", "3 ranks"]),
        ({}, ("--ctx", 300_000), ["300,000 tokens", "262,144"]),
    ],
)
def test_every_key_that_bears_on_its_memory_is_heard(
    keys: dict[str, Any],
    argv: tuple[object, ...],
    why: list[str],
    folder: Path,
    hub: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"models": {"m": {"model": str(folder), "max_model_len": 4096, **keys}}}))
    chosen, reasons, found = fits(capsys, file, *argv)
    assert not chosen and all(lacking(reason, *why) == [] for reason in reasons), reasons
    assert not any(re.search(r"set max_model_len: (4096|262)", note) for note in found["notes"])


def test_a_share_of_more_than_a_node_lends_is_refused_as_a_load_is(
    folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, most = tmp_path / "sparkd.yaml", FREE // GIB
    entry = {"model": str(folder), "max_model_len": 4096, "gpu_memory_utilization": 0.99}
    file.write_text(json.dumps({"models": {"m": entry}}))
    chosen, reasons, found = fits(capsys, file, "--hardware", "spark")
    config = load_config(file, environ={})
    need = requirement(config.models["m"], config, facts(), most, most)
    why = too_large(need, most, "a node")
    assert not chosen and found["refusal"] == {"cause": "memory", "message": why}
    assert why is not None and len(reasons) == 1 and why.startswith(reasons[0])
    entry["gpu_memory_utilization"] = float(re.findall(r"choose ([0-9.]+) or less", why)[0])
    file.write_text(json.dumps({"models": {"m": entry}}))
    assert fits(capsys, file, "--hardware", "spark")[0]


def test_what_the_command_line_says_goes_before_the_entry(
    folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sparkd.yaml"
    entry = {"model": str(folder), "max_model_len": 4096, "quantization": "fp8", "gpu_memory_utilization": 0.5}
    entry |= {"extra_args": ["--speculative-config", NGRAM]}
    file.write_text(json.dumps({"models": {"m": entry}}))
    argv = ("--quantize", "nvfp4", "--seqs", 3, "--ctx", 8192, "--batch", 2048, "--kv-dtype", "fp8", "--margin", 2)
    chosen, _, found = fits(capsys, file, *argv, "--speculative", "mtp")
    command = found["choice"]["ranks"][0]["command"]
    assert chosen and found["choice"]["format"] == "nvfp4" and found["asked"]["speculative"] == "mtp" and found["asked"]["requests"] == 3
    assert [command[command.index(flag) + 1] for flag in ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-dtype")] == [
        "8192", "2048", "fp8",
    ]  # fmt: skip
    assert "--gpu-memory-utilization" not in command and "--quantization" not in command
    assert (speculative_config(command) or {})["method"] == "mtp"
    told = json.loads(found["choice"]["ranks"][0]["environment"][VARIABLE])
    assert (told["sequences"], told["margin_bytes"]) == (3, 2 * GIB)


@pytest.fixture
def served(folder: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `sparkd plan` asks, over HTTP: the models of a configuration, their plans, and two nodes. `status`: of each answer; `gate`:
    without which none comes; `ends`: how each operation of a plan ends, one after another."""
    file, told = tmp_path / "theirs.yaml", {"status": 200, "gate": Event(), "ends": []}
    told["gate"].set()
    theirs = asdict(machine("cpu", 30 * GIB, 2 * GIB))
    entries = {"m": {"model": str(folder), "aliases": ["me/mine", "their-gemma-3"], "max_model_len": 4096, "kv_cache": {"sequences": 2}}}
    entries |= {"qwen3-coder-next-fp8": {"model": str(folder), "max_model_len": 2048}}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": entries}))
    config = load_config(file, environ={})

    class Admin(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            views = [{"name": name, "aliases": spec.aliases, "source": spec.model} for name, spec in config.models.items()]
            nodes = [{"agent": agent} for agent in (True, True, False)]
            if "/operations/" in self.path:
                self._say({"state": told["ends"].pop(0), "message": "it broke"})
                return
            self._say({"models": views} if self.path.endswith("/models") else {"nodes": nodes, "hardware": theirs})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            question, operation = Planning.model_validate(asked).request(), "p1" if told["ends"] and "quick" not in asked else None
            here, spec = plan_for_node.planning_hardware(question.hardware, config), config.lookup(question.model)
            self._say({**plan_for_node._answer(PlanOrder(question, here, spec, {}, config)), "operation": operation, "href": None})

        def _say(self, body: dict[str, Any]) -> None:
            told["gate"].wait()
            # Who asked may have gone.
            with suppress(ConnectionError):
                self.send_response(told["status"])
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        told["url"] = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("SPARKD_URL", told["url"])
        yield told
        told["gate"].set()
        server.shutdown()
        thread.join()


def test_the_daemons_plan_is_waited_for_until_its_vllm_has_answered(
    served: dict[str, Any], folder: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def notes(*argv: str) -> list[str]:
        assert exit_code(["plan", "--json", "m", *argv]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert not {"operation", "href"} & answer.keys()
        return [note for note in answer["notes"] if "it broke" in note]

    served["ends"] = ["SUCCEEDED", "SUCCEEDED"]
    assert notes("--quick") == [] and len(served["ends"]) == 2
    assert notes() == [] and served["ends"] == []
    served["ends"] = ["FAILED", "unasked"]
    assert len(notes()) == 1 and served["ends"] == ["unasked"]


def test_a_name_that_the_daemon_knows_is_planned_by_its_entry_there(
    served: dict[str, Any], folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, argv, requests in (("m", (), 2), ("me/mine", ("--seqs", 1), 1)):
        found = plan(capsys, name, *argv)
        assert found["entry"] == {"name": "m", "origin": f"sparkd at {served['url']}"}
        assert found["asked"]["requests"] == requests and found["choice"]["max_model_len"] == 4096
    for mistyped, meant in (("qwen3-coder-nxt-fp8", "qwen3-coder-next-fp8"), ("their-gemma", "their-gemma-3")):
        assert exit_code(["plan", "--quick", mistyped]) == 2
        assert lacking(capsys.readouterr().err, meant) == []
    # An entry goes before the recipe of its name, and a sparkd.yaml that is named before the daemon.
    assert plan(capsys, "qwen3-coder-next-fp8")["choice"]["max_model_len"] == 2048
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"models": {"m": {"model": str(folder), "max_model_len": 1024}}}))
    found = plan(capsys, "m", "--config", file)
    assert found["choice"]["max_model_len"] == 1024 and found["entry"]["origin"] == str(file)


def test_an_entry_is_planned_for_the_nodes_of_a_daemon_in_reach(
    served: dict[str, Any], folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own models, of those of a sparkd.yaml that is named, a folder's and a hub id's; unless the machine is named."""
    cached(hub, "owner/model", folder)
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": {"mine": {"model": str(folder)}}}))
    whose = f"sparkd at {served['url']}"
    own = plan_for_node.planning_hardware("node", Config())
    found = plan(capsys, "m")["hardware"]
    assert (found["name"], found["memory_bytes"], found["platform"], found["of"]) == ("node", own.memory_bytes, own.platform, whose)
    found = plan(capsys, "mine", "--config", file)
    assert (found["hardware"]["memory_bytes"], found["hardware"]["of"], found["asked"]["nodes"]) == (30 * GIB, whose, 2)
    assert "--enforce-eager" in found["choice"]["ranks"][0]["command"]  # as on a CPU
    made = [plan(capsys, model) for model in (folder, "owner/model")]
    assert [(found["hardware"]["of"], found["asked"]["nodes"]) for found in made] == [(whose, 2), (whose, 2)]
    assert found["hardware"]["bandwidth_bytes_s"] is None and found["choice"]["footprint"]["decode_tokens_s"] is None
    assert plan(capsys, "mine", "--config", file, "--nodes", 3)["asked"]["nodes"] == 3
    assert plan(capsys, "mine", "--config", file, "--hardware", "spark")["hardware"]["name"] == "spark"
    served["status"] = 401
    found = plan(capsys, "mine", "--config", file)
    assert found["hardware"]["name"] == "spark" and "of" not in found["hardware"]
    (note,) = (note for note in found["notes"] if "Spark" in note)
    assert lacking(note, "daemon", "nodes", "admin key") == []
    monkeypatch.setenv("SPARKD_URL", "http://127.0.0.1:9")
    found = plan(capsys, "mine", "--config", file)
    assert found["hardware"]["name"] == "spark" and not any("Spark" in note for note in found["notes"])


def test_a_daemon_that_is_too_slow_is_named(
    served: dict[str, Any], folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr; among the notes under --json, which has nothing else on stderr."""
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": {"mine": {"model": str(folder)}}}))
    served["gate"].clear()
    monkeypatch.setattr(Client._ask, "__defaults__", (None, 0.1))
    late = (f"sparkd at {served['url']}", "too long")
    nodes = ("Spark", "daemon", "nodes", *late)
    assert exit_code(["plan", "--quick", "mine", "--config", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "too long" not in out and lacking(err, *nodes) == [] and err.count("\n") == 1
    assert exit_code(["plan", "--quick", "mine", "--config", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [] in [lacking(note, *nodes) for note in json.loads(out)["notes"]] and err == ""
    # Only the daemon knows a name that is neither a recipe nor a hub id.
    assert exit_code(["plan", "--quick", "m"]) == 7
    err = capsys.readouterr().err
    assert err.startswith("error: ") and lacking(err, *late) == [] and err.count("\n") == 1


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon makes a plan in a process of its own, which takes a second to start."""
    monkeypatch.setattr(plan_for_node, "_answer_of_process", plan_for_node._answer)
    monkeypatch.setattr(plan_for_node, "LIMIT_S", HUNG_S)


@pytest.mark.usefixtures("in_this_process")
async def test_the_daemon_plans_an_entry_for_as_many_nodes_as_it_would_spread_it_over(folder: Path, hub: Path, tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    model = {"model": str(folder), "max_model_len": 4096, "quantize": "nvfp4"}
    entries = {"m": model, "one": {**model, "tensor_parallel": 1}}
    settings = {"engine": {"platform": "cuda"}, "memory": {"os_reserve_gib": 0.5}}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": entries} | settings))
    config = load_config(file, environ={})

    async def unlinked(*, rdma: bool) -> Mapping[int, str]:
        return {2: "no cable"}

    async def nodes(**asked: Any) -> int:
        question = PlanRequest(**asked)
        order = await plan_for_node.order_here(question, config.lookup(question.model), unlinked, config, in_sight=2)
        found = await plan_for_node.planned_here(order)
        if question.hardware == "node":
            assert (found["hardware"]["platform"], found["hardware"]["system_bytes"]) == ("cuda", GIB // 2)
        return int(found["asked"]["nodes"])

    assert [await nodes(model="m"), await nodes(model="one"), await nodes(model="m", nodes=3)] == [2, 1, 3]
    assert [await nodes(model="m", hardware="spark"), await nodes(model=str(folder))] == [1, 2]


def test_a_daemon_that_wants_a_key_keeps_no_hub_id_and_no_recipe_from_a_plan(
    served: dict[str, Any], folder: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served["status"] = 401
    for name, entry in (("owner/model", None), ("qwen3-coder-next-fp8", "the recipe qwen3-coder-next-fp8")):
        cached(hub, "Qwen/Qwen3-Coder-Next-FP8" if entry else name, folder)
        found = plan(capsys, name)
        assert (found["entry"] or {}).get("origin") == entry
        assert [] in [lacking(note, "daemon", f"entry for {name}", "admin key") for note in found["notes"]]
    assert exit_code(["plan", "--quick", "m"]) == 6
    assert "admin key" in capsys.readouterr().err


def large_mixture(folder: Path, free_gib: int, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[Path, Path]:
    """A configuration with a model of some 12 GiB under these keys, and the file of a machine with so much free memory, which this one is
    then."""
    config = mixture(max_position_embeddings=131_072, num_hidden_layers=24, num_experts=16, hidden_size=2048, moe_intermediate_size=5632)
    large = write(folder / "large", config, tensors_of(config))
    hardware, total = folder / "machine.yaml", free_gib * GIB + 4 * GIB
    hardware.write_text(f"memory_bytes: {total}\nsystem_bytes: {4 * GIB}\n")
    file = folder / "sparkd.yaml"
    entry = {"model": str(large), "max_num_seqs": 16, **keys}
    file.write_text(json.dumps({"engine": {"platform": "cuda"}, "models": {"m": entry}}))
    monkeypatch.setattr(placed_entry, "this_node", lambda platform: machine(platform, total, 4 * GIB))
    return file, hardware


@pytest.mark.parametrize("free_gib", [100, 26, 14])
def test_auto_is_what_the_daemon_decides(
    free_gib: int, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of some 12 GiB over one and two nodes of so much."""
    keys = {"quantize": "auto", "max_model_len": "auto", "kv_cache": {"sequences": 1}}
    file, hardware = large_mixture(tmp_path, free_gib, monkeypatch, **keys)
    loaded = load_config(file, environ={})
    for ways in ((1, 1), (2, 1)):
        need = requirement(loaded.models["m"], loaded, facts(), float(free_gib), float(free_gib), ways)
        decided = need.args.spec
        _, _, found = fits(capsys, file, "--hardware", hardware, "--nodes", ways[0])
        mine = [one for one in found["options"] if one["tensor_parallel"] == ways[0] and one["pipeline_parallel"] == 1]
        best = next(one for one in mine if one["fits"])
        spelling = decided.quantize.default.spelling if isinstance(decided.quantize, QuantizationRecipe) else "as stored"
        assert (best["format"], best["max_model_len"], best["reserved_gib"]) == (spelling, decided.max_model_len, need.gib)


def test_an_image_is_the_recipes_unless_another_is_named(
    folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sparkd.yaml"
    book = load_config(None, environ={}).book()
    file.write_text(json.dumps({"models": {"m": {"recipe": "qwen3.5-122b-a10b-nvfp4"}}}))
    cached(hub, load_config(file, environ={}).models["m"].model, folder)

    def printed(*argv: str) -> tuple[list[str], str]:
        assert exit_code(["plan", "--quick", *argv, "--config", str(file)]) == 0
        out = capsys.readouterr().out
        kept = "\n".join(line for line in out.splitlines() if not line.startswith("#"))
        return shlex.split(kept.replace("\\\n", "")), out

    words, out = printed("m", "--docker")
    image = book.find("qwen3.5-122b-a10b-nvfp4").recipe.container
    assert image is not None and image.image in words and words[words.index(image.image) + 1] != "vllm"
    # Of a model that is not configured too, where there is a recipe for it.
    words, out = printed(str(load_config(file, environ={}).models["m"].model), "--docker")
    assert image.image in words and "recipe qwen3.5-122b-a10b-nvfp4" in out
    words, out = printed("m", "--docker", "--image", "me/mine:1")
    assert words[words.index("me/mine:1") + 1 :][:2] == ["vllm", "serve"] and "#" not in out


# Recipe -> the fixture whose headers are its model's, and how they are stored.
PUBLISHED = {
    "gemma-4-31b-it-nvfp4": ("gemma-4-31b-it-nvfp4", "as published"),
    "gpt-oss-120b": ("gpt-oss-120b", "as published"),
    "nemotron-3-nano-30b-a3b-nvfp4-32gb": ("nemotron-3-nano-30b-a3b-nvfp4", "as published"),
    "qwen3.5-27b": ("qwen3.5-27b", "as published"),
    "qwen3.5-397b-a17b-fp8": ("qwen3.5-397b-a17b", "fp8_block"),
}


def no_draft(name: str) -> Any:
    raise AssertionError(f"the headers of {name} are asked for")


@pytest.mark.parametrize("name", [*list(PUBLISHED)[:3], *(pytest.param(name, marks=pytest.mark.rest) for name in list(PUBLISHED)[3:])])
def test_a_recipe_of_ours_fits_the_sparks_that_it_is_for(name: str) -> None:
    """Counted with the real headers of its model, on as many nodes as it says."""
    book = RecipeLibrary(None, AsWritten())
    spec = parse_model("m", {"recipe": name}, over_admin=False, book=book)
    entry = planned_entry.PlannedEntry(spec, Config(), "0.32.0", API_SERVER)
    found = plans.plan(PlanRequest(model="m"), entry, checkpoint_of(*PUBLISHED[name]), SPARK, read=no_draft)
    choice = found["choice"]
    assert choice is not None, [one["reason"] for one in found["options"]]
    assert choice["nodes"] == book.find(name).recipe.nodes.min
    assert choice["max_model_len"] == spec.max_model_len
    assert choice["footprint"]["sureness"] == "guess"


def test_the_admin_api_answers_the_same(folder: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sparkd.yaml"
    entry = {"model": str(folder), "quantize": "auto", "max_model_len": "auto", "env": {"HF_TOKEN": "s3cret"}}
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": {"m": entry}}))
    config = load_config(file, environ={})
    question = PlanRequest(model="m", hardware="spark")
    found = plan_for_node._answer(PlanOrder(question, SPARK, config.lookup("m"), {}, config))
    here = plan(capsys, "m", "--config", file)
    assert found.pop("entry") == {"name": "m", "origin": None} and here.pop("entry") == {"name": "m", "origin": str(file)}
    assert json.loads(json.dumps(found)) == here
    assert "s3cret" not in json.dumps(found)
