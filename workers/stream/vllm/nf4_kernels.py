"""NF4 matrix products on a GPU, in Triton: dense layers and groups of experts. It never quantizes, and never routes.

A program holds a tile of packed rows, looks their levels up in a table of 16 in registers, multiplies them by their scales, and leaves
the products to the tensor cores. Levels and products are rounded to the activations' type. A word has eight columns, and each of the eight
is a product of its own: the activations are split the same way. Nothing is synchronised and every shape is known from the tensors' sizes,
so CUDA graphs capture it.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkd.errors import CheckpointError
from workers.stream.formats.nf4 import LEVELS

# Selects bytes of a table by the codes of one half of a word: two of 8 codes, then the one that the code's highest bit means.
_HALF = """
prmt.b32 a, $10, $12, s; prmt.b32 b, $14, $16, s; prmt.b32 k, 0xFF00, 0, m; lop3.b32 l, a, b, k, 0xD8;
prmt.b32 a, $18, $20, s; prmt.b32 b, $22, $24, s; lop3.b32 h, a, b, k, 0xD8;
prmt.b32 e{place}, l, h, 0x7351; prmt.b32 o{place}, l, h, 0x6240;
"""


def _lookup() -> str:
    """PTX that turns two words of eight codes, and the eight words of `table`, into eight registers: the levels of both words' columns 0,
    1, ..

    prmt picks four bytes by four nibbles at once, so the table stays in registers. Its words are arguments, not constants, because a
    constant would be put into a register again for each use.
    """
    lines = [".reg .b32 a, b, k, l, h, c, t, s, m, e<4>, o<4>;"]
    for number, word in enumerate(("$8", "$9")):
        lines.append(f"and.b32 c, {word}, 0x77777777; shr.u32 t, {word}, 3; and.b32 t, t, 0x11111111;")
        for half in (0, 1):
            lines.append("mov.b32 s, c; mov.b32 m, t;" if half == 0 else "shr.u32 s, c, 16; shr.u32 m, t, 16;")
            lines.append(_HALF.format(place=2 * number + half))
    for half in (0, 1):
        for parity, name in ((0, "e"), (1, "o")):
            lines.append(f"prmt.b32 ${4 * half + parity}, {name}{half}, {name}{half + 2}, 0x5410;")
            lines.append(f"prmt.b32 ${4 * half + parity + 2}, {name}{half}, {name}{half + 2}, 0x7632;")
    return "{" + "\n".join(lines) + "}"


def table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels in this type of two bytes, int32 [8]: their low bytes, four a word, then their high bytes."""
    if dtype.itemsize != 2:
        raise CheckpointError(f"nf4 computes in bfloat16 or float16 on a GPU, not in {dtype}", cure="Leave `dtype` out")
    levels = torch.tensor(LEVELS).to(dtype).view(torch.uint8).view(16, 2)
    return levels.t().contiguous().view(torch.int32).flatten().to(device)


_PTX = tl.constexpr(_lookup())
_REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 18))
_LEVELS = tl.constexpr(LEVELS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _table(table):
    """Its words, which stay in registers."""
    return (
        tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3),
        tl.load(table + 4), tl.load(table + 5), tl.load(table + 6), tl.load(table + 7),
    )  # fmt: skip


@triton.jit
def _levels(words, low0, low1, low2, low3, high0, high1, high2, high3, TYPE: tl.constexpr):
    """The levels of columns 0 to 7 of each word, eight tensors of its shape."""
    if _INTERPRETED:
        return (
            _level(words >> 4, TYPE), _level(words, TYPE), _level(words >> 12, TYPE), _level(words >> 8, TYPE),
            _level(words >> 20, TYPE), _level(words >> 16, TYPE), _level(words >> 28, TYPE), _level(words >> 24, TYPE),
        )  # fmt: skip
    elif TYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            _PTX, _REGISTERS, [words, low0, low1, low2, low3, high0, high1, high2, high3],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _PTX, _REGISTERS, [words, low0, low1, low2, low3, high0, high1, high2, high3],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _level(words, TYPE: tl.constexpr):
    level = tl.zeros(words.shape, tl.float32)
    for number in tl.static_range(16):
        level = tl.where((words & 15) == number, _LEVELS[number], level)
    return level.to(TYPE)


@triton.jit
def _decoded(
    packed, scales, table, n, k, K, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr
):
    """Rows n [ROWS] and COLUMNS columns from k on: columns 0, 8, .. of the block, columns 1, 9, .., and so on: eight of [ROWS, COLUMNS/8].

    0 beyond K; EVEN: nothing is beyond it. table: what `_table` returned."""
    WORDS: tl.constexpr = COLUMNS // 8
    SHARED: tl.constexpr = WORDS if GROUP >= COLUMNS else GROUP // 8
    COUNT: tl.constexpr = WORDS // SHARED
    word = k // 8 + tl.arange(0, WORDS)
    group = k // GROUP + tl.arange(0, COUNT)
    place = packed + n[:, None] * (K // 8) + word[None, :]
    scale_place = scales + n[:, None] * (K // GROUP) + group[None, :]
    if EVEN:
        codes = tl.load(place)
        scale = tl.load(scale_place)
    else:
        codes = tl.load(place, mask=word[None, :] < K // 8, other=0)
        scale = tl.load(scale_place, mask=group[None, :] < K // GROUP, other=0.0)
    scale = scale.to(TYPE)
    if COUNT == 1:
        scale = tl.broadcast_to(scale, (ROWS, WORDS))
    else:
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, COUNT, SHARED)), (ROWS, WORDS))
    low0, low1, low2, low3, high0, high1, high2, high3 = table
    a, b, c, d, e, f, g, h = _levels(codes, low0, low1, low2, low3, high0, high1, high2, high3, TYPE)
    return a * scale, b * scale, c * scale, d * scale, e * scale, f * scale, g * scale, h * scale


@triton.jit
def _product(tokens, weights, total, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """total plus tokens [TOKENS, COLUMNS] times what `_decoded` returned."""
    even, odd = tl.split(tl.reshape(tokens, (TOKENS, COLUMNS // 8, 2, 2, 2)))
    even0, even1 = tl.split(even)
    odd0, odd1 = tl.split(odd)
    t0, t4 = tl.split(even0)
    t2, t6 = tl.split(even1)
    t1, t5 = tl.split(odd0)
    t3, t7 = tl.split(odd1)
    a, b, c, d, e, f, g, h = weights
    total = tl.dot(t0, tl.trans(a), total)
    total = tl.dot(t1, tl.trans(b), total)
    total = tl.dot(t2, tl.trans(c), total)
    total = tl.dot(t3, tl.trans(d), total)
    total = tl.dot(t4, tl.trans(e), total)
    total = tl.dot(t5, tl.trans(f), total)
    total = tl.dot(t6, tl.trans(g), total)
    return tl.dot(t7, tl.trans(h), total)


# The number of tokens changes from call to call: no variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["M", "parts"])
def linear_kernel(
    x, packed, scales, table, bias, out, M, N, K, stride, parts,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [parts, M, N] = x [M, K] times the transpose of [N, K]; part p sums every parts-th block of columns, part 0 adds the bias."""
    part = tl.program_id(2)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (n % N).to(tl.int64)
    words = _table(table)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for block in range(part, tl.cdiv(K, COLUMNS), parts):
        k = block * COLUMNS
        weights = _decoded(packed, scales, words, row, k, K, GROUP, ROWS, COLUMNS, EVEN, x.dtype.element_ty)
        column = k + tl.arange(0, COLUMNS)
        inside = (m < M)[:, None] if EVEN else (m < M)[:, None] & (column < K)[None, :]
        tokens = tl.load(x + m[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
        total = _product(tokens, weights, total, TOKENS, COLUMNS)
    if HAS_BIAS:
        total += tl.where(part == 0, tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32), 0.0)[None, :]
    place = out + part.to(tl.int64) * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def vector_kernel(
    x, packed, scales, table, bias, out, weights, experts, N, K, stride,
    TOP: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, ROUTED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row i of out [pairs, N] = row i // TOP of x times the transpose of [N, K], the one of expert i where it is ROUTED; -1 gives zeros.

    Without tensor cores: for one token they would be idle for 15 of 16 rows.
    """
    pair = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = out + pair.to(tl.int64) * N + n
    expert = pair.to(tl.int64) * 0
    if ROUTED:
        expert = tl.load(experts + pair).to(tl.int64)
    if expert < 0:
        tl.store(place, tl.zeros((ROWS,), out.dtype.element_ty), mask=n < N)
        return
    WORDS: tl.constexpr = COLUMNS // 8
    words = _table(table)
    row = (n % N).to(tl.int64)
    packed += expert * N * (K // 8)
    scales += expert * N * (K // GROUP)
    source = x + (pair // TOP).to(tl.int64) * stride
    total = tl.zeros((ROWS, WORDS), tl.float32)
    for k in range(0, K, COLUMNS):
        columns = _decoded(packed, scales, words, row, k, K, GROUP, ROWS, COLUMNS, EVEN, x.dtype.element_ty)
        word = k + 8 * tl.arange(0, WORDS)
        for number in tl.static_range(8):
            if EVEN:
                token = tl.load(source + word + number)
            else:
                token = tl.load(source + word + number, mask=word < K, other=0.0)
            total += columns[number].to(tl.float32) * token.to(tl.float32)[None, :]
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
    if WEIGHTED:
        result *= tl.load(weights + pair).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def sum_kernel(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] = the sum over parts [PARTS, count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + place, mask=place < count, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def decode_kernel(packed, scales, table, out, N, K, GROUP: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [N, K]: the weights themselves."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS
    a, b, c, d, e, f, g, h = _decoded(packed, scales, _table(table), n % N, k, K, GROUP, ROWS, COLUMNS, EVEN, out.dtype.element_ty)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    column = k + tl.arange(0, COLUMNS)
    value = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
    tl.store(out + n[:, None] * K + column[None, :], value, mask=(n < N)[:, None] & (column < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def experts_kernel(
    x, packed, scales, table, bias, out, weights, sorted_ids, expert_ids, padded, M, N, K, stride,
    TOP: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row i of out [M, N] = row i // TOP of x times the transpose of its expert's [N, K], for the rows that moe_align_block_size sorted.

    M: rows of out; ids from M on are padding. A block of an expert that is not on this rank (-1) is zeros.
    """
    block = tl.program_id(1)
    if block * TOKENS >= tl.load(padded):
        return
    row = tl.load(sorted_ids + block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = row < M
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = out + row[:, None] * N + n[None, :]
    kept = inside[:, None] & (n < N)[None, :]
    expert = tl.load(expert_ids + block).to(tl.int64)
    if expert < 0:
        tl.store(place, tl.zeros((TOKENS, ROWS), out.dtype.element_ty), mask=kept)
        return
    words = _table(table)
    matrix_row = (n % N).to(tl.int64)
    packed += expert * N * (K // 8)
    scales += expert * N * (K // GROUP)
    source = x + (row // TOP)[:, None] * stride
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for k in range(0, K, COLUMNS):
        matrix = _decoded(packed, scales, words, matrix_row, k, K, GROUP, ROWS, COLUMNS, EVEN, x.dtype.element_ty)
        column = k + tl.arange(0, COLUMNS)
        read = inside[:, None] if EVEN else inside[:, None] & (column < K)[None, :]
        total = _product(tl.load(source + column[None, :], mask=read, other=0.0), matrix, total, TOKENS, COLUMNS)
    if HAS_BIAS:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if WEIGHTED:
        total *= tl.load(weights + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=kept)


class Matrix(NamedTuple):
    """packed: int32 [N, K/8], or [experts, N, K/8]; scale: bfloat16, as many rows, K/group columns; table: what `table` returned for the
    activations' type; bias: [N], or [experts, N]."""

    packed: Tensor
    scale: Tensor
    table: Tensor
    bias: Tensor | None = None


class Routing(NamedTuple):
    """order: what moe_align_block_size returned for the tile's tokens; pairs: of a token and an expert; top: the pairs that have one row of
    the activations; weights: the router's, float32 [pairs], or None."""

    order: tuple[Tensor, Tensor, Tensor]
    pairs: int
    top: int
    weights: Tensor | None = None


def linear(x: Tensor, matrix: Matrix, tile: tuple[int, ...]) -> Tensor:
    """x [M, K] -> [M, N]. tile: (tokens, rows, columns, parts, warps, stages)."""
    tokens, rows, columns, parts, warps, stages = tile
    packed, scale, table, bias = matrix
    (m, k), n = x.shape, packed.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, rows), triton.cdiv(m, tokens), parts)
    constants = {"GROUP": k // scale.shape[1], "HAS_BIAS": bias is not None, "EVEN": k % columns == 0, "TOKENS": tokens, "ROWS": rows}
    arguments = (x, packed, scale, table, x if bias is None else bias, sums, m, n, k, x.stride(0), parts)
    with torch.cuda.device_of(x):
        linear_kernel[grid](*arguments, **constants, COLUMNS=columns, num_warps=warps, num_stages=stages)
        if parts > 1:
            sum_kernel[(triton.cdiv(m * n, 256),)](sums, out, m * n, PARTS=parts, BLOCK=256, num_warps=2)
    return out


def vectors(x: Tensor, matrix: Matrix, pairs: int, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """x [rows, K] -> [pairs, N], pairs / rows of them for each row. chosen: the expert of each pair, -1 for none here; None where there are
    no experts. weights: the router's, float32 [pairs], or None."""
    packed, scale, table, bias = matrix
    n, k = packed.shape[-2], x.shape[1]
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    constants = {"TOP": pairs // x.shape[0], "GROUP": k // scale.shape[-1], "HAS_BIAS": bias is not None, "WEIGHTED": weights is not None}
    constants |= {"ROUTED": chosen is not None, "EVEN": k % 512 == 0, "ROWS": 16, "COLUMNS": 512}
    tensors = (x, packed, scale, table, *(x if each is None else each for each in (bias, out, weights, chosen)))
    with torch.cuda.device_of(x):
        vector_kernel[(triton.cdiv(n, 16), pairs)](*tensors, n, k, x.stride(0), **constants, num_warps=8, num_stages=2)
    return out


def decoded(matrix: Matrix, out: Tensor) -> Tensor:
    """The weights [N, K] themselves, in out."""
    n, k = out.shape
    constants = {"GROUP": k // matrix.scale.shape[1], "EVEN": k % 256 == 0, "ROWS": 8, "COLUMNS": 256}
    with torch.cuda.device_of(out):
        decode_kernel[(triton.cdiv(n, 8), triton.cdiv(k, 256))](*matrix[:3], out, n, k, **constants, num_warps=4)
    return out


def experts(x: Tensor, matrix: Matrix, routing: Routing, tile: tuple[int, ...]) -> Tensor:
    """x [pairs / top, K] -> [pairs, N], each row by the expert that it is for. tile: (tokens, rows, columns, warps, stages)."""
    tokens, rows, columns, warps, stages = tile
    packed, scale, table, bias = matrix
    pairs, weights = routing.pairs, routing.weights
    n, k = packed.shape[1], x.shape[1]
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    # A block holds the tokens of one expert: no more blocks than pairs can have something in them.
    grid = (triton.cdiv(n, rows), min(triton.cdiv(routing.order[0].shape[0], tokens), pairs))
    constants = {"TOP": routing.top, "GROUP": k // scale.shape[2], "HAS_BIAS": bias is not None, "WEIGHTED": weights is not None}
    constants |= {"EVEN": k % columns == 0, "TOKENS": tokens, "ROWS": rows, "COLUMNS": columns}
    tensors = (x, packed, scale, table, x if bias is None else bias, out, x if weights is None else weights, *routing.order)
    with torch.cuda.device_of(x):
        experts_kernel[grid](*tensors, pairs, n, k, x.stride(0), **constants, num_warps=warps, num_stages=stages)
    return out
