"""Which architectures the loader serves: each scaled down, through the real engine, beside stock vLLM. Never asserts; it prints lines.

    python -m tests.bench.architectures [--quantize nvfp4] [--only REGEX] [--graphs] [--again] [--jobs N] [--logs FOLDER]

For every architecture of tests/support/architectures.py engines start in processes of their own: ours with --quantize, stock vLLM on a BF16
checkpoint of the values that the formats can hold (dequantized.py), and stock vLLM on the checkpoint itself where that tells something
more, or always with three --jobs. All of them see the same random prompt and generate 8 tokens. PASS: ours serves, and its
distributions are those of the dequantized checkpoint. NAMED: stock vLLM does not serve this model here either, or its class does not
take the format (workers/stream/vllm/supported.py); the reason follows.
FAIL: anything else. Exit status 1: there was a FAIL.
A checkpoint that is quantized already (published MXFP4, AWQ, GPTQ, ModelOpt's and compressed-tensors' NVFP4) passes through, so there
stock vLLM on the same files is what ours is compared with.
--graphs: with torch.compile and CUDA graphs instead of eager engines. --again: what is compared is a second start of ours, which reads
the quantized cache that the first one has written. In FP8 vLLM's own online FP8 is asked too, where more than two --jobs are allowed.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparkd.bench.divergence import divergences, mean_kl, median_gap
from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.bench import child
from tests.bench.arguments import Parser, count, new, pattern
from tests.bench.dequantized import write_dequantized
from tests.support import architectures, checkpoints
from workers.quantization.recipe import QuantizationRecipe
from workers.stream.vllm.supported import refuse_unserved

LIMIT_S = 300.0
TOP = 20
_PROMPT = [256, *random.Random(7).choices(range(256), k=47)]
# Of KL in nats and of the gap, medians over the positions of the prompt: where a router's second and third best expert are close,
# rounding alone chooses another one for some position. FP8 kernels quantize activations too, to 3 bits of mantissa, which a dequantized
# weight does not show; the others differ by BF16's rounding alone.
_TOLERANCE = {"fp8": (0.02, 0.5), "fp8-block": (0.02, 0.5)}
_PLAIN_TOLERANCE = (0.002, 0.15)
# Where vLLM's own FP8 was asked too, ours passes when it is about as near to the source.
_OWN_FP8 = 1.5
_NOT_TAKEN = "CheckpointError: "


def examine(
    name: str, quantize: str, *, cuda: bool, graphs: bool, again: bool, folder: Path, logs: Path, plugins: Path, jobs: int
) -> tuple[str, str]:
    """(PASS, NAMED or FAIL, the rest of the line)."""
    model = architectures.ARCHITECTURES[name]()
    source = checkpoints.write_checkpoint(folder / name, model.config, model.entries, shard_bytes=2 * checkpoints.MIB, shuffled=True)
    reference = folder / f"{name}-dequantized"
    checkpoint = read_checkpoint(source)
    try:
        refuse_unserved(checkpoint, QuantizationRecipe.parse(quantize).assign(checkpoint), 1)
    except CheckpointError as refused:
        return "NAMED", f"refused before anything is loaded: {refused.message.rpartition(f'{refused.tensor}: ')[2]}"
    try:
        quantized = write_dequantized(source, reference, quantize)
    except (ValueError, RuntimeError) as error:
        return "FAIL", f"no reference: {type(error).__name__}: {error}"
    arguments = child.engine_arguments(cuda=cuda) | {"enforce_eager": not graphs}
    if cuda and "kv_lora_rank" in model.config:
        arguments["attention_backend"] = child.LATENT_ATTENTION
    if cuda and "linear_num_key_heads" in model.config:
        arguments["gdn_prefill_backend"] = "triton"  # the others are not everywhere either
    cache = str(folder / f"{name}-cache") if again else None
    ours = {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": quantize, "cache_dir": cache}}
    runs: dict[str, tuple[Path, dict[str, Any]]] = {"ours": (source, ours), "reference": (reference, {}), "stock": (source, {})}
    runs |= {"first": runs["ours"], "online": (source, {"quantization": "fp8"})}

    def run(which: str) -> Mapping[str, Any] | str:
        path, more = runs[which]
        question = {"model": str(path), "arguments": {**arguments, **more}, "read": [_PROMPT], "greedy": [_PROMPT]}
        question |= {"max_tokens": 8, "logprobs": -1}
        env = child.environment(plugins, ours=which in ("ours", "first"))
        try:
            return child.ask("tests.bench.speak_case", question, env, limit_s=LIMIT_S, log=logs / f"{name}-{which}.log").value
        except child.ChildFailed as failed:
            return str(failed)

    if again and isinstance(failed := run("first"), str):
        return "FAIL", f"the first start: {failed}"
    online = jobs > 2 and quantized and quantize.startswith("fp8")
    asked = {"ours": True, "reference": quantized, "stock": jobs > 2 or not quantized, "online": online}
    needed = [which for which, wanted in asked.items() if wanted]
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(needed, pool.map(run, needed), strict=True))
    if "stock" not in found and any(isinstance(said, str) for said in found.values()):
        found["stock"] = run("stock")
    return verdict(found, quantized, *_TOLERANCE.get(quantize.replace("_", "-"), _PLAIN_TOLERANCE))


def verdict(found: Mapping[str, Mapping[str, Any] | str], quantized: int, most_kl: float, most_gap: float) -> tuple[str, str]:
    """found: for ours, reference and stock, where they were started, what the engine said, or why it did not."""
    stock, ours = found.get("stock"), found["ours"]
    reference = found.get("reference", stock)
    if isinstance(ours, str) or reference is None:
        if isinstance(stock, str) and isinstance(reference, str):
            return "NAMED", f"stock vLLM does not serve it here: {stock}"
        if isinstance(ours, str) and ours.startswith(_NOT_TAKEN) and " this vLLM's " in ours:
            return "NAMED", f"refused while the model is asked: {ours.removeprefix(_NOT_TAKEN)}"
        return "FAIL", str(ours)
    if isinstance(reference, str):
        return "NAMED", f"ours serves it, stock vLLM does not serve what it is compared with: {reference}"
    mine, theirs = ours["read"][0], reference["read"][0]
    every = divergences(theirs["likely"], mine["likely"], 10**6)
    kl, gap = statistics.median(every), median_gap(theirs["likely"], mine["likely"], TOP)
    near = False
    told = f"{quantized} weights quantized, " if quantized else "passed through, "
    told += f"KL {kl:.5f} (mean {statistics.fmean(every):.5f}), gap {gap:.3f} from {'the dequantized model' if quantized else 'stock'}"
    if quantized and isinstance(stock, Mapping):
        other = stock["read"][0]
        told += f"; KL {mean_kl(other['likely'], mine['likely'], 10**6):.4f} from the source"
        online = found.get("online")
        if isinstance(online, Mapping):
            own = mean_kl(other["likely"], online["read"][0]["likely"], 10**6)
            near = mean_kl(other["likely"], mine["likely"], 10**6) <= _OWN_FP8 * own
            told += f" (vLLM's own FP8: {own:.4f})"
    told += f"; tokens {'equal' if ours['greedy'] == reference['greedy'] else 'differ'}; {ours['seconds']:.0f} s"
    if isinstance(stock, str):
        told += f"; stock vLLM does not serve the source itself: {stock[:80]}"
    well = len(ours["greedy"][0]) == 8 and (near or (kl <= most_kl and gap <= most_gap))
    return ("PASS" if well else "FAIL"), told


def main() -> int:
    import torch

    parser = Parser("tests.bench.architectures", __doc__, only="^llama$", quantize="int4-g32", jobs=1)
    parser.add_argument("--quantize", default="nvfp4")
    parser.add_argument("--only", type=pattern, default="", help="a regular expression for the architectures' names")
    parser.add_argument("--graphs", action="store_true", help="engines with torch.compile and CUDA graphs")
    parser.add_argument("--again", action="store_true", help="compare a second start, from the quantized cache")
    parser.add_argument("--jobs", type=count, default=3 if torch.cuda.is_available() else 1, help="engines at a time")
    parser.add_argument("--logs", type=new, help="folder for the engines' logs")
    given = parser.parse_args()
    names = parser.chosen(architectures.ARCHITECTURES, given.only)
    child.end_with_children()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        folder = Path(temporary)
        logs = given.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        plugins = child.plugin_folder(folder)
        for name in names:
            more = {"graphs": given.graphs, "again": given.again, "jobs": given.jobs}
            status, told = examine(name, given.quantize, cuda=torch.cuda.is_available(), folder=folder, logs=logs, plugins=plugins, **more)
            print(f"{status:<5}  {name:<28}  {given.quantize}: {told}", flush=True)
            failed += status == "FAIL"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
