"""Plans a model from its checkpoint alone; sparkd.capacity.plan_for_entry plans a configured model. Never renders a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sparkd.capacity.calibration import kept_in
from sparkd.capacity.consultation import Ask, Consultation, nobody
from sparkd.capacity.fit import FitRequest, choose, format_notes, is_answered, refuse_uncounted, unread
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, Serving
from sparkd.capacity.mixes import mixes_of
from sparkd.capacity.plan_report import Offer, Site, learned_with, to_json
from sparkd.capacity.plan_request import Finder, Others, PlanRequest
from sparkd.capacity.speculative import Drafting, drafting, kv_dtype
from sparkd.capacity.weights import Inventory, inventory, refuse_incomplete
from sparkd.checkpoint import CONFIG, Checkpoint, read_checkpoint
from sparkd.errors import ConfigError
from sparkd.hardware import GIB, Hardware
from sparkd.models.architectures import remark
from sparkd.models.shape import shape_of
from sparkd.schema.quantize import AUTO
from workers.quantization.best_wish import BestWish, best_of
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe


def answer(
    question: PlanRequest,
    hardware: Hardware,
    find: Finder,
    others: Others | None = None,
    *,
    unlinked: Mapping[int, str] | None = None,
    read: Callable[[str], Checkpoint] = read_checkpoint,
    site: Site | None = None,
    ask: Ask = nobody,
) -> dict[str, Any]:
    """The plan as plain JSON. Blocks.

    others: (folder or hub id, headers) -> the same for quantized copies of the model; called if any format is allowed.
    unlinked: see sparkd.capacity.fit.FitRequest. read: reads the headers of a draft.
    site: settings of the machine that would start a model without an entry. ask: asks vLLM about the model.

    Raises ConfigError and CheckpointError.
    """
    source, checkpoint, entry = find(question.model)
    site = site or Site()
    if entry is not None:
        from sparkd.capacity import plan_for_entry  # with pydantic, which a model without an entry does not need

        return plan_for_entry.answer(entry, question, checkpoint, hardware, read, unlinked or {}, others, ask)
    shape, platform = shape_of(checkpoint.config), hardware.platform
    # Without an entry `auto` means the same as no format: all formats are tried.
    best = best_of(question.quantize)
    quantize = None if question.quantize in (None, AUTO) else AS_IT_IS if best else QuantizationRecipe.parse(question.quantize)
    kv_asked = question.kv_cache_dtype or "auto"
    asked = {"max_num_seqs": question.max_num_seqs, "quantize": quantize, "kv_cache_dtype": kv_asked}
    drafted = drafting(question.speculative, source, shape, asked, read) if question.speculative is not None else None
    known = inventory(checkpoint, shape) if drafted is None else drafted.inventory(checkpoint, shape)
    refuse_incomplete(known)
    wish = FitRequest(
        max_model_len=question.max_model_len,
        requests=question.requests or 1,
        counted=question.requests is not None,
        nodes=question.nodes or 1,
        serving=Serving(
            0,
            max_num_seqs=question.max_num_seqs or question.requests or SEQUENCES[platform],
            max_num_batched_tokens=question.max_num_batched_tokens or BATCH_TOKENS[platform],
            kv_dtype=kv_dtype(kv_asked, drafted, _stored_kv_dtype(checkpoint) if platform == "cuda" else "auto"),
            platform=platform,
        ),
        quantize=quantize,
        drafting=drafted,
        eager=bool(question.enforce_eager),
        margin_bytes=None if question.margin_gib is None else int(question.margin_gib * GIB),
        unlinked=unlinked or {},
        calibrated=kept_in(site.quantized, checkpoint),
    )
    if drafted is not None:
        wish = replace(wish, serving=drafted.serving(wish.serving))
    if site.profiles is not None and os.path.isdir(site.profiles):
        wish = replace(wish, learned=learned_with(source, wish, site, hardware))
    args = ([] if kv_asked == "auto" else ["--kv-cache-dtype", kv_asked]) + (list(drafted.args) if drafted is not None else [])
    env = drafted.env if drafted is not None else {}

    def consultation(model: Inventory) -> Consultation:
        return Consultation(ask, model.checkpoint, args, env, hardware, drafted.draft if drafted is not None else None)

    consulted = consultation(known)
    known, wish = consulted.informed(known, wish)
    refuse_uncounted(known, wish)
    if best is not None:
        wish = _mixed(known, hardware, wish, best)
    choice = choose(known, hardware, wish)
    choice = replace(choice, notes=(*choice.notes, *format_notes(choice.best), *unread(known, choice.options, consulted.doubt())))
    there = others(source, checkpoint) if others is not None and wish.quantize is None else ()
    # A configuration in Mistral's format names no architecture, and a model that vLLM has built is known to vLLM.
    named = checkpoint.config_file == CONFIG and not is_answered(choice.options)
    if named and (unknown := remark(checkpoint.config, site.runtime)) is not None:
        choice = replace(choice, notes=(*choice.notes, unknown))
    offers = []
    for name, each in _counted(there, drafted):
        other, as_stored = consultation(each).informed(each, _as_stored(wish, each.checkpoint, question, drafted))
        offers.append(Offer(name, each, choose(other, hardware, as_stored)))
    return to_json(source, known, hardware, wish, choice, offers, site=site)


def _mixed(known: Inventory, hardware: Hardware, wish: FitRequest, best: BestWish) -> FitRequest:
    """The request with the best mix of formats that fits, else the smallest."""
    mixed = wish
    for recipe in mixes_of(known, best):
        mixed = replace(wish, quantize=recipe)
        if choose(known, hardware, mixed).best is not None:
            break
    return mixed


def _counted(there: Iterable[tuple[str, Checkpoint]], drafted: Drafting | None) -> Iterator[tuple[str, Inventory]]:
    """Leave out copies that lack the requested draft layers."""
    for name, found in there:
        shape = shape_of(found.config)
        with suppress(ConfigError):
            yield name, inventory(found, shape) if drafted is None else drafted.inventory(found, shape)


def _as_stored(wish: FitRequest, checkpoint: Checkpoint, question: PlanRequest, drafted: Drafting | None) -> FitRequest:
    """The request for another checkpoint of the model, served as stored, with the KV cache dtype of that checkpoint."""
    stored = _stored_kv_dtype(checkpoint) if wish.serving.platform == "cuda" else "auto"
    dtype = kv_dtype(question.kv_cache_dtype or "auto", drafted, stored)
    return replace(wish, quantize=AS_IT_IS, serving=replace(wish.serving, kv_dtype=dtype))


def _stored_kv_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the KV cache that a checkpoint asks for; `auto`, the larger one, where its weights may be quantized again."""
    source = checkpoint.quantization
    return "auto" if source is None or source.requantizable else source.kv_dtype
