"""Measures what each format does to each unit of a checkpoint, for `quantize: best`. Reads the checkpoint, writes nothing but its answer.

The relative error of a unit in a format is that of rows sampled from its weights. Where the model fits into free memory and transformers
knows it, each input channel counts with its second moment over a text, and the sensitivity of a unit is the KL divergence of the next
tokens of that text after quantizing that unit alone. The program is a child in the engine's Python: it reads {"folder": PATH,
"free_bytes": NUMBER} from stdin and writes JSON lines, {"done": .., "of": ..} meanwhile and {"errors": .., "sensitivities": ..} at the end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparkd.checkpoint import Checkpoint, read_checkpoint
from workers.load.formats import amax, global_scale, quantizer
from workers.load.reference_model import divergence, running
from workers.load.virtual import DTYPES, Stored, VirtualCheckpoint, Weight
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format
from workers.quantization.fusion import group_of
from workers.quantization.recipe import QuantizationRecipe
from workers.quantization.units import BF16, FormatUnit, UnitList, units_of

# Rows of a weight, and weights of a unit (experts are alike): the error of a format varies by less than 1 % over more of them.
_ROWS, _WEIGHTS = 128, 6
_MOST_TOKENS = 1024
# The format that shows how sensitive a unit is: the least exact that its columns suit.
_PROBES = ("mxfp4", "nvfp4", "fp8")

Report = Callable[[int, int], None]
Moments = Mapping[str, Tensor]


def measure(folder: str, free_bytes: int, report: Report = lambda _done, _total: None) -> dict[str, Any]:
    """errors: squared relative error by unit and spelling; sensitivities: KL for each unit of it, by unit. free_bytes: that the
    model may take; with too few, and where transformers cannot run it, there are no sensitivities. report: of the units that are done, and
    all."""
    checkpoint = read_checkpoint(folder)
    listed = units_of(checkpoint)
    running = _Running.of(checkpoint, free_bytes)
    moments = running.moments(listed) if running is not None else {}
    errors = _errors(checkpoint, listed, moments)
    sensitivities = {} if running is None else _sensitivities(running, listed, errors, report)
    return {"errors": errors, "sensitivities": sensitivities}


def _sensitivities(running: _Running, listed: UnitList, errors: Mapping[str, Mapping[str, float]], report: Report) -> dict[str, float]:
    """By unit, where transformers has its weights under names that are known here."""
    found: dict[str, float] = {}
    for done, unit in enumerate(listed.units):
        report(done, len(listed.units))
        unit_errors = errors.get(unit.key, {})
        probe = next((spelling for spelling in _PROBES if unit_errors.get(spelling)), None)
        parameters = running.parameters(unit)
        if probe is not None and parameters:
            found[unit.key] = running.divergence(unit, parameters, Format.parse(probe)) / unit_errors[probe]
    return found


def _errors(checkpoint: Checkpoint, listed: UnitList, moments: Moments) -> dict[str, dict[str, float]]:
    """Both sums go over all sampled rows of a unit."""
    units = {unit.key: unit for unit in listed.units}
    wanted = {spelling: Format.parse(spelling) for unit in listed.units for spelling in unit.nbytes if spelling != BF16}
    sums: dict[str, dict[str, float]] = {key: dict.fromkeys(unit.nbytes, 0.0) for key, unit in units.items()}
    whole = dict.fromkeys(units, 0.0)
    seen = dict.fromkeys(units, 0)
    for weight in _weights(checkpoint):
        key = _key_of(weight, units)
        if key is None or seen[key] >= _WEIGHTS:
            continue
        seen[key] += 1
        rows = _sample(weight.stored)
        scale = moments.get(weight.module, torch.ones(rows.shape[1]))
        whole[key] += float((rows.square() * scale).sum())
        for spelling in units[key].nbytes:
            if spelling != BF16:
                sums[key][spelling] += float(((_rounded(rows, wanted[spelling]) - rows).square() * scale).sum())
    return {
        key: {spelling: total / whole[key] for spelling, total in of_unit.items() if spelling != BF16}
        for key, of_unit in sums.items()
        if whole[key]
    }


def _weights(checkpoint: Checkpoint) -> Iterator[Weight]:
    """Every weight that may be quantized, one by one also where a checkpoint packs experts."""
    formats = QuantizationRecipe.parse("fp8").assign(checkpoint)
    for unit in VirtualCheckpoint(checkpoint, formats).units:
        yield from (weight for weight in unit.weights if weight.format.name == "fp8")


def _key_of(weight: Weight, units: Mapping[str, FormatUnit]) -> str | None:
    """The unit of a weight under its name for vLLM. Granite's packed experts are called by what is above their `experts` there."""
    keys = (group_of(weight.module, "expert"), group_of(weight.module, ""), weight.module.partition(".experts.")[0])
    return next((key for key in keys if key in units), None)


def _sample(stored: Stored) -> Tensor:
    """Rows of a stored weight, float32 [up to _ROWS, K]. The scales of an FP8 source are left out: a row has one or few of them, and an
    error relative to the row is the same without."""
    n, k = stored.shape
    dtype, size = DTYPES[stored.ref.dtype], DTYPES[stored.ref.dtype].itemsize
    numbers = [row * n // min(n, _ROWS) for row in range(min(n, _ROWS))]
    with open(stored.ref.path, "rb") as file:
        if stored.transposed:
            block = _read(file.fileno(), stored.offset, stored.nbytes, dtype).view(stored.rows, stored.cols)
            return block[:, [stored.row_start + number for number in numbers]].t().float().contiguous()
        starts = [stored.offset + (stored.row_start + number) * k * size for number in numbers]
        return torch.stack([_read(file.fileno(), start, k * size, dtype) for start in starts]).float()


def _read(file: int, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(os.pread(file, size, offset)), dtype=dtype)


def _rounded(weight: Tensor, form: Format, shared: Tensor | None = None) -> Tensor:
    """The values of a weight that a format holds. shared: the largest magnitude of all that share a scale with it."""
    used = quantizer(form)
    scale = global_scale(amax(weight) if shared is None else shared) if form.name == "nvfp4" else None
    return used.dequantize(used.quantize(weight, global_scale=scale), weight.dtype)


class _Running:
    """A model in transformers, and what it said of the text unquantized."""

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self._model = model
        self._tokens = tokens
        self._outputs: dict[str, Any] = {}
        self._said = torch.empty(0)

    @staticmethod
    def of(checkpoint: Checkpoint, free_bytes: int) -> _Running | None:
        """None as reference_model.running."""
        cuda = torch.cuda.is_available()
        # On a CPU bfloat16 would round away what a single unit changes.
        dtype = torch.bfloat16 if cuda else torch.float32
        model_and_tokens = running(checkpoint, free_bytes, text_of(None), _MOST_TOKENS, dtype, cuda=cuda)
        return None if model_and_tokens is None else _Running(*model_and_tokens)

    def moments(self, listed: UnitList) -> dict[str, Tensor]:
        """The second moment of each input channel (float32 [K]), by module; runs the text, and keeps what each layer gave."""
        moments: dict[str, Tensor] = {}
        handles = []
        for name in (name for unit in listed.units for name in unit.modules):
            linear = self._module(name)
            if linear is not None:
                handles.append(linear.register_forward_pre_hook(_noting(moments, name)))
        for name in {_layer_of(unit) for unit in listed.units}:
            layer = self._module(name) if name else None
            if layer is not None:
                handles.append(layer.register_forward_hook(_keeping(self._outputs, name)))
        self._said = self._log_probabilities()
        for handle in handles:
            handle.remove()
        return moments

    def parameters(self, unit: FormatUnit) -> list[Tensor]:
        """The tensors of a unit: of its modules, or of experts that transformers packs. Empty where its model has other names."""
        if unit.kind == "expert":
            packed = self._module(unit.key)
            return [tensor.data for tensor in packed.parameters() if tensor.dim() in (2, 3)] if packed is not None else []
        modules = [self._module(name) for name in unit.modules]
        return [module.weight.data for module in modules if module is not None and hasattr(module, "weight")]

    def divergence(self, unit: FormatUnit, parameters: list[Tensor], form: Format) -> float:
        """KL (nats, mean of the text's tokens) of the model with these tensors in a format. Layers before them are not computed again."""
        kept = [tensor.clone() for tensor in parameters]
        shared = torch.stack([amax(tensor) for tensor in parameters]).amax()
        try:
            for tensor, old in zip(parameters, kept, strict=True):
                tensor.copy_(_rounded(old, form, shared))
            with self._from(unit):
                said = self._log_probabilities()
        finally:
            for tensor, old in zip(parameters, kept, strict=True):
                tensor.copy_(old)
        return divergence(self._said, said)

    @contextmanager
    def _from(self, unit: FormatUnit) -> Iterator[None]:
        """Layers before that of the unit give what they gave before."""
        own = _layer_of(unit)
        before, mark, number = own.rpartition(".")
        replaced = []
        for name, output in self._outputs.items():
            stem, _, other = name.rpartition(".")
            if mark and stem == before and int(other) < int(number):
                layer = self._model.get_submodule(name)
                layer.forward = _giving(output)
                replaced.append(layer)
        try:
            yield
        finally:
            for layer in replaced:
                del layer.forward

    @torch.inference_mode()
    def _log_probabilities(self) -> Tensor:
        return self._model(self._tokens, use_cache=False).logits[0].float().log_softmax(-1)

    def _module(self, name: str) -> Any:
        try:
            return self._model.get_submodule(name)
        except AttributeError:
            return None


def _layer_of(unit: FormatUnit) -> str:
    """The path of a unit's layer, which ends in its number; empty without one."""
    before, mark, _ = unit.key.partition(f".{unit.layer}.") if unit.layer else ("", "", "")
    return f"{before}.{unit.layer}" if mark else ""


def _noting(moments: dict[str, Tensor], module: str) -> Callable[[Any, Any], None]:
    def note(_module: Any, given: Any) -> None:
        moments[module] = given[0].float().square().flatten(0, -2).mean(0).cpu()

    return note


def _keeping(outputs: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    def keep(_module: Any, _given: Any, output: Any) -> None:
        outputs[name] = output

    return keep


def _giving(output: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: output


def main() -> int:
    request = json.load(sys.stdin)

    def report(done: int, total: int) -> None:
        _say({"done": done, "of": total})

    _say(measure(request["folder"], request["free_bytes"], report))
    return 0


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
