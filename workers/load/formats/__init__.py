"""The quantizers of the weight formats."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from workers.load.formats.base import Quantizer, amax, amax_each
from workers.load.formats.fp8 import Fp8BlockQuantizer, Fp8Quantizer
from workers.load.formats.fp8_source import Dequantized
from workers.load.formats.int4 import Int4Quantizer
from workers.load.formats.mxfp4 import Mxfp4Quantizer
from workers.load.formats.nf4 import Nf4Quantizer
from workers.load.formats.nvfp4 import Nvfp4A4Quantizer, Nvfp4Quantizer, global_scale
from workers.quantization.formats import DEFAULT_GROUP_SIZES

if TYPE_CHECKING:
    from workers.quantization.recipe import Format

__all__ = ["Quantizer", "amax", "amax_each", "global_scale", "quantizer"]


@functools.cache
def quantizer(format: Format) -> Quantizer:
    """The quantizer of a format. It has no state, so that one serves all weights.

    int4 and nf4 take their group size from the format; the quantizer of bf16 leaves a weight unchanged.
    """
    match format.name:
        case "nvfp4":
            return Nvfp4Quantizer()
        case "nvfp4_a4":
            return Nvfp4A4Quantizer()
        case "mxfp4":
            return Mxfp4Quantizer()
        case "int4":
            return Int4Quantizer(format.group_size or DEFAULT_GROUP_SIZES["int4"])
        case "nf4":
            return Nf4Quantizer(format.group_size or DEFAULT_GROUP_SIZES["nf4"])
        case "fp8":
            return Fp8Quantizer()
        case "fp8_block":
            return Fp8BlockQuantizer()
        case "bf16":
            return Dequantized()
    raise ValueError(f"Format {format.name} has no quantizer.")
