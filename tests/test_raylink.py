"""The daemon's connection to Ray, as far as it needs no Ray: that its end does not hang on one that is being made."""

from __future__ import annotations

import subprocess
import sys

from sparkd.raylink import RayLink
from tests.daemon_process import ROOT

LEAVES_WHILE_CONNECTING = """
import threading
from sparkd.raylink import RayLink
RayLink({}, lambda node_ip: ("/run", "/log", 1.0))._ray()
from ray._private import worker
held = threading.Event()
def connect():
    with worker._connect_or_shutdown_lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=connect, daemon=True).start()
held.wait()
print("leaving")
"""


def test_a_process_ends_although_it_is_still_connecting() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_WHILE_CONNECTING], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "leaving\n"


async def test_who_never_joined_has_nothing_to_leave() -> None:
    link = RayLink({}, lambda node_ip: ("/run", "/log", 1.0))
    await link.disconnect()

    assert not link.connected
