"""Registries of recipes: real git repositories, what of them is taken, what is refused, and that nothing of them is ever run."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli import recipes
from sparkd.config.config import load_config, parse_model
from sparkd.errors import ConfigError, SparkdError
from sparkd.recipes import clone
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.recipes.registry import Registries, Registry
from tests.sparkd.recipes.test_importer import ONE, TWO, parser_of_the_fixture
from tests.sparkd.recipes.test_merge import RECIPE
from tests.support.facts import lacking
from tests.support.registries import keep_registry
from tests.support.waiting import HUNG_S, until

PLAIN = """
recipe_version: "1"
name: Plain
model: owner/plain
container: vllm-node
solo_only: true
defaults: {max_model_len: 4096}
command: vllm serve owner/plain --max-model-len {max_model_len} --trust-remote-code
"""
MANIFEST = """
registries:
  - {name: official, recipes: good}
  - {name: hidden, recipes: more/of, visible: false}
  - {name: of benchmarks alone, benchmarks: off}
  - {name: outside, recipes: ../outside}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_AUTHOR = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Repository:
    """A git repository of this test."""

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        self.folder = folder
        if template is not None:
            shutil.copytree(template, folder)
            return
        folder.mkdir(parents=True)
        self.git("init", "--quiet")

    def git(self, *arguments: str, stdin: bytes = b"") -> str:
        env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", **_AUTHOR}
        done = subprocess.run(["git", *arguments], cwd=self.folder, env=env, input=stdin, capture_output=True, timeout=HUNG_S, check=True)
        return done.stdout.decode().strip()

    def write(self, files: dict[str, str | bytes]) -> None:
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def commit(self, files: dict[str, str | bytes] | None = None, *signing: str) -> str:
        self.write(files or {})
        self.git("add", "--all")
        self.git(*(signing or ("-c", "commit.gpgSign=false")), "commit", "--quiet", "--allow-empty", "--message", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("SPARKD_", "GIT_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARKD_STATE_DIR", str(tmp_path / "state"))
    # vLLM is not asked for its flags.
    monkeypatch.setattr(recipes, "_parser", lambda *_: None)
    return tmp_path / "state"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = Repository(tmp_path_factory.mktemp("template") / "r")
    repository.commit(
        {
            "recipes/plain.yaml": PLAIN,
            "recipes/4x/big.yaml": ONE,
            "recipes/3x/big.yaml": ONE,
            "recipes/README.md": "model: none\n",
            "recipes/compose.yaml": "services: {}\n",
            "other/left.yaml": PLAIN,
        }
    )
    return repository.folder


@pytest.fixture
def eugr(template: Path, tmp_path: Path) -> Repository:
    return Repository(tmp_path / "spark-vllm-docker", template)


def keep(state: Path, texts: Mapping[str, str]) -> None:
    """A registry `eugr` of these recipes, as if it had been fetched."""
    keep_registry(state, Registry("eugr", "https://example.org/eugr", COMMIT, "2026-11-21T00:00:00+00:00", texts))


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    ended = exit_code(["recipes", *argv])
    out, err = capsys.readouterr()
    assert ended == code, out + err
    return out, err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(capsys, *argv, "--json", code=code)[0])
    return answer


def taken(repository: Repository, tmp_path: Path, name: str = "x") -> Registry:
    return Registries(tmp_path / "state").fetch(name, str(repository.folder))


# Layouts


def test_a_repository_of_eugrs_layout_gives_its_recipes_at_its_commit(eugr: Repository, tmp_path: Path) -> None:
    registry = taken(eugr, tmp_path)

    assert sorted(registry.recipes) == ["3x/big", "4x/big", "plain"]
    assert registry.recipes["plain"] == PLAIN and registry.commit == eugr.git("rev-parse", "HEAD")


def test_a_manifest_of_sparkruns_names_the_folders(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    files = dict.fromkeys(("good/deep/two.yaml", "good/same.yaml", "more/of/same.yaml", "off/no.yaml", "recipes/no.yaml"), TWO)
    repository.commit({".sparkrun/registry.yaml": MANIFEST, **files})

    assert sorted(taken(repository, tmp_path).recipes) == ["deep/two", "more/of/same", "same"]


def test_without_either_layout_every_recipe_of_the_repository_counts(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    repository.commit({"a/two.yaml": TWO, "b.yaml": PLAIN, "c.yaml": "x: 1\n"})
    assert sorted(taken(repository, tmp_path).recipes) == ["a/two", "b"]

    empty = Repository(tmp_path / "e")
    empty.commit({"c.yaml": "x: 1\n"})
    with pytest.raises(ConfigError, match="no recipe"):
        taken(empty, tmp_path)


# The verbs


def test_a_registry_is_added_listed_shown_imported_and_removed(
    eugr: Repository, tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = eugr.git("rev-parse", "HEAD")
    made = as_json(capsys, "add-registry", str(eugr.folder))["registry"]
    assert (made["name"], made["commit"], made["recipes"]) == ("spark-vllm-docker", commit, 3)
    assert made["url"] == str(eugr.folder)
    run(capsys, "add-registry", str(eugr.folder), "--name", "eugr")
    kept = state / "state.db"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(state.stat().st_mode) == 0o700
    assert [path.name for path in state.iterdir() if path.is_dir()] == []

    assert [row["name"] for row in as_json(capsys, "ls", "--registry")["registries"]] == ["eugr", "spark-vllm-docker"]
    out, _ = run(capsys, "ls", "--registry")
    assert commit[:12] in out and str(eugr.folder) in out
    rows = as_json(capsys, "ls", "--registry", "eugr")["recipes"]
    assert rows[-1] == {"name": "plain@eugr", "model": "owner/plain", "runtime": None}
    assert "4x/big@eugr" in run(capsys, "ls", "eugr", "--registry")[0]

    out, err = run(capsys, "show", "plain@eugr")
    assert "--max-model-len 4096" in out and commit[:12] in out and lacking(err, "trust_remote_code", "left out") == []
    assert as_json(capsys, "show", "4x/big@eugr")["name"] == "4x/big@eugr"
    text, _ = run(capsys, "import", "plain@eugr")
    assert commit in text.splitlines()[0] and "trust_remote_code: true" in text and "max_model_len: 4096" in text
    run(capsys, "import", "plain@eugr", "--to", str(tmp_path / "own.yaml"))
    assert RecipeLibrary(tmp_path, {}).find("own").recipe.model == "owner/plain"

    run(capsys, "remove-registry", "eugr")
    assert [row["name"] for row in as_json(capsys, "ls", "--registry")["registries"]] == ["spark-vllm-docker"]
    run(capsys, "show", "plain@eugr", code=2)


def test_an_update_tells_what_it_changes_and_a_failed_one_keeps_what_was_there(
    eugr: Repository, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old = eugr.git("rev-parse", "HEAD")
    run(capsys, "add-registry", str(eugr.folder), "--name", "eugr")
    row = as_json(capsys, "update")["registries"][0]
    assert row["old_commit"] == row["commit"] == old

    (eugr.folder / "recipes/3x/big.yaml").unlink()
    new = eugr.commit({"recipes/new.yaml": TWO, "recipes/plain.yaml": PLAIN.replace("4096", "8192")})
    assert "--max-model-len 4096" in run(capsys, "show", "plain@eugr")[0]
    out, _ = run(capsys, "update", "eugr")
    assert f"{old[:12]} -> {new[:12]}" in out
    assert "--max-model-len 8192" in run(capsys, "show", "plain@eugr")[0]
    assert as_json(capsys, "show", "big@eugr")["name"] == "4x/big@eugr"

    other = Repository(tmp_path / "other")
    other.commit({"recipes/a.yaml": PLAIN})
    run(capsys, "add-registry", str(other.folder))
    eugr.folder.rename(tmp_path / "gone")
    rows = {row["name"]: row for row in as_json(capsys, "update", code=1)["registries"]}
    assert rows["eugr"]["error"] and rows["other"]["error"] is None
    out, err = run(capsys, "update", code=1)
    assert "other: " in out and "eugr" in err
    assert "--max-model-len 8192" in run(capsys, "show", "plain@eugr")[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("add-registry", ".", "--name", "../x"), "--name"),
        (("update", "x"), "registry; known: none"),
        (("ls", "x"), "with --registry alone"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *argv, code=2)

    assert out == "" and words in err and err.count("\n") == 1


def test_a_name_that_is_taken_a_recipe_that_is_none_and_one_of_several_are_told(
    eugr: Repository, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(state, {"plain": PLAIN, "3x/big": ONE, "4x/big": ONE})
    assert "is there" in run(capsys, "add-registry", str(eugr.folder), "--name", "eugr", code=5)[1]
    assert "plain@eugr?" in run(capsys, "show", "plein@eugr", code=2)[1]
    assert lacking(run(capsys, "show", "big@eugr", code=2)[1], "big@eugr", "3x/big", "4x/big") == []


# Its recipes by name


def test_an_entry_may_name_a_recipe_of_a_registry(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(state, {"plain": PLAIN, "4x/big": ONE, "ours": RECIPE.replace("A: recipe", "OMP_NUM_THREADS: 2")})
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\nmodels:\n  a: {{recipe: plain@eugr}}\n  b: {{recipe: plain@eugr, trust_remote_code: true}}\n")
    config = load_config(file, environ={})

    assert config.models["a"].model == "owner/plain" and config.models["a"].max_model_len == 4096
    assert not config.models["a"].trust_remote_code and config.models["b"].trust_remote_code
    added = parse_model("c", {"recipe": "plain@eugr"}, over_admin=True, book=config.book())
    assert added.model == "owner/plain"
    assert run(capsys, "import", "ours@eugr")[0].partition("\n")[2] == RECIPE.replace("A: recipe", "OMP_NUM_THREADS: 2")
    long = parse_model("d", {"recipe": "4x/big@eugr"}, over_admin=False, book=RecipeLibrary(None, AsWritten(), state))
    assert long.model == "owner/model"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ("--chat-template http://example.org/x", "--chat-template"),
        ("env: {LD_PRELOAD: /x.so}", "LD_PRELOAD"),
    ],
)
def test_a_recipe_that_does_more_than_tune_has_to_be_imported_first(
    change: str, param: str, tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{PLAIN.rstrip()} {change}\n" if change.startswith("--") else f"{PLAIN}{change}\n"
    keep(state, {"more": text})
    warned = run(capsys, "show", "more@eugr")[1]
    assert param in warned and "recipes import more@eugr" in warned, "it says beforehand that an entry cannot name it"
    run(capsys, "import", "more@eugr", "--to", str(tmp_path / "more.yaml"))

    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"recipe": "more@eugr"}, over_admin=False, book=RecipeLibrary(None, {"SECRET": "s"}, state))
    assert param in caught.value.message and "recipes import more@eugr" in caught.value.message


@pytest.mark.parametrize("value", ["$SECRET", "${SECRET}", "`id`", "$(id)"])
def test_a_variable_of_this_machine_reaches_no_recipe_of_a_registry(value: str, state: Path) -> None:
    keep(state, {"probe": f"{PLAIN}env: {{OMP_NUM_THREADS: '{value}', NCCL_DEBUG: WARN}}\n"})
    spec = parse_model("m", {"recipe": "probe@eugr"}, over_admin=False, book=RecipeLibrary(None, {"SECRET": "s"}, state))
    assert spec.env.keys() == {"NCCL_DEBUG"}


OURS = RECIPE.partition("settings:")[0] + "settings: "


def test_a_recipe_names_no_variable_of_this_machine(state: Path) -> None:
    keep(state, {"probe": f"{OURS}{{env: {{OMP_NUM_THREADS: '${{env.SECRET}}'}}}}\n"})
    with pytest.raises(ConfigError, match="environment") as caught:
        parse_model("m", {"recipe": "probe@eugr"}, over_admin=False, book=RecipeLibrary(None, {"SECRET": "s"}, state))
    assert "recipes import probe@eugr" in caught.value.message


def test_a_recipe_names_no_file_for_its_calibration(state: Path) -> None:
    """The absence, the size and the encoding of any file would be told."""
    text = f"{OURS}{{quantize: {{format: nvfp4-a4, calibration: /etc/shadow}}}}\n"
    keep(state, {"probe": text})
    for over_admin in (True, False):
        with pytest.raises(ConfigError, match="calibration") as caught:
            parse_model("m", {"recipe": "probe@eugr"}, over_admin=over_admin, book=RecipeLibrary(None, {}, state))
        assert "recipes import probe@eugr" in caught.value.message


def test_a_recipe_takes_no_name_no_default_and_no_pin(state: Path) -> None:
    keep(state, {"greedy": f"{OURS}{{served_model_name: [gpt-4o], default: true, pin: true, max_num_seqs: 4}}\n"})
    book = RecipeLibrary(None, {}, state)
    model = parse_model("m", {"recipe": "greedy@eugr"}, over_admin=True, book=book)

    assert model.served_names() == ("m",) and not model.default and not model.pin and model.max_num_seqs == 4
    told = " ".join(str(note) for note in book.read("greedy@eugr")[1])
    assert lacking(told, "served_model_name", "default", "pin", "left out") == []


# Repositories of strangers


def test_an_address_with_a_password_is_refused_without_showing_it(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("https://user:sk-canary@example.org/x", "https://sk-canary@example.org/x", "ssh://u:sk-canary@h/y"):
        assert "canary" not in run(capsys, "add-registry", text, code=2)[1]


def test_links_odd_names_and_large_files_are_left_out(eugr: Repository, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text(PLAIN)
    (eugr.folder / "recipes/link.yaml").symlink_to(tmp_path / "secret.yaml")
    (eugr.folder / "recipes/folder").symlink_to(tmp_path)
    eugr.commit(
        {
            "recipes/large.yaml": PLAIN + "#" * (1 << 20),
            "recipes/.hidden.yaml": PLAIN,
            "recipes/a b.yaml": PLAIN,
            "recipes/\x1b[2J\x07.yaml": PLAIN,
        }
    )

    assert sorted(taken(eugr, tmp_path).recipes) == ["3x/big", "4x/big", "plain"]


def test_a_repository_of_too_many_bytes_is_refused_and_leaves_nothing(
    eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone, "MAX_BYTES", 1 << 20)
    eugr.commit({"image.bin": os.urandom(3 << 20)})

    with pytest.raises(SparkdError, match=" 1 MiB"):
        taken(eugr, tmp_path)
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize(("bound", "most"), [("MAX_RECIPES", 2), ("MAX_TEXT_BYTES", 2 * len(ONE.encode()))])
def test_recipes_beyond_the_bound_are_left_out(
    bound: str, most: int, eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone, bound, most)

    assert len(taken(eugr, tmp_path).recipes) == 2


def test_a_small_tree_of_a_million_files_is_never_listed_in_full(eugr: Repository, tmp_path: Path) -> None:
    """Nothing of it is written to the disk, not even by git."""
    blob = eugr.git("hash-object", "-w", "--stdin", stdin=PLAIN.encode())
    tree = eugr.git("mktree", stdin="".join(f"100644 blob {blob}\t{at}.yaml\n" for at in range(1000)).encode())
    tree = eugr.git("mktree", stdin="".join(f"040000 tree {tree}\t{at}\n" for at in range(1000)).encode())
    eugr.git("update-ref", "HEAD", eugr.git("commit-tree", "-m", "x", tree))

    with pytest.raises(SparkdError, match=f"ls-tree.* {clone.MAX_LISTING_BYTES >> 20} MiB"):
        taken(eugr, tmp_path)
    assert list((tmp_path / "state").iterdir()) == []


def test_git_has_bounded_memory(eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone, "MAX_MEMORY_BYTES", 1 << 20)

    with pytest.raises(SparkdError, match="cannot be fetched"):
        taken(eugr, tmp_path)


def test_a_server_that_never_answers_is_given_up_with_all_that_git_started(
    eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git, held = tmp_path / "bin" / "git", tmp_path / "held"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\nsleep 1000 > {held} &\nwait\n")
    git.chmod(0o755)
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(clone, "CLONE_S", 0.5)

    with pytest.raises(SparkdError, match=rf" {clone.CLONE_S:g} s\b"):
        taken(eugr, tmp_path)
    until(lambda: is_let_go(reader), "the end of git's own child")
    os.close(reader)


def is_let_go(pipe: int) -> bool:
    """Whether no process has the other end."""
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def test_nothing_of_a_repository_is_run(eugr: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canary = tmp_path / "canary"
    touch = f"#!/bin/sh\ntouch {canary}\n"
    (eugr.folder / ".git" / "hooks").mkdir(exist_ok=True)
    for hook in ("post-checkout", "post-merge", "reference-transaction", "post-index-change"):
        (eugr.folder / ".git" / "hooks" / hook).write_text(touch)
        (eugr.folder / ".git" / "hooks" / hook).chmod(0o755)
    eugr.write(
        {
            ".gitattributes": "* filter=evil diff=evil\n",
            ".gitmodules": f'[submodule "m"]\n\tpath = m\n\turl = ext::{canary}\n\tupdate = !touch {canary}\n',
            "recipes/mods/run.sh": touch,
        }
    )
    eugr.git("add", "--all")
    eugr.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},m")
    eugr.git("commit", "--quiet", "--message", "a submodule")
    canary.unlink(missing_ok=True)  # this test's own git may have run a hook

    run(capsys, "add-registry", str(eugr.folder), "--name", "eugr")
    run(capsys, "update")
    run(capsys, "show", "plain@eugr")
    run(capsys, "import", "plain@eugr")
    assert not canary.exists()


QUOTED = r"""
recipe_version: "1"
"\e[2Jkey": 1
name: "\e[2Jname"
description: "\e[2J\aloud"
model: owner/plain
mods: ["\e[2Jmod"]
env: {"\e[2JA": "\a", B: "$\e[2J"}
defaults: {"\e[2Jdefault": "\a"}
command: "vllm serve owner/plain '\e[2Jword' --\e[2Jflag '\e[2J' --tool-call-parser '\e[2J' && \e[2J"
"""


def test_no_escape_of_a_recipe_reaches_the_terminal(
    eugr: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the byte itself, which YAML refuses, and in quotes; with each word that the import refuses, and without one of them."""
    monkeypatch.setattr(recipes, "_parser", parser_of_the_fixture)
    hostile = PLAIN.replace("Plain", '"\\e]0;owned\\a"').replace("owner/plain", "owner/\x9bplain\x1b[2J")
    words = ("", " && \\e[2J", " --tool-call-parser '\\e[2J'", " --\\e[2Jflag", " '\\e[2Jword'")
    texts = [f"description: \x1b[2J\x07loud\n{hostile}", *(QUOTED.replace(word, "") for word in words)]
    eugr.commit({f"recipes/quoted{number}.yaml": text for number, text in enumerate(texts)})
    written = [*run(capsys, "add-registry", str(eugr.folder), "--name", "eugr"), *run(capsys, "ls", "--registry", "eugr")]
    for number in range(len(texts)):
        for verb in ("show", "import"):
            exit_code(["recipes", verb, f"quoted{number}@eugr"])
    written += capsys.readouterr()
    assert written[-1] and not {"\x1b", "\x07", "\x9b"} & set("".join(written))
