"""Explains a known line of an engine, Ray or the kernel: cause and cure, from signatures.toml, without the line's free text."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

KINDS = ("hint", "cause", "root")
HINT, CAUSE, ROOT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line understood. name is a CamelCase word that counters and findings carry; weight is of HINT, CAUSE and ROOT."""

    name: str
    weight: int
    cause: str
    cure: str

    @property
    def client_message(self) -> str | None:
        """The cause of what waiting does not heal, for a client; None where it names a repository, which is its owner's affair."""
        return self.cause if self.name in LASTING - {"CodeUntrusted"} else None


def diagnose(line: str) -> Diagnosis | None:
    """The first signature of the table that the line carries; None for any other line."""
    if not _ANY.search(line):
        return None
    for pattern, meaning in _TABLE:
        if match := pattern.search(line):
            caught = match.groups()
            return Diagnosis(meaning.name, meaning.weight, meaning.cause.format(*caught), meaning.cure.format(*caught))
    return None


_ROWS = tomllib.loads(Path(__file__).with_name("signatures.toml").read_text(encoding="utf-8"))["signature"]
_TABLE = tuple(
    (re.compile(row["pattern"]), Diagnosis(row["name"], KINDS.index(row["kind"]) + 1, row["cause"], row["cure"])) for row in _ROWS
)
_ANY = re.compile("|".join(row["pattern"] for row in _ROWS))
SIGNATURES = tuple(meaning for _, meaning in _TABLE)

# Waiting heals none of these. The loader's own refusal has no line in a log.
LASTING = frozenset(row["name"] for row in _ROWS if row.get("lasting")) | {"LoadRefused"}
