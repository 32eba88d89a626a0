"""Owns the messages about arguments that a vLLM's parser refuses, and the values of --speculative-config that its class refuses.

sparkd.inquiry.parser_answers runs the parser. This module never runs vLLM and never reads a file.
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

# Variables that may change the parser between this check and the start: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
_AMOUNT = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])?")
# The releases whose SpeculativeConfig has these rules (config/speculative.py, __post_init__ and _verify_args).
_SPECULATES = (0, 26), (0, 32)
_SPECULATIVE = "--speculative-config"
# Methods that draft from the text alone, and methods that need a draft model. sparkd does not judge other methods.
_TEXT, _DRAFT = ("ngram", "ngram_gpu"), ("medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "dflash")
_NUMBERS = {"int": "whole number", "float": "number"}
_FLAT = {
    "missing": "it needs a value. Give it one, or remove it.",
    "list": 'its value is not a list: give it as JSON, such as ["a", "b"].',
    "qualified": "its value is not a class with its module. Write it as MODULE.NAME, or remove it.",
}


@dataclass(frozen=True, slots=True)
class RefusedArg:
    """One argument that a vLLM's parser refuses; the fields are those of workers/vllm/ask/parse_args.py."""

    flag: str
    kind: str
    names: tuple[str, ...]
    near: str | None
    key: str
    text: str

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RefusedArg:
        """Raises KeyError or TypeError if `raw` lacks a field or has one of another type."""
        near = None if raw["near"] is None else str(raw["near"])
        return cls(str(raw["flag"]), str(raw["kind"]), tuple(map(str, raw["names"])), near, str(raw["key"]), str(raw["text"]))

    def note(self, version: str) -> FlagNote:
        """The message for users; it shows JSON keys, never values."""
        shown = self.text if self.kind == "short" else f"--{_short(self.flag)}" if self.flag else "arguments"
        return FlagNote(self.flag, self._reason(f"vLLM {version}", f"Did you mean {self.near}?"), shown)

    def _reason(self, vllm: str, meant: str) -> str:
        match self.kind:
            case "unknown" | "short":
                return f"{vllm} has no such flag. {f'Did you mean --{self.near}?' if self.near else 'Remove it.'}"
            case "several":
                return f"{vllm} has {', '.join(sorted(self.names)[:3])}. Write one of them in full."
            case "none":
                return f"{vllm} takes no value for it. Remove the equals sign and the text after it."
            case "surplus":
                return f"it takes {self.text} value, and vLLM would read the next one as the model. Remove that one."
            case "number":
                return f"its value is not a {_NUMBERS.get(self.text, 'whole number, nor one such as 8k or 8K')}. Give it one, or remove it."
            case "json":
                cure = "Put keys and texts in double quotes, and in YAML the whole value in single quotes"
                return f"its value is not JSON: {self.text}. {cure}; or give each key as --{self.flag}.KEY VALUE."
            case "map":
                return f"its value is not a map of keys: give it as JSON, or each key as --{self.flag}.KEY VALUE."
            case "key" if not self.key:
                return f"{vllm} takes neither a value nor a key for it. Remove both."
            case "key":
                return f"it has no key {_short(self.key)}. {meant if self.near else _list(self.names)}"
            case "choice":
                begins = f"{vllm} does not take the value of its key {_short(self.key)}" if self.key else f"{vllm} does not take its value"
                return f"{begins}. {meant if self.near else _list(self.names)}"
        return _FLAT.get(self.kind) or f"{vllm} refuses its value{f' ({self.text[:160]})' if self.text else ''}. Correct it, or remove it."


def unspeculative(args: Sequence[str], env: Mapping[str, str], version: str) -> Iterator[FlagNote]:
    """A message for a --speculative-config that this vLLM's parser takes and its class refuses for every model."""
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
            return  # another flag sets a part of it, or all
    try:
        config = json.loads(text or "")
    except (ValueError, RecursionError):
        return  # the parser itself refuses a value that is not JSON
    if not isinstance(config, dict | None):
        yield FlagNote(_SPECULATIVE[2:], 'its value is not a map: write {"method": ...}, or set `speculative`.')
    elif config is not None and (why := misdrafts(config)):
        yield FlagNote(_SPECULATIVE[2:], why)


def misdrafts(config: Mapping[str, Any]) -> str | None:
    """Why vLLM's SpeculativeConfig refuses these keys for every model, with the fix; None if it may take them."""
    config = {key.replace("-", "_"): value for key, value in config.items()}
    method, model, tokens = config.get("method"), config.get("model"), config.get("num_speculative_tokens")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model" if model is None else None
    if config.get("tensor_parallel_size") is not None:
        return "tensor_parallel_size is not one of its keys: write draft_tensor_parallel_size."
    if "num_speculative_tokens" in config:
        odd = tokens is None or isinstance(tokens, list | dict) or (isinstance(tokens, float) and not tokens.is_integer())
        if odd or (isinstance(tokens, int | float) and tokens <= 0):
            return "num_speculative_tokens is not a whole number above 0: give it one, such as 4."
        if model is None and method in (*_DRAFT, "custom_class"):
            subject = f"method {method}" if config.get("method") is not None else "without a method it"
            return f"{subject} needs a draft: name it in model, or choose a method without a draft, such as ngram."
    elif method in (*_TEXT, "extract_hidden_states", "custom_class") or (model is None and method in (*_DRAFT, "mtp", "dspark")):
        return "num_speculative_tokens, the number of tokens drafted at a time, is missing: give it, such as 4."
    if method in _TEXT:
        sizes = [config.get(key) for key in ("prompt_lookup_min", "prompt_lookup_max")]
        whole = [size for size in sizes if type(size) is int]
        if any(size < 1 for size in whole):
            return "prompt_lookup_min and prompt_lookup_max must be whole numbers above 0: correct them."
        if len(whole) == 2 and whole[0] > whole[1]:
            return "prompt_lookup_min is above prompt_lookup_max: swap them, or leave both out."
    return None


def amount(value: str) -> int | None:
    """The number that vLLM reads in `8192`, `8k` (1,000) and `8K` (1,024); None for anything else (human_readable_int)."""
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        return None
    digits, fraction, suffix = match.groups()
    if suffix and suffix.islower():
        return int(float(f"{digits}{fraction or ''}") * multiple(suffix))
    return None if fraction else int(digits) * multiple(suffix or "")


def among(value: str, choices: Sequence[str]) -> str:
    """A sentence with the nearest choice, or with the first choices."""
    near = nearest(value, choices)
    return f"Did you mean {near}?" if near else _list(choices)


def _list(choices: Sequence[str]) -> str:
    return f"It takes {', '.join(choices[:12])}{', ...' if len(choices) > 12 else ''}."


def _short(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."
