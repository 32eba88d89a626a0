"""A model's files from one node to another: real sockets and files, broken connections, damaged bytes, and what an earlier try left."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkd import checkpoint
from sparkd.errors import RankError
from tests.support.facts import facts
from tests.support.facts import lacking as lacking_words
from tests.support.waiting import until
from workers.agent.programs import Programs
from workers.files import chunks, manifest, partial_file, sink, source, stale_files
from workers.files.chunks import Buffer, sha256_of
from workers.files.direct_file import DirectFile
from workers.files.manifest import JOURNAL, PART, ModelManifest, lacking, manifest_of, refuse_without_room
from workers.files.source import TransferSource
from workers.files.stale_files import NOTE
from workers.host.hub_cache import snapshot_of

CHUNK = 8192
COMMIT = "c" * 40
KEY = secrets.token_hex(32)
ID = "owner/name"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some hundred KiB have many chunks then; nobody waits between two tries."""
    for module in (chunks, source, partial_file):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(manifest, "SPARE_BYTES", 0)
    monkeypatch.setattr(sink, "PAUSE_S", 0.0)
    monkeypatch.setattr(sink, "PROGRESS_S", 0.01)


def content(size: int) -> bytes:
    return os.urandom(size)


def cached(home: Path, files: Mapping[str, bytes], revision: str = "main") -> dict[str, str]:
    """A hub's cache with one snapshot, as its library makes it. The environment that leads there."""
    folder = home / "hub" / "models--owner--name"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    for name, data in files.items():
        blob = folder / "blobs" / (hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else hashlib.sha1(data).hexdigest())
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    return {"HF_HOME": str(home)}


def plain(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def pulled(there: ModelManifest, environ: Mapping[str, str], *ports: int, key: str = KEY) -> dict[str, Any]:
    """What the sink says at its end. ports: of somebody else; a source of its own where there is none."""
    made = ports or (TransferSource(there, KEY).listen("127.0.0.1"),)
    told: list[Mapping[str, Any]] = []
    ways = [["127.0.0.1", "127.0.0.1", port] for port in made]
    sink.run({"manifest": there.to_dict(), "environ": dict(environ), "ways": ways, "key": key, "connections": 3}, told.append)
    return dict(told[-1])


def found(model: str, environ: Mapping[str, str], revision: str | None = None) -> ModelManifest:
    made = manifest_of(model, revision, environ)
    assert made is not None
    return made


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": content(CHUNK * 9 + 1234),
    "model-00002-of-00002.safetensors": content(CHUNK * 4),
    "sub/folder/tokenizer.json": content(CHUNK + 1),
    "empty.txt": b"",
}


def test_a_snapshot_is_the_same_on_the_other_node_and_is_found_offline(tmp_path: Path) -> None:
    there, here = cached(tmp_path / "a", FILES), {"HF_HOME": str(tmp_path / "b")}
    made = found(ID, there)
    assert (made.commit, made.size, len(made.files)) == (COMMIT, sum(map(len, FILES.values())), len(FILES))

    ended = pulled(made, here)
    assert ended == {"done_bytes": made.size, "total_bytes": made.size, "fetched_bytes": made.size, "ended": True}
    snapshot = snapshot_of(ID, None, here)
    assert snapshot is not None
    assert {name: (snapshot / name).read_bytes() for name in FILES} == FILES
    assert all((snapshot / name).is_symlink() for name in FILES)
    assert sorted(path.name for path in (tmp_path / "b").rglob("*") if PART in path.name) == []
    assert pulled(made, here)["fetched_bytes"] == 0


def test_only_files_of_another_size_or_time_are_fetched_into_a_folder(tmp_path: Path) -> None:
    a = plain(tmp_path / "a", FILES)
    made = found(str(a), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    assert pulled(there, {})["fetched_bytes"] == made.size
    b = tmp_path / "b"
    assert {name: (b / name).read_bytes() for name in FILES} == FILES
    assert pulled(there, {}, 1)["fetched_bytes"] == 0, "no node is asked"

    name = "model-00001-of-00002.safetensors"
    other = bytearray(FILES[name])
    other[CHUNK * 5] ^= 1
    (b / name).write_bytes(other)
    assert lacking(there, {})["bytes"] == len(other)
    assert pulled(there, {})["fetched_bytes"] == len(other)
    assert {name: (b / name).read_bytes() for name in FILES} == FILES
    assert sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file()) == sorted([*FILES, NOTE])


def _index(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}).encode()


ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
BIN = "pytorch_model-00001-of-00002.bin"
MISTRAL = "consolidated-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("names", "indexes", "lacks"),
    [
        ([ONE], {}, True),
        (["a.safetensors"], {"model.safetensors.index.json": _index("a.safetensors", "b.safetensors")}, True),
        (["training_args.bin"], {}, True),
        # Half a set of another format is no engine's, and was not wanted.
        ([ONE, TWO, BIN], {}, False),
        # Mistral's second copy is not fetched, and its index is.
        ([ONE, TWO], {"model.safetensors.index.json": _index(ONE, TWO), "consolidated.safetensors.index.json": _index(MISTRAL)}, False),
        (["q4/a-00001-of-00002.gguf", "q4/a-00002-of-00002.gguf"], {}, False),
    ],
)
def test_a_snapshot_that_lacks_weights_is_partial(names: list[str], indexes: dict[str, bytes], lacks: bool, tmp_path: Path) -> None:
    environ = cached(tmp_path, {"config.json": b"{}"} | indexes | {name: name.encode() for name in names})
    assert found(ID, environ).partial is lacks


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = _index("a.safetensors", "b.safetensors")
    environ = cached(tmp_path, {"config.json": b"{}", "a.safetensors": b"a", "model.safetensors.index.json": index})
    assert found(ID, environ).partial
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", len(index) - 1)
    assert not found(ID, environ).partial, "the names of the files count, as an engine's loader says what is wrong with the index"


def test_the_configuration_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    order: list[str] = []
    finish = partial_file.PartialFile.finish
    monkeypatch.setattr(partial_file.PartialFile, "finish", lambda self, buffer: (order.append(self.file.name), finish(self, buffer))[1])
    pulled(there, {})

    assert order[-2:] in (["config.json", "empty.txt"], ["empty.txt", "config.json"])


def test_what_was_verified_is_not_fetched_again_and_what_is_damaged_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model-00001-of-00002.safetensors"
    there, here = cached(tmp_path / "a", {name: FILES[name]}), {"HF_HOME": str(tmp_path / "b")}
    made = found(ID, there)
    keep, kept = partial_file.PartialFile.keep, []

    def some(self: partial_file.PartialFile, index: int, buffer: Buffer, told: str) -> bool:
        if len(kept) >= 4:
            raise OSError(28, "No space left on device", "/disk")
        kept.append(index)
        return keep(self, index, buffer, told)

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.PartialFile, "keep", some)
        told = pulled(made, here)["error"]
        assert "/disk" in facts(told) and "No space left" in told
    (left,) = (tmp_path / "b").rglob(f"*{PART}")
    (sums,) = (tmp_path / "b").rglob(f"*{JOURNAL}")
    assert len(sums.read_text().splitlines()) == 5
    with left.open("r+b") as file:
        file.seek(kept[0] * CHUNK)
        file.write(b"damaged")
    with sums.open("a") as file:
        file.write("9 12ab")
    assert lacking(made, here)["bytes"] < made.size

    ended = pulled(made, here)
    sizes = [chunks.range_of(made.size, index)[1] for index in kept[1:]]
    assert ended["fetched_bytes"] == made.size - sum(sizes)
    assert next((tmp_path / "b").rglob("snapshots/*/*")).read_bytes() == FILES[name]


def test_a_part_of_another_release_of_the_file_is_thrown_away(tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", {"w.safetensors": FILES["model-00002-of-00002.safetensors"]})), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    (tmp_path / "b").mkdir()
    for end, text in ((PART, "x" * 100), (JOURNAL, f"7 {CHUNK} 9\n0 {'0' * 64}\n")):
        (tmp_path / "b" / f"w.safetensors{end}").write_text(text)

    assert pulled(there, {})["fetched_bytes"] == made.size
    assert sorted(os.listdir(tmp_path / "b")) == [NOTE, "w.safetensors"]


OLD = {f"model-0000{number}-of-00003.safetensors": content(CHUNK + number) for number in (1, 2, 3)}


def copied(a: Path, b: Path) -> dict[str, Any]:
    """What the sink says at the end of a copy of all that `a` holds to `b`."""
    made = found(str(a), {})
    return pulled(replace(made, model=str(b)), {})


def cleared(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """What the end of such a copy removes and leaves, without the network."""
    shutil.copytree(a, b, dirs_exist_ok=True)
    return stale_files.clear(replace(found(str(a), {}), model=str(b)), b)


def test_shards_that_the_source_has_no_more_go_and_what_is_somebodys_own_stays(tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    a = plain(tmp_path / "a", OLD | {"config.json": b"{}", index: b"x" * 9, "vocab.json": b"{}"})
    b = plain(tmp_path / "b", {"mine.safetensors": b"mine", "notes.bin.txt": b"mine", "sub/mine.safetensors": b"mine"})
    assert copied(a, b)["left"] == ["mine.safetensors"]
    for name in (*OLD, index, "vocab.json"):
        (a / name).unlink()
    plain(a, {"model.safetensors": content(CHUNK * 2)})
    (b / "model-00002-of-00003.safetensors").write_bytes(b"written anew by somebody")
    plain(b, {f"model-00003-of-00003.safetensors{PART}": b"half", f"model-00003-of-00003.safetensors{JOURNAL}": b"half"})

    ended = copied(a, b)
    assert ended["removed"] == ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", index]
    assert ended["left"] == ["mine.safetensors", "model-00002-of-00003.safetensors"]
    kept = ["config.json", "mine.safetensors", "model-00002-of-00003.safetensors", "model.safetensors", "notes.bin.txt", "vocab.json"]
    assert sorted(os.listdir(b)) == sorted([NOTE, "sub", *kept])
    assert cleared(a, b) == ([], ["mine.safetensors", "model-00002-of-00003.safetensors"])


def test_nothing_goes_while_the_copy_is_not_whole_or_the_source_has_no_whole_set(tmp_path: Path) -> None:
    a = plain(tmp_path / "a", OLD | {"config.json": b"{}"})
    b = tmp_path / "b"
    cleared(a, b)
    (a / "model-00001-of-00003.safetensors").unlink()
    assert cleared(a, b) == ([], [])
    for name in OLD:
        (a / name).unlink(missing_ok=True)
    assert cleared(a, b) == ([], [])
    plain(a, {"model.safetensors": content(CHUNK * 2)})
    made = replace(found(str(a), {}), model=str(b))
    (a / "model.safetensors").write_bytes(b"changed meanwhile")
    assert "model.safetensors" in facts(pulled(made, {})["error"])
    assert OLD.keys() <= set(os.listdir(b))


def test_a_blob_that_is_not_what_the_hub_says_is_refused(tmp_path: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    there = cached(tmp_path / "a", {name: FILES[name]})
    (blob,) = (tmp_path / "a").rglob("blobs/*")
    blob.write_bytes(content(len(FILES[name])))
    told = pulled(found(ID, there), {"HF_HOME": str(tmp_path / "b")})

    assert lacking_words(told["error"], name, blob.name[:12]) == []
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]


def test_a_file_that_changes_while_it_is_copied_ends_it(tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    os.utime(tmp_path / "a" / "sub/folder/tokenizer.json", ns=(1, 1))
    told = pulled(ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files), {})

    assert facts(told["error"]) == "sub/folder/tokenizer.json"


def test_bytes_that_are_damaged_on_the_way_are_asked_for_again_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    wrong = [2]
    digest = partial_file.digest

    def sometimes(data: memoryview) -> str:
        wrong[0] -= 1
        return "0" * 64 if wrong[0] >= 0 else digest(data)

    monkeypatch.setattr(partial_file, "digest", sometimes)
    assert pulled(there, {})["ended"]
    wrong[0] = 1 << 30
    (tmp_path / "b" / "config.json").unlink()
    # Every other file would arrive damaged too, and the thread that is first ends the transfer.
    alone = replace(there, files=tuple(file for file in there.files if file.name == "config.json"))
    told = pulled(alone, {})["error"]
    assert facts(told) == "config.json 4" and "damaged" in told


def test_who_does_not_have_the_key_gets_nothing(tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    told = pulled(there, {}, key=secrets.token_hex(32))

    assert "127.0.0.1:" in told["error"] and "another key" in told["error"]
    port = TransferSource(made, KEY).listen("127.0.0.1")
    for key in ({}, {"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": KEY}, {"authorization": f"bearer {KEY}"}):
        refused = httpx.get(f"http://127.0.0.1:{port}/config.json", headers={"range": "bytes=0-1"} | key, trust_env=False)
        assert (refused.status_code, refused.content) == (401, b"")


def test_another_rail_is_taken_where_one_is_dead(tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        gone = int(dead.getsockname()[1])
    living = TransferSource(made, KEY).listen("127.0.0.1")

    assert pulled(there, {}, gone, living)["ended"]
    (tmp_path / "b" / "config.json").unlink()
    assert f"127.0.0.1:{gone} from 127.0.0.1: Connection refused" in pulled(there, {}, gone)["error"]


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "..%2F..%2Fetc%2Fpasswd", "bytes=0-9"),
        ("GET", "config.json", f"bytes=0-{1 << 20}"),
        ("GET", "config.json", "bytes=0-"),
        ("GET", "config.json", "bytes=9-0"),
        ("GET", "model-00001-of-00002.safetensors", f"bytes={CHUNK * 9}-{CHUNK * 10 - 1}"),
    ],
)
def test_nothing_else_is_served(method: str, path: str, wanted: str, tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    port = TransferSource(made, KEY).listen("127.0.0.1")
    headers = {"authorization": f"Bearer {KEY}", "range": wanted}
    answer = httpx.request(method, f"http://127.0.0.1:{port}/{path}", headers=headers, trust_env=False)
    assert (answer.status_code, answer.content) == (416, b"")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 206 X\r\nContent-Length: 4\r\n\r\nabcd", "no digest"),
        (b"HTTP/1.1 206 X\r\nContent-Length: 4\r\nContent-Digest: sha-256=:" + b"A" * 43 + b"=:\r\n\r\nabcd", "closed"),
        (b"garbage\r\n\r\n", "garbage"),
    ],
)
def test_what_is_no_answer_is_asked_for_again(answer: bytes, reason: str, tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", {"config.json": FILES["config.json"]})), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(sink.ATTEMPTS):
                link, _ = listening.accept()
                with link:
                    asked.append(link.recv(65536))
                    link.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        error = pulled(there, {}, listening.getsockname()[1])["error"]
    assert "127.0.0.1:" in error and reason in error
    assert len(asked) == sink.ATTEMPTS


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"name": "../x", "size": 1, "mtime_ns": 1, "blob": None}]},
        {"files": [{"name": "x", "size": 1, "mtime_ns": 1, "blob": "../../x"}]},
        {"commit": "../.."},
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RankError):
        ModelManifest.from_dict({"model": ID, "revision": None, "commit": COMMIT, "root": "/r", "files": []} | changes)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files)
    monkeypatch.setattr(manifest, "_free", lambda path: 1000)
    told = pulled(there, {})

    assert lacking_words(told["error"], str(tmp_path / "b"), "1,000", f"{made.size:,}") == []
    assert not (tmp_path / "b").exists()
    refuse_without_room("m", {"path": "/p", "bytes": 0, "free_bytes": 0})


def test_what_is_not_there_and_what_is_hidden(tmp_path: Path) -> None:
    assert manifest_of(str(tmp_path / "no"), None, {}) is None
    assert manifest_of(ID, None, {"HF_HOME": str(tmp_path)}) is None
    plain(tmp_path / "a", {".git/config": b"x", ".hidden": b"x", "config.json": b"{}", f"w{PART}": b"x"})
    assert [file.name for file in found(str(tmp_path / "a"), {}).files] == ["config.json"]


@pytest.mark.parametrize("direct", [True, False])
def test_chunks_past_the_page_cache_and_through_it(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    data, buffer = content(CHUNK + 77), Buffer()
    file = DirectFile(tmp_path / "f", size_bytes=len(data))
    for index in (1, 0):
        offset, size = chunks.range_of(len(data), index)
        buffer.view[:size] = data[offset : offset + size]
        file.write(offset, buffer.view[:size])
    assert bytes(buffer.read(file, CHUNK, CHUNK)) == data[CHUNK:]
    file.settle()

    assert (tmp_path / "f").read_bytes() == data
    assert sha256_of(tmp_path / "f", buffer) == hashlib.sha256(data).hexdigest()
    buffer.close()


def test_of_two_that_fetch_one_model_the_earlier_ends(tmp_path: Path) -> None:
    """The daemon that began it was killed, and another asks for the same."""
    made, jobs = found(str(plain(tmp_path / "a", FILES)), {}), Programs()
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files).to_dict()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        order = {"manifest": there, "ways": [["127.0.0.1", "127.0.0.1", silent.getsockname()[1]]], "key": KEY}
        first, second = (jobs.copy("sink", order | {"connections": 1}, {}) for _ in range(2))

        assert not jobs.job_state(second["job"]).keys() & {"ended", "error"}
        with pytest.raises(RankError):
            jobs.job_state(first["job"])
        jobs.end_job(second["job"])


def test_a_source_knows_for_how_long_nobody_was_there(tmp_path: Path) -> None:
    made = found(str(plain(tmp_path / "a", FILES)), {})
    served = TransferSource(made, KEY)
    port = served.listen("127.0.0.1")
    assert served.idle_s() > 0
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        wanted = {"range": f"bytes=0-{len(FILES['config.json']) - 1}"}
        assert client.get(f"http://127.0.0.1:{port}/config.json", headers=wanted).status_code == 206
        assert served.idle_s() == 0.0
    until(lambda: served.idle_s() > 0, "the connection has ended", 0.01)


def test_the_programs_copy_and_end_with_who_started_them(tmp_path: Path) -> None:
    made, jobs = found(str(plain(tmp_path / "a", FILES)), {}), Programs()
    there = ModelManifest(str(tmp_path / "b"), None, None, made.root, made.files).to_dict()
    serving = jobs.copy("source", {"manifest": made.to_dict(), "binds": ["127.0.0.1"], "key": KEY}, {})
    ways = [["127.0.0.1", "127.0.0.1", serving["ports"]["127.0.0.1"]]]
    fetching = jobs.copy("sink", {"manifest": there, "ways": ways, "key": KEY, "connections": 2}, {})
    until(lambda: jobs.job_state(fetching["job"]).get("ended"), "all is there")

    assert {name: (tmp_path / "b" / name).read_bytes() for name in FILES} == FILES
    pid = jobs._jobs[serving["job"]][1].process.pid
    assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    for job in (serving, fetching):
        jobs.end_job(job["job"])
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RankError):
        jobs.job_state(serving["job"])
    with pytest.raises(RankError, match=r"192\.0\.2\.1"):
        jobs.copy("source", {"manifest": made.to_dict(), "binds": ["192.0.2.1"], "key": KEY}, {})
    json.dumps(there)
