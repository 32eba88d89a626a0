"""What it costs to read the headers of a large checkpoint: time and peak memory of fresh processes. Never asserts; a miss is exit status 1.

    python -m tests.bench.headers [--rounds 3] [--folder EMPTY_FOLDER]

The checkpoint is one of 60 layers of 512 experts in FP8 with block scales: 188,000 tensors in 160 files, 400 GB, with real headers and a
real index around data that is a hole. Each row is a process of its own that does what the row says and nothing else, with the bytecode that
an installation has; wall and CPU are the medians and the least of the rounds from the start of the interpreter to its end, memory is the
largest peak (VmHWM in /proc/PID/status).
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sparkd.checkpoint.header import DTYPE_BITS
from tests.bench.arguments import Parser, count, new

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, SHARDS = 60, 512, 4096, 1024, 160
SMALLEST_LAYERS = 2
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 2, 256, 248320
# The whole of a `plan` has to stay under them.
BAR_S, BAR_MIB = 1.0, 100.0
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 10,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
# What a row runs, FOLDER stands for the checkpoint. The last one is what has to stay under the bars.
_READ = "from sparkd.checkpoint import read_checkpoint; c = read_checkpoint('FOLDER')"
_COUNTED = f"""{_READ}
from sparkd.models.shape import shape_of
from sparkd.capacity.weights import inventory
from workers.quantization.recipe import QuantizationRecipe
i = inventory(c, shape_of(c.config))
for name in ('bf16', 'nvfp4'):
    for ranks in (1, 2, 4):
        i.formatted(QuantizationRecipe.parse(name)).weights(ranks)"""
ROWS = {
    "an interpreter, nothing else": "pass",
    "import sparkd.checkpoint": "import sparkd.checkpoint",
    "read_checkpoint": _READ,
    "read_checkpoint, every tensor looked at": f"{_READ}; all(t.nbytes for t in c.tensors.values())",
    "read_checkpoint, one looked up": f"{_READ}; c.tensors['lm_head.weight']",
    "read_checkpoint, weights of 2 formats on 1, 2, 4 ranks": _COUNTED,
    "the imports of `sparkd plan`": "import sparkd.__main__, sparkd.cli.plan_fast, sparkd.cli.plan_run",
    "`sparkd plan` for 4 nodes": "import sparkd.__main__ as m; m.main(['plan', 'FOLDER', '--nodes', '4'])",
}
_TOLD = """import atexit
atexit.register(lambda: print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))))
"""

Named = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_mib: float


def main() -> int:
    parser = Parser("tests.bench.headers", __doc__, rounds=1, folder=None)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--folder", type=new, help="keep the checkpoint there, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write(folder, SMALLEST_LAYERS if options.smallest else LAYERS)
        # Where sparkd is not installed nothing may be written beside it, and a compilation at each start is nobody's plan.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as compiled:
            env |= {"PYTHONPYCACHEPREFIX": compiled, "XDG_CACHE_HOME": compiled}
            found = {name: measured(code.replace("FOLDER", str(folder)), options.rounds, env) for name, code in ROWS.items()}
        missed = show(found, folder)
        return 0 if options.smallest else missed


def write(folder: Path, layers: int = LAYERS) -> None:
    """The checkpoint, as the safetensors library lays it out: no space in a header, wide types first."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(tensors(layers))
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        members = everything[number * len(everything) // SHARDS : (number + 1) * len(everything) // SHARDS]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, dtype, shape in sorted(members, key=lambda member: (-DTYPE_BITS[member[1]], member[0])):
            size = math.prod(shape) * DTYPE_BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / file, 8 + len(text) + at)
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in folder.iterdir())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=2))


def tensors(layers: int = LAYERS) -> Iterator[Named]:
    """(name, dtype, shape) in the order of the layers."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for norm, width in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            yield f"{base}.{norm}.weight", "BF16", (width,)
        for norm in ("q_norm", "k_norm"):
            yield f"{base}.self_attn.{norm}.weight", "BF16", (HEAD_DIM,)
        yield f"{base}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
        for which, rows, columns in (
            ("q", HEADS * HEAD_DIM, HIDDEN),
            ("k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("o", HIDDEN, HEADS * HEAD_DIM),
        ):
            yield from linear(f"{base}.self_attn.{which}_proj", rows, columns)
        for expert in range(EXPERTS):
            for which, rows, columns in (("down", HIDDEN, INTERMEDIATE), ("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN)):
                yield from linear(f"{base}.mlp.experts.{expert}.{which}_proj", rows, columns)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)


def linear(module: str, rows: int, columns: int) -> Iterator[Named]:
    yield f"{module}.weight", "F8_E4M3", (rows, columns)
    yield f"{module}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def measured(code: str, rounds: int, env: Mapping[str, str]) -> list[Cost]:
    """After one start that does not count, since it compiles and asks vLLM about the model."""
    return [cost(code, env) for _ in range(1 + rounds)][1:]


def cost(code: str, env: Mapping[str, str]) -> Cost:
    """Of a fresh interpreter that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    since = time.monotonic()
    argv = [sys.executable, "-c", _TOLD + code]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=True)
    wall_s = time.monotonic() - since
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall_s, cpu_s, int(done.stdout.split()[-1]) / 1024)


def show(found: dict[str, list[Cost]], folder: Path) -> int:
    files = sorted(folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    index = (folder / "model.safetensors.index.json").stat().st_size
    table = Table(box=box.SIMPLE, title=f"{stored / 1e9:.0f} GB, {len(files)} files, index of {index / 1e6:.1f} MB")
    for column in ("", "wall s", "CPU s", "least wall s", "least CPU s", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    last = (0.0, 0.0)
    for name, costs in found.items():
        walls, cpus = [one.wall_s for one in costs], [one.cpu_s for one in costs]
        last = statistics.median(walls), max(one.peak_mib for one in costs)
        times = (statistics.median(walls), statistics.median(cpus), min(walls), min(cpus))
        table.add_row(name, *(f"{time_s:.2f}" for time_s in times), f"{last[1]:.0f}")
    good = last[0] < BAR_S and last[1] < BAR_MIB
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"bars for the last row: {BAR_S:.0f} s and {BAR_MIB:.0f} MiB: {'ok' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
