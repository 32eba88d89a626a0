"""What all quantizers promise alike: names, shapes, refusals, the shared divisor, finite weights, memory, the GPU kernels' results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkd.errors import CheckpointError
from tests.support.facts import facts
from tests.support.waiting import HUNG_S
from tests.workers.load import weights
from workers.load.formats import amax, global_scale, quantizer
from workers.quantization.formats import SPELLINGS, Format

ROOT = Path(__file__).parents[4]
# The share that a GPU's quantizer may lose more or less than a CPU's: of two scales that are almost equally good each may take another.
TOLERANCE = 1e-3
QUANTIZED = tuple(spelling for spelling in SPELLINGS if spelling != "bf16")


@pytest.mark.parametrize(
    ("spelling", "parts"),
    [
        (
            "nvfp4",
            {
                "weight_packed": (torch.uint8, (96, 128)),
                "weight_scale": (torch.float8_e4m3fn, (96, 16)),
                "weight_global_scale": (torch.float32, (1,)),
            },
        ),
        ("mxfp4", {"weight_packed": (torch.uint8, (96, 128)), "weight_scale": (torch.uint8, (96, 8))}),
        (
            "int4-g64",
            {"weight_packed": (torch.int32, (96, 32)), "weight_scale": (torch.bfloat16, (96, 4)), "weight_shape": (torch.int64, (2,))},
        ),
        ("nf4-g64", {"weight_packed": (torch.uint8, (96, 128)), "weight_scale": (torch.bfloat16, (96, 4))}),
        ("fp8", {"weight": (torch.float8_e4m3fn, (96, 256)), "weight_scale": (torch.float32, (96, 1))}),
        ("fp8-block", {"weight": (torch.float8_e4m3fn, (96, 256)), "weight_scale": (torch.float32, (1, 2))}),
    ],
)
def test_parts(spelling: str, parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    assert quantizer(Format.parse(spelling)).parts(96, 256) == parts


def test_without_a_group_size_int4_has_128_and_nf4_has_64() -> None:
    assert [quantizer(Format(name)).group_size for name in ("int4", "nf4")] == [128, 64]


def test_bf16_leaves_a_weight_as_it_is() -> None:
    weight = torch.randn(3, 7, dtype=torch.bfloat16)
    form = quantizer(Format("bf16"))
    assert form.quantize(weight)["weight"] is weight
    assert torch.equal(form.dequantize(form.quantize(weight, out=form.empty(weight)), torch.float32), weight.float())


@pytest.mark.parametrize(
    ("spelling", "k", "cure"),
    [
        ("int4-g128", 576, "int4-g64 int4-g32"),
        ("int4-g128", 48, "nvfp4"),
        ("int4-g32", 40, "fp8"),
        ("nf4-g512", 640, "nf4-g128 nf4-g64 nf4-g32"),
        ("nf4-g32", 48, "nvfp4"),
        ("mxfp4", 48, "nvfp4"),
        ("nvfp4", 24, "fp8"),
    ],
)
def test_columns_that_do_not_divide_are_refused_with_what_would_fit(spelling: str, k: int, cure: str) -> None:
    form = Format.parse(spelling)
    with pytest.raises(CheckpointError) as caught:
        form.check("model.layers.0.mlp.down_proj.weight", 64, k, file="/m/a.safetensors")
    assert (caught.value.file, caught.value.tensor) == ("/m/a.safetensors", "model.layers.0.mlp.down_proj.weight")
    assert (facts(caught.value.problem), facts(caught.value.cure)) == (f"K={k} {form.group}", cure)


@pytest.mark.parametrize(("spelling", "k"), [*((spelling, 1536) for spelling in QUANTIZED), ("fp8", 13), ("fp8-block", 13)])
def test_columns_that_divide_are_taken(spelling: str, k: int) -> None:
    Format.parse(spelling).check("w", 7, k)


@pytest.mark.parametrize("largest", [1e-25, 0.02, 1.75, 1.7500001, 448.0, 1e30])
def test_the_divisor_is_the_largest_power_of_two_that_leaves_room_for_a_quarter(largest: float) -> None:
    divisor = float(global_scale(torch.tensor(largest)))
    assert divisor == 2.0 ** round(torch.tensor(divisor).log2().item())
    stored = float(torch.tensor(largest))
    assert stored / 4 * divisor <= 448 < stored / 4 * divisor * 2


def test_the_divisor_of_nothing_is_one_and_of_next_to_nothing_finite() -> None:
    assert global_scale(torch.tensor([0.0, 1e-44, 1e-38])).tolist() == [1.0, 2.0**100, 2.0**100]


def test_a_shared_divisor_is_used_as_it_is() -> None:
    form = quantizer(Format("nvfp4"))
    small, large = weights.distribution("gauss", 32, 256), weights.distribution("gauss", 64, 256) * 50
    shared = global_scale(torch.stack([amax(small), amax(large)]).amax())
    parts = form.quantize(small, global_scale=shared)
    assert parts["weight_global_scale"].tolist() == [float(shared)]
    made = form.dequantize(parts, torch.float32)
    assert float((made - small.float()).norm() / small.float().norm()) < 0.085
    batch = torch.stack([small, small])
    each = form.quantize(batch, global_scale=torch.tensor([float(shared), float(shared) * 2]))
    assert each["weight_global_scale"].tolist() == [[float(shared)], [float(shared) * 2]]
    assert torch.equal(form.quantize(batch, global_scale=shared)["weight_packed"][1], parts["weight_packed"])


def test_every_scale_of_nvfp4_is_a_normal_number_for_every_kernel() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for weight in weights.adversarial(dtype).values():
            scale = quantizer(Format("nvfp4")).quantize(weight)["weight_scale"].float()
            assert bool(((scale >= 2.0**-6) & (scale <= 448)).all())


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.bfloat16), (float("inf"), torch.float16), (float("-inf"), torch.float32)], ids=str
)
def test_a_value_that_is_not_finite_is_seen(value: float, dtype: torch.dtype) -> None:
    weight = torch.randn(33, 65).to(dtype)
    assert bool(torch.isfinite(amax(weight)))
    weight[17, 40] = value
    assert not bool(torch.isfinite(amax(weight)))


_MEMORY = """
import json, sys
import torch
from workers.load.formats import amax, quantizer
from workers.load.formats.fp8_source import dequantize_fp8
from workers.quantization.recipe import Format

def peak_bytes(work):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    fields = lambda: dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    before = int(fields()["VmRSS"].split()[0])
    work()
    return (int(fields()["VmHWM"].split()[0]) - before) * 1024

taken = {}
weight = torch.full((2048, 2048), 0.25, dtype=torch.bfloat16)
for spelling in sys.argv[1:]:
    form = quantizer(Format.parse(spelling))
    form.quantize(weight[:256])
    for name, one in (("square", weight), ("turned", weight.t())):
        out = {suffix: part.zero_() for suffix, part in form.empty(one).items()}
        taken[f"{spelling} {name}"] = peak_bytes(lambda: form.quantize(one, out=out))
        del out
stored = torch.zeros(2048, 2048, dtype=torch.uint8).view(torch.float8_e4m3fn)
scale = torch.ones(16, 16)
dequantize_fp8(stored[:1], scale, (2048, 2048), out=weight[:1])
taken["source"] = peak_bytes(lambda: dequantize_fp8(stored, scale, (2048, 2048), out=weight))
taken["amax"] = peak_bytes(lambda: amax(weight))
print(json.dumps(taken))
"""


def test_temporaries_are_small_whatever_the_shape() -> None:
    """An 8 MiB weight: a copy of it in float32 would be 16 MiB. Half a MiB is for what else the process takes meanwhile, with a thread for
    each core, as an engine has. A thread that waits leaves its core to the other tests."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", _MEMORY, "nvfp4", "mxfp4", "int4-g32", "nf4-g64", "fp8-block"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert ran.returncode == 0, ran.stderr
    taken = json.loads(ran.stdout)
    assert {name: taken_bytes for name, taken_bytes in taken.items() if taken_bytes > 8.5 * 2**20} == {}


_KERNELS = """
import json, sys
import torch
from tests.workers.load import weights
from workers.load.formats import quantizer, triton_kernels
from workers.quantization.recipe import Format

random = torch.Generator().manual_seed(0)
batch = (torch.randn(2, 3, 256, generator=random) * 0.02).bfloat16()
turned = (torch.randn(1, 128, 5, generator=random) * 0.02).half().transpose(1, 2)
hard = torch.stack([weight[:2, :128].float() for weight in weights.adversarial(torch.bfloat16).values()])
found = {"amax": float((triton_kernels.amax(batch) != batch.float().abs().amax((1, 2))).sum())}

def error(form, parts, weight):
    missed = form.dequantize(parts, torch.float32).double() - weight.double()
    return missed.flatten(1).norm(dim=1) / weight.double().flatten(1).norm(dim=1)

for spelling in sys.argv[1:]:
    form = quantizer(Format.parse(spelling))
    for name, weight in (("batch", batch), ("turned", turned), ("hard", hard)):
        ours, theirs = form.quantize(weight), form.empty(weight)
        form._fill_shared(weight, theirs, None)
        form._launch(triton_kernels, weight, theirs)
        apart = (error(form, theirs, weight) - error(form, ours, weight)).abs() / error(form, ours, weight)
        found[f"{spelling} {name}"] = float(apart.nan_to_num().max())
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: it comes with vLLM for a GPU")
def test_the_gpu_kernels_lose_as_much_as_torch() -> None:
    """In Triton's interpreter, which needs no GPU: a matrix's relative errors are within TOLERANCE of each other."""
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", _KERNELS, "nvfp4", "mxfp4", "int4-g32", "nf4-g32", "fp8", "fp8-block"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {name: apart for name, apart in json.loads(ran.stdout).items() if apart > TOLERANCE} == {}
