"""Owns the arguments that an installed vLLM's parser refuses: asked in a child of its Python environment, and kept on disk.

Never imports vLLM. The packages of the environment are part of the key, because a plugin may add flags.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import workers
from sparkd.errors import EngineError, StateError
from sparkd.state.folder_owner import refuse_another_users
from sparkd.vllm.arg_check import ANOTHER_PARSER, RefusedArg
from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.installed import full_version_in, packages_of
from sparkd.vllm.translate import release_of, translated, values_of
from workers.vllm.ask.model_question import told

OF_ROOT = Path("/var/cache/sparkd")
RefusedArgs = tuple[RefusedArg, ...]
# Flags and variables of an engine.
Subject = tuple[Sequence[str], Mapping[str, str]]

# Imports of vLLM and torch: 15 s on two slow cores, and a disk may be cold.
TIMEOUT_S = 120.0
MOST_KEPT = 1024
_PROGRAM = "workers.vllm.ask.parse_args"
_FILES = tuple(Path(workers.__file__).parent / "vllm" / name for name in ("ask/parse_args.py", "symbols.py"))
# Flags whose plain numbers every vLLM accepts: another number of theirs is no new question.
_NUMBERS = ("max-model-len", "max-num-seqs", "max-num-batched-tokens")
# Answers that this process received and no folder keeps. _silent: environments that gave no answer; they are not asked again.
_answered: dict[str, RefusedArgs] = {}
_silent: set[str] = set()


def refused(args: Sequence[str], env: Mapping[str, str], runtime: Path | None, state_dir: Path, *, ask: bool) -> tuple[FlagNote, ...]:
    """A note for each argument that the parser of this runtime's vLLM will refuse, once translated as for a start. ask: see `answers`."""
    return refused_of([(args, env)], runtime, state_dir, ask=ask)[0]


def refused_of(
    subjects: Sequence[Subject], runtime: Path | None, state_dir: Path, *, ask: bool, first: Callable[[], None] | None = None
) -> list[tuple[FlagNote, ...]]:
    """Like `refused`, for several engines of one runtime: one child answers all questions whose answers are not kept."""
    version = full_version_in(runtime)
    if version is None:
        return [() for _ in subjects]
    lines = {
        number: translated(args, env, release_of(version)).args
        for number, (args, env) in enumerate(subjects)
        if not any(name in env for name in ANOTHER_PARSER)
    }
    known = dict(zip(lines, answers(list(lines.values()), runtime, places(state_dir), ask=ask, first=first), strict=True))
    return [tuple(refusal.note(version) for refusal in known.get(number) or ()) for number in range(len(subjects))]


def announce() -> None:
    """Write to stderr that an answer takes a while."""
    sys.stderr.write("Asking the parser of the installed vLLM: that takes as long as its import, once for the same arguments.\n")
    sys.stderr.flush()


def answers(
    lines: Sequence[Sequence[str]], runtime: Path | None, folders: Sequence[Path], *, ask: bool, first: Callable[[], None] | None = None
) -> list[RefusedArgs | None]:
    """The refused arguments of each list in `lines`; None for a list where there is no vLLM or no answer.

    runtime: an interpreter, None for sparkd's own. folders: they keep answers; a new one goes to the first that is writable. ask: ask
    vLLM for the missing answers, all in one child process, which takes as long as vLLM's import; an environment that fails is not asked
    again by this process. first: called before the child starts.
    """
    interpreter = Path(sys.executable) if runtime is None else runtime
    version = full_version_in(runtime)
    if version is None:
        return [None for _ in lines]
    environment = _environment(interpreter, version)
    questions = [_question(line) for line in lines]
    keys = [hashlib.sha256(json.dumps([environment, question]).encode()).hexdigest()[:24] for question in questions]
    found = {key: _kept(key, folders) for key in keys}
    open_ = {key: question for key, question in zip(keys, questions, strict=True) if found[key] is None}
    if open_ and ask and environment not in _silent:
        if first is not None:
            first()
        try:
            _, given = asked(interpreter, list(open_.values()))
        except (EngineError, OSError):
            given = []
            _silent.add(environment)
        for key, refusals in zip(open_, given, strict=False):
            found[key] = _answered[key] = refusals
            _keep(json.dumps([asdict(refusal) for refusal in refusals]), [folder / f"{key}.json" for folder in folders])
    return [found[key] for key in keys]


def places(state_dir: Path) -> list[Path]:
    """The folders that keep answers: the daemon's where it exists, the user's own, and root's, which is for every user to read: what root
    has asked, the daemon need not."""
    cache = os.environ.get("XDG_CACHE_HOME") or ("/var/cache" if os.geteuid() == 0 else os.path.expanduser("~/.cache"))
    folders = [*([state_dir] if state_dir.is_dir() else []), Path(cache, "sparkd"), OF_ROOT]
    return [folder / "vllm-flags" for folder in dict.fromkeys(folders) if folder.is_absolute()]


def _environment(interpreter: Path, version: str) -> str:
    parts = [str(interpreter), version, *(path.read_text() for path in _FILES), *neighbours(interpreter)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _question(line: Sequence[str]) -> list[str]:
    """The arguments with 1 for each plain number of _NUMBERS."""
    question = list(line)
    for name in _NUMBERS:
        for first, last, value in values_of(line, name):
            if value.isascii() and value.isdecimal() and value.strip("0"):
                question[first : last + 1] = [f"--{name}=1"] if first == last else [line[first], "1"]
    return question


def neighbours(interpreter: Path) -> Iterator[str]:
    """The names, with versions, of the distributions in an interpreter's environment."""
    own = [Path(entry) for entry in sys.path if entry.endswith("-packages")] if interpreter == Path(sys.executable) else []
    for packages in dict.fromkeys([*packages_of(interpreter), *own]):
        with contextlib.suppress(OSError):
            yield from sorted(name for name in os.listdir(packages) if name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")))


def _kept(key: str, folders: Sequence[Path]) -> RefusedArgs | None:
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            return tuple(map(RefusedArg.of, json.loads((folder / f"{key}.json").read_bytes())))
    return _answered.get(key)


def asked(interpreter: Path, lines: Sequence[Sequence[str]]) -> tuple[str, list[RefusedArgs]]:
    """(version of the interpreter's vLLM, the refused arguments of each list). Raises EngineError where it gives no answer."""
    answer: dict[str, Any] = {}
    for line in told(interpreter, _PROGRAM, {"lines": [*map(list, lines)]}, threading.Event(), TIMEOUT_S):
        answer |= line
    try:
        found = [tuple(map(RefusedArg.of, refusals)) for _, refusals in zip(lines, answer["refused"], strict=True)]
        return str(answer["vllm"]), found
    except (ValueError, TypeError, KeyError):
        last = answer["ended"] or "no output"
        raise EngineError(f"{interpreter} has no parser of vLLM to ask: {last}. Give the Python that has vLLM.") from None


def _keep(text: str, kept: Sequence[Path]) -> None:
    for path in kept:
        with contextlib.suppress(OSError, StateError):
            put(path, text)
            break


def put(path: Path, text: str) -> None:
    """Write the file by a rename, so that no reader sees half of it, and remove the oldest files of its folder beyond MOST_KEPT. Raises
    OSError, and StateError for root in another user's folder: that user could lead its writes elsewhere."""
    refuse_another_users(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    aged = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
    for old in aged[:-MOST_KEPT]:
        old.unlink(missing_ok=True)
