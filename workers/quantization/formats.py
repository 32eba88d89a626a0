"""The table of weight formats, and how a format is spelled; the quantizers are in workers/load/formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkd.errors import CheckpointError, ConfigError, clause


@dataclass(frozen=True, slots=True)
class FormatFamily:
    """A row of the table: one format, or those that differ in the size of their groups alone. Every other module reads it.

    quantizer: `module:class` in workers.load.formats.
    errors: the relative Frobenius error of Gaussian weights (tests/workers/load/formats/test_error.py), by each group size that can be
        chosen, by None where there is none to choose.
    bits: of a weight.
    group: columns that share a scale, of which a weight's columns must be a multiple, and the default where several sizes can be chosen;
        None where any number of columns will do.
    block: rows, and columns, of the squares that share a scale.
    scale_bytes: of one scale.
    matrix_bytes: of what a whole matrix has in addition.
    has_divisor: whether the weights that vLLM fuses share a second-level scale.
    compression: its name in compressed_tensors.config.CompressionFormat (0.17).
    weights, inputs: its fields there of QuantizationArgs, without those that every format has; no inputs: activations stay as they are.
    kl: the divergence from BF16 of a small model in it (nats, the median of tokens), by group size, for those that `sparkd plan` tries.
    error_cost: KL for each unit of squared relative error, nvfp4 = 1: the same model wholly in each format. None: `best` never chooses it.
    """

    quantizer: str
    errors: Mapping[int | None, float]
    bits: int = 4
    group: int | None = None
    block: int | None = None
    scale_bytes: int = 0
    matrix_bytes: int = 0
    has_divisor: bool = False
    compression: str = ""
    weights: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    kl: Mapping[int | None, float] = field(default_factory=dict)
    error_cost: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The group sizes that can be chosen, smallest first."""
        return tuple(size for size in self.errors if size is not None)


_NVFP4 = {"type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
_FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
FAMILIES: Mapping[str, FormatFamily] = {
    "nvfp4": FormatFamily(
        "nvfp4:Nvfp4Quantizer",
        {None: 0.0813},
        group=16,
        scale_bytes=1,
        matrix_bytes=4,
        has_divisor=True,
        compression="nvfp4-pack-quantized",
        weights=_NVFP4,
        kl={None: 0.159},
        error_cost=1.0,
    ),
    # The same weights; the activations have a scale of 16 that vLLM computes ("local") and one for the layer's whole input that the
    # checkpoint has. The error counts the activations too.
    "nvfp4_a4": FormatFamily(
        "nvfp4:Nvfp4A4Quantizer",
        {None: 0.1247},
        group=16,
        scale_bytes=1,
        matrix_bytes=8,
        has_divisor=True,
        compression="nvfp4-pack-quantized",
        weights=_NVFP4,
        inputs={"num_bits": 4, "symmetric": True, **_NVFP4, "group_size": 16, "dynamic": "local"},
    ),
    "mxfp4": FormatFamily(
        "mxfp4:Mxfp4Quantizer",
        {None: 0.1115},
        group=32,
        scale_bytes=1,
        compression="mxfp4-pack-quantized",
        weights={"type": "float", "strategy": "group", "scale_dtype": "torch.uint8"},
        kl={None: 0.348},
        error_cost=1.2,
    ),
    # Without a group size 4.125 bits a weight, and the only size that every kernel in vLLM takes, its CPU MoE included. The small model's
    # columns are no whole groups of 128: its KL stands where its error puts it. By relative error alone g32 would be as good as nvfp4.
    "int4": FormatFamily(
        "int4:Int4Quantizer",
        {32: 0.0814, 64: 0.0902, 128: 0.0972},
        group=128,
        scale_bytes=2,
        matrix_bytes=16,
        compression="pack-quantized",
        weights={"type": "int", "strategy": "group"},
        kl={32: 0.217, 64: 0.267, 128: 0.3},
        error_cost=1.4,
    ),
    # Without a group size 4.25 bits, the size of QLoRA and of bitsandbytes. compressed-tensors has no such name: sparkd alone reads it.
    "nf4": FormatFamily(
        "nf4:Nf4Quantizer",
        {32: 0.0777, 64: 0.0842, 128: 0.0891, 256: 0.0929, 512: 0.0957},
        group=64,
        scale_bytes=2,
        compression="nf4-pack-quantized",
        weights={"type": "float", "strategy": "group", "scale_dtype": "torch.bfloat16"},
        error_cost=1.0,
    ),
    # Dynamic activations in 8 bits, because vLLM serves FP8 experts in no other way; a GPU without FP8 arithmetic computes in 16 bits.
    "fp8": FormatFamily(
        "fp8:Fp8Quantizer",
        {None: 0.0264},
        bits=8,
        scale_bytes=4,
        compression="float-quantized",
        weights={"type": "float", "strategy": "channel"},
        inputs={**_FP8_INPUTS, "strategy": "token"},
        kl={None: 0.012},
        error_cost=0.65,
    ),
    # Its error is that of fp8 in the measurement; fp8 counts as more precise, because each row has a scale of its own.
    "fp8_block": FormatFamily(
        "fp8:Fp8BlockQuantizer",
        {None: 0.0265},
        bits=8,
        block=128,
        scale_bytes=4,
        compression="float-quantized",
        weights={"type": "float", "strategy": "block", "block_structure": [128, 128]},
        inputs={**_FP8_INPUTS, "strategy": "group", "group_size": 128},
    ),
    "bf16": FormatFamily("fp8_source:Dequantized", {None: 0.0}, bits=16),
}


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format.

    name: of a row in FAMILIES; bf16 is a weight in its stored precision.
    group_size: columns that share a scale, where several sizes can be chosen.
    """

    name: str
    group_size: int | None = None

    @property
    def spelling(self) -> str:
        """The name in a configuration: `int4-g64`, `fp8-block`, `nvfp4`."""
        return f"{self.name}-g{self.group_size}" if self.group_size else self.name.replace("_", "-")

    @property
    def family(self) -> FormatFamily:
        return FAMILIES[self.name]

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
        return self.group_size or self.family.group

    @property
    def scale_sides(self) -> tuple[int, int]:
        """Rows and columns at multiples of which a weight can be cut without cutting what shares a scale."""
        block = self.family.block
        return (block, block) if block is not None else (1, self.group or 1)

    def check(self, name: str, rows: int, columns: int, file: str | None = None) -> None:
        """Raises CheckpointError where a weight [rows, columns], the tensor `name` of `file`, cannot have this format."""
        if self.group is not None and columns % self.group:
            problem = f"K={columns} is not divisible by the group size {self.group}"
            cure = f"Use {fitting(self.group, columns, self.name)} for it"
            raise CheckpointError(problem, file=file, tensor=name, cure=cure)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantized weight [rows, columns] with its scales, as compressed-tensors stores them; bf16: two bytes an element."""
        family = self.family
        scales = -(-rows // (family.block or 1)) * -(-columns // (family.block or self.group or columns))
        return rows * columns * family.bits // 8 + scales * family.scale_bytes + family.matrix_bytes

    @staticmethod
    def parse(value: str | Mapping[str, Any], *, where: str = "quantize", group_size: int | None = None) -> Format:
        """Parse a spelling, or {format: .., group_size: ..}. Raises ConfigError.

        group_size: the default for int4 and nf4; without one they mean int4-g128 and nf4-g64.
        where: the key named in the error.
        """
        if isinstance(value, Mapping):
            if unknown := sorted(str(key) for key in value if key not in ("format", "group_size")):
                raise refused(where, f"the key {unknown[0]!r} is not known; format and group_size are")
            if "format" not in value:
                raise refused(where, f"`format` is missing; {_known()}")
            return _with_group(_parsed(value["format"], where), value.get("group_size"), group_size, where)
        return _with_group(_parsed(value, where), None, group_size, where)


# By spelling.
FORMATS: Mapping[str, Format] = {
    form.spelling: form for name, family in FAMILIES.items() for form in (Format(name, size) for size in family.errors)
}
SPELLINGS = tuple(FORMATS)
ERRORS: Mapping[str, float] = {spelling: form.family.errors[form.group_size] for spelling, form in FORMATS.items()}


def fitting(group: int, columns: int, name: str = "int4") -> str:
    """The nearest formats for a weight whose columns are no multiple of `group`, for an error: `int4-g64 or int4-g32`.

    name: the format that the weight was to have."""
    name = name if FAMILIES[name].sizes else "int4"
    fits = [f"{name}-g{size}" for size in reversed(FAMILIES[name].sizes) if size < group and columns % size == 0]
    return " or ".join(fits or ["nvfp4" if group > 16 and columns % 16 == 0 else "fp8"])


def built_size(size: Any) -> None:
    """Raises ConfigError where no format has groups of this size."""
    sizes = sorted({size for family in FAMILIES.values() for size in family.sizes})
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
    stem, mark, group = plain.partition("-g")
    name = stem.replace("-", "_")
    if name not in FAMILIES or (mark and not (FAMILIES[name].sizes and re.fullmatch(r"[0-9]{1,6}", group))):
        import difflib

        near = difflib.get_close_matches(stem, [known.replace("_", "-") for known in sorted(FAMILIES)], n=1)
        raise refused(where, f"the format {text!r} is not known; " + (f"did you mean {near[0]}? " if near else "") + _known())
    return name, int(group) if mark else None


def _with_group(parsed: tuple[str, int | None], own: Any, default: int | None, where: str) -> Format:
    name, spelled = parsed
    family = FAMILIES[name]
    sizes = family.sizes or FAMILIES["int4"].sizes
    if own is not None and (type(own) is not int or (spelled is not None and own != spelled)):
        problem = f"{own!r} is not a whole number" if type(own) is not int else f"{own} contradicts the format's own {spelled}"
        raise refused(where, f"group_size {problem}; give it once: {_listed(sizes, 'or')}")
    size = own if own is not None else spelled
    if not family.sizes:
        if size is not None and size != family.group:
            raise refused(where, f"{name.replace('_', '-')} has no group size to choose; leave group_size out, or choose int4 or nf4")
        return Format(name)
    size = size if size is not None else default if default is not None else family.group
    if size not in sizes:
        raise refused(where, f"group size {size} is not built; {name} has {_listed(sizes, 'and')}")
    return Format(name, size)


def _known() -> str:
    return f"known are {', '.join([*(name for name, family in FAMILIES.items() if family.sizes), *SPELLINGS])}"


def _listed(sizes: Sequence[int], word: str) -> str:
    """Group sizes in a sentence: `32, 64 and 128`."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {word} {last}"
