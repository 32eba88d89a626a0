"""The weight formats' names and spellings; the quantizers are in workers/load/formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkd.errors import ConfigError, clause

# By spelling, the relative Frobenius error of Gaussian weights (tests/workers/load/formats/test_error.py). Those of fp8 and fp8-block
# are equal in the measurement; fp8 counts as more precise, because each row has a scale of its own. That of nvfp4-a4 counts the
# activations too.
ERRORS: Mapping[str, float] = {
    "nvfp4": 0.0813, "nvfp4-a4": 0.1247, "mxfp4": 0.1115, "int4-g32": 0.0814, "int4-g64": 0.0902, "int4-g128": 0.0972, "nf4-g32": 0.0777,
    "nf4-g64": 0.0842, "nf4-g128": 0.0891, "nf4-g256": 0.0929, "nf4-g512": 0.0957, "fp8": 0.0264, "fp8-block": 0.0265, "bf16": 0.0,
}  # fmt: skip
SPELLINGS = tuple(ERRORS)
# The group sizes that can be chosen, smallest first, by the name of a format that has several.
GROUP_SIZES: Mapping[str, tuple[int, ...]] = {
    name: tuple(int(spelling.removeprefix(f"{name}-g")) for spelling in SPELLINGS if spelling.startswith(f"{name}-g"))
    for name in ("int4", "nf4")
}
_NAMES = frozenset(spelling.partition("-g")[0].replace("-", "_") for spelling in SPELLINGS)
# int4 without a group size: 4.125 bits a weight, and the only size that every kernel in vLLM takes, its CPU MoE included. nf4 without one:
# 4.25 bits, the size of QLoRA and of bitsandbytes.
DEFAULT_GROUP_SIZES: Mapping[str, int] = {"int4": 128, "nf4": 64}
# The group sizes of the other formats, by definition (NVFP4: 16; OCP MX v1.0: 32).
_FIXED_GROUPS = {"nvfp4": 16, "nvfp4_a4": 16, "mxfp4": 32}
_SPELLING = re.compile(r"(?P<name>[a-z]+[0-9]+(?:-block|-a4)?)(?:-g(?P<group>[0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format. name: bf16 (unquantized, in its stored precision), fp8 (a scale for each row), fp8_block (a scale for 128x128),
    mxfp4, nvfp4, nvfp4_a4 (the same weights, activations in NVFP4 too), int4 or nf4.

    group_size: columns that share a scale, for int4 and nf4 only; the definition of every other format fixes it.
    """

    name: str
    group_size: int | None = None

    @property
    def spelling(self) -> str:
        """The name in a configuration: `int4-g64`, `fp8-block`, `nvfp4`."""
        return f"{self.name}-g{self.group_size}" if self.group_size else self.name.replace("_", "-")

    @property
    def keeps(self) -> bool:
        """True for bf16: the weight is not quantized."""
        return self.name == "bf16"

    @property
    def weight_name(self) -> str:
        """The name of the format that its weights alone have."""
        return self.name.removesuffix("_a4")

    @property
    def rounds_activations(self) -> bool:
        """Whether the activations have four bits too, for which a layer needs a scale of its input."""
        return self.name.endswith("_a4")

    @property
    def precision(self) -> float:
        """A larger number is more precise; 0 for bf16."""
        return -ERRORS[self.spelling]

    @property
    def group(self) -> int | None:
        """Columns that share a scale; a weight's columns must be a multiple of this. None for a format that accepts any number."""
        return self.group_size or _FIXED_GROUPS.get(self.name)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantized weight [rows, columns] with its scales, as compressed-tensors stores them; bf16: two bytes an element."""
        count = rows * columns
        if self.weight_name == "nvfp4":
            return count // 2 + count // 16 + (8 if self.rounds_activations else 4)
        if self.name == "mxfp4":
            return count // 2 + count // 32
        if self.name in GROUP_SIZES:
            scales = 2 * (count // (self.group_size or DEFAULT_GROUP_SIZES[self.name]))
            return count // 2 + scales + (16 if self.name == "int4" else 0)
        if self.name == "fp8":
            return count + 4 * rows
        return count + 4 * -(-rows // 128) * -(-columns // 128) if self.name == "fp8_block" else 2 * count

    @staticmethod
    def parse(value: str | Mapping[str, Any], *, where: str = "quantize", group_size: int | None = None) -> Format:
        """Parse a spelling, or {format: .., group_size: ..}. Raises ConfigError.

        group_size: the default for int4 and nf4; without one they mean int4-g128 and nf4-g64. where: the key named in the error.
        """
        if isinstance(value, Mapping):
            if unknown := sorted(str(key) for key in value if key not in ("format", "group_size")):
                raise refused(where, f"the key {unknown[0]!r} is not known; format and group_size are")
            if "format" not in value:
                raise refused(where, f"`format` is missing; {_known()}")
            return _with_group(_parsed(value["format"], where), value.get("group_size"), group_size, where)
        return _with_group(_parsed(value, where), None, group_size, where)


def fitting(group: int, columns: int, name: str = "int4") -> str:
    """The nearest formats for a weight whose columns are no multiple of `group`, for an error: `int4-g64 or int4-g32`.

    name: the format that the weight was to have."""
    name = name if name in GROUP_SIZES else "int4"
    fits = [f"{name}-g{size}" for size in reversed(GROUP_SIZES[name]) if size < group and columns % size == 0]
    return " or ".join(fits or ["nvfp4" if group > 16 and columns % 16 == 0 else "fp8"])


def built_size(size: Any) -> None:
    """Raises ConfigError where no format has groups of this size."""
    sizes = sorted({each for sizes in GROUP_SIZES.values() for each in sizes})
    if type(size) is not int or size not in sizes:
        problem = f"group size {size} is not built" if type(size) is int else f"group_size {size!r} is not a whole number"
        raise refused("quantize", f"{problem}; {_listed(sizes, 'and')} are")


def refused(where: str, reason: str) -> ConfigError:
    """The error about a key of `quantize`, or about a variable that stands for one. reason: a clause. Its explanation names the key as
    seen from `quantize`."""
    error = ConfigError(f"{where}: {reason}.", param="quantize")
    _, _, inner = where.partition("quantize.")
    error.explanation = f"{reason}." if where == "quantize" else f"{inner or where}: {reason}."
    return error


def refused_together(errors: Sequence[ConfigError]) -> ConfigError:
    """One error with the messages of all these errors."""
    error = ConfigError(f"{'; '.join(each.clause for each in errors)}.", param="quantize")
    error.explanation = f"{'; '.join(clause(each.explanation) for each in errors)}."
    return error


def _parsed(text: Any, where: str) -> tuple[str, int | None]:
    """(name, group size as spelled)."""
    if not isinstance(text, str):
        raise refused(where, f"{text!r} is not a format; {_known()}")
    plain = text.strip().lower().replace("_", "-")
    match = _SPELLING.fullmatch(plain)
    name = match["name"].replace("-", "_") if match else ""
    if match is None or name not in _NAMES or (match["group"] and name not in GROUP_SIZES):
        import difflib

        near = difflib.get_close_matches(plain.partition("-g")[0], [each.replace("_", "-") for each in sorted(_NAMES)], n=1)
        raise refused(where, f"the format {text!r} is not known; " + (f"did you mean {near[0]}? " if near else "") + _known())
    return name, int(match["group"]) if match["group"] else None


def _with_group(parsed: tuple[str, int | None], own: Any, default: int | None, where: str) -> Format:
    name, spelled = parsed
    sizes = GROUP_SIZES.get(name, GROUP_SIZES["int4"])
    if own is not None and (type(own) is not int or (spelled is not None and own != spelled)):
        problem = f"{own!r} is not a whole number" if type(own) is not int else f"{own} contradicts the format's own {spelled}"
        raise refused(where, f"group_size {problem}; give it once: {_listed(sizes, 'or')}")
    size = own if own is not None else spelled
    if name not in GROUP_SIZES:
        if size is not None and size != _FIXED_GROUPS.get(name):
            raise refused(where, f"{name.replace('_', '-')} has no group size to choose; leave group_size out, or choose int4 or nf4")
        return Format(name)
    size = size if size is not None else default if default is not None else DEFAULT_GROUP_SIZES[name]
    if size not in sizes:
        raise refused(where, f"group size {size} is not built; {name} has {_listed(sizes, 'and')}")
    return Format(name, size)


def _known() -> str:
    return f"known are {', '.join(SPELLINGS)}"


def _listed(sizes: Sequence[int], word: str) -> str:
    """Group sizes in a sentence: `32, 64 and 128`."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {word} {last}"
