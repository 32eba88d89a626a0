"""What each format does to a real model: an answer, the perplexity of a fixed text, the divergence from BF16. Never asserts; it prints.

    python -m tests.bench.loader --quality --model FOLDER [--quantize nvfp4,int4,..] [--dequantized]

Everything goes through the real engine, once for each format. The text is quality.txt, about 500 words written for this. KL is taken at
every position of it over the 64 tokens that one engine finds most likely, looked up in the 512 most likely of the other (divergence.py):
from stock vLLM in BF16, which is what quantizing costs; with --dequantized also from stock vLLM on a BF16 checkpoint of the values that
the format holds (dequantized.py), which is what the loader and the kernels add, and should be next to nothing.

The question asks for a short sentence: to the bare one SmolLM2-135M in BF16 begins its answer with "The" at 0.155 and with "L" at 0.140,
and goes on in bad French after the second, so that rounding alone decides (FP8 does so at a KL of 0.012).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import child
from tests.bench.dequantized import write_dequantized
from tests.bench.divergence import mean_kl, perplexity

FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4", "mxfp4", "int4-g32", "int4-g64", "int4-g128")
QUESTION = "What is the capital of France? Answer in one short sentence."
TEXT = Path(__file__).with_name("quality.txt")
TOP, LOOKED_UP = 64, 512
LIMIT_S = 600.0


def main(model: str | None, formats: Sequence[str] | None, *, dequantized: bool = False) -> int:
    """Status 1: an engine did not start, or its answer lacks the city."""
    import torch

    if model is None:
        raise SystemExit("--quality needs --model, a folder with a model that can chat.")
    failed = 0
    arguments = {**child.engine_arguments(cuda=torch.cuda.is_available()), "max_model_len": 2048}
    baseline: Mapping[str, Any] | None = None
    print(f"{'format':<12}  perplexity  KL from stock BF16  {'KL from dequantized  ' if dequantized else ''}answer", flush=True)
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        plugins = child.plugin_folder(temporary)
        for form in ("stock", *(formats or FORMATS)):
            ours = form != "stock"
            more = {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": form}} if ours else {}
            try:
                said = _said(model, {**arguments, **more}, plugins, ours=ours)
                reference = _dequantized(model, form, arguments, plugins, Path(temporary)) if ours and dequantized else None
            except child.ChildFailed as reason:
                print(f"{form:<12}  {reason}", flush=True)
                failed += 1
                continue
            text = said["prompts"][0]
            baseline = baseline or text
            columns = [f"{perplexity(text['ids'], text['likely']):10.3f}", _kl(baseline if ours else None, text, 18)]
            if dequantized:
                columns.append(_kl(reference, text, 19))
            print(f"{form:<12}  {'  '.join(columns)}  {said['chat'].strip()!r}", flush=True)
            failed += "Paris" not in said["chat"]
    return 1 if failed else 0


def _said(model: str, arguments: Mapping[str, Any], plugins: Path, *, ours: bool) -> Mapping[str, Any]:
    question = {
        "model": model,
        "arguments": arguments,
        "prompts": [TEXT.read_text(encoding="utf-8")],
        "chat": QUESTION,
        "max_tokens": 1,
        "logprobs": LOOKED_UP,
    }
    return child.ask("tests.bench.speak_case", question, child.environment(plugins, ours=ours), limit_s=LIMIT_S).value


def _dequantized(model: str, form: str, arguments: Mapping[str, Any], plugins: Path, folder: Path) -> Mapping[str, Any] | None:
    """What stock vLLM says of the text with the format's values in BF16; None where the format quantizes nothing."""
    into = folder / form
    if not write_dequantized(Path(model), into, form):
        return None
    try:
        return _said(str(into), arguments, plugins, ours=False)["prompts"][0]
    finally:
        shutil.rmtree(into)


def _kl(reference: Mapping[str, Any] | None, text: Mapping[str, Any], width: int) -> str:
    return ("-" if reference is None else f"{mean_kl(reference['likely'], text['likely'], TOP):.5f}").rjust(width)
