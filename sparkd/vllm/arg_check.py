"""Writes the message about an argument that the parser of a vLLM refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Variables that may change the parser between this check and the start: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
# Every option of vLLM 0.32.0's server.
FLAGS_FILE = Path(__file__).with_name("vllm-flags-0.32.0.txt")
# As argparse calls it.
_UNRECOGNIZED = "unrecognized argument"


@dataclass(frozen=True, slots=True)
class RefusedArg:
    """One argument that a vLLM's parser refuses; the fields are those of workers/vllm/ask/parse_args.py, which shows no values."""

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

    def note(self, version: str) -> str:
        """The message for users: the flag and `why`."""
        return f"{self.flag or 'arguments'}: {self.why(version)}"

    def why(self, version: str) -> str:
        """The sentences without the flag."""
        reason = self.reason if self.reason.endswith("?") else f"{self.reason.rstrip('.')}."
        return f"vLLM {version} refuses it: {reason} Correct it, or remove it."


@cache
def flags_of_vllm() -> frozenset[str]:
    """The names of vLLM 0.32's flags, without dashes."""
    return frozenset(word[2:] for word in FLAGS_FILE.read_text().split() if word.startswith("--"))
