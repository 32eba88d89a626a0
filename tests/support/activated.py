"""A daemon as systemd's socket activation runs it: this process holds the listener, whatever becomes of the daemon. Never accepts."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.daemon_process import DaemonProcess

# LISTEN_PID is the daemon's own number, and descriptors begin at 3 (sd_listen_fds(3)).
_AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="gateway")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ActivatedDaemon(DaemonProcess):
    """`told` is what the daemon has notified; who notifies counts as supervised, so that SIGTERM leaves the engines."""

    def __init__(self, folder: Path, settings: dict[str, Any], environ: dict[str, str] | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.told: list[str] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        self._notify.bind(str(address))
        self._hears = threading.Thread(target=self._hear, daemon=True)
        self._hears.start()
        super().__init__(folder, settings, (environ or {}) | {"NOTIFY_SOCKET": str(address)})
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client.base_url = self.url  # type: ignore[assignment]
        self.configure(settings)

    def start(self, *arguments: str) -> None:
        number = self.listener.fileno()
        self._launch([sys.executable, "-I", "-S", "-c", _AS_SYSTEMD, str(number)], arguments, [number])

    def restart(self) -> None:
        """As `systemctl restart`: SIGTERM, its end, and the next one."""
        self.end(signal.SIGTERM)
        self.start()

    def gone(self) -> None:
        super().gone()
        self.listener.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._notify.getsockname())
        self._hears.join()
        self._notify.close()

    def _hear(self) -> None:
        """A manager that does not listen would hold the daemon up."""
        while said := self._notify.recv(4096):
            self.told.append(said.decode())
