"""The soak's full disk: a daemon whose state folder is a small tmpfs, in a mount namespace of its own, filled to the last byte."""

from __future__ import annotations

import errno
import shlex
import subprocess
import time
from pathlib import Path

from tests.bench.soak_watch import Chats
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import until

PIECE_BYTES = 4096
RECOVERS_S = 60.0


class SmallState(DaemonProcess):
    """mib: the size of the tmpfs. Nothing outside sees it, and it goes with the daemon."""

    mib = 8

    def start(self, *arguments: str) -> None:
        self.state_dir.mkdir(mode=0o700, exist_ok=True)
        mount = f'mount -t tmpfs -o size={self.mib}m,mode=700 none {shlex.quote(str(self.state_dir))} && exec "$@"'
        self._launch(("unshare", "-m", "sh", "-c", mount, "sh"), arguments)

    @property
    def inside(self) -> Path:
        """The state folder as the daemon sees it."""
        if self.process is None:
            raise RuntimeError("the daemon does not run")
        return Path(f"/proc/{self.process.pid}/root{self.state_dir}")


def why_not() -> str | None:
    """Why nothing can be mounted here."""
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"unshare ended with {done.returncode}"


def fill_and_empty(made: SmallState, full_s: float) -> tuple[int, list[str]]:
    """(requests, faults): chats go on before, while and after the folder is full for full_s; meanwhile the model is unloaded and loaded."""
    chats = Chats(made)
    faults: list[str] = []
    with chats:
        time.sleep(full_s / 2)
        filler = made.inside / "filler"
        ends_s = time.monotonic() + full_s
        _fill(filler)
        # The daemon cannot write down a wish that comes now.
        made.unload("m")
        made.load("m")
        while time.monotonic() < ends_s:
            _fill(filler)
            time.sleep(0.1)
        if not _unsaved(made):
            faults.append(f"a full state folder is not among the conditions: {made.status().get('conditions')}")
        filler.unlink()
        try:
            made.load("m")
            made.wait_for("m", "READY", RECOVERS_S)
            until(lambda: not _unsaved(made), "what is asked for is saved again", limit_s=RECOVERS_S)
        except AssertionError as error:
            faults.append(str(error))
        answered = chats.count
        time.sleep(full_s / 2)
        if chats.count == answered:
            faults.append("no chat is answered behind it")
    if chats.bad:
        faults.append(f"chats ended with {sorted(chats.bad)}")
    return chats.count, faults


def _unsaved(made: DaemonProcess) -> bool:
    return any("StateNotSaved" in condition for condition in made.status()["conditions"])


def _fill(filler: Path) -> None:
    """Whatever the daemon has freed meanwhile, too."""
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, PIECE_BYTES, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
