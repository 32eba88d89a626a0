"""The bytes of a checkpoint's weights on each rank, in any format and at any tensor-parallel size, from its headers.

A rough estimate: vLLM splits almost every matrix of a layer evenly over the ranks (vllm/model_executor/layers/linear.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod

from sparkd.checkpoint import Checkpoint, TensorRef, tensor_class, towers_of
from sparkd.checkpoint.shape import Shape, text_config
from sparkd.checkpoint.tensors import alike
from sparkd.errors import CheckpointError
from sparkd.vllm.unaccounted_args import WIDE
from workers.quantization.assignment import is_unknown_expert
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format, fitting
from workers.quantization.outcome import Outcome, outcome_of, shapes_of
from workers.quantization.recipe import QuantizationRecipe

# The layers that predict tokens ahead, which vLLM loads for speculative decoding.
AHEAD = "mtp"
_FLOATS = ("BF16", "F16", "F32", "F64")
# Kinds of tensors that every rank holds whole.
_WHOLE = frozenset({"router", "norm"})
_EXPERT = re.compile(r"\.experts\.\d+\.(?=.)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Alike tensors.

    count: how many there are.
    kind: a tensor_class.
    active: whether every token uses it, for experts the share that it uses.
    layered: whether it is in a layer of the language model, which the stages of a pipeline share.
    """

    tensor: TensorRef
    kind: str
    count: int
    active: float
    layered: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes on one rank.

    by_kind: by tensor_class.
    active_bytes: those that one token reads, in all stages of a pipeline together.
    disk_bytes: of a quantized copy of the model.
    changed: whether the recipe quantizes anything.
    """

    by_kind: Mapping[str, int]
    active_bytes: int
    disk_bytes: int
    changed: bool

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts whose names differ in numbers only and that a recipe treats alike.

    name: with `*` for numbers.
    part: the first of them.
    times: how many parts there are, each of part.count tensors.
    form: the format that the recipe gives them, or the weights that they are scales of; None where they are handed on as they are.
    shapes: [N, K] of the matrices that are quantized of one tensor, and how many there are; empty for a scale.
    """

    name: str
    part: WeightPart
    times: int
    form: Format | None = None
    shapes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def handed_bytes(self) -> int:
        """Bytes of what becomes of one tensor, as vLLM is handed it."""
        return self.part.tensor.nbytes if self.form is None else self._made_bytes(self.form)

    def held_bytes(self, shape: Shape) -> int:
        """Bytes of what becomes of one tensor in memory: a float that is handed on gets the model's own precision."""
        tensor = self.part.tensor
        if self.form is not None:
            return self._made_bytes(self.form)
        is_float = tensor.dtype in _FLOATS and "scale" not in tensor.name.rpartition(".")[2]
        return prod(tensor.shape) * shape.dtype_bytes if is_float else tensor.nbytes

    @property
    def misfit(self) -> int | None:
        """The columns that the groups of its format do not divide, which the loader refuses (Format.check); None where they
        do."""
        group = None if self.form is None else self.form.group
        return next((columns for _, columns in self.shapes if columns % group), None) if group is not None else None

    def _made_bytes(self, form: Format) -> int:
        return sum(times * form.nbytes(*sides) for sides, times in self.shapes.items())


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint, with one tensor for all experts of a layer that are alike.

    stored_bytes: of what is loaded.
    unloaded: bytes of each part that vLLM leaves on the disk: AHEAD or `lm_head`.
    """

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
        """The model in the recipe's formats; made once. Raises CheckpointError as QuantizationRecipe.assign, and for packed experts that do
        not tell which way round they stand."""
        if recipe.calibration is not None:
            text_of(recipe.calibration)  # each time: the text may change while the checkpoint stays
        if recipe not in self._formatted:
            assignment = recipe.assign(self.checkpoint)
            groups = tuple(_grouped(self.parts, assignment, self.checkpoint))
            self._formatted[recipe] = FormattedModel(self, recipe, groups, assignment.adjustments)
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
    """A checkpoint in the formats of one recipe.

    groups: its parts, with their formats.
    notes: what the recipe could not do, one sentence each.
    """

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
        held: Counter[str] = Counter()
        active = disk = head = 0
        for group in self.groups:
            part, each = group.part, group.held_bytes(shape)
            on_rank = part.count * (each if part.kind in _WHOLE or len(part.tensor.shape) < 2 else ceil(each / ranks))
            if on_rank:
                # A stage has its share of the layers; what is in none of them is counted on each.
                share = ceil(shape.layers / stages) / shape.layers if part.layered and shape.layers else 1.0
                held[part.kind] += ceil(group.times * share * on_rank)
            active += group.times * int(on_rank * part.active)
            disk += group.times * part.count * group.handed_bytes
            head = max(head, on_rank) if part.kind == "embedding" else head
        if shape.tied:
            # One matrix in both roles: a token reads one of its rows as an embedding, and all of it as the head.
            active += head
        return Weights(dict(held), active, disk, any(group.form is not None for group in self.groups))


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
        parts.append(WeightPart(tensor, kind, counts[name], _active(name, kind, shape), kind != "vision" and bool(_LAYER.search(name))))
    loaded = {part.tensor.name: part.tensor for part in parts}
    stored = sum(part.tensor.nbytes * part.count for part in parts)
    return Inventory(replace(checkpoint, tensors=loaded), shape, tuple(parts), stored, dict(unloaded))


def _grouped(parts: Sequence[WeightPart], assignment: Mapping[str, Format], checkpoint: Checkpoint) -> Iterator[PartGroup]:
    groups: dict[object, list[tuple[WeightPart, Outcome | None]]] = {}
    for part in parts:
        tensor = part.tensor
        outcome = outcome_of(tensor.name, assignment, checkpoint)
        form = None if outcome is None else outcome.format
        groups.setdefault((_starred(tensor.name), tensor.shape, tensor.dtype, part.count, form), []).append((part, outcome))
    for alike_parts in groups.values():
        part, outcome = alike_parts[0]
        shapes = {} if outcome is None or outcome.is_scale else shapes_of(part.tensor, checkpoint)
        form = None if outcome is None else outcome.format
        yield PartGroup(_starred(part.tensor.name), part, len(alike_parts), form, shapes)


@lru_cache(maxsize=8192)
def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def has_layers_ahead(known: Inventory) -> bool:
    """Whether it holds layers that predict tokens ahead; only one made with `ahead` can."""
    return any(_ahead(part.tensor.name, part.kind, known.shape) for part in known.parts)


def _ahead(name: str, kind: str, shape: Shape) -> bool:
    if not {"mtp", "mtp_layers"}.isdisjoint(name.split(".")):
        return True
    found = _LAYER.search(name) if shape.mtp_layers and kind != "vision" else None
    return found is not None and int(found[1]) >= shape.layers


def _active(name: str, kind: str, shape: Shape) -> float:
    if kind == "embedding" or kind == "vision":
        return 0.0
    if (".experts." in name or kind == "expert") and shape.experts:
        return min(1.0, shape.active_experts / shape.experts)
    return 1.0


def uneven_heads(shape: Shape, ranks: int) -> str | None:
    """Why so many ranks cannot share its heads (vllm/config/model.py, verify_with_parallel_config); None where they can."""
    return f"{shape.heads} attention heads do not divide by {ranks} ranks" if shape.heads % ranks else None


def uneven_groups(model: FormattedModel) -> str | None:
    """Why the loader would refuse the formats, with those that would fit; None where it would not."""
    for group in model.groups:
        form, columns = group.form, group.misfit
        if form is not None and form.group is not None and columns is not None:
            fits = fitting(form.group, columns, form.name)
            return f"{columns} columns of {group.part.tensor.name} do not divide into groups of {form.group}: {fits} would fit"
    return None
