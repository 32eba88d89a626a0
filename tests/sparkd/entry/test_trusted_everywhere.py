"""Whoever reads the files of a model whose code is trusted reads those of the trusted commit: checks, plans, pulls, exports, starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity import planned_entry, requirement
from sparkd.capacity.account import machine
from sparkd.config.config import Config, load_config
from sparkd.entry.trusted_commits import FILE
from sparkd.hardware import SPARK
from sparkd.state.nouns import OperationState
from tests.sparkd.admin.test_pull import A, environ, hub, scene
from tests.sparkd.cluster.test_placer import Scene
from tests.support.checkpoints import mixture, write
from tests.support.hub_server import COMMIT, Repository
from tests.support.published_tensors import tensors_of
from workers.files import manifest
from workers.host.runtime import API_SERVER, Runtime

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
    monkeypatch.setattr(planned_entry, "probe", lambda _: Runtime("cpu", "0.32.0", API_SERVER))
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
    placement = await scene_of_a.siting.place(config.models["m"])
    assert placement.spec is not None and placement.spec.revision == SECOND


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


def test_a_plan_shows_the_commit_of_its_start_and_refuses_the_code_that_a_start_refuses(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "--quick", "--json", "m", "--config", str(place.file), "--hardware", "spark"]
    place.config()
    assert exit_code(plan) == 0
    command = json.loads(capsys.readouterr().out)["choice"]["ranks"][0]["command"]
    assert (command[command.index("--revision") + 1], command.count("--code-revision")) == (FIRST, 1)

    place.has(FIRST, template=TOOLS, max_position_embeddings=8192, auto_map={"AutoModel": "other/code--its.Model"})
    assert exit_code(plan) == 2
    assert "other/code" in "".join(capsys.readouterr())


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
