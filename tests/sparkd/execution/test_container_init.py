"""`sparkd serve` as process 1 of a container without an init: orphans are reaped, and who waits for a child hears its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT
from tests.support.waiting import HUNG_S

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
PROGRAM = """
import asyncio, os, psutil, signal, subprocess, sys
from sparkd import __main__ as command_line
from tests.support.waiting import eventually

def zombies():
    # A process that ends meanwhile has no status: None.
    return [each.pid for each in psutil.process_iter(["status"]) if each.info["status"] == psutil.STATUS_ZOMBIE]

async def verb():
    words = "import os; os.fork() or os._exit(0); os._exit({})"
    ends = []
    for code in (0, 3):
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", words.format(code), stdout=subprocess.PIPE)
        await child.communicate()  # until the orphan has ended, too
        ends += [child.returncode, subprocess.run([sys.executable, "-c", words.format(code)], capture_output=True).returncode]
    await eventually(lambda: not zombies(), "the orphans are reaped")
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print(os.getppid(), ends, flush=True)
    await told.wait()
    return 7

command_line.exit_code = lambda argv: asyncio.run(verb())
command_line.main(sys.argv[1:])
"""


@pytest.fixture
def container() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare is missing, or this user may make no namespaces of processes")
    made: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        made.append(subprocess.Popen([*CONTAINER, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=HUNG_S)


@pytest.mark.parametrize("verb", ["serve", "ray-node", "join"])
def test_process_1_reaps_orphans_takes_nobodys_exit_code_and_passes_signals_and_its_own_end_on(
    container: Callable[..., subprocess.Popen[str]], verb: str
) -> None:
    inside = container(sys.executable, "-c", PROGRAM, verb)
    assert inside.stdout is not None and inside.stdout.readline() == "1 [0, 0, 3, 3]\n"
    (first,) = Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text().split()
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", first], check=True)
    assert inside.wait(HUNG_S) == 7
