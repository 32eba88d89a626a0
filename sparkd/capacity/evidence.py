"""Evidence that overrides the estimate of a model's memory: vLLM's answers about it, and measurements of earlier starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkd.capacity.formats import recipes
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import KvLayout, Serving
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint import Checkpoint
from sparkd.config.engine_args import EngineArgs
from sparkd.config.quantize import canonical
from sparkd.hardware import Hardware
from sparkd.vllm.ask.answers import OWN, SPARK, LayerCache, ModelAnswer, ModelQuestion, Stage
from sparkd.vllm.ask.model import files_of
from sparkd.vllm.flags import LOAD_FORMAT, with_draft, without
from sparkd.vllm.unaccounted_args import CACHE, OTHER, REST, WEIGHTS
from workers.kv.arithmetic import Demand
from workers.kv.profiles import KeptProfile
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe
from workers.vllm.ask.model_question import DRAFT

# How sure a plan's numbers are: vLLM's own, or those of a rough estimate.
EXACT, GUESS = "exact", "guess"
Ask = Callable[[Sequence[ModelQuestion]], Sequence[ModelAnswer | None]]
# A format and a split: recipe, tensor-parallel and pipeline-parallel size.
Way = tuple[QuantizationRecipe, int, int]
# Flags of a start on which neither the cache of a token nor the weights depend, and those that no answer tells of. No question runs a
# model's code (trust-remote-code).
_WITHOUT = REST | {
    "max-num-seqs", "max-num-batched-tokens", "enforce-eager", "trust-remote-code", "override-generation-config",
    "enable-auto-tool-choice", "tool-call-parser", "reasoning-parser", "code-revision", "tokenizer-revision",
}  # fmt: skip
_H200 = "cuda:9.0"
# Fields of a shape, and the facts of an answer that they are.
_SIZES = (("max_len", "max_model_len"), ("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("vocab", "vocabulary"))
# Further questions would take a minute and change no choice of a plan.
MOST_QUESTIONS = 16
# These flags alone are known to leave an engine's memory as it is. Any other flag makes it another engine, whose profile is
# not believed.
_TALK = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice", "override-generation-config")
# Prefixes of the variables that vLLM, torch, NCCL and the kernels read. No prefix admits a secret such as a hub token.
FAMILIES = ("VLLM_", "TORCH", "PYTORCH_", "NCCL_", "CUDA_", "CUBLAS", "FLASHINFER_", "TRITON_", "OMP_", "SPARKD_")
# The name of each known machine's GPU: a profile is that of the machine that it was made on. `node` is the one that asks.
_DEVICES = {"spark": "GB10", "h200": "H200", "node": ""}
# Tensor-parallel and pipeline-parallel size.
Ways = tuple[int, int]


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


NO_ANSWER = Exact()


def exact_of(answer: ModelAnswer, serving: Serving, *, same_format: bool) -> Exact | None:
    """None where the answer says nothing certain.

    same_format: whether the answer is about the format whose weights are counted.
    """
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


def nobody(questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
    """Answers for a place without vLLM."""
    return [None] * len(questions)


class Consultation:
    """Asks vLLM about one model.

    checkpoint: may lie on a hub, and may have one tensor for all experts of a layer that are alike.
    args, env: of the engine, as a start has them.
    hardware: the answer is for its GPU.
    draft: the headers of the one that args name, where they were read.
    draft_folder: where it is on this machine: the process that is asked has not got the engine's place of downloads.
    """

    def __init__(
        self,
        ask: Ask,
        checkpoint: Checkpoint,
        args: Iterable[str],
        env: Mapping[str, str],
        hardware: Hardware,
        draft: Checkpoint | None = None,
        draft_folder: str | None = None,
    ) -> None:
        self._ask = ask
        self._checkpoint = checkpoint
        self._draft = draft if draft is not None and not draft.folder.startswith("/") else None
        words, place = without([*args], *_WITHOUT), draft_folder if self._draft is None else DRAFT
        self._args = words if place is None else with_draft(words, place)
        self._env = dict(env)
        self._device = hardware.platform
        # A node's own runtime knows its own GPU.
        own = hardware.platform == "cpu" or hardware.name == "node"
        self._platform = OWN if own else _H200 if hardware.name == "h200" else SPARK
        self._here = (Path(checkpoint.folder) / checkpoint.config_file).is_file()
        self._files = {} if self._here else files_of(checkpoint)
        self._tensors = () if self._here else tuple(checkpoint.tensors.values())
        self._answers: dict[Way, ModelAnswer | None] = {}

    def ask(self, ways: Iterable[Way], ask: Ask | None = None) -> None:
        """Ask about the first MOST_QUESTIONS of these that were not asked about before. ask: in place of the consultation's own."""
        wanted = [way for way in dict.fromkeys(ways) if way not in self._answers][:MOST_QUESTIONS]
        if wanted:
            answers = (ask or self._ask)([self._question(way) for way in wanted])
            self._answers |= {way: answer for way, answer in zip(wanted, answers, strict=True) if answer is None or self._is_for(answer)}

    @property
    def answered(self) -> bool:
        """Whether any question was answered."""
        return any(answer is not None for answer in self._answers.values())

    @property
    def unanswered(self) -> int:
        """How many questions have no answer."""
        return sum(answer is None for answer in self._answers.values())

    def exact(self, recipe: QuantizationRecipe, serving: Serving) -> Exact:
        """vLLM's answer; without a number where it gave none. For a format that no question was about, the cache alone, which no format
        changes."""
        split = serving.tensor_parallel, serving.pipeline_parallel
        own = self._answers.get((recipe, *split))
        exact = exact_of(own, serving, same_format=True) if own is not None else None
        if exact is None and recipe.quantizes:
            stored = self._answers.get((AS_IT_IS, *split))
            exact = exact_of(stored, serving, same_format=False) if stored is not None else None
            if exact is not None and exact.refusal is not None and self._checkpoint.quantization is not None:
                exact = None  # it may be the stored format that vLLM does not split or does not run
        return exact or NO_ANSWER

    def ask_formats(self, inventory: Inventory, quantize: QuantizationRecipe | None, splits: Sequence[Ways], ask: Ask) -> None:
        """Ask about the model as stored at every split, which settles the cache for all formats, then about each format, best first.

        quantize: as in sparkd.capacity.formats.recipes.
        """
        stored = [(AS_IT_IS, *split) for split in splits]
        self.ask([*stored, *((recipe, *split) for _, recipe in recipes(inventory, quantize) for split in splits)], ask)

    def completed(self, inventory: Inventory) -> Inventory:
        """The inventory with vLLM's own sizes of the model in place of those that config.json lacks, and with its longest request."""
        shape, answers = inventory.shape, [answer for answer in self._answers.values() if answer is not None]
        sizes: dict[str, Any] = {}
        for field, name in _SIZES:
            size = next((size for answer in answers if isinstance(size := answer.facts.get(name), int) and size), 0)
            if size and (field == "max_len" or not getattr(shape, field)):
                sizes[field] = size
        return replace(inventory, shape=replace(shape, **sizes))

    def doubt(self) -> str | None:
        """The reason why there is no certain answer, in vLLM's words; None where there is one. It may be about this machine alone."""
        refusals = (answer.refusal for answer in self._answers.values() if answer is not None)
        return next((refusal.message for refusal in refusals if refusal is not None and not refusal.certain), None)

    def _is_for(self, answer: ModelAnswer) -> bool:
        """Whether it is about the device of the plan: a runtime that has another GPU answers for that GPU."""
        return answer.platform.startswith(self._device) if self._platform == OWN else answer.platform == self._platform

    def _question(self, way: Way) -> ModelQuestion:
        recipe, tensor_parallel, pipeline_parallel = way
        args = self._args
        if recipe.quantizes:
            loader = json.dumps({"quantize": recipe.canonical(), "cache_dir": None}, sort_keys=True)
            args = [*args, "--load-format", LOAD_FORMAT, "--model-loader-extra-config", loader]
        return ModelQuestion(
            folder=Path(self._checkpoint.folder) if self._here else None,
            files=self._files,
            tensors=self._tensors,
            args=tuple(args),
            env=self._env,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            platform=self._platform,
            draft=self._draft,
        )


def engine_of(flags: Sequence[str], quantize: Any, env: Mapping[str, str], vllm: str | None, platform: str) -> str:
    """A digest of an entry without any `auto`.

    flags: of sparkd.config.engine_flags.flags_of.
    quantize: of sparkd.config.quantize.canonical.
    env: the engine's.
    vllm: its version; None if it is unknown.
    """
    heard = {name: value for name, value in env.items() if name.startswith(FAMILIES)}
    parts = [list(_memory_flags(flags)), quantize, sorted(heard.items()), vllm, platform]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def peaks_of(
    profiles: Sequence[KeptProfile], engine: str, checkpoint: str | None, ways: tuple[int, int], hardware: str = "node"
) -> Demand | None:
    """The last measurements of this engine's rank 0 at this split; None if it never ran on this node.

    profiles: the newest first.
    checkpoint: the digest of its weight files (workers.kv.profiles.checkpoint_of).
    ways: tensor and pipeline size.
    hardware: a name of sparkd.hardware, or `node`.
    """
    device = _DEVICES.get(hardware)
    if device is None or checkpoint is None:
        return None
    about = {"checkpoint": checkpoint, "world": [*ways, 0]}
    own = (kept for kept in profiles if kept.engine == engine and device in kept.about.get("device", ""))
    measured = next((kept.profile for kept in own if about.items() <= kept.about.items()), None)
    return None if measured is None else measured.demand


def _memory_flags(flags: Sequence[str]) -> Iterator[str]:
    skipped = False
    for flag in flags:
        if flag.startswith("--"):
            skipped = flag[2:].partition("=")[0].replace("_", "-") in _TALK
        if not skipped:
            yield flag


@dataclass(frozen=True, slots=True)
class Evidence:
    """Numbers that override a formula.

    profiles: measurements of earlier starts on this machine, by the engine's release `vllm`.
    ask: vLLM's answers about a model.
    """

    profiles: tuple[KeptProfile, ...] = ()
    vllm: str | None = None
    ask: Ask = nobody

    def consultation(self, args: EngineArgs, headers: Headers, hardware: Hardware) -> Consultation:
        drafting = headers.drafting
        draft, folder = (None, None) if drafting is None else (drafting.draft, drafting.folder)
        return Consultation(self.ask, headers.model.checkpoint, args.flags, args.env, hardware, draft, folder)

    def learned(self, args: EngineArgs, headers: Headers, ways: Ways, hardware: Hardware) -> Demand | None:
        """The measurements of an earlier start of this engine."""
        if not self.profiles:
            return None
        engine = engine_of(args.flags, canonical(args.spec.quantize), args.env, self.vllm, hardware.platform)
        return peaks_of(self.profiles, engine, headers.identity, ways, hardware.name)


NOTHING = Evidence()
