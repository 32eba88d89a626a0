"""The GPU kernels of NF4 in Triton's interpreter, against products with decoded weights; a GPU runs them in `tests.bench.products`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import HUNG_S

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: it comes with vLLM for a GPU")

# float16 throughout: the interpreter multiplies bfloat16 as integers.
_PRODUCTS = """
import json
import sys
import torch
from workers.quantization.formats import Format
from workers.load.formats import quantizer
from workers.vllm.load import nf4_kernels
from workers.vllm.load.nf4_kernels import Matrix, Routing

random = torch.Generator().manual_seed(0)
found = {}

def far(made, meant):
    return float((made.float() - meant).norm() / meant.norm())

def weight(group, *shape):
    form = quantizer(Format("nf4", group))
    parts = form.quantize(torch.randn(shape, generator=random))
    return parts["weight_packed"], parts["weight_scale"], form.dequantize(parts, torch.float32)

for group, n, k in json.loads(sys.argv[1]):
    packed, scale, meant = weight(group, n, k)
    found[f"whole {group}"] = far(nf4_kernels.decoded(Matrix(packed, scale), torch.empty(n, k, dtype=torch.float16)), meant)
    bias = torch.randn(n, generator=random).half()
    for tokens, tile in ((1, (8, 16, 256, 1, 4, 2)), (5, (16, 32, 128, 2, 4, 2)), (33, (32, 16, 256, 1, 4, 2))):
        x = torch.randn(tokens, k, generator=random).half()
        made = nf4_kernels.linear(x, Matrix(packed, scale, bias), tile)
        found[f"linear {group} {tokens}"] = far(made, x.float() @ meant.T + bias.float())
    packed, scale, meant = weight(group, 4, n, k)
    experts = torch.tensor([[0, 2], [2, 3], [1, 0], [3, 1], [2, 1]])
    routed = torch.rand(10, generator=random)
    order, blocks = [], []
    for expert in range(4):
        rows = (experts.flatten() == expert).nonzero().flatten().tolist()
        order += rows + [10] * (16 - len(rows))
        blocks.append(-1 if expert == 3 else expert)
    sorted_ids = torch.tensor(order, dtype=torch.int32), torch.tensor(blocks, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    x = torch.randn(5, k, generator=random).half()
    routing = Routing(sorted_ids, 10, 2, routed)
    made = nf4_kernels.experts(x, Matrix(packed, scale), routing, (16, 16, 128, 4, 2))
    here = [(pair, expert, expert != 3) for pair, expert in enumerate(experts.flatten().tolist())]
    rows = [(x[pair // 2].float() @ meant[expert].T) * routed[pair] * kept for pair, expert, kept in here]
    found[f"experts {group}"] = far(made, torch.stack(rows))
    chosen = torch.where(experts == 3, -1, experts).flatten()
    made = nf4_kernels.experts(x, Matrix(packed, scale), Routing(chosen, 10, 2, routed), (8, 16, 128, 4, 2))
    found[f"pairs {group}"] = far(made, torch.stack(rows))
print(json.dumps(found))
"""


# A group, N and K.
SHAPES = [
    [64, 33, 192],
    pytest.param([32, 40, 96], marks=pytest.mark.rest),
    pytest.param([512, 24, 1024], marks=pytest.mark.rest),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_decoded_weights(shape: list[int]) -> None:
    """Products of float16, so within its precision; experts of another rank are zeros."""
    far = _interpreted(_PRODUCTS, json.dumps([shape]))
    assert len(far) == 6
    assert {name: distance for name, distance in far.items() if not distance < 0.002} == {}


@pytest.mark.rest
def test_a_gpu_s_operators_compute_what_a_cpu_s_do() -> None:
    """The cases have one to 300 tokens, columns that programs share, weights that are decoded whole in parts, experts pair by pair and in
    blocks as moe_align_block_size makes them, and experts of another rank."""
    far = _interpreted(_OPERATORS)
    assert len(far) == 8
    assert {name: distance for name, distance in far.items() if not distance < 0.002} == {}


_OPERATORS = """
import json
import sys
import torch
from workers.quantization.formats import Format
from workers.load.formats import quantizer
from workers.vllm.load import nf4_products

random = torch.Generator().manual_seed(0)
found = {}

def normal(*shape):
    return torch.randn(shape, generator=random).half()

def weight(*shape):
    parts = quantizer(Format("nf4", 32)).quantize(normal(*shape).float() / 8)
    return parts["weight_packed"], parts["weight_scale"], None

def far(made, meant):
    return float((made - meant).float().norm() / meant.float().norm())

def aligned(chosen, block, experts, expert_map):
    order, blocks = [], []
    for expert in range(experts):
        rows = (chosen.flatten() == expert).nonzero().flatten().tolist()
        order += rows + [chosen.numel()] * (-len(rows) % block)
        blocks += [expert if expert_map is None else int(expert_map[expert])] * -(-len(rows) // block)
    room = chosen.numel() + experts * (block - 1) - len(order)
    count = torch.tensor([len(order)])
    return torch.tensor(order + [chosen.numel()] * room), torch.tensor(blocks + [0] * room), count

nf4_products._sorted = lambda: aligned
nf4_products.WHOLE_WEIGHTS = 1 << 14
packed, bias = weight(264, 544), normal(264)
for tokens in (1, 9, 40, 257):
    arguments = (normal(tokens, 2, 600)[:, 1, :544], *packed, bias, "nf4")
    found[f"linear {tokens}"] = far(nf4_products._linear(*arguments), torch.ops.sparkd.packed_linear(*arguments))
w13, w2, biases = weight(4, 64, 96), weight(4, 96, 32), (normal(4, 64), normal(4, 96))
for tokens, top, expert_map, on_input in (
    (4, 2, torch.tensor([2, -1, 0, 1, -1, 3], dtype=torch.int32), False),
    (3, 1, None, True),
    (5, 2, torch.tensor([2, -1, 0, 1, -1, 3], dtype=torch.int32), False),
    (40, 1, None, True),
):
    experts = 4 if expert_map is None else 6
    chosen = torch.stack([torch.randperm(experts, generator=random)[:top] for _ in range(tokens)])
    layer = ([*w13, biases[0], None], [*w2, biases[1], None], expert_map, "nf4", "gelu", 1.0, 0.0, None, on_input)
    arguments = (normal(tokens, 96), torch.rand(tokens, top, generator=random) + 0.5, chosen, *layer)
    found[f"experts {tokens}"] = far(nf4_products._experts(*arguments), torch.ops.sparkd.packed_experts(*arguments))
print(json.dumps(found))
"""


LINEAR, EXPERTS = [8, 16, 32, 128], [8, 16, 128]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["some", "every"])
def test_a_tile_compiles_for_the_gpus_of_a_spark_and_of_a_server(every: bool) -> None:
    """Triton compiles without a GPU: PTX and machine code, where the inline assembly would be refused. The shared memory of a program is
    that of a GB10 at most (CUDA's programming guide: 99 KiB at compute capability 12.x), and decoded weights take none of it. An A100
    (8.0) has fewer instructions for BF16."""
    command = [sys.executable, "-c", _COMPILED, "every" if every else "some"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    expected = (LINEAR, EXPERTS) if every else ([8, 128], [16])
    for kernel, tokens in zip(("linear_kernel", "experts_kernel"), expected, strict=True):
        assert sorted({each["tokens"] for each in found if each["kernel"] == kernel}) == tokens
    assert {121, 80} <= {each["capability"] for each in found}
    assert [each for each in found if each["capability"] == 121 and each["shared"] > 99 * 1024] == []
    assert [each for each in found if each["weights stored"]] == []


_COMPILED = """
import json
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.vllm.load import nf4_products
from workers.vllm.load.nf4_kernels import experts_kernel, linear_kernel

def compiled(kernel, capability, tile, group, activations="*bf16"):
    tokens, rows, columns, *_, warps, stages = tile
    constants = {"GROUP": group, "HAS_BIAS": False, "EVEN": True, "TOKENS": tokens, "ROWS": rows, "COLUMNS": columns}
    types = {"x": activations, "packed": "*u8", "scales": "*bf16", "bias": activations, "out": "*fp32"}
    if kernel is experts_kernel:
        constants |= {"TOP": 8, "WEIGHTED": True, "PAIRED": tokens == 8}
        types |= {"out": activations, "weights": "*fp32", "sorted_ids": "*i32", "expert_ids": "*i32", "padded": "*i32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = [name for name in (*types, "N", "K", "stride", "part_columns") if name in names]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even}
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.asm["cubin"]
    stored = re.findall(rf"local_alloc %\\S+ : \\(tensor<{rows}x{columns}x", made.asm["ttgir"])
    return {
        "kernel": kernel.__name__, "capability": capability, "tokens": tokens, "shared": made.metadata.shared, "weights stored": len(stored)
    }

tiles = [nf4_products._linear_tile(tokens, 4096, 4096) for tokens in (1, 9, 17, 128)]
experts = {each: nf4_products._experts_tile(128 * each, 128) for each in (1, 12, 99)}
found = [compiled(linear_kernel, 121, tiles[0], 32), compiled(linear_kernel, 80, tiles[0], 32)]
found += [compiled(linear_kernel, 121, tiles[3], 256), compiled(experts_kernel, 121, experts[12], 64)]
if sys.argv[1] == "every":
    found += [compiled(linear_kernel, 121, tile, group) for tile in tiles for group in (32, 256)]
    found += [compiled(linear_kernel, *rest) for rest in ((90, tiles[0], 32), (121, tiles[1], 512, "*fp16"))]
    found += [compiled(experts_kernel, 121, experts[each], 64) for each in (1, 99)]
print(json.dumps(found))
"""


def _interpreted(program: str, *arguments: str) -> dict[str, float]:
    """What a program prints in Triton's interpreter."""
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", program, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert ran.returncode == 0, ran.stderr
    distances: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return distances
