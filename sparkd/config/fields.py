"""The field types that the sections share: numbers, paths, names, addresses, arguments and variables."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from sparkd.config.refusal import plain, refuse
from sparkd.vllm import reserved_args

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELLS_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# RFC 6454 6.2 with a scheme of RFC 3986 3.1: programs of the desktop have their own, such as app://obsidian.md.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")
# An interface's name may stand behind a link-local address: fe80::1%enP7s7.
_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]{1,15})?)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


class VllmFlag:
    """Marks a key of an entry whose value vLLM takes by the flag of the same name: max_num_seqs, --max-num-seqs."""


class Section(BaseModel):
    """A part of the configuration. It refuses unknown keys, is frozen, and its errors do not repeat the input."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_sections(cls, values: Any) -> Any:
        """Drop each section and each map of which all lines are comments; YAML reads it as null."""
        return (
            {key: value for key, value in values.items() if value is not None or not cls._is_map(key)}
            if isinstance(values, dict)
            else values
        )

    @classmethod
    def _is_map(cls, key: str) -> bool:
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        return get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel))


def no_bool(value: Any) -> Any:
    """Refuse a boolean for a number: pydantic reads `true` as 1, so `ttl: yes` would be one second."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def absolute(path: Path, info: ValidationInfo) -> Path:
    """Make a path absolute: `~` is the home folder; a relative path counts from the configuration file's folder, else from the working
    folder. Symbolic links stay, because a venv's python is one. Raises ValueError."""
    base, text = (info.context or {}).get("base"), str(path)
    if not text or _CONTROL.search(text):
        raise ValueError("a path is expected, without control characters")
    if variable := _SHELLS_VARIABLE.search(text):
        raise ValueError(f"no shell expands {variable[0]}: write ${{env.{variable[1] or variable[2]}}}, or the whole path")
    try:
        expanded = path.expanduser()
    except RuntimeError as error:
        raise ValueError("the home folder for '~' is unknown; write the full path") from error
    return Path(os.path.normpath((base or Path.cwd()) / expanded))


def split_address(address: str) -> tuple[str, int]:
    """Host, IPv6 without brackets, and port. Raises ValueError."""
    match = _HOST_PORT.fullmatch(address)
    if match is not None and int(match["port"]) > 65535:
        raise ValueError(f"{match['port']} is not a port: choose one from 0 to 65535, such as 4000 (0: any free port)")
    if match is None:
        raise ValueError("host:port is expected, such as 127.0.0.1:4000, 0.0.0.0:4000 (every address) or [::1]:4000")
    host = match["six"] or match["host"]
    # The socket is bound to what was checked, whatever /etc/hosts says about the name.
    return "127.0.0.1" if host == "localhost" else host, int(match["port"])


def is_loopback(host: str) -> bool:
    """True only for addresses that no other machine can reach. A host name other than localhost counts as reachable; it is not looked
    up."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_address(value: str) -> str:
    _check_numbers(split_address(value)[0])
    return value


def check_ipv4(value: str) -> str:
    """Check an address of a node: IPv4 or a host name, with or without a port."""
    if value.count(":") > 1:
        raise ValueError("the nodes of a cluster talk to each other by IPv4: give that address of the node")
    _check_numbers(value.partition(":")[0])
    return value


def _check_numbers(host: str) -> None:
    if host.replace(".", "").isdecimal():
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError("an IPv4 address has four numbers up to 255, such as 10.0.0.1") from None


def check_node_ip(value: str) -> str:
    """Check the address by which other nodes reach this node."""
    check_ipv4(value)
    if not re.fullmatch(r"[A-Za-z0-9.-]+", value):
        raise ValueError("an address alone is expected, such as 10.0.0.1, without a port and without the size of its network")
    if value == "0.0.0.0":
        raise ValueError("0.0.0.0 is every address: give the one by which the other nodes reach this one, such as 10.0.0.1")
    return value


def not_empty(value: Any) -> Any:
    """Refuse an empty path, which would mean the working folder, and a blank one."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("a path is expected, and this is empty")
    return value


def is_name(text: str) -> bool:
    """Whether the text can be a model's name."""
    return MODEL_NAME.fullmatch(text) is not None and ".." not in text and "//" not in text


def check_name(name: str) -> str:
    if not is_name(name):
        raise ValueError("a name has up to 128 letters, digits, '.', '_', ':', '/' and '-', a letter or digit first, without '..' and '//'")
    return name


def check_origin(value: str) -> str:
    """Check the origin of a web page, as browsers send it (RFC 6454 6.2), or `*`."""
    if value != "*" and not _ORIGIN.fullmatch(value):
        raise ValueError("an origin is expected, such as https://chat.example or app://obsidian.md, without a path; or '*'")
    return value.lower()


def check_word(value: str) -> str:
    """Check a value of a vLLM flag: it must not look like another flag, nor hold signs that a terminal obeys or does not show."""
    if not value or value.startswith("-") or not value.isprintable():
        raise ValueError("a word is expected that does not begin with '-', without invisible characters")
    return value


def arguments(value: Any) -> Any:
    """Validate extra_args: a list, whose numbers become text. A single string is refused, because no shell splits it."""
    if isinstance(value, str):
        raise refuse('must be a list, because no shell splits a line here: write extra_args: ["--max-num-seqs", "8"]')
    if not isinstance(value, list | tuple):
        return value
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise refuse("must hold text and numbers only: put each argument in quotes", item=index)
        if "\x00" in str(item):
            raise refuse("holds an argument with a NUL byte, which no process can be given", item=index)
    args = tuple(str(item) for item in value)
    for index, message in reserved_args.owned_args(args):
        raise refuse(message, item=index)
    return args


def environment(value: Any) -> Any:
    """Validate env: a map, or llama-swap's list of 'NAME=value'. Values are kept as secrets, because they often are."""
    pairs: list[tuple[Any, Any, Any]]
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        if (bare := next((index for index, item in enumerate(value) if "=" not in item), None)) is not None:
            raise refuse("must be a map of NAME: value, or a list of 'NAME=value'; an item here has no '='", item=bare)
        pairs = [(index, *item.partition("=")[::2]) for index, item in enumerate(value)]
    elif isinstance(value, Mapping):
        pairs = [(name, name, text) for name, text in value.items()]
    else:
        raise refuse("must be a map of NAME: value")
    for place, name, text in pairs:
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise refuse("holds a name that is not one of an environment variable (letters, digits and '_')", item=place)
        if isinstance(text, bool) or not isinstance(text, str | int | float | SecretStr):
            raise refuse(f"must give {name} a text or a number: put true, false and empty values in quotes", item=place)
        if isinstance(text, str) and "\x00" in text:
            raise refuse(f"gives {name} a NUL byte, which no process can be given", item=place)
        for _, reason in reserved_args.owned_env([name]):
            raise refuse(f"{name} is not for env: {reason}.", item=place)
    return {name: text if isinstance(text, SecretStr) else str(text) for _, name, text in pairs}


Seconds = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1e8)]
PositiveSeconds = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1e8)]
Count = Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=2**53)]
Gib = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1e6)]
Address = Annotated[str, AfterValidator(check_address)]
AbsolutePath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(absolute)]
Name = Annotated[str, AfterValidator(check_name)]
Origin = Annotated[str, AfterValidator(check_origin)]
Names = Annotated[tuple[Name, ...], BeforeValidator(one_or_many)]
Word = Annotated[str, AfterValidator(check_word)]
NodeAddress = Annotated[Address, AfterValidator(check_ipv4)]
NodeIp = Annotated[Word, AfterValidator(check_node_ip)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(arguments)]
Metadata = Annotated[dict[str, Any], BeforeValidator(plain)]
Environment = Annotated[dict[str, SecretStr], BeforeValidator(environment)]
