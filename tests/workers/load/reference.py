"""The weight formats in numpy, written from their specifications: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0), NVIDIA's NVFP4, and
compressed-tensors' packing. It shares no code with workers.load.formats and never calls torch.

Weights are float64 arrays [N, K], which hold every bfloat16, float16 and float32 exactly; parts are arrays of bytes or integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Codes = NDArray[np.int64]


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """Value of every code of a small float with a sign bit on top; no infinities (a code that means NaN is the caller's to know)."""
    values = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        fraction = mantissa / (1 << mantissa_bits)
        values.append(sign * (2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)))
    return np.array(values)


E2M1 = minifloat(2, 1, 1)
E4M3 = minifloat(4, 3, 7)  # codes 0x7F and 0xFF are NaN
E8M0 = 2.0 ** (np.arange(255) - 127.0)  # code 0xFF is NaN


# QLoRA (arXiv 2305.14314), appendix E, in float32.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], dtype=np.float32)  # fmt: skip


def nearest(value: Array, grid: Array) -> Codes:
    """Code of the grid value (codes in ascending order of value, from 0 on) nearest to each magnitude; ties to even codes; saturating."""
    upper = np.clip(np.searchsorted(grid, value), 1, len(grid) - 1)
    below, above = value - grid[upper - 1], grid[upper] - value
    take_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(take_lower, upper - 1, upper)


def encode_e2m1(value: Array) -> Codes:
    return nearest(np.abs(value), E2M1[:8]) | (np.signbit(value).astype(np.int64) << 3)


def encode_e4m3(value: Array) -> Codes:
    return nearest(np.abs(value), E4M3[:0x7F]) | (np.signbit(value).astype(np.int64) << 7)


def encode_int4(value: Array) -> Codes:
    """Codes 0 to 15 for -8 to 7."""
    return np.clip(np.rint(value), -8, 7).astype(np.int64) + 8


def encode_nf4(value: Array) -> Codes:
    """The level nearest to each value, the lower of two that are equally far in float32's arithmetic."""
    return np.searchsorted((NF4[1:] + NF4[:-1]) / 2, value, side="left")


def nibbles(packed: NDArray[np.uint8]) -> Codes:
    """[N, K/2] -> [N, K]: the even column is in the low nibble."""
    wide = packed.astype(np.int64)
    return np.stack([wide & 15, wide >> 4], -1).reshape(*packed.shape[:-1], -1)


def high_first(packed: NDArray[np.uint8]) -> Codes:
    """[N, K/2] -> [N, K]: the even column is in the high nibble."""
    wide = packed.astype(np.int64)
    return np.stack([wide >> 4, wide & 15], -1).reshape(*packed.shape[:-1], -1)


def octets(packed: NDArray[np.int32]) -> Codes:
    """[N, K/8] -> [N, K]: the first of eight codes is in the lowest nibble."""
    wide = packed.astype(np.int64) & 0xFFFFFFFF
    return np.stack([(wide >> shift) & 15 for shift in range(0, 32, 4)], -1).reshape(*packed.shape[:-1], -1)


def bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def spread(scale: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    return np.repeat(scale, size, axis=-1)


def dequantize(name: str, parts: Mapping[str, NDArray], group: int = 0) -> NDArray[np.float32]:
    """What the parts of one weight [N, K] stand for. Scales that torch has no numpy type for come as their bits."""
    if name == "nvfp4":
        scale = E4M3[parts["weight_scale"]].astype(np.float32) / parts["weight_global_scale"]
        return E2M1[nibbles(parts["weight_packed"])].astype(np.float32) * spread(scale, 16)
    if name == "mxfp4":
        return (E2M1[nibbles(parts["weight_packed"])] * spread(E8M0[parts["weight_scale"]], 32)).astype(np.float32)
    if name == "int4":
        return (octets(parts["weight_packed"]) - 8).astype(np.float32) * spread(bfloat16(parts["weight_scale"]), group)
    if name == "nf4":
        return NF4[high_first(parts["weight_packed"])] * spread(bfloat16(parts["weight_scale"]), group)
    value = E4M3[parts["weight"]].astype(np.float32)
    if name == "fp8":
        return value * parts["weight_scale"]
    n, k = value.shape
    return value * spread(np.repeat(parts["weight_scale"], 128, axis=0)[:n], 128)[:, :k]


def codes(name: str, weight: NDArray[np.float32], parts: Mapping[str, NDArray], group: int = 0) -> Codes:
    """The codes that a weight must have under the scales chosen for it: its float32 quotient, rounded to nearest even."""
    n, k = weight.shape
    if name == "nvfp4":
        scaled = weight * parts["weight_global_scale"]
        return encode_e2m1((scaled / spread(E4M3[parts["weight_scale"]].astype(np.float32), 16)).astype(np.float64))
    if name == "mxfp4":
        return encode_e2m1(weight.astype(np.float64) / spread(E8M0[parts["weight_scale"]], 32))
    if name == "int4":
        return encode_int4((weight / spread(bfloat16(parts["weight_scale"]), group)).astype(np.float64))
    if name == "nf4":
        return encode_nf4(weight / spread(bfloat16(parts["weight_scale"]), group))
    if name == "fp8":
        return encode_e4m3((weight / parts["weight_scale"]).astype(np.float64))
    scale = spread(np.repeat(parts["weight_scale"], 128, axis=0)[:n], 128)[:, :k]
    return encode_e4m3((weight / scale).astype(np.float64))


def stored_codes(name: str, parts: Mapping[str, NDArray]) -> Codes:
    if name in ("nvfp4", "mxfp4"):
        return nibbles(parts["weight_packed"])
    if name == "nf4":
        return high_first(parts["weight_packed"])
    return octets(parts["weight_packed"]) if name == "int4" else parts["weight"].astype(np.int64)


def least_error(groups: Array, scales: Array, encode: Callable[[Array], Codes], values: Array) -> Array:
    """The smallest squared error [B] of groups [B, G] over candidate scales [S] or [S, B], by trying every one."""
    best = np.full(groups.shape[0], np.inf)
    for scale in scales:
        column = np.broadcast_to(scale, best.shape)[:, None]
        error = ((values[encode(groups / column)] * column - groups) ** 2).sum(1)
        best = np.minimum(best, error)
    return best
