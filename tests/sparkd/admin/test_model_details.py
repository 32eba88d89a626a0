"""What the page asks about one model: its settings beside what its engine says, its layers, its last start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin import model_details
from sparkd.admin.model_details import engine_settings
from sparkd.capacity.layers import LayerListing
from sparkd.capacity.plan_for_node import learn
from sparkd.checkpoint import bounded_read
from sparkd.checkpoint.remote_headers import checkpoint_at
from sparkd.config.overlay import MASK
from tests.sparkd.admin.test_app import TINY, admin_of
from tests.support.checkpoints import write_folder

LINES = [
    "sparkd: engine started as process 31907: /opt/vllm/bin/python -m vllm serve '/models/a b' --max-model-len 2048",
    "(APIServer pid=31907) INFO 11-21 07:41:09 [api_utils.py:286] non-default args: {'model_tag': '/models/tiny-moe', 'port': 8125, "
    "'enforce_eager': True, 'compilation_config': {'level': 3}, 'seed': None}",
]


def test_what_an_engine_says_of_itself() -> None:
    said = engine_settings(LINES)
    assert said["command"] == ["/opt/vllm/bin/python", "-m", "vllm", "serve", "/models/a b", "--max-model-len", "2048"]
    assert said["engine"] == {
        "model_tag": "/models/tiny-moe", "port": 8125, "enforce_eager": True, "compilation_config": "{'level': 3}", "seed": None
    }  # fmt: skip


@pytest.mark.parametrize(
    "lines",
    [["no such thing"], ["non-default args: {'a': open('/etc/passwd')}"], ["non-default args: {'a'"]],
    ids=["other lines", "code", "cut off"],
)
def test_what_it_does_not_say_is_unknown(lines: list[str]) -> None:
    assert engine_settings(lines)["engine"] is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    tensors = {"model.layers.0.mlp.down_proj.weight": ("BF16", (64, 64)), "model.norm.weight": ("BF16", (64,))}
    return write_folder(folder, {"model.safetensors": tensors}, TINY)


async def test_settings_as_configured_and_as_resolved(tmp_path: Path, folder: Path) -> None:
    models = {"m": {"model": str(folder), "max_model_len": 64, "env": {"HF_TOKEN": "hf_secret0123456789"}}}
    async with admin_of(tmp_path, models=models) as admin:
        settings = await admin.ask("GET", "/models/m/settings")
        assert settings["configured"] == {"model": str(folder), "max_model_len": 64, "env": {"HF_TOKEN": MASK}}
        assert settings["resolved"]["max_model_len"] == 64
        assert "priority" in settings["resolved"]
        assert "hf_secret" not in json.dumps(settings)
        assert settings["ranks"] == [] and "runtime" not in settings["keys"]


async def test_settings_of_a_recipe_come_back_as_they_were_given(tmp_path: Path) -> None:
    recipe = "description: d\nmodel: o/mine\nsources: {s: s}\nsettings: {max_num_seqs: 8, env: {NCCL_DEBUG: INFO, NCCL_IB_TC: 3}}\n"
    (tmp_path / "mine.yaml").write_text(recipe)
    models = {"filed": {"recipe": "mine", "tensor_parallel": 1}}
    async with admin_of(tmp_path, recipes_dir=str(tmp_path), models=models) as admin:
        filed = await admin.ask("GET", "/models/filed/settings")
        assert filed["configured"] == {"recipe": "mine", "tensor_parallel": 1}

        spec = {"recipe": "mine", "ttl": 9, "env": ["NCCL_DEBUG=WARN"]}
        await admin.ask("POST", "/models", 202, json={"name": "added", "spec": spec, "load": False})
        added = await admin.ask("GET", "/models/added/settings")
        assert added["configured"] == {"recipe": "mine", "ttl": 9, "env": {"NCCL_DEBUG": MASK}}
        assert (added["resolved"]["max_num_seqs"], added["resolved"]["model"]) == (8, "o/mine")

        changed = {**added["configured"], "ttl": 60}
        await admin.ask("PUT", "/models/added", 202, json={"spec": changed, "load": False})
        again = await admin.ask("GET", "/models/added/settings")
        assert (again["configured"], again["resolved"]["ttl"]) == (changed, 60)
        entry = admin.scene.supervisor.registry.find("added").spec
        assert entry is not None
        env = {name: value.get_secret_value() for name, value in entry.env.items()}
        assert env == {"NCCL_DEBUG": "WARN", "NCCL_IB_TC": "3"}


async def test_settings_of_ranks_that_run(tmp_path: Path, folder: Path) -> None:
    async with admin_of(tmp_path, models={"m": {"model": str(folder)}}) as admin:
        asked: list[Any] = []

        async def ask(node: str, method: str, path: str, *, timeout_s: float) -> list[str]:
            asked.append((node, method, path))
            return LINES

        admin.scene.cluster.ask = ask  # type: ignore[attr-defined]
        await admin.ask("POST", "/models/m/load", 202)
        await admin.scene.tick(3)
        (rank,) = (await admin.ask("GET", "/models/m/settings"))["ranks"]
        assert asked == [("n", "setting_lines", "/log/m")]
        assert (rank["rank"], rank["node"], rank["engine"]["port"], rank["command"][2]) == (0, "n", 8125, "vllm")


async def test_layers_of_a_large_checkpoint_are_read_in_another_process(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[Callable[..., Any]] = []

    def called(read: Callable[..., Any], *arguments: Any, time_s: float) -> Any:
        apart.append(read)
        return read(*arguments)

    monkeypatch.setattr(bounded_read, "call", called)
    async with admin_of(tmp_path, models={"m": {"model": str(folder)}}) as admin:
        await admin.ask("GET", "/models/m/layers")
        assert apart == []
    monkeypatch.setattr(bounded_read, "SMALL_BYTES", 0)
    async with admin_of(tmp_path, models={"m": {"model": str(folder)}}) as admin:
        assert (await admin.ask("GET", "/models/m/layers"))["layers"]
        assert checkpoint_at in apart


async def test_layers_of_one_model_are_read_at_a_time(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading: list[str] = []
    most = 0

    def read(spec: Any, _: object) -> LayerListing:
        nonlocal most
        reading.append(spec.name)
        most = max(most, len(reading))
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()
        reading.remove(spec.name)
        return LayerListing("", None, {}, (), 0, 0, 0, ())

    monkeypatch.setattr(model_details, "_layers", read)
    loop, began, may_end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    async with admin_of(tmp_path, models={name: {"model": str(folder)} for name in ("a", "b", "c")}) as admin:
        asked = [asyncio.create_task(admin.ask("GET", f"/models/{name}/layers")) for name in ("a", "b", "c")]
        await began.wait()
        for _ in range(1000):
            await asyncio.sleep(0)  # as long as the others would take to begin
        may_end.set()
        await asyncio.gather(*asked)
    assert most == 1


async def test_layers_with_their_formats(tmp_path: Path, folder: Path) -> None:
    models = {"m": {"model": str(folder), "quantize": "fp8"}, "plain": {"model": str(folder)}}
    async with admin_of(tmp_path, models=models) as admin:
        layers = await admin.ask("GET", "/models/m/layers")
        by_name = {layer["name"]: layer["format"] for layer in layers["layers"]}
        assert by_name == {"model.layers.*.mlp.down_proj.weight": "fp8", "model.norm.weight": None}
        plain = await admin.ask("GET", "/models/plain/layers")
        assert {layer["format"] for layer in plain["layers"]} == {None}


async def test_a_start_that_was_never_seen(tmp_path: Path, folder: Path) -> None:
    async with admin_of(tmp_path, models={"org/m": {"model": str(folder)}}) as admin:
        assert (await admin.ask("GET", "/models/org/m/start"))["phases"] == []
        for verb in ("start", "settings", "layers"):
            await admin.refused("GET", f"/models/nobody/{verb}", 404)


async def test_a_load_is_compared_with_the_rate_that_a_bench_measured(tmp_path: Path, folder: Path) -> None:
    async with admin_of(tmp_path, models={"m": {"model": str(folder)}}) as admin:
        learn(admin.scene.supervisor.registry.config.state_dir, {"disk_bytes_s": 4e9})
        assert (await admin.ask("GET", "/models/m/start"))["disk_bytes_per_s"] == 4e9
        assert (await admin.ask("GET", "/nodes"))["hardware"]["disk_bytes_s"] == 4e9
