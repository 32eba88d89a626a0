"""The quantizers of the weight formats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

from workers.load.formats.base import Quantizer, amax, amax_each
from workers.load.formats.nvfp4 import global_scale
from workers.quantization.formats import Format

__all__ = ["Quantizer", "amax", "amax_each", "global_scale", "quantizer"]


@functools.cache
def quantizer(format: Format) -> Quantizer:
    """The quantizer of a format, which the table of formats names. It has no state, so that one serves all weights.

    That of a format with groups gets their size; that of bf16 leaves a weight unchanged.
    """
    module, _, name = format.family.quantizer.partition(":")
    of_class: Callable[..., Quantizer] = getattr(import_module(f"workers.load.formats.{module}"), name)
    return of_class() if format.group is None else of_class(format.group)
