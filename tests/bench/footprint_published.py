"""Owns the comparison with figures that others published (tests/fixtures/published.yaml): what we predict under the same conditions.

It measures nothing. A bar is held against a figure only where its source says how the weights are stored and how the engine was started;
the others are printed beside our prediction all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from sparkd.capacity.fit import Option, floor
from sparkd.capacity.footprint import Footprint, Terms, footprint
from sparkd.capacity.kv_cache import KvCost, Serving, token_bytes
from sparkd.capacity.weights import Inventory, inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.classification import tensor_class
from sparkd.hardware import H200, SPARK, Hardware
from sparkd.models.shape import Attention, shape_of
from sparkd.vllm.releases import NEVER, READ_OFF
from sparkd.vllm.translate import release_of
from tests.bench.footprint_table import GIB, Row, within
from tests.support.accounts import kv_cost
from tests.support.published_headers import checkpoint_of, count_of
from workers.quantization.recipe import QuantizationRecipe

FIXTURES = Path(__file__).parents[1] / "fixtures"
# NVIDIA's data sheets; memory as the driver reports it.
H100 = replace(H200, name="h100", memory_bytes=int(79.2 * GIB), bandwidth_bytes_s=3.35e12)
# By what `format` begins with: (how its checkpoint is stored, what is made of it on load, whether that is what the source's engine had).
FORMATS: tuple[tuple[str, str, str, bool], ...] = (
    ("bf16", "bf16", "bf16", True),
    ("fp8 (128x128", "fp8_block", "bf16", True),
    ("fp8", "fp8_block", "bf16", False),
    ("int4", "bf16", "int4-g128", False),
    # NF4 in groups of 128, as that project's README has it: as many bits as our int4-g128.
    ("4 bits made on load", "bf16", "int4-g128", True),
    ("nvfp4", "as published", "bf16", True),
    ("mxfp4", "as published", "bf16", True),
)
# The published file leaves its tower out, the sibling's stands in for it.
BORROWED_TOWER = "qwen3.8-27b"


@dataclass(frozen=True, slots=True)
class Case:
    """One entry with the model it is about. known: whether weights and engine are the source's, so that a bar makes sense."""

    entry: Mapping[str, Any]
    inventory: Inventory
    recipe: QuantizationRecipe
    serving: Serving
    hardware: Hardware
    known: bool

    @property
    def conditions(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.entry["conditions"]
        return found

    @property
    def name(self) -> str:
        ways = f" TP={self.entry['tp']}" if self.entry["tp"] > 1 else ""
        return f"{self.entry['model']}{ways} {self.entry['format'].partition(' (')[0]}, {self.entry['hardware'].partition(' (')[0]}"

    @property
    def kv(self) -> KvCost:
        return kv_cost(self.inventory.shape, self.serving)

    def footprint(self, requests: float = 1) -> Footprint:
        eager, margin = bool(self.conditions.get("enforce_eager")), self.conditions.get("margin_gib")
        terms = Terms(requests=requests, eager=eager, margin_bytes=None if margin is None else int(margin * GIB))
        return footprint(self.inventory.formatted(self.recipe), self.serving, self.hardware, terms)


def rows(only: str) -> Iterator[Row]:
    """only: a regular expression, searched in the model's name."""
    for total in yaml.safe_load((FIXTURES / "totals.yaml").read_text()):
        if re.search(only, total["model"]):
            yield _total(total)
    entries = [one for one in yaml.safe_load((FIXTURES / "published.yaml").read_text()) if one["fixture"] and re.search(only, one["model"])]
    for what, compare in COMPARED.items():
        for entry in entries:
            if entry["what"] in what:
                yield from compare(case_of(entry))


def case_of(entry: Mapping[str, Any]) -> Case:
    given = dict(entry["conditions"])
    given |= {**given.get("inferred", {}), **given.get("assumed", {})}
    stored, made, known = next((one[1:] for one in FORMATS if entry["format"].startswith(one[0])), ("bf16", "bf16", False))
    if given.get("shape_only") and stored == "as published":
        # Another build of the same model: its list of formats is not known, all of it in that format is the nearest.
        stored, made, known = "bf16", "nvfp4" if "nvfp4" in entry["format"] else made, False
    if "FP8" in entry["model"] and stored == "bf16":
        stored = "fp8_block"
    if entry["format"].startswith("4 bits") and entry["fixture"].startswith("gpt-oss"):
        stored, made, known = "as published", "bf16", False
    if given.get("every_linear_4_bit"):
        stored = "mxfp4 throughout"
    # Whether a figure of no known run was with layers ahead is not known either.
    speculative = str(given.get("speculative") or "")
    ahead = speculative.startswith("mtp")
    known = known and not entry["fixture"].startswith(BORROWED_TOWER) and ("speculative" not in given or ahead or not speculative)
    found, shape = _model(entry["fixture"], stored, ahead, bool(given.get("language_model_only")))
    tokens = int(match[1]) if (match := re.search(r"mtp-(\d)", speculative)) else 0
    serving = Serving(
        entry["value"] if "needed_kv_gib" in given else given.get("max_model_len", shape.max_len),
        given.get("max_num_seqs", 256),
        given.get("max_num_batched_tokens", 8192),
        tensor_parallel=entry["tp"],
        pipeline_parallel=given.get("pipeline", 1),
        kv_dtype="fp8" if "fp8" in str(given.get("kv_dtype")) else "auto",
        prefix_caching=given.get("prefix_caching", True),
        speculative_tokens=tokens,
        draft_layers=shape.mtp_layers if tokens else 0,
        # An owner's log of a release that is not stated has two states, as the older ones.
        state_checkpoints=int((release_of(str(entry.get("vllm"))) or NEVER) >= READ_OFF),
    )
    hardware = SPARK if "Spark" in entry["hardware"] else H100
    return Case({**entry, "conditions": given}, found, QuantizationRecipe.parse(made), serving, hardware, known)


@lru_cache(maxsize=4)
def _model(fixture: str, stored: str, ahead: bool, text_only: bool) -> tuple[Inventory, Any]:
    checkpoint = _checkpoint(fixture, stored)
    if text_only:
        kept = {name: one for name, one in checkpoint.tensors.items() if tensor_class(name, one.shape) != "vision"}
        checkpoint = replace(checkpoint, tensors=kept)
    shape = shape_of(checkpoint.config)
    return inventory(checkpoint, shape, ahead=ahead), shape


@lru_cache(maxsize=4)
def _checkpoint(fixture: str, stored: str) -> Checkpoint:
    return checkpoint_of(fixture, stored)


def _total(total: Mapping[str, Any]) -> Row:
    count, value = count_of(total), total["value"]
    exact = "note" not in total["conditions"]
    unit = "bytes" if total["what"] == "checkpoint_bytes" else "elements"
    return Row("tensor lists", total["model"], count, value, unit, "exact" if exact else "", count == value if exact else None)


def _weights(case: Case) -> Iterator[Row]:
    parts = case.footprint().parts
    value, conditions = case.entry["value"], case.conditions
    whole = "weights and non-torch memory" in str(conditions.get("includes"))
    predicted = (parts["weights"] + (parts["context"] if whole else 0)) / GIB
    # The Triton kernels of an H100 lay scales out in a way of their own; a Spark has Marlin.
    other = whole or "Triton" in case.entry["format"] or "expert_parallel" in conditions
    doubt = str(conditions.get("doubt", "how it is stored, what is counted or which layers were loaded is not known"))
    bar = case.known and not other and "doubt" not in conditions
    passed = within(predicted, value, 0.01) if bar else None
    note = doubt if not bar else "the source rounds" if conditions.get("approximate") else ""
    yield Row("weights on a rank", case.name, predicted, value, "GiB", "1 %" if bar else "", passed, note)


def _tokens(case: Case) -> Iterator[Row]:
    conditions, value = case.conditions, case.entry["value"]
    unknown = "not readable" in str(conditions.get("kv_dtype")) or "kv_connector" in conditions or "dflash" in str(conditions)
    given = conditions.get("available_kv_gib", conditions.get("available_kv_gb"))
    if "needed_kv_gib" in conditions:
        predicted, needed = case.kv.per_request / GIB, conditions["needed_kv_gib"]
        held = abs(predicted - needed) <= 0.005
        yield Row("KV cache of one request", f"{case.name}, {value:,} tokens", predicted, needed, "GiB", "its rounding", held)
        return
    if given is None:
        if case.hardware is SPARK and "max_model_len" in conditions and "concurrency" in conditions:
            yield _room(case)
        return
    # A pipeline's first stage has the layer that does not divide.
    gib = float(given[0] if isinstance(given, list) else given)
    least, likely, most = (case.kv.tokens(int((gib + slack) * GIB)) for slack in (-0.005, 0.0, 0.005))
    exact = not unknown and not conditions.get("approximate")
    inferred = _listed("inferred", conditions)
    # Between the two roundings of the printed GiB, and of approximate figures that of the tokens.
    bar = "its rounding" if exact else ""
    yield Row(
        "KV cache of a given size",
        f"{case.name}, {gib} GiB",
        likely,
        value,
        "tokens",
        bar,
        least <= value <= most if exact else None,
        "the KV cache's dtype, or what else was in it, is not known" if unknown else "the source rounds" if not exact else inferred,
    )
    utilization = conditions.get("utilization")
    if isinstance(utilization, float) and case.hardware is SPARK:
        parts = case.footprint().parts
        beside = parts["weights"] + parts["context"] + parts["peak"] + parts["graphs"]
        measured = utilization * SPARK.memory_bytes - gib * GIB
        note = "" if case.known else "another build of the model"
        yield Row(BESIDE, f"{case.name}, utilization {utilization}", beside / GIB, measured / GIB, "GiB", note=note)


BESIDE = "what vLLM counts beside its cache: weights, context, the largest batch, graphs"


def _room(case: Case) -> Row:
    """The cache that we would give it on that machine, in requests: releases before 0.21 count a hybrid's tokens in another way."""
    predicted, conditions = case.kv.requests(max(0, case.footprint().room)), case.conditions
    told = "how much its engine and system take is not known"
    note = "; ".join(filter(None, (told, _listed("assumed", conditions))))
    shown = f"{case.name}, {case.entry['value']:,} tokens"
    return Row("KV cache of all that is left", shown, predicted, conditions["concurrency"], "requests", note=note)


def _listed(what: str, conditions: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in conditions.get(what, {}).items())
    return f"{what}: {told}" if told else ""


def _per_token(case: Case) -> Iterator[Row]:
    value, shape = case.entry["value"], case.inventory.shape
    if case.conditions.get("without_state"):
        predicted = float(sum(token_bytes(one, shape, case.serving) for one in shape.mixers if isinstance(one, Attention)))
        yield Row("KV bytes per token", case.name, predicted, value, "bytes", "exact", predicted == value)
        return
    # The source divides GiB by tokens and prints KiB as KB, to a tenth.
    stated = value / 1000 * 1024 if case.conditions.get("kb_is_kib") else value
    held = round(case.kv.per_token / 1024, 1) == round(stated / 1024, 1)
    yield Row("KV bytes per token", case.name, case.kv.per_token, stated, "bytes", "its rounding", held, "states included")


def _floor(case: Case) -> Iterator[Row]:
    conditions = case.conditions
    if conditions.get("direction") == "upper":
        return
    found = case.footprint()
    option = Option("", 1, 1, case.serving, found, None)
    memory = case.hardware.memory_bytes / GIB
    available = conditions.get("available_kv_gb", {})
    if "available_kv_gib" in conditions:
        available = {conditions["fails"][0]: conditions["available_kv_gib"]}
    for share in (*conditions["fails"], *conditions.get("works", ())):
        works = share not in conditions["fails"]
        _, _, left = floor(option, case.hardware, [share])[0]
        ours = left >= found.kv.least
        # Batch and capture sizes of the H100's are the source's own; its kernels are another card's.
        bar = case.known and case.hardware is SPARK
        measured = available.get(share)
        held = available.get(share) if isinstance(measured, float) else None
        note = f"{share * memory:.1f} GiB allowed; it {'works' if works else 'fails'} there, and {'works' if ours else 'fails'} here"
        passed = ours == works if bar else None
        yield Row(
            "left for the cache at a utilization",
            f"{case.name}, {share}",
            left / GIB,
            held,
            "GiB",
            "works or fails" if bar else "",
            passed,
            note,
        )


def _speed(case: Case) -> Iterator[Row]:
    conditions = case.conditions
    if conditions.get("total") or conditions.get("concurrency", 1) != 1:
        return
    bound = case.footprint().decode_tokens_s
    if bound is None:
        return
    # Every token that is guessed right comes for nothing.
    bound *= 1 + case.serving.speculative_tokens
    note = "" if not case.serving.speculative_tokens else f"with {case.serving.speculative_tokens} tokens guessed for each read"
    if doubt := conditions.get("doubt"):
        yield Row("decode of one request", case.name, bound, case.entry["value"], "tokens/s", note=doubt)
        return
    guessed = case.entry["format"] == "not stated"
    yield Row(
        "decode of one request",
        case.name,
        bound,
        case.entry["value"],
        "tokens/s",
        "" if guessed else "a bound",
        None if guessed else bound >= case.entry["value"],
        note or ("its format is not stated" if guessed else ""),
    )


def _load(case: Case) -> Iterator[Row]:
    found = case.footprint()
    note = f"its loader: {case.conditions.get('loader', 'not stated')}"
    yield Row("load", case.name, found.first_load_s, case.entry["value"], "s", note=f"{note}; ours reads at the disk's rate")


COMPARED = {
    ("weights_gib_per_rank",): _weights,
    ("kv_bytes_per_token",): _per_token,
    ("kv_tokens",): _tokens,
    ("utilization_floor",): _floor,
    ("decode_tokens_per_s",): _speed,
    ("load_s",): _load,
}
