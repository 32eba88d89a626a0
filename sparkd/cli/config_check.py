"""Finds the errors of a configuration file (the daemon or an entry would not start) and what is unwise in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sparkd.config import config, kv_cache, quantize
from sparkd.config.api_keys import load_keys
from sparkd.config.config import Config, check_bind
from sparkd.config.model import ModelConfig
from sparkd.config.overlay import in_order
from sparkd.config.yaml_file import ConfigProblem, Document
from sparkd.errors import ConfigError, EngineError
from sparkd.vllm import logging_args
from sparkd.vllm.flags import flags_in, value_of
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.missing_symbols import missing_in
from sparkd.vllm.unaccounted_args import reserved_whole
from workers.vllm.symbols import SUPPORTED

_NO_ADMIN_KEY = "There are inference keys but no admin key, so the admin API and the command line cannot be used: set keys.admin_file."
# 107 less `/ray/session_YYYY-MM-DD_hh-mm-ss_ffffff_12345/sockets/plasma_store` (ray/_private/node.py).
_RUNTIME_BYTES = 40
_ROLES = ("inference", "admin")
# Keys whose values another flag than the one of their name carries.
_FLAG_OF = {"override-generation-config": "sampling", "enable-auto-tool-choice": "tool_call_parser"}
# Keys whose values vLLM's parser may refuse; numbers are judged where the file is read.
_JUDGED = ("dtype", "kv_cache_dtype", "quantization", "load_format", "sampling", "tool_call_parser", "reasoning_parser")
# Flags whose value is a file or a folder where it is a whole path.
_FILES = ("chat-template", "tool-parser-plugin", "reasoning-parser-plugin", "tokenizer", "hf-config-path")


def check(path: Path, environ: Mapping[str, str]) -> list[ConfigProblem]:
    """By line. Errors: `load_config` raises them, or an entry cannot start. Warnings: loose file rights, short keys, what is not there."""
    reading = config.read(path, {}, environ)
    valid, document = reading.config, reading.document
    if valid is None:
        return document.problems
    problems = [*_keys(valid, document, path, environ), *_machine(valid, document)]
    entries = [_Entry(model, valid, document) for model in valid.models.values()]
    problems += _of_vllm(entries, document)
    problems += _ask_parsers(entries, valid, document)
    for entry in entries:
        problems += entry.problems()
    return in_order(dict.fromkeys(problems))


def _of_vllm(entries: Sequence[_Entry], document: Document) -> Iterator[ConfigProblem]:
    """A warning for each consequence of what an environment's vLLM lacks."""
    for runtime in dict.fromkeys(entry.runtime for entry in entries if entry.runs_vllm):
        place = f"the vLLM {full_version_in(runtime)}{f' of {runtime}' if runtime else ''}"
        for without, names in missing_in(runtime).items():
            message = f"engine.runtime: {place} lacks {', '.join(names)}: {without}. Install {' or '.join(SUPPORTED)}."
            yield document.place(("engine", "runtime")).problem(message, "warning")


def _ask_parsers(entries: Sequence[_Entry], valid: Config, document: Document) -> Iterator[ConfigProblem]:
    """Asks each environment once for all of its models: an answer takes as long as an import of vLLM. A warning where there is none."""
    subjects: dict[Path | None, list[tuple[Sequence[str], Mapping[str, str]]]] = {}
    for entry in entries:
        if entry.judged is not None:
            subjects.setdefault(entry.runtime, []).append(entry.judged)
    if not subjects:
        return
    from sparkd.vllm.ask.parser import announce, refused_of

    for runtime, asked in subjects.items():
        try:
            refused_of(asked, runtime, valid.state_dir, ask=True, first=announce)
        except EngineError as error:
            yield document.place(("engine", "runtime")).problem(f"engine.runtime: {error.message}", "warning")


def _keys(valid: Config, document: Document, path: Path, environ: Mapping[str, str]) -> Iterator[ConfigProblem]:
    if (valid.keys.inference or valid.keys.admin) and path.stat().st_mode & 0o004:
        yield ConfigProblem(
            str(path), None, "Every user of this machine can read this file with its keys: chmod 640, or use keys.*_file.", "warning"
        )
    try:
        ring = load_keys(valid.keys, environ)
    except ConfigError as error:
        yield _in_file(ConfigProblem(error.file, error.line, error.explanation), valid, document)
        return
    yield from (_in_file(warning, valid, document) for warning in ring.warnings)
    if ring.inference and not ring.admin:
        yield document.place(("keys",)).problem(_NO_ADMIN_KEY, "warning")
    try:
        check_bind(valid, environ)
    except ConfigError as error:
        yield document.place(tuple((error.param or "").split("."))).problem(error.message)


def _in_file(problem: ConfigProblem, valid: Config, document: Document) -> ConfigProblem:
    """A problem with a key that stands in the configuration, or with a whole key file, at the line that has it."""
    for role in _ROLES:
        literal, key_file = f"keys.{role}", f"keys.{role}_file"
        if problem.file == literal:
            return document.place(("keys", role)).problem(f"{literal}: {problem.message}", problem.severity)
        if problem.line is None and problem.file == str(getattr(valid.keys, f"{role}_file")):
            return document.place(("keys", f"{role}_file")).problem(f"{key_file}: {problem.file}: {problem.message}", problem.severity)
    return problem


def _machine(valid: Config, document: Document) -> Iterator[ConfigProblem]:
    """Folders that are not there or too long, and models that are all to be loaded at start and never together."""
    if valid.runtime_dir is not None and (size := len(os.fsencode(valid.runtime_dir))) > _RUNTIME_BYTES:
        reason = f"{size} bytes are too long for the sockets in it, whose paths have 107 at most (unix(7))"
        message = f"runtime_dir: {reason}. Choose a folder of {_RUNTIME_BYTES} or less."
        yield document.place(("runtime_dir",)).problem(message, "warning")
    if valid.recipes_dir is not None and not os.path.isdir(valid.recipes_dir):
        message = f"recipes_dir: {valid.recipes_dir} is no folder of this node, or this user cannot read it."
        yield document.place(("recipes_dir",)).problem(message, "warning")
    if runtime := _not_run(valid.engine.runtime):
        yield document.place(("engine", "runtime")).problem(f"engine.runtime: {runtime[1]}", runtime[0])
    ties, preloaded = valid.groups.ties(valid.names()), valid.preload()
    for name in preloaded:
        if rivals := ties.rivals_of(name).intersection(preloaded[: preloaded.index(name)]):
            message = f"models.{name}.preload: {min(rivals)} is loaded at start too, and groups.exclude lets only one of them run."
            yield document.place(("models", name, "preload")).problem(message)


def _not_run(runtime: Path | None) -> tuple[str, str] | None:
    """(severity, message) about an interpreter that is not there, or is none."""
    # os.path does not raise where this user may not look, as Path does.
    if runtime is None or (os.path.isfile(runtime) and os.access(runtime, os.X_OK)):
        return None
    if not os.path.exists(runtime):
        return "warning", f"{runtime} does not exist on this node, or this user cannot read it."
    return "error", f"{runtime} is not an executable program. Name the Python interpreter of the environment."


class _Entry:
    """One model's entry.

    document: where its keys were written, in the file or in a recipe.
    """

    def __init__(self, model: ModelConfig, valid: Config, document: Document) -> None:
        self._config = valid
        self._document = document
        env = model.environment(valid.engine)
        self._model = model
        self._env = env
        self.runtime = model.runtime_of(valid.engine)
        self.runs_vllm = model.runs_vllm(valid.engine)

    @property
    def judged(self) -> tuple[Sequence[str], Mapping[str, str]] | None:
        """The flags and variables that its vLLM's parser judges; None where nothing in them is other than a number."""
        if not self.runs_vllm or not (self._model.extra_args or any(getattr(self._model, key) is not None for key in _JUDGED)):
            return None
        return self._model.vllm_flags(), self._env

    def problems(self) -> Iterator[ConfigProblem]:
        yield from self._of_itself()
        yield from self._of_flags()
        yield from self._of_files()

    def _of_itself(self) -> Iterator[ConfigProblem]:
        for key, message in kv_cache.impossible(self._model):
            yield self._at(key, message)
        if useless := quantize.remark(self._model):
            yield self._at("quantize", useless, "warning", bare=True)
        for remark in reserved_whole(self._model):
            yield self._at("extra_args", remark, "warning", bare=True)
        if loudness := logging_args.remark(self._model.vllm_flags(), self._env):
            yield self._at("extra_args", loudness, "warning", bare=True)
        if runtime := _not_run(self._model.runtime):
            yield self._at("runtime", runtime[1], runtime[0])
        elif self._model.runtime is not None and self.runs_vllm and full_version_in(self._model.runtime) is None:
            yield self._at("runtime", f"the environment of {self._model.runtime} has no vLLM.", "warning")

    def _of_flags(self) -> Iterator[ConfigProblem]:
        """Problems that the vLLM of its runtime would have with its flags, and with the values of its keys."""
        from sparkd.vllm.ask.parser import refused

        flags = self._model.vllm_flags()
        if not self.runs_vllm:
            return
        for name in _FILES:
            path = value_of(flags, name) or ""
            if path.startswith("/") and not os.path.lexists(path):
                yield self._at_flag(f"--{name}", f"{path} does not exist on this node.", "warning")
        if self.judged is not None:
            version = full_version_in(self.runtime) or ""
            for refusal in refused(flags, self._env, self.runtime, self._config.state_dir, ask=False):
                yield self._at_flag(refusal.flag, refusal.why(version))

    def _of_files(self) -> Iterator[ConfigProblem]:
        from sparkd.capacity.entry_faults import entry_faults

        with suppress(ConfigError):  # of a flag's value, which is said where it stands
            for found in entry_faults(self._model, self._env, self._config):
                yield self._at(found.key, found.message, "error" if found.ends_start else "warning", bare=found.names_key)

    def _at(self, key: str, message: str, severity: str = "error", *, bare: bool = False) -> ConfigProblem:
        """bare: the message names what it is about itself."""
        path = f"models.{self._model.name}" if bare else f"models.{self._model.name}.{key}"
        return self._document.place(("models", self._model.name, key)).problem(f"{path}: {message}", severity)

    def _at_flag(self, flag: str, reason: str, severity: str = "error") -> ConfigProblem:
        """A problem at the argument or the key that sets a flag; at extra_args where none does. flag: with its dashes, or empty."""
        name, message = flag.lstrip("-"), f"models.{self._model.name}: {flag or 'arguments'}: {reason}"
        for each in flags_in(self._model.extra_args):
            if name and each.name == name.removeprefix("no-"):
                return self._document.place(("models", self._model.name, "extra_args", each.place)).problem(message, severity)
        key = _FLAG_OF.get(name, name.replace("-", "_"))
        if key in ModelConfig.model_fields and getattr(self._model, key) is not None:
            return self._at(key, reason, severity)
        return self._document.place(("models", self._model.name, "extra_args")).problem(message, severity)
