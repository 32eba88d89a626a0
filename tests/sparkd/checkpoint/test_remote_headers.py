"""A checkpoint that is on a hub: the same as the downloaded folder, by few and small requests, and one sentence for what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from sparkd.capacity import plan_for_node
from sparkd.capacity.plan_for_node import PlanOrder, entry_here
from sparkd.capacity.planned_entry import PlanRequest
from sparkd.checkpoint import Checkpoint, hub, read_checkpoint, remote_headers
from sparkd.checkpoint.header import parse_header
from sparkd.checkpoint.remote_headers import FIRST_BYTES, checkpoint_at, read_remote_checkpoint
from sparkd.checkpoint.source import source_of
from sparkd.config.config import Config
from sparkd.errors import CheckpointError, CheckpointUnread, ConfigError, Unavailable
from sparkd.execution.threads import Threads
from sparkd.hardware import SPARK
from tests.support.architectures import write_qwen3_moe
from tests.support.checkpoints import header_of, layered, write_folder, write_shard
from tests.support.facts import lacking
from tests.support.hub_server import COMMIT, SIGNATURE, Repository, serving
from tests.support.published_stored import FP8_BLOCK
from tests.support.waiting import HUNG_S, eventually

ROOT = Path(__file__).resolve().parents[3]
ID = "owner/name"
PLACE = f"hf://{ID}@{COMMIT}"
TOKEN = "hf_thetokenthatnobodymaysee"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {
    FIRST: {"model.embed_tokens.weight": ("BF16", (512, 64)), "model.norm.weight": ("F32", (64,))},
    SECOND: {"lm_head.weight": ("BF16", (512, 64))},
}


@pytest.fixture(autouse=True, scope="module")
def session() -> Iterator[None]:
    """The library's session, past whatever proxy, token or offline mode this machine has; making one takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(hub, "PAUSE_S", 0.0)
        huggingface_hub.close_session()
        yield
    huggingface_hub.close_session()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with serving(Repository(write_folder(tmp_path / "there", SHARDS, {"model_type": "llama"}, index=True))) as there:
        yield there


def environ(there: Repository, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": there.hub, "HF_HOME": str(there.folder.parent / "home"), "HF_TOKEN": TOKEN, **more}


def read(there: Repository, **more: str) -> Checkpoint:
    return read_remote_checkpoint(ID, None, environ(there, **more))


def content(found: Checkpoint) -> dict[str, Any]:
    """All but where it is and how old."""
    return {
        "config": found.config,
        "shards": [replace(shard, path=os.path.basename(shard.path), mtime_ns=0) for shard in found.shards],
        "tensors": [(name, ref._replace(path=os.path.basename(ref.path))) for name, ref in found.tensors.items()],
        "quantization": found.quantization,
    }


def refused(there: Repository, **more: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(there, **more)
    message = caught.value.message
    assert TOKEN not in message and SIGNATURE not in message and "\n" not in message and caught.value.cure
    return caught.value


# What is read


@pytest.mark.parametrize("source", [None, FP8_BLOCK], ids=["bf16", "fp8-block"])
def test_it_is_the_checkpoint_of_the_downloaded_folder(tmp_path: Path, source: Mapping[str, Any] | None) -> None:
    folder = write_qwen3_moe(tmp_path / "m", num_experts=4, source=source, shard_bytes=1 << 20)
    (folder / "original").mkdir()
    write_shard(folder / "original" / "other.safetensors", {"other": ("BF16", (1,))})
    here = read_checkpoint(folder)
    told: list[tuple[int, int]] = []
    with serving(Repository(folder)) as there:
        found = read_remote_checkpoint(ID, "v1", environ(there), lambda *progress: told.append(progress))

    assert content(found) == content(here)
    assert len(here.shards) > 2 and list(found.tensors) == list(here.tensors)
    assert found.folder == PLACE and {shard.mtime_ns for shard in found.shards} == {0}
    assert {shard.path for shard in found.shards} == {f"{PLACE}/{os.path.basename(shard.path)}" for shard in here.shards}
    assert told == [(at, len(here.shards)) for at in range(1, len(here.shards) + 1)]
    assert there.asked[0].path == f"/api/models/{ID}/revision/v1"
    small = 2 * sum((folder / name).stat().st_size for name in ("config.json", INDEX))
    assert there.sent < small + len(here.shards) * (FIRST_BYTES + 8192)


def test_a_long_header_takes_a_second_request(tmp_path: Path) -> None:
    tensors = layered(1000, {"mlp.experts.0.up_proj.weight": (4096, 1024)})
    text = json.dumps(header_of(tensors), separators=(",", ":")).encode()
    assert len(text) > FIRST_BYTES
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + 1000 * 2 * 4096 * 1024)
    with serving(Repository(folder)) as there:
        found = read(there)

    assert content(found) == content(read_checkpoint(folder))
    assert len(there.ranges_of("model.safetensors")) == 2
    assert there.sent < 2_000_000 < found.total_bytes


def test_a_server_without_ranges_is_left_once_the_header_is_there(repository: Repository) -> None:
    repository.ranges = False
    os.truncate(repository.folder / SECOND, 1 << 26)
    with pytest.raises(CheckpointError, match="no tensor"):
        read(repository)
    assert repository.sent < 1 << 25


def test_the_token_goes_to_the_hub_and_not_to_where_it_leads(repository: Repository) -> None:
    read(repository)

    assert {asked.token for asked in repository.asked if asked.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {asked.token for asked in repository.asked if asked.server == "store"} == {None}


def test_everything_is_of_the_commit_that_was_listed(repository: Repository) -> None:
    read(repository)

    assert not (repository.folder.parent / "home").exists(), "nothing is written"
    first, *others = (asked.path for asked in repository.asked if asked.server == "hub")
    assert first == f"/api/models/{ID}/revision/main"
    assert all(path.startswith(f"/{ID}/resolve/{COMMIT}/") for path in others)


def test_what_fails_for_a_moment_is_asked_for_again(repository: Repository) -> None:
    repository.refusals = {FIRST: [(503, {}), (500, {})], "config.json": [(502, {})]}
    repository.cut = {SECOND: [50, 9]}

    assert content(read(repository)) == content(read_checkpoint(repository.folder))


# What goes wrong

GATED = {"X-Error-Code": "GatedRepo"}


@pytest.mark.parametrize(
    ("path", "status", "headers", "told", "cure"),
    [
        (FIRST, 401, GATED, ["gated", "accepted", "HTTP 401"], f"127.0.0.1/{ID}"),
        ("main", 401, {"X-Error-Code": "RepoNotFound"}, ["127.0.0.1", "private", "HTTP 401"], "HF_TOKEN"),
        ("main", 404, {"X-Error-Code": "RevisionNotFound"}, ["revision 'main'"], "commit"),
        (SECOND, 429, {}, ["limits requests"], "Wait"),
        ("main", 503, {}, ["HTTP 503"], "network"),
    ],
)
def test_what_the_hub_refuses(repository: Repository, path: str, status: int, headers: dict[str, str], told: list[str], cure: str) -> None:
    repository.refusals = {path: [(status, headers)] * 3}

    error = refused(repository)
    assert (error.file, lacking(error.problem, *told), lacking(error.cure, cure)) == (ID, [], [])


@pytest.mark.parametrize("listing", [[], {"sha": COMMIT, "siblings": 3}, {"sha": "../" * 13 + "x"}])
def test_what_is_no_hub(repository: Repository, listing: Any) -> None:
    repository.listing = listing

    assert lacking(refused(repository).problem, "127.0.0.1", "listing") == []


def _cut_off(there: Repository) -> None:
    os.truncate(there.folder / SECOND, 40)


@pytest.mark.parametrize(
    ("break_it", "file", "tensor", "facts"),
    [
        (_cut_off, SECOND, None, ["header", "bytes"]),
        (lambda there: os.truncate(there.folder / SECOND, 65_000), SECOND, "lm_head.weight", ["cut off"]),
        (lambda there: there.total.update({SECOND: 1 << 50}), SECOND, None, ["bytes", "no tensor"]),
        (lambda there: (there.folder / SECOND).unlink(), SECOND, None, [INDEX, "repository"]),
        (lambda there: [(there.folder / name).unlink() for name in (INDEX, FIRST, SECOND)], "", None, ["no weights"]),
        (lambda there: (there.folder / INDEX).write_text('{"weight_map": {"t": "../x"}}'), INDEX, "t", ["../x"]),
    ],
)
def test_what_is_wrong_on_the_hub(
    repository: Repository, break_it: Callable[[Repository], object], file: str, tensor: str | None, facts: list[str]
) -> None:
    break_it(repository)

    error = refused(repository)
    assert (error.file, error.tensor, lacking(error.problem, *facts)) == (f"{PLACE}/{file}".rstrip("/"), tensor, [])
    assert lacking(error.cure, "hub", "revision", "config.json", "*.safetensors") == []


def test_an_answer_that_always_ends_too_early(repository: Repository) -> None:
    repository.cut = {FIRST: [20] * hub.ATTEMPTS}

    error = refused(repository)
    assert (type(error), error.file, lacking(error.cure, "network")) == (CheckpointUnread, ID, [])
    assert lacking(error.problem, "127.0.0.1", "broke off") == []
    assert len(repository.ranges_of(FIRST)) == hub.ATTEMPTS


def test_a_server_that_drips_is_given_up(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "REQUEST_S", -1.0)
    error = refused(repository)
    assert (type(error), lacking(error.problem, "127.0.0.1", "still sending")) == (CheckpointUnread, [])


def test_no_header_is_asked_for_before_those_of_the_last_requests_are_parsed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_headers, "THREADS", 1)
    parsed: list[int] = []

    def parse(*of_file: Any) -> Any:
        parsed.append(len(repository.ranges_of(FIRST)) + len(repository.ranges_of(SECOND)))
        return parse_header(*of_file)

    monkeypatch.setattr(remote_headers, "parse_header", parse)
    read(repository)

    assert parsed == [1, 2]


def test_a_small_file_that_is_not_small(repository: Repository) -> None:
    os.truncate(repository.folder / "config.json", (32 << 20) + 1)

    assert lacking(refused(repository).message, "config.json", "32 MiB") == []


def test_nobody_listens(repository: Repository) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        error = refused(repository, HF_ENDPOINT=address)

    assert (type(error), error.file, lacking(error.cure, "network")) == (CheckpointUnread, ID, [])
    assert lacking(error.problem, "127.0.0.1", "Connection refused") == []


def test_nobody_answers(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refused(repository, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")

    assert (type(error), lacking(error.problem, "127.0.0.1", "answer within")) == (CheckpointUnread, [])


def test_offline_nothing_is_asked(repository: Repository) -> None:
    error = refused(repository, TRANSFORMERS_OFFLINE="1")
    assert (lacking(error.problem, "HF_HUB_OFFLINE"), lacking(error.cure, "Unset")) == ([], [])
    assert not repository.asked


def test_a_token_that_cannot_be_sent_is_not_shown(repository: Repository) -> None:
    token = "hf_with\nline"
    message = refused(repository, HF_TOKEN=token).message

    assert "HF_TOKEN" in message and token not in message and "hf_" not in message


def test_what_is_no_id_and_no_address(repository: Repository) -> None:
    with pytest.raises(ConfigError, match="a/b/c"):
        checkpoint_at("a/b/c", None, environ(repository))
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        read(repository, HF_ENDPOINT="file:///etc")
    assert not repository.asked


# Threads


def test_an_interrupt_does_not_wait_for_the_hub(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from sparkd.checkpoint.remote_headers import read_remote_checkpoint
print("asking", flush=True)
try:
    read_remote_checkpoint("owner/name", None, os.environ, lambda done, total: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    print("interrupted")
"""
    held = threading.Event()
    with serving(Repository(write_folder(tmp_path / "there", SHARDS, index=True), held={SECOND: held})) as there:
        # The hub would be waited for longer than this process is.
        env = {**os.environ, "HF_ENDPOINT": there.hub, "HF_HUB_DOWNLOAD_TIMEOUT": "900", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=HUNG_S)
        held.set()

    assert done.stdout.split() == ["asking", "interrupted"] and done.returncode == 0, done.stderr


# Where it is found


@pytest.fixture
def snapshot(repository: Repository) -> Path:
    """All of the repository in the local cache, as the library lays it out."""
    home = repository.folder.parent / "home" / "hub" / "models--owner--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    (home / "blobs").mkdir()
    there = home / "snapshots" / COMMIT
    there.mkdir(parents=True)
    for file in repository.folder.iterdir():
        (home / "blobs" / file.name).write_bytes(file.read_bytes())
        (there / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    return there


def test_a_folder_is_read_where_it_is(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository.folder.parent)

    for text in (str(repository.folder), "there", "./there"):
        assert checkpoint_at(source_of(text), None, environ(repository)) == read_checkpoint(repository.folder)
    with pytest.raises(CheckpointError, match="elsewhere"):
        checkpoint_at(source_of("./elsewhere"), None, environ(repository))
    assert not repository.asked


def test_what_is_in_the_cache_is_asked_of_nobody(repository: Repository, snapshot: Path) -> None:
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        found = checkpoint_at(ID, None, environ(repository, **more))
        assert found.folder == str(snapshot) and content(found) == content(read_checkpoint(repository.folder))
    assert checkpoint_at(ID, COMMIT, environ(repository)).folder == str(snapshot)
    assert not repository.asked


@pytest.mark.parametrize("gone", [(SECOND,), ("config.json",)])
def test_what_the_cache_has_a_part_of_is_read_from_the_hub(repository: Repository, snapshot: Path, gone: tuple[str, ...]) -> None:
    for name in gone:
        (snapshot / name).unlink()

    found = checkpoint_at(ID, None, environ(repository))
    assert found.folder == PLACE and content(found) == content(read_checkpoint(repository.folder))
    with pytest.raises(CheckpointError, match=r"cache lacks .*HF_HUB_OFFLINE"):
        checkpoint_at(ID, None, environ(repository, HF_HUB_OFFLINE="1"))


def test_another_revision_is_not_what_the_cache_has(repository: Repository, snapshot: Path) -> None:
    assert snapshot.is_dir()
    assert checkpoint_at(ID, "v2", environ(repository)).folder == PLACE
    assert repository.asked[0].path.endswith("/revision/v2")


def test_the_daemons_plan_reads_what_the_cache_has_not_from_the_hub(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ(repository).items():
        monkeypatch.setenv(name, value)
    entry, found = entry_here(ID, None, Config())

    assert (entry.spec.model, entry.added) == (ID, {"model": ID}) and content(found) == content(read(repository))


async def test_plans_take_no_thread_of_the_event_loop_and_are_refused_where_too_many_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    may_end, running = threading.Event(), list[str]()

    def answered(order: PlanOrder) -> dict[str, Any]:
        running.append(order.request.model)
        may_end.wait()
        return {"model": order.request.model}

    monkeypatch.setattr(plan_for_node, "_answer_of_process", answered)
    monkeypatch.setattr(plan_for_node, "_PLANS", Threads("plan", 2, 4))
    asking = []
    try:
        for number in range(20):
            order = PlanOrder(PlanRequest(model=f"owner/{number}"), SPARK, None, {}, Config())
            asking.append(asyncio.create_task(plan_for_node.planned_here(order)))
            await eventually(lambda number=number: len(running) == min(number + 1, 2))
        await eventually(lambda: sum(task.done() for task in asking) == 16)

        async with asyncio.timeout(HUNG_S):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        may_end.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Unavailable)]
    assert len(refused) == 16
    assert {"retry-after"} == {name for answer in refused for name in answer.headers()}


async def test_the_daemons_plan_does_not_wait_for_ever(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ(repository).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plan_for_node, "LIMIT_S", 0.0)

    order = PlanOrder(PlanRequest(model=ID), SPARK, None, {}, Config())
    with pytest.raises(Unavailable, match=f"{ID}: .* 0 s"):
        await plan_for_node.planned_here(order)
    with pytest.raises(Unavailable, match=f"{ID}: .* 0 s"):
        plan_for_node._answer(order)
