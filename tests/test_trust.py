"""sparkd/trust.py: code of a repository runs at the commit of its first start, whatever its branch leads to later."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from sparkd import hub_model
from sparkd.config import ModelConfig, load_config, parse_model
from sparkd.errors import LoadRefused
from sparkd.hub_model import Remote, look, looked_at, note_commit
from sparkd.needs import need_of
from sparkd.trust import FILE, pinned, remember
from tests.test_siting import Runtime

FIRST, SECOND = "1" * 40, "2" * 40


class Place:
    """A hub cache with one repository, and a state folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = tmp_path / "state"
        self.state.mkdir()
        self.cache = tmp_path / "cache"
        self.env = {"HF_HUB_CACHE": str(self.cache)}

    def has(self, commit: str, ref: str = "main", **config: Any) -> None:
        """The files of a commit, to which the ref leads."""
        folder = self.cache / "models--owner--name"
        (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "odd"} | config))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)

    def pinned(self, spec: ModelConfig) -> ModelConfig:
        return pinned(spec, self.env, self.state)

    def start(self, spec: ModelConfig) -> tuple[str | None, str | None]:
        """The commit that an engine is started with, and what the operator is told."""
        decided = self.pinned(spec)
        return decided.revision, remember(spec, decided, self.env, self.state)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def entry(*, trust: bool = True, **keys: Any) -> ModelConfig:
    return parse_model("m", {"model": "owner/name", "trust_remote_code": trust, **keys}, over_admin=False)


def test_the_commit_of_the_first_start_is_the_revision_of_code_and_tokenizer_too(place: Place) -> None:
    place.has(FIRST)
    flags = place.pinned(entry(extra_args=["--seed", "1"])).vllm_flags()

    pairs = {flag: value for flag, value in itertools.pairwise(flags) if flag.startswith("--")}
    assert {name: pairs[name] for name in ("--revision", "--code-revision", "--tokenizer-revision")} == {
        "--revision": FIRST,
        "--code-revision": FIRST,
        "--tokenizer-revision": FIRST,
    }
    assert pairs["--seed"] == "1"


def test_the_commit_of_files_that_only_another_node_has_is_known(place: Place) -> None:
    note_commit(entry(), place.env, SECOND)
    assert place.start(entry()) == (SECOND, None)


def test_what_the_hub_showed_is_found_by_the_commit_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsers are chosen for the entry at its commit."""
    remote = Remote(("config.json",), lambda name: b"{}", FIRST)
    monkeypatch.setattr(hub_model, "_asked", lambda spec, env, near: remote)
    assert look(entry(), place.env) is remote
    decided = place.pinned(entry())
    assert (decided.revision, looked_at(decided, place.env)) == (FIRST, remote)


def test_a_branch_that_moved_is_told_and_not_followed(place: Place) -> None:
    place.has(FIRST)
    assert place.start(entry()) == (FIRST, None)
    place.has(SECOND)

    revision, message = place.start(entry())

    assert revision == FIRST
    assert message is not None and FIRST in message and f"revision: {SECOND}" in message
    assert place.start(entry(revision=SECOND)) == (SECOND, None)
    assert place.start(entry()) == (FIRST, message)


def test_a_branch_and_a_tag_are_pinned_each_by_its_name(place: Place) -> None:
    place.has(FIRST, "v1")
    place.has(SECOND)

    assert place.start(entry(revision="v1")) == (FIRST, None)
    assert place.start(entry()) == (SECOND, None)
    flagged = place.pinned(entry(extra_args=["--revision", "v1"]))
    assert (flagged.revision, flagged.vllm_flags()[-6:-4]) == (FIRST, ["--revision", FIRST])
    assert json.loads((place.state / FILE).read_text()) == {"owner/name@main": SECOND, "owner/name@v1": FIRST}


def test_nothing_is_written_before_a_start_and_the_file_is_private(place: Place) -> None:
    place.has(FIRST)
    place.pinned(entry())
    assert list(place.state.iterdir()) == []
    place.start(entry())
    assert [path.name for path in place.state.iterdir()] == [FILE]
    assert (place.state / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "spec",
    [entry(trust=False), parse_model("m", {"model": "/folder", "trust_remote_code": True}, over_admin=False)],
    ids=["no code", "a folder"],
)
def test_other_entries_are_left_as_they_are(spec: ModelConfig, place: Place) -> None:
    place.has(FIRST)
    assert place.pinned(spec) is spec
    assert remember(spec, spec, place.env, place.state) is None
    assert list(place.state.iterdir()) == []


def test_another_hub_is_left_alone(place: Place) -> None:
    spec = entry()
    assert pinned(spec, place.env | {"VLLM_USE_MODELSCOPE": "1"}, place.state) is spec


def test_a_commit_that_nobody_knows_is_refused_and_the_hub_may_tell_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadRefused, match="sparkd pull m"):
        place.pinned(entry())
    assert place.pinned(entry(revision=SECOND)).revision == SECOND

    monkeypatch.setattr(hub_model, "_asked", lambda *_: Remote(("config.json",), lambda _: b"{}", FIRST))
    look(entry(), place.env)
    assert place.pinned(entry()).revision == FIRST


def test_code_of_another_repository_needs_a_commit_of_its_own(place: Place) -> None:
    place.has(FIRST, auto_map={"AutoConfig": "owner/name--own.Config", "AutoModel": "other/code--its.Model"})

    with pytest.raises(LoadRefused, match=r"lies in other/code.*--code-revision"):
        place.pinned(entry())
    flags = place.pinned(entry(extra_args=["--code-revision", SECOND])).vllm_flags()
    assert flags.count("--code-revision") == 1
    with pytest.raises(LoadRefused, match="--tokenizer-revision"):
        place.pinned(entry(extra_args=["--code-revision", SECOND, "--tokenizer", "other/tokenizer"]))


@pytest.mark.parametrize("text", ["{", "[]", '{"owner/name@main": "main"}', '{"owner/name@main": 1}'])
def test_a_damaged_file_is_refused_and_a_commit_in_the_entry_needs_none(text: str, place: Place) -> None:
    place.has(FIRST)
    (place.state / FILE).write_text(text)

    with pytest.raises(LoadRefused, match="cannot be used"):
        place.pinned(entry())
    assert place.start(entry(revision=FIRST)) == (FIRST, None)


def test_a_placement_has_the_pinned_entry(place: Place) -> None:
    place.has(FIRST)
    config = load_config(None, flags={"state_dir": str(place.state), "engine.platform": "cpu"}, environ={})

    need = need_of(entry(env=place.env), config, Runtime(), 20.0, 20.0)

    assert need.spec.revision == FIRST
    assert need.spec.extra_args[-4:] == ["--code-revision", FIRST, "--tokenizer-revision", FIRST]
