"""Ray's processes, and the agent that the daemon starts in it: nothing of the daemon's own environment, nothing of its working folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.cluster import ray_head
from sparkd.cluster.ray_head import RayHead, RayOptions, node_environment
from workers.host.interpreter import PACKAGE_DIR

CANARY = b"canary-of-the-daemon"
DRIVER = """
import asyncio, os, sys
from sparkd.cluster.ray_connection import RayConnection

async def main(address, folder):
    link = RayConnection(os.environ, lambda node_ip: (f"{folder}/ranks", f"{folder}/log", 0.5))
    await link.connect(address, "127.0.0.1")
    print(await link.call("127.0.0.1", "pid", timeout_s=300.0), flush=True)
    await link.disconnect()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own paths are too long for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="ray-"))
    yield made
    shutil.rmtree(made)


def test_rays_processes_have_the_variables_of_the_list_and_import_nothing_from_the_drivers_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers would import from the folder in which the daemon was started, on every node."""
    hostile = folder / "hostile"
    for name in ("workers", "sparkd", "json", "yaml"):
        (hostile / name).mkdir(parents=True)
        (hostile / name / "__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
    monkeypatch.setenv("ONLY_THE_DAEMONS", CANARY.decode())
    monkeypatch.setenv("HF_TOKEN", "documented")
    # Else Ray's titles overwrite the environment that /proc shows.
    monkeypatch.setattr(ray_head, "node_environment", lambda *of: node_environment(*of) | {"SPT_NOENV": "1"})
    head = RayHead(RayOptions(folder, folder / "ray.token", memory_gib=4, object_store_mib=80))
    try:
        address = head.ensure()
        environ = os.environ | node_environment(head.options.token_path, "127.0.0.1") | {"PYTHONPATH": PACKAGE_DIR}
        command = [sys.executable, "-P", "-c", DRIVER, address, str(folder)]
        done = subprocess.run(command, cwd=hostile, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        agent = int(done.stdout.split()[-1])
        pids = {process.pid for process in head.costs()}
        environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in pids | {agent}}

        assert agent in pids and not (folder / "imported").exists()
        assert [pid for pid, text in environments.items() if CANARY in text] == []
        assert b"HF_TOKEN=documented" in environments[agent]
    finally:
        head.stop()
