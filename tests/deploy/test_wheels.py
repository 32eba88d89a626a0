"""deploy/wheels.py: what it reads out of pip's reports, without pip."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).parents[2] / "deploy" / "wheels.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparkd_deploy_wheels", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


wheels = _load()
SPARK = wheels.Target("aarch64", "3.12")


def _item(filename: str, *requires: str) -> dict[str, Any]:
    name, version = filename.split("-")[:2]
    return {
        "download_info": {"url": f"https://registry.invalid/packages/{filename}"},
        "metadata": {"name": name.replace("_", "-"), "version": version, "requires_dist": list(requires)},
    }


REPORT = {
    "version": "1",
    "install": [
        _item("ray-2.60.0-cp312-cp312-manylinux2014_aarch64.whl", "click>=7.0", "filelock", 'aiohttp; extra == "default"'),
        _item("click-8.5.1-py3-none-any.whl", 'colorama; platform_system == "Windows"'),
        _item("filelock-4.2.11-py3-none-any.whl"),
        _item("protobuf-7.36.2-cp310-abi3-manylinux2014_aarch64.whl"),
        _item("torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_aarch64.whl"),
        _item("fastapi-0.136.3-py3-none-any.whl", 'uvicorn[standard]>=0.12; extra == "standard"', 'x86-only; platform_machine == "x86_64"'),
        _item("uvicorn-0.54.0-py3-none-any.whl", 'uvloop; extra == "standard"', 'backport; python_version < "3.12"'),
    ],
}


def test_a_report_as_wheels() -> None:
    found = wheels.parse_report(REPORT)
    assert found["ray"] == wheels.Wheel("2.60.0", "cp312")
    assert found["click"] == wheels.Wheel("8.5.1", "any")
    assert found["protobuf"] == wheels.Wheel("7.36.2", "abi3")
    assert found["torch"] == wheels.Wheel("2.13.0+cpu", "cp312")


def test_requirements_are_followed_with_the_markers_of_the_target() -> None:
    reached = {
        ("ray==2.60.*", SPARK): ({"ray", "click", "filelock"}, []),
        ("ray[default]", SPARK): ({"ray", "click", "filelock"}, ["aiohttp"]),
        ("fastapi", SPARK): ({"fastapi"}, []),
        ("fastapi", wheels.Target("x86_64", "3.12")): ({"fastapi"}, ["x86-only"]),
        ("fastapi[standard]", SPARK): ({"fastapi", "uvicorn"}, ["uvloop"]),
        ("uvicorn", wheels.Target("aarch64", "3.11")): ({"uvicorn"}, ["backport"]),
        ("nowhere>=1", SPARK): (set(), ["nowhere>=1"]),
    }
    assert {(root, target): wheels.reach([root], REPORT, target) for root, target in reached} == reached


def test_every_target_is_looked_at() -> None:
    assert {(t.machine, t.python) for t in wheels.TARGETS} == {(m, p) for m in ("aarch64", "x86_64") for p in ("3.11", "3.12", "3.13")}
    for target in wheels.TARGETS:
        assert f"manylinux_2_28_{target.machine}" in target.platforms()
        assert target.environment()["platform_machine"] == target.machine
