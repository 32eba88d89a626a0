"""What the weight formats cost: their errors beside the bars, and how fast they are made. Never asserts; a miss is exit status 1.

    python -m tests.bench.formats [--only REGEX]

Errors are ||W - W'|| / ||W|| of 1024x2048 weights of five distributions (tests/workers/stream/weights.py). Speed is bytes of BF16 read per
second, best of several runs. With a GPU the kernels are also compared with the torch quantizers on the CPU, over many shapes, types and
strides: a group counts as different where its scale or a code does, and as worse where its error is also larger by more than 1e-5.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.bench.arguments import Parser, pattern
from tests.workers.stream import weights
from workers.quantization.formats import SPELLINGS, Format
from workers.stream.formats import Quantizer, amax, quantizer

FORMATS = tuple(spelling for spelling in SPELLINGS if spelling != "bf16")
# The bars: Gaussian, Student t with 5 degrees of freedom.
BARS = {"mxfp4": (0.112, 0.123), "nvfp4": (0.082, 0.083), "int4-g32": (0.083, 0.105), "int4-g128": (0.098, 0.142),
        "nf4-g32": (0.083, 0.096), "nf4-g64": (0.086, 0.1), "nf4-g512": (0.098,)}  # fmt: skip
BARRED = ("gauss", "t5")
GPU_BAR = 200e9  # bytes of BF16 a second
# (experts, N, K): an expert's projections alone and batched, odd sizes, and large dense layers.
GPU_SHAPES = ((1, 768, 2048), (128, 768, 2048), (1, 2048, 768), (1, 4096, 4096), (1, 28672, 8192))
CHECKED = ((1, 1, 128), (1, 7, 384), (3, 65, 256), (1, 1000, 640), (2, 129, 1152), (5, 768, 2048), (1, 33, 16384))


@dataclass(slots=True)
class Tally:
    missed: int = 0

    def verdict(self, good: bool) -> str:
        self.missed += not good
        return "ok" if good else "MISSED"


def main() -> int:
    arguments = Parser("tests.bench.formats", __doc__, only="^fp8$")
    arguments.add_argument("--only", type=pattern, default="", metavar="REGEX", help="formats whose spelling it matches")
    options = arguments.parse_args()
    formats = arguments.chosen(FORMATS, options.only)
    tally = Tally()
    errors(formats, tally)
    cpu_speed(formats)
    if torch.cuda.is_available():
        gpu_check(formats, tally)
        gpu_speed(formats, tally)
    return 1 if tally.missed else 0


def errors(formats: list[str], tally: Tally) -> None:
    print("relative Frobenius error, 1024x2048 BF16\n")
    print("| format | " + " | ".join(weights.DISTRIBUTIONS) + " | bars |\n|" + "---|" * (len(weights.DISTRIBUTIONS) + 2))
    for spelling in formats:
        form = quantizer(Format.parse(spelling))
        row = {name: relative_error(form, weights.distribution(name)) for name in weights.DISTRIBUTIONS}
        bars = dict(zip(BARRED, BARS.get(spelling, ()), strict=False))
        told = ", ".join(f"{name} {bar} {tally.verdict(row[name] <= bar)}" for name, bar in bars.items())
        print(f"| {spelling} | " + " | ".join(f"{error:.5f}" for error in row.values()) + f" | {told} |", flush=True)
    print()


def relative_error(form: Quantizer, weight: Tensor) -> float:
    made = form.dequantize(form.quantize(weight), torch.float32).double()
    return float((made - weight.double()).norm() / weight.double().norm())


def cpu_speed(formats: list[str]) -> None:
    threads = torch.get_num_threads()
    print("CPU, MB of BF16: per second of one thread's own time, which a busy machine hardly changes, and per second on the clock\n")
    print(f"| format | 768x2048, 1 thread, own time | 768x2048, {threads} threads | 4096x4096, {threads} threads |\n|---|---|---|---|")
    for spelling in formats:
        form = quantizer(Format.parse(spelling))
        torch.set_num_threads(1)
        alone = _cpu_rate(form, 768, 2048, time.thread_time)
        torch.set_num_threads(threads)
        rates = [alone, *(_cpu_rate(form, n, k, time.perf_counter) for n, k in ((768, 2048), (4096, 4096)))]
        print(f"| {spelling} | " + " | ".join(f"{rate / 1e6:.0f}" for rate in rates) + " |", flush=True)
    print()


def _cpu_rate(form: Quantizer, n: int, k: int, clock: Callable[[], float]) -> float:
    weight = weights.distribution("gauss", n, k)
    out = form.empty(weight)
    best = float("inf")
    for _ in range(7):
        start = clock()
        form.quantize(weight, out=out)
        best = min(best, clock() - start)
    return weight.nbytes / best


def gpu_check(formats: list[str], tally: Tally) -> None:
    print(f"{torch.cuda.get_device_name()}: kernels against torch on the CPU\n")
    print("| format | weights | groups | different | worse | |\n|---|---|---|---|---|---|")
    for spelling in formats:
        form = quantizer(Format.parse(spelling))
        seen = groups = different = worse = 0
        for weight in _checked(form):
            if weight.shape[-1] % (form.group_size or 1):
                continue
            seen += 1
            here = [int(count) for count in _compare(form, weight)]
            groups, different, worse = groups + here[0], different + here[1], worse + here[2]
        good = worse == 0 and different <= 1e-4 * groups
        print(f"| {spelling} | {seen} | {groups} | {different} | {worse} | {tally.verdict(good)} |", flush=True)
    print()


def _checked(form: Quantizer) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in CHECKED:
            yield (torch.randn(shape, generator=random) * 0.02).to(dtype)
        yield (torch.randn(2, 256, 96, generator=random) * 0.02).to(dtype).transpose(1, 2)
        yield (torch.randn(3, 64, 512, generator=random) * 0.02).to(dtype)[:, ::2, 128:384]
        for weight in weights.adversarial(dtype).values():
            yield weight.unsqueeze(0)
    if form.group_size is None:
        yield torch.randn(1, 131, 77, generator=random).bfloat16()


def _compare(form: Quantizer, weight: Tensor) -> tuple[int, int, int]:
    """(groups, groups that differ, groups that are worse by the kernel)."""
    ours = form.quantize(weight)
    theirs = {suffix: part.cpu() for suffix, part in form.quantize(weight.cuda() if weight.is_contiguous() else _on_gpu(weight)).items()}
    size = form.group_size or weight.shape[-1]
    value = weight.float()
    a, b = (form.dequantize(parts, torch.float32) for parts in (ours, theirs))
    # A scale of another value that stands for the same weights is a difference too.
    scales = [parts["weight_scale"].float().flatten(1) for parts in (ours, theirs)]
    unequal_scales = int((scales[0] != scales[1]).sum())
    unequal = (a != b).unflatten(-1, (-1, size)).any(-1)
    first, second = (
        ((made - value) / value.abs().max().clamp(min=1e-30)).double().square().unflatten(-1, (-1, size)).sum(-1) for made in (a, b)
    )
    return unequal.numel(), max(int(unequal.sum()), unequal_scales), int((second > first * (1 + 1e-5) + 1e-30).sum())


def _on_gpu(weight: Tensor) -> Tensor:
    """The same strides on the GPU."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="cuda").copy_(weight)


def gpu_speed(formats: list[str], tally: Tally) -> None:
    print(f"GB/s of BF16 on the GPU, launches included; bar {GPU_BAR / 1e9:.0f} for 128x768x2048\n")
    print("| format | " + " | ".join("x".join(map(str, shape)) for shape in GPU_SHAPES) + " | |\n|" + "---|" * (len(GPU_SHAPES) + 2))
    for spelling in [*formats, "amax"]:
        rates = {shape: _gpu_rate(spelling, shape) for shape in GPU_SHAPES}
        told = tally.verdict(rates[GPU_SHAPES[1]] >= GPU_BAR)
        print(f"| {spelling} | " + " | ".join(f"{rate / 1e9:.0f}" for rate in rates.values()) + f" | {told} |", flush=True)
    print()


def _gpu_rate(spelling: str, shape: tuple[int, ...]) -> float:
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02
    if spelling == "amax":
        work: Callable[[], object] = lambda: amax(weight)  # noqa: E731
    else:
        form = quantizer(Format.parse(spelling))
        out = form.empty(weight)
        work = lambda: form.quantize(weight, out=out)  # noqa: E731
    work()
    times = 20
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return weight.nbytes * times / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
