"""Owns the numbers that vLLM's own answer about a model puts in place of sparkd's formulas: how the layers share the cache, the bytes of a
rank's weights, and the reason why vLLM refuses a split. Never asks anything (sparkd.capacity.consultation).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkd.capacity.kv_cache import KvLayout, Serving
from sparkd.vllm.ask.answers import LayerCache, ModelAnswer, Stage
from sparkd.vllm.unaccounted_args import CACHE, OTHER, WEIGHTS

# How sure a plan's numbers are: vLLM's own, or those of a rough estimate.
EXACT, GUESS = "exact", "guess"


@dataclass(frozen=True, slots=True)
class Exact:
    """vLLM's numbers for one engine in one format and one split.

    layout: None where this vLLM cannot say.
    weight_bytes: of the parameters and buffers of the fullest rank; None where the answer is about another format.
    refusal: vLLM's sentence, without a full stop; None where vLLM serves the model.
    """

    layout: KvLayout | None = None
    weight_bytes: int | None = None
    refusal: str | None = None

    @property
    def decides(self) -> bool:
        """Whether it has numbers or a refusal, which replace the formulas' own."""
        return self.layout is not None or self.weight_bytes is not None or self.refusal is not None

    @property
    def settled(self) -> frozenset[str]:
        """The changes of flags that it counts, as sparkd.vllm.unaccounted_args.changed_by names them."""
        answered = {CACHE: self.layout is not None, WEIGHTS: self.weight_bytes is not None}
        return frozenset(change for change, is_answered in answered.items() if is_answered)

    def guesses(self, unknown: Collection[str]) -> frozenset[str]:
        """Which of WEIGHTS and CACHE stay a guess. unknown: as sparkd.vllm.unaccounted_args.changed_by names it."""
        return frozenset({WEIGHTS, CACHE}) if OTHER in unknown else frozenset({WEIGHTS, CACHE}) - self.settled


def exact_of(answer: ModelAnswer, serving: Serving, *, same_format: bool) -> Exact | None:
    """None where the answer says nothing certain. same_format: whether the answer is about the format whose weights are counted."""
    refusal = answer.refusal
    if refusal is not None and refusal.certain:
        return Exact(refusal=" ".join(refusal.message.split()).rstrip("."))
    if refusal is not None and refusal.step not in ("cache", "sizes"):
        return None
    if len(answer.stages) != serving.pipeline_parallel:
        return None
    weight_bytes = max(stage.parameter_bytes + stage.buffer_bytes for stage in answer.stages) if same_format else None
    if refusal is not None:
        return Exact(weight_bytes=weight_bytes)
    return Exact(_layout(answer, serving), weight_bytes)


def _counts_blocks(answer: ModelAnswer) -> bool:
    """Whether this release of vLLM tells how its block pool holds the layers."""
    return bool(answer.groups) and any(stage.block_bytes for stage in answer.stages)


def _layout(answer: ModelAnswer, serving: Serving) -> KvLayout | None:
    """None where the answer does not tell, or where its sizes are those of no layout."""
    layers = {layer.name: layer for stage in answer.stages for layer in stage.layers}
    if not layers:
        return KvLayout(0, (), serving)
    if not _counts_blocks(answer):
        return None
    fullest = max(answer.stages, key=lambda stage: stage.block_bytes)
    groups = tuple(_group(group, layers) for group in answer.groups)
    layout = KvLayout(fullest.block_bytes, groups, serving)
    states = sum(not tokens for tokens, *_ in groups)
    if not fullest.requests:
        return layout
    if not states:
        return _counted(layout, fullest, answer)
    # How many blocks a request's state takes depends on the release: a request of one token takes those and one block of each other group.
    attention = replace(layout, groups=tuple(group for group in groups if group[0]))
    ends = fullest.requests[0], fullest.requests[-1]
    first, last = ((size // fullest.block_bytes - attention.cost(tokens).blocks) // states for tokens, size in ends)
    if first != last and all(window is None for _, window, _ in attention.groups):
        return None  # a request keeps its state again after every so many tokens (--mamba-cache-mode all)
    return _counted(replace(layout, state_blocks=first), fullest, answer)


def _counted(layout: KvLayout, stage: Stage, answer: ModelAnswer) -> KvLayout | None:
    """The layout with as many batches in flight as vLLM counts for this model. None where no number of batches gives vLLM's own sizes of
    requests. A stage of several may lack some groups."""
    tokens = answer.facts.get("max_num_batched_tokens")
    if not isinstance(tokens, int):
        return layout
    for batches in dict.fromkeys((layout.serving.batches_in_flight, 1)):
        serving = replace(layout.serving, batches_in_flight=batches)
        answered = replace(layout, serving=replace(serving, max_num_batched_tokens=tokens))
        if all(answered.cost(length).per_request == size for length, size in stage.requests):
            return replace(layout, serving=serving)
    return layout if len(answer.stages) > 1 else None


def _group(group: Mapping[str, Any], layers: Mapping[str, LayerCache]) -> tuple[int, int | None, bool]:
    """(block tokens, window or None, whether it is a chunk) of a group, for sparkd.capacity.kv_cache.KvLayout."""
    first = next((layers[name] for name in group["layers"] if name in layers), None)
    # A decoder keeps its encoder's output at one length, like a state.
    if first is None or first.state_bytes or first.spec == "CrossAttentionSpec":
        return 0, None, False
    return int(group["block"]), first.window or first.chunk, first.chunk is not None
