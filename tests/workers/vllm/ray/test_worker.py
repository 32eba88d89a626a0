"""A rank under vLLM's Ray executor on its node: the keeper below the shim, and the worker that Ray starts in the rank's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.ranks import Place, a_place, stop
from tests.support.waiting import HUNG_S, until
from workers.guard.consumers import Consumers
from workers.rank import command, lifecycle, ray_environment
from workers.vllm.ray.engine import platform, settle
from workers.vllm.ray.worker import rank_of

place = pytest.fixture(a_place)
PLACED = {"address": "192.168.100.10:6379", "group": "c0ffee"}
WORKER = """
import json, os, signal, sys, time
print("worker", json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "RAY_JOB_ID", "SPARKD_RANK_ID",
      "RAY_LOG_TO_STDERR", "LEAKED")}]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def worker(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 of a model with its keeper, and the process that Ray would start."""
    env, plugin = {"GLOO_SOCKET_IFNAME": "enp1"}, (lifecycle.PACKAGE_DIR,)
    lifecycle.spawn(place.spec(rank=1, world=2, attempt="r0", ray=PLACED, socket_path=None, pythonpath=plugin, env=env))
    # Rank 0 has vLLM imported before it asks Ray for a worker.
    until(lambda: rank_of("r0", place.run_dir) and any(line.startswith("Waiting") for line in place.lines()), "the keeper is there")
    script = place.root / "default_worker.py"
    script.write_text(WORKER, encoding="utf-8")
    environ = {
        "PATH": os.defpath,
        "PYTHONPATH": lifecycle.PACKAGE_DIR,
        "SPARKD_RAY_RUN_DIR": place.run_dir,
        "RAY_JOB_ID": "7",
        "LEAKED": "x",
    }
    command = [sys.executable, "-m", "workers.vllm.ray.worker", "r0", str(script), "--node"]
    process = subprocess.Popen(command, env=environ, process_group=0)  # as Ray makes each of its workers
    until(lambda: any(line.startswith("worker ") for line in place.lines()))
    yield process
    process.kill()
    process.wait(HUNG_S)


def test_the_worker_has_its_nodes_environment_and_log_and_is_a_process_of_the_rank_that_ends_with_it(
    place: Place, worker: subprocess.Popen[bytes]
) -> None:
    line = next(line for line in place.lines() if line.startswith("worker "))
    arguments, environ = json.loads(line.removeprefix("worker "))

    assert arguments == ["--node"]
    assert environ == {
        "GLOO_SOCKET_IFNAME": "enp1", "RAY_JOB_ID": "7", "SPARKD_RANK_ID": "r1", "RAY_LOG_TO_STDERR": "1", "LEAKED": None,
    }  # fmt: skip
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0), "the memory of its session is its own, not that of Ray's processes"
    assert (place.fact()["alive"], place.fact()["processes"]) == (True, 2)
    holders = Consumers(place.run_dir, unified=False)
    holders.refresh(0.0)
    assert worker.pid in holders.ranks[0].pids
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: place.fact()["halted"])

    assert stop(place, {"rank_id": "r1"})["gone"]
    assert worker.wait(HUNG_S) == -signal.SIGKILL
    lifecycle.forget("r1", place.run_dir)
    assert list((place.root / "run").glob("r1*")) == []


def test_a_worker_that_ends_by_itself_ends_the_rank(place: Place, worker: subprocess.Popen[bytes]) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: place.fact()["state"] == "exited")

    assert (place.fact()["exit_code"], place.fact()["stop_ordered"]) == (1, False)
    assert f" {worker.pid}, " in place.log.read_text()


def test_a_worker_of_a_start_that_was_given_up_ends_with_a_sentence(place: Place) -> None:
    os.makedirs(place.run_dir)
    done = subprocess.run(
        [sys.executable, "-m", "workers.vllm.ray.worker", "r0", "worker.py"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": lifecycle.PACKAGE_DIR, "SPARKD_RAY_RUN_DIR": place.run_dir},
    )  # fmt: skip

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert " r0 " in line and place.run_dir in line
    assert rank_of("r0", "") is None


def test_rank_0_leads_vllm_into_our_ray_and_the_others_wait_for_their_worker(place: Place) -> None:
    flags = tuple(command.parallel_flags(2, 1, 0, "192.168.100.10", 29500, "ray"))
    first = place.spec(flags=flags, ray=PLACED, world=2, attempt="r1", env={"NCCL_IB_HCA": "rocep1s0f0"})
    second = replace(first, rank=1, rank_id="r1-r1", socket_path=None)
    starts = {"runtime_env": {"py_executable": "${SPARKD_RAY_PYTHON} -P -m workers.vllm.ray.worker r1"}, "metadata": {}}
    environ = command.build_environment(first, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t", "RAY_JOB_ID": "01"})

    assert flags == ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
    assert command.build_command(second) == [sys.executable, "-P", "-m", "workers.vllm.ray.keeper"]
    assert {name: environ[name] for name in environ if name.startswith(("RAY_", "SPARKD_RAY_G", "VLLM_RAY_"))} == {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t", "RAY_ADDRESS": PLACED["address"], "RAY_BACKEND_LOG_LEVEL": "error",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(starts),
        "RAY_USAGE_STATS_ENABLED": "0", "SPARKD_RAY_GROUP": "c0ffee", "VLLM_RAY_BUNDLE_INDICES": "0,1", "VLLM_RAY_PER_WORKER_GPUS": "0.01",
    }  # fmt: skip
    assert {"NCCL_IB_HCA", "SPARKD_RUN_DIR", "PATH"} <= set(environ[ray_environment.OWN].split(","))
    assert ray_environment.GROUP not in command.build_environment(replace(first, ray=None), {})


def test_a_runtime_without_ray_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    settle({})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match="Ray"):
        settle({ray_environment.GROUP: "c0ffee"})


def test_the_platform_is_vllms_own_unless_an_engine_on_cpus_is_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ray_environment.ON_CPU, raising=False)
    assert platform() is None
    monkeypatch.setenv(ray_environment.ON_CPU, "1")
    assert platform() == "workers.vllm.ray.cpu_platform.CpuPlatform"
