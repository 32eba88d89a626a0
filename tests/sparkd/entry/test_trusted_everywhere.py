"""Whoever reads the files of a model whose code is trusted reads those of the trusted commit: checks, plans, pulls, exports, starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity import plan_for_entry, requirement
from sparkd.capacity.account import machine
from sparkd.capacity.plan_for_node import checkpoint_here
from sparkd.cli.layers import named_model
from sparkd.cli.quantized import chosen
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import Config, load_config
from sparkd.entry import hub_check
from sparkd.entry.hub_check import Remote
from sparkd.entry.trusted_commits import FILE
from sparkd.errors import ContextTooLong
from sparkd.hardware import SPARK
from sparkd.state.abilities import GENERATE, POOL
from sparkd.state.nouns import OperationState
from tests.sparkd.admin.test_pull import A, environ, hub, scene
from tests.sparkd.cluster.test_placer import Scene
from tests.support.checkpoints import mixture, tensors_of, write
from tests.support.hub_server import COMMIT, Repository
from workers.host.runtime import API_SERVER, Runtime
from workers.transfer import manifest

FIRST, SECOND = "1" * 40, "2" * 40
TOOLS, PARSER = "{{ tools }}<minimax:tool_call>", "minimax_m2"
__all__ = ["environ", "hub"]


class Place:
    """A hub cache with `owner/name` at two commits, the branch at the second, and a daemon whose first start trusted the first."""

    def __init__(self, tmp_path: Path) -> None:
        self.state, self.cache = tmp_path / "state", tmp_path / "cache"
        self.state.mkdir()
        self.file = tmp_path / "sparkd.yaml"
        self.trust(FIRST)
        self.has(FIRST, template=TOOLS, max_position_embeddings=8192)
        self.has(SECOND, architectures=["BertModel"], max_position_embeddings=1024)

    def trust(self, commit: str) -> None:
        (self.state / FILE).write_text(json.dumps({"owner/name@main": commit}))

    def has(self, commit: str, template: str = "no tools", **config: Any) -> None:
        folder = self.cache / "models--owner--name"
        made = folder / "snapshots" / commit
        shape = mixture(**config)
        if made.is_dir():
            (made / "config.json").write_text(json.dumps(shape))
        else:
            write(made, shape, tensors_of(shape))
        (made / "chat_template.jinja").write_text(template)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)

    def config(self, **keys: Any) -> Config:
        entry = {"model": "owner/name", "trust_remote_code": True, "max_model_len": 4096, **keys}
        engine = {"platform": "cpu", "env": {"HF_HUB_CACHE": str(self.cache)}}
        self.file.write_text(json.dumps({"state_dir": str(self.state), "engine": engine, "models": {"m": entry}}))
        return load_config(self.file, environ={}).model_copy(update={"runtime_dir": self.file.with_name("run")})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(requirement, "this_node", lambda platform: machine(platform, SPARK.memory_bytes, SPARK.system_bytes))
    monkeypatch.setattr(plan_for_entry, "probe", lambda _: Runtime("cpu", "0.32.0", API_SERVER))
    monkeypatch.delenv("SPARKD_CONFIG", raising=False)
    return Place(tmp_path)


async def test_a_placement_is_judged_by_the_files_of_the_commit_that_it_starts(place: Place, tmp_path: Path) -> None:
    scene_of_a = Scene(tmp_path, {"10.0.0.1": 60})
    config = scene_of_a.config = place.config()

    placement = await scene_of_a.siting.place(config.models["m"])

    assert placement.spec is not None and placement.spec.revision == FIRST
    assert placement.spec.extra_args[-4:] == ["--code-revision", FIRST, "--tokenizer-revision", FIRST]
    assert placement.spec.tool_call_parser == PARSER
    place.trust(SECOND)
    with pytest.raises(ContextTooLong, match="1,024"):
        await scene_of_a.siting.place(config.models["m"])


async def test_abilities_and_parsers_before_a_start_are_those_of_the_trusted_commit(place: Place) -> None:
    config = place.config(max_model_len=None)
    cluster, spec = Cluster(config, {}), config.models["m"]

    found, parsers = await cluster.models.abilities(spec), await cluster.models.parsers(spec)

    assert (found.tasks, found.max_model_len) == (frozenset({GENERATE}), 8192)
    assert parsers is not None and parsers.tool == PARSER
    place.trust(SECOND)
    moved = await cluster.models.abilities(spec)
    assert (moved.tasks, moved.max_model_len) == (frozenset({POOL}), 1024)


async def test_a_model_whose_trusted_commit_is_nowhere_is_absent_though_its_branch_is_here(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = place.config()
    looked: list[str | None] = []
    monkeypatch.setattr(hub_check, "_asked", lambda spec, *_: looked.append(spec.revision) or Remote((), lambda _: b"", spec.revision))
    place.trust("4" * 40)

    assert await Cluster(config, {}).models.unusable(config.models["m"]) is None
    assert looked == ["4" * 40]


def test_plans_layers_and_exports_read_the_trusted_commit(place: Place) -> None:
    config = place.config()
    _, checkpoint, entry = checkpoint_here("m", config.models["m"], None, config)
    assert Path(checkpoint.folder).name == FIRST
    assert entry is not None and entry.spec.revision == FIRST
    assert named_model("m", place.file, {}, list).revision == FIRST
    assert Path(chosen("m", "nvfp4", config, {}).folder).name == FIRST


def test_check_reads_the_trusted_commit_and_names_code_of_another_repository(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    def problems() -> dict[str, str]:
        exit_code(["check", "--json", str(place.file)])
        told = json.loads(capsys.readouterr().out)
        # Parsers are told of a configuration that can be used.
        assert not told["ok"] or told["parsers"]["m"]["tool"]["name"] == PARSER
        return {problem["message"].partition(": ")[0]: problem["message"] for problem in told["problems"]}

    place.config()
    assert problems() == {}
    place.has(FIRST, template=TOOLS, max_position_embeddings=8192, auto_map={"AutoModel": "other/code--its.Model"})
    assert "--code-revision" in problems()["models.m.trust_remote_code"]


# `sparkd plan NAME`


def planned(place: Place, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = exit_code(["plan", "--quick", "--json", "m", "--config", str(place.file), "--hardware", "spark"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


def test_a_plan_shows_the_commit_of_its_start(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.config()
    code, plan = planned(place, capsys)
    command = plan["choice"]["ranks"][0]["command"]
    assert (code, command[command.index("--revision") + 1], command.count("--code-revision")) == (0, FIRST, 1)


def test_a_plan_refuses_the_code_that_a_start_refuses(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.config()
    place.has(FIRST, template=TOOLS, max_position_embeddings=8192, auto_map={"AutoModel": "other/code--its.Model"})
    code, answer = planned(place, capsys)
    assert code == 2
    assert "--code-revision" in answer["error"]["message"] and "other/code" in answer["error"]["message"]


def test_a_plan_says_that_the_commits_cannot_be_known_here(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.config(max_model_len=None)
    (place.state / FILE).unlink()
    (place.state / FILE).mkdir()
    code, plan = planned(place, capsys)
    assert code == 0
    assert any(FILE in note for note in plan["notes"])


def test_a_plan_of_a_model_that_is_nowhere_asks_the_hub_for_its_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place.config(model="owner/absent", max_model_len=None)
    files = {"config.json": json.dumps({"auto_map": {"AutoModel": "other/code--its.Model"}}).encode()}
    remote = Remote(tuple(files), files.__getitem__, SECOND)
    monkeypatch.setattr(hub_check, "_asked", lambda *_: remote)
    entry = plan_for_entry.entry_of(config.models["m"], config)
    with pytest.raises(plan_for_entry.ConfigError, match="other/code"):
        plan_for_entry._pinned(entry.spec, entry)
    files["config.json"] = b"{}"
    remote.kept.clear()
    assert plan_for_entry._pinned(entry.spec, entry)[0].revision == SECOND


# `sparkd pull NAME`


def staged(node: str, model: str, revision: str | None, places: Mapping[str, str]) -> dict[str, Any] | None:
    there = manifest.manifest_of(model, revision, places)
    return there.to_dict() if there else None


@pytest.mark.parametrize("moved", [True, False])
async def test_a_pull_brings_the_trusted_commit_and_says_where_the_branch_is(
    moved: bool, hub: Repository, environ: dict[str, str], tmp_path: Path
) -> None:
    env = environ | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    models = {"hub": {"model": "owner/name", "trust_remote_code": True}}
    if moved:
        hub.heads["main"] = SECOND
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_text(json.dumps({"owner/name@main": COMMIT}))
    async with scene(tmp_path, **{"engine.env": env, "models": models}) as made:
        made.nodes.said["staged"] = staged
        ended = await made.ended(made.pulls.start("hub", [A]))

    assert ended.state is OperationState.SUCCEEDED, ended.message
    snapshots = Path(environ["HF_HOME"], "hub", "models--owner--name", "snapshots")
    assert os.listdir(snapshots) == [COMMIT]
    assert (SECOND in ended.message, COMMIT in ended.message) == (moved, moved)


async def test_a_pull_by_a_revision_brings_that(hub: Repository, environ: dict[str, str], tmp_path: Path) -> None:
    models = {"hub": {"model": "owner/name", "trust_remote_code": True}}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_text(json.dumps({"owner/name@main": SECOND}))
    env = environ | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    async with scene(tmp_path, **{"engine.env": env, "models": models}) as made:
        made.nodes.said["staged"] = staged
        await made.ended(made.pulls.start("hub", [A], "v2"))

    assert [request.path for request in hub.asked if "/revision/" in request.path] == ["/api/models/owner/name/revision/v2"]
