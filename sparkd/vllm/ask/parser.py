"""Asks the parser of an installed vLLM which arguments it refuses, in a child of its Python environment. Answers are kept on disk."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import workers
from sparkd.errors import EngineError
from sparkd.vllm.arg_check import ANOTHER_PARSER, RefusedArg
from sparkd.vllm.ask.cache import environment, keep, kept, neighbours, places
from sparkd.vllm.flags import parsed, words
from sparkd.vllm.installed import full_version_in
from workers.vllm.ask.model_question import told

RefusedArgs = tuple[RefusedArg, ...]
# Flags and variables of an engine.
Subject = tuple[Sequence[str], Mapping[str, str]]

# Imports of vLLM and torch: 15 s on two slow cores, and a disk may be cold.
TIMEOUT_S = 120.0
_PROGRAM = "workers.vllm.ask.parse_args"
_FILES = tuple(Path(workers.__file__).parent / "vllm" / name for name in ("ask/parse_args.py", "symbols.py"))
# Flags whose plain numbers every vLLM accepts: another number of theirs is no new question.
_NUMBERS = ("max-model-len", "max-num-seqs", "max-num-batched-tokens")


def refused(args: Sequence[str], env: Mapping[str, str], runtime: Path | None, state_dir: Path, *, ask: bool) -> RefusedArgs:
    """The arguments that the parser of this runtime's vLLM will refuse.

    None without an answer, and where variables may change the parser. ask: see `answers`.
    """
    return refused_of([(args, env)], runtime, state_dir, ask=ask)[0]


def refused_of(
    subjects: Sequence[Subject], runtime: Path | None, state_dir: Path, *, ask: bool, first: Callable[[], None] | None = None
) -> list[RefusedArgs]:
    """Like `refused`, for several engines of one runtime: one child answers all questions whose answers are not kept."""
    judged = [number for number, (_, env) in enumerate(subjects) if not any(name in env for name in ANOTHER_PARSER)]
    known = dict(
        zip(judged, answers([subjects[number][0] for number in judged], runtime, places(state_dir), ask=ask, first=first), strict=True)
    )
    return [known.get(number) or () for number in range(len(subjects))]


def announce() -> None:
    """Write to stderr that an answer takes a while."""
    sys.stderr.write("Asking the parser of the installed vLLM: that takes as long as its import, once for the same arguments.\n")
    sys.stderr.flush()


def answers(
    lines: Sequence[Sequence[str]], runtime: Path | None, folders: Sequence[Path], *, ask: bool, first: Callable[[], None] | None = None
) -> list[RefusedArgs | None]:
    """The refused arguments of each list in `lines`; None for a list where there is no vLLM or no answer.

    runtime: an interpreter, None for sparkd's own.
    folders: they keep answers; a new one goes to the first that can be written to.
    ask: ask vLLM for the missing answers, all in one child process, which takes as long as vLLM's import. Raises EngineError where it gives
    none.
    first: called before the child starts.
    """
    interpreter = Path(sys.executable) if runtime is None else runtime
    version = full_version_in(runtime)
    if version is None:
        return [None for _ in lines]
    beside = environment(version, neighbours(interpreter), _FILES)
    questions = [_question(line) for line in lines]
    keys = [hashlib.sha256(json.dumps([beside, question]).encode()).hexdigest()[:32] for question in questions]
    found = {key: None if (raw := kept(key, folders)) is None else tuple(map(RefusedArg.of, raw)) for key in keys}
    open_ = {key: question for key, question in zip(keys, questions, strict=True) if found[key] is None}
    if open_ and ask:
        if first is not None:
            first()
        try:
            _, given = asked(interpreter, list(open_.values()))
        except (EngineError, OSError) as error:
            message = f"vLLM's parser gave no answer about the arguments, and it is asked again: {error}"
            raise EngineError(message, reason="ParserSilent") from None
        for key, refusals in zip(open_, given, strict=True):
            found[key] = refusals
            keep(key, [asdict(refusal) for refusal in refusals], folders)
    return [found[key] for key in keys]


def asked(interpreter: Path, lines: Sequence[Sequence[str]]) -> tuple[str, list[RefusedArgs]]:
    """(version of the interpreter's vLLM, the refused arguments of each list). Raises EngineError where it gives no answer."""
    answer: dict[str, Any] = {}
    for line in told(interpreter, _PROGRAM, {"lines": [*map(list, lines)]}, threading.Event(), TIMEOUT_S):
        answer |= line
    try:
        found = [tuple(map(RefusedArg.of, refusals)) for _, refusals in zip(lines, answer["refused"], strict=True)]
        return str(answer["vllm"]), found
    except (ValueError, TypeError, KeyError):
        last = (answer["ended"] or "no output").rstrip(".")
        raise EngineError(f"{interpreter} has no parser of vLLM to ask: {last}. Give the Python that has vLLM.") from None


def _question(line: Sequence[str]) -> list[str]:
    """The arguments with 1 for each plain number of _NUMBERS."""
    flags = dict(parsed(line))
    for name in _NUMBERS:
        value = flags.get(name)
        if isinstance(value, str) and value.isascii() and value.isdecimal() and value.strip("0"):
            flags[name] = "1"
    return words(flags)
