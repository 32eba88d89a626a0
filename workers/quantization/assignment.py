"""Walks over a checkpoint and gives each weight its format, and one format to all weights that vLLM fuses into one matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparkd.checkpoint import Checkpoint, TensorRef, tensor_class, towers_of
from sparkd.errors import CheckpointError
from workers.quantization.block_rows import misfit
from workers.quantization.formats import Format
from workers.quantization.fusion import group_of
from workers.quantization.packed import packed_of
from workers.quantization.packed_scale import scale_of

BF16 = Format("bf16")
FP8 = Format("fp8")
# A side under 64 saves nothing and suits no kernel's tile (the earlier fork's list_layers drew the same line).
MIN_DIMENSION = 64
_DTYPES = frozenset({"BF16", "F16", "F32", "F8_E4M3"})
_SOURCE_FORMATS = {"fp8_block": Format("fp8_block"), "fp8_channel": FP8, "fp8_tensor": FP8}
# Classes whose FP8 weights stay FP8 where a recipe keeps them. Every other class has no quantized form in vLLM or is read as stored.
_SERVED_AS_FP8 = frozenset({"attention", "mlp", "expert", "lm_head"})
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A rule's decision about one weight.

    level: among fused siblings the choice with the largest level wins.
    named: a rule names the weight itself.
    """

    format: Format
    level: tuple[int, int]
    named: bool = False


def _order(choice: FormatChoice) -> tuple[tuple[int, int], float]:
    """Sort key: the largest choice among fused siblings holds for all of them."""
    return choice.level, choice.format.precision


# The choice of a weight that can have no other: its siblings follow it.
BARRED = FormatChoice(BF16, (2, 0))


class Assignment(dict[str, Format]):
    """Module path ("model.layers.0.self_attn.q_proj", packed "model.layers.0.mlp.experts.gate_up_proj") -> format; quantized weights only.

    adjustments: one sentence for each request of the recipe that was not followed, or that matches no weight.
    """

    __slots__ = ("adjustments",)

    def __init__(self, formats: Iterable[tuple[str, Format]] = (), adjustments: Iterable[str] = ()) -> None:
        super().__init__(formats)
        self.adjustments = tuple(adjustments)


@dataclass(slots=True)
class _Group:
    """Modules that must have one format.

    kind: their tensor_class.
    choices: each distinct choice, with the first module that has it.
    """

    kind: str
    modules: list[str]
    choices: dict[FormatChoice, str]
    stored_fp8: bool = False


def assign(checkpoint: Checkpoint, choose: Callable[[str, str], FormatChoice]) -> Assignment:
    """The format of every quantized weight. choose: (module path, tensor_class) -> FormatChoice, called once for all experts of a layer,
    with expert number 0.

    A weight of an FP8 checkpoint that keeps its precision gets the format FP8. A weight that vLLM cannot load in blocks of 128x128 gets FP8
    with a scale for each row. Raises CheckpointError for packed FP8 experts in an unknown layout or without scales, and where a rule names
    fp8-block for a weight that cannot have it.
    """
    groups: dict[str, _Group] = {}
    groups_of: dict[str, tuple[str, FormatChoice, str]] = {}
    strange: dict[str, None] = {}
    towers = towers_of(checkpoint.config)
    for name, tensor in checkpoint.tensors.items():
        module = _module(name, tensor)
        if module is None:
            if is_unknown_expert(name, tensor) and not choose(name, "expert").format.keeps:
                strange.setdefault(_NUMBERS.sub("*", name))
            continue
        before, mark, after = module.partition(".experts.")
        number, _, rest = after.partition(".")
        key = f"{before}.experts.0.{rest}" if mark and rest and number.isdigit() else module
        if key not in groups_of:
            kind = tensor_class(name, tensor.shape, towers)
            groups_of[key] = group_of(key, kind), choose(key, kind), kind
        group_name, choice, kind = groups_of[key]
        if tensor.dtype == "F8_E4M3" and kind == "expert" and len(tensor.shape) == 3:
            _refuse_unknown_fp8(module, tensor, checkpoint)
        if not _can_be_quantized(module, tensor):
            if not choice.format.keeps and is_unknown_expert(name, tensor):
                strange.setdefault(_NUMBERS.sub("*", module))
            choice = BARRED
        group = groups.get(group_name)
        if group is None:
            group = groups[group_name] = _Group(kind, [], {})
        group.modules.append(module)
        if choice not in group.choices:
            group.choices[choice] = module
        if tensor.dtype == "F8_E4M3" and kind in _SERVED_AS_FP8 and ".indexer." not in module:
            group.stored_fp8 = True
    source = _SOURCE_FORMATS.get(checkpoint.quantization.method) if checkpoint.quantization else None
    formats: dict[str, Format] = {}
    split: dict[str, list[_Group]] = {}
    odd: dict[str, list[_Group]] = {}
    for group in groups.values():
        chosen = max(group.choices, key=_order).format
        if len({choice.format for choice in group.choices}) > 1:
            split.setdefault(_told(group, chosen), []).append(group)
        if chosen.keeps and group.stored_fp8 and source is not None:
            chosen = source
        if chosen.name == "fp8_block" and (adjustment := _without_blocks(group, checkpoint)):
            odd.setdefault(adjustment, []).append(group)
            chosen = FP8
        if not chosen.keeps:
            formats.update(dict.fromkeys(group.modules, chosen))
    order_of = ((module, formats[module]) for name, tensor in checkpoint.tensors.items() if (module := _module(name, tensor)) in formats)
    adjustments = [_counted(sentence, len(places)) for sentence, places in (*split.items(), *odd.items())]
    adjustments += [f"{name} holds experts in a layout that is not known here: they keep their precision." for name in strange]
    return Assignment(order_of, adjustments)


def is_unknown_expert(name: str, tensor: TensorRef) -> bool:
    """Whether a tensor holds routed experts under a name or in a layout that sparkd cannot quantize."""
    large = len(tensor.shape) in (2, 3) and min(tensor.shape[-2:]) >= MIN_DIMENSION and tensor.dtype in _DTYPES
    if not large or name.endswith("bias") or tensor_class(name, tensor.shape) != "expert":
        return False
    module = _module(name, tensor)
    return module is None or (len(tensor.shape) == 3 and packed_of(module) is None)


def _module(name: str, tensor: TensorRef) -> str | None:
    """The path of a weight that may be quantized by its name and dimensions, else None."""
    dimensions = len(tensor.shape)
    if name.endswith(".weight"):
        return name[:-7] if dimensions in (2, 3) else None
    packed = dimensions == 3 and ".experts." in name and name.endswith("_proj")
    return name if packed else None


def _can_be_quantized(module: str, tensor: TensorRef) -> bool:
    if min(tensor.shape[-2:]) < MIN_DIMENSION or tensor.dtype not in _DTYPES:
        return False
    return len(tensor.shape) == 2 or packed_of(module) is not None


def _refuse_unknown_fp8(module: str, tensor: TensorRef, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for packed FP8 experts in an unknown layout: vLLM cannot serve them as stored beside quantized layers."""
    if packed_of(module) is None or min(tensor.shape[-2:]) < MIN_DIMENSION:
        reason = f"packed experts in FP8 of shape {list(tensor.shape)} are in a layout that is not known here"
        raise CheckpointError(reason, file=tensor.path, tensor=tensor.name, cure="Leave out `quantize`, and vLLM serves them as they are")
    scale_of(tensor, module, checkpoint.tensors)


def _without_blocks(group: _Group, checkpoint: Checkpoint) -> str | None:
    """Why these modules cannot have fp8-block, without layer numbers; None where they can. Raises CheckpointError where a rule names it."""
    for module in group.modules:
        tensor = checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors[module]
        problem = misfit(module, group.kind, tensor, checkpoint.config)
        if problem is None:
            continue
        if any(choice.named and choice.format.name == "fp8_block" for choice in group.choices):
            leaves = sorted({name.rpartition(".")[2] for name in group.modules})
            raise CheckpointError(
                f"it {problem}, which fp8-block cannot express",
                file=tensor.path,
                tensor=tensor.name,
                cure=f"Choose fp8 for {', '.join(leaves)} instead",
            )
        whole = ", and all that vLLM runs with it as one," if len(group.modules) > 1 else ""
        return f"{_NUMBERS.sub('*', module)} {problem}: it{whole} gets fp8 in place of fp8-block"
    return None


def _told(group: _Group, chosen: Format) -> str:
    outcomes: dict[str, list[str]] = {}
    for choice, module in group.choices.items():
        outcome = "cannot be quantized" if choice == BARRED else f"would be {'kept' if choice.format.keeps else choice.format.spelling}"
        outcomes.setdefault(outcome, []).append(_NUMBERS.sub("*", module))
    parts = "; ".join(f"{', '.join(modules)} {outcome}" for outcome, modules in outcomes.items())
    result = "keep their precision" if chosen.keeps else f"get {chosen.spelling}"
    return f"{parts}; vLLM runs them as one, so all of them {result}"


def _counted(sentence: str, count: int) -> str:
    return f"{sentence} (in {count} {'place' if count == 1 else 'places'})."
