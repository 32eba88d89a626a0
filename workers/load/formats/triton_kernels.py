"""The quantizers as CUDA kernels: each reads a weight once and searches the scale in registers.

Each tries the scales that the torch quantizer beside it tries. Strides are free, nothing is synchronised.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program: 16 for each of 128 threads, so that a thread loads 16 bytes twice.
_TILE = 2048
# An argument that would only make Triton compile once more, for its being 1 or divisible by 16.
_PLAIN = ["groups"]


def amax(weight: Tensor) -> Tensor:
    """The largest magnitude of each matrix of [B, N, K], float32 [B]; NaN where it holds one. K is divisible by 16."""
    bits = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
    _launch(_amax, weight, 16, bits, tile=4 * _TILE)
    return bits.view(torch.float32)


def nvfp4(weight: Tensor, words: Tensor, scale: Tensor, divisor: Tensor, scales: range, bias: int, count: int) -> None:
    """[B, N, K] -> words int32 [B, N, K/8], scale uint8 [B, N, K/16] (E4M3); divisor float32 [B].

    scales: the codes of a scale that are tried.
    bias: see nvfp4.SCALE_BIAS.
    count: how many of them for each group.
    """
    _launch(_nvfp4, weight, 16, words, scale, divisor, BIAS=bias, FIRST=scales.start, LAST=scales.stop - 1, SCALES=count)


def mxfp4(weight: Tensor, words: Tensor, scale: Tensor) -> None:
    """[B, N, K] -> words int32 [B, N, K/8], scale uint8 [B, N, K/32] (E8M0)."""
    _launch(_mxfp4, weight, 32, words, scale)


def int4(weight: Tensor, words: Tensor, scale: Tensor, group_size: int, divisors: Sequence[float], smallest: float) -> None:
    """[B, N, K] -> words int32 [B, N, K/8], scale bfloat16 [B, N, K/group_size]. divisors: five, in the order in which they are tried."""
    a, b, c, d, e = (1 / divisor for divisor in divisors)
    _launch(_int4, weight, group_size, words, scale, A=a, B=b, C=c, D=d, E=e, SMALLEST=smallest)


def nf4(
    weight: Tensor, words: Tensor, scale: Tensor, group_size: int, levels: Sequence[float], factors: Sequence[float], smallest: float
) -> None:
    """[B, N, K] -> words int32 [B, N, K/8], scale bfloat16 [B, N, K/group_size]. factors: four, in the order in which they are tried."""
    table = torch.tensor(levels, dtype=torch.float32, device=weight.device)
    a, b, c, d = factors
    _launch(_nf4, weight, group_size, words, scale, table, A=a, B=b, C=c, D=d, SMALLEST=smallest)


def fp8(weight: Tensor, value: Tensor, scale: Tensor, largest: float, smallest: float) -> None:
    """[B, N, K] -> value float8_e4m3fn [B, N, K], scale float32 [B, N, 1]."""
    matrices, rows, columns = weight.shape
    block = min(triton.next_power_of_2(columns), 8192)
    arguments = (weight, value.view(torch.uint8), scale, rows, columns, *weight.stride())
    constants = {"INVERSE": 1 / largest, "SMALLEST": smallest, "BLOCK": block}
    with torch.cuda.device_of(weight):
        _fp8[(rows, matrices)](*arguments, **constants, num_warps=4 if block <= 4096 else 8, enable_fp_fusion=False)


def fp8_block(weight: Tensor, value: Tensor, scale: Tensor, largest: float, smallest: float, block: int) -> None:
    """[B, N, K] -> value float8_e4m3fn [B, N, K], scale float32 [B, ceil(N/block), ceil(K/block)]."""
    matrices, rows, columns = weight.shape
    arguments = (weight, value.view(torch.uint8), scale, rows, columns, *weight.stride())
    constants = {"INVERSE": 1 / largest, "SMALLEST": smallest, "BLOCK": block}
    with torch.cuda.device_of(weight):
        _fp8_block[(scale.shape[1] * scale.shape[2], matrices)](*arguments, **constants, num_warps=8, enable_fp_fusion=False)


def _launch(kernel: triton.JITFunction, weight: Tensor, size: int, *results: Tensor, tile: int = _TILE, **constants: float) -> None:
    """One program for each tile of each matrix."""
    matrices, rows, columns = weight.shape
    groups = rows * columns // size
    held = max(1, tile // size)
    contiguous = weight.is_contiguous()
    strides = (0, 0, 0, 0) if contiguous else (columns // size, *weight.stride())
    shape = {"SIZE": size, "HELD": held, "CONTIGUOUS": contiguous}
    with torch.cuda.device_of(weight):
        programs = (triton.cdiv(groups, held), matrices)
        kernel[programs](weight, *results, groups, *strides, **shape, **constants, num_warps=4, enable_fp_fusion=False)


@triton.jit
def _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """(value float32 [HELD, SIZE], group within the matrix [HELD], whether it exists, groups before this matrix)."""
    group = tl.program_id(0) * HELD + tl.arange(0, HELD)
    inside = group < groups
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, SIZE)
    if CONTIGUOUS:
        offset = (matrix * groups + group)[:, None] * SIZE + column[None, :]
    else:
        row = (group // per_row).to(tl.int64)
        first = (group % per_row).to(tl.int64) * SIZE
        offset = matrix * stride_b + (row * stride_n)[:, None] + (first[:, None] + column[None, :]) * stride_k
    value = tl.load(weight + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    return value, group, inside, matrix * groups


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _clamp(value, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(value, LOW), HIGH)


@triton.jit
def _store_words(words, code, group, before, inside, SIZE: tl.constexpr, HELD: tl.constexpr, SWAPPED: tl.constexpr = 0):
    """Packs codes (int32 [HELD, SIZE], 0 to 15), the first of eight in the lowest nibble; with SWAPPED 1 the second."""
    octets = tl.reshape(code, (HELD, SIZE // 8, 8)) << ((tl.arange(0, 8) ^ SWAPPED) * 4)[None, None, :]
    word = tl.xor_sum(octets, axis=2)
    offset = (before + group)[:, None] * (SIZE // 8) + tl.arange(0, SIZE // 8)[None, :]
    tl.store(words + offset, word, mask=inside[:, None])


@triton.jit
def _sum(value, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Sum over dim 1, [HELD, SIZE] -> [HELD]: within eight columns a thread adds alone."""
    even, odd = tl.split(tl.reshape(value, (HELD, SIZE // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (HELD, SIZE // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (HELD, SIZE // 8, 2)))
    return tl.sum(even + odd, axis=1)


@triton.jit
def _least(error, NUMBER: tl.constexpr, smallest):
    """The smallest error so far, with its number in the low bits: floats >= 0 are ordered like their bits."""
    return tl.minimum(smallest, (_bits(error) & -8) | NUMBER)


@triton.jit
def _e2m1(value):
    """e2m1.encode."""
    magnitude = tl.minimum(tl.abs(value), 6.0)
    step = _float(tl.maximum(_bits(magnitude) & 0x7F800000, 0x3F800000))
    code = _bits(magnitude + step * 4194307.0)
    return (((code >> 22) + code) & 7) | ((_bits(value) >> 28) & 8)


@triton.jit
def _squared_error(magnitude, SATURATE: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Sum over dim 1 of the squared distances to the nearest E2M1 values. SATURATE: magnitudes of 7 and more may occur.

    Both neighbours of a tie are equally far, so max(x, 1) can stand for the power of two below it.
    """
    shift = tl.maximum(magnitude, 1.0) * 4194304.0
    rounded = (magnitude + shift) - shift
    if SATURATE:
        rounded = tl.minimum(rounded, 6.0)
    distance = rounded - magnitude
    return _sum(distance * distance, SIZE, HELD)


@triton.jit(do_not_specialize=_PLAIN)
def _amax(weight, result, groups, per_row, stride_b, stride_n, stride_k, SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr):
    value, _, _, _ = _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE, HELD, CONTIGUOUS)
    # The bits of magnitudes order as integers do, NaN above infinity.
    tl.atomic_max(result + tl.program_id(1), tl.max(tl.max(_bits(tl.abs(value)), axis=1), axis=0))


@triton.jit(do_not_specialize=_PLAIN)
def _nvfp4(
    weight, words, scales, divisors, groups, per_row, stride_b, stride_n, stride_k,
    SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    value, group, inside, before = _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE, HELD, CONTIGUOUS)
    value = value * tl.load(divisors + tl.program_id(1))
    magnitude = tl.abs(value)
    first = _clamp((_bits(tl.max(magnitude, axis=1) * (1 / 7)) >> 20) - (BIAS - 1), FIRST, LAST)
    smallest = tl.full((HELD,), 0x7FFFFFFF, tl.int32)
    for step in tl.static_range(SCALES):
        scale = _float((tl.minimum(first + step, LAST) + BIAS) << 20)
        error = _squared_error(magnitude * _inverse(scale)[:, None], False, SIZE, HELD) * (scale * scale)
        smallest = _least(error, step, smallest)
    best = tl.minimum(first + (smallest & 7), LAST)
    chosen = _float((best + BIAS) << 20)
    _store_words(words, _e2m1(tl.div_rn(value, tl.broadcast_to(chosen[:, None], (HELD, SIZE)))), group, before, inside, SIZE, HELD)
    tl.store(scales + before + group, best.to(tl.uint8), mask=inside)


@triton.jit
def _try_mxfp4(magnitude, base, smallest, NUMBER: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr):
    biased = tl.maximum(base + STEP, 1)
    unit = _float((127 + 2 * tl.minimum(biased - base, 1)) << 23)
    error = _squared_error(magnitude * _float((254 - biased) << 23)[:, None], STEP < 1, SIZE, HELD) * unit
    return _least(error, NUMBER, smallest)


@triton.jit(do_not_specialize=_PLAIN)
def _mxfp4(
    weight, words, scales, groups, per_row, stride_b, stride_n, stride_k,
    SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    value, group, inside, before = _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE, HELD, CONTIGUOUS)
    magnitude = tl.abs(value)
    base = (_bits(tl.max(magnitude, axis=1)) >> 23) - 2
    smallest = tl.full((HELD,), 0x7FFFFFFF, tl.int32)
    smallest = _try_mxfp4(magnitude, base, smallest, 0, 0, SIZE, HELD)
    smallest = _try_mxfp4(magnitude, base, smallest, 1, 1, SIZE, HELD)
    smallest = _try_mxfp4(magnitude, base, smallest, 2, -1, SIZE, HELD)
    number = smallest & 7
    best = tl.maximum(base + tl.where(number == 2, -1, number), 1)
    _store_words(words, _e2m1(value * _float((254 - best) << 23)[:, None]), group, before, inside, SIZE, HELD)
    tl.store(scales + before + group, best.to(tl.uint8), mask=inside)


@triton.jit
def _to_int4(scaled):
    # 1.5 * 2**23: the sum has no fraction left, rounded to nearest even.
    return _clamp((scaled + 12582912.0) - 12582912.0, -8.0, 7.0)


@triton.jit
def _int4_error(value, scale, amax, SIZE: tl.constexpr, HELD: tl.constexpr):
    scaled = value * _inverse(scale)[:, None]
    distance = _to_int4(scaled) - scaled
    ratio = tl.div_rn(scale, amax)
    return _sum(distance * distance, SIZE, HELD) * (ratio * ratio)


@triton.jit
def _as_bf16(value):
    # Written out, because Triton's interpreter cuts the bits off.
    bits = _bits(value)
    return _float((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)


@triton.jit
def _scale_int4(amax, sign, INVERSE: tl.constexpr, SMALLEST: tl.constexpr):
    return _as_bf16(tl.maximum(amax * INVERSE, SMALLEST) * sign)


@triton.jit(do_not_specialize=_PLAIN)
def _int4(
    weight, words, scales, groups, per_row, stride_b, stride_n, stride_k,
    SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    value, group, inside, before = _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE, HELD, CONTIGUOUS)
    high = tl.max(value, axis=1)
    low = -tl.min(value, axis=1)
    amax = tl.maximum(tl.maximum(high, low), SMALLEST)
    sign = tl.where(high > low, -1.0, 1.0)
    a = _scale_int4(amax, sign, A, SMALLEST)
    b = _scale_int4(amax, sign, B, SMALLEST)
    c = _scale_int4(amax, sign, C, SMALLEST)
    d = _scale_int4(amax, sign, D, SMALLEST)
    e = _scale_int4(amax, sign, E, SMALLEST)
    smallest = tl.full((HELD,), 0x7FFFFFFF, tl.int32)
    smallest = _least(_int4_error(value, a, amax, SIZE, HELD), 0, smallest)
    smallest = _least(_int4_error(value, b, amax, SIZE, HELD), 1, smallest)
    smallest = _least(_int4_error(value, c, amax, SIZE, HELD), 2, smallest)
    smallest = _least(_int4_error(value, d, amax, SIZE, HELD), 3, smallest)
    smallest = _least(_int4_error(value, e, amax, SIZE, HELD), 4, smallest)
    number = smallest & 7
    best = tl.where(number == 0, a, tl.where(number == 1, b, tl.where(number == 2, c, tl.where(number == 3, d, e))))
    scaled = value * _inverse(best)[:, None]
    rounded = _to_int4(scaled)
    above = _sum(scaled * rounded, SIZE, HELD)
    below = _sum(rounded * rounded, SIZE, HELD)
    refined = tl.where(above > 0, _as_bf16(best * tl.div_rn(above, tl.where(above > 0, below, 1.0))), best)
    smallest = _least(_int4_error(value, refined, amax, SIZE, HELD), 5, smallest)
    best = tl.where((smallest & 7) == 5, refined, best)
    code = _to_int4(tl.div_rn(value, tl.broadcast_to(best[:, None], (HELD, SIZE)))).to(tl.int32) + 8
    _store_words(words, code, group, before, inside, SIZE, HELD)
    tl.store(scales + before + group, best.to(tl.bfloat16), mask=inside)


@triton.jit
def _nf4_level(scaled, table, SIZE: tl.constexpr, HELD: tl.constexpr):
    """(level float32, code int32) of each value: the code counts the boundaries below it."""
    lower = tl.load(table)
    level = tl.broadcast_to(lower, (HELD, SIZE))
    code = tl.zeros((HELD, SIZE), tl.int32)
    for number in tl.static_range(1, 16):
        upper = tl.load(table + number)
        above = scaled > (upper + lower) / 2
        level = tl.where(above, upper, level)
        code += above.to(tl.int32)
        lower = upper
    return level, code


@triton.jit
def _nf4_error(value, scale, amax, table, SIZE: tl.constexpr, HELD: tl.constexpr):
    scaled = value * _inverse(scale)[:, None]
    level, _ = _nf4_level(scaled, table, SIZE, HELD)
    distance = level - scaled
    ratio = tl.div_rn(scale, amax)
    return _sum(distance * distance, SIZE, HELD) * (ratio * ratio)


@triton.jit(do_not_specialize=_PLAIN)
def _nf4(
    weight, words, scales, table, groups, per_row, stride_b, stride_n, stride_k,
    SIZE: tl.constexpr, HELD: tl.constexpr, CONTIGUOUS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    value, group, inside, before = _tile_of(weight, groups, per_row, stride_b, stride_n, stride_k, SIZE, HELD, CONTIGUOUS)
    amax = tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST)
    least = tl.full((HELD,), 0x7FFFFFFF, tl.int32)
    error = tl.zeros((HELD,), tl.float32)
    best = amax
    for number in tl.static_range(8):
        factor = A if number < 2 else (B if number < 4 else (C if number < 6 else D))
        scale = _as_bf16(tl.maximum(amax * factor, SMALLEST)) * (1.0 if number % 2 == 0 else -1.0)
        its = _nf4_error(value, scale, amax, table, SIZE, HELD)
        smaller = _least(its, number, least)
        best = tl.where(smaller < least, scale, best)
        error = tl.where(smaller < least, its, error)
        least = smaller
    scaled = value * _inverse(best)[:, None]
    level, _ = _nf4_level(scaled, table, SIZE, HELD)
    above = _sum(scaled * level, SIZE, HELD)
    below = _sum(level * level, SIZE, HELD)
    refined = _as_bf16(best * tl.div_rn(above, tl.where(above > 0, below, 1.0)))
    refined = tl.where((above > 0) & (tl.abs(refined) >= SMALLEST), refined, best)
    best = tl.where(_nf4_error(value, refined, amax, table, SIZE, HELD) < error, refined, best)
    _, code = _nf4_level(tl.div_rn(value, tl.broadcast_to(best[:, None], (HELD, SIZE))), table, SIZE, HELD)
    _store_words(words, code, group, before, inside, SIZE, HELD, SWAPPED=1)
    tl.store(scales + before + group, best.to(tl.bfloat16), mask=inside)


@triton.jit
def _e4m3(value):
    """Codes (uint8) of values between -448 and 448, to nearest even; by hand, for GPUs that cannot convert."""
    magnitude = tl.abs(value)
    bits = _bits(magnitude)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the distance is 2**-9, the last place of a float32 that begins at 2**14.
    subnormal = _bits(magnitude + 16384.0) & 0xF
    code = tl.minimum(tl.where(magnitude < 0.015625, subnormal, normal), 0x7E)
    return (code | ((_bits(value) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def _fp8(
    weight, values, scales, rows, columns, stride_b, stride_n, stride_k,
    INVERSE: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row; the second pass finds the row in a cache."""
    row = tl.program_id(0).to(tl.int64)
    matrix = tl.program_id(1).to(tl.int64)
    source = weight + matrix * stride_b + row * stride_n
    target = values + (matrix * rows + row) * columns
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column.to(tl.int64) * stride_k, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest, axis=0) * INVERSE, SMALLEST)
    tl.store(scales + matrix * rows + row, scale)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column.to(tl.int64) * stride_k, mask=column < columns, other=0.0).to(tl.float32)
        tl.store(target + column, _e4m3(tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * scale)), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _fp8_block(
    weight, values, scales, rows, columns, stride_b, stride_n, stride_k,
    INVERSE: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // across) * BLOCK + tl.arange(0, BLOCK)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = (row.to(tl.int64) * stride_n)[:, None] + (column.to(tl.int64) * stride_k)[None, :]
    value = tl.load(weight + matrix * stride_b + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(value), axis=1), axis=0) * INVERSE, SMALLEST)
    tl.store(scales + matrix * tl.cdiv(rows, BLOCK) * across + tl.program_id(0), scale)
    code = _e4m3(tl.div_rn(value, tl.full((BLOCK, BLOCK), 1.0, tl.float32) * scale))
    target = values + matrix * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, code, mask=inside)
