"""Code of a repository runs at the commit that the entry names, and at no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkd.config import hub_check
from sparkd.config.config import ModelConfig, load_config, parse_model
from sparkd.config.hub_check import Remote, look
from sparkd.config.trusted_commits import commits_of, pinned, refusal
from sparkd.errors import LoadRefused
from workers.host.trusted_code import Commits

FIRST, SECOND = "1" * 40, "2" * 40
DRAFT, ITS = "other/draft", "3" * 40
OWN_LAYERS = ["--speculative-config", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}']


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    hub_check._answers.clear()
    yield
    hub_check._answers.clear()


class Place:
    """A hub cache."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "cache"
        self.env = {"HF_HUB_CACHE": str(self.cache)}
        self.config = load_config(None, flags={"state_dir": str(tmp_path), "engine.env": self.env}, environ={})

    def has(self, commit: str, hub_id: str = "owner/name") -> None:
        folder = self.cache / f"models--{hub_id.replace('/', '--')}"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)

    def refusal(self, **keys: Any) -> str | None:
        return refusal(entry(**keys), self.config)

    def commits(self, *args: str) -> Commits | None:
        return commits_of(pinned(entry(revision=FIRST, extra_args=args), self.config))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def entry(*, trust: bool = True, model: str = "owner/name", **keys: Any) -> ModelConfig:
    return parse_model("m", {"model": model, "trust_remote_code": trust, **keys}, over_admin=False)


def drafting(**config: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3} | config)]


@pytest.mark.parametrize("revision", [None, "main", "1" * 39, "g" * 40])
def test_trusted_code_needs_a_commit_as_its_revision(revision: str | None, place: Place) -> None:
    place.has(SECOND)
    with pytest.raises(LoadRefused, match="`revision`"):
        pinned(entry(revision=revision), place.config)
    assert place.refusal(revision=FIRST) is None
    assert place.refusal(extra_args=["--revision", FIRST]) is None
    assert place.refusal(extra_args=["--revision", "main"]) is not None


@pytest.mark.parametrize("words", [["main"], ["1" * 39], [], [SECOND, "main"]])
def test_a_code_revision_is_a_commit(words: list[str], place: Place) -> None:
    """It holds for other repositories too, whose branches their authors move."""
    reason = str(place.refusal(revision=FIRST, extra_args=["--code-revision", *words]))
    assert "--code-revision" in reason
    assert place.refusal(revision=FIRST, extra_args=["--code_revision", SECOND]) is None


def test_the_commit_to_copy_is_the_caches_or_the_hubs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sparkd pull" in str(place.refusal())
    monkeypatch.setattr(hub_check, "_asked", lambda *_: Remote(FIRST, ("config.json",), lambda _: b"{}"))
    look(entry(), place.env)
    assert FIRST in str(place.refusal())
    place.has(SECOND)
    assert SECOND in str(place.refusal())


def test_a_draft_needs_a_commit_of_its_own(place: Place) -> None:
    place.has(ITS, hub_id=DRAFT)
    reason = str(place.refusal(revision=FIRST, extra_args=drafting()))
    assert DRAFT in reason and ITS in reason and "--speculative-config" in reason
    assert place.refusal(revision=FIRST, extra_args=drafting(revision=ITS)) is None
    assert place.refusal(revision=FIRST, extra_args=drafting(model="ngram", method="ngram")) is None


def test_the_layers_of_the_model_itself_draft_at_its_commit(place: Place) -> None:
    """vLLM would take them, and the code with them, from the head of the branch."""
    decided = pinned(entry(revision=FIRST, extra_args=OWN_LAYERS), place.config)
    assert json.loads(decided.extra_args[-1]) == {"method": "deepseek_mtp", "num_speculative_tokens": 1, "revision": FIRST}


def test_an_entry_that_runs_no_code_of_a_hub_is_left_as_it_is(place: Place) -> None:
    for spec in (
        entry(trust=False, extra_args=OWN_LAYERS),
        entry(model="/folder"),
        entry(env={"VLLM_USE_MODELSCOPE": "1"}),
        entry(entrypoint="tests.stub"),
    ):
        assert pinned(spec, place.config) is spec


def test_an_engine_is_held_to_the_commits_of_its_repositories(place: Place) -> None:
    assert place.commits() == Commits({"owner/name": [FIRST]})
    assert place.commits("--code-revision", SECOND) == Commits({"owner/name": [FIRST, SECOND]}, [SECOND])
    assert place.commits(*drafting(revision=ITS)) == Commits({"owner/name": [FIRST], DRAFT: [ITS]})
    assert place.commits(*OWN_LAYERS) == Commits({"owner/name": [FIRST]})
    assert commits_of(entry(trust=False, revision=FIRST)) is None
