"""A read changes no state: everything that the daemon holds and stores is compared before and after each GET of the admin API."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.state.store import Store
from tests.sparkd.admin.test_app import TINY, Admin, admin_of
from tests.sparkd.control.test_supervisor import UP, make_ready
from tests.support.checkpoints import write_folder

# Members that a look itself writes: the fake's list of questions, and Python's own.
NOT_STATE = ("log", "__dict__", "__weakref__")


def picture(value: Any, seen: dict[int, int] | None = None) -> Any:
    """The content of an object of ours, to compare: members, their members and so on. A foreign object is its type's name."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | bytes | int | float | enum.Enum | Path):
        return value
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return {repr(key): picture(inner, seen) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [picture(inner, seen) for inner in value]
    if isinstance(value, Store):
        return list(value._db.iterdump())
    if not type(value).__module__.startswith(("sparkd.", "tests.")):
        return type(value).__name__
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())} | set(getattr(value, "__dict__", ()))
    return {name: picture(getattr(value, name, None), seen) for name in sorted(names - set(NOT_STATE))}


async def reads(made: Admin, operation: str) -> list[str]:
    """Every GET of the document, with names that are there."""
    document = await made.ask("GET", "/openapi.json")
    values = {"{name}": "m", "{operation_id}": operation, "{incident_id}": "20261122-000001-m"}
    paths = [path.removeprefix(ADMIN_ROOT) for path, item in document["paths"].items() if "get" in item]
    # Those of the page, and of the requests, read what the gateway keeps.
    paths = [path for path in paths if path not in ("/live", "/history", "/requests")]
    paths[paths.index("/entry")] = "/entry?source=m"
    paths[paths.index("/bench/subject")] = "/bench/subject?model=m"
    paths[paths.index("/bench/compare")] = "/bench/compare?a=20261122-000001-m&b=20261122-000002-m"
    for old, new in values.items():
        paths = [path.replace(old, new) if not path.startswith("/recipes") else path.replace("{name}", "none") for path in paths]
    return [*paths, "/events?after=1&limit=1", "/models/m/log?max_bytes=1", f"/operations/{operation}?wait_s=0.001"]


@pytest.mark.parametrize("moment", ["starting", "loading", "failed", "lost"])
async def test_no_get_changes_anything(tmp_path: Path, moment: str) -> None:
    async with admin_of(tmp_path) as made:
        scene = made.scene
        operation = (await made.ask("POST", "/models/m/load", 202))["operation"]
        scene.cluster.answers["incident"] = {"n": {"id": "20261122-000001-m"}}
        await scene.tick(2 if moment == "loading" else 1)
        if moment not in ("starting", "loading"):
            await make_ready(scene)
        if moment == "failed":
            scene.cluster.show(alive=False, exit_code=1)
            await scene.tick()
        if moment == "lost":
            scene.cluster.unseen = frozenset({"n"})
            await scene.tick()
        # The world goes on between two ticks.
        scene.clock.now_s += 3.0
        if scene.cluster.ranks and moment in ("starting", "loading"):
            for rank_id, fact in scene.cluster.ranks.items():
                scene.cluster.ranks[rank_id] = replace(fact, progress=UP, cpu_s=99.0, halted=True)
        paths = await reads(made, operation)

        answer = await made.ask("GET", "/models")
        before = picture((scene.supervisor, scene.cluster))
        for path in paths:
            response = await made.client.get(ADMIN_ROOT + path)
            assert response.status_code in (200, 404, 422, 503), response.text
            assert picture((scene.supervisor, scene.cluster)) == before, path
        assert await made.ask("GET", "/models") == answer


READ_VERBS = (
    ["check", "CONFIG"],
    ["version"],
    ["plan", "--quick", "MODEL", "--config", "CONFIG", "--hardware", "spark"],
    ["recipes", "ls"],
    ["ls", "--cached"],
    ["ps"],
    ["status"],
    ["incidents", "ls"],
)


def test_no_verb_that_reads_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if no daemon answers. The user's cache may keep the answers of an interpreter."""
    for name in ("home", "work", "state"):
        (tmp_path / name).mkdir()
    model = write_folder(tmp_path / "tiny", {"model.safetensors": {"model.embed_tokens.weight": ("BF16", (64, 64))}}, TINY)
    config = tmp_path / "sparkd.yaml"
    config.write_text(f"state_dir: {tmp_path}/state\nmodels: {{m: {{model: {model}}}}}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setenv("SPARKD_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path / "work")

    def files() -> dict[str, int]:
        found = [path for path in tmp_path.rglob("*") if ".cache" not in path.parts]
        return {str(path): path.stat().st_mtime_ns for path in found}

    before = files()
    for words in READ_VERBS:
        code = exit_code([{"CONFIG": str(config), "MODEL": str(model)}.get(word, word) for word in words])
        assert code in (0, 7), (words, capsys.readouterr())
        assert files() == before, words
