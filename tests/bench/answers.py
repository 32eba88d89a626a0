"""What vLLM says of every model that can be described offline, how fast, and what `sparkd plan` makes of it with that answer and without.

    python -m tests.bench.answers [--only REGEX] [--platform cuda:12.1|own] [--tp N] [--pp N] [--fixtures] [--json FILE] [--smallest]

The models are tests/fixtures/configs, tests/support/rare_configs.py and, without --fixtures, every architecture of the installed vLLM's
registry whose configuration can be made without a network: the defaults of its class in transformers or in vLLM. A line for each: seconds,
platform, what came of it, and for one rank the plan with the answer and by sparkd's own formulas. Refused: vLLM's own word. Unsure: this
machine could not build it. Beneath: counts, the seconds of a first answer and of one from the disk. Exit status 1: a plan was wrong and did
not say that it guessed, guessed less than vLLM counts at its upper end, or refused what vLLM serves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.plan_for_checkpoint import answer as planned
from sparkd.capacity.plan_request import PlanRequest
from sparkd.capacity.vllm_figures import EXACT, GUESS, exact_of
from sparkd.checkpoint import MODELOPT, Checkpoint, TensorRef
from sparkd.checkpoint.header import DTYPE_BITS
from sparkd.checkpoint.quantization import source_quantization
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import SPARK as SPARK_MACHINE
from sparkd.inquiry.model_answers import OWN, SPARK, InquiryRuntime, ModelAnswer, ModelQuestion, ask, kept_answers
from sparkd.vllm.installed import models_of
from tests.bench.arguments import Parser, count, new, pattern
from tests.support.published_headers import checkpoint_of, config_of
from tests.support.rare_configs import RARE, question_of

# What becomes of a plan: RIGHT as vLLM counts; MARKED: it says that it guesses, and how much at most; UNKNOWN: that it does not know.
RIGHT, WRONG, MARKED, UNKNOWN, REFUSED = "right", "wrong", "guess", "unknown", "refused"
# Where every model fits, so that the longest request is planned.
_ROOMY = replace(SPARK_MACHINE, memory_bytes=1 << 50)
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip
CONFIGS = Path(__file__).resolve().parent.parent / "fixtures/configs"
# Runs where transformers and vLLM may be imported. Of architectures: "made" has a config.json, "not" says why there is none, "drafts"
# are those that no model has for its own.
_REGISTRY = r"""
import json, os, re, sys
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
from vllm.transformers_utils.config import _CONFIG_REGISTRY
types = {}
for name in dir(modeling_auto):
    if name.endswith("_MAPPING_NAMES"):
        for kind, classes in getattr(modeling_auto, name).items():
            for one in [classes] if isinstance(classes, str) else classes:
                types.setdefault(one, kind)
own = {re.sub("[^a-z0-9]", "", kind.lower()): kind for kind in _CONFIG_REGISTRY}
theirs = {re.sub("[^a-z0-9]", "", kind.lower()): kind for kind in CONFIG_MAPPING}
END = "(ForConditionalGeneration|Model|LMHeadModel|ForSequenceClassification|ForTokenClassification|ForMaskedLM|ForCausalLM.*|MTP.*)$"
made, lacking = {}, {}
for architecture in sorted(ModelRegistry.get_supported_archs()):
    short = re.sub("[^a-z0-9]", "", re.sub(END, "", architecture).lower())
    kind = own.get(short) or types.get(architecture) or theirs.get(short)
    if kind is None:
        lacking[architecture] = "no configuration class of this name"
        continue
    try:
        found = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else CONFIG_MAPPING[kind]
        config = found().to_dict()
        made[architecture] = json.dumps({**config, "architectures": [architecture], "model_type": kind}, default=str)
    except Exception as error:
        lacking[architecture] = f"its class has no defaults: {type(error).__name__}: {' '.join(str(error).split())[:80]}"
json.dump({"made": made, "not": lacking, "drafts": {name: "" for name in _SPECULATIVE_DECODING_MODELS}}, out)
"""


def outcome(answer: ModelAnswer) -> tuple[str, str]:
    """(answered, refused or unsure; the rest of its line)."""
    refusal = answer.refusal
    if refusal is not None:
        return "refused" if refusal.certain else "unsure", f"{refusal.step}: {refusal.type}: {' '.join(refusal.message.split())[:150]}"
    token = sum(layer.token_bytes for stage in answer.stages for layer in stage.layers)
    state = sum(layer.page_bytes for stage in answer.stages for layer in stage.layers if layer.state_bytes)
    weights = sum(stage.parameter_bytes for stage in answer.stages) / 2**30
    return "answered", f"{token:.0f} B a token, {state} B a request, {weights:.3f} GiB of parameters, {answer.facts['quantization']}"


def judged(
    files: Mapping[str, bytes], answer: ModelAnswer, tensors: Mapping[str, TensorRef] | None = None, *, asked: bool
) -> tuple[str, str]:
    """What a plan for one rank is beside vLLM's answer, and its numbers in short. files: as a ModelQuestion has them. tensors: of its
    checkpoint, None for vLLM's own parameters. asked: whether the plan gets that answer."""
    try:
        plan = _plan(files, answer, _stored(answer) if tensors is None else tensors, asked=asked)
    except CheckpointError as error:
        return UNKNOWN if not asked and "vLLM has computed" in error.message else REFUSED, error.message
    except ConfigError as error:
        return REFUSED, error.message
    option = plan["options"][0]
    found = option["footprint"]
    if found is None:
        return REFUSED, str(option["reason"])
    (stage,) = answer.stages
    tokens, size = stage.requests[-1] if stage.requests else (option["max_model_len"], 0)
    near = option["max_model_len"] == tokens and abs(found["kv_bytes_per_request"] - size) <= (0 if asked else stage.block_bytes)
    weights = stage.parameter_bytes + stage.buffer_bytes
    near = near and abs(found["weights"] - weights) <= (0 if asked else 0.005 * weights)
    numbers = f"{option['max_model_len']} tokens in {found['kv_bytes_per_request']} B (+ {found['upper']}), vLLM {tokens} in {size}"
    numbers += f"; weights {found['weights'] / weights - 1:+.1%}" if weights else ""
    if asked:
        return RIGHT if near and found["sureness"] == EXACT else WRONG, numbers
    if found["sureness"] != GUESS:
        return RIGHT if near else WRONG, numbers
    return MARKED if _bounds(answer, option, weights) else WRONG, numbers


def _bounds(answer: ModelAnswer, option: Mapping[str, Any], weights: int) -> bool:
    """Whether the most that a guess says is no less than vLLM's own sizes at the plan's length."""
    found, facts = option["footprint"], answer.facts
    serving = Serving(1, max_num_seqs=facts["max_num_seqs"], max_num_batched_tokens=facts["max_num_batched_tokens"])
    exact = exact_of(answer, serving, same_format=True)
    if exact is None or exact.layout is None:
        return True
    cost = exact.layout.cost(option["max_model_len"])
    return cost.least <= found["kv"] + found["upper_kv"] and weights + cost.least <= found["weights"] + found["kv"] + found["upper"]


def _plan(files: Mapping[str, bytes], answer: ModelAnswer, tensors: Mapping[str, TensorRef], *, asked: bool) -> dict[str, Any]:
    name = next(name for name in ("config.json", "params.json") if name in files)
    config, apart = json.loads(files[name]), json.loads(files[MODELOPT]) if MODELOPT in files else None
    checkpoint = Checkpoint("/nowhere", config, (), tensors, source_quantization(config, apart, tensors), name)
    facts = answer.facts
    question = PlanRequest(
        "nobody/model", quantize="bf16", max_num_seqs=facts["max_num_seqs"], max_num_batched_tokens=facts["max_num_batched_tokens"]
    )
    return planned(
        question, _ROOMY, lambda source: (source, checkpoint, None), ask=lambda questions: [answer if asked else None for _ in questions]
    )


def _stored(answer: ModelAnswer) -> dict[str, TensorRef]:
    """A checkpoint with vLLM's own parameters: the formulas get no hint of its layers but the numbers in their names."""
    rows = [one for one in answer.stages[0].parameters if one.purpose == "model" and one.dtype in _DTYPES]
    found = {}
    for row in rows:
        dtype = _DTYPES[row.dtype]
        found[row.name] = TensorRef(row.name, dtype, row.shape, "/nowhere/model.safetensors", 0, prod(row.shape) * DTYPE_BITS[dtype] // 8)
    return found


def registry() -> dict[str, dict[str, str]]:
    done = subprocess.run([sys.executable, "-c", _REGISTRY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def _published(name: str) -> Mapping[str, TensorRef] | None:
    """Of a checkpoint whose list of tensors is known."""
    try:
        return checkpoint_of(name).tensors
    except KeyError:
        return None


def published() -> dict[str, dict[str, bytes]]:
    """{name: its files}"""
    files: dict[str, dict[str, bytes]] = {}
    for path in sorted(CONFIGS.glob("*.json")):
        name, _, part = path.stem.partition(".hf_quant")
        text = path.read_bytes() if part else json.dumps(config_of(name)).encode()
        files.setdefault(name, {})["hf_quant_config.json" if part else "config.json"] = text
    return files


def main() -> int:
    parser = Parser("tests.bench.answers", __doc__, only="^llama-3.1-8b$", fixtures=True)
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="of names of models and architectures")
    parser.add_argument("--platform", choices=(SPARK, OWN), default=SPARK, help="that vLLM answers for")
    parser.add_argument("--tp", type=count, default=1, help="tensor ranks")
    parser.add_argument("--pp", type=count, default=1, help="ranks of the pipeline")
    parser.add_argument("--fixtures", action="store_true", help="the published configurations alone")
    parser.add_argument("--json", type=new, help="a file for the rows")
    options = parser.parse_args()
    parser.chosen([*published(), *RARE, *(() if options.fixtures else models_of(None) or ())], options.only)
    files, found = {**published(), **RARE}, dict[str, dict[str, str]]()
    if not options.fixtures:
        found = registry()
        files |= {name: {"config.json": text.encode()} for name, text in found["made"].items()}
    names = [name for name in files if re.search(options.only, name)]
    if not names:
        parser.error(f"argument --only: there is no configuration of {options.only!r}")
    split = {"platform": options.platform, "tensor_parallel": options.tp, "pipeline_parallel": options.pp}
    questions = [replace(question_of(name), **split) if name in RARE else ModelQuestion(files=files[name], **split) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        wrong = measure(names, questions, InquiryRuntime(None, [Path(folder)]), found, options.json)
    return 1 if wrong and not options.smallest else 0


def measure(
    names: Sequence[str],
    questions: Sequence[ModelQuestion],
    runtime: InquiryRuntime,
    found: Mapping[str, Mapping[str, str]],
    rows: Path | None,
) -> int:
    """How many plans are wrong without a word, or refuse what vLLM serves. found: as `registry` has it."""
    lacking, drafts, stored = found.get("not", {}), found.get("drafts", {}), published()
    began = time.monotonic()
    ask(questions[:1], runtime)
    first = time.monotonic() - began
    began = time.monotonic()
    kept_answers(questions[:1], runtime)
    second = time.monotonic() - began
    counts: Counter[str] = Counter()
    plans: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    written: dict[str, Any] = {}
    for name, question, answer in zip(names, questions, ask(questions, runtime), strict=True):
        if answer is not None:
            result, line = outcome(answer)
            counts[result] += 1
            written[name] = {"result": result, "line": line, "platform": answer.platform, "seconds": answer.seconds}
            verdicts = {} if name in drafts else _verdicts(question, answer, _published(name) if name in stored else None)
            print(f"{name:46} {answer.seconds:5.1f} s  {answer.platform:9} {result:8} {line}")
            for asked, (verdict, numbers) in verdicts.items():
                plans[asked][verdict] += 1
                print(f"{'':46} plan {'with' if asked else 'without'} vLLM's answer: {verdict}: {numbers}")
    for architecture, reason in lacking.items():
        print(f"{architecture:46} no configuration: {reason}")
    print(f"{len(names)} models: {dict(counts)}; {len(lacking)} architectures without a configuration")
    print(f"first answer {first:.1f} s, second {second * 1000:.0f} ms")
    with_runtime, without = plans[True], plans[False]
    refused = with_runtime[REFUSED] + without[REFUSED]
    print(f"plans with a runtime {dict(with_runtime)}, without one {dict(without)}")
    print(f"wrong with a runtime {with_runtime[WRONG]}, wrong without one and no guess {without[WRONG]}, refused wrongly {refused}")
    if rows is not None:
        rows.write_text(json.dumps(written, indent=1))
    return with_runtime[WRONG] + without[WRONG] + refused


def _verdicts(question: ModelQuestion, answer: ModelAnswer, tensors: Mapping[str, TensorRef] | None) -> dict[bool, tuple[str, str]]:
    """Nothing where vLLM did not describe one rank of the model."""
    if answer.refusal is not None or len(answer.stages) != 1 or question.tensor_parallel > 1 or answer.platform != SPARK:
        return {}
    return {asked: judged(question.files, answer, tensors, asked=asked) for asked in (True, False)}


if __name__ == "__main__":
    sys.exit(main())
