"""`sparkd ray-node` on the second of two nodes, and what a test asks of it. Never fakes any part of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparkd.units import GIB
from tests.support.daemon_process import ROOT
from tests.support.namespaces import Namespace
from tests.support.processes import command_of
from tests.support.waiting import HUNG_S
from workers.host.meminfo import sample


@dataclass
class RayNode:
    """`sparkd ray-node` on the second node. Whoever ends it starts it again, as its systemd unit does."""

    node: Namespace
    folder: Path
    settings: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    # pytest's folders are too long for the sockets of Ray.
    runtime_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rn-")))
    _kept: threading.Event = field(default_factory=threading.Event)

    def start(self, *words: str, stdin: bytes = b"") -> None:
        """`sparkd ray-node`, or what else `words` say: a command that stays."""
        self.config.write_text(yaml.safe_dump(self.settings | {"state_dir": str(self.state_dir), "runtime_dir": str(self.runtime_dir)}))
        with self.node.entered(), self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sparkd", *(words or ("ray-node",)), "--config", str(self.config)],
                cwd=ROOT,
                env=os.environ | self.environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if self.process.stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.close()

    @property
    def config(self) -> Path:
        return self.folder / "sparkd.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "ray-node.log"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def pid_of(self, name: str) -> int:
        """The process of this node that is called so (`raylet`, `ray::Agent`), 0 where there is none."""
        return next((pid for pid in self.node.pids() if name_of(pid) == name), 0)

    def keep(self) -> None:
        """As systemd does: whenever it ends it is started again, until `leave`."""
        self._kept = threading.Event()

        def watch() -> None:
            while not self._kept.wait(1.0):
                if self.process is not None and self.process.poll() is not None:
                    self.start()

        threading.Thread(target=watch, daemon=True).start()

    def leave(self) -> None:
        """Nobody starts it again; it ends with SIGTERM."""
        self._kept.set()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def ended(self) -> int:
        return self.process.wait(HUNG_S) if self.process else 0


def reserve_gib(offered_gib: int) -> float:
    """What a node keeps so that it offers so much. Half a GiB is spare: MemTotal is no whole number of them."""
    return int(sample()["mem_total_bytes"]) / GIB - offered_gib - 0.5


def name_of(pid: int) -> str:
    """The program, or the title that Ray gave its process."""
    words = command_of(pid)
    return os.path.basename(words[0]).strip() if words else ""
