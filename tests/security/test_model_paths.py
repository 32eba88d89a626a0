"""A model's path never shows which files the machine has: outside the folders of models every refusal has the same words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.capacity import plan_for_node
from sparkd.checkpoint.model_folder import unusable
from sparkd.config.config import load_config
from sparkd.errors import ModelUnusable
from tests.sparkd.admin.test_app import Admin, admin_of
from tests.sparkd.capacity.test_account import facts
from tests.support.accounts import requirement


def _absent(path: Path) -> None:
    pass


def _empty(path: Path) -> None:
    path.mkdir()


def _other_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("x")


def _file(path: Path) -> None:
    path.write_text("x")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


KINDS = [_absent, _empty, _other_files, _file, _loop, _pipe]


@pytest.fixture(autouse=True)
def _plans_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals are the same as in a process of their own, whose start takes half a second each time."""
    monkeypatch.setattr(plan_for_node, "_answer_of_process", plan_for_node._answer)


async def told(made: Admin, path: str) -> set[tuple[int, str]]:
    """The answer of each route that takes a path, without the path."""
    found = set()
    for route, body in (("/plan", {"model": path}), ("/models", {"name": "new", "spec": {"model": path}})):
        response = await made.client.post(f"/admin/v1{route}", json=body)
        found.add((response.status_code, response.json()["error"]["message"].replace(path, "PATH").removeprefix("new was not added: ")))
    return found


@pytest.mark.parametrize("make", KINDS)
async def test_what_is_no_models_folder_is_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "elsewhere" / "x"
    make(path)
    async with admin_of(tmp_path / "models") as made:

        async def look(spec: object) -> ModelUnusable | None:
            config = made.scene.config
            return unusable(spec.model, vllm=True, places=config.model_places())  # type: ignore[attr-defined]

        monkeypatch.setattr(made.scene.cluster, "unusable", look)
        expected = await told(made, "/no/such/folder")
        assert await told(made, str(path)) == expected
        assert await told(made, f"{path}/deeper") == expected
        assert len(expected) == 1 and {status for status, _ in expected} == {422}
        # Beside a model of the file the reason helps its owner.
        assert "not on this node" in next(iter(await told(made, str(tmp_path / "models" / "x"))))[1]


def test_an_added_model_that_is_loaded_later_fails_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    config = load_config(None, flags={"models": {"m": {"model": str(tmp_path / "models" / "m")}}}, environ={})
    words = set()
    for number, make in enumerate(KINDS):
        path = tmp_path / str(number)
        make(path)
        spec = config.models["m"].model_copy(update={"model": str(path)})
        with pytest.raises(ModelUnusable) as refused:
            requirement(spec, config, facts("e"), 1.0, 1.0)
        words.add(refused.value.message.replace(str(path), "PATH"))
    assert len(words) == 1


@pytest.mark.parametrize(
    "model",
    ["a" * 300, "~no-such-user-here", "~root/x", "../x", "/\0x", "/a" * 1500, "file:///etc", "etc/ssl"],
)  # fmt: skip
async def test_no_name_of_a_model_is_an_error_of_ours_and_none_leads_to_a_folder_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Before: 500 for 300 letters and for ~ of nobody; `etc/ssl` was a folder where the daemon's working directory is /."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir("/")
    async with admin_of(tmp_path) as made:
        # A bare name is one that the daemon does not know.
        is_name = "/" not in model and not model.startswith("~")
        error = await made.refused("POST", "/plan", 404 if is_name else 422, json={"model": model})
        assert error["code"] in (("model_not_found",) if is_name else ("invalid_config", "checkpoint_unusable"))
        for private in (str(Path.home()), os.getcwd() + "x", "config.json"):
            assert private not in error["message"].replace(model, "")
