"""What each format does to a real model: an answer, the perplexity of a fixed text, the divergence from BF16. Never asserts; it prints.

    python -m tests.bench.loader --quality --model FOLDER [--quantize nvfp4,int4,..]

Everything goes through the real engine, once for each format. The text is quality.txt, about 500 words written for this. KL is taken at
every position of it over the 64 tokens that BF16 finds most likely, looked up in the 512 most likely of the format (divergence.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import child
from tests.bench.divergence import mean_kl, perplexity

FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4", "mxfp4", "int4-g32", "int4-g64", "int4-g128")
QUESTION = "What is the capital of France? Answer in one short sentence."
TEXT = Path(__file__).with_name("quality.txt")
TOP, LOOKED_UP = 64, 512
LIMIT_S = 600.0


def main(model: str | None, formats: Sequence[str] | None) -> int:
    """Status 1: an engine did not start, or its answer lacks the city."""
    import torch

    if model is None:
        raise SystemExit("--quality needs --model, a folder with a model that can chat.")
    failed = 0
    arguments = {**child.engine_arguments(cuda=torch.cuda.is_available()), "max_model_len": 2048}
    baseline: Mapping[str, Any] | None = None
    print(f"{'format':<12}  perplexity  KL from stock BF16  answer", flush=True)
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        plugins = child.plugin_folder(temporary)
        for form in ("stock", *(formats or FORMATS)):
            more = {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": form}} if form != "stock" else {}
            question = {
                "model": model,
                "arguments": {**arguments, **more},
                "prompts": [TEXT.read_text(encoding="utf-8")],
                "chat": QUESTION,
                "max_tokens": 1,
                "logprobs": LOOKED_UP,
            }
            try:
                said = child.ask(
                    "tests.bench.speak_case", question, child.environment(plugins, ours=form != "stock"), limit_s=LIMIT_S
                ).value
            except child.ChildFailed as reason:
                print(f"{form:<12}  {reason}", flush=True)
                failed += 1
                continue
            text = said["prompts"][0]
            baseline = baseline or text
            kl = f"{mean_kl(baseline['likely'], text['likely'], TOP):.5f}" if form != "stock" else "-"
            print(f"{form:<12}  {perplexity(text['ids'], text['likely']):10.3f}  {kl:>18}  {said['chat'].strip()!r}", flush=True)
            failed += "Paris" not in said["chat"]
    return 1 if failed else 0
