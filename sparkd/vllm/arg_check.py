"""Owns what a vLLM's parser will refuse of a model's arguments, told from the table of its flags. Never runs vLLM, never reads a file.

It follows argparse and vLLM's own parser over it (vllm/utils/argparse_utils.py, FlexibleArgumentParser.parse_args): flags in any spelling
or cut short, `--flag.key value` for a JSON flag, `-O3`; and of `--speculative-config` its class. Whatever is not certainly refused passes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkd.nearest import nearest
from sparkd.units import multiple
from sparkd.vllm.flag_note import FlagNote

# Variables by which another parser than the one that the table was read off may meet the arguments: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
# Flags that plugins add values to when an engine starts, ours among them.
_OPEN = frozenset({"load-format", "quantization", "worker-cls"})
# Their values name a class or a function of Python, and its module (vllm/utils/import_utils.py, resolve_obj_by_qualname).
_QUALIFIED = frozenset({"middleware", "scheduler-cls", "worker-extension-cls", "logits-processors"})
_LORA_KEYS = ("name", "path", "base_model_name", "is_3d_lora_weight")
_NONE = ("", "None")
# vLLM's parser takes any text for these, and its configuration no text (config/model.py, HfOverrides).
_NO_TEXT = frozenset({"hf-overrides"})
# As in engine/arg_utils.py, _expand_json_human_readable_numbers.
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
_AMOUNTS = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
# As argparse tells a negative number from a flag.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_AMOUNT = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])?")
# The releases whose SpeculativeConfig was seen to judge so (config/speculative.py, __post_init__ and _verify_args).
_SPECULATES = (0, 26), (0, 32)
_SPECULATIVE = "--speculative-config"
# Methods by where they draft from: the text alone, a draft of their own; of others nothing is said.
_TEXT, _DRAFT = ("ngram", "ngram_gpu"), ("medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "dflash")


@dataclass(frozen=True, slots=True)
class Flag:
    """of: the same for the spellings of one argument. takes: 0 or 1 values, None for any other number. number, json, keys, folds, names,
    values, holds: what a value is, see workers/engine/flag_table.py. none: whether `None` is a value too."""

    of: int
    takes: int | None = None
    choices: tuple[str, ...] | None = None
    number: str | None = None
    json: str | None = None
    none: bool = False
    keys: tuple[str, ...] | None = None
    folds: bool = False
    names: tuple[str, ...] | None = None
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    holds: str | None = None


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one vLLM: long names without their dashes, with dashes inside. abbreviations: whether they may be cut short. short:
    those with one dash, None where they are not known."""

    version: str
    flags: Mapping[str, Flag] = field(default_factory=dict)
    abbreviations: bool = True
    short: frozenset[str] | None = None

    @classmethod
    def of(cls, version: str, raw: Mapping[str, Any]) -> FlagTable:
        """raw: what workers/engine/flag_table.py says. Raises ValueError, TypeError, KeyError for anything else."""
        flags = {}
        for spelling, one in raw["flags"].items():
            if not spelling.startswith("--"):
                continue
            choices = None if one["choices"] is None else tuple(map(str, one["choices"]))
            takes = None if one["takes"] is None else int(one["takes"])
            keys = None if one["keys"] is None else tuple(map(str, one["keys"]))
            names = tuple(map(str, one["names"])) if one.get("names") else None
            values = {str(key): tuple(map(str, texts)) for key, texts in one.get("values", {}).items()}
            kind = one["number"], one["json"], bool(one["none"]), keys, bool(one["folds"]), names, values, one.get("holds")
            flag = Flag(int(one["of"]), takes, choices, *kind)
            flags[spelling[2:].replace("_", "-")] = flag
        if len(flags) < 2:
            raise ValueError("no parser has so few flags")
        short = frozenset(spelling for spelling in raw["flags"] if not spelling.startswith("--"))
        return cls(version, flags, bool(raw["abbreviations"]), short)

    def named(self, name: str) -> set[str]:
        """The flags that this name, or this beginning of one, may stand for."""
        if name in self.flags:
            return {name}
        return {flag for flag in self.flags if flag.startswith(name)} if self.abbreviations else set()


def misfits(args: Sequence[str], env: Mapping[str, str], table: FlagTable) -> Iterator[FlagNote]:
    """A sentence for each argument that this vLLM will end its start over; keys of JSON are shown, values never. env: the engine's own."""
    if any(name in env for name in ANOTHER_PARSER):
        return
    parts, rest = _apart(args)
    for name, key, value in parts:
        found = table.named(name)
        if not found:
            yield _unknown(name, table)
        elif why := _part(min(found), key, value, table):
            yield why
    for index, arg in enumerate(rest):
        if arg == "--":
            return  # argparse takes what follows for no flags
        if not arg.startswith("--"):
            if table.short is not None and _has_no_short(arg, table.short):
                yield _unknown_short(arg, table)
            continue
        key, equals, value = arg.partition("=")
        name = key[2:].replace("_", "-")
        found = table.named(name)
        following = rest[index + 1] if index + 1 < len(rest) else None
        if not found:
            if not _may_be_a_value(rest, index, table):
                yield _unknown(name, table)
        elif len({table.flags[one].of for one in found}) > 1:
            several = ", ".join(f"--{each}" for each in sorted(found)[:3])
            yield FlagNote(name, f"vLLM {table.version} has {several}. Write out which.", _shown(name))
        elif table.flags[min(found)].json == "lora":
            behind = itertools.takewhile(lambda each: not each.startswith("--"), rest[index + 1 :])
            yield from filter(None, map(_adapter, [value] if equals else behind))
        elif why := _refused(min(found), value if equals else following, bool(equals), table) or _surplus(rest, index, min(found), table):
            yield why


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


def _apart(args: Sequence[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """((name, key, value) of `--name.key value` and `--name.key=value`, the other arguments): vLLM takes those out, each with what comes
    next, whatever that is, and puts them at the end as JSON."""
    parts, rest, skip = [], [], False
    for index, arg in enumerate(args):
        written, equals, value = arg.partition("=")
        if skip:
            skip = False
        elif arg.startswith("-") and "." in written:
            skip = not equals
            if arg.startswith("--"):
                name, _, key = written[2:].partition(".")
                following = args[index + 1] if index + 1 < len(args) else ""
                parts.append((name.replace("_", "-"), key.rstrip("+").replace("-", "_"), value if equals else following))
        else:
            rest.append(arg)
    return parts, rest


def _part(name: str, key: str, value: str, table: FlagTable) -> FlagNote | None:
    """Why the class of a JSON flag refuses one key that is given by itself."""
    flag, (first, _, inner) = table.flags[name], key.partition(".")
    if flag.keys is not None and first not in flag.keys:
        return FlagNote(name, f"it has no key {_short(first)}. {among(first, sorted(flag.keys))}")
    return None if inner else _valued(name, {first: value}, flag)


def _valued(name: str, given: Mapping[str, Any], flag: Flag) -> FlagNote | None:
    """Why a class refuses a value of its JSON that has to be one of some names."""
    for key, value in given.items():
        names = flag.values.get(key.replace("-", "_"))
        is_method = (name, key) == (_SPECULATIVE[2:], "method")  # see sparkd.inquiry.flag_table.unknown_drafts
        if names is not None and isinstance(value, str) and not is_method and not _is_name(value, names):
            return FlagNote(name, f"its {key} is none of vLLM's. {among(value, names)}")
    return None


def _is_name(value: str, names: Sequence[str]) -> bool:
    """vLLM reads most of them in capitals and small letters, and `auto` as nothing at all."""
    return _folded(value) in {"", "auto", "none", *map(_folded, names)}


def _folded(text: str) -> str:
    return text.lower().replace("-", "_")


def _may_be_a_value(args: Sequence[str], index: int, table: FlagTable) -> bool:
    """argparse takes what has a space and is no flag for a value (ArgumentParser._parse_optional). Behind nothing that wants one it is too
    many to `vllm serve MODEL`, and nothing at all to the older entry point: in neither does it do what was meant."""
    if " " not in args[index]:
        return False
    behind = next((at for at in range(index - 1, -1, -1) if args[at].startswith("-")), None)
    if behind is None or (args[behind].startswith("--") and "=" in args[behind]):
        return False
    found = table.named(args[behind][2:].replace("_", "-")) if args[behind].startswith("--") else set()
    most = [table.flags[one].takes for one in found] or [None]
    return any(takes is None or index - behind - 1 < takes for takes in most)


def _has_no_short(arg: str, short: Collection[str]) -> bool:
    """As argparse finds a flag with one dash: whole, or its beginning, or the first letter with a value behind it; `-O3` is vLLM's own. A
    number and a text with a space are values."""
    name = arg.partition("=")[0]
    if not name.startswith("-") or len(name) < 2 or " " in arg or _NEGATIVE.fullmatch(arg) or name.startswith("-O"):
        return False
    return name[:2] not in short and not any(flag.startswith(name) for flag in short)


def _unknown_short(arg: str, table: FlagTable) -> FlagNote:
    name = arg.partition("=")[0]
    near = nearest(name.lstrip("-").replace("_", "-"), table.flags)
    cure = f"Did you mean --{near}?" if near else "Remove it."
    return FlagNote(name.lstrip("-"), f"vLLM {table.version} has no such flag. {cure}", name[:48])


def _surplus(args: Sequence[str], index: int, name: str, table: FlagTable) -> FlagNote | None:
    """Whether more values stand behind a flag than it takes: vLLM takes such a one for the model (entrypoints/cli/serve.py, model_tag)."""
    takes = table.flags[name].takes
    if takes is None:
        return None
    allowed = 0 if "=" in args[index] else takes
    behind = itertools.takewhile(lambda arg: not arg.startswith("-") or _NEGATIVE.fullmatch(arg), args[index + 1 :])
    if sum(1 for _ in behind) <= allowed:
        return None
    rule = "it takes one value" if takes else "it takes no value"
    return FlagNote(name, f"{rule}, and vLLM would take what stands behind for the model. Remove that.")


def _unknown(name: str, table: FlagTable) -> FlagNote:
    near = nearest(name, table.flags)
    cure = f"Did you mean --{near}?" if near else "Remove it."
    return FlagNote(name, f"vLLM {table.version} has no such flag. {cure}", _shown(name))


def _refused(name: str, value: str | None, joined: bool, table: FlagTable) -> FlagNote | None:
    """value: what stands behind the equals sign (joined), or the next argument."""
    flag = table.flags[name]
    if name in _QUALIFIED and value and not value.startswith("-") and not re.search(r"\w[.:]\w", value):
        return FlagNote(name, f"{_short(value)} is no class with its module. Write it as MODULE.NAME, or remove it.")
    if flag.takes == 0:
        return FlagNote(name, f"vLLM {table.version} takes no value for it. Remove what follows the equals sign.") if joined else None
    if flag.takes != 1:
        return None
    if value is None or (not joined and value.startswith("--") and " " not in value):
        return FlagNote(name, "it needs a value. Give it one, or remove it.")
    if name in _OPEN or (flag.none and value in _NONE) or (not joined and value.startswith("-")):
        return None
    if flag.json is not None:
        return _broken(name, value, flag.json) or _keyed(name, value, flag)
    if flag.names is not None and not _is_name(value, flag.names):
        return FlagNote(name, f"vLLM {table.version} has none of this name. {among(value, flag.names)}")
    number = None if flag.number is None else _number(value, flag.number)
    if flag.number is not None and number is None:
        kind = {"float": "number", "int": "whole number"}.get(flag.number, "whole number, nor one such as 8k or 8K")
        return FlagNote(name, f"its value is no {kind}. Give it one, or remove it.")
    text = value.lower().replace("-", "_") if flag.folds else value
    if flag.choices is not None and (text if number is None else str(number)) not in flag.choices:
        return FlagNote(name, f"vLLM {table.version} does not take its value. {among(value, flag.choices)}")
    return None


def _keyed(name: str, value: str, flag: Flag) -> FlagNote | None:
    """Why its class refuses this JSON: another kind, a key that it does not have, a value that it does not know. None where it may take
    any."""
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        return None  # with an amount in it
    if given is None:
        return None
    if name == _SPECULATIVE[2:] and not isinstance(given, dict):
        return None  # see `unspeculative`
    if (flag.keys is not None or flag.holds == "map") and not isinstance(given, dict):
        return FlagNote(name, f"its value is no map of keys: give it as JSON, or each key as --{name}.KEY VALUE.")
    if flag.holds == "list" and not isinstance(given, list):
        return FlagNote(name, 'its value is no list: give it as JSON, such as ["a", "b"].')
    if flag.keys is not None and (unknown := next((key for key in given if key not in flag.keys), None)) is not None:
        return FlagNote(name, f"it has no key {_short(unknown)}. {among(unknown, sorted(flag.keys))}")
    return _valued(name, given, flag) if isinstance(given, dict) else None


def _adapter(value: str) -> FlagNote | None:
    """Why a value of --lora-modules is none (entrypoints/launchers/cli_args.py, LoRAParserAction)."""
    if value in _NONE or ("=" in value and "," not in value):
        return None
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return FlagNote("lora-modules", "each value is NAME=PATH, or JSON with name and path. Correct it.")
    if unknown := next((key for key in given if key not in _LORA_KEYS), None):
        return FlagNote("lora-modules", f"it has no key {_short(unknown)}. {among(unknown, _LORA_KEYS)}")
    missing = next((key for key in _LORA_KEYS[:2] if key not in given), None)
    return FlagNote("lora-modules", f"{missing} is missing in its JSON. Add it.") if missing else None


def _number(value: str, kind: str) -> float | None:
    """None where it is none."""
    if kind == "amount or auto" and value.strip().lower() == "auto":
        return -1
    try:
        return float(value) if kind == "float" else int(value)
    except ValueError:
        return amount(value) if kind.startswith("amount") else None


def _broken(name: str, value: str, kind: str) -> FlagNote | None:
    """Why it is no JSON, with the place; None where vLLM can read it, or takes a text that is none."""
    braced = value.strip()[:1] == "{" and (value.strip()[-1:] == "}" or name in _NO_TEXT)
    if kind == "braces" and not braced:
        return None
    text = value
    if kind == "class":
        parts = enumerate(_QUOTED.split(value))
        text = "".join(part if number % 2 else _AMOUNTS.sub(lambda found: "1" * len(found[0]), part) for number, part in parts)
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        where = "at its end" if error.pos >= len(text) else f"at character {error.pos + 1}"
        cure = f"Keys and texts stand in double quotes, in YAML all of it in single ones; or give each key as --{name}.KEY VALUE"
        return FlagNote(name, f"its value is no JSON: {error.msg[0].lower()}{error.msg[1:].removesuffix(' at')} {where}. {cure}.")
    except (ValueError, RecursionError):
        return None  # no mistake of form: a number or a depth that only vLLM can judge
    return None


def among(value: str, choices: Sequence[str]) -> str:
    """The nearest of the choices, or the first of them, as a sentence."""
    near = nearest(value, choices)
    shown = ", ".join(choices[:12]) + (", ..." if len(choices) > 12 else "")
    return f"Did you mean {near}?" if near else f"It takes {shown}."


def _shown(name: str) -> str:
    return f"--{_short(name)}"


def _short(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."
