"""A model runs code of a hub's repository at one commit only: that of its `revision`, and for a draft that of the draft's own.

Hostile side: the author of a repository, who can change the code behind a branch after the operator has read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.checkpoint.source import folder_of
from sparkd.config.config import Config
from sparkd.config.hub_check import is_elsewhere, looked_at
from sparkd.config.model import ModelConfig
from sparkd.errors import LoadRefused
from sparkd.vllm.flags import DRAFTS, parsed, speculative_config, value_of, words
from workers.host.hub_cache import is_hub_id
from workers.host.trusted_code import Commits

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Methods that draft with layers of the model itself.
_OWN_LAYERS = ("mtp", "dspark")
# Its commit is trusted in every repository that the model's auto_map names.
_CODE_REVISION = "code-revision"


def pinned(spec: ModelConfig, config: Config) -> ModelConfig:
    """The entry as its engine starts: a draft that is the model itself gets the model's commit.

    An entry that trusts no code, or serves a folder, is returned unchanged. Raises LoadRefused where a commit is missing.
    """
    if reason := refusal(spec, config):
        raise LoadRefused(f"{spec.name} cannot be loaded: trust_remote_code: {reason}")
    draft = speculative_config(spec.extra_args)
    if draft is None or not _runs_code_of_a_hub(spec, config) or _draft_repository(spec, draft) != spec.model:
        return spec
    speculation = json.dumps({**draft, "revision": _commit(spec, draft)})
    return spec.model_copy(update={"extra_args": words({**parsed(spec.extra_args), DRAFTS: speculation})})


def refusal(spec: ModelConfig, config: Config) -> str | None:
    """Why the entry may not run a repository's code, with the commit to copy; None where it may, or runs none. Blocks."""
    if not _runs_code_of_a_hub(spec, config):
        return None
    env = spec.environment(config.engine)
    revision = spec.revision
    if not _is_commit(revision):
        remote = looked_at(spec, env)
        commit = _cached_commit(spec.model, revision, env) or (None if remote is None else remote.commit)
        return _sentence(spec.model, commit, "`revision`")
    if (code := parsed(spec.extra_args).get(_CODE_REVISION)) is not None and not _is_commit(code):
        return _sentence("the repository of the code", None, f"--{_CODE_REVISION} in extra_args")
    draft = speculative_config(spec.extra_args) or {}
    repository = _draft_repository(spec, draft)
    if repository is None or repository == spec.model or _is_commit(draft.get("revision")):
        return None
    commit = _cached_commit(repository, draft.get("revision"), env)
    return _sentence(f"its draft {repository}", commit, f"`revision` of one --{DRAFTS} in extra_args")


def commits_of(started: ModelConfig) -> Commits | None:
    """The commits that the engine of a `pinned` entry is held to; None where it runs no code of a hub."""
    commit = started.revision
    if not started.trust_remote_code or started.model.startswith("/") or commit is None or not _is_commit(commit):
        return None
    others = [*filter(None, [value_of(started.extra_args, _CODE_REVISION)])]
    commits = {started.model: [commit, *others]}
    draft = speculative_config(started.extra_args) or {}
    repository = _draft_repository(started, draft)
    if repository is not None and _is_commit(draft.get("revision")):
        commits.setdefault(repository, []).append(str(draft["revision"]))
    return Commits({name: list(dict.fromkeys(hashes)) for name, hashes in commits.items()}, others)


def _runs_code_of_a_hub(spec: ModelConfig, config: Config) -> bool:
    vllm = spec.runs_vllm(config.engine)
    return vllm and spec.trust_remote_code and not spec.model.startswith("/") and not is_elsewhere(spec.environment(config.engine))


def _commit(spec: ModelConfig, draft: Mapping[str, Any]) -> Any:
    return draft["revision"] if _is_commit(draft.get("revision")) else spec.revision


def _is_commit(revision: object) -> bool:
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def _draft_repository(spec: ModelConfig, draft: Mapping[str, Any]) -> str | None:
    """The repository of the draft; None where nothing drafts, or the draft needs no repository."""
    name = draft.get("model")
    if name is None and str(draft.get("method")).endswith(_OWN_LAYERS):
        return spec.model
    return name if isinstance(name, str) and "/" in name and is_hub_id(name) else None


def _cached_commit(repository: str, revision: str | None, env: Mapping[str, str]) -> str | None:
    """The commit of this node's hub cache."""
    folder = folder_of(repository, revision, env)
    commit = Path(folder).name if folder is not None else None
    return commit if _is_commit(commit) else None


def _sentence(repository: str, commit: str | None, key: str) -> str:
    where = f"this node knows {commit}" if commit is not None else "the repository's page on its hub shows it, `sparkd pull` brings it here"
    return f"a branch of {repository} may lead to other code later. Read the code at one commit ({where}), then set {key} to its 40 digits."
