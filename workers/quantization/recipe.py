"""A recipe: which weight of a checkpoint gets which format. Imports no torch.

`quantize:` is a format (formats.SPELLINGS; int4 is int4-g128, nf4 is nf4-g64) or a mapping:

    format: nvfp4              # of every weight that no rule names; bf16 (its own precision) where this is left out
    group_size: 64             # of every int4 and nf4 that does not say its own
    layers:                    # rules: a list, or in short {PATTERN: FORMAT}; rules.FormatRule tells what a pattern is
      - {match: o_proj, format: fp8, priority: 10}
      - {match: [layers.0.*, class:lm_head], format: fp8}
    keep: [shared_expert]      # rules too: what these match keeps its precision
    calibration: /srv/text.txt # of nvfp4-a4: the text over which the inputs of the layers are measured, in place of sparkd's own

A rule overrides `format`. Where several rules match a weight, the highest priority wins (default 0), then the pattern with more literal
components, then the one with more literal characters, then the later one; `keep` counts as later than `layers`. Embeddings, routers, norms,
biases, and tensors with fewer than two dimensions or with one under 64 are never quantized; rules.kept_unless_named lists the weights that
only a rule that names them changes.

Weights that vLLM multiplies as one matrix get one format: q/k/v, gate/up and the like, and all experts of a layer. Where rules split them,
the choice with the highest priority holds for all, then the more precise one, and Assignment.adjustments reports it once. Where such a
matrix does not consist of whole blocks of 128 rows, fp8-block becomes fp8, and adjustments reports that; where a rule names fp8-block for
the weight itself, it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.errors import ConfigError
from workers.quantization.assignment import BARRED, BF16, Assignment, FormatChoice, assign
from workers.quantization.best_wish import best_of
from workers.quantization.calibration_text import text_of
from workers.quantization.formats import Format, built_size, refused, refused_together
from workers.quantization.plain import PLAIN, UNCHANGED
from workers.quantization.rules import NEVER, FormatRule, kept_unless_named

__all__ = ["AS_IT_IS", "Assignment", "Format", "FormatRule", "QuantizationRecipe"]

# Every rule is matched against every weight.
MAX_RULES = 256
# The most refusals of one value in one message.
_MOST_TOLD = 20
MAX_PATH_CHARACTERS = 4096
_KEYS = ("format", "group_size", "layers", "keep", "calibration")
_RULE_KEYS = ("match", "format", "group_size", "priority")


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """A parsed `quantize:` value.

    default: the format of a weight that no rule matches.
    calibration: a text file's path, None for sparkd's own text.
    """

    default: Format
    rules: tuple[FormatRule, ...] = ()
    calibration: str | None = None

    @staticmethod
    def parse(value: str | Mapping[str, Any] | None) -> QuantizationRecipe:
        """Parse a `quantize:` value, None for plain loading. Raises ConfigError, which names the key, the fault and the possible values."""
        if value is None:
            return AS_IT_IS
        if best_of(value) is not None:
            raise refused("quantize", "best becomes a recipe when sparkd places the model; give that of `sparkd plan --json`, or a format")
        if not isinstance(value, Mapping):
            return QuantizationRecipe(Format.parse(value))
        return _from_mapping(value)

    @property
    def quantizes(self) -> bool:
        """False for plain loading: no weight can get a format other than its own."""
        return not (self.default.keeps and all(rule.format.keeps for rule in self.rules))

    @property
    def rounds_activations(self) -> bool:
        """Whether it has a format with 4-bit activations."""
        return any(form.rounds_activations for form in (self.default, *(rule.format for rule in self.rules)))

    def canonical(self) -> dict[str, Any]:
        """The recipe as JSON-able values that `parse` reads back, for hashes, cache keys and vLLM's loader configuration."""
        layers = [{"match": rule.match, "format": rule.format.spelling, "priority": rule.priority} for rule in self.rules]
        text = {} if self.calibration is None else {"calibration": self.calibration}
        return {"format": self.default.spelling, "layers": layers, **text}

    def assign(self, checkpoint: Checkpoint) -> Assignment:
        """The format of every weight that is quantized, by module path, in the order of the checkpoint. See Assignment.

        A checkpoint whose quantization the loader cannot undo (four bits, or an unknown method) passes through unchanged. Raises
        CheckpointError for packed FP8 experts in an unknown layout or without scales, for a weight that a rule names for fp8-block and vLLM
        cannot load that way, and for a calibration text that cannot be used.
        """
        if not self.quantizes:
            return Assignment()
        source = checkpoint.quantization
        if source is not None and not source.requantizable:
            return Assignment((), [f"The checkpoint is quantized already ({source.method}) and is served unchanged."])
        model_type = str(checkpoint.config.get("model_type"))
        if model_type in UNCHANGED:
            return Assignment((), [UNCHANGED[model_type]])
        plain, why = PLAIN.get(model_type, (frozenset(), ""))
        deciding, sentences = _Deciding(self), set[str]()

        def choose(module: str, kind: str) -> FormatChoice:
            choice = deciding.choice(module, kind)
            if choice.format.keeps or module.rpartition(".")[2] not in plain:
                return choice
            sentences.add(why)
            return BARRED

        assignment = assign(checkpoint, choose)
        if self.calibration is not None:
            text_of(self.calibration)
        assignment.adjustments = (*sentences, *assignment.adjustments, *_unmet(self.rules, deciding.idle, deciding.barred))
        return assignment


class _Deciding:
    """The choices of a recipe for one checkpoint's weights.

    idle: rules that have matched no weight so far.
    barred: rules that name a weight that is never quantized, with its class.
    """

    def __init__(self, recipe: QuantizationRecipe) -> None:
        self._default = recipe.default
        self._rules = recipe.rules
        self.idle = set(recipe.rules)
        self.barred: dict[FormatRule, str] = {}

    def choice(self, module: str, kind: str) -> FormatChoice:
        """The choice for one weight.

        module: dotted path without `.weight`.
        kind: its tensor_class.
        """
        components = module.split(".")
        leaf, kept = components[-1], kept_unless_named(module, kind)
        touching = [rule for rule in self._rules if rule.matches(components, kind)]
        self.idle.difference_update(touching)
        if kind in NEVER:
            self.barred.update((rule, kind) for rule in touching if not rule.format.keeps and rule.names((leaf,), kind))
            return BARRED
        if kept:
            touching = [rule for rule in touching if rule.format.keeps or rule.names(kept, kind)]
        if not touching:
            return FormatChoice(BF16 if kept else _served(self._default, leaf), (0, 0))
        holds = max(reversed(touching), key=lambda rule: rule.rank)
        parts = (leaf, *(("experts",) if kind == "expert" else ()))
        return FormatChoice(_served(holds.format, leaf), (1, holds.priority), holds.names(parts, kind))


def _served(form: Format, leaf: str) -> Format:
    """vLLM takes MLA's kv_b_proj apart by multiplying it with unit vectors (get_and_maybe_dequant_weights): activations in four bits would
    make its parts wrong by up to 3 %."""
    return Format(form.weight_name) if leaf == "kv_b_proj" and form.rounds_activations else form


def _unmet(rules: tuple[FormatRule, ...], idle: set[FormatRule], barred: Mapping[FormatRule, str]) -> Iterator[str]:
    for rule in rules:
        if rule in idle:
            yield f"{rule.source}: {rule.match!r} matches no weight of this checkpoint."
        elif rule in barred:
            yield f"{rule.source}: {rule.match!r} names a weight of class {barred[rule]}, which vLLM has in no quantized form: it is kept."


def _from_mapping(value: Mapping[str, Any]) -> QuantizationRecipe:
    wrong: list[ConfigError] = []
    with _told(wrong):
        _no_unknown(value, _KEYS, "quantize")
    size, default = value.get("group_size"), BF16
    if size is not None:
        with _told(wrong):
            built_size(size)
        size = None if wrong else size
    if value.get("format") is not None:
        with _told(wrong):
            default = Format.parse(value["format"], where="quantize.format", group_size=size)
    rules: tuple[FormatRule, ...] = ()
    with _told(wrong):
        rules = tuple(_limited(chain(_layers(value.get("layers"), size, wrong), _keep(value.get("keep")))))
    if wrong:
        raise refused_together(wrong)
    if size is not None and not any(each.group_size for each in (default, *(rule.format for rule in rules))):
        raise refused("quantize.group_size", "only int4 and nf4 have a group size to choose, and nothing here is either; leave it out")
    recipe = QuantizationRecipe(default, rules, _calibration(value.get("calibration")))
    if recipe.calibration is not None and not recipe.rounds_activations:
        raise refused("quantize.calibration", "only nvfp4-a4 is calibrated, and nothing here is; leave it out")
    return recipe


def _calibration(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value.startswith("/") and "\0" not in value and len(value) < MAX_PATH_CHARACTERS):
        return value
    raise refused("quantize.calibration", f"{str(value)[:100]!r} is not the path of a text file; write one that begins with /")


@contextmanager
def _told(wrong: list[ConfigError]) -> Iterator[None]:
    """Collect a refusal in `wrong`, so that one error reports all of them."""
    try:
        yield
    except ConfigError as error:
        wrong.append(error)


def _limited(rules: Iterable[FormatRule]) -> Iterator[FormatRule]:
    for count, rule in enumerate(rules, 1):
        if count > MAX_RULES:
            raise refused("quantize", f"it has more than {MAX_RULES} rules; write one pattern for several names")
        yield rule


def _layers(value: Any, group_size: int | None, wrong: list[ConfigError]) -> Iterator[FormatRule]:
    """Parse the rules: a list of {match, format, group_size, priority}, or {pattern: format or the same without match}. wrong: collects
    the refusals."""
    if value is None:
        return
    if isinstance(value, Mapping):
        value = [{"match": match, **(what if isinstance(what, Mapping) else {"format": what})} for match, what in value.items()]
    if not isinstance(value, (list, tuple)):
        raise refused("quantize.layers", "a list of {match, format, priority}, or a mapping {pattern: format}, is expected")
    for index, entry in enumerate(value):
        with _told(wrong):
            yield from _rules_of(entry, f"quantize.layers[{index}]", group_size)
        if len(wrong) >= _MOST_TOLD:
            return


def _rules_of(entry: Any, where: str, group_size: int | None) -> Iterator[FormatRule]:
    if not isinstance(entry, Mapping):
        raise refused(where, "{match: PATTERN, format: FORMAT} is expected")
    _no_unknown(entry, _RULE_KEYS, where)
    wanted = {key: entry[key] for key in ("format", "group_size") if entry.get(key) is not None}
    chosen = Format.parse(wanted, where=where, group_size=group_size)
    priority = entry.get("priority", 0)
    if type(priority) is not int or abs(priority) > 1_000_000:
        raise refused(f"{where}.priority", f"{priority!r} is not a whole number; the rule with the largest wins, and 0 is the default")
    yield from (FormatRule(match, chosen, priority, f"{where}.match") for match in _patterns(entry.get("match"), f"{where}.match"))


def _keep(value: Any) -> Iterator[FormatRule]:
    if value is not None:
        yield from (FormatRule(match, BF16, source="quantize.keep") for match in _patterns(value, "quantize.keep"))


def _patterns(value: Any, where: str) -> list[str]:
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    if not patterns and value != []:
        raise refused(where, "a pattern or a list of patterns is expected, such as o_proj or layers.0.*")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip():
            raise refused(where, f"{pattern!r} is not a pattern; o_proj, layers.0.*, moe and class:lm_head are")
    return [pattern.strip() for pattern in patterns]


def _no_unknown(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in value:
        if key not in keys:
            import difflib

            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"; did you mean {near[0]}" if near else ""
            raise refused(where, f"the key {key!r} is not known{hint}; known are {', '.join(keys)}")


# The recipe that leaves a model as it is stored.
AS_IT_IS = QuantizationRecipe(BF16)
