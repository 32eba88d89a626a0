"""Owns what vLLM's own answer about a model puts in place of sparkd's formulas: how the layers share the cache, what the weights of a rank
take, and why vLLM would refuse a split. Never asks anything (sparkd.consultation).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkd.kv_cost import KvLayout, Serving
from sparkd.model_answers import Answer, Layer, Stage
from sparkd.uncounted import CACHE, WEIGHTS
from sparkd.weight_cost import Weights

# How sure a plan's numbers are: vLLM's own or measured; a formula that the tests hold against vLLM's answer; a formula alone.
EXACT, KNOWN, GUESS = "exact", "known", "guess"


@dataclass(frozen=True, slots=True)
class Exact:
    """vLLM's word on one engine in one format and one split. layout: None where this vLLM cannot say. weight_bytes: of the parameters and
    buffers of the fullest rank, None where the answer is about another format. refusal: vLLM's sentence, without a full stop, None
    where it takes the model so."""

    layout: KvLayout | None = None
    weight_bytes: int | None = None
    refusal: str | None = None

    def settles(self, unknown: Collection[str]) -> bool:
        """Whether it has everything that flags change in a way that no formula has. unknown: as sparkd.uncounted.changed_by names it."""
        answered = {CACHE: self.layout is not None, WEIGHTS: self.weight_bytes is not None}
        return all(answered.get(change, False) for change in unknown)

    def weigh(self, formula: Weights) -> Weights:
        """The weights as vLLM has them, in the classes that the formula sees."""
        if self.weight_bytes is None or not formula.bytes:
            return formula
        share = self.weight_bytes / formula.bytes
        by_kind = {kind: int(size * share) for kind, size in formula.by_kind.items()}
        by_kind[max(by_kind, key=lambda kind: by_kind[kind])] += self.weight_bytes - sum(by_kind.values())
        return replace(formula, by_kind=by_kind, active_bytes=int(formula.active_bytes * share))


def exact_of(answer: Answer, serving: Serving, *, same_format: bool) -> Exact | None:
    """None where the answer says nothing certain. same_format: whether it is about the weights that are counted."""
    if answer.refusal is not None and answer.refusal.step != "cache":
        return Exact(refusal=" ".join(answer.refusal.message.split()).rstrip(".")) if answer.refusal.certain else None
    if len(answer.stages) != serving.pipeline_parallel:
        return None
    weight_bytes = max(stage.parameter_bytes + stage.buffer_bytes for stage in answer.stages)
    return Exact(_layout(answer, serving), weight_bytes if same_format else None)


def _layout(answer: Answer, serving: Serving) -> KvLayout | None:
    """None where the answer does not say it, or in a way that no layout has."""
    layers = {layer.name: layer for stage in answer.stages for layer in stage.layers}
    if not layers:
        return KvLayout(0, (), serving)
    fullest = max(answer.stages, key=lambda stage: stage.block_bytes)
    if not answer.groups or not fullest.block_bytes:
        return None
    groups = tuple(_group(group, layers) for group in answer.groups)
    layout = KvLayout(fullest.block_bytes, groups, serving)
    states = sum(not tokens for tokens, *_ in groups)
    if not fullest.requests:
        return layout
    if not states:
        return _counted(layout, fullest, answer)
    # How many blocks a request's state takes follows from the release: a request of one token has nothing else but a block of each group.
    attention = replace(layout, groups=tuple(group for group in groups if group[0]))
    ends = fullest.requests[0], fullest.requests[-1]
    first, last = ((size // fullest.block_bytes - attention.cost(tokens).blocks) // states for tokens, size in ends)
    if first != last and all(window is None for _, window, _ in attention.groups):
        return None  # states that are kept at every so many tokens (--mamba-cache-mode all)
    return _counted(replace(layout, state_blocks=first), fullest, answer)


def _counted(layout: KvLayout, stage: Stage, answer: Answer) -> KvLayout | None:
    """With as many batches in flight as vLLM counts for this model; None where none of them gives its own sizes of requests. A stage of
    several may lack some groups."""
    tokens = answer.facts.get("max_num_batched_tokens")
    if not isinstance(tokens, int):
        return layout
    for batches in dict.fromkeys((layout.serving.batches_in_flight, 1)):
        serving = replace(layout.serving, batches_in_flight=batches)
        asked = replace(layout, serving=replace(serving, max_num_batched_tokens=tokens))
        if all(asked.cost(length).per_request == size for length, size in stage.requests):
            return replace(layout, serving=serving)
    return layout if len(answer.stages) > 1 else None


def _group(group: Mapping[str, Any], layers: Mapping[str, Layer]) -> tuple[int, int | None, bool]:
    """As sparkd.kv_cost.KvLayout has it."""
    first = next((layers[name] for name in group["layers"] if name in layers), None)
    # What a decoder keeps of its encoder's output is of one length, like a state.
    if first is None or first.state_bytes or first.spec == "CrossAttentionSpec":
        return 0, None, False
    return int(group["block"]), first.window or first.chunk, first.chunk is not None
