"""How a bench starts an engine: a process of its own with our plugin on its path, and one JSON answer. Never imports vLLM itself.

The plugin folder holds two entry points, `sparkd` (the product's) and `sparkd_bench` (which measures loads, see loader_case.py);
VLLM_PLUGINS says which of them a process may use, so that stock vLLM runs without ours. Only the standard library is needed here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.rank.command import kernels_on_disk
from workers.rank.log_parser import Parser

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "SPARKD_BENCH_ANSWER "


class ChildFailed(RuntimeError):
    """A child ended without an answer; the message is its one-line reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child said, and its whole log."""

    value: Mapping[str, Any]
    log: str


def plugin_folder(parent: str | os.PathLike[str]) -> Path:
    """A folder for PYTHONPATH with the metadata of both plugins, as an installation would have it."""
    folder = Path(parent) / "plugins"
    for name, function in (("sparkd", "workers.plugin:register"), ("sparkd_bench", "tests.bench.loader_case:install")):
        info = folder / f"{name}_plugin-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}-plugin\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {function}\n", encoding="utf-8")
    return folder


def environment(plugins: Path, *, ours: bool, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For one child: stock vLLM, or vLLM with the product's plugin."""
    path = os.pathsep.join([str(plugins), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {
        "PYTHONPATH": path,
        "VLLM_PLUGINS": "sparkd,sparkd_bench" if ours else "sparkd_bench",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    # As sparkd says it to its engines; without it every second start is timed with its compilers.
    return {**kernels_on_disk(os.environ), **os.environ, **fixed, **(more or {})}


def engine_arguments(*, cuda: bool) -> dict[str, Any]:
    """What every engine of a bench is started with."""
    small = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 2048, "seed": 0}
    # FlashAttention 2 is not everywhere, and the comparison is about weights.
    # 0.2: several children may share a GPU, and vLLM refuses to start where less than this share of it is free.
    device = {"attention_backend": "TRITON_ATTN", "kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.2}
    return {**small, **device} if cuda else small


def ask(
    module: str,
    question: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    limit_s: float,
    log: str | os.PathLike[str] | None = None,
) -> Answer:
    """Runs `python -m module` with the question as JSON on its standard input. Raises ChildFailed with the reason in one line."""
    timed_out = False
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(question).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
        out.seek(0)
        text = out.read()
    if log is not None:
        Path(log).write_text(text, encoding="utf-8")
    lines = text.splitlines()
    answer = next((line for line in reversed(lines) if line.startswith(ANSWER)), None)
    if answer is not None:
        return Answer(json.loads(answer.removeprefix(ANSWER)), text)
    raise ChildFailed(f"no answer within {limit_s:.0f} s" if timed_out else reason(lines, process.returncode))


def say(value: Mapping[str, Any]) -> None:
    """A child's answer. vLLM writes to both streams, so it has a line and a mark of its own."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)


def reason(lines: Sequence[str], code: int) -> str:
    """The root cause that a log names, as the daemon would tell it."""
    parser = Parser()
    for line in lines:
        parser.feed(line, 0.0)
    cause = parser.progress["last_error"]
    return str(cause) if cause else f"ended with status {code}" + (f": {lines[-1][:200]}" if lines else "")
