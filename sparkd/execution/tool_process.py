"""Runs a program in a session of its own: follows it to its end, and ends it if the caller is cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sparkd.errors import RankError

LINE_BYTES = 1 << 20
_LAST_LINES = 20
_END_S = 10.0


def environment(home: Path, temporary: Path) -> dict[str, str]:
    """The daemon's own may hold keys, and a proxy would be asked for 127.0.0.1.

    home: in place of the user's.
    temporary: in place of /tmp.
    """
    own = {"HOME": str(home), "TMPDIR": str(temporary), "PATH": os.environ.get("PATH", os.defpath)}
    return {**own, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


async def run(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    said: Path,
    heard: Callable[[bytes], Awaitable[None]],
    given: bytes = b"",
) -> str:
    """Return the last line of its errors that speaks of one, else the last line.

    said: a file for its errors.
    heard: gets each line of its output.
    given: its input, which does not end before the program or the daemon does.

    Raises RankError where it does not end with 0.
    """
    with await asyncio.to_thread(said.open, "wb") as words:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            env=dict(env),
            limit=LINE_BYTES,
            start_new_session=True,
        )
    try:
        if process.stdin is not None:
            # One that has ended at once says why below.
            with suppress(ConnectionError):
                process.stdin.write(given)
                await process.stdin.drain()
        if process.stdout is not None:
            async for line in process.stdout:
                await heard(line)
        await process.wait()
    finally:
        await asyncio.shield(_end(process))
    reason = await asyncio.to_thread(_reason, said)
    if process.returncode != 0:
        raise RankError(f"{name} ended with {process.returncode}: {reason}")
    return reason


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()


def _reason(said: Path) -> str:
    """The last line that speaks of an error, else the last one."""
    lines = [line.strip()[:500] for line in said.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:] if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1]
