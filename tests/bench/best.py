"""Whether `quantize: best` is better than any single format of the same size, and as large as it says: a table of bars.

    python -m tests.bench.best [--model FOLDER] [--measured FILE] [--classes] [--smallest]

The mixes are chosen by what workers.stream.mix_program measures on its own text (workers/stream/calibration.txt); they are judged on
another, sparkd/bench/quality.txt. KL is that of the next tokens, from the model as it is stored to the values that its formats hold, with
transformers in float32. Budgets are the bytes of int4-g64, of nvfp4, and 5.0 bits for each weight that is quantized. --measured keeps
the measurement in a file, and takes it from there the next time. --classes prints the median sensitivity of each class, which
workers/quantization/mix.py has for models that cannot be run, and judges the mixes that it chooses.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparkd.bench.passages import TEXT
from sparkd.checkpoint import Checkpoint, read_checkpoint
from tests.bench.arguments import Parser, model
from tests.bench.dequantized import write_dequantized
from tests.support.checkpoints import PRESETS, qwen3_moe
from workers.host.meminfo import mem_available_bytes
from workers.quantization.mix import MixErrors, recipe_of, select
from workers.quantization.recipe import QuantizationRecipe
from workers.quantization.units import CANDIDATES, UnitList, units_of
from workers.stream.mix_program import measure
from workers.stream.reference_model import divergence
from workers.stream.virtual import VirtualCheckpoint

MODEL = Path(".sparkd/models/SmolLM2-135M-Instruct")
KL_BAR, BYTES_BAR = 0.85, 0.01
BUDGETS = ("int4-g64", "nvfp4", "5.0 bits")


def main() -> int:
    """Status 1: a bar is missed."""
    parser = Parser("tests.bench.best", __doc__, model=None, measured=None)
    parser.add_argument("--model", type=model, default=MODEL)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--classes", action="store_true")
    args = parser.parse_args()
    if args.model is not None:
        return _judged(args.model, args.measured, classes=args.classes)
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        qwen3_moe(Path(temporary) / "model", **PRESETS["smallest"])
        _judged(Path(temporary) / "model", None, classes=args.classes)
    return 0


def _judged(folder: Path, kept: Path | None, *, classes: bool) -> int:
    checkpoint = read_checkpoint(folder)
    listed = units_of(checkpoint)
    measured = _measured(checkpoint, kept)
    if classes:
        _print_classes(listed, measured)
        # As for a model that is too large to be run: neither moments nor sensitivities.
        measured = _read(measure(checkpoint.folder, 0))
    judge = _Judge(folder)
    singles = {spelling: judge.kl(spelling) for spelling in CANDIDATES if all(spelling in unit.nbytes for unit in listed.units)}
    sizes = {spelling: listed.nbytes({unit.key: spelling for unit in listed.units}) for spelling in singles}
    for spelling, kl in sorted(singles.items(), key=lambda item: sizes[item[0]]):
        print(f"{spelling:<10}  {_bits(listed, sizes[spelling]):5.3f} bits  KL {kl:.5f}")
    print("\nbudget      bits   KL best  best single        ratio  bar   predicted        real  off     kinds")
    missed = 0
    for name in BUDGETS:
        weights = sum(unit.weights for unit in listed.units)
        budget = sizes[name] if name in sizes else listed.kept_bytes + int(float(name.split()[0]) * weights / 8)
        choice = select(listed, measured, budget)
        recipe = recipe_of(listed, choice)
        single = min((spelling for spelling in singles if sizes[spelling] <= budget), key=singles.__getitem__)
        kl, predicted, real = judge.kl(recipe), listed.nbytes(choice), _real_bytes(checkpoint, recipe)
        ratio, off = kl / singles[single], abs(predicted - real) / real
        kinds = ", ".join(f"{spelling} {count}" for spelling, count in Counter(choice.values()).most_common())
        print(
            f"{name:<10} {_bits(listed, predicted):5.3f}  {kl:.5f}  {single:<10} {singles[single]:.5f}  {ratio:.3f}  {KL_BAR}  "
            f"{predicted:>9,} {real:>11,}  {off:.3%}  {kinds}"
        )
        missed += ratio > KL_BAR or off > BYTES_BAR
    return 1 if missed else 0


class _Judge:
    """The model in transformers, with any values for its weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens = AutoTokenizer.from_pretrained(folder)(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        self._stored = self._said(folder)

    def kl(self, quantize: str | Mapping[str, Any]) -> float:
        """Nats, mean over the tokens of the judging text."""
        with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
            into = Path(temporary) / "model"
            write_dequantized(self._folder, into, quantize)
            said = self._said(into)
        return divergence(self._stored, said)

    @torch.inference_mode()
    def _said(self, folder: Path) -> torch.Tensor:
        runs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        said: torch.Tensor = runs(self._tokens, use_cache=False).logits[0].log_softmax(-1)
        return said


def _measured(checkpoint: Checkpoint, file: Path | None) -> MixErrors:
    if file is None or not file.exists():
        found = measure(checkpoint.folder, mem_available_bytes())
        if file is not None:
            file.write_text(json.dumps(found), encoding="utf-8")
    else:
        found = json.loads(file.read_text(encoding="utf-8"))
    return _read(found)


def _read(found: Mapping[str, Any]) -> MixErrors:
    return MixErrors(found["errors"], found["sensitivities"])


def _print_classes(listed: UnitList, measured: MixErrors) -> None:
    classes: dict[str, list[float]] = defaultdict(list)
    for unit in listed.units:
        classes[unit.key.rpartition(".")[2]].append(measured.sensitivities[unit.key])
    print("median sensitivity:", ", ".join(f"{leaf} {median(values):.3f}" for leaf, values in classes.items()))


def _real_bytes(checkpoint: Checkpoint, recipe: Mapping[str, Any]) -> int:
    """The loader hands tensors of so many bytes to vLLM."""
    return VirtualCheckpoint(checkpoint, QuantizationRecipe.parse(recipe).assign(checkpoint)).emitted_bytes


def _bits(listed: UnitList, size: int) -> float:
    return 8 * (size - listed.kept_bytes) / sum(unit.weights for unit in listed.units)


if __name__ == "__main__":
    sys.exit(main())
