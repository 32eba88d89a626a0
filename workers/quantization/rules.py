"""Owns how a rule matches weights, and which weights keep their precision unless a rule names them. Never looks at a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from sparkd.checkpoint import CLASSES, VISION_PARTS, tensor_class
from workers.quantization.expression import Expression, Unreadable
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
# Expressions for parts of a dotted path: its beginning, a dot, its end, and any number of components.
_BEGIN, _DOT, _END, _ANY_COMPONENTS = r"(?:^|\.)", r"\.", r"(?:\.|$)", r"(?:[^.]+\.)*"
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FormatRule:
    """A rule: the weights that `match` selects get `format`. Raises ConfigError for a pattern that cannot be parsed.

    match: `all`; `moe` (the routed experts); `class:NAME`, a name of tensor_class; `re:REGEX`, searched in the module path (an Expression);
    else a glob over whole components of the dotted module path, found anywhere in it: `o_proj`, `layers.0.*`, `layers.[0-3].mlp`,
    `mtp.**.down_proj` (`**`: any number of components). source: the key or variable of the rule, for messages.
    """

    match: str
    format: Format
    priority: int = 0
    source: str = field(default="quantize.layers", compare=False)
    # The class of a `class:` rule, None for an expression over the module path.
    kind: str | None = field(init=False, compare=False, repr=False)
    expression: Expression = field(init=False, compare=False, repr=False)
    # Among rules for the same weight the largest rank wins: priority, then literal components, then literal characters.
    rank: tuple[int, int, int] = field(init=False, compare=False, repr=False)
    _words: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "expert" if self.match == "moe" else self.match.removeprefix(_CLASS) if self.match.startswith(_CLASS) else None
        if kind is not None and kind not in CLASSES:
            raise refused(self.source, f"{self.match!r} names no class; the classes are {', '.join(CLASSES)}")
        is_regex = self.match.startswith(_REGEX)
        is_glob = self.match != "all" and kind is None and not is_regex
        written = _written(self.match, self.source) if is_glob else self.match.removeprefix(_REGEX) if is_regex else ""
        try:
            expression = Expression(written)
        except Unreadable as error:
            term = "pattern" if is_glob else "regular expression"
            raise refused(self.source, f"{self.shown} is no {term} that can be used: {error}") from None
        literals = frozenset(part for part in self.match.split(".") if is_glob and not _WILD.search(part))
        words = frozenset(re.findall(r"\w+", self.match.replace("\\", " "))) if is_regex else literals
        rank = (self.priority, 1, 0) if is_regex else (self.priority, len(literals), sum(map(len, literals)))
        for name, value in (("kind", kind), ("expression", expression), ("rank", rank), ("_words", words)):
            object.__setattr__(self, name, value)

    @property
    def shown(self) -> str:
        """The pattern for a message, shortened because a client's may be long."""
        return repr(self.match if len(self.match) <= 64 else self.match[:61] + "...")

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


def class_of(module: str, dimensions: int = 2) -> str:
    """The tensor_class of a module's weight."""
    return tensor_class(f"{module}.weight", (0,) * dimensions)


def _written(match: str, source: str) -> str:
    """Translate a glob into an expression over the whole components of a path."""
    parts = match.split(".")
    if not match.isprintable() or "" in parts:
        raise refused(
            source, f"{match!r} has an empty component or one that cannot be printed; `o_proj`, `layers.0.*` and `all` are patterns"
        )
    for before, part in pairwise(parts):
        if before == "experts" and part != "*" and part != "**" and not part.isidentifier():
            raise refused(source, f"{match!r} picks among experts, and all experts of a layer have one format; write experts.*")
    while len(parts) > 1 and parts[-1] == "**":
        parts.pop()
    pieces = [_ANY_COMPONENTS if part == "**" else _component(part, match, source) + _DOT for part in parts]
    if parts[-1] != "**":
        pieces[-1] = pieces[-1].removesuffix(_DOT) + _END
    return _BEGIN + "".join(pieces)


def _component(part: str, match: str, source: str) -> str:
    """Translate one component of a glob: `*` and `?` match inside it, `[..]` is a set of characters, `[!..]` its complement."""
    pattern, rest = "", part
    while rest:
        mark, rest = rest[0], rest[1:]
        if mark in "*?":
            pattern += "[^.]*" if mark == "*" else "[^.]"
            continue
        if mark != "[":
            pattern += re.escape(mark)
            continue
        inside, closed, rest = rest.partition("]")
        negated = inside.startswith("!")
        inner = re.sub(r"([\\^\[&~|])", r"\\\1", inside.removeprefix("!"))
        if not closed or not inner:
            raise refused(source, f"{match!r} has a `[` without its `]`")
        pattern += f"[{'^.' if negated else ''}{inner}]"
        try:
            re.compile(pattern)
        except re.error as error:
            raise refused(source, f"{match!r} has a set that cannot be read: {error}") from None
    return pattern
