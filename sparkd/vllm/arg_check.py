"""Writes the message about an argument that the parser of a vLLM refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.vllm.flag_note import FlagNote

# Variables that may change the parser between this check and the start: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
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
        return self.reason.startswith(_UNRECOGNIZED)

    def note(self, version: str) -> FlagNote:
        """The message for users; it shows vLLM's words, never values."""
        reason = (
            f"vLLM {version} refuses it: {self.reason.rstrip('.?')}{'?' if self.reason.endswith('?') else '.'} Correct it, or remove it."
        )
        shown = self.flag if len(self.flag) <= _MOST_CHARS else f"{self.flag[: _MOST_CHARS - 3]}..."
        return FlagNote(self.flag.lstrip("-"), reason, shown or "arguments")
