"""Owns the questions to vLLM about one model: the question for a format and a split, their order, and the numbers of the answers.

Never starts anything: the caller provides the source of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkd.capacity.fit import FitRequest, recipes, ways_of
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.vllm_figures import Exact, exact_of
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.source import folder_of
from sparkd.hardware import Hardware
from sparkd.vllm.ask.answers import OWN, SPARK, ModelAnswer, ModelQuestion
from sparkd.vllm.ask.model import files_of
from sparkd.vllm.flags import LOAD_FORMAT, speculative_config, with_draft, without
from sparkd.vllm.unaccounted_args import REST
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe
from workers.vllm.ask.model_question import DRAFT

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


def nobody(questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
    """Answers for a place without vLLM."""
    return [None] * len(questions)


class Witness:
    """An `Ask` that knows whether any question through it was answered."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.answered = False

    def __call__(self, questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
        answers = self._ask(questions)
        self.answered = self.answered or any(answer is not None for answer in answers)
        return answers


class Answers:
    """Asks no question twice: a plan makes many accounts of one model."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._kept: dict[object, ModelAnswer | None] = {}

    def ask(self, questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
        unanswered = {key: question for question in questions if (key := _identity(question)) not in self._kept}
        if unanswered:
            self._kept.update(zip(unanswered, self._ask(list(unanswered.values())), strict=True))
        return self.kept(questions)

    def kept(self, questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
        """The answers to those that were asked before, without asking."""
        return [self._kept.get(_identity(question)) for question in questions]


def _identity(question: ModelQuestion) -> object:
    model = question.folder, tuple(question.files.items())
    split = question.tensor_parallel, question.pipeline_parallel
    draft = None if question.draft is None else question.draft.folder
    return model, draft, tuple(question.tensors), question.args, tuple(sorted(question.env.items())), split, question.platform


class Consultation:
    """checkpoint: may lie on a hub, and may have one tensor for all experts of a layer that are alike. args, env: of the engine, as a start
    has them. hardware: the answer is for its GPU. draft: the headers of the one that args name, where they were read."""

    def __init__(
        self,
        ask: Ask,
        checkpoint: Checkpoint,
        args: Iterable[str],
        env: Mapping[str, str],
        hardware: Hardware,
        draft: Checkpoint | None = None,
    ) -> None:
        self._ask = ask
        self._checkpoint = checkpoint
        self._draft = draft if draft is not None and not draft.folder.startswith("/") else None
        self._args = _drafting(without([*args], *_WITHOUT), env, self._draft)
        self._env = dict(env)
        self._device = hardware.platform
        # A node's own runtime knows its own GPU.
        own = hardware.platform == "cpu" or hardware.name == "node"
        self._platform = OWN if own else _H200 if hardware.name == "h200" else SPARK
        self._here = (Path(checkpoint.folder) / checkpoint.config_file).is_file()
        self._files = {} if self._here else files_of(checkpoint)
        self._tensors = () if self._here else tuple(checkpoint.tensors.values())
        self._answers: dict[Way, ModelAnswer | None] = {}

    def ask(self, ways: Iterable[Way]) -> None:
        """Ask about the first MOST_QUESTIONS of these."""
        wanted = [way for way in dict.fromkeys(ways) if way not in self._answers][:MOST_QUESTIONS]
        if wanted:
            answers = self._ask([self._question(way) for way in wanted])
            self._answers |= {way: answer for way, answer in zip(wanted, answers, strict=True) if answer is None or self._is_for(answer)}

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
        return exact or Exact()

    def informed(self, inventory: Inventory, wish: FitRequest) -> tuple[Inventory, FitRequest]:
        """Both with vLLM's numbers: first those of every split, which settle the cache for all formats, then those of the formats, best
        first."""
        splits = ways_of(wish)
        stored = [(AS_IT_IS, *split) for split in splits]
        self.ask([*stored, *((recipe, *split) for _, recipe in recipes(inventory, wish.quantize) for split in splits)])
        return self.completed(inventory), replace(wish, exact=self.exact)

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


def _drafting(args: Sequence[str], env: Mapping[str, str], elsewhere: Checkpoint | None) -> list[str]:
    """A draft by its folder: the process that is asked has not got the engine's place of downloads. elsewhere: one that is not on this
    machine, which goes with the question."""
    config = speculative_config(args)
    if config is None or "/" not in str(config.get("model")):
        return list(args)
    folder = folder_of(config["model"], config.get("revision"), env) if elsewhere is None else DRAFT
    return list(args) if folder is None else with_draft(args, folder)
