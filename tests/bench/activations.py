"""Whether an engine with 4-bit activations says what the arithmetic of nvfp4-a4 says. A table; it never asserts.

    python -m tests.bench.activations [--only REGEX] [--smallest]

One layer of Qwen3-MoE with random weights answers for one prompt: in the engine, and in transformers in float32 with the weights that NVFP4
holds and with every operand of a quantized layer rounded (workers.stream.formats.nvfp4.rounded_activations, which the tests compare with
numpy). KL is the mean over the prompt, nats a token, once to that reference and once to the same weights with whole activations. An engine
that rounds activations is near the first; one that does not, as Marlin, is near the second. In bfloat16 it is never equal: what bfloat16
rounds away moves some activations to the next of their few values, and in a model of many layers such differences grow to the size of the
rounding itself. So the engine computes in float32 where its kernels can: sparkd's on a CPU, vLLM's emulation on a GPU.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkd.checkpoint import read_checkpoint
from tests.bench import child
from tests.bench.arguments import Parser, pattern
from tests.bench.dequantized import write_dequantized
from tests.support.checkpoints import PRESETS, qwen3_moe
from workers.quantization.calibration_text import text_of
from workers.quantization.recipe import QuantizationRecipe
from workers.stream.calibration_program import Operands
from workers.stream.formats.nvfp4 import rounded_activations
from workers.stream.input_scales import measured
from workers.stream.reference_model import divergence

FORMAT = "nvfp4-a4"
LIMIT_S = 300.0
EMULATION = {"linear_backend": "emulation", "moe_backend": "emulation"}
# By kind, the arguments of the engine on a GPU.
KINDS: Mapping[str, dict[str, Any]] = {
    "chosen": {"dtype": "bfloat16"},
    "emulation": {**EMULATION, "dtype": "float32"},
    "emulation in bfloat16": {**EMULATION, "dtype": "bfloat16"},
}


def main() -> int:
    parser = Parser("tests.bench.activations", __doc__, only="^chosen$")
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="chosen, emulation or emulation in bfloat16")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    kinds = [kind for kind in parser.chosen(tuple(KINDS), options.only) if cuda or kind == "chosen"]
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        folder = Path(temporary) / "model"
        qwen3_moe(folder, **{**PRESETS["smallest"], "layers": 1, "experts": 8})
        prompt = random.Random(7).choices(range(256), k=256)
        whole, rounded = references(folder, Path(temporary) / "dequantized", prompt)
        print(f"whole activations to rounded ones: KL {divergence(rounded, whole):.5f}\n")
        print("| kernels | KL to the arithmetic | KL with whole activations |\n|---|---|---|")
        failed = 0
        for kind in kinds:
            try:
                said = engine(folder, prompt, kind, child.plugin_folder(temporary), cuda=cuda)
            except child.ChildFailed as reason:
                print(f"| {kind} | {reason} | |", flush=True)
                failed += 1
                continue
            print(f"| {kind} | {divergence(rounded, said):.5f} | {divergence(whole, said):.5f} |", flush=True)
    return 1 if failed else 0


def engine(folder: Path, prompt: list[int], kind: str, plugins: Path, *, cuda: bool) -> Tensor:
    arguments = {
        **child.engine_arguments(cuda=cuda),
        **(KINDS[kind] if cuda else {"dtype": "float32"}),
        "max_model_len": 512,
        "load_format": "spark_stream",
        "model_loader_extra_config": {"quantize": FORMAT},
    }
    question = {"model": str(folder), "arguments": arguments, "prompts": [prompt], "max_tokens": 1, "logprobs": -1}
    said = child.ask("tests.bench.speak_case", question, child.environment(plugins, ours=True), limit_s=LIMIT_S).value
    rows = said["prompts"][0]["likely"]
    return torch.tensor([[row[str(token)] for token in range(len(row))] for row in rows], dtype=torch.float64)


def references(folder: Path, into: Path, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities with whole and with rounded activations, float64 [tokens - 1, vocabulary]."""
    from transformers import AutoModelForCausalLM

    checkpoint = read_checkpoint(folder)
    formats = QuantizationRecipe.parse(FORMAT).assign(checkpoint)
    write_dequantized(folder, into, FORMAT)
    model = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()
    divisor = measured(checkpoint, text_of(None), None).of
    quantized = {
        parameter.untyped_storage().data_ptr(): module
        for name, parameter in model.named_parameters()
        if (module := name.removesuffix(".weight")) in formats or ".experts." in module
    }
    tokens = torch.tensor([prompt])

    def said() -> Tensor:
        return model(tokens, use_cache=False).logits[0, :-1].double().log_softmax(-1)

    with torch.no_grad():
        whole = said()
        with Operands(quantized, lambda module, operand: rounded_activations(operand, torch.tensor(divisor(module)))):
            return whole, said()


if __name__ == "__main__":
    sys.exit(main())
