"""Asks vLLM's built model which tensors it takes, and refuses a checkpoint that lacks a weight or holds integers in place of one.

vLLM's own check names the parameters that a model does not report as loaded. It does not see which of several tensors of one parameter is
missing (k of q/k/v, an expert), and some classes report too little; the trace (trace.py) shows both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from sparkd.checkpoint import TensorRef
from sparkd.errors import CheckpointError
from workers.load.trace import Trace, expert_families, inferred_targets, phantoms
from workers.load.virtual import DTYPES, VirtualCheckpoint
from workers.quantization.fusion import EXPERT
from workers.vllm.symbols import symbol

logger = logging.getLogger("vllm.sparkd.stream")

Check = Callable[[torch.nn.Module, set[str]], None]
ElementRange = tuple[int, int]  # the first and the last element in a storage

_NAMED = 3
ANOTHER_MODEL = "Check that config.json and the shards are of one model, and download them again"
_CUT = "; if the model runs without the rest, `allow_missing_weights: true` on it"
_CURE = "Download it again, and check that its config.json is its own"
_WHOLE = "; if it is whole, that class does not take this recipe, and `quantize: bf16` loads it"
_ALLOWED = "; if the model runs without them, `allow_missing_weights: true` on it"
# Parts of a weight, in sparkd's formats and in AWQ's and GPTQ's. A module with a quantization method has more parameters, some of which a
# checkpoint may lack: scales of activations and of the KV cache, zero points, GPTQ's biases of experts that have none.
_FILLED = re.compile(r"(w13_|w2_)?(weight|weight_packed|weight_scale|weight_global_scale|qweight|scales)|bias")


def ask(
    virtual: VirtualCheckpoint,
    model: torch.nn.Module,
    model_config: Any,
    device: torch.device,
    folder: str,
    *,
    quantized: bool,
    check: Check | None,
) -> Trace | None:
    """The tensors of `virtual` that the model takes; None, with the reason in the log, where its weight loaders cannot be asked.

    folder: the user's checkpoint, for messages.
    quantized: by sparkd.
    check: vLLM's own (completeness.py), None for none.

    Raises CheckpointError for a checkpoint that lacks a weight, and where the model requires a tensor that the checkpoint lacks.
    """
    trace = Trace()
    families = [] if _experts_are_spread() else expert_families(virtual.outputs())
    untraced = {name for family in families for name in family.untraced}
    wanted = [tensor for tensor in virtual.outputs() if tensor.name not in untraced]
    try:
        with torch.no_grad():
            loaded = model.load_weights(phantoms(((tensor.name, tensor.shape, tensor.dtype) for tensor in wanted), device, trace))
    except (KeyError, AttributeError) as error:
        ref = source_of(virtual, next(reversed(trace.tensors), ""))
        raise CheckpointError(
            f"this vLLM's {type(model).__name__} has no parameter for its quantized form ({type(error).__name__}: {error})",
            file=None if ref is None else ref.path,
            tensor=None if ref is None else ref.name,
            cure="Keep that layer as it is: add its name to `keep`",
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
        logger.warning(
            "sparkd: %s cannot be asked which weights it takes (%s: %s); everything is read.",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return None
    if any(tensor.name not in trace.tensors for tensor in wanted):
        return None
    _refuse_integers(virtual, trace)
    trace.direct_targets = inferred_targets(families, trace.tensors)
    if check is not None and fills_all(model, model_config, virtual):
        if _takes_ends():
            _refuse_longer(virtual, trace, type(model).__name__)
        if loaded is not None:
            experts = None if _experts_are_spread() else model_config.get_num_experts()
            refuse_unfilled(model, trace, loaded, check, experts, folder, quantized=quantized)
    return trace


def fills_all(model: torch.nn.Module, model_config: Any, virtual: VirtualCheckpoint) -> bool:
    """Whether every weight of the model must come from this checkpoint. A draft takes some from its target, a pooling model may get its
    head from elsewhere, and a model that vLLM quantizes during the load has parameters that no checkpoint contains."""
    stored = virtual.checkpoint.quantization is not None or model_config.quantization is None
    return (bool(virtual.formats) or stored) and model_config.runner_type == "generate" and not getattr(model, "secondary_weights", ())


def source_of(virtual: VirtualCheckpoint, name: str) -> TensorRef | None:
    """The checkpoint's tensor from which a tensor of the virtual checkpoint is made."""
    output = next((output for output in virtual.outputs() if output.name == name), None)
    if output is None:
        return None
    unit = virtual.units[output.unit]
    return unit.plain if output.weight is None else unit.weights[output.weight].source.ref


def _refuse_integers(virtual: VirtualCheckpoint, trace: Trace) -> None:
    """Raise CheckpointError for integers of 16 bits or more that would be loaded into a floating-point matrix: torch would convert them."""
    for unit in virtual.units:
        ref = unit.plain
        if ref is None or len(ref.shape) < 2 or not _is_integer(ref) or (traced := trace.tensors.get(ref.name)) is None:
            continue
        if traced.target is not None and traced.target.memory.is_floating_point():
            raise CheckpointError(
                f"it holds {ref.dtype}, and the model has {traced.target.memory.dtype} there".replace("torch.", ""),
                file=ref.path,
                tensor=ref.name,
                cure=ANOTHER_MODEL,
            )


def _refuse_longer(virtual: VirtualCheckpoint, trace: Trace, model: str) -> None:
    """Raise CheckpointError for a tensor that goes on behind the region that the model takes: vLLM's linear layers cut it without a word.

    Called on a rank that takes the ends of tensors (`_takes_ends`).
    """
    for name, traced in trace.tensors.items():
        if traced.region is None or all(stop == size for (_, stop), size in zip(traced.region, traced.shape, strict=True)):
            continue
        if (ref := source_of(virtual, name)) is not None:
            problem = f"its shape is {list(ref.shape)}, which is larger than what vLLM's {model} takes by this config.json"
            raise CheckpointError(problem, file=ref.path, tensor=ref.name, cure=ANOTHER_MODEL + _CUT)


def _is_integer(ref: TensorRef) -> bool:
    dtype = DTYPES.get(ref.dtype)
    return dtype is not None and not dtype.is_floating_point and dtype.itemsize > 1


def _experts_are_spread() -> bool:
    """Whether each rank has experts of its own (expert parallelism). Raises MissingSymbol where vLLM has no configuration to ask."""
    return bool(_parallel().enable_expert_parallel)


def _takes_ends() -> bool:
    """Whether this rank takes the last part of every tensor that ranks share: it is the last of its tensor-parallel ranks."""
    parallel = _parallel()
    ranks = int(parallel.tensor_parallel_size)
    return parallel.data_parallel_size == 1 and rank_of_world()[0] % ranks == ranks - 1


def rank_of_world() -> tuple[int, int]:
    """(this rank, number of ranks) of the whole engine."""
    from torch import distributed

    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def _parallel() -> Any:
    return symbol("get_current_vllm_config")().parallel_config


def refuse_unfilled(
    model: torch.nn.Module, trace: Trace, loaded: Collection[str], check: Check, experts: int | None, folder: str, *, quantized: bool
) -> None:
    """Raise CheckpointError with the first unfilled parts of the model and their number.

    loaded: the parameters that the model reports as loaded.
    check: vLLM's, which raises ValueError with the names of the others.
    experts: of each layer on this rank, None where unknown.
    folder: the checkpoint's.
    quantized: by a recipe.
    """
    empty = list(dict.fromkeys([*lone_experts(trace), *unfilled(model, trace, loaded, check, experts)]))
    if empty:
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        problem = f"it has nothing for {', '.join(empty[:_NAMED])}{more} of vLLM's {type(model).__name__}"
        raise CheckpointError(problem, file=folder, cure=_CURE + (_WHOLE if quantized else "") + _ALLOWED)


def lone_experts(trace: Trace) -> Iterator[str]:
    """Matrices that one expert lacks and its neighbours have, if the model takes that kind."""
    layers: dict[str, dict[str, set[int]]] = {}
    for name, traced in trace.tensors.items():
        if traced.region is not None and (expert := EXPERT.search(name)) is not None:
            layers.setdefault(name[: expert.start(1)], {}).setdefault(name[expert.end(1) :], set()).add(int(expert[1]))
    for prefix, kinds in layers.items():
        every = set().union(*kinds.values())
        for suffix, numbers in kinds.items():
            if _FILLED.fullmatch(suffix.rpartition(".")[2]):
                yield from (f"{prefix}{number}{_shown(suffix)}" for number in sorted(every - numbers))


def unfilled(model: torch.nn.Module, trace: Trace, loaded: Collection[str], check: Check, experts: int | None) -> Iterator[str]:
    """The parameters that no tensor reaches, and those of which it reaches a part: `qkv_proj.weight (rows 256 to 319)`."""
    missing: set[str] = set()
    try:
        check(model, set(loaded))
    except ValueError as error:
        missing.update(re.findall(r"'([^']+)'", str(error)))
    reached, unclear = _reached(trace)
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if not parameter.numel() or (getattr(module, "quant_method", None) is not None and not _FILLED.fullmatch(last)):
            continue
        storage = parameter.untyped_storage().data_ptr()
        if storage not in reached:
            if name in missing:
                yield _shown(name)
            continue
        parts = [] if storage in unclear else list(_untouched(module, last, parameter, reached[storage], experts))
        if parts and not _shares(model.get_submodule(path.rpartition(".")[0])):
            yield f"{_shown(name)} ({', '.join(parts)})"


def _reached(trace: Trace) -> tuple[dict[int, list[ElementRange]], set[int]]:
    """(the elements of each storage that a copy reaches; the storages that other tensors reach too, in another way than by a copy)."""
    reached: dict[int, list[ElementRange]] = {}
    modules: dict[int, set[str]] = {}
    unclear: set[str] = set()
    known: dict[int, tuple[int, int]] = {}  # thousands of experts have one `like`
    for name, traced in trace.tensors.items():
        target = trace.direct_targets.get(name, traced.target)
        if traced.region is not None and (target is None or not traced.once):
            unclear.add(_module(name))
        if target is None:
            continue
        if (place := known.get(id(target.like))) is None:
            extent = sum((size - 1) * stride for size, stride in zip(target.like.shape, target.like.stride(), strict=True))
            place = known[id(target.like)] = (target.like.untyped_storage().data_ptr(), extent)
        storage, extent = place
        reached.setdefault(storage, []).append((target.start, target.start + extent))
        modules.setdefault(storage, set()).add(_module(name))
    return reached, {storage for storage, names in modules.items() if names & unclear}


def _untouched(
    module: torch.nn.Module, name: str, parameter: torch.Tensor, reached: Sequence[ElementRange], experts: int | None
) -> Iterator[str]:
    """The experts, or the parts of a fused matrix, that no copy reaches."""
    rows, widths = parameter.shape[:1], getattr(module, "output_partition_sizes", None) or []
    is_stack = name.startswith(("w13_", "w2_")) and rows == (experts,)
    if not parameter.is_contiguous() or not (is_stack or (len(widths) > 1 and rows == (sum(widths),))):
        return
    touched = [False] * parameter.shape[0]
    for start, stop in reached:
        first, last = ((at - parameter.storage_offset()) // parameter.stride(0) for at in (start, stop))
        touched[max(0, first) : last + 1] = [True] * (min(last + 1, len(touched)) - max(0, first))
    if is_stack:
        yield from (f"expert {number}" for number, is_touched in enumerate(touched) if not is_touched)
        return
    yield from (f"rows {start} to {stop - 1}" for start, stop in pairwise(accumulate(widths, initial=0)) if not any(touched[start:stop]))


def _shares(parent: torch.nn.Module) -> bool:
    """Whether attention uses another layer's keys and values (Gemma 3n, Gemma 4), so that its own projections are not needed."""
    return any(getattr(child, "kv_sharing_target_layer_name", None) is not None for child in parent.children())


def _module(name: str) -> str:
    """The module whose tensors vLLM may fuse: `model.layers.0.self_attn`; one for all experts of a layer."""
    expert = EXPERT.search(name)
    return name[: expert.start(1)] if expert is not None else name.rsplit(".", 2)[0]


def _shown(name: str) -> str:
    """One name for all parts of a weight, because they are missing together."""
    return name.partition("weight_")[0] + "weight" if "weight_" in name else name
