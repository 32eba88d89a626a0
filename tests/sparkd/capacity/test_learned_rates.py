"""The rates that benches measured: kept by name, read back, and used for this node alone."""

from __future__ import annotations

from pathlib import Path

from sparkd.capacity.plan_for_node import learn, learned_rates, planning_hardware
from sparkd.config.config import Config
from sparkd.hardware import SPARK


def test_a_later_bench_replaces_its_own_rates(tmp_path: Path) -> None:
    learn(tmp_path, {"bandwidth_bytes_s": 1e11, "disk_bytes_s": 1e9})
    learn(tmp_path, {"disk_bytes_s": 2e9})
    assert learned_rates(tmp_path) == {"bandwidth_bytes_s": 1e11, "disk_bytes_s": 2e9}


def test_a_plan_takes_them_in_place_of_the_data_sheet(tmp_path: Path) -> None:
    config = Config.model_validate({"state_dir": tmp_path, "engine": {"platform": "cuda"}})
    plain = planning_hardware("node", config)
    learn(tmp_path, {"bandwidth_bytes_s": 2e11})
    hardware = planning_hardware("node", config)
    assert (hardware.bandwidth_bytes_s, hardware.disk_bytes_s) == (2e11, SPARK.disk_bytes_s)
    assert (hardware.learned, plain.learned, plain.bandwidth_bytes_s) == (("bandwidth_bytes_s",), (), SPARK.bandwidth_bytes_s)
    assert planning_hardware("spark", config) == SPARK
