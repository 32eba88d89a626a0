"""Whether nodes may share a model: what differs between them, in words that name the values, and what a node says of itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.cluster.compatibility import compatible_nodes, first_mismatch
from sparkd.errors import AgentLost, DoesNotFit, RankError, SparkdError
from sparkd.fabric.fabric_nodes import FabricNodes
from tests.support.fabric_tree import readings
from tests.support.facts import lacking
from workers.host.identity import identity, plugin
from workers.host.runtime import Runtime

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
FILES = {"config.json": [700, "c0"], "model-1.safetensors": [4000, "aa"], "model-2.safetensors": [5000, "bb"]}
ALIKE = {"vllm": "0.32.0", "platform": "cuda", "plugin": "f00d", "files": FILES}


def without(name: str) -> dict[str, Any]:
    return {other: facts for other, facts in FILES.items() if other != name}


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({}, []),
        ({"vllm": "0.31.1"}, ["vLLM", f"0.32.0 on {A} and {C}", f"0.31.1 on {B}", "same version"]),
        ({"files": None}, ["model", B, "`sparkd pull MODEL`", A]),
        ({"files": without("model-2.safetensors")}, ["model-2.safetensors", B, "`sparkd pull MODEL`"]),
        ({"files": FILES | {"config.json": [700, "c1"]}}, ["config.json", f"c0 on {A} and {C}", f"c1 on {B}"]),
    ],
)  # fmt: skip
def test_what_differs_is_told_with_the_values(there: dict[str, Any], told: list[str]) -> None:
    found = first_mismatch({A: ALIKE, B: ALIKE | there, C: ALIKE})

    assert (found is not None, lacking(found, *told)) == (bool(told), [])


def test_a_model_that_is_on_no_node_yet_is_alike_on_all() -> None:
    assert first_mismatch({A: ALIKE | {"files": None}, B: ALIKE | {"files": None}}) is None


async def team(scenario: str, size: int = 2, nodes: tuple[str, ...] = (A, B), **there: Any) -> tuple[str, ...]:
    """`there`: what is different on the second node."""
    raw = dict(zip((A, B, C), readings(scenario).values(), strict=False))

    async def read(node: str) -> Mapping[str, Any]:
        return raw[node]

    async def identify(node: str) -> Mapping[str, Any]:
        if "lost" in there and node == B:
            raise AgentLost("B is lost.")
        return ALIKE | there if node == B else ALIKE

    return await compatible_nodes("m", size, nodes, FabricNodes(read), identify, rdma=True)


async def test_the_first_nodes_with_a_rail_between_each_two_share_it() -> None:
    assert await team("pair-different-ports") == (A, B)
    assert await team("pair-different-ports", nodes=(B, A)) == (B, A)
    assert await team("ring-of-three", nodes=(A, B, C)) == (A, B)
    assert await team("pair-different-ports", size=3) == ()


@pytest.mark.parametrize("there", [{"files": None}, {"vllm": "0.31.1"}])
async def test_a_node_that_is_not_alike_is_left_out_where_there_are_enough_others(there: dict[str, Any]) -> None:
    assert await team("ring-of-three", nodes=(A, B, C), **there) == (A, C)


async def test_the_first_one_is_left_out_for_want_of_files_and_not_for_what_it_has() -> None:
    """By its vLLM and its files the flags were chosen and the memory was counted."""
    assert await team("ring-of-three", nodes=(B, A, C), files=None) == (A, C)
    with pytest.raises(RankError, match=f"shared by {B} and {A}: "):
        await team("ring-of-three", nodes=(B, A, C), vllm="0.31.1")


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        (lambda: team("half-trained"), DoesNotFit, ["m", "2 nodes (tensor_parallel)", f"{A} and {B}", "a cable"]),
        (lambda: team("rdma-dead"), DoesNotFit, ["a cable without RDMA", "`env: {NCCL_NET: Socket}`"]),
        (lambda: team("pair-different-ports", vllm="0.31.1"), RankError, ["m", f"{A} and {B}", f"0.32.0 on {A}", f"0.31.1 on {B}"]),
        (lambda: team("pair-different-ports", lost=True), AgentLost, ["B is lost."]),
    ],
)
async def test_who_may_not_is_told_why(asked: Any, error: type[SparkdError], told: list[str]) -> None:
    waiting: Awaitable[object] = asked()
    with pytest.raises(error) as caught:
        await waiting
    assert (type(caught.value), lacking(caught.value.message, *told)) == (error, [])


@pytest.fixture
def _runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.identity.probe", lambda runtime: Runtime("cpu", f"0.32.0 of {runtime}", None))


@pytest.mark.usefixtures("_runtime")
def test_a_copy_of_a_model_is_the_same_and_another_header_is_not(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "README.md").write_text("not looked at")
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (first / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    (first / "odd.safetensors").write_bytes(b"\xff" * 9)
    (first / "old.bin").write_bytes(b"abc")
    shutil.copytree(first, second)
    os.utime(second / "model.safetensors", (1, 1))
    (second / "README.md").write_text("here neither")
    a = identity("python", str(first), None, {})

    assert a == identity("python", str(second), None, {})
    assert {name: size for name, (size, _) in a["files"].items()} == {
        "config.json": 2, "model.safetensors": 12 + len(header), "odd.safetensors": 9, "old.bin": 3,
    }  # fmt: skip
    assert (a["vllm"], a["platform"]) == ("0.32.0 of python", "cpu")
    assert (a["plugin"], len(a["plugin"]), len(a["files"]["old.bin"][1])) == (plugin(), 12, 12)
    (second / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.replace(b"F32", b"I32") + b"abcd")
    assert "model.safetensors differs" in (first_mismatch({A: a, B: identity("python", str(second), None, {})}) or "")


@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_another_training_of_the_same_shapes_is_another_model(name: str, tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}'
    found = {}
    for node, trained in ((A, 0), (B, 200_000)):
        (tmp_path / node).mkdir()
        data = bytearray(4_194_304)
        data[2_000_000 : 2_000_000 + trained] = b"\1" * trained
        (tmp_path / node / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
        found[node] = identity("python", str(tmp_path / node), None, {})

    assert f"{name} differs" in (first_mismatch(found) or "")


@pytest.mark.usefixtures("_runtime")
def test_a_hub_id_is_looked_up_in_the_nodes_own_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc\n")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")

    assert identity("python", "owner/name", None, {"HF_HOME": str(tmp_path)})["files"].keys() == {"config.json"}
    for model, revision in (("owner/name", "v2"), ("owner/other", None), (str(tmp_path / "gone"), None)):
        assert identity("python", model, revision, {"HF_HOME": str(tmp_path)})["files"] is None


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(RankError, match=r"model\.safetensors"):
        identity("python", str(tmp_path), None, {})
