"""NF4 matrix products on a GPU, in Triton: dense layers and groups of experts.

A program decodes a tile of packed rows in registers, in the very layout in which tensor cores take it, so that no weight passes through
shared memory. Levels, and levels times scales, are rounded to the activations' type. Nothing is synchronised and every shape is known from
the tensors' sizes, so CUDA graphs capture it.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.load.formats.nf4 import LEVELS


def _decode(dtype: torch.dtype, product: str) -> str:
    """PTX that turns four bytes ($4) and the scale of each, twice in a register ($5 to $8), into four registers of two weights each.

    prmt picks four bytes of eight by four nibbles at once: the low bytes of four levels, then their high ones, each from the levels 0 to 7
    and from 8 to 15, of which a nibble's highest bit then picks one. The table is constants, because Triton would decode a table that is
    loaded before it converts to the tensor cores' layout. product: what multiplies two values of dtype and adds one, here -0: GPUs before
    Hopper have no mul.bf16x2, and those with one make the same machine code of both.
    """
    table = torch.tensor(LEVELS).to(dtype).view(torch.uint8).view(16, 2).t().contiguous().view(torch.int32).flatten()
    lines = [".reg .b32 c, t, s, m, a, b, l, h, p, z, w<8>; mov.b32 z, 0x80008000;"]
    lines += [f"mov.b32 w{place}, {word & 0xFFFFFFFF:#x};" for place, word in enumerate(table.tolist())]
    lines.append("and.b32 c, $4, 0x77777777; shr.u32 t, $4, 1; lop3.b32 t, t, 0x44444444, 0x32103210, 0xEA;")
    for half in (0, 1):
        lines.append("mov.b32 s, c; mov.b32 m, t;" if half == 0 else "shr.u32 s, c, 16; shr.u32 m, t, 16;")
        lines.append("prmt.b32 a, w0, w1, s; prmt.b32 b, w2, w3, s; prmt.b32 l, a, b, m;")
        lines.append("prmt.b32 a, w4, w5, s; prmt.b32 b, w6, w7, s; prmt.b32 h, a, b, m;")
        for place, order in ((2 * half, 0x4051), (2 * half + 1, 0x6273)):
            lines.append(f"prmt.b32 p, l, h, {order:#x}; {product} ${place}, p, ${place + 5}, z;")
    return "{" + "\n".join(lines) + "}"


_BF16 = tl.constexpr(_decode(torch.bfloat16, "fma.rn.bf16x2"))
_FP16 = tl.constexpr(_decode(torch.float16, "fma.rn.f16x2"))
_REGISTERS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 5))
_LEVELS = tl.constexpr(LEVELS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _decoded(codes, scale, TYPE: tl.constexpr):
    """The weights of the even columns (high nibbles) of these bytes, and of the odd ones. scale: int32, each byte's twice."""
    if _INTERPRETED:
        factor = scale.to(tl.int16).to(TYPE, bitcast=True)
        return _level(codes >> 4, TYPE) * factor, _level(codes, TYPE) * factor
    elif TYPE == tl.bfloat16:  # noqa: SIM300
        pair = tl.inline_asm_elementwise(_BF16, _REGISTERS, [codes, scale], tl.int32, is_pure=True, pack=4)
    else:
        pair = tl.inline_asm_elementwise(_FP16, _REGISTERS, [codes, scale], tl.int32, is_pure=True, pack=4)
    return (pair & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True), (pair >> 16).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def _level(codes, TYPE: tl.constexpr):
    level = tl.zeros(codes.shape, tl.float32)
    for number in tl.static_range(16):
        level = tl.where((codes & 15) == number, _LEVELS[number], level)
    return level.to(TYPE)


@triton.jit
def _scales(scales, row, k, K, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """The scales of rows `row` and COLUMNS columns from k on, [ROWS, groups]; 0 beyond K.

    The scale of a group that is as wide as the block or wider comes twice: with one column Triton would pass the weights through shared
    memory.
    """
    COUNT: tl.constexpr = 2 if GROUP >= COLUMNS else COLUMNS // GROUP
    group = k // GROUP + tl.arange(0, COUNT) // (COUNT * GROUP // COLUMNS)
    return tl.load(scales + row[:, None] * (K // GROUP) + group[None, :], mask=group[None, :] < K // GROUP, other=0.0)


@triton.jit
def _weights(packed, scale, row, k, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr):
    """Rows `row` and COLUMNS columns from k on, [ROWS, COLUMNS]; 0 beyond K. scale: what `_scales` returned. EVEN: nothing is beyond K."""
    BYTES: tl.constexpr = COLUMNS // 2
    COUNT: tl.constexpr = scale.shape[1]
    byte = k // 2 + tl.arange(0, BYTES)
    place = packed + row[:, None] * (K // 2) + byte[None, :]
    if EVEN:
        codes = tl.load(place)
    else:
        codes = tl.load(place, mask=byte[None, :] < K // 2, other=0)
    twice = (scale.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
    twice = tl.reshape(tl.broadcast_to(twice[:, :, None], (ROWS, COUNT, BYTES // COUNT)), (ROWS, BYTES))
    even, odd = _decoded(codes, twice, TYPE)
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))


@triton.jit
def _sum(
    packed, scales, row, source, inside, first, end, K,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows `row` times the activations at source [TOKENS, 1], over the columns from first to end: [ROWS, TOKENS], 0 where not inside."""
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    # Triton copies nothing ahead that is as narrow as a scale, so those of the next block are loaded here.
    ahead = _scales(scales, row, first, K, GROUP, COLUMNS)
    for k in range(first, end, COLUMNS):
        scale = ahead
        ahead = _scales(scales, row, k + COLUMNS, K, GROUP, COLUMNS)
        matrix = _weights(packed, scale, row, k, K, ROWS, COLUMNS, EVEN, source.dtype.element_ty)
        column = k + tl.arange(0, COLUMNS)
        read = inside if EVEN else inside & (column < K)[None, :]
        tokens = tl.load(source + column[None, :], mask=read, other=0.0)
        total = tl.dot(matrix, tl.trans(tokens), total)
    return total


# The number of tokens changes from call to call: no variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, packed, scales, bias, out, M, N, K, stride, part_columns,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [parts, M, N] = x [M, K] times the transpose of [N, K]; part p sums its part_columns columns, and part 0 adds the bias."""
    part = tl.program_id(2)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (n % N).to(tl.int64)
    first = part * part_columns
    end = tl.minimum(K, first + part_columns)
    source = x + m[:, None].to(tl.int64) * stride
    total = _sum(packed, scales, row, source, (m < M)[:, None], first, end, K, GROUP, ROWS, TOKENS, COLUMNS, EVEN)
    if HAS_BIAS:
        total += tl.where(part == 0, tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32), 0.0)[:, None]
    place = out + part.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def sum_kernel(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] = the sum over parts [PARTS, count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + place, mask=place < count, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def decode_kernel(packed, scales, out, N, K, GROUP: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [N, K]: the weights themselves."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS
    row = n % N
    scale = _scales(scales, row, k, K, GROUP, COLUMNS)
    value = _weights(packed, scale, row, k, K, ROWS, COLUMNS, EVEN, out.dtype.element_ty)
    column = k + tl.arange(0, COLUMNS)
    tl.store(out + n[:, None] * K + column[None, :], value, mask=(n < N)[:, None] & (column < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def experts_kernel(
    x, packed, scales, bias, out, weights, sorted_ids, expert_ids, padded, M, N, K, stride,
    TOP: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, PAIRED: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row i of out [M, N] = row i // TOP of x times the transpose of its expert's [N, K].

    A block is TOKENS rows of one expert, as moe_align_block_size sorted them, and ids from M on are padding; PAIRED: it is row `block`
    alone. A block of an expert that is not on this rank (-1) is zeros.
    """
    block = tl.program_id(1)
    if PAIRED:
        row = tl.where(tl.arange(0, TOKENS) == 0, block, M).to(tl.int64)
    else:
        if block * TOKENS >= tl.load(padded):
            return
        row = tl.load(sorted_ids + block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = row < M
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = out + row[None, :] * N + n[:, None]
    kept = inside[None, :] & (n < N)[:, None]
    expert = tl.load(expert_ids + block).to(tl.int64)
    if expert < 0:
        tl.store(place, tl.zeros((ROWS, TOKENS), out.dtype.element_ty), mask=kept)
        return
    matrix_row = (n % N).to(tl.int64)
    packed += expert * N * (K // 2)
    scales += expert * N * (K // GROUP)
    source = x + (row // TOP)[:, None] * stride
    total = _sum(packed, scales, matrix_row, source, inside[:, None], 0, K, K, GROUP, ROWS, TOKENS, COLUMNS, EVEN)
    if HAS_BIAS:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if WEIGHTED:
        total *= tl.load(weights + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=kept)


class Matrix(NamedTuple):
    """packed: uint8 [N, K/2], or [experts, N, K/2]; scale: bfloat16, as many rows, K/group columns; bias: [N], or [experts, N]."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None = None


class Routing(NamedTuple):
    """order: what moe_align_block_size returned for the tile's tokens, or the expert of each pair, -1 for none here; pairs: of a token and
    an expert; top: the pairs that have one row of the activations; weights: the router's, float32 [pairs], or None."""

    order: tuple[Tensor, Tensor, Tensor] | Tensor
    pairs: int
    top: int
    weights: Tensor | None = None


def linear(x: Tensor, matrix: Matrix, tile: tuple[int, ...]) -> Tensor:
    """x [M, K] -> [M, N]. tile: (tokens, rows, columns, parts, warps, stages)."""
    tokens, rows, columns, parts, warps, stages = tile
    packed, scale, bias = matrix
    (m, k), n = x.shape, packed.shape[0]
    share = triton.cdiv(triton.cdiv(k, columns), parts) * columns
    parts = triton.cdiv(k, share)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, rows), triton.cdiv(m, tokens), parts)
    constants = {"GROUP": k // scale.shape[1], "HAS_BIAS": bias is not None, "EVEN": k % columns == 0, "TOKENS": tokens, "ROWS": rows}
    arguments = (x, packed, scale, x if bias is None else bias, sums, m, n, k, x.stride(0), share)
    with torch.cuda.device_of(x):
        linear_kernel[grid](*arguments, **constants, COLUMNS=columns, num_warps=warps, num_stages=stages)
        if parts > 1:
            sum_kernel[(triton.cdiv(m * n, 256),)](sums, out, m * n, PARTS=parts, BLOCK=256, num_warps=2)
    return out


def decoded(matrix: Matrix, out: Tensor) -> Tensor:
    """The weights [N, K] themselves, in out."""
    n, k = out.shape
    constants = {"GROUP": k // matrix.scale.shape[1], "EVEN": k % 256 == 0, "ROWS": 8, "COLUMNS": 256}
    with torch.cuda.device_of(out):
        decode_kernel[(triton.cdiv(n, 8), triton.cdiv(k, 256))](*matrix[:2], out, n, k, **constants, num_warps=4)
    return out


def experts(x: Tensor, matrix: Matrix, routing: Routing, tile: tuple[int, ...]) -> Tensor:
    """x [pairs / top, K] -> [pairs, N], each row by the expert that it is for. tile: (tokens, rows, columns, warps, stages)."""
    tokens, rows, columns, warps, stages = tile
    packed, scale, bias = matrix
    order, pairs, top, weights = routing
    n, k = packed.shape[1], x.shape[1]
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    if isinstance(order, Tensor):
        sorted_ids, expert_ids, padded, blocks = order, order, order, pairs
    else:
        sorted_ids, expert_ids, padded = order
        # A block holds the tokens of one expert: no more blocks than pairs can have something in them.
        blocks = min(triton.cdiv(sorted_ids.shape[0], tokens), pairs)
    constants = {"TOP": top, "GROUP": k // scale.shape[2], "HAS_BIAS": bias is not None, "WEIGHTED": weights is not None}
    constants |= {"PAIRED": isinstance(order, Tensor), "EVEN": k % columns == 0, "TOKENS": tokens, "ROWS": rows, "COLUMNS": columns}
    tensors = (x, packed, scale, x if bias is None else bias, out, x if weights is None else weights, sorted_ids, expert_ids, padded)
    with torch.cuda.device_of(x):
        experts_kernel[triton.cdiv(n, rows), blocks](*tensors, pairs, n, k, x.stride(0), **constants, num_warps=warps, num_stages=stages)
    return out
