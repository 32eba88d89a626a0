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
from sparkd.cli import recipes, registry_fetch
from sparkd.cli.registry_fetch import fetched, source_of
from sparkd.config.config import load_config, parse_model
from sparkd.errors import ConfigError, SparkdError
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.recipes.registry import CommitSignature, Registries, Registry
from tests.sparkd.recipes.test_expand import RECIPE
from tests.sparkd.recipes.test_importer import ONE, TWO, parser_of_the_fixture
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S

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
  - {name: hidden, subpath: more/of, visible: false}
  - {name: off, recipes: off, enabled: false}
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

    def blob(self, content: bytes) -> str:
        return self.git("hash-object", "-w", "--stdin", stdin=content)

    def tree(self, *entries: tuple[str, str, bytes]) -> str:
        """A tree of (mode, object, name), which git does not check."""
        raw = b"".join(mode.encode() + b" " + name + b"\0" + bytes.fromhex(object_id) for mode, object_id, name in entries)
        return self.git("hash-object", "-t", "tree", "-w", "--literally", "--stdin", stdin=raw)

    def point_at(self, tree: str) -> str:
        commit = self.git("commit-tree", tree, "-m", "x")
        self.git("update-ref", "HEAD", commit)
        return commit


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
    registry = Registry("eugr", "https://example.org/eugr", COMMIT, "2026-11-21T00:00:00+00:00", CommitSignature("none"), texts, {})
    Registries(state).put(registry)


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    ended = exit_code(["recipes", *argv])
    out, err = capsys.readouterr()
    assert ended == code, out + err
    return out, err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(capsys, *argv, "--json", code=code)[0])
    return answer


def taken(repository: Repository, tmp_path: Path, name: str = "x") -> Registry:
    return fetched(name, source_of(str(repository.folder)), tmp_path / "fetching")


# Layouts


def test_a_repository_of_eugrs_layout_gives_its_recipes_at_its_commit(eugr: Repository, tmp_path: Path) -> None:
    registry = taken(eugr, tmp_path)

    assert sorted(registry.recipes) == ["3x/big", "4x/big", "plain"]
    assert registry.recipes["plain"] == PLAIN and registry.commit == eugr.git("rev-parse", "HEAD")
    assert registry.left_out == {} and registry.signature.state == "none"
    assert list((tmp_path / "fetching").iterdir()) == []


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
    assert made["url"] == str(eugr.folder) and made["signature"] == {"state": "none", "signer": ""}
    run(capsys, "add-registry", str(eugr.folder), "--name", "eugr")
    kept = state / "registries" / "eugr.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700

    assert [row["name"] for row in as_json(capsys, "ls", "--registry")["registries"]] == ["eugr", "spark-vllm-docker"]
    out, _ = run(capsys, "ls", "--registry")
    assert commit[:12] in out and str(eugr.folder) in out
    rows = as_json(capsys, "ls", "--registry", "eugr")["recipes"]
    assert rows[-1] == {"name": "plain@eugr", "model": "owner/plain", "runtime": None, "description": "Plain"}
    assert "4x/big@eugr" in run(capsys, "ls", "eugr", "--registry")[0]

    out, err = run(capsys, "show", "plain@eugr")
    assert "--max-model-len 4096" in out and commit[:12] in out and lacking(err, "trust_remote_code", "left out") == []
    assert as_json(capsys, "show", "4x/big@eugr")["choice"] == {"recipe": "4x/big@eugr"}
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
    assert row["old_commit"] == row["commit"] == old and not row["added"] + row["changed"] + row["removed"]

    (eugr.folder / "recipes/3x/big.yaml").unlink()
    new = eugr.commit({"recipes/new.yaml": TWO, "recipes/plain.yaml": PLAIN.replace("4096", "8192")})
    assert "--max-model-len 4096" in run(capsys, "show", "plain@eugr")[0]
    out, _ = run(capsys, "update", "eugr")
    assert f"{old[:12]} -> {new[:12]}" in out
    assert [line.split() for line in out.splitlines()[1:]] == [["added", "new@eugr"], ["changed", "plain@eugr"], ["removed", "3x/big@eugr"]]
    assert "--max-model-len 8192" in run(capsys, "show", "plain@eugr")[0]
    assert as_json(capsys, "show", "big@eugr")["choice"] == {"recipe": "big@eugr"}

    other = Repository(tmp_path / "other")
    other.commit({"recipes/a.yaml": PLAIN})
    run(capsys, "add-registry", str(other.folder))
    eugr.folder.rename(tmp_path / "gone")
    rows = {row["name"]: row for row in as_json(capsys, "update", code=1)["registries"]}
    assert rows["eugr"]["error"] and rows["eugr"]["commit"] == new and rows["other"]["error"] is None
    out, err = run(capsys, "update", code=1)
    assert "other: " in out and "eugr" in err and new[:12] in err
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


def test_a_file_that_is_no_yaml_is_named_with_its_reason(eugr: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    broken = 'recipe_version: "1"\nname: [x\nmodel: owner/x\n'
    eugr.commit({"recipes/broken.yaml": broken})
    made = as_json(capsys, "add-registry", str(eugr.folder), "--name", "eugr")["registry"]
    assert made["recipes"] == 3 and "line 3" in made["unreadable"]["broken"]
    assert lacking(run(capsys, "add-registry", str(eugr.folder), "--name", "b")[0], "broken@b", "line 3") == []
    assert lacking(run(capsys, "show", "broken@eugr", code=2)[1], "broken@eugr", "line 3") == []


# Its recipes by name


def test_an_entry_may_name_a_recipe_of_a_registry(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(state, {"plain": PLAIN, "4x/big": ONE, "ours": RECIPE.replace("A: recipe", "OMP_NUM_THREADS: 2")})
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\nmodels:\n  a: {{recipe: plain@eugr}}\n  b: {{recipe: plain@eugr, trust_remote_code: true}}\n")
    config = load_config(file, environ={})

    assert config.models["a"].model == "owner/plain" and config.models["a"].max_model_len == 4096
    assert not config.models["a"].trust_remote_code and config.models["b"].trust_remote_code
    assert config.book().split("ours@eugr@long") == ("ours@eugr", "long") and config.book().split("plain@long") == ("plain", "long")
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
        ("env: {OMP_NUM_THREADS: $SECRET}", "environment"),
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


# Repositories of strangers


@pytest.mark.parametrize(
    "text",
    [
        "ext::sh -c touch% /tmp/x", "file:///tmp", "http://example.org/x", "--upload-pack=touch", "ssh://-oProxyCommand=x/y",
        "https://user:sk-canary@example.org/x", "ssh://u:sk-canary@h/y", "https://h/\x1b[2J", "owner/name",
    ],
)  # fmt: skip
def test_an_address_is_https_ssh_or_a_folder(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_of(text)

    assert "canary" not in caught.value.message and "\x1b" not in caught.value.message


def test_a_registry_comes_by_ssh_without_an_agent_and_without_a_question(
    eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")

    assert len(fetched("x", source_of(f"ssh://git@host{eugr.folder}"), tmp_path / "fetching").recipes) == 3
    assert "-a -x -oBatchMode=yes" in (tmp_path / "asked").read_text()


def test_a_folder_of_another_user_is_told_with_its_cure(eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry_fetch._ENVIRONMENT, "GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(SparkdError, match=r"ownership.*`chown`"):
        taken(eugr, tmp_path)


def test_links_submodules_odd_names_and_large_files_are_left_out(eugr: Repository, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text(PLAIN)
    (eugr.folder / "recipes/link.yaml").symlink_to(tmp_path / "secret.yaml")
    (eugr.folder / "recipes/inside.yaml").symlink_to("plain.yaml")
    eugr.commit(
        {
            "recipes/large.yaml": PLAIN + "#" * (1 << 20),
            "recipes/latin.yaml": b"model: \xe9\n",
            "recipes/.hidden.yaml": PLAIN,
            "recipes/a b.yaml": PLAIN,
            "recipes/-rf.yaml": PLAIN,
            "recipes/\x1b[2J\x07.yaml": PLAIN,
            "recipes/\nnew.yaml": PLAIN,
        }
    )
    eugr.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},recipes/module.yaml")
    eugr.git("commit", "--quiet", "--message", "a submodule")
    registry = taken(eugr, tmp_path)

    assert sorted(registry.recipes) == ["3x/big", "4x/big", "plain"]
    assert sorted(registry.left_out.values()) == [1, 3, 5] and list(registry.unreadable) == ["latin"]


def test_a_name_that_leads_out_of_the_registry_is_left_out(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    blob = repository.blob(PLAIN.encode())
    up = repository.tree(("100644", blob, b"up.yaml"))
    names = (b"../x.yaml", b"good.yaml", b"/abs.yaml")
    recipes = repository.tree(*(("100644", blob, name) for name in names), ("40000", up, b".."))
    repository.point_at(repository.tree(("40000", recipes, b"recipes")))
    before = {path for path in tmp_path.rglob("*") if "r/.git" not in str(path)}
    registry = taken(repository, tmp_path)

    assert list(registry.recipes) == ["good"] and sum(registry.left_out.values()) == 3
    assert {path for path in tmp_path.rglob("*") if "r/.git" not in str(path)} - before == {tmp_path / "fetching"}


def test_a_tree_of_more_files_than_a_disk_holds_is_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "r")
    level = repository.tree(*(("100644", repository.blob(PLAIN.encode()), b"%02d.yaml" % index) for index in range(40)))
    for _ in range(8):
        level = repository.tree(*(("40000", level, b"%02d" % index) for index in range(40)))
    repository.point_at(repository.tree(("40000", level, b"recipes")))

    with pytest.raises(SparkdError, match="more files"):
        taken(repository, tmp_path)


def test_a_repository_of_too_many_bytes_is_refused_and_leaves_nothing(
    eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_fetch, "MAX_PACK_BYTES", 1 << 20)
    eugr.commit({"image.bin": os.urandom(3 << 20)})

    with pytest.raises(SparkdError, match=" 1 MiB"):
        taken(eugr, tmp_path)
    assert list((tmp_path / "fetching").iterdir()) == []


def test_recipes_beyond_the_bound_are_left_out(eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_fetch, "MAX_RECIPES", 2)
    registry = taken(eugr, tmp_path)

    assert len(registry.recipes) == 2 and sum(registry.left_out.values()) == 2


def test_a_server_that_never_answers_is_given_up(eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nsleep 1000\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(registry_fetch, "LOOK_S", 0.2)

    with pytest.raises(SparkdError, match=rf" {registry_fetch.LOOK_S:g} s\b"):
        taken(eugr, tmp_path)


def test_nothing_of_a_repository_and_no_setting_of_its_user_is_run(
    eugr: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    touch = tmp_path / "touch.sh"
    touch.write_text(f"#!/bin/sh\ntouch {canary}\n")
    touch.chmod(0o755)
    settings = f"""
[core]
    hooksPath = {tmp_path}/hooks
    fsmonitor = {touch}
    sshCommand = {touch}
    alternateRefsCommand = {touch}
[uploadpack]
    packObjectsHook = {touch}
[filter "evil"]
    smudge = {touch}
    process = {touch}
[diff]
    external = {touch}
[gpg]
    program = {touch}
[url "ext::{touch} "]
    insteadOf = /
[protocol]
    allow = always
"""
    (tmp_path / "hooks").mkdir()
    hooks = ("post-checkout", "post-merge", "reference-transaction", "fsmonitor-watchman", "pre-auto-gc", "post-index-change", "update")
    for folder in (tmp_path / "hooks", eugr.folder / ".git" / "hooks"):
        for hook in hooks:
            (folder / hook).write_text(touch.read_text())
            (folder / hook).chmod(0o755)
    eugr.commit(
        {
            ".gitattributes": "* filter=evil diff=evil\n",
            ".gitmodules": f'[submodule "m"]\n\tpath = m\n\turl = ext::{touch}\n\tupdate = !{touch}\n',
            "recipes/mods/run.sh": touch.read_text(),
        }
    )
    eugr.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},m")
    eugr.git("commit", "--quiet", "--message", "a submodule")
    (tmp_path / "home" / ".gitconfig").write_text(settings)
    with (eugr.folder / ".git" / "config").open("a") as config:
        config.write(settings.partition("[url")[0])
    for name in ("GIT_SSH_COMMAND", "GIT_SSH", "GIT_EXTERNAL_DIFF", "GIT_ASKPASS", "GIT_EDITOR", "GIT_PAGER", "GIT_PROXY_COMMAND"):
        monkeypatch.setenv(name, str(touch))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.hooksPath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"{tmp_path}/hooks")
    monkeypatch.setenv("GIT_DIR", str(eugr.folder / ".git"))
    canary.unlink(missing_ok=True)  # this test's own git may have run a hook

    run(capsys, "add-registry", str(eugr.folder), "--name", "eugr")
    run(capsys, "update")
    run(capsys, "show", "plain@eugr")
    run(capsys, "import", "plain@eugr")
    assert not canary.exists()
    subprocess.run(["git", "-c", f"core.hooksPath={tmp_path}/hooks", "update-ref", "refs/heads/x", "HEAD"], cwd=eugr.folder, check=True)
    assert canary.exists(), "a hook that runs leaves the canary"


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


def test_a_signature_that_git_can_verify_is_shown_and_a_forged_one_refused(eugr: Repository, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    eugr.commit({}, "-c", "gpg.format=ssh", "-c", f"user.signingKey={key}", "-c", "commit.gpgSign=true")
    signers = tmp_path / "home" / ".ssh" / "allowed_signers"
    signers.parent.mkdir()
    signers.write_text(f"a@example.org {(tmp_path / 'key.pub').read_text()}")
    signature = taken(eugr, tmp_path).signature
    assert (signature.state, signature.signer) == ("good", "a@example.org")

    forged = eugr.git("cat-file", "commit", "HEAD").replace("\n\nx", "\n\nforged") + "\n"
    eugr.git("update-ref", "HEAD", eugr.git("hash-object", "-t", "commit", "-w", "--stdin", stdin=forged.encode()))
    with pytest.raises(SparkdError, match="is wrong"):
        taken(eugr, tmp_path)
