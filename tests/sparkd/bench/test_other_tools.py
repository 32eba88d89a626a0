"""The other tools: their commands without a key, their results as they write them, and llama-benchy's rows of the requests."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from sparkd.bench.benchy import BenchTarget, TimedRequest
from sparkd.bench.other_tools import TOOLS, measure, row_of
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell
from sparkd.errors import RankError

KEY = "sk-canary-0123456789"
ENDED = "the last words"
# unix(7): sun_path has 108 bytes, and its end is a zero.
MOST_SOCKET_CHARS = 107
CELL = Cell(depth=16, concurrency=2, prompt_tokens=8, output_tokens=4)
REQUEST = TimedRequest(100.0, 100.5, 102.0, 24, 4)


def written(tool: str, folder: Path) -> None:
    """One request of 24 tokens that was answered with 4, in the form that the tool writes."""
    if tool == "vllm":
        begun_s = 100.0 - (time.time() - time.perf_counter())
        lists: dict[str, Any] = {"start_times": [begun_s], "ttfts": [0.5], "itls": [[0.5] * 3], "input_lens": [24], "output_lens": [4]}
        (folder / "result.json").write_text(json.dumps(lists | {"errors": [""]}))
    elif tool == "guidellm":
        times = {"request_start": 100.0, "first_token_iteration": 100.5, "last_token_iteration": 102.0}
        request = {"info": {"timings": times}, "prompt_tokens": 24, "output_tokens": 4}
        (folder / "result.json").write_text(json.dumps({"benchmarks": [{"requests": {"errored": [], "successful": [request]}}]}))
    else:
        (folder / "out").mkdir()
        values = {"time_to_first_token": 500.0, "usage_prompt_tokens": 24, "usage_completion_tokens": 4}
        record = {
            "metadata": {"request_start_ns": int(100e9), "request_end_ns": int(102e9)},
            "metrics": {name: {"value": value} for name, value in values.items()},
        }
        (folder / "out" / "profile_export.jsonl").write_text(json.dumps(record) + "\n")


@pytest.mark.parametrize("tool", TOOLS)
def test_the_command_has_the_cell_and_no_key(tool: str, tmp_path: Path) -> None:
    target = BenchTarget("http://127.0.0.1:1/v1", "m", "/m", "/usr/bin/python3", tmp_path, key=KEY)
    words = " ".join(TOOLS[tool].start(target, CELL, 6, tmp_path))
    said = words + "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in words and "/m" in said and "24" in said and "http://127.0.0.1:1" in said


@pytest.mark.parametrize("tool", TOOLS)
def test_a_result_is_read_as_the_tool_writes_it(tool: str, tmp_path: Path) -> None:
    written(tool, tmp_path)
    (request,) = TOOLS[tool].read(tmp_path)
    assert (request.prompt_tokens, request.output_tokens) == (24, 4)
    assert (request.begun_s, request.first_s, request.ended_s) == pytest.approx((100.0, 100.5, 102.0), abs=1e-3)


def test_what_a_tool_leaves_behind_goes_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    lines = ["import tempfile", "tempfile.mkdtemp(prefix='left-')", "print(tempfile.gettempdir(), file=open('where', 'w'))"]
    lines += [f"print('{ENDED}')"]
    (tmp_path / "guidellm.py").write_text("\n".join(lines))
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncd {tmp_path} && exec {sys.executable} guidellm.py\n")
    program.chmod(0o700)
    target = BenchTarget("http://127.0.0.1:1/v1", "m", "/m", str(program), tmp_path)
    # The program writes no result, and ends well. AIPerf tells of its errors on its output alone.
    with pytest.raises(RankError, match=ENDED):
        asyncio.run(measure("guidellm", target, CELL, Arguments()))
    folder = Path((tmp_path / "where").read_text().strip())
    assert folder.name.startswith("sparkd-bench-") and not folder.exists()
    assert len(str(folder / "tmp_9kfhlt0/aiperf/dataset_manager_proxy_frontend.ipc")) <= MOST_SOCKET_CHARS


def test_the_row_of_one_request_at_a_time_has_the_rates_of_each() -> None:
    row = row_of(CELL.model_copy(update={"concurrency": 1}), [REQUEST, TimedRequest(102.0, 102.25, 103.25, 24, 5)])
    assert row["tg_throughput"]["values"] == [2.0, 4.0] and row["pp_throughput"]["values"] == [48.0, 96.0]
    assert row["e2e_ttft"]["values"] == [500.0, 250.0]


def test_the_row_of_several_at_once_has_all_tokens_by_the_whole_time() -> None:
    row = row_of(CELL, [REQUEST, TimedRequest(100.0, 101.0, 104.5, 24, 4)])
    assert row["tg_throughput"]["values"] == [2.0] and row["pp_throughput"] is None
    assert row["tg_req_throughput"]["values"] == [2.0, pytest.approx(3 / 3.5)]
