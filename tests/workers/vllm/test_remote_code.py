"""Code of a repository comes from the trusted commit, on the ways too on which transformers takes the head of a branch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import HUNG_S
from workers.host.interpreter import PACKAGE_DIR
from workers.host.trusted_code import VARIABLE, Commits
from workers.rank.command import build_environment
from workers.rank.spec import RankSpec

FIRST, SECOND, THIRD = "1" * 40, "2" * 40, "3" * 40
TRUSTED = Commits({"owner/name": [FIRST]})


@pytest.mark.parametrize(
    ("repository", "revision", "commit"),
    [
        ("owner/name", "main", FIRST),
        ("owner/name", SECOND, SECOND),
        ("owner/name", THIRD, FIRST),
        ("other/code", None, THIRD),
    ],
)
def test_the_commit_of_a_repository(repository: str, revision: str | None, commit: str) -> None:
    assert Commits({"owner/name": [FIRST, SECOND]}, [THIRD]).of(repository, revision) == commit


def test_code_of_a_repository_without_a_commit_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"other/code .*owner/name.*--code-revision"):
        TRUSTED.of("other/code", FIRST)


def test_an_engine_has_the_commits_in_its_environment() -> None:
    paths = {"runtime": sys.executable, "run_dir": "/run/x", "log_path": "/x.log"}
    names = {"rank_id": "r", "model_name": "m", "model": "owner/name", "node_id": "n", "entrypoint": "e", "config_hash": "h"}
    raw = {**paths, **names, "served_names": ["m"], "generation": 1, "rank": 0, "platform": "cpu", "socket_path": "/run/x/s"}
    plain, held = RankSpec.from_dict(raw), RankSpec.from_dict({**raw, "trusted_code": TRUSTED.to_dict()})
    assert VARIABLE not in build_environment(plain, {})
    assert Commits(**json.loads(build_environment(held, {})[VARIABLE])) == TRUSTED


_CODE = "from transformers import PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own'\n    commit = '{}'\n"
# Each line: the class's own commit, or the error; first without what enforces the commits, then with it. As vLLM reads a configuration for
# its tokenizer: by the folder of a snapshot.
_CHILD = f"""
import os, sys
from transformers import AutoConfig
from workers.vllm.remote_code import enforce
trusted, *folders = sys.argv[1:]
for variables in ({{}}, {{{VARIABLE!r}: trusted}}):
    enforce(variables)
    for folder in folders:
        try:
            print(AutoConfig.from_pretrained(folder, trust_remote_code=True).commit)
        except RuntimeError as error:
            print(error)
"""


def commit_of(cache: Path, hub_id: str, commit: str, code_of: str) -> str:
    """A snapshot, to which the branch leads; its configuration names the code of `code_of`."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": f"{code_of}--code_own.Own"}}))
    (snapshot / "code_own.py").write_text(_CODE.format(commit))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return str(snapshot)


def test_transformers_runs_no_code_of_the_head_of_a_branch(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    own = commit_of(cache, "owner/name", FIRST, "owner/name")
    commit_of(cache, "owner/name", SECOND, "owner/name")
    named = commit_of(cache, "owner/other", FIRST, "third/code")
    commit_of(cache, "third/code", THIRD, "third/code")
    env = {"PATH": os.defpath, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    env |= {"PYTHONPATH": PACKAGE_DIR, "HOME": str(tmp_path)}

    command = [sys.executable, "-c", _CHILD, json.dumps(TRUSTED.to_dict()), own, named]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HUNG_S, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    *plain, commit, refusal = done.stdout.splitlines()
    assert plain == [SECOND, THIRD], "what this is for"
    assert commit == FIRST
    assert "third/code" in refusal and "--code-revision" in refusal
