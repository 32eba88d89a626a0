"""Frees a node's page cache, which CUDA cannot use, directly or through the root helper."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from workers.host import meminfo

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
DROP_SOCKET = Path("/run/sparkd-dropcache.sock")


class PageCache:
    """A base of workers.agent.actor.Agent. proc: the folder that stands for /proc."""

    def __init__(self, proc: Path) -> None:
        self._proc_folder = proc

    def drop_page_cache(self) -> dict[str, Any]:
        """Free clean page cache. The kernel checks for uid 0, so an ordinary user asks the root helper on its socket.

        Answers {"dropped": bool, "how": str, "freed_bytes": int}; a refusal is an answer, not an error.
        """
        before = meminfo.read_fields(self._proc_folder).get("MemFree", 0)
        how = self._drop()
        freed = meminfo.read_fields(self._proc_folder).get("MemFree", 0) - before
        return {"dropped": how in ("directly", "helper"), "how": how, "freed_bytes": max(0, freed)}

    def _drop(self) -> str:
        if os.geteuid() == 0:
            os.sync()
            try:
                DROP_CACHES.write_text("1\n")
            except OSError as error:
                return f"the kernel refused: {error.strerror}"
            return "directly"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as helper:
                helper.settimeout(30.0)
                helper.connect(str(DROP_SOCKET))
                answer = helper.recv(200).decode("ascii", "replace").strip()
        except OSError as error:
            return f"no root helper on {DROP_SOCKET}: {error.strerror or error}"
        # `limited`: it was dropped a moment ago, by another call.
        return "helper" if answer.startswith(("ok", "limited")) else f"the helper said: {answer[:100]}"
