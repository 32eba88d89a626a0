"""The log parser against captured logs of old and new vLLM, and against single lines of every format it knows."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparkd.state.nouns import Progress
from sparkd.state.rows import noun_of
from workers.rank.log_parser import LAST_ERROR_CHARS, ROOT_CAUSE_WINDOW_S, Parser

FIXTURES = Path(__file__).parents[2] / "fixtures"
BAR = "Loading safetensors checkpoint shards: {percent:3d}% Completed | {done}/{total} [00:01<00:01,  1.20s/it]"


def read(*lines: str, step_s: float = 1.0, parser: Parser | None = None) -> Parser:
    parser = parser or Parser()
    for number, line in enumerate(lines):
        parser.feed(line, 1000.0 + number * step_s)
    return parser


def known(parser: Parser) -> dict[str, Any]:
    told = {name: value for name, value in parser.progress.items() if name not in ("line_at_s", "began_s", "error_at_s", "kv_requests")}
    return {name: value for name, value in told.items() if value is not None and value is not False}


SERVED = {"phase": "serving", "kv_gib": 1.0, "server_up": True}


@pytest.mark.parametrize(
    ("file", "expected", "concurrency"),
    [
        ("vllm-logs/cpu-0.32.0-single-start-serve-sigterm.txt",
         {**SERVED, "kv_tokens": 524_288}, 256.0),
        ("vllm-logs/cpu-0.32.0-native-rank0-start.txt",
         {**SERVED, "kv_tokens": 1_048_576}, 512.0),
        ("vllm-logs/cpu-0.32.0-native-rank1-start.txt", {"phase": "sizing", "kv_gib": 1.0}, None),
        ("ray-logs/vllm-0.32.0-ray-executor-start.txt",
         {**SERVED, "kv_tokens": 1_048_576}, 512.0),
        ("vllm-logs/startup-progress.txt",
         {"phase": "serving", "weights_gib": 21.94, "kv_gib": 76.49, "server_up": True}, None),
        ("vllm-logs/kv-size-0.33-one-line.txt", {"phase": "sizing", "kv_tokens": 4_843_965}, 73.91),
        ("vllm-logs/shm-broadcast-wait.txt", {"phase": "starting"}, None),
    ],
)  # fmt: skip
def test_captured_logs(file: str, expected: dict[str, Any], concurrency: float | None) -> None:
    parser = read(*(FIXTURES / file).read_text(encoding="utf-8").splitlines())
    assert known(parser) == expected
    assert parser.progress["kv_requests"] == concurrency


def test_a_phase_has_the_time_of_its_first_line_however_short_it_was() -> None:
    lines = (
        "Starting to load model /m...",
        "Model loading took 1.00 GiB memory and 0.10 seconds",
        "INFO:     Application startup complete.",
    )
    assert read(*lines, *lines, step_s=0.01).progress["began_s"] == {"loading": 1000.0, "warming": 1000.01, "serving": 1000.02}


@pytest.mark.parametrize(
    ("file", "beginning"),
    [
        ("vllm-logs/memory-gate-error.txt", "ValueError: Free memory on device cuda:0 (104.46/121.69 GiB) on startup is less than"),
        ("vllm-logs/cpu-0.32.0-native-rank0-peer-killed.txt", "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"),
        ("vllm-logs/quantization-errors.txt", "ValueError: Failed to find a kernel that can implement the MXFP4 linear layer."),
        ("vllm-logs/parallel-errors.txt", "World size (2) is larger than the number of available GPUs (1) in this node."),
        ("vllm-logs/backend-selection.txt", "ValueError: moe_backend='flashinfer_b12x' is not supported for FP8 MoE"),
        ("vllm-logs/rpc-timeout.txt", "RPC call to sample_tokens timed out"),
        ("vllm-logs/toolchain-errors.txt", "Value 'sm_121a' is not defined for option 'gpu-name'"),
        ("ray-logs/oom-monitor-kill.txt", "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed"),
    ],
)
def test_captured_failures(file: str, beginning: str) -> None:
    progress = read(*(FIXTURES / file).read_text(encoding="utf-8").splitlines()).progress
    assert progress["last_error"].startswith(beginning)
    assert not progress["server_up"]


def test_every_quantization_error_is_noticed() -> None:
    lines = (FIXTURES / "vllm-logs/quantization-errors.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 3
    assert [line for line in lines if not read(line).progress["last_error"]] == []


def test_the_fields_are_of_the_state() -> None:
    progress = Parser().progress
    assert progress.keys() - {one.name for one in fields(Progress)} == {"kv_requests"}
    assert noun_of(Progress, progress) == Progress()


PREFIXES = [
    "",
    "(Worker_TP0 pid=32117) INFO 11-21 07:41:55 [default_loader.py:501] ",
    "(RayWorkerProc pid=16108, ip=192.168.100.11) (Worker_TP0 pid=16108) INFO 11-21 07:12:45 [default_loader.py:501] ",
    "\x1b[36m(RayWorkerWrapper pid=16108, ip=10.0.0.2)\x1b[0m INFO 05-01 12:00:00 [default_loader.py:501] ",
    "(pid=16108) INFO 05-01 12:00:00 default_loader.py:501] ",
    "\x1b[0;36m(EngineCore pid=5197)\x1b[0;0m \x1b[32mINFO\x1b[0m 11-21 07:00:42 [core.py:133] ",
    "half a bar\r(Worker pid=1) INFO 11-21 07:00:42 [a.py:1] ",
]

LINES: list[tuple[str, dict[str, Any]]] = [
    ("Starting to load model /models/tiny-moe...", {"phase": "loading"}),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.20s/it]",
     {"phase": "loading", "fraction": 0.5}),
    ("Loading safetensors using Runai Model Streamer:  25% Completed | 25/100 [00:01<00:03,  25.0it/s]",
     {"phase": "loading", "fraction": 0.25}),
    ("Model loading took 21.94 GiB memory and 123.456789 seconds", {"phase": "warming", "weights_gib": 21.94}),
    ("Warming up model for the compilation...", {"phase": "warming"}),
    ("Available KV cache memory: 76.49 GiB", {"phase": "sizing", "kv_gib": 76.49}),
    ("Explicitly set (1.0/13.96) GiB for KV cache on node 0.", {"phase": "sizing", "kv_gib": 1.0}),
    ("Auto set (9.5/13.96) GiB for KV cache on node 0, with 12.0 GiB requested memory", {"phase": "sizing", "kv_gib": 9.5}),
    ("Initial free memory 110.3 GiB, reserved 15.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config and",
     {"phase": "sizing", "kv_gib": 15.0}),
    ("GPU KV cache size: 4,843,965 tokens", {"phase": "sizing", "kv_tokens": 4_843_965}),
    ("CPU KV cache size: 524,288 tokens, Maximum concurrency for 2,048 tokens per request: 256.00x",
     {"phase": "sizing", "kv_tokens": 524_288}),
    ("GPU + host KV cache size: 1,024 tokens, Maximum concurrency for 2,048 tokens per request: 0.50x",
     {"phase": "sizing", "kv_tokens": 1024}),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|█████     | 34/68 [00:03<00:03, 10.31it/s]",
     {"phase": "sizing", "fraction": 0.5}),
    ("init engine (profile, create kv cache, warmup model) took 98.21 seconds", {"phase": "sizing"}),
    ("init engine (profile, create kv cache, warmup model) took 98.21 s (compilation: 41.07 s)", {"phase": "sizing"}),
    ("init engine (profile, create kv cache, warmup model) took 9.0 s (compilation: 4.07 s — language_model: 3.00 s, encoder: 1.07 s)",
     {"phase": "sizing"}),
    ("INFO:     Application startup complete.", {"phase": "serving", "server_up": True}),
    ("INFO:     Uvicorn running on unix socket /run/a.sock (Press CTRL+C to quit)", {"phase": "serving", "server_up": True}),
    ("Resolved architecture: Qwen3MoeForCausalLM", {"phase": "starting"}),
    ("", {"phase": "starting"}),
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_lines(prefix: str) -> None:
    parsers = {line: read(prefix + line) for line, _ in LINES}
    assert {line: known(parser) for line, parser in parsers.items()} == dict(LINES)
    assert [line for line, parser in parsers.items() if parser.feed(prefix + line, 2000.0)] == [], "nothing new the second time"


def test_a_second_checkpoint_begins_again() -> None:
    parser = read(BAR.format(percent=100, done=3, total=3), BAR.format(percent=20, done=1, total=5))
    assert parser.progress["fraction"] == 0.2


def test_the_phase_never_goes_back() -> None:
    parser = read(
        "Available KV cache memory: 76.49 GiB", BAR.format(percent=50, done=1, total=2), "Warming up model for the compilation..."
    )
    assert parser.progress["phase"] == "sizing"
    assert parser.progress["fraction"] is None


def test_fraction_belongs_to_its_phase() -> None:
    parser = read(BAR.format(percent=50, done=2, total=4), "Model loading took 1.0 GiB memory and 2 seconds")
    assert (parser.progress["phase"], parser.progress["fraction"]) == ("warming", None)


def test_feed_tells_what_changed() -> None:
    parser = Parser()
    assert parser.feed("Starting to load model /m...", 1.0) is True
    assert parser.feed("nothing of interest", 2.0) is False
    assert parser.progress["line_at_s"] == 2.0


ERROR = "(EngineCore pid=9) ERROR 11-21 07:42:42 [core.py:1512] "


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([ERROR + "EngineCore failed to start.", ERROR + "ValueError: bad shape"], "ValueError: bad shape"),
        (["ValueError: bad shape", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"],
         "ValueError: bad shape"),
        (["RuntimeError: Engine core initialization failed. See root cause above.", "ValueError: bad shape"], "ValueError: bad shape"),
        (["RuntimeError: something", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
         "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (["torch.OutOfMemoryError: CUDA out of memory.", "ValueError: something"], "torch.OutOfMemoryError: CUDA out of memory."),
        (["NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned"],
         "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned"),
        (["api_server.py: error: unrecognized arguments: --no-such-flag"], "api_server.py: error: unrecognized arguments: --no-such-flag"),
        (["/opt/venv/bin/python: No module named vllm"], "/opt/venv/bin/python: No module named vllm"),
        (["pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
          "  Value error, Quantization method (fp8) does not match [type=value_error, input_value=ArgsKwargs((), {'model': ...})]"],
         "Value error, Quantization method (fp8) does not match"),
        (["(EngineCore pid=1) WARNING 11-21 07:00:00 [a.py:1] ImportError: no flashinfer"], None),
        (["    raise RuntimeError(", "  RuntimeError: quoted in a frame"], None),
        ([ERROR + "Traceback (most recent call last):"], None),
        (["ValueError: To serve at least one request with the model's max seq len (8192), (9.0 GiB KV cache is needed, which is larger "
          "than the available KV cache memory (1.0 GiB)."],
         "ValueError: To serve at least one request with the model's max seq len (8192), (9.0 GiB KV cache is needed, which is larger "
         "than the available KV cache memory (1.0 GiB)."),
    ],
)  # fmt: skip
def test_the_root_cause_is_kept(lines: list[str], expected: str | None) -> None:
    assert read(*lines).progress["last_error"] == expected


def test_a_new_failure_replaces_an_old_one() -> None:
    parser = read("ImportError: optional thing")
    parser.feed("RuntimeError: much later", 1000.0 + ROOT_CAUSE_WINDOW_S + 1)
    assert parser.progress["last_error"] == "RuntimeError: much later"
    assert parser.progress["error_at_s"] == 1000.0 + ROOT_CAUSE_WINDOW_S + 1


def test_long_errors_are_cut() -> None:
    assert len(read("ValueError: " + "x" * 5000).progress["last_error"]) == LAST_ERROR_CHARS


def test_what_a_request_did_wrong_is_not_the_rank_s_error() -> None:
    parser = read(
        "INFO:     Application startup complete.", "(APIServer pid=1) ERROR 11-21 07:00:00 [serving.py:1] ValueError: my secret prompt"
    )
    parser.feed("pydantic_core._pydantic_core.ValidationError: 1 validation error", 1100.0)
    assert parser.progress["last_error"] is None
    parser.feed(ERROR + "RuntimeError: CUDA error: an illegal memory access was encountered", 1200.0)
    assert parser.progress["last_error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_dead_engine_is_noticed_while_serving() -> None:
    parser = read(
        "Application startup complete.",
        "(APIServer pid=1) ERROR 11-21 07:00:00 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore",
    )
    assert "EngineDeadError" in parser.progress["last_error"]


CLIENT = "(APIServer pid=1) WARNING 11-22 19:09:52 [core_client.py:817] "
RAY_WORKER = "(EngineCore pid=1) ERROR 11-22 19:09:52 [ray_executor_v2.py:1] RayWorkerProc rank=1"
WORKER = "(EngineCore pid=1) ERROR 11-22 19:09:52 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
CORE_LOST, WORKER_GONE, WORKER_LOST = (
    "its engine core was lost",
    *("its worker VllmWorker-0 was lost" + how for how in ("", ", by SIGSEGV")),
)


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        # kill -9 of vLLM 0.32's, at rest; with a request in hand.
        ([f"{CLIENT}[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"], CORE_LOST),
        ([f"{WORKER}(exit code: -11), x.", f"{CLIENT}[shutdown] MPClient: engine core exited unexpectedly;"], WORKER_LOST),
        # Ended by the engine itself.
        ([f"{WORKER}(exit code: -15), x."], None),
        ([ERROR + "RuntimeError: CUDA error: an illegal memory access was encountered", f"{WORKER}(exit code: None), x."], None),
        # kill -9 of vLLM 0.32's worker, at rest; and what 0.26 says.
        ([f"{WORKER}(exit code: None), shutting down executor."], WORKER_GONE),
        ([f"{RAY_WORKER} died unexpectedly, shutting down executor."], "its worker rank=1 was lost"),
        (["(APIServer pid=1) INFO 11-22 19:09:52 [logger.py:1] Received: engine core exited unexpectedly, EngineDeadError"], None),
    ],
)
def test_an_engine_that_lost_a_process_says_which(lines: list[str], lost: str | None) -> None:
    parser = read("INFO:     Application startup complete.")
    told = [parser.feed(line, 1.0) for line in lines]
    assert parser.progress["lost"] == lost and (any(told) or lost is None)


@pytest.mark.parametrize(("code", "lost"), [("-9", f"{CORE_LOST}, by SIGKILL"), ("-99", f"{CORE_LOST}, by signal 99"), ("1", None)])
def test_a_core_that_is_killed_before_it_came_up_tells_the_signal(code: str, lost: str | None) -> None:
    text = f"RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': {code}}}"
    assert read(text).progress["lost"] == read(f"(APIServer pid=1) {text}").progress["lost"] == lost


def test_a_core_that_never_came_up_was_lost_where_no_error_tells_why() -> None:
    """kill -9 of vLLM 0.32's while it loads."""
    text = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert read(text).progress["lost"] == CORE_LOST
    assert read(ERROR + "ValueError: bad shape", text).progress["lost"] is None
