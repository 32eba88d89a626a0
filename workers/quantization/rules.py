"""Matches rules against weights, and says which weights keep their precision unless a rule names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from itertools import pairwise

from sparkd.checkpoint import CLASSES, VISION_PARTS
from workers.quantization.formats import Format, refused

# vLLM has no quantized form of these (its embeddings, and routers that are built with quant_config=None).
NEVER = frozenset({"embedding", "router", "norm", "scale"})
_KEPT_CLASSES = frozenset({"lm_head", "state_space"})
# kv_b_proj: latent attention holds it in BF16 for decoding anyway, and for a long prompt reads `.weight.dtype`, which a packed weight
# does not have (vllm/model_executor/layers/attention/mla_attention.py). eh_proj, mtp_linear_proj: plain Linear modules in draft models.
_KEPT_LEAVES = frozenset({"kv_b_proj", "eh_proj", "mtp_linear_proj"})
# indexer: DeepSeek's sparse attention chooses by it which tokens are seen; vLLM builds half of it with quant_config=None. lora_*: adapters
# inside a checkpoint (Phi-4-multimodal), which vLLM has in no quantized form.
_KEPT_PARTS = frozenset({"indexer", "lora_A", "lora_B"})
_REGEX = "re:"
_CLASS = "class:"
_WILD = re.compile(r"[*?\[]")
_SET = re.compile(r"\[[^\[\]]+\]")


@dataclass(frozen=True, slots=True)
class FormatRule:
    """A rule: the weights that `match` selects get `format`. Raises ConfigError for a pattern that cannot be parsed.

    match: `all`; `moe` (the routed experts); `class:NAME`, a name of tensor_class; else a glob for each of some components of the dotted
        module path, which stand side by side anywhere in it: `o_proj`, `layers.0.*`, `layers.[0-3].mlp`.
    source: the key of the rule, for messages.
    """

    match: str
    format: Format
    priority: int = 0
    source: str = field(default="quantize.layers", compare=False)
    # The class of a `class:` rule, None for a glob.
    kind: str | None = field(init=False, compare=False, repr=False)
    # Among rules for the same weight the largest rank wins: priority, then literal components, then literal characters.
    rank: tuple[int, int, int] = field(init=False, compare=False, repr=False)
    _globs: tuple[re.Pattern[str], ...] = field(init=False, compare=False, repr=False)
    _words: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "expert" if self.match == "moe" else self.match.removeprefix(_CLASS) if self.match.startswith(_CLASS) else None
        if kind is not None and kind not in CLASSES:
            raise refused(self.source, f"{self.match!r} names no class; the classes are {', '.join(CLASSES)}")
        parts = _components(self.match, self.source) if self.match != "all" and kind is None else []
        words = frozenset(part for part in parts if not _WILD.search(part))
        # fnmatch's patterns never go back over what a `*` has matched: their time is in proportion to the text.
        globs = tuple(re.compile(translate(part)) for part in parts)
        rank = (self.priority, len(words), sum(map(len, words)))
        for name, value in (("kind", kind), ("rank", rank), ("_globs", globs), ("_words", words)):
            object.__setattr__(self, name, value)

    def matches(self, parts: Sequence[str], kind: str) -> bool:
        """parts: the components of a module's path; kind: its tensor_class."""
        if self.kind not in (None, kind) or not self._words.issubset(parts):
            return False
        starts = range(len(parts) - len(self._globs) + 1)
        return any(all(glob.match(part) for glob, part in zip(self._globs, parts[at:], strict=False)) for at in starts)

    def names(self, parts: Iterable[str], kind: str) -> bool:
        """Whether the rule names one of `parts` literally, or the class `kind`: only then it changes a weight that is kept by default."""
        return kind == self.kind if self.kind is not None else not self._words.isdisjoint(parts)


def kept_unless_named(module: str, kind: str) -> frozenset[str]:
    """Components of a module's path: a rule must name one of them literally to change the weight. Empty where every matching rule may.

    Kept: lm_head, state-space parameters, towers, projectors and generators of other modalities, adapters, weights outside the repeated
    layers, and the names listed above. The draft layers (MTP) are quantized like the others: the model verifies each of their tokens, so an
    error there costs speed but no answer, and in BF16 one such layer of a mixture of experts weighs as much as four of the others.
    """
    parts = module.split(".")
    leaf = parts[-1]
    if kind == "vision":
        return VISION_PARTS.intersection(parts) or frozenset(parts[:1])
    if kind in _KEPT_CLASSES or leaf in _KEPT_LEAVES:
        return frozenset({leaf})
    if parts_kept := _KEPT_PARTS.intersection(parts):
        return parts_kept
    if kind == "other" and not any(part.isdigit() for part in parts):
        return frozenset({leaf})
    return frozenset()


def _components(match: str, source: str) -> list[str]:
    """The globs of a pattern, one for each component of a path. Raises ConfigError."""
    if match.startswith(_REGEX):
        globs = "o_proj, *_proj, layers.0.* or layers.[0-3].mlp"
        raise refused(source, f"{match!r} is a regular expression, and a rule is a glob; write one such as {globs}")
    parts = match.split(".")
    if not match.isprintable() or "" in parts:
        raise refused(
            source, f"{match!r} has an empty component or one that cannot be printed; `o_proj`, `layers.0.*` and `all` are patterns"
        )
    if "**" in match:
        raise refused(source, f"{match!r} has `**`, and a `*` stands for one component; write the last one alone, or one * for each")
    if "[" in _SET.sub("", match):
        raise refused(source, f"{match!r} has a `[` without its `]`")
    for before, part in pairwise(parts):
        if before == "experts" and part != "*" and not part.isidentifier():
            raise refused(source, f"{match!r} picks among experts, and all experts of a layer have one format; write experts.*")
    return parts
