"""Owns the commit whose code a model may run: trust is in a repository at one commit, and not in whatever its branch leads to later.

The first start takes the commit that is on this node, or that the hub named, and writes it down in the state folder, for the model and for
its draft. Later starts take the same ones. Never fetches anything, never runs that code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd.checkpoint import CONFIG, Folder
from sparkd.config.config import Config
from sparkd.entry.hub_check import commit_of, is_elsewhere, looked_at
from sparkd.errors import CheckpointError, CommitUnknown, LoadRefused
from sparkd.models.source import folder_of
from sparkd.schema.model import ModelConfig
from sparkd.vllm.translate import SPECULATIVE, flag_name, values_of
from workers.host.hub_cache import is_hub_id
from workers.host.private_files import write_private
from workers.host.trusted_code import Commits

FILE = "trusted_code.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"
_REVISION, _CODE, _TOKENIZER, _TOKENIZER_REVISION = "revision", "code-revision", "tokenizer", "tokenizer-revision"
_SPECULATIVE = SPECULATIVE[2:]
# The files in which a repository names code, its own or another's.
_WITH_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# They draft without a model (vllm/config/speculative.py).
_WITHOUT_MODEL = ("ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")
_OWN_LAYERS = ("mtp", "dspark")


class _Refused(Exception):
    """The reason and the cure, as they stand behind `trust_remote_code: `."""


@dataclass(frozen=True, slots=True)
class _Repository:
    """A hub's repository whose code an engine runs, at a branch, a tag or a commit."""

    hub_id: str
    revision: str

    @property
    def key(self) -> str:
        return f"{self.hub_id}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    def written(self, state_dir: Path) -> str | None:
        """Its own commit, else the one that is written down. Raises CommitUnknown and LoadRefused for the file."""
        return self.revision if self.is_pinned else _table(state_dir).get(self.key)

    def current(self, spec: ModelConfig, env: Mapping[str, str]) -> str | None:
        """The commit that the revision leads to: in this node's cache, else as the hub or another node last answered."""
        folder = folder_of(self.hub_id, self.revision, env)
        commit = Path(folder).name if folder is not None else commit_of(self.entry(spec), env)
        return commit if commit is not None and _COMMIT.fullmatch(commit) else None

    def entry(self, spec: ModelConfig) -> ModelConfig:
        """The entry with this repository as its model."""
        if spec.model == self.hub_id and (spec.revision or _MAIN) == self.revision:
            return spec
        return spec.model_copy(update={"model": self.hub_id, "revision": self.revision})


def at_trusted_commit(spec: ModelConfig, config: Config) -> ModelConfig:
    """The entry at the commit that its first start wrote down, for whoever reads the files that its engine will get; without one, or
    where the table cannot be used, which a start refuses, as it is. Blocks."""
    if not _runs_code_of_a_hub(spec, config):
        return spec
    try:
        commit = _model_of(spec).written(config.state_dir)
    except (CommitUnknown, LoadRefused):
        return spec
    return spec if commit is None else _at(spec, commit)


def pinned(spec: ModelConfig, config: Config) -> ModelConfig:
    """The entry at the commits whose code it may run: its `revision`, else that of its first start, else the one that is here now; its
    draft alike. An entry that trusts no code, or serves a folder, is returned as it is. Blocks.

    Raises CommitUnknown where no commit is known now, and LoadRefused where code of another repository would run at none.
    """
    try:
        return _pinned(spec, config) if _runs_code_of_a_hub(spec, config) else spec
    except _Refused as refused:
        raise LoadRefused(f"{spec.name} cannot be loaded: trust_remote_code: {refused}") from None


def refusal(spec: ModelConfig, config: Config) -> str | None:
    """The reason why `pinned` raises LoadRefused, with the cure; None where it does not. Blocks."""
    try:
        if _runs_code_of_a_hub(spec, config):
            _pinned(spec, config)
    except CommitUnknown:
        return None
    except _Refused as refused:
        return str(refused)
    except LoadRefused as error:
        return error.message
    return None


def remember(entry: ModelConfig, started: ModelConfig, config: Config) -> Sequence[str]:
    """Write down the commits of a start. started: what `pinned` made of the entry. Returns a message for the operator for each repository
    of which this node has another commit now. Blocks; raises CommitUnknown and LoadRefused where the table cannot be used or written."""
    if entry.model != started.model or not _runs_code_of_a_hub(entry, config):
        return ()
    env = entry.environment(config.engine)
    floating = {
        repository: at.revision
        for repository, at in zip(_repositories(entry), _repositories(started), strict=True)
        if at.is_pinned and not repository.is_pinned
    }
    table = _table(config.state_dir) if floating else {}
    if any(repository.key not in table for repository in floating):
        table = {repository.key: commit for repository, commit in floating.items()} | table
        _write(config.state_dir, table)
    return [
        moved(repository.hub_id, repository.revision, commit, current)
        for repository, commit in floating.items()
        if (current := repository.current(entry, env)) not in (None, commit)
    ]


def commits_of(started: ModelConfig) -> Commits | None:
    """The commits that an engine of a pinned entry is held to; None where it runs no code of a hub."""
    model, codes = _model_of(started), _flags(started, _CODE)[-1:]
    if not started.trusts_code() or not model.is_pinned or not codes or started.model.startswith("/"):
        return None
    commits = {model.hub_id: [model.revision, *codes]}
    if tokenizers := _flags(started, _TOKENIZER):
        commits.setdefault(tokenizers[-1], []).append(_flags(started, _TOKENIZER_REVISION)[-1])
    if (draft := _draft_of(started)) is not None:
        codes.append(str(_speculation(started.extra_args)[-1]["code_revision"]))
        commits.setdefault(draft.hub_id, []).extend([draft.revision, codes[-1]])
    own = {repository.revision for repository in _repositories(started)}
    others = [commit for commit in dict.fromkeys(codes) if commit not in own]
    return Commits({hub_id: list(dict.fromkeys(hashes)) for hub_id, hashes in commits.items()}, others)


def moved(hub_id: str, revision: str, commit: str, current: str | None) -> str:
    """A message for the operator: the branch or tag `revision` is at `current`, and the first start trusted `commit`."""
    return (
        f"The code of {hub_id} runs at commit {commit}, which its first start trusted. {revision} is at {current} now. To serve that, "
        f"read its code, then set its `revision` to {current}."
    )


def _runs_code_of_a_hub(spec: ModelConfig, config: Config) -> bool:
    vllm = spec.runs_vllm(config.engine)
    return vllm and spec.trusts_code() and not spec.model.startswith("/") and not is_elsewhere(spec.environment(config.engine))


def _pinned(spec: ModelConfig, config: Config) -> ModelConfig:
    env, model = spec.environment(config.engine), _model_of(spec)
    commit = _commit(model, spec, config)
    if commit is None:
        raise CommitUnknown(
            f"{spec.name} cannot be loaded: trust_remote_code applies to one commit, and this node does not know the commit of "
            f"{spec.model}. Run `sparkd pull {spec.name}`, or set `revision` to a commit."
        )
    decided, flags = _at(spec, commit), list[str]()
    for name in (_CODE, _TOKENIZER_REVISION):
        if (values := _flags(spec, name)) and not _COMMIT.fullmatch(values[-1]):
            raise _Refused(f"it applies to one commit, and --{name} {values[-1]} is not a commit. Give the commit instead.")
    if not _flags(spec, _CODE):
        if other := next(_others(_Repository(spec.model, commit), spec, env), None):
            raise _Refused(
                f"it applies to {spec.model} at one commit, and its code lies in {other}. Read it, then add `--code-revision` with the "
                f"commit of {other} to extra_args."
            )
        flags += [f"--{_CODE}", commit]
    if not _flags(spec, _TOKENIZER_REVISION):
        tokenizer = _flags(spec, _TOKENIZER)
        if tokenizer and not tokenizer[-1].startswith("/") and tokenizer[-1] != spec.model:
            raise _Refused(
                f"it applies to one commit, and --tokenizer {tokenizer[-1]} names no commit. Add `--tokenizer-revision` with its commit to "
                "extra_args."
            )
        flags += [f"--{_TOKENIZER_REVISION}", commit]
    decided = decided.model_copy(update={"extra_args": [*decided.extra_args, *flags]})
    return _with_draft(decided, spec, commit, config)


def _with_draft(decided: ModelConfig, spec: ModelConfig, commit: str, config: Config) -> ModelConfig:
    """decided: the entry with its model at `commit`; vLLM gives a draft the model's trust, and neither its revision nor its code's."""
    if loose := next(_loose_drafts(spec.extra_args), None):
        raise _Refused(
            f"it applies to one commit, and {loose} may name a draft without a commit. Write it as one {SPECULATIVE} with a JSON mapping "
            "in extra_args."
        )
    draft = _draft_of(spec)
    if draft is None:
        return decided
    first, last, speculation = _speculation(decided.extra_args)
    its_commit = commit if draft == _model_of(spec) else _commit(draft, spec, config)
    if its_commit is None:
        raise _Refused(
            f"it applies to one commit, and this node does not know the commit of the draft {draft.hub_id}. Set `revision` in "
            f"{SPECULATIVE} to its commit, or run `sparkd pull {draft.hub_id}`."
        )
    if not _COMMIT.fullmatch(str(speculation.get("code_revision") or its_commit)):
        raise _Refused(
            f"it applies to one commit, and code_revision {speculation['code_revision']} in {SPECULATIVE} is not a commit. Give the "
            "commit instead."
        )
    if speculation.get("code_revision") is None and draft.hub_id == spec.model:
        speculation["code_revision"] = _flags(decided, _CODE)[-1]
    elif speculation.get("code_revision") is None:
        if other := next(_others(_Repository(draft.hub_id, its_commit), spec, spec.environment(config.engine)), None):
            raise _Refused(
                f"it applies to one commit of the draft {draft.hub_id}, and its code lies in {other}. Read that code, then set "
                f"`code_revision` in {SPECULATIVE} to the commit of {other}."
            )
        speculation["code_revision"] = its_commit
    args = list(decided.extra_args)
    args[first : last + 1] = [SPECULATIVE, json.dumps({**speculation, "revision": its_commit})]
    return decided.model_copy(update={"extra_args": args})


def _at(spec: ModelConfig, commit: str) -> ModelConfig:
    flags = _flags(spec, _REVISION)
    flag = [f"--{_REVISION}", commit] if flags and flags[-1] != commit else []
    return spec.model_copy(update={"revision": commit, "extra_args": [*spec.extra_args, *flag]})


def _flags(spec: ModelConfig, name: str) -> list[str]:
    """The values of a flag, in their order."""
    return [value for *_, value in values_of(spec.extra_args, name)]


def _commit(repository: _Repository, spec: ModelConfig, config: Config) -> str | None:
    return repository.written(config.state_dir) or repository.current(spec, spec.environment(config.engine))


def _repositories(spec: ModelConfig) -> list[_Repository]:
    return [_model_of(spec), *filter(None, [_draft_of(spec)])]


def _model_of(spec: ModelConfig) -> _Repository:
    """vLLM takes the last flag."""
    flags = _flags(spec, _REVISION)
    return _Repository(spec.model, flags[-1] if flags else spec.revision or _MAIN)


def _draft_of(spec: ModelConfig) -> _Repository | None:
    """The repository that a draft comes from; None where nothing drafts, or it needs no repository. The layers of the model itself are
    its own at its own revision."""
    *_, speculation = _speculation(spec.extra_args)
    method, name = str(speculation.get("method")), speculation.get("model")
    revision = speculation.get("revision")
    if name is None and method.endswith(_OWN_LAYERS):
        name = spec.model
    if not isinstance(name, str) or not is_hub_id(name) or {name, method} & {*_WITHOUT_MODEL}:
        return None
    if name == spec.model and revision is None:
        return _model_of(spec)
    return _Repository(name, str(revision or _MAIN))


def _speculation(args: Sequence[str]) -> tuple[int, int, dict[str, Any]]:
    """(first, last, value) of the last --speculative-config, the indices of its arguments; an empty value for none and for what vLLM
    cannot read either."""
    for first, last, text in reversed(list(values_of(args, _SPECULATIVE))):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            break
        if isinstance(value, dict):
            return first, last, {key.replace("-", "_"): part for key, part in value.items()}
        break
    return 0, 0, {}


def _loose_drafts(args: Sequence[str]) -> Iterator[str]:
    """The flags beside one whole --speculative-config that may name a draft."""
    for arg in args:
        name, flag = flag_name(arg), arg.partition("=")[0]
        short = name is None and arg.startswith("-sc")
        cut = name is not None and name != _SPECULATIVE and name.startswith("spec") and _SPECULATIVE.startswith(name)
        if short or cut or name == "spec-model" or (name == _SPECULATIVE and "." in flag):
            yield flag
    for *_, method in values_of(args, "spec-method"):
        if method not in _WITHOUT_MODEL:
            yield "--spec-method"


def _others(repository: _Repository, spec: ModelConfig, env: Mapping[str, str]) -> Iterator[str]:
    """The other repositories whose code the configuration names (transformers, dynamic_module_utils: `repository--module.Class`). Files
    that cannot be read name none."""
    folder = folder_of(repository.hub_id, repository.revision, env)
    files = Folder(folder) if folder is not None else looked_at(repository.entry(spec), env)
    for name in _WITH_CODE:
        if files is None or name not in files.names:
            continue
        try:
            config = json.loads(files.content(name))
        except (CheckpointError, ValueError, RecursionError):
            continue
        classes = config.get("auto_map") if isinstance(config, dict) else None
        for value in classes.values() if isinstance(classes, dict) else ():
            for module in value if isinstance(value, list) else [value]:
                hub_id, marks, _ = str(module).partition("--")
                if marks and hub_id != repository.hub_id:
                    yield hub_id


def _table(state_dir: Path) -> dict[str, str]:
    """By repository and revision, the commit of the first start. Raises CommitUnknown where it cannot be read, and LoadRefused for a
    damaged one: it may have held anything."""
    path = state_dir / FILE
    try:
        table = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CommitUnknown(
            f"{path}, which has the commits of trusted code, cannot be read: {error.strerror}. Check its owner and mode."
        ) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, type(error).__name__) from None
    if not isinstance(table, dict) or not all(isinstance(commit, str) and _COMMIT.fullmatch(commit) for commit in table.values()):
        raise _damaged(path, "it is not a table of commits")
    return table


def _write(state_dir: Path, table: Mapping[str, str]) -> None:
    path = state_dir / FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(table, indent=1, sort_keys=True))
    except OSError as error:
        raise CommitUnknown(
            f"{path}, which has the commits of trusted code, cannot be written: {error.strerror}. Check its owner and the disk."
        ) from None


def _damaged(path: Path, reason: str) -> LoadRefused:
    cure = "Remove it, and set `revision` to a commit."
    return LoadRefused(f"{path}, which has the commits of trusted code, cannot be used ({reason}). {cure}")
