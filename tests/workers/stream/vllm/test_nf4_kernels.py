"""The GPU kernels of NF4 in Triton's interpreter, against products with decoded weights; a GPU runs them in `tests.bench.products`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[4]

# float16 throughout: the interpreter multiplies bfloat16 as integers.
_PRODUCTS = """
import json
import torch
from workers.quantization.formats import Format
from workers.stream.formats import quantizer
from workers.stream.vllm import nf4_kernels
from workers.stream.vllm.nf4_kernels import Matrix, Routing

random = torch.Generator().manual_seed(0)
table = nf4_kernels.table(torch.float16, torch.device("cpu"))
found = {}

def far(made, meant):
    return float((made.float() - meant).norm() / meant.norm())

def weight(group, *shape):
    form = quantizer(Format("nf4", group))
    parts = form.quantize(torch.randn(shape, generator=random))
    return parts["weight_packed"].view(torch.int32), parts["weight_scale"], form.dequantize(parts, torch.float32)

for group, n, k in ((32, 40, 96), (64, 33, 192), (512, 24, 1024)):
    packed, scale, meant = weight(group, n, k)
    found[f"whole {group}"] = far(nf4_kernels.decoded(Matrix(packed, scale, table), torch.empty(n, k, dtype=torch.float16)), meant)
    bias = torch.randn(n, generator=random).half()
    for tokens, tile in ((1, (16, 16, 128, 1, 4, 2)), (5, (16, 32, 128, 2, 4, 2)), (33, (32, 16, 256, 1, 4, 2))):
        x = torch.randn(tokens, k, generator=random).half()
        made = nf4_kernels.linear(x, Matrix(packed, scale, table, bias), tile)
        found[f"linear {group} {tokens}"] = far(made, x.float() @ meant.T + bias.float())
    x = torch.randn(1, k, generator=random).half()
    made = nf4_kernels.vectors(x, Matrix(packed, scale, table, bias), 1)
    found[f"vector {group}"] = far(made, x.float() @ meant.T + bias.float())
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
    made = nf4_kernels.experts(x, Matrix(packed, scale, table), routing, (16, 16, 128, 4, 2))
    here = [(pair, expert, expert != 3) for pair, expert in enumerate(experts.flatten().tolist())]
    rows = [(x[pair // 2].float() @ meant[expert].T) * routed[pair] * kept for pair, expert, kept in here]
    found[f"experts {group}"] = far(made, torch.stack(rows))
    chosen = torch.where(experts == 3, -1, experts).flatten()
    found[f"vectors {group}"] = far(nf4_kernels.vectors(x, Matrix(packed, scale, table), 10, chosen, routed), torch.stack(rows))
print(json.dumps(found))
"""


def test_products_are_those_of_the_decoded_weights() -> None:
    """Products of float16, so within its precision; experts of another rank are zeros."""
    if importlib.util.find_spec("triton") is None:
        assert not torch.cuda.is_available()
        return
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "PASSIVE"}
    ran = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    far = json.loads(ran.stdout)
    assert len(far) == 21
    assert {name: distance for name, distance in far.items() if not distance < 0.002} == {}


def test_the_kernels_compile_for_the_gpus_of_a_spark_and_of_a_server() -> None:
    """Triton compiles without a GPU: PTX and machine code, where the inline assembly would be refused."""
    if importlib.util.find_spec("triton") is None:
        assert not torch.cuda.is_available()
        return
    ran = subprocess.run([sys.executable, "-c", _COMPILED], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {"90": True, "121": True}


_COMPILED = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.stream.vllm.nf4_kernels import linear_kernel

constants = {"GROUP": 64, "HAS_BIAS": False, "EVEN": True, "TOKENS": 16, "ROWS": 64, "COLUMNS": 128}
types = {"x": "*bf16", "packed": "*i32", "scales": "*bf16", "table": "*i32", "bias": "*bf16", "out": "*fp32"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in linear_kernel.arg_names}
made = {}
for capability in (90, 121):
    source = ASTSource(fn=linear_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2, "num_stages": 2})
    made[capability] = len(compiled.asm["cubin"]) > 0
print(json.dumps(made))
"""
