"""Real Ray: the placement group of an engine on vLLM's Ray executor outlives the daemon's connection and holds no memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparkd.cluster.ray_head import RayHead, RayOptions
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
    made = await link.make_group("start", [here])
    import ray
    from ray.util import get_placement_group
    free = ray.available_resources()["unified_memory_gib"] - cluster.total_gib
    # A connection that is made anew finds it.
    await link.disconnect()
    joined.clear()
    await asyncio.wait_for(joined.wait(), HUNG_S)
    again = get_placement_group("workers:start").id.hex()
    await link.remove_group("start")
    await link.remove_group("start")
    try:
        gone = not get_placement_group("workers:start")
    except ValueError:
        gone = True
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await cluster.close(stop_ray=True)
    print(json.dumps({"same": again == made, "free": free, "gone": gone}))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.rest
def test_a_group_stays_until_it_is_removed_and_takes_no_memory() -> None:
    folder = tempfile.mkdtemp(prefix="rc-")
    head = RayHead(RayOptions(Path(folder, "run"), Path(folder, "token"), memory_gib=1, object_store_mib=80))
    try:
        done = subprocess.run([sys.executable, "-c", RUN, folder], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
    finally:
        head.stop()
        shutil.rmtree(folder, ignore_errors=True)

    assert found == {"same": True, "free": 0.0, "gone": True}
