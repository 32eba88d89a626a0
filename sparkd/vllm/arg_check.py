"""Owns what is said of a model's arguments that a vLLM's parser refuses, and which values of --speculative-config its class refuses.

The parser itself is asked by sparkd.inquiry.parser_answers. Never runs vLLM, never reads a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkd.nearest import nearest
from sparkd.units import multiple
from sparkd.vllm.flag_note import FlagNote

# Variables by which another parser than the one that was asked may meet the arguments: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
_AMOUNT = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])?")
# The releases whose SpeculativeConfig was seen to judge so (config/speculative.py, __post_init__ and _verify_args).
_SPECULATES = (0, 26), (0, 32)
_SPECULATIVE = "--speculative-config"
# Methods by where they draft from: the text alone, a draft of their own; of others nothing is said.
_TEXT, _DRAFT = ("ngram", "ngram_gpu"), ("medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "dflash")
_NUMBERS = {"int": "whole number", "float": "number"}
_FLAT = {
    "missing": "it needs a value. Give it one, or remove it.",
    "list": 'its value is no list: give it as JSON, such as ["a", "b"].',
    "qualified": "its value is no class with its module. Write it as MODULE.NAME, or remove it.",
}


@dataclass(frozen=True, slots=True)
class RefusedArg:
    """What a vLLM's parser says of one argument; the fields are those of workers/engine/parse_args.py."""

    flag: str
    kind: str
    names: tuple[str, ...]
    near: str | None
    key: str
    text: str

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RefusedArg:
        """Raises KeyError or TypeError for what is none."""
        near = None if raw["near"] is None else str(raw["near"])
        return cls(str(raw["flag"]), str(raw["kind"]), tuple(map(str, raw["names"])), near, str(raw["key"]), str(raw["text"]))

    def note(self, version: str) -> FlagNote:
        """A sentence for people; keys of JSON are shown, values never."""
        shown = self.text if self.kind == "short" else f"--{_short(self.flag)}" if self.flag else "arguments"
        return FlagNote(self.flag, self._reason(f"vLLM {version}", f"Did you mean {self.near}?"), shown)

    def _reason(self, vllm: str, meant: str) -> str:
        match self.kind:
            case "unknown" | "short":
                return f"{vllm} has no such flag. {f'Did you mean --{self.near}?' if self.near else 'Remove it.'}"
            case "several":
                return f"{vllm} has {', '.join(sorted(self.names)[:3])}. Write out which."
            case "none":
                return f"{vllm} takes no value for it. Remove what follows the equals sign."
            case "surplus":
                return f"it takes {self.text} value, and vLLM would take what stands behind for the model. Remove that."
            case "number":
                return f"its value is no {_NUMBERS.get(self.text, 'whole number, nor one such as 8k or 8K')}. Give it one, or remove it."
            case "json":
                cure = "Keys and texts stand in double quotes, in YAML all of it in single ones"
                return f"its value is no JSON: {self.text}. {cure}; or give each key as --{self.flag}.KEY VALUE."
            case "map":
                return f"its value is no map of keys: give it as JSON, or each key as --{self.flag}.KEY VALUE."
            case "key" if not self.key:
                return f"{vllm} takes no value for it, and no key of one. Remove both."
            case "key":
                return f"it has no key {_short(self.key)}. {meant if self.near else _list(self.names)}"
            case "choice":
                begins = f"its {_short(self.key)} is none of vLLM's" if self.key else f"{vllm} does not take its value"
                return f"{begins}. {meant if self.near else _list(self.names)}"
        return _FLAT.get(self.kind) or f"{vllm} refuses its value{f' ({self.text[:160]})' if self.text else ''}. Correct it, or remove it."


def unspeculative(args: Sequence[str], env: Mapping[str, str], version: str) -> Iterator[FlagNote]:
    """A sentence for a --speculative-config that this vLLM's parser takes, and then its class does not, whatever the model is."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if any(name in env for name in ANOTHER_PARSER) or not _SPECULATES[0] <= release <= _SPECULATES[1]:
        return
    text = None
    for index, arg in enumerate(args):
        following = args[index + 1] if index + 1 < len(args) else None
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == _SPECULATIVE:
            text = value if equals else following
        elif name.startswith(("--spec", "-sc")):
            return  # it says a part of it, or all
    try:
        config = json.loads(text or "")
    except (ValueError, RecursionError):
        return  # what is no JSON is told by the parser's own rules
    if not isinstance(config, dict | None):
        yield FlagNote(_SPECULATIVE[2:], 'its value is no map: write {"method": ...}, or set `speculative`.')
    elif config is not None and (why := misdrafts(config)):
        yield FlagNote(_SPECULATIVE[2:], why)


def misdrafts(config: Mapping[str, Any]) -> str | None:
    """Why vLLM's SpeculativeConfig refuses these keys whatever the model is, with the cure; None where it need not."""
    config = {key.replace("-", "_"): value for key, value in config.items()}
    method, model, tokens = config.get("method"), config.get("model"), config.get("num_speculative_tokens")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model" if model is None else None
    if config.get("tensor_parallel_size") is not None:
        return "tensor_parallel_size is none of its keys: write draft_tensor_parallel_size."
    if "num_speculative_tokens" in config:
        odd = tokens is None or isinstance(tokens, list | dict) or (isinstance(tokens, float) and not tokens.is_integer())
        if odd or (isinstance(tokens, int | float) and tokens <= 0):
            return "num_speculative_tokens is no whole number above 0: give it one, such as 4."
        if model is None and method in (*_DRAFT, "custom_class"):
            said = f"method {method}" if config.get("method") is not None else "it names no method, and"
            return f"{said} needs a draft: name it in model, or choose a method that needs none, such as ngram."
    elif method in (*_TEXT, "extract_hidden_states", "custom_class") or (model is None and method in (*_DRAFT, "mtp", "dspark")):
        return "num_speculative_tokens is missing, and nothing else says how many tokens are drafted at a time: give it, such as 4."
    if method in _TEXT:
        sizes = [config.get(key) for key in ("prompt_lookup_min", "prompt_lookup_max")]
        known = [size for size in sizes if type(size) is int]
        if any(size < 1 for size in known):
            return "prompt_lookup_min and prompt_lookup_max are whole numbers above 0: correct them."
        if len(known) == 2 and known[0] > known[1]:
            return "prompt_lookup_min is above prompt_lookup_max: exchange them, or leave both out."
    return None


def amount(value: str) -> int | None:
    """The number that vLLM reads in `8192`, `8k` (1,000) and `8K` (1,024); None for anything else (human_readable_int)."""
    found = _AMOUNT.fullmatch(value.strip())
    if found is None:
        return None
    digits, fraction, suffix = found.groups()
    if suffix and suffix.islower():
        return int(float(f"{digits}{fraction or ''}") * multiple(suffix))
    return None if fraction else int(digits) * multiple(suffix or "")


def among(value: str, choices: Sequence[str]) -> str:
    """The nearest of the choices, or the first of them, as a sentence."""
    near = nearest(value, choices)
    return f"Did you mean {near}?" if near else _list(choices)


def _list(choices: Sequence[str]) -> str:
    return f"It takes {', '.join(choices[:12])}{', ...' if len(choices) > 12 else ''}."


def _short(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."
