"""sparkd/entry/trusted_commits.py: code of a repository runs at the commit of its first start, whatever its branch leads to later."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.config import ModelConfig, load_config, parse_model
from sparkd.entry import hub_check
from sparkd.entry.hub_check import Remote, look, note_commit
from sparkd.entry.trusted_commits import FILE, at_trusted_commit, commits_of, pinned, refusal, remember
from sparkd.errors import CommitUnknown, LoadRefused
from workers.host.trusted_code import Commits

FIRST, SECOND = "1" * 40, "2" * 40
DRAFT, ITS = "other/draft", "3" * 40


class Place:
    """A hub cache with one repository, and a state folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = tmp_path / "state"
        self.state.mkdir()
        self.cache = tmp_path / "cache"
        self.env = {"HF_HUB_CACHE": str(self.cache)}
        self.config = load_config(None, flags={"state_dir": str(self.state), "engine.env": self.env}, environ={})

    def has(self, commit: str, ref: str = "main", hub_id: str = "owner/name", file: str = "config.json", **config: Any) -> None:
        """The files of a commit, to which the ref leads."""
        folder = self.cache / f"models--{hub_id.replace('/', '--')}"
        (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / commit / file).write_text(json.dumps({"model_type": "odd"} | config))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)

    def pinned(self, spec: ModelConfig) -> ModelConfig:
        return pinned(spec, self.config)

    def start(self, spec: ModelConfig) -> tuple[str | None, tuple[str, ...]]:
        """The commit that an engine is started with, and the messages for the operator."""
        decided = self.pinned(spec)
        return decided.revision, tuple(remember(spec, decided, self.config))

    def table(self) -> dict[str, str]:
        return dict(json.loads((self.state / FILE).read_text()))


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
    assert place.start(entry()) == (SECOND, ())


def test_a_branch_that_moved_is_told_and_not_followed(place: Place) -> None:
    place.has(FIRST)
    assert place.start(entry()) == (FIRST, ())
    place.has(SECOND)

    revision, messages = place.start(entry())

    assert (revision, len(messages)) == (FIRST, 1)
    assert FIRST in messages[0] and SECOND in messages[0]
    assert place.start(entry(revision=SECOND)) == (SECOND, ())
    assert place.start(entry()) == (FIRST, messages)


def test_whoever_reads_the_files_reads_those_of_the_trusted_commit(place: Place) -> None:
    place.has(FIRST)
    assert at_trusted_commit(entry(), place.config) == entry()
    place.start(entry())
    place.has(SECOND)

    assert at_trusted_commit(entry(), place.config).revision == FIRST
    flagged = at_trusted_commit(entry(extra_args=["--revision", "main"]), place.config)
    assert (flagged.revision, flagged.extra_args) == (FIRST, ["--revision", "main", "--revision", FIRST])
    assert at_trusted_commit(flagged, place.config) == flagged
    assert at_trusted_commit(entry(trust=False), place.config).revision is None
    (place.state / FILE).write_text("{")
    assert at_trusted_commit(entry(), place.config) == entry(), "a start refuses it"


def test_a_branch_and_a_tag_are_pinned_each_by_its_name(place: Place) -> None:
    place.has(FIRST, "v1")
    place.has(SECOND)

    assert place.start(entry(revision="v1")) == (FIRST, ())
    assert place.start(entry()) == (SECOND, ())
    flagged = place.pinned(entry(extra_args=["--revision", "v1"]))
    assert (flagged.revision, flagged.vllm_flags()[-6:-4]) == (FIRST, ["--revision", FIRST])
    assert place.table() == {"owner/name@main": SECOND, "owner/name@v1": FIRST}


def test_nothing_is_written_before_a_start_and_the_file_is_private(place: Place) -> None:
    place.has(FIRST)
    place.pinned(entry())
    assert list(place.state.iterdir()) == []
    place.start(entry())
    (file,) = place.state.iterdir()
    assert file.name == FILE and file.stat().st_mode & 0o077 == 0


def test_other_entries_are_left_as_they_are(place: Place) -> None:
    place.has(FIRST)
    folder = parse_model("m", {"model": "/folder", "trust_remote_code": True}, over_admin=False)
    for spec in (entry(trust=False), folder, entry(env={"VLLM_USE_MODELSCOPE": "1"})):
        assert place.pinned(spec) is spec
        assert remember(spec, spec, place.config) == ()
    assert list(place.state.iterdir()) == []


def test_a_commit_that_nobody_knows_is_refused_and_the_hub_may_tell_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommitUnknown, match="sparkd pull m"):
        place.pinned(entry())
    assert refusal(entry(), place.config) is None, "the hub may know it"
    assert place.pinned(entry(revision=SECOND)).revision == SECOND

    monkeypatch.setattr(hub_check, "_asked", lambda *_: Remote(("config.json",), lambda _: b"{}", FIRST))
    look(entry(), place.env)
    assert place.pinned(entry()).revision == FIRST


def test_code_of_another_repository_needs_a_commit_of_its_own(place: Place) -> None:
    place.has(FIRST, auto_map={"AutoConfig": "owner/name--own.Config", "AutoModel": "other/code--its.Model"})

    with pytest.raises(LoadRefused, match=r"other/code.*--code-revision"):
        place.pinned(entry())
    flags = place.pinned(entry(extra_args=["--code-revision", SECOND])).vllm_flags()
    assert flags.count("--code-revision") == 1
    reason = refusal(entry(), place.config)
    assert reason is not None and "other/code" in reason and "--code-revision" in reason
    with pytest.raises(LoadRefused, match="--tokenizer-revision"):
        place.pinned(entry(extra_args=["--code-revision", SECOND, "--tokenizer", "other/tokenizer"]))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "processor_config.json"])
def test_every_file_that_names_code_counts(file: str, place: Place) -> None:
    place.has(FIRST, file=file, auto_map={"AutoTokenizer": [None, "other/code--its.Tokenizer"]})
    with pytest.raises(LoadRefused, match="other/code"):
        place.pinned(entry())


def test_a_damaged_file_is_refused_and_a_commit_in_the_entry_needs_none(place: Place) -> None:
    place.has(FIRST)
    (place.state / FILE).write_text("{")

    with pytest.raises(LoadRefused, match=re.escape(str(place.state / FILE))):
        place.pinned(entry())
    assert place.start(entry(revision=FIRST)) == (FIRST, ())


def test_a_branch_in_place_of_a_commit_is_refused_by_its_flag(place: Place) -> None:
    place.has(FIRST)
    for flag in ("--code-revision", "--tokenizer-revision"):
        with pytest.raises(LoadRefused, match=rf"{flag} main"):
            place.pinned(entry(extra_args=[flag, "main"]))


def test_an_engine_is_held_to_the_commits_of_all_its_repositories(place: Place) -> None:
    place.has(FIRST)
    place.has(ITS, hub_id=DRAFT)

    def commits(*args: str) -> Commits | None:
        return commits_of(place.pinned(entry(extra_args=args)))

    assert commits() == Commits({"owner/name": [FIRST]})
    assert commits("--code-revision", SECOND) == Commits({"owner/name": [FIRST, SECOND]}, [SECOND])
    tokenizer = ["--tokenizer", "other/tokenizer", "--tokenizer-revision", SECOND]
    assert commits(*tokenizer) == Commits({"owner/name": [FIRST], "other/tokenizer": [SECOND]})
    assert commits(*drafting()) == Commits({"owner/name": [FIRST], DRAFT: [ITS]})
    assert commits(*drafting(code_revision=SECOND)) == Commits({"owner/name": [FIRST], DRAFT: [ITS, SECOND]}, [SECOND])
    assert commits_of(entry()) is None, "not pinned"
    assert commits_of(place.pinned(entry(trust=False, revision=FIRST))) is None


# Drafts


def drafting(**config: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3} | config)]


def speculation(spec: ModelConfig) -> dict[str, Any]:
    return dict(json.loads(spec.extra_args[spec.extra_args.index("--speculative-config") + 1]))


def test_a_draft_is_pinned_to_the_commit_of_the_first_start_too(place: Place) -> None:
    place.has(FIRST)
    place.has(ITS, hub_id=DRAFT)
    spec = entry(extra_args=drafting())
    assert place.start(spec) == (FIRST, ())
    assert place.table() == {"owner/name@main": FIRST, f"{DRAFT}@main": ITS}
    place.has("4" * 40, hub_id=DRAFT)

    decided = place.pinned(spec)
    revision, messages = place.start(spec)

    assert speculation(decided) == {
        "method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3, "revision": ITS, "code_revision": ITS,
    }  # fmt: skip
    assert revision == FIRST
    assert len(messages) == 1 and DRAFT in messages[0] and "4" * 40 in messages[0]


def test_a_draft_without_a_commit_is_refused_with_its_key(place: Place) -> None:
    place.has(FIRST)
    with pytest.raises(LoadRefused, match=rf"{DRAFT}.*`revision` in --speculative-config"):
        place.pinned(entry(extra_args=drafting()))
    place.has(ITS, hub_id=DRAFT, auto_map={"AutoModel": "third/code--its.Model"})
    with pytest.raises(LoadRefused, match=r"third/code.*`code_revision` in --speculative-config"):
        place.pinned(entry(extra_args=drafting()))
    assert speculation(place.pinned(entry(extra_args=drafting(code_revision=SECOND))))["revision"] == ITS
    with pytest.raises(LoadRefused, match="code_revision main"):
        place.pinned(entry(extra_args=drafting(code_revision="main")))


def test_the_layers_of_the_model_itself_draft_at_its_commit(place: Place) -> None:
    """vLLM would take them, and the code with them, from the head of the branch."""
    place.has(FIRST, "v1")
    args = ["--speculative-config", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}']
    decided = place.pinned(entry(revision="v1", extra_args=args))
    assert (speculation(decided)["revision"], speculation(decided)["code_revision"]) == (FIRST, FIRST)


@pytest.mark.parametrize("args", [["--spec-model", DRAFT]])
def test_another_spelling_of_a_draft_is_refused_by_name(args: list[str], place: Place) -> None:
    place.has(FIRST)
    with pytest.raises(LoadRefused, match=args[0]):
        place.pinned(entry(extra_args=args))
    assert list(place.pinned(entry(trust=False, extra_args=args)).extra_args) == args
