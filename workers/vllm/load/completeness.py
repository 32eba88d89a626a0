"""Finds parameters of vLLM's model that no tensor fills: gaps in a checkpoint that neither a shard nor the index shows. Never reads a
weight, never changes a parameter.

vLLM itself checks this only without quantization, and even then skips every module that has a quantization method, which is every linear
layer, embedding and expert (`track_weights_loading` of model_loader/default_loader.py, 0.26 and 0.32). An unfilled parameter keeps the
memory's old content, and the model generates nonsense. Here the loader watches the model's copies during the trace (trace.py). Kernels may
round shapes up and models may leave scales at their defaults, so not every element must be written. A tensor is missing where

* nothing at all is written to a parameter, and the model does not say that it was loaded;
* nothing is written to one of the parts that a linear layer multiplies as one matrix (k of q/k/v);
* nothing is written to one of a layer's experts, or one expert lacks a matrix that its neighbours have;
* all experts of a layer lack one of the two matrices whose products are multiplied (gate and up).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparkd.errors import CheckpointError
from workers.load.trace import PhantomTensor, Trace
from workers.quantization.fusion import EXPERT

_NAMED = 3
_CURE = "Download it again, and check that its config.json is its own"
_WHOLE = "; if it is whole, that class does not take this recipe, and `quantize: bf16` loads it"
_ALLOWED = "; if the model runs without them, `allow_missing_weights: true` on it"
# Parameters of sparkd's formats and of vLLM's own methods (AWQ's and GPTQ's at the end). A module with a method may have more, some of
# which a checkpoint that was quantized elsewhere may lack: scales of activations and of the KV cache (of experts that no calibration
# reached), zero points.
_FILLED = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "bias", "qweight", "scales")
# Biases that are added to the router's scores to choose experts. On a layer with a method, vLLM's classes create them uninitialised; some
# create zeros (laguna.py, longcat_flash.py, param2moe.py, step3p5.py; 0.26 and 0.32) and serve a checkpoint without them.
_ROUTING = ("e_score_correction_bias", "expert_bias", "router_bias")
_ROUTING_IS_ZERO = tuple(f"vllm.model_executor.models.{name}" for name in ("laguna", "longcat_flash", "param2moe", "step3p5"))
_EXPERTS = ("w13_", "w2_")
# Names of gate and up in most checkpoints, and in Mixtral's.
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class _Write:
    """A write, as the first and the last written element of a storage."""

    first: int
    last: int


class Writes(TorchDispatchMode):
    """A context that notes which memory is written to."""

    def __init__(self) -> None:
        super().__init__()
        self._to: dict[int, list[_Write]] = {}
        self._places: dict[Any, tuple[tuple[int, str], ...]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if (places := self._places.get(function)) is None:
            aliases = [(at, argument.name, argument.alias_info) for at, argument in enumerate(function._schema.arguments)]
            places = tuple((at, name) for at, name, alias in aliases if alias is not None and alias.is_write)
            self._places[function] = places
        for at, name in places:
            self.add(args[at] if at < len(args) else kwargs.get(name))
        return function(*args, **kwargs)

    def add(self, written: Any) -> None:
        """Note a write. written: a tensor or a list of tensors; other values are ignored."""
        if isinstance(written, list | tuple):
            for tensor in written:
                self.add(tensor)
        elif isinstance(written, torch.Tensor) and not isinstance(written, PhantomTensor) and written.numel():
            self._to.setdefault(written.untyped_storage().data_ptr(), []).append(_Write(*_span(written)))

    def add_from(self, first: torch.Tensor, last: torch.Tensor) -> None:
        """Note a write of two tensors and of all elements between them in their storage."""
        if first.numel():
            self._to.setdefault(first.untyped_storage().data_ptr(), []).append(_Write(_span(first)[0], _span(last)[1]))

    def to(self, parameter: torch.Tensor) -> list[_Write]:
        first, last = _span(parameter)
        return [write for write in self._to.get(parameter.untyped_storage().data_ptr(), ()) if write.first <= last and write.last >= first]


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The result of tracing a model. loaded: the parameters that the model reports as loaded; storages: its parameters' storages before.

    experts: number of experts of each layer on this rank, None where unknown. placed: tensors that are placed without the model, as the
    first and the last rows of one parameter.
    """

    model: torch.nn.Module
    trace: Trace
    writes: Writes
    loaded: Collection[str]
    storages: Mapping[str, int]
    experts: int | None
    placed: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()


def storages_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


def refuse_unfilled(outcome: LoadOutcome, folder: str, *, quantized: bool) -> None:
    """Raise CheckpointError with the first unfilled parameters and their number. folder: the checkpoint's; quantized: by a recipe."""
    empty = unfilled(outcome)
    if not empty:
        return
    more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
    problem = f"it has nothing for {', '.join(empty[:_NAMED])}{more} of vLLM's {type(outcome.model).__name__}"
    raise CheckpointError(problem, file=folder, cure=_CURE + (_WHOLE if quantized else "") + _ALLOWED)


def unfilled(outcome: LoadOutcome) -> list[str]:
    """Readable names of the unfilled parts: `model.norm.weight`, `model.layers.0.self_attn.qkv_proj.weight (rows 256 to 319)`."""
    return list(dict.fromkeys([*_lone(outcome), *_parameters(outcome)]))


def _parameters(outcome: LoadOutcome) -> Iterator[str]:
    for first, last in outcome.placed:
        outcome.writes.add_from(first, last)
    zero = any(type(module).__module__.startswith(_ROUTING_IS_ZERO) for module in outcome.model.modules())
    aliases: dict[int, list[str]] = {}
    for name, parameter in outcome.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    seen: set[int] = set()
    for path, module in outcome.model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not _counts(module, name, parameter) or (zero and name in _ROUTING):
                continue
            seen.add(id(parameter))
            names = aliases[id(parameter)]
            if any(outcome.storages.get(alias) != parameter.untyped_storage().data_ptr() for alias in names):
                continue  # the model has replaced the parameter
            shown = ".".join(filter(None, (path, _shown(name))))
            writes = outcome.writes.to(parameter)
            if not writes:
                if not any(alias in outcome.loaded for alias in names):
                    yield shown
                continue
            parts = list(_parts(module, name, parameter, writes, outcome.experts))
            if parts and not _shares(outcome.model.get_submodule(path.rpartition(".")[0])):
                yield f"{shown} ({', '.join(parts)})"


def _counts(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> bool:
    if parameter.is_meta or not parameter.numel() or _is_spare_bias(module, name):
        return False
    return getattr(module, "quant_method", None) is None or _bare(name) in _FILLED or name in _ROUTING


def _is_spare_bias(module: torch.nn.Module, name: str) -> bool:
    """Whether a parameter is a bias of zeros that vLLM's GPTQ experts create although the model has none (auto_gptq.py, 0.32)."""
    return name.startswith(_EXPERTS) and _bare(name) == "bias" and not getattr(getattr(module, "moe_config", None), "has_bias", True)


def _shares(parent: torch.nn.Module) -> bool:
    """Whether attention uses another layer's keys and values (Gemma 3n, Gemma 4), so that its own projections are not needed."""
    return any(getattr(child, "kv_sharing_target_layer_name", None) is not None for child in parent.children())


def _bare(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _EXPERTS if name.startswith(prefix)), name)


def _shown(name: str) -> str:
    """One name for all parts of a weight, because they are missing together."""
    return name.partition("weight_")[0] + "weight" if "weight_" in name else name


def _parts(module: torch.nn.Module, name: str, parameter: torch.Tensor, writes: list[_Write], experts: int | None) -> Iterator[str]:
    """The parts of a parameter that nothing is written to."""
    if not parameter.is_contiguous() or not parameter.dim():
        return
    rows = parameter.shape[0]
    if name.startswith(_EXPERTS):
        if rows == experts:
            touched = _rows(parameter, writes)
            yield from (f"expert {row}" for row in range(rows) if not touched[row])
        return
    widths = getattr(module, "output_partition_sizes", None) or []
    if len(widths) > 1 and sum(widths) == rows:
        touched = _rows(parameter, writes)
        yield from (
            f"rows {start} to {stop - 1}" for start, stop in pairwise(accumulate(widths, initial=0)) if not any(touched[start:stop])
        )


def _rows(parameter: torch.Tensor, writes: list[_Write]) -> list[bool]:
    """For each row, whether any of its elements is written."""
    touched = [False] * parameter.shape[0]
    origin, step = parameter.storage_offset(), max(1, parameter.stride(0))
    for write in writes:
        first, last = max(0, (write.first - origin) // step), min(len(touched) - 1, (write.last - origin) // step)
        touched[first : last + 1] = [True] * (last + 1 - first)
    return touched


def _lone(outcome: LoadOutcome) -> Iterator[str]:
    """Matrices that one expert lacks and its neighbours have, if the model takes that kind, and halves that all experts lack."""
    numbers_of: dict[tuple[str, str], set[int]] = {}
    wanted: set[tuple[str, str]] = set()
    for name, taken in outcome.trace.taken.items():
        if (expert := EXPERT.search(name)) is not None:
            kind = name[: expert.start(1)], name[expert.end(1) :]
            if (numbers := numbers_of.get(kind)) is None:
                numbers = numbers_of[kind] = set()
            numbers.add(int(expert[1]))
            if taken.region is not None:
                wanted.add(kind)
    layers: dict[str, dict[str, set[int]]] = {}
    for (prefix, suffix), numbers in numbers_of.items():
        layers.setdefault(prefix, {})[suffix] = numbers
    gated = _are_gated(outcome.model)
    for prefix, kinds in layers.items():
        every = set().union(*(numbers for suffix, numbers in kinds.items() if (prefix, suffix) in wanted))
        for suffix, numbers in kinds.items():
            if (prefix, suffix) in wanted and suffix.rpartition(".")[2] in _FILLED:
                yield from (f"{prefix}{number}{_shown(suffix)}" for number in sorted(every - numbers))
        present = {_shown(suffix).removeprefix(".").removesuffix(".weight") for suffix in kinds if (prefix, suffix) in wanted}
        for pair in _GATED if gated else ():
            if len(lacking := set(pair) - present) == 1:
                yield f"{prefix}*.{lacking.pop()}.weight"


def _are_gated(model: torch.nn.Module) -> bool:
    """Whether all routed experts of a model are gated, by vLLM's configuration of them."""
    gates = [
        module.moe_config.is_act_and_mul for module in model.modules() if hasattr(getattr(module, "moe_config", None), "is_act_and_mul")
    ]
    return bool(gates) and all(gates)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.storage_offset()
    return first, first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
