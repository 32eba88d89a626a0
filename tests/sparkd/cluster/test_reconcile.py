"""Real Ray: memory that nobody booked and nothing uses is given back, and what is booked stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparkd.cluster.ray_head import RayHead
from tests.support.daemon_process import ROOT

RUN = """
import asyncio, json, sys
from tests.support.waiting import HUNG_S
from pathlib import Path
from sparkd.cluster.cluster import Cluster
from sparkd.config.config import load_config

async def main(folder):
    flags = {"state_dir": str(folder / "state"), "runtime_dir": str(folder / "run"), "cluster.port": 0, "memory.os_reserve_gib": 1}
    cluster = Cluster(load_config(None, flags=flags, environ={}), {})
    joined = asyncio.Event()
    running = asyncio.create_task(cluster.run(joined.set))
    await asyncio.wait_for(joined.wait(), HUNG_S)
    link, here = cluster._link, cluster.node_ip
    assert await link.reserve("lost", 1, [here], 20.0)
    await cluster.places.reserve("booked", 1, [here])
    before = sorted(await link.kept_groups())
    async with asyncio.timeout(HUNG_S):
        while (now := sorted(await link.kept_groups())) == before:
            await cluster.observe()
            await asyncio.sleep(0.5)
    # A connection that is made anew finds the same.
    await link.disconnect()
    joined.clear()
    await asyncio.wait_for(joined.wait(), HUNG_S)
    again = sorted(await link.kept_groups())
    import ray
    free = ray.available_resources()["unified_memory_gib"] - cluster.total_gib
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await cluster.close(stop_ray=True)
    print(json.dumps({"before": before, "now": now, "again": again, "free": free}))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.rest
def test_what_nobody_booked_and_nothing_uses_is_given_back() -> None:
    folder = tempfile.mkdtemp(prefix="rc-")
    head = RayHead(Path(folder, "run"), Path(folder, "token"), node_ip="127.0.0.1", port=0, memory_gib=1, object_store_mib=80)
    try:
        done = subprocess.run([sys.executable, "-c", RUN, folder], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
    finally:
        head.stop()
        shutil.rmtree(folder, ignore_errors=True)

    assert found == {"before": ["booked", "lost"], "now": ["booked"], "again": ["booked"], "free": -1.0}
