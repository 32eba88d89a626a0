"""Owns the table of flags of each installed vLLM: read off once by a child in its Python environment, and kept on disk. Never imports it.

The packages beside it are part of the key, because a plugin may add flags.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import workers
from sparkd.errors import StateError
from sparkd.execution.as_owner import as_owner
from sparkd.vllm.arg_check import ANOTHER_PARSER, FlagTable, misfits, unspeculative
from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.installed import full_version_in, packages_of
from sparkd.vllm.translate import release_of, translated
from workers.host.interpreter import inherited_environment

# Imports of vLLM and torch: 15 s on two slow cores, and a disk may be cold.
TIMEOUT_S = 120.0
_PROGRAM = Path(workers.__file__).parent / "engine" / "flag_table.py"
_tables: dict[str, FlagTable | None] = {}


def refused(
    args: Sequence[str], env: Mapping[str, str], runtime: Path | None, state_dir: Path, *, ask: bool, aloud: bool = False
) -> tuple[FlagNote, ...]:
    """The arguments that the parser of this environment's vLLM will refuse, a sentence for each; see vllm_known. Translated as the start
    translates them. ask: see flag_table. aloud: a line on stderr says that it takes a while."""
    table = flag_table(runtime, places(state_dir), ask=ask, first=announce if aloud else None)
    if table is None:
        return ()
    args = translated(args, env, release_of(table.version)).args
    return (*misfits(args, env, table), *unspeculative(args, env, table.version))


def announce() -> None:
    """Write to stderr that the first reading takes a while."""
    sys.stderr.write("Reading the flags of the installed vLLM, once: that takes as long as its import.\n")
    sys.stderr.flush()


def flag_table(runtime: Path | None, folders: Sequence[Path], *, ask: bool, first: Callable[[], None] | None = None) -> FlagTable | None:
    """runtime: an interpreter, None for the one that this runs in. folders: where tables are kept, the first that can be written to.

    ask: where none is kept the environment is asked, which takes as long as vLLM's import, once: one that fails is not asked again by
    this process; `first` is called before. None where there is no vLLM, or it did not tell.
    """
    interpreter = Path(sys.executable) if runtime is None else runtime
    version = full_version_in(runtime)
    if version is None:
        return None
    key = _key(interpreter, version)
    if key not in _tables:
        found = next(filter(None, (_read(folder / f"{key}.json", version) for folder in folders)), None)
        if found is None:
            if not ask:
                return None
            if first is not None:
                first()
            found = _asked(interpreter, version, [folder / f"{key}.json" for folder in folders])
        _tables[key] = found
    return _tables[key]


def places(state_dir: Path) -> list[Path]:
    """Where tables are kept: the daemon's folder where it is there, and the user's own."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [*([state_dir / "vllm-flags"] if state_dir.is_dir() else []), *([own / "sparkd" / "vllm-flags"] if own.is_absolute() else [])]


def _key(interpreter: Path, version: str) -> str:
    chosen = [os.environ.get(name, "") for name in ANOTHER_PARSER]  # the child has these from us, as an engine has
    parts = [str(interpreter), version, _PROGRAM.read_text(), *chosen, *neighbours(interpreter)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def neighbours(interpreter: Path) -> Iterator[str]:
    """The names of what is installed beside it, versions included."""
    own = [Path(entry) for entry in sys.path if entry.endswith("-packages")] if interpreter == Path(sys.executable) else []
    for packages in dict.fromkeys([*packages_of(interpreter), *own]):
        with contextlib.suppress(OSError):
            yield from sorted(name for name in os.listdir(packages) if name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")))


def _read(path: Path, version: str) -> FlagTable | None:
    try:
        return FlagTable.of(version, json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _asked(interpreter: Path, version: str, kept: Sequence[Path]) -> FlagTable | None:
    text = _run(interpreter)
    try:
        table = FlagTable.of(version, json.loads(text or ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    for path in kept:
        with contextlib.suppress(OSError, StateError):
            as_owner(path.parent, partial(write_whole, path, text or ""))
            break
    return table


def _run(interpreter: Path) -> str | None:
    """The program's output; None where it fails or takes too long, and then nothing of it is left."""
    command = [str(interpreter), "-P", "-c", _PROGRAM.read_text()]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            command, stdin=null, stdout=pipe, stderr=null, cwd="/", env=inherited_environment(os.environ), start_new_session=True
        )
    except OSError:
        return None
    with child:
        try:
            said, _ = child.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    return said.decode(errors="replace") if child.returncode == 0 else None


def write_whole(path: Path, text: str) -> None:
    """By a rename, so that nobody reads half of it. Raises OSError."""
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
