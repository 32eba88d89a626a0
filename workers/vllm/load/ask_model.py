"""Traces which tensors vLLM's built model takes, and their targets. Never reads a weight, never places one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sparkd.errors import CheckpointError
from workers.load.expert_placement import answered, families
from workers.load.trace import Trace, phantoms
from workers.load.virtual import VirtualCheckpoint
from workers.vllm.load.completeness import Check, refuse_unfilled
from workers.vllm.load.load_errors import refuse_integers, refuse_longer, source_of
from workers.vllm.load.ranks import experts_are_spread, takes_ends

logger = logging.getLogger("vllm.sparkd.stream")


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

    folder: the user's checkpoint, for messages; quantized: by sparkd; check: vLLM's own (completeness.py), None for none. Raises
    CheckpointError for a checkpoint that lacks a weight, and where the model requires a tensor that the checkpoint lacks.
    """
    trace = Trace()
    emitted = virtual.emitted()
    alike = [] if experts_are_spread() else families(emitted)
    skipped = {name for family in alike for name in family.followers}
    wanted = [tensor for tensor in emitted if tensor.name not in skipped]
    try:
        with torch.no_grad():
            loaded = model.load_weights(phantoms(((tensor.name, tensor.shape, tensor.dtype) for tensor in wanted), device, trace))
    except (KeyError, AttributeError) as error:
        ref = source_of(virtual, next(reversed(trace.taken), ""))
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
    if any(tensor.name not in trace.taken for tensor in wanted):
        return None
    refuse_integers(virtual, trace)
    trace.straight = answered(alike, trace.taken)
    if check is not None and fills_all(model, model_config, virtual):
        if takes_ends():
            refuse_longer(virtual, trace, type(model).__name__)
        if loaded is not None:
            experts = None if experts_are_spread() else model_config.get_num_experts()
            refuse_unfilled(model, trace, loaded, check, experts, folder, quantized=quantized)
    return trace


def fills_all(model: torch.nn.Module, model_config: Any, virtual: VirtualCheckpoint) -> bool:
    """Whether every weight of the model must come from this checkpoint. A draft takes some from its target, a pooling model may get its
    head from elsewhere, and a model that vLLM quantizes during the load has parameters that no checkpoint contains."""
    stored = virtual.checkpoint.quantization is not None or model_config.quantization is None
    return (bool(virtual.formats) or stored) and model_config.runner_type == "generate" and not getattr(model, "secondary_weights", ())
