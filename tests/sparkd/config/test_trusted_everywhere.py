"""A check, a plan and a start refuse code that an entry trusts at no commit, and go on with one that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity import placed_entry, planned_entry
from sparkd.config.config import Config, load_config
from sparkd.errors import LoadRefused
from sparkd.hardware import SPARK, machine
from tests.sparkd.cluster.test_placer import Scene
from tests.support.checkpoints import mixture, write
from tests.support.published_tensors import tensors_of
from workers.host.runtime import API_SERVER, Runtime

COMMIT = "1" * 40


class Place:
    """A hub cache with one commit of `owner/name`, to which the branch leads."""

    def __init__(self, tmp_path: Path) -> None:
        self.state, self.cache = tmp_path / "state", tmp_path / "cache"
        self.state.mkdir()
        self.file = tmp_path / "sparkd.yaml"
        folder, shape = self.cache / "models--owner--name", mixture(max_position_embeddings=8192)
        write(folder / "snapshots" / COMMIT, shape, tensors_of(shape))
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)

    def config(self, **keys: Any) -> Config:
        entry = {"model": "owner/name", "trust_remote_code": True, "max_model_len": 4096, **keys}
        engine = {"platform": "cpu", "env": {"HF_HUB_CACHE": str(self.cache)}}
        self.file.write_text(json.dumps({"state_dir": str(self.state), "engine": engine, "models": {"m": entry}}))
        return load_config(self.file, environ={}).model_copy(update={"runtime_dir": self.file.with_name("run")})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(placed_entry, "this_node", lambda platform: machine(platform, SPARK.memory_bytes, SPARK.system_bytes))
    monkeypatch.setattr(planned_entry, "probe", lambda _: Runtime("cpu", "0.32.0", API_SERVER))
    monkeypatch.delenv("SPARKD_CONFIG", raising=False)
    return Place(tmp_path)


async def test_a_start_refuses_a_branch_and_takes_a_commit(place: Place, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"10.0.0.1": 60})
    scene.config = place.config()
    with pytest.raises(LoadRefused, match=COMMIT):
        await scene.placer.place(scene.config.models["m"])
    assert scene.reservations.book().held == {}

    scene.config = place.config(revision=COMMIT)
    placement = await scene.placer.place(scene.config.models["m"])
    assert placement.spec is not None and placement.spec.revision == COMMIT


def test_a_check_prints_the_commit_to_copy(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    def problems() -> dict[str, str]:
        exit_code(["check", "--json", str(place.file)])
        found = json.loads(capsys.readouterr().out)["problems"]
        return {problem["message"].partition(": ")[0]: problem["message"] for problem in found}

    place.config()
    assert COMMIT in problems()["models.m.trust_remote_code"]
    place.config(revision=COMMIT)
    assert problems() == {}


def test_a_plan_refuses_a_branch_and_shows_the_commit_of_a_start(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--quick", "--json", "m", "--config", str(place.file), "--hardware", "spark"]
    place.config()
    assert exit_code(plan) == 2
    assert COMMIT in "".join(capsys.readouterr())

    place.config(revision=COMMIT)
    assert exit_code(plan) == 0
    command = json.loads(capsys.readouterr().out)["choice"]["ranks"][0]["command"]
    assert command[command.index("--revision") + 1] == COMMIT
