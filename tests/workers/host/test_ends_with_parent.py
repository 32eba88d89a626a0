"""A program that ends with its parent gets what it would get if it were started without help."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

from tests.support.facts import lacking
from tests.support.waiting import HUNG_S
from workers.host import ends_with_parent
from workers.host.interpreter import module_command

VARIABLES = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ends_with_parent.environment(VARIABLES), cwd="/", capture_output=True, text=True, timeout=HUNG_S, check=False
    )


def test_the_program_has_its_arguments_its_environment_and_no_signal_that_is_ignored() -> None:
    """Python ignores SIGPIPE, and a program that it becomes would too: it would not end with the reader of its output."""
    shell = 'echo "$0 $1"; env; grep SigIgn /proc/self/status'
    done = _run(ends_with_parent.command(["/bin/sh", "-c", shell, "a name", "-lms"]))
    first, *lines = done.stdout.splitlines()
    assert (done.returncode, first) == (0, "a name -lms")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert {name: variables.get(name) for name in VARIABLES} == VARIABLES and "PYTHONPATH" not in variables
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    assert not ignored & 1 << signal.SIGPIPE - 1


def test_a_program_that_cannot_be_run_is_named() -> None:
    done = _run(ends_with_parent.command(["/nowhere/nvidia-smi"]))
    assert (done.returncode, done.stdout) == (ends_with_parent.REFUSED, "")
    assert lacking(done.stderr, "/nowhere/nvidia-smi", os.strerror(errno.ENOENT)) == []


def test_nothing_begins_where_the_parent_has_ended() -> None:
    done = _run(module_command(sys.executable, "workers.host.ends_with_parent", "1", "/bin/echo", "begun"))
    assert (done.returncode, done.stdout, done.stderr) == (ends_with_parent.REFUSED, "", "")
