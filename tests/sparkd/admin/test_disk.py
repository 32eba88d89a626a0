"""What the nodes keep, over the admin API: listed with the models that use it, never removed from under one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sparkd.admin.jobs import Tell
from sparkd.errors import NodeRefused, SparkdError
from sparkd.units import GIB
from tests.sparkd.admin.test_app import Admin, admin_of

HUB = {"kind": "hub", "id": "models--org--tiny", "name": "org/tiny", "size_bytes": 7, "used_s": 5.0, "source": "org/tiny", "fault": None}
CACHED = {
    "kind": "quantized", "id": "tiny-nvfp4-0123456789abcdef", "name": "tiny nvfp4", "size_bytes": 3, "used_s": 6.0,
    "source": "/cache/models--org--tiny/snapshots/c0ffee", "fault": "it is old",
}  # fmt: skip
MODELS = {
    "m": {"model": "org/tiny", "quantize": "nvfp4"},
    "plain": {"model": "org/tiny"},
    "other": {"model": "org/tiny2", "quantize": "nvfp4"},
}


class Nodes:
    """Stands for the agents; `asked` are the calls that change or verify something."""

    def __init__(self, admin: Admin) -> None:
        self.asked: list[Any] = []
        self.fault: str | None = None
        self.broken: SparkdError | None = None
        self.entries = [HUB, CACHED]
        admin.scene.cluster.ask_all = self.ask_all  # type: ignore[attr-defined,method-assign]
        admin.scene.cluster.ask = self.ask  # type: ignore[attr-defined]
        admin.scene.cluster.node_ip = "n"  # type: ignore[attr-defined]

    async def ask_all(self, method: str, folders: dict[str, str], environ: dict[str, str]) -> dict[str, Any]:
        assert method == "stored"
        assert set(folders) == {"quantized", "profile"}
        folder = {"kind": "quantized", "path": "/q", "size_bytes": 3, "free_bytes": 9}
        return {"n": {"entries": self.entries, "folders": [folder]}, "o": {"entries": self.entries[:1], "folders": []}, "silent": None}

    async def ask(self, node: str, method: str, kind: str, name: str, *where: Any, timeout_s: float) -> Any:
        self.asked.append((node, method, kind, name))
        if self.broken is not None:
            raise self.broken
        return 7 * GIB if method == "remove_stored" else self.fault

    async def never(self, *_: Any, timeout_s: float) -> Any:
        await asyncio.Event().wait()


async def test_what_there_is_and_who_uses_it(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS, quantized_cache={"limit_gib": 2}) as admin:
        Nodes(admin)
        disk = await admin.ask("GET", "/disk")
        shown = [(entry["kind"], entry["node"], entry["used_by"], entry["valid"]) for entry in disk["entries"]]
        assert shown == [("hub", "n", ["m", "plain"], True), ("quantized", "n", ["m"], False), ("hub", "o", ["m", "plain"], True)]
        assert disk["folders"][0]["limit_bytes"] == 2 << 30


async def test_one_is_removed_from_the_node_that_is_named(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        for query, node in (("", "n"), ("?node=o", "o")):
            accepted = await admin.ask("DELETE", f"/disk/hub/models--org--tiny{query}", 202)
            ended = await admin.ask("GET", f"/operations/{accepted['operation']}?wait_s=300")
            assert (ended["kind"], ended["model"], ended["state"]) == ("remove", "models--org--tiny", "SUCCEEDED")
            assert ended["message"] == f"hub/models--org--tiny was removed from {node}: 7.0 GiB."
        assert nodes.asked == [(node, "remove_stored", "hub", "models--org--tiny") for node in ("n", "o")]


async def test_a_removal_that_the_node_cannot_do_fails_with_its_reason(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        nodes.broken = NodeRefused("n: Read-only file system.")
        accepted = await admin.ask("DELETE", "/disk/hub/models--org--tiny", 202)
        ended = await admin.ask("GET", f"/operations/{accepted['operation']}?wait_s=300")
        assert (ended["state"], ended["message"]) == ("FAILED", "n: Read-only file system.")


async def test_what_a_model_that_runs_uses_is_not_removed(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        await admin.ask("POST", "/models/m/load", 202)
        await admin.scene.tick(2)
        for path in ("hub/models--org--tiny", "quantized/tiny-nvfp4-0123456789abcdef"):
            await admin.refused("DELETE", f"/disk/{path}", 409)
        assert nodes.asked == []


async def test_quantized_weights_that_the_model_that_runs_does_not_use_are_removed(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        Nodes(admin)
        await admin.ask("POST", "/models/other/load", 202)
        await admin.scene.tick(2)
        await admin.ask("DELETE", "/disk/quantized/tiny-nvfp4-0123456789abcdef", 202)


@pytest.mark.parametrize(("fault", "state"), [(None, "SUCCEEDED"), ("other bytes", "FAILED")])
async def test_verifying_is_an_operation(tmp_path: Path, fault: str | None, state: str) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        nodes.fault = fault
        accepted = await admin.ask("POST", "/disk/verify", 202, json={"kind": "hub"})
        ended = await admin.ask("GET", f"/operations/{accepted['operation']}?wait_s=300")
        assert (ended["kind"], ended["state"]) == ("verify", state)
        assert [call[0] for call in nodes.asked] == ["n", "o"]
        assert fault is None or fault in ended["message"]


async def test_what_the_node_does_not_list_is_not_removed(tmp_path: Path) -> None:
    """A node that does not answer lists nothing, and its files may be in use."""
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        for path in ("hub/models--org--other", "hub/models--org--tiny?node=silent", "quantized/..%2Fx", "shell/x"):
            await admin.refused("DELETE", f"/disk/{path}", 404)
        assert nodes.asked == []


async def test_nothing_is_removed_while_a_pull_runs(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def pull(_: Tell) -> str:
        await ended.wait()
        return "It is here."

    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        operation = admin.jobs.start("pull", "org/tiny", pull)
        await admin.refused("DELETE", "/disk/hub/models--org--tiny", 409)
        ended.set()
        await admin.ask("GET", f"/operations/{operation.id}?wait_s=300")
        accepted = await admin.ask("DELETE", "/disk/hub/models--org--tiny", 202)
        await admin.ask("GET", f"/operations/{accepted['operation']}?wait_s=300")
        assert len(nodes.asked) == 1


async def test_a_second_verification_is_refused_until_the_first_was_cancelled(tmp_path: Path) -> None:
    async with admin_of(tmp_path, models=MODELS) as admin:
        nodes = Nodes(admin)
        admin.scene.cluster.ask = nodes.never  # type: ignore[attr-defined]
        first = await admin.ask("POST", "/disk/verify", 202)
        refusal = await admin.refused("POST", "/disk/verify", 409)
        assert f"`sparkd cancel {first['operation']}`" in refusal["message"]
        assert (await admin.ask("DELETE", f"/operations/{first['operation']}", 202))["state"] == "CANCELLED"
        await admin.ask("POST", "/disk/verify", 202)
