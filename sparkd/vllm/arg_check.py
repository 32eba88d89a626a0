"""Owns the message about an argument that a vLLM's parser refuses, and how vLLM reads numbers.

sparkd.inquiry.parser_answers runs the parser. This module never runs vLLM and never reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.units import multiple
from sparkd.vllm.flag_note import FlagNote

# Variables that may change the parser between this check and the start: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
_AMOUNT = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])?")
_MOST_CHARS = 50
# As argparse calls it.
_UNRECOGNIZED = "unrecognized argument"


@dataclass(frozen=True, slots=True)
class RefusedArg:
    """One argument that a vLLM's parser refuses; the fields are those of workers/vllm/ask/parse_args.py."""

    flag: str
    reason: str

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RefusedArg:
        """Raises KeyError or TypeError if `raw` lacks a field."""
        return cls(str(raw["flag"]), str(raw["reason"]))

    @property
    def is_unknown(self) -> bool:
        """Whether this vLLM has no such flag."""
        return self.reason == _UNRECOGNIZED

    def note(self, version: str) -> FlagNote:
        """The message for users; it shows vLLM's words, never values."""
        reason = f"vLLM {version} refuses it: {self.reason.rstrip('.')}. Correct it, or remove it."
        shown = self.flag if len(self.flag) <= _MOST_CHARS else f"{self.flag[: _MOST_CHARS - 3]}..."
        return FlagNote(self.flag.lstrip("-"), reason, shown or "arguments")


def amount(value: str) -> int | None:
    """The number that vLLM reads in `8192`, `8k` (1,000) and `8K` (1,024); None for anything else (human_readable_int)."""
    match = _AMOUNT.fullmatch(value.strip())
    if match is None:
        return None
    digits, fraction, suffix = match.groups()
    if suffix and suffix.islower():
        return int(float(f"{digits}{fraction or ''}") * multiple(suffix))
    return None if fraction else int(digits) * multiple(suffix or "")
