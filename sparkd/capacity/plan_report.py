"""A plan as data: the command line draws it, and the admin API returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkd.capacity.advice import FitRefusal
from sparkd.capacity.fit import AS_STORED, FitRequest, Option, floor, smallest
from sparkd.capacity.weights import Inventory
from sparkd.hardware import Hardware

if TYPE_CHECKING:
    from sparkd.capacity.consultation import Witness
    from sparkd.vllm.ask.model import InquiryRuntime

# The utilizations of a floor table; the smallest that works is one more.
STEPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9)


def vllm_json(runtime: InquiryRuntime, witness: Witness) -> dict[str, Any]:
    """The vLLM that a plan may rely on. version: null where the runtime has no vLLM; answered: whether it answered a question."""
    return {"runtime": runtime.place, "version": runtime.version, "answered": witness.answered}


def to_json(
    model: str,
    inventory: Inventory,
    hardware: Hardware,
    request: FitRequest,
    options: Sequence[Option],
    refusal: FitRefusal | None,
    start: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The plan as plain JSON: bytes as integers, seconds and tokens/s as floats, null for unknown values.

    options: best first, which is the choice where it fits; each names its model.
    start: of the choice, as sparkd.capacity.planned_start has it.
    """
    checkpoint, shape = inventory.checkpoint, inventory.shape
    best = options[0] if options and options[0].fits else None
    return {
        "model": model,
        "folder": checkpoint.folder,
        "architecture": shape.architecture,
        "layers": shape.layers,
        "max_len": shape.max_len,
        "bytes": inventory.stored_bytes,
        "unloaded": dict(inventory.unloaded),
        "unknown_experts": inventory.unknown_experts() if any(option.format != AS_STORED for option in options) else {},
        "quantization": checkpoint.quantization.method if checkpoint.quantization else None,
        "hardware": asdict(hardware),
        "asked": {
            "nodes": request.nodes,
            "requests": request.requests,
            "max_model_len": request.max_model_len,
            "eager": request.eager,
            "speculative": request.drafting.method if request.drafting is not None else None,
        },
        "options": [option_json(option, model) for option in options],
        "choice": None if best is None else {**option_json(best, model), **(start or {})},
        "refusal": None if refusal is None else refusal.to_json(),
        "floor": [] if best is None else _floor(best, hardware),
    }


def option_json(option: Option, model: str) -> dict[str, Any]:
    """An option as JSON. model: that is asked for. footprint: null where vLLM cannot split the model that way."""
    footprint = option.footprint
    return {
        "model": option.copy or model,
        "prequantized": option.method,
        "format": option.format,
        "nodes": option.nodes,
        "tensor_parallel": option.tensor,
        "pipeline_parallel": option.pipeline,
        "fits": option.fits,
        "reason": option.reason,
        "max_model_len": option.serving.max_model_len,
        "longest": option.longest,
        "footprint": None
        if footprint is None
        else {
            **footprint.parts,
            "system": footprint.system_bytes,
            "margin": footprint.margin_bytes,
            "free": footprint.free_bytes,
            "withheld": footprint.withheld_bytes,
            "memory": footprint.memory_bytes,
            "total": footprint.total,
            "sureness": footprint.sureness,
            "upper": footprint.upper_bytes,
            "upper_kv": footprint.upper_cache_bytes,
            "requests": footprint.requests,
            "kv_bytes_per_token": footprint.kv.per_token,
            "kv_bytes_per_request": footprint.kv.per_request,
            "load_peak": footprint.load_peak_bytes,
            "disk": footprint.weights.disk_bytes if footprint.weights.changed else 0,
            "by_class": dict(footprint.weights.by_kind),
            "first_load_s": footprint.first_load_s,
            "next_load_s": footprint.next_load_s,
            "calibration_s": None if footprint.calibration is None else footprint.calibration.seconds,
            "calibration_free": 0 if footprint.calibration is None else footprint.calibration.free_bytes,
            "decode_tokens_s": footprint.decode_tokens_s,
            "active_bytes": footprint.weights.active_bytes,
            "notes": list(footprint.weights.notes),
        },
    }


def _floor(option: Option, hardware: Hardware) -> list[dict[str, Any]]:
    least = smallest(option, hardware)
    steps = sorted({*STEPS, *([] if least is None else [least])})
    need = option.footprint.kv.least if option.footprint is not None else 0
    return [
        {"utilization": share, "allowed": allowed, "kv": left, "works": left >= need, "smallest": share == least}
        for share, allowed, left in floor(option, hardware, steps)
    ]
