"""Headers and JSON of foreign checkpoints: read apart from the loop's process once they are large, and bounded there."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparkd.checkpoint import foreign_file as module
from sparkd.checkpoint.foreign_file import SMALL_BYTES
from sparkd.checkpoint.header import MAX_HEADER_BYTES, MAX_VALUES, header_length, loads, parse_header
from sparkd.checkpoint.index import read_index
from sparkd.errors import CheckpointError
from sparkd.execution import bounded_call
from tests.support.waiting import HUNG_S

PATH = "/m/model.safetensors"


def header(tensors: int, spaced: bool) -> tuple[bytes, int]:
    table = {
        f"model.layers.{at}.mlp.down_proj.weight": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * at, 4 * at + 4]}
        for at in range(tensors)
    }
    return json.dumps(table, separators=None if spaced else (",", ":")).encode(), 4 * tensors


def in_thread(call: Callable[[], Any]) -> Any:
    """As the daemon reads: on a thread beside its loop."""
    return asyncio.run(asyncio.to_thread(call))


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a process are not met on a slow machine either."""
    monkeypatch.setattr(bounded_call, "START_S", HUNG_S)
    monkeypatch.setattr(module, "TIME_S", HUNG_S)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read in a process of their own."""
    found: list[str] = []
    real = module.apart

    def counted(function: Any, raw: bytes, path: str, *more: Any) -> Any:
        found.append(path)
        return real(function, raw, path, *more)

    for place in ("sparkd.checkpoint.header.apart", "sparkd.checkpoint.index.apart"):
        monkeypatch.setattr(place, counted)
    return found


def test_a_header_reads_the_same_in_both_places(processes: list[str]) -> None:
    raw, data = header(6000, False)
    assert len(raw) > SMALL_BYTES

    here = parse_header(raw, PATH, 8 + len(raw) + data, 1)
    assert processes == []
    there = in_thread(lambda: parse_header(raw, PATH, 8 + len(raw) + data, 1))

    assert there == here
    assert processes == []


def test_a_process_that_is_slow_to_begin_gets_all_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: what it had not taken within the first wait of half a second was never sent, and nothing came of it."""
    monkeypatch.setattr(bounded_call, "_LOOK_S", 0.0)
    raw, data = header(6000, True)

    there = in_thread(lambda: parse_header(raw, PATH, 8 + len(raw) + data, 1))
    assert there == parse_header(raw, PATH, 8 + len(raw) + data, 1)


def test_a_fault_in_it_is_told_as_it_is_here(processes: list[str]) -> None:
    raw, data = header(6000, True)

    with pytest.raises(CheckpointError) as here:
        parse_header(raw, PATH, 8 + len(raw) + data + 1, 1)
    with pytest.raises(CheckpointError) as there:
        in_thread(lambda: parse_header(raw, PATH, 8 + len(raw) + data + 1, 1))

    assert there.value.message == here.value.message and there.value.file == here.value.file
    assert processes == [PATH]


def test_a_header_is_at_most_so_large() -> None:
    with pytest.raises(CheckpointError, match=str(MAX_HEADER_BYTES)):
        header_length((96_000_000).to_bytes(8, "little"), PATH, 1 << 40)


def test_an_index_reads_the_same_in_both_places(processes: list[str]) -> None:
    raw = json.dumps({"weight_map": {f"model.layers.{at}.weight": f"m-{at % 7}.safetensors" for at in range(8000)}}).encode()

    assert in_thread(lambda: read_index(raw, "index")) == read_index(raw, "index")
    assert processes == ["index"]


def test_json_of_too_many_values_is_refused() -> None:
    raw = b'{"a": [' + b"{}," * MAX_VALUES + b"{}]}"

    for read in (in_thread, lambda call: call()):
        with pytest.raises(CheckpointError, match=str(MAX_VALUES)):
            read(lambda: loads(raw, PATH))
    with pytest.raises(CheckpointError, match="nested"):
        in_thread(lambda: loads(b"[" * SMALL_BYTES * 2, PATH))


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_S", 0.001)

    with pytest.raises(CheckpointError, match=r"0\.001 s to read"):
        in_thread(lambda: loads(b"[" + b"{}," * SMALL_BYTES + b"{}]", PATH))


def test_a_process_that_takes_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 100 << 20)

    with pytest.raises(CheckpointError, match="100 MiB of memory"):
        in_thread(lambda: loads(b"[" + b"{}," * 1_500_000 + b"{}]", PATH))


ENDS = {"raise KeyError('it')": (1, "KeyError: 'it'"), "import os; os.kill(os.getpid(), 15)": (-signal.SIGTERM, "")}


@pytest.mark.parametrize("program", ENDS)
def test_any_other_end_of_the_process_is_no_limit(program: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    code, words = ENDS[program]
    monkeypatch.setattr(bounded_call, "module_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(CheckpointError) as caught:
        module.apart(len, b"", PATH)
    assert caught.value.file == PATH and caught.value.reason.endswith(f" {code}")
    (record,) = [record for record in caplog.records if record.name == "sparkd.bounded_call"]
    assert words in record.getMessage()
    caplog.clear()


def test_the_time_of_a_process_is_that_of_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input and the start do not count: a busy machine made a limit of them."""
    order: list[str] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: order.append(f"timer of {seconds}"))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    request = pickle.dumps((1 << 40, 5, os.path.join, (PATH,))) + b"rest"
    stdin = io.TextIOWrapper(io.BytesIO(request))
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("os.path.join", lambda raw, path: order.append("read"))
    bounded_call.main()
    assert order == ["timer of 5", "read"] and stdin.buffer.read() == b""


def test_brackets_that_never_close_cost_their_length() -> None:
    """Without bounds in the expression this took hours, in one call that nothing interrupts."""
    good = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    raw = good + b'"b":{"dtype":"U8","shape":[' * 60_000 + b"}}"
    started = threading.Event()

    def read() -> None:
        started.set()
        with pytest.raises(CheckpointError):
            parse_header(raw, PATH, 8 + len(raw) + 1, 1)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(HUNG_S)
    assert started.is_set() and not thread.is_alive()
