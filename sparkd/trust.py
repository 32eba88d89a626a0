"""Owns the commit whose code a model may run: trust is in a repository at one commit, and not in whatever its branch leads to later.

The first start takes the commit that is on this node, or that the hub named, and writes it down in the state folder. Later starts take the
same one. Never fetches anything, never runs that code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkd.checkpoint import CONFIG, Folder
from sparkd.errors import CheckpointError, LoadRefused
from sparkd.hub_model import commit_of, is_elsewhere, looked_at
from sparkd.model_config import ModelConfig
from sparkd.source import folder_of
from sparkd.vllm_flags import values_of
from workers.private import write_private

FILE = "trusted_code.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"
_REVISION, _CODE, _TOKENIZER, _TOKENIZER_REVISION = "revision", "code-revision", "tokenizer", "tokenizer-revision"


def pinned(spec: ModelConfig, env: Mapping[str, str], state_dir: Path) -> ModelConfig:
    """The entry at the commit whose code it may run: its `revision`, else the one of its first start, else the one that is here now. An
    entry that trusts no code, or serves a folder, is returned as it is. Blocks.

    Raises LoadRefused where no commit is known, or code of another repository would run at none.
    """
    if not _runs_code_of_a_hub(spec, env):
        return spec
    wanted = _wanted(spec)
    commit = wanted if _COMMIT.fullmatch(wanted) else _trusted(state_dir).get(_key(spec)) or _current(spec, env)
    if commit is None:
        raise LoadRefused(
            f"{spec.name} cannot be loaded: trust_remote_code is for one commit, and this node does not know that of {spec.model}. "
            f"Run `sparkd pull {spec.name}`, or set `revision` to a commit."
        )
    flags: list[str] = []
    if any(values_of(spec.extra_args, _REVISION)):
        flags += [f"--{_REVISION}", commit]
    if not any(values_of(spec.extra_args, _CODE)):
        if other := next(_others(spec, commit, env), None):
            raise LoadRefused(
                f"{spec.name} cannot be loaded: trust_remote_code is for {spec.model} at one commit, and its code lies in {other}. "
                f"Read that, then add `--code-revision` with the commit of {other} to extra_args."
            )
        flags += [f"--{_CODE}", commit]
    if not any(values_of(spec.extra_args, _TOKENIZER_REVISION)):
        tokenizer = [value for *_, value in values_of(spec.extra_args, _TOKENIZER)]
        if tokenizer and not tokenizer[-1].startswith("/") and tokenizer[-1] != spec.model:
            raise LoadRefused(
                f"{spec.name} cannot be loaded: trust_remote_code is for one commit, and --tokenizer {tokenizer[-1]} names none. "
                "Add `--tokenizer-revision` with its commit to extra_args."
            )
        flags += [f"--{_TOKENIZER_REVISION}", commit]
    return spec.model_copy(update={"revision": commit, "extra_args": [*spec.extra_args, *flags]})


def remember(asked: ModelConfig, decided: ModelConfig, env: Mapping[str, str], state_dir: Path) -> str | None:
    """Write down the commit of a start. asked: the entry; decided: what `pinned` made of it. Returns a message for the operator if another
    commit is on this node now. Blocks; raises LoadRefused where it cannot be written."""
    if asked.model != decided.model or _COMMIT.fullmatch(_wanted(asked)) or decided.revision is None or not _runs_code_of_a_hub(asked, env):
        return None
    trusted = _trusted(state_dir)
    if _key(asked) not in trusted:
        path, table = state_dir / FILE, json.dumps({**trusted, _key(asked): decided.revision}, indent=1, sort_keys=True)
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, table)
        except OSError as error:
            raise _unusable(path, f"it cannot be written: {error.strerror}") from None
    current = _current(asked, env)
    if current in (None, decided.revision):
        return None
    return (
        f"{asked.name} runs the code of {asked.model} at commit {decided.revision}, which its first start trusted. {_wanted(asked)} is "
        f"{current} on this node now. To serve that, read its code, then set `revision: {current}`."
    )


def _runs_code_of_a_hub(spec: ModelConfig, env: Mapping[str, str]) -> bool:
    return spec.trusts_code() and not spec.model.startswith("/") and not is_elsewhere(env)


def _wanted(spec: ModelConfig) -> str:
    """vLLM takes the last flag."""
    flags = [value for *_, value in values_of(spec.extra_args, _REVISION)]
    return flags[-1] if flags else spec.revision or _MAIN


def _key(spec: ModelConfig) -> str:
    return f"{spec.model}@{_wanted(spec)}"


def _current(spec: ModelConfig, env: Mapping[str, str]) -> str | None:
    """The commit that the revision leads to: in this node's cache, else as the hub or another node said when it was asked."""
    folder = folder_of(spec.model, _wanted(spec), env)
    commit = Path(folder).name if folder is not None else commit_of(spec, env)
    return commit if commit is not None and _COMMIT.fullmatch(commit) else None


def _others(spec: ModelConfig, commit: str, env: Mapping[str, str]) -> Iterator[str]:
    """The other repositories whose code the configuration names (transformers, dynamic_module_utils: `repository--module.Class`)."""
    folder = folder_of(spec.model, commit, env)
    files = Folder(folder) if folder is not None else looked_at(spec, env)
    for name in (CONFIG, "tokenizer_config.json"):
        if files is None or name not in files.names:
            continue
        try:
            config = json.loads(files.content(name))
        except (CheckpointError, ValueError, RecursionError):
            continue
        table = config.get("auto_map") if isinstance(config, dict) else None
        for value in table.values() if isinstance(table, dict) else ():
            for module in value if isinstance(value, list) else [value]:
                repository, marks, _ = str(module).partition("--")
                if marks and repository != spec.model:
                    yield repository


def _trusted(state_dir: Path) -> dict[str, str]:
    """By repository and revision, the commit of the first start. Raises LoadRefused for a damaged file: it may have said anything."""
    path = state_dir / FILE
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, type(error).__name__) from None
    if not isinstance(found, dict) or not all(isinstance(one, str) and _COMMIT.fullmatch(one) for one in found.values()):
        raise _unusable(path, "it is no table of commits")
    return found


def _unusable(path: Path, why: str) -> LoadRefused:
    return LoadRefused(f"{path}, which has the commits of trusted code, cannot be used ({why}). Remove it, and set `revision` to a commit.")
