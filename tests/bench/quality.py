"""What a format costs a model: its size, its error, and how far the model's answers move from those of stock vLLM. It prints.

    python -m tests.bench.quality --model FOLDER [--quantize nvfp4,int4,..]

`sparkd bench --quality` measures most of it through a daemon. Here every format gets a real engine of its own. The columns:

* bits: of a quantized weight with its share of the scales, as the formats' own arithmetic gives them (workers/quantization/formats.py).
* error: relative Frobenius error of the quantized weights, over the first ROWS rows of each matrix; packed experts are left out.
* KL and its 99th percentile, perplexity: over sparkd/bench/quality.txt, about 500 words. KL is taken at every position over the 64 tokens
  that stock vLLM in BF16 finds most likely, looked up in the 512 most likely of the format (divergence.py).
* agreement: the share of stock vLLM's first 32 greedy tokens before the first that differs, mean over the 32 prompts of
  sparkd/bench/quality_prompts.txt.
* answer: to a question for a short sentence. To the bare question SmolLM2-135M in BF16 begins its answer with "The" at 0.155 and with "L"
  at 0.140, and goes on in bad French after the second, so that rounding alone decides (FP8 does so at a KL of 0.012).

A format that does not suit the model's columns gets its reason instead.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from sparkd.bench.divergence import divergences, losses
from sparkd.bench.passages import GREEDY_TOKENS, LOOKED_UP, TEXT, TOP, agreement, prompts
from sparkd.checkpoint import read_checkpoint
from sparkd.errors import SparkdError
from tests.bench import child
from tests.bench.arguments import Parser, count, formats, model
from tests.support.checkpoints import stored
from workers.quantization.formats import SPELLINGS
from workers.quantization.recipe import QuantizationRecipe

STOCK = "stock"
QUESTION = "What is the capital of France? Answer in one short sentence."
LIMIT_S = 1800.0
# The error is measured over so many rows of each matrix. SmolLM2-135M has 106 million quantized weights; these rows hold 36 million.
ROWS = 256
HEAD = ("format", "bits", "error", "KL", "KL p99", "perplexity", "agreement")
_WIDTHS = (9, 6, 7, 8, 8, 10, 9)


def main() -> int:
    """Status 1: an engine did not start, or its answer lacks the city."""
    import torch

    parser = Parser("tests.bench.quality", __doc__, quantize="int4-g32", prompts=1)
    parser.add_argument("--model", type=model, required=True, help="a folder with a model that can chat")
    parser.add_argument("--quantize", type=formats, default=",".join(SPELLINGS), help="formats, separated by commas")
    parser.add_argument("--prompts", type=count, default=len(prompts()), help="how many of the prompts are answered")
    given = parser.parse_args()
    arguments = {**child.engine_arguments(cuda=torch.cuda.is_available()), "max_model_len": 2048, "max_num_seqs": given.prompts}
    asked = prompts()[: given.prompts]
    reference: Mapping[str, Any] | None = None
    failed = 0
    _print_row([*HEAD, "answer"])
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        plugins = child.plugin_folder(temporary)
        for form in (STOCK, *given.quantize.split(",")):
            quantized = form != STOCK
            more = {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": form}} if quantized else {}
            try:
                size = weight_figures(given.model, form) if quantized else ["", ""]
            except SparkdError as reason:
                print(f"{form:<{_WIDTHS[0]}}  {' '.join(str(reason).split())}", flush=True)
                continue
            try:
                answers = _answers(given.model, asked, {**arguments, **more}, plugins, ours=quantized)
            except child.ChildFailed as failure:
                print(f"{form:<{_WIDTHS[0]}}  {failure}", flush=True)
                failed += 1
                continue
            _print_row([form, *size, *answer_figures(reference, answers), repr(answers["chat"].strip())])
            reference = reference or (None if quantized else answers)
            failed += "Paris" not in answers["chat"]
    return 1 if failed else 0


def weight_figures(folder: Path, form: str) -> list[str]:
    """Bits of a quantized weight with its scales, and the relative error. Raises SparkdError where the format does not suit the model."""
    from workers.load.formats import quantizer

    checkpoint = read_checkpoint(folder)
    nbytes = weights = 0
    missed = total = 0.0
    for module, chosen in QuantizationRecipe.parse(form).assign(checkpoint).items():
        ref = checkpoint.tensors.get(f"{module}.weight")
        if ref is None or len(ref.shape) != 2 or ref.dtype.startswith("F8"):
            continue
        rows, columns = ref.shape
        used = quantizer(chosen)
        chosen.check(ref.name, rows, columns)
        nbytes += chosen.nbytes(rows, columns)
        weights += rows * columns
        weight = stored(ref)[:ROWS].float()
        missed += float((used.dequantize(used.quantize(weight), weight.dtype) - weight).square().sum())
        total += float(weight.square().sum())
    return [f"{8 * nbytes / weights:.2f}", f"{(missed / total) ** 0.5:.4f}"] if weights else ["", ""]


def answer_figures(reference: Mapping[str, Any] | None, answers: Mapping[str, Any]) -> list[str]:
    """KL, its 99th percentile, perplexity and agreement. reference: what stock vLLM answered, None for its own row."""
    own_perplexity = f"{math.exp(fmean(losses(answers['ids'], answers['likely']))):.2f}"
    if reference is None:
        return ["", "", own_perplexity, ""]
    apart = divergences(reference["likely"], answers["likely"], TOP)
    expected, greedy = (dict(enumerate(each["tokens"])) for each in (reference, answers))
    return [
        f"{fmean(apart):.4f}",
        f"{quantiles(apart, n=100, method='inclusive')[98]:.3f}",
        own_perplexity,
        f"{agreement(expected, greedy):.2f}",
    ]


def _print_row(row: Sequence[str]) -> None:
    *figures, answer = row[1:]
    cells = (figure.rjust(width) for figure, width in zip(figures, _WIDTHS[1:], strict=True))
    print(f"{row[0]:<{_WIDTHS[0]}}  {'  '.join(cells)}  {answer}", flush=True)


def _answers(folder: Path, asked: Sequence[str], arguments: Mapping[str, Any], plugins: Path, *, ours: bool) -> Mapping[str, Any]:
    """What one engine says. ids: tokens of the text; likely: {token id: log-probability} for each but the first; tokens: of each greedy
    answer to a prompt; chat: the answer to QUESTION. Raises ChildFailed."""
    question = {"model": str(folder), "arguments": arguments, "read": [TEXT.read_text(encoding="utf-8")], "logprobs": LOOKED_UP}
    question |= {"greedy": list(asked), "max_tokens": GREEDY_TOKENS, "chat": QUESTION}
    said = child.ask("tests.bench.speak_case", question, child.environment(plugins, ours=ours), limit_s=LIMIT_S).value
    return {**said["read"][0], "tokens": said["greedy"], "chat": said["chat"]}


if __name__ == "__main__":
    sys.exit(main())
