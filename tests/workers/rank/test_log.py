"""What an engine writes: how far it is, and a log that is bounded, readable and free of keys."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import SECRET, Place, a_place, stop
from tests.support.waiting import HUNG_S, until
from workers.rank import lifecycle
from workers.rank import log as logfile

place = pytest.fixture(name="place")(a_place)


# From a running rank


def test_progress_reaches_the_status_file(place: Place) -> None:
    code = r"""
    import sys, time
    print("(Worker pid=1) INFO 11-21 07:00:49 [m.py:68] Starting to load model /models/m...")
    sys.stderr.write("\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]")
    sys.stderr.write("\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<?, ?it/s]")
    sys.stderr.flush()
    print("\nup", flush=True)
    time.sleep(600)
    """
    place.start(code)
    progress = until(lambda: place.fact()["progress"]["fraction"] and place.fact()["progress"])
    assert (progress["phase"], progress["fraction"]) == ("loading", 0.5)
    assert abs(progress["line_at_s"] - time.time()) < HUNG_S


def test_an_unfinished_bar_counts(place: Place) -> None:
    bar = r"\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<?, ?it/s]"
    lifecycle.spawn(place.spec(f"import sys, time\nsys.stderr.write('{bar}')\nsys.stderr.flush()\ntime.sleep(600)\n"))
    assert until(lambda: place.fact()["progress"]["fraction"]) == 0.25


def test_a_full_disk_does_not_stop_the_engine(place: Place) -> None:
    code = """
    import pathlib, sys, time
    for _ in range(4000):
        print("x" * 99)
    print("Starting to load model /models/m...", flush=True)
    pathlib.Path(sys.argv[sys.argv.index("--flag") + 1]).touch()
    time.sleep(600)
    """
    done = place.root / "done"
    lifecycle.spawn(place.spec(code, log_path="/dev/full", flags=("--flag", str(done))))
    until(done.exists)
    until(lambda: place.fact()["progress"]["phase"] == "loading", "the status goes on")
    assert place.fact()["alive"]


def test_a_disk_that_hangs_stops_neither_the_engine_nor_its_status_nor_an_order(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the pipe holds: an engine whose output nobody reads blocks."""
    monkeypatch.setattr(lifecycle, "SHIM", "tests.support.shim_with_a_dead_disk")
    code = """
    import pathlib, sys, time
    for _ in range(3000):
        print("x" * 999)
    print("Starting to load model /models/m...", flush=True)
    pathlib.Path(sys.argv[sys.argv.index("--flag") + 1]).touch()
    time.sleep(600)
    """
    done = place.root / "done"
    handle = lifecycle.spawn(place.spec(code, flags=("--flag", str(done))))
    until(done.exists, "the engine has written all")
    until(lambda: place.fact()["progress"]["phase"] == "loading", "the status goes on")
    assert not place.log.exists()

    ended = stop(place, handle)
    assert (ended["gone"], ended["stop_ordered"]) == (True, True)


def test_its_log_rotates(place: Place) -> None:
    """The first write is the shim's own."""
    place.start("import time\nprint('up', flush=True)\ntime.sleep(600)\n", log_max_bytes=1, log_backups=1)
    assert place.log.read_text() == "up\n"
    assert sorted(path.name for path in place.log.parent.iterdir()) == ["r1.log", "r1.log.1"]


# Without one


@pytest.mark.parametrize("backups", [0, 2])
def test_the_log_rotates_by_size(tmp_path: Path, backups: int) -> None:
    log = logfile.RotatingLog(str(tmp_path / "a.log"), max_bytes=8000, backups=backups)
    for number in range(1800):
        log.write([f"line {number:05d}"])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.log", "a.log.1", "a.log.2"][: backups + 1]
    assert all((tmp_path / name).stat().st_size <= 8000 for name in names)
    text = "".join((tmp_path / name).read_text() for name in reversed(names))
    kept = [int(line.split()[1]) for line in text.splitlines()]
    assert kept == list(range(kept[0], 1800))


def test_reading_goes_on_across_a_rotation(tmp_path: Path) -> None:
    log = logfile.RotatingLog(str(tmp_path / "a.log"), max_bytes=50, backups=1)
    assert logfile.read_log(log.path) == {"text": "", "cursor": "0:0"}
    log.write(["one", "two", "three"])
    first = logfile.read_log(log.path, tail_lines=2)
    assert first["text"] == "two\nthree\n"
    log.write(["four"])
    log.write(["five" * 9])
    assert (tmp_path / "a.log.1").exists()
    second = logfile.read_log(log.path, first["cursor"])
    assert second["text"] == "four\n"
    third = logfile.read_log(log.path, second["cursor"])
    assert third["text"] == "five" * 9 + "\n"
    assert logfile.read_log(log.path, third["cursor"]) == {"text": "", "cursor": third["cursor"]}


@pytest.mark.parametrize(
    "lose",
    [
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_suffix(".log-20260101")),
        lambda path: shutil.rmtree(path.parent),
        lambda path: path.write_text(""),
    ],
    ids=["removed", "moved by logrotate", "removed with its folder", "emptied by copytruncate"],
)
def test_what_is_written_after_a_log_was_taken_away_can_be_read(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    log = logfile.RotatingLog(str(tmp_path / "logs" / "a.log"), max_bytes=1000, backups=1)
    log.write(["before " * 9])
    lose(Path(log.path))
    log.write(["after"])
    assert logfile.read_log(log.path)["text"] == "after\n"


@pytest.mark.parametrize("cursor", ["", "-1:-1", "1:2:3", "99999999999999999999:5"])
def test_an_odd_cursor_begins_again(tmp_path: Path, cursor: str) -> None:
    (tmp_path / "a.log").write_text("one\n")
    assert logfile.read_log(str(tmp_path / "a.log"), cursor)["text"] == "one\n"


@pytest.mark.parametrize(
    ("chunks", "lines", "tail"),
    [
        ([b"a\nb\n"], ["a", "b"], ""),
        ([b"a", b"b\nc"], ["ab"], "c"),
        ([b"a\r\nb\rc"], ["a", "b"], "c"),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"], ""),
        ([b"x" * 20000, b"x" * 20000, b"x\ny\n"], ["x" * logfile.LINE_BYTES + " [cut]", "y"], ""),
    ],
)
def test_lines_are_split_and_bounded(chunks: list[bytes], lines: list[str], tail: str) -> None:
    splitter = logfile.LineSplitter()
    assert [line for chunk in chunks for line in splitter.feed(chunk)] == lines
    assert splitter.tail == tail


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        ('{"authorization": "Basic dXNlcg=="}', '{"authorization": "Basic [redacted]"}'),
        (
            "non-default args: {'port': 1, 'api_key': ['letmein'], 'model': 'm'}",
            "non-default args: {'port': 1, 'api_key': ['[redacted]'], 'model': 'm'}",
        ),
        ("vllm serve m --hf-token hunter2 --port 1", "vllm serve m --hf-token [redacted] --port 1"),
        ("VLLM_API_KEY=hunter2", "VLLM_API_KEY=[redacted]"),
        ("got hf_" + "a" * 34, "got [redacted]"),
        ("got sk-" + "a" * 20, "got [redacted]"),
        (f"the key is {SECRET}.", "the key is [redacted]."),
        ("GPU KV cache size: 4,843,965 tokens", "GPU KV cache size: 4,843,965 tokens"),
        ("tokenizer_mode=auto, max_tokens=5, keyboard", "tokenizer_mode=auto, max_tokens=5, keyboard"),
    ],
)
def test_keys_are_redacted(line: str, expected: str) -> None:
    assert logfile.Redactor([SECRET, "short"]).clean(line) == expected


@pytest.mark.parametrize("max_bytes", [1, 20])
def test_the_end_of_a_log_is_never_nothing_however_little_is_asked_for(tmp_path: Path, max_bytes: int) -> None:
    """Before: nothing where one line was longer, although there was a log."""
    path = tmp_path / "a.log"
    path.write_text("first line\n" + "x" * 30 + "\n")
    page = logfile.read_log(str(path), max_bytes=max_bytes)
    assert page["text"] and len(page["text"]) <= max_bytes
    with path.open("a") as log:
        log.write("next\n")
    assert logfile.read_log(str(path), page["cursor"], max_bytes=99)["text"] == "next\n"
