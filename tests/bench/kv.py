"""What the KV cache sized after warm-up gains and costs, beside stock vLLM at one utilization. Never asserts; it prints.

    python -m tests.bench.kv [--preset cpu|h200] [--only REGEX] [--starts 3] [--rounds 20]

Without vLLM in an environment of its own: PYTHONPATH=SITE:$PWD python3 -m tests.bench.kv; torch and vLLM are all it needs.

Starts of each case (a model, eager or with CUDA graphs), which --only chooses by names such as "dense graphs reserved":
    stock    stock vLLM at a utilization of 0.9
    first    ours, without a profile
    profile  ours, from the profile that `first` has left
    reserved ours, which may take so many GiB in all
The first three come --starts times in turn. Each runs the largest load that it admits, --rounds times max_num_seqs prompts of the longest
length (kv_case.py), in a process of its own. Without a GPU all of them see the machine of tests/support/given_memory.py. Exit status 1: a
bar was missed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench import child, kv_figures
from tests.bench.arguments import Parser, count, new, pattern
from tests.bench.kv_figures import GIB, RESERVED, SOURCES, STOCK, Start
from tests.support.given_memory import SIZE_BYTES
from workers.host.meminfo import mem_available_bytes, mem_total_bytes

LIMIT_S = 600.0
NEW_TOKENS = 16
UTILIZATION = 0.9
# What the host keeps beside the given machine.
FLOOR_BYTES = 3 * GIB
KINDS = (STOCK, *SOURCES, RESERVED)
WORKERS = {True: "workers.kv.SparkWorker", False: "workers.kv.SparkCPUWorker"}


@dataclass(frozen=True, slots=True)
class Preset:
    """models: changes to the configurations of tests/support/architectures.py; vLLM's dummy loader makes their weights up. engine: what
    limits the largest batch. margin_gib: what ours is asked to leave free; reserve_gib: what it may take in `reserved`."""

    models: Mapping[str, tuple[str, Mapping[str, Any]]]
    engine: Mapping[str, Any]
    margin_gib: float
    reserve_gib: float


_CPU = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 1024, "vocab_size": 32768}
_CPU |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
# Eight layers of Llama-3.1-8B (5.6 GB, 32 KiB a token) and of Qwen3-30B-A3B (11 GB, 16 KiB a token), vocabularies whole.
_LLAMA = {"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
_QWEN = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936}
_QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
_QWEN |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PRESETS: Mapping[str, Preset] = {
    # 128 KiB of cache a token, in float32, which is several times as fast as bfloat16 on a CPU without AMX.
    "cpu": Preset(
        {
            "dense": ("llama", _CPU),
            "moe": ("qwen3_moe", {**_CPU, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}),
        },
        {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "dtype": "float32", "block_size": 32},
        margin_gib=3.5,
        reserve_gib=5.0,
    ),
    # The cost of a load is not looked at: two layers, and prompts of a few blocks.
    "smallest": Preset(
        {"dense": ("llama", {**_CPU, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 2048})},
        {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 256, "dtype": "float32", "block_size": 32},
        margin_gib=3.5,
        reserve_gib=3.0,
    ),
    "h200": Preset(
        {"dense": ("llama", _LLAMA), "moe": ("qwen3_moe", _QWEN)},
        {"max_model_len": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 8192, "dtype": "bfloat16"},
        margin_gib=0.5,
        reserve_gib=40.0,
    ),
}


class Bench:
    """Runs starts; `starts` are the results so far."""

    def __init__(self, given: argparse.Namespace, folder: Path, *, cuda: bool) -> None:
        self.starts: list[Start] = []
        self._given = given
        self._preset = PRESETS[given.preset]
        self._folder = folder
        self._logs = given.logs or folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._plugins = child.plugin_folder(folder)
        self._cuda = cuda

    def case(self, name: str, eager: bool, kinds: Sequence[str]) -> None:
        """name: a model of the preset."""
        case = _case(name, eager)
        given = self._given
        source = self._written(name)
        in_turn = [kind for kind in kinds if kind != RESERVED]
        if not given.smallest:
            # What compilers keep on disk is there before anything is timed; the rehearsal has kernels that stock vLLM compiles later.
            for kind in dict.fromkeys((*in_turn[:1], "first")):
                self._start(case, kind, source, eager, rounds=0)
        for kind in [*in_turn * given.starts, *[RESERVED] * (RESERVED in kinds)]:
            self.starts.append(start := self._start(case, kind, source, eager, given.rounds))
            told = start.failed or f"{start.tokens:,} KV tokens, ready after {start.process_s:.1f} s"
            print(f"{case}: {kind} {told}", file=sys.stderr, flush=True)

    def _start(self, case: str, kind: str, source: Path, eager: bool, rounds: int) -> Start:
        env = dict[str, str]()
        profiles = self._folder / "profiles" / case.replace(" ", "-")
        report = self._folder / "report"
        report.unlink(missing_ok=True)
        if kind == "first":
            shutil.rmtree(profiles, ignore_errors=True)
        arguments = {**self._preset.engine, "enforce_eager": eager, "seed": 0, "load_format": "dummy"}
        if self._cuda:
            arguments["attention_backend"] = "TRITON_ATTN"
        reserved = int(self._preset.reserve_gib * GIB) if kind == RESERVED else 0
        if kind == STOCK:
            # On a CPU it is the share of the whole host that one worker's process may have.
            share = 1.0 if self._cuda else SIZE_BYTES / mem_total_bytes()
            arguments["gpu_memory_utilization"] = UTILIZATION * share
        else:
            arguments["worker_cls"] = WORKERS[self._cuda]
            known = {"margin_bytes": int(self._preset.margin_gib * GIB), "profiles": str(profiles), "report": str(report)}
            env["SPARKD_KV"] = json.dumps(known | ({"reserved_bytes": reserved} if reserved else {}))
        environment = child.environment(self._plugins, ours=kind != STOCK, more=env)
        environment.pop("VLLM_CPU_KVCACHE_SPACE")  # it would be the cache's size
        question = {"model": str(source), "arguments": arguments, "rounds": rounds, "new_tokens": NEW_TOKENS}
        log = self._logs / f"{len(self.starts):03d}-{case.replace(' ', '-')}-{kind}.log"
        start, began = Start(case, kind, reserved=reserved), time.monotonic()
        try:
            answer = child.ask("tests.bench.kv_case", question, environment, limit_s=LIMIT_S, log=log)
            said = dict(answer.value)
            start = replace(start, process_s=said.pop("ready_at") - began, **said)
            if rounds and not start.asked:
                start = replace(start, asked=1, failed=child.reason(answer.log.splitlines(), 1))
        except child.ChildFailed as failed:
            start = replace(start, failed=str(failed))
        return replace(start, report=json.loads(report.read_text(encoding="utf-8"))["cache"]) if report.exists() else start

    def _written(self, name: str) -> Path:
        """A folder with a config.json, once: a profile is of a checkpoint, and another time of writing is another checkpoint."""
        from tests.support import architectures

        architecture, changes = self._preset.models[name]
        path = self._folder / name
        if not path.exists():
            path.mkdir()
            config = {**architectures.ARCHITECTURES[architecture]().config, **changes}
            (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return path


def _case(name: str, eager: bool) -> str:
    return f"{name} {'eager' if eager else 'graphs'}"


def main() -> int:
    parser = Parser("tests.bench.kv", __doc__, preset="smallest", only="dense eager reserved", starts=1, rounds=1)
    parser.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--only", type=pattern, default="", help="a regular expression: MODEL eager|graphs stock|first|profile|reserved")
    parser.add_argument("--starts", type=count, default=3, help="of stock and of ours, in turn")
    parser.add_argument("--rounds", type=count, default=20, help="of the load")
    parser.add_argument("--logs", type=new, help="folder for the engines' logs; a temporary one without")
    given = parser.parse_args()
    import torch

    cuda = torch.cuda.device_count() > 0
    given.preset = given.preset or ("h200" if cuda else "cpu")
    preset = PRESETS[given.preset]
    todo: dict[tuple[str, bool], list[str]] = {}
    for name in preset.models:
        for eager in (True, False) if cuda else (True,):
            kinds = [kind for kind in KINDS if re.search(given.only, f"{_case(name, eager)} {kind}")]
            if kinds:
                todo[name, eager] = kinds
    if not todo:
        parser.error(f"argument --only: {given.only!r} matches no start")
    if not cuda and not given.smallest and mem_available_bytes() < SIZE_BYTES + FLOOR_BYTES:
        parser.error(f"{(SIZE_BYTES + FLOOR_BYTES) / GIB:.0f} GiB of free memory are needed without a GPU: the load writes the whole cache")
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        bench = Bench(given, Path(temporary), cuda=cuda)
        for (name, eager), kinds in todo.items():
            bench.case(name, eager, kinds)
    total = torch.cuda.mem_get_info()[1] if cuda else SIZE_BYTES
    rows = list(kv_figures.figures(bench.starts, total))
    print(f"{total / GIB:.1f} GiB; margin asked {preset.margin_gib:.2f} GiB; load: {given.rounds} rounds\n")
    print(kv_figures.starts_table(bench.starts), kv_figures.table(rows), sep="\n\n")
    failed = any(start.failed for start in bench.starts) if given.smallest else any(row.met is False for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
