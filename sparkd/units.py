"""The sizes of a GiB and a MiB, and readers of the numbers on a command line, each with its bounds and the error for anything else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from sparkd.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
MAX_TOKENS = 1 << 30
# The most that a plan may be asked for.
MOST: Mapping[str, int] = {
    "nodes": 64,
    "max_model_len": MAX_TOKENS,
    "requests": 1 << 16,
    "max_num_batched_tokens": MAX_TOKENS,
    "max_num_seqs": 1 << 16,
    "margin_gib": 1_000_000,
}
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_READABLE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kmgtKMGT])")
_DECIMAL_CAPITAL = re.compile(r"\..*[KMGT]")


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def multiple(letter: str) -> int:
    """The factor of vLLM's amounts (vllm/utils/argparse_utils.py, human_readable_int): a small letter of kmgt is a power of 1000, a capital
    one of 1024, and none is 1."""
    return int((1000 if letter.islower() else 1024) ** " kmgt".index(letter.lower() or " "))


def readable(text: str) -> int | None:
    """`32k` is 32,000 and `32K` 32,768, as vLLM reads them; None for anything else."""
    match = _READABLE.fullmatch(text)
    return None if match is None else int(float(match[1]) * multiple(match[2]))


def whole(option: str, least: int, most: int | None = None, *, tokens: bool = False) -> Callable[[object], int]:
    """A reader of whole numbers for `option`, which raises ConfigError. tokens: `32k` and `32K` will do, `1.5K` not, which vLLM refuses."""

    def read(argument: object) -> int:
        text = str(argument).strip()
        value = int(text) if _WHOLE.fullmatch(text) else readable(text) if tokens and not _DECIMAL_CAPITAL.search(text) else None
        if value is None:
            letters = ", such as 32768, 32k (32,000) or 32K (32,768)" if tokens else ""
            raise ConfigError(f"{option} {text}: not a whole number; give one {_bounds(least, most)}{letters}.")
        return int(_within(option, text, value, least, most))

    return read


def real(option: str, least: float, most: float | None, unit: str) -> Callable[[object], float]:
    """A reader of numbers for `option`, which raises ConfigError. unit: in the plural."""

    def read(argument: object) -> float:
        text = str(argument).strip()
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{option} {text}: not a number; give {unit} {_bounds(least, most)}.")
        return _within(option, text, value, least, most)

    return read


def _within(option: str, text: str, value: float, least: float, most: float | None) -> float:
    if value < least:
        raise ConfigError(f"{option} {text}: that is less than {least:,}; give a number {_bounds(least, most)}.")
    if most is not None and value > most:
        raise ConfigError(f"{option} {text}: that is more than {most:,}; give a number {_bounds(least, most)}.")
    return value


def _bounds(least: float, most: float | None) -> str:
    return f"from {least:,} on" if most is None else f"from {least:,} to {most:,}"
