"""Writes the message about an argument that the parser of a vLLM refuses, or would complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.flags import flags_in

# Variables that may change the parser between this check and the start: other plugins, another platform.
ANOTHER_PARSER = ("PYTHONPATH", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
# Every option of vLLM 0.32.0's server.
FLAGS_FILE = Path(__file__).with_name("vllm-flags-0.32.0.txt")
_MOST_CHARS = 50
_MOST_NEAR = 3
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


def beginnings(args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(index, message) of each flag that only begins one of vLLM 0.32, which an engine would complete and sparkd would not count."""
    names = flags_of_vllm()
    for flag in flags_in(args):
        meant = [] if flag.name in names or not flag.name else sorted(full for full in names if full.startswith(flag.name))
        if meant:
            yield flag.place, f"--{flag.name} is not written in full; did you mean --{' or --'.join(meant[:_MOST_NEAR])}?"


@cache
def flags_of_vllm() -> frozenset[str]:
    """The names of vLLM 0.32's flags, without dashes."""
    return frozenset(word[2:] for word in FLAGS_FILE.read_text().split() if word.startswith("--"))
