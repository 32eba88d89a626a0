"""The bytes of a checkpoint's weights on each rank, in any format and at any tensor-parallel size, from its headers.

A rough estimate: vLLM splits almost every matrix of a layer evenly over the ranks (vllm/model_executor/layers/linear.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod

from sparkd.capacity.kv_cache import stages_of
from sparkd.checkpoint import COMPLETE, CONFIG, Checkpoint, TensorRef, tensor_class, towers_of
from sparkd.checkpoint.shape import Shape, of_layers, text_config
from sparkd.checkpoint.tensors import alike
from sparkd.errors import CheckpointError, CheckpointIncomplete
from sparkd.vllm.unaccounted_args import WIDE
from workers.quantization.assignment import is_unknown_expert
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format, fitting
from workers.quantization.packed_scale import packed_module_of
from workers.quantization.recipe import QuantizationRecipe

# The layers that predict tokens ahead, which vLLM loads for speculative decoding.
AHEAD = "mtp"
_FLOATS = ("BF16", "F16", "F32", "F64")
# Stored with the input dimension first (AWQ, GPTQ).
_INPUT_FIRST = frozenset({"qweight", "qzeros", "scales"})
# Kinds of tensors that every rank holds whole.
_WHOLE = frozenset({"router", "norm"})
_BF16 = Format("bf16")
# Stands beside an FP8 weight and goes with it into its new format.
_SOURCE_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "scale")
_EXPERT = re.compile(r"\.experts\.\d+\.(?=.)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Nodes that a model may be split over.
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Alike tensors.

    count: how many there are.
    kind: a tensor_class.
    active: whether every token uses it, for experts the share that it uses.
    layer: None for one that is in no layer of the language model.
    """

    tensor: TensorRef
    kind: str
    count: int
    active: float
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes on one rank, by tensor_class.

    active_bytes: those that one token reads, in all stages of a pipeline together.
    disk_bytes: of a quantized copy of the model. changed: whether the recipe quantizes anything.
    notes: parts of the recipe that had no effect, one sentence each.
    """

    by_kind: Mapping[str, int]
    active_bytes: int
    disk_bytes: int
    changed: bool
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts that differ in their layer only, with the format that a recipe gives them; None where they keep their own."""

    part: WeightPart
    form: Format | None
    layers: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint, with one tensor for all experts of a layer that are alike. stored_bytes: of what is loaded. unloaded: bytes of each
    part that vLLM leaves on the disk: AHEAD or `lm_head`."""

    checkpoint: Checkpoint
    shape: Shape
    parts: tuple[WeightPart, ...]
    stored_bytes: int
    unloaded: Mapping[str, int]
    _formatted: dict[QuantizationRecipe, FormattedModel] = field(default_factory=dict, init=False, compare=False, repr=False)
    # By what they were made for (sparkd.capacity.formats), because a model that waits for room is asked about again and again.
    mixes: dict[object, tuple[QuantizationRecipe, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def widened(self) -> Inventory:
        """The model in float32. Everything grows but what is stored quantized."""
        return replace(self, shape=replace(self.shape, dtype=WIDE[0]))

    def unknown_experts(self) -> dict[str, int]:
        """Bytes of the routed experts that keep their precision in every format, because sparkd cannot quantize tensors of their names; by
        name, with `*` for numbers. Empty where no format is made of the checkpoint."""
        source = self.checkpoint.quantization
        sizes: Counter[str] = Counter()
        for part in self.parts if source is None or source.requantizable else ():
            if is_unknown_expert(part.tensor.name, part.tensor):
                sizes[_starred(part.tensor.name)] += part.tensor.nbytes * part.count
        return dict(sizes)

    def formatted(self, recipe: QuantizationRecipe) -> FormattedModel:
        """The model in the recipe's formats; made once. Raises CheckpointError as QuantizationRecipe.assign."""
        if recipe.calibration is not None:
            text_of(recipe.calibration)  # each time: the text may change while the checkpoint stays
        if recipe not in self._formatted:
            assignment = recipe.assign(self.checkpoint)
            self._formatted[recipe] = FormattedModel(self, recipe, tuple(_grouped(self.parts, assignment)), assignment.adjustments)
        return self._formatted[recipe]

    def unmet(self, recipe: QuantizationRecipe) -> tuple[str, ...]:
        """A sentence for each thing that a recipe with rules asks for and does not get, or asks of nothing, as `sparkd ls --layers` has
        them; empty for one without rules, and where QuantizationRecipe.assign raises CheckpointError."""
        try:
            return self.formatted(recipe).notes if recipe.rules else ()
        except CheckpointError:
            return ()


@dataclass(frozen=True, slots=True)
class FormattedModel:
    """A checkpoint in the formats of one recipe. groups: of its parts, with their formats. notes: what the recipe could not do, one
    sentence each."""

    inventory: Inventory
    recipe: QuantizationRecipe
    groups: tuple[PartGroup, ...]
    notes: tuple[str, ...]
    _weights: dict[tuple[int, int], Weights] = field(default_factory=dict, init=False, compare=False, repr=False)

    def weights(self, ranks: int = 1, stages: int = 1) -> Weights:
        """The bytes of the fullest rank; made once."""
        key = ranks, stages
        if key not in self._weights:
            self._weights[key] = self._counted(*key)
        return self._weights[key]

    def _counted(self, ranks: int, stages: int) -> Weights:
        shape = self.inventory.shape
        placed: list[dict[str, int]] = [{} for _ in range(stages)]
        of_layer = stages_of(shape.layers, stages)
        tallies: dict[tuple[str, tuple[int | None, ...]], Counter[int]] = {}
        active = disk = head = 0
        for one in self.groups:
            part = one.part
            each = _bytes(part.tensor, one.form, shape)
            held = part.count * (each if part.kind in _WHOLE or len(part.tensor.shape) < 2 else ceil(each / ranks))
            if (where := (part.kind, one.layers)) not in tallies:
                tallies[where] = Counter(stage for layer in one.layers for stage in _places(part.kind, layer, of_layer, stages, shape))
            for stage, times in tallies[where].items():
                placed[stage][part.kind] = placed[stage].get(part.kind, 0) + times * held
            active += len(one.layers) * int(held * part.active)
            disk += len(one.layers) * part.count * (part.tensor.nbytes if one.form is None else each)
            head = max(head, held) if part.kind == "embedding" else head
        if shape.tied:
            # One matrix in both roles: a token reads one of its rows as an embedding, and all of it as the head.
            active += head
        fullest = max(placed, key=lambda by_kind: sum(by_kind.values()))
        return Weights(fullest, active, disk, any(one.form is not None for one in self.groups), self.notes)


def inventory(checkpoint: Checkpoint, shape: Shape, *, ahead: bool = False) -> Inventory:
    """ahead: with the layers beyond the model's own that predict tokens ahead, which vLLM loads for speculative decoding only."""
    counts: dict[str, int] = {}
    kept: dict[str, TensorRef] = {}
    unloaded: Counter[str] = Counter()
    for group in alike(checkpoint.tensors, _EXPERT, ".experts.0."):
        # Experts of another kind than the first of their name are a group of their own.
        name = group.first.name if group.name in kept else group.name
        kept[name] = group.first._replace(name=name)
        counts[name] = group.total
    towers = towers_of(checkpoint.config)
    kinds = {name: tensor_class(name, tensor.shape, towers) for name, tensor in kept.items()}
    if not shape.layers and (numbers := [layer for name in kept if (layer := _layer_of(name, kinds[name])) is not None]):
        shape = of_layers(shape, checkpoint.config, max(numbers) + 1)
    text = text_config(checkpoint.config)
    if "tie_word_embeddings" not in text and "lm_head" in kinds.values():
        # config.json leaves it open, and most model classes default to untied: a stored lm_head confirms that.
        shape = replace(shape, tied=False)
    parts = []
    for name, tensor in kept.items():
        kind = kinds[name]
        left = AHEAD if not ahead and _ahead(name, kind, shape) else kind if shape.tied and kind == "lm_head" else None
        if left is not None:
            unloaded[left] += tensor.nbytes * counts[name]
            continue
        parts.append(WeightPart(tensor, kind, counts[name], _active(name, kind, shape), _layer_of(name, kind)))
    loaded = {part.tensor.name: part.tensor for part in parts}
    stored = sum(part.tensor.nbytes * part.count for part in parts)
    return Inventory(replace(checkpoint, tensors=loaded), shape, tuple(parts), stored, dict(unloaded))


def refuse_incomplete(known: Inventory) -> None:
    """Raises CheckpointIncomplete where the files have fewer layers than config.json says.

    Layers without numbers say nothing, nor does a model that may leave layers out."""
    checkpoint, layers = known.checkpoint, known.shape.layers
    stored = {part.layer for part in known.parts if part.layer is not None}
    missing = sorted(set(range(layers)) - stored)
    if not stored or not missing or known.shape.gaps or _is_looped(known, stored):
        return
    absent = f"layer {missing[0]} is" if len(missing) == 1 else f"{len(missing)} of them, from layer {missing[0]} on, are"
    raise CheckpointIncomplete(f"its {CONFIG} says {layers} layers, and {absent} not in its files", file=checkpoint.folder, cure=COMPLETE)


def _is_looped(known: Inventory, stored: Collection[int]) -> bool:
    """Whether config.json counts the stored layers under a key of their own (num_layers_per_stack of HRM-Text), because a loop runs them
    several times."""
    own = (value for key, value in text_config(known.checkpoint.config).items() if key.startswith("num_layers"))
    return len(stored) == max(stored) + 1 and len(stored) in own and known.shape.layers % len(stored) == 0


def _layer_of(name: str, kind: str) -> int | None:
    """The number of the language model's layer that a tensor of this name and class belongs to."""
    found = _LAYER.search(name) if kind != "vision" else None
    return int(found[1]) if found else None


def _grouped(parts: Sequence[WeightPart], assignment: Mapping[str, Format]) -> Iterator[PartGroup]:
    # FP8 that keeps its precision beside quantized layers is handed to vLLM dequantized (workers/load/virtual.py).
    fp8 = (part.tensor.name for part in parts if part.tensor.dtype == "F8_E4M3" and len(part.tensor.shape) == 2)
    kept = {stem: _BF16 for name in fp8 if (stem := name.removesuffix(".weight")) not in assignment} if assignment else {}
    first: dict[object, tuple[WeightPart, Format | None]] = {}
    layers: dict[object, list[int | None]] = {}
    for part in parts:
        tensor = part.tensor
        stem, _, last = tensor.name.rpartition(".")
        if last in _SOURCE_SCALES and (stem in assignment or stem in kept):
            continue  # It goes into the weight's new format.
        if "scale" in last and packed_module_of(tensor.name) in assignment:
            continue
        form = assignment.get(stem, kept.get(stem)) if last == "weight" else assignment.get(tensor.name)
        key = _starred(tensor.name), tensor.shape, tensor.dtype, part.count, form
        first.setdefault(key, (part, form))
        layers.setdefault(key, []).append(part.layer)
    yield from (PartGroup(part, form, tuple(layers[key])) for key, (part, form) in first.items())


@lru_cache(maxsize=8192)
def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def sides(tensor: TensorRef, shape: Shape) -> tuple[int, int]:
    """Rows and columns as vLLM multiplies by it. Packed experts may be stored either way round: the model's width tells which."""
    rows, columns = tensor.shape[-2:]
    last = tensor.name.rpartition(".")[2]
    if len(tensor.shape) == 3 and last.endswith("_proj"):
        own, other = (rows, columns) if last == "down_proj" else (columns, rows)
        return (columns, rows) if own != shape.hidden == other else (rows, columns)
    return (columns, rows) if last in _INPUT_FIRST else (rows, columns)


def has_layers_ahead(known: Inventory) -> bool:
    """Whether it holds layers that predict tokens ahead; only one made with `ahead` can."""
    return any(_ahead(part.tensor.name, part.kind, known.shape) for part in known.parts)


def _ahead(name: str, kind: str, shape: Shape) -> bool:
    if not {"mtp", "mtp_layers"}.isdisjoint(name.split(".")):
        return True
    found = _LAYER.search(name) if shape.mtp_layers and kind != "vision" else None
    return found is not None and int(found[1]) >= shape.layers


def _places(kind: str, layer: int | None, of_layer: list[int], stages: int, shape: Shape) -> tuple[int, ...]:
    """The stages of a pipeline that hold it."""
    if layer is not None and layer < len(of_layer):
        return (of_layer[layer],)
    if kind == "vision":
        return tuple(range(stages))
    if kind == "embedding":
        return (0, stages - 1) if shape.tied and stages > 1 else (0,)
    return (stages - 1,)


def _active(name: str, kind: str, shape: Shape) -> float:
    if kind == "embedding" or kind == "vision":
        return 0.0
    if (".experts." in name or kind == "expert") and shape.experts:
        return min(1.0, shape.active_experts / shape.experts)
    return 1.0


def _bytes(tensor: TensorRef, form: Format | None, shape: Shape) -> int:
    """The bytes of one tensor in memory, in its format or in the model's own precision."""
    if form is not None:
        blocks = tensor.shape[0] if len(tensor.shape) == 3 else 1
        return blocks * form.nbytes(*sides(tensor, shape))
    is_float = tensor.dtype in _FLOATS and "scale" not in tensor.name.rpartition(".")[2]
    return prod(tensor.shape) * shape.dtype_bytes if is_float else tensor.nbytes


def uneven_heads(shape: Shape, ranks: int) -> str | None:
    """Why so many ranks cannot share its heads (vllm/config/model.py, verify_with_parallel_config); None where they can."""
    return f"{shape.heads} attention heads do not divide by {ranks} ranks" if shape.heads % ranks else None


def possible_ranks(shape: Shape, ranks: int) -> str:
    """The other sizes of tensor parallelism by which its heads divide, in words."""
    return ", ".join(str(size) for size in range(1, MOST_RANKS + 1) if size != ranks and uneven_heads(shape, size) is None)


def uneven_groups(model: FormattedModel) -> str | None:
    """Why the loader would refuse the formats: the columns that share a scale must divide a weight's (Quantizer.check of
    workers/load/formats/base.py)."""
    uneven = next(_uneven(model), None)
    if uneven is None:
        return None
    name, columns, form, fits = uneven
    return f"{columns} columns of {name} do not divide into groups of {form.group}: {fits} would fit"


def even_formats(model: FormattedModel) -> str | None:
    """The formats for the weight of `uneven_groups`, in words; None where there is none."""
    return next((fits for *_, fits in _uneven(model)), None)


def _uneven(model: FormattedModel) -> Iterator[tuple[str, int, Format, str]]:
    """(tensor, its columns, its format, formats that fit)."""
    for one in model.groups:
        if one.form is None or one.form.group is None:
            continue
        columns = sides(one.part.tensor, model.inventory.shape)[1]
        if columns % one.form.group:
            yield one.part.tensor.name, columns, one.form, fitting(one.form.group, columns, one.form.name)
