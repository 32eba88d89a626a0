"""sparkd/config/hub_check.py and what placement makes of it: a hub id that nobody has is refused before an engine starts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sparkd.config import hub_check
from sparkd.config.config import ModelConfig, parse_model
from sparkd.config.hub_check import KEPT_S, is_absent, look, looked_at
from sparkd.config.parser_choice import with_parsers
from sparkd.errors import AgentLost, HubUnreachable, ModelUnusable
from sparkd.vllm.parsers import Parsers
from tests.sparkd.cluster.test_placer import A, B, Scene
from tests.support.hub_server import COMMIT, Repository, serving
from tests.support.waiting import HUNG_S, eventually

TEMPLATE = "{{ tools }}<tool_call>{'name', 'arguments'}"
GONE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # huggingface_hub reads the variable once, at its import: perhaps in a test that had set it.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_check._answers.clear()
    yield
    hub_check._answers.clear()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(Repository(folder)) as made:
        yield made


def spec_of(tmp_path: Path, hub: str, model: str = "owner/name", **keys: Any) -> ModelConfig:
    env = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": str(tmp_path / "cache"), **keys.pop("env", {})}
    return parse_model("m", {"model": model, "env": env, **keys}, over_admin=False)


def env_of(spec: ModelConfig) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in spec.env.items()}


def cached(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--owner--name"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


async def absent(scene: Scene, spec: ModelConfig) -> None:
    await scene.placer.refuse_absent(spec)


async def test_a_mistyped_id_is_refused(tmp_path: Path, repository: Repository) -> None:
    scene = Scene(tmp_path, {A: 20.0})
    with pytest.raises(ModelUnusable) as caught:
        await absent(scene, spec_of(tmp_path, repository.hub, "owner/nam"))
    assert "owner/nam" in caught.value.message and "127.0.0.1" in caught.value.message
    with pytest.raises(ModelUnusable):
        await scene.placer.place(spec_of(tmp_path, repository.hub, "owner/nam"))
    assert scene.reservations.book().held == {}


@pytest.mark.parametrize(
    "refusal",
    [(401, {}), (403, {"X-Error-Code": "GatedRepo"}), (404, {"X-Error-Code": "RevisionNotFound"})],
)
async def test_what_the_hub_says_for_certain_is_its_owners_to_mend(tmp_path: Path, repository: Repository, refusal: Any) -> None:
    repository.refusals["/revision/main"] = [refusal]
    with pytest.raises(ModelUnusable):
        await absent(Scene(tmp_path, {A: 20.0}), spec_of(tmp_path, repository.hub))


async def test_offline_without_the_model_is_refused_without_asking(tmp_path: Path, repository: Repository) -> None:
    with pytest.raises(ModelUnusable):
        await absent(Scene(tmp_path, {A: 20.0}), spec_of(tmp_path, repository.hub, env={"HF_HUB_OFFLINE": "1"}))
    assert repository.asked == []


async def test_a_hub_that_does_not_answer_is_named_and_may_answer_later(tmp_path: Path, repository: Repository) -> None:
    scene = Scene(tmp_path, {A: 20.0})
    with pytest.raises(HubUnreachable) as caught:
        await absent(scene, spec_of(tmp_path, GONE))
    assert "this machine" in caught.value.message and caught.value.message.count("owner/name") == 1
    with pytest.raises(HubUnreachable) as again:
        await absent(scene, spec_of(tmp_path, GONE))
    assert again.value is not caught.value, "each client has an error of its own"
    repository.refusals["/revision/main"] = [(503, {})]
    with pytest.raises(HubUnreachable):
        await absent(scene, spec_of(tmp_path, repository.hub))


async def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path, repository: Repository) -> None:
    cached(tmp_path)
    await absent(Scene(tmp_path, {A: 20.0}), spec_of(tmp_path, GONE))
    await absent(Scene(tmp_path, {A: 20.0}), spec_of(tmp_path, repository.hub))
    assert repository.asked == []


async def test_what_vllm_does_not_take_from_this_hub_is_its_own_affair(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0})
    await absent(scene, spec_of(tmp_path, GONE, str(tmp_path)))
    await absent(scene, spec_of(tmp_path, GONE, entrypoint="tests.stub"))
    await absent(scene, spec_of(tmp_path, GONE, env={"VLLM_USE_MODELSCOPE": "True"}))


class Agents:
    """Each node's report of the model files that it has."""

    def __init__(self, scene: Scene, **staged: Mapping[str, Any] | None) -> None:
        self.staged = staged
        scene.link.call = self.call  # type: ignore[method-assign]

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if "silent" in self.staged:
            raise AgentLost("It is away.")
        return self.staged["other"]


async def test_another_node_may_have_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})
    Agents(scene, other={"files": [{"path": "config.json"}]})
    await absent(scene, spec_of(tmp_path, GONE))
    for said in ({"other": None}, {"other": {"files": []}}, {"silent": None}):
        Agents(scene, **said)
        with pytest.raises(HubUnreachable):
            await absent(scene, spec_of(tmp_path, GONE))


def test_the_hub_is_asked_once_for_a_while(tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(hub_check.time, "monotonic", lambda: now[0])
    spec = spec_of(tmp_path, repository.hub)
    assert is_absent(spec, env_of(spec))
    for _ in range(3):
        assert set(look(spec, env_of(spec)).names) == {"config.json", "chat_template.jinja"}
    assert len(repository.asked) == 1
    now[0] = KEPT_S + 1
    look(spec, env_of(spec))
    assert len(repository.asked) == 2
    look(spec, env_of(spec) | {"HF_TOKEN": "another"})
    assert len(repository.asked) == 3


async def test_a_hub_that_hangs_takes_no_thread_of_the_event_loop(tmp_path: Path, repository: Repository) -> None:
    scene = Scene(tmp_path, {A: 20.0})
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    answers = repository.held["/revision/main"] = threading.Event()
    specs = [spec_of(tmp_path, repository.hub, f"owner/name{number}") for number in range(3)]
    asking = [asyncio.create_task(absent(scene, spec)) for spec in specs]
    try:
        await eventually(lambda: repository.asked)

        async with asyncio.timeout(HUNG_S):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        answers.set()
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, ModelUnusable)


def test_the_parsers_of_a_model_that_is_still_on_the_hub(tmp_path: Path, repository: Repository) -> None:
    spec = spec_of(tmp_path, repository.hub)
    env = env_of(spec)
    assert with_parsers(spec, env)[1] == Parsers()
    assert repository.asked == []
    look(spec, env)
    assert with_parsers(spec, env)[1] == Parsers("hermes")
    asked = len(repository.asked)
    assert with_parsers(spec, env)[0].tool_call_parser == "hermes"
    assert len(repository.asked) == asked
    assert looked_at(spec, env) is not None
