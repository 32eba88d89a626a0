"""What loading costs: one table for stock vLLM and for the load format `spark_stream`, same model, same run. Never asserts; it prints.

    python -m tests.bench.loader [--preset cpu|h200] [--quantize nvfp4,mxfp4,..] [--only REGEX] [--compare]

Without vLLM in an environment of its own: PYTHONPATH=SITE:$PWD python3 -m tests.bench.loader; torch and vLLM are all it needs.

Every row is an engine in a process of its own, which starts with the checkpoint's files out of the page cache, loads it and generates
(tests/bench/loader_case.py). "Above final" is the peak during load_model less the value after it. "All" is that peak less the value before
it and the parameters, so that it counts what stays besides the parameters. GB/s are bytes from storage over the time of load_weights; the
disk's rate is O_DIRECT on the same files, before and after all rows, the better of the two. "Second start" reads the quantized cache that
the row before it has written. The checkpoints are random Qwen3-MoE ones (tests/support/architectures.py), shards in
layer order or all tensors shuffled over them, in TMPDIR. --compare: digests every parameter and buffer of each load, once it was measured,
and says whether all loads of one format hold the same, bit for bit (bf16: as stock vLLM's), or the first name that differs. Exit status 1:
a bar was missed, or loads differ.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import child, sampling
from tests.bench.arguments import Parser, count, formats, new, pattern
from tests.bench.child import ChildFailed
from tests.support import architectures

MIB, GIB = 2**20, 2**30
LIMIT_S = 900.0
_STOCK: dict[str, tuple[str, ...]] = {
    "smallest": (),
    "cpu": ("bf16", "int8_per_channel_weight_only"),
    "h200": ("bf16", "fp8_per_tensor", "int8_per_channel_weight_only"),
}
_OURS = {"smallest": ("int4",), "cpu": ("mxfp4", "int4"), "h200": ("nvfp4", "mxfp4", "int4", "fp8", "bf16")}
# The bars. Peaks are MiB: on the CPU of anonymous and mapped memory, less what there was before and the parameters, on a GPU the device's
# above final.
_PEAK_BAR_MIB = {"smallest": math.inf, "cpu": 96.0, "h200": 0.15 * 1024}
_PAGE_CACHE_BAR_BYTES = 0.1e9
_RATE_BAR = 0.90
_SECOND_TIME_BAR = 0.35
_SECOND_READ_BAR = 1.03
_RANK_READ_BAR = 0.70
_REMARK = 110  # characters; the logs have the rest


@dataclass(frozen=True, slots=True)
class Case:
    """One row. form: a format of ours, or stock vLLM's `--quantization` (bf16: none).

    cache: `first` writes one, `second` reads it; `whole` lets several ranks read the one that a single rank has written.
    """

    ours: bool
    form: str
    shuffled: bool = False
    ranks: int = 1
    cache: str | None = None

    @property
    def name(self) -> str:
        words = ["ours" if self.ours else "stock", self.form, "shuffled" if self.shuffled else "ordered"]
        return " ".join([*words, *([f"tp{self.ranks}"] if self.ranks > 1 else []), *([f"cache-{self.cache}"] if self.cache else [])])

    @property
    def arguments(self) -> dict[str, Any]:
        if self.ours:
            return {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": self.form}}
        return {} if self.form == "bf16" else {"quantization": self.form}


@dataclass(slots=True)
class Row:
    """A case's figures. loads: what each rank measured (loader_case.Load.found); failed: why there is no answer; loads may be there."""

    case: Case
    loads: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    page_cache_bytes: int = 0
    failed: str | None = None

    def total(self, key: str) -> int | None:
        values = [load[key] for load in self.loads]
        return None if not values or None in values else sum(values)

    def slowest(self, key: str) -> float | None:
        return max((load[key] for load in self.loads), default=None)

    @property
    def bytes_per_s(self) -> float | None:
        read, seconds = self.total("read_bytes"), self.slowest("weights_s")
        return read / seconds if read and seconds else None


class Bench:
    """Runs cases on the checkpoints under `folder`; `rows` are the results so far."""

    def __init__(self, folder: Path, preset: str, device: str, logs: Path, *, compare: bool = False) -> None:
        self.rows: list[Row] = []
        self._folder = folder
        self._preset = preset
        self._cuda = device == "cuda"
        self._compare = compare
        self._logs = logs
        self._plugins = child.plugin_folder(logs)

    def checkpoint(self, shuffled: bool) -> Path:
        """Written where it is not there yet. Raises SystemExit where the disk is too full."""
        folder = self._folder / f"{self._preset}-{'shuffled' if shuffled else 'ordered'}"
        if (folder / "model.safetensors.index.json").exists():
            return folder
        free = shutil.disk_usage(self._folder).free
        need = 11 * GIB if self._preset == "h200" else 3 * GIB
        if free < need:
            told = f"{free / GIB:.1f} GiB free, a checkpoint and its cache need {need / GIB:.0f}"
            raise SystemExit(f"{self._folder} has {told}, where TMPDIR is.")
        _say(f"writing {folder}")
        device = "cuda" if self._cuda else "cpu"
        return architectures.write_qwen3_moe(folder, shuffled=shuffled, device=device, **architectures.PRESETS[self._preset])

    def disk_rate(self) -> float:
        files = _files(self.checkpoint(False))
        sampling.forget(files)
        return sampling.direct_rate(files)

    def run(self, case: Case) -> Row:
        folder = self.checkpoint(case.shuffled)
        cache = self._folder / f"cache-{self._preset}-{case.form}{'-ranks' if case.ranks > 1 and case.cache != 'whole' else ''}"
        if case.cache == "first":
            shutil.rmtree(cache, ignore_errors=True)
        stem = self._logs / case.name.replace(" ", "-")
        loads = stem.with_suffix(".loads")
        loads.mkdir()
        arguments = {**child.engine_arguments(cuda=self._cuda), **case.arguments}
        progress = None
        if case.ours:
            progress = str(stem.with_suffix(".progress"))
            arguments["model_loader_extra_config"] = {**arguments["model_loader_extra_config"], "progress": progress}
            if case.cache:
                arguments["model_loader_extra_config"]["cache_dir"] = str(cache)
        if case.ranks > 1:
            arguments |= {"tensor_parallel_size": case.ranks, "distributed_executor_backend": "mp"}
        row = Row(case)
        self.rows.append(row)
        files = _files(folder)
        sampling.forget([*files, *_files(cache)])
        more = {"SPARKD_BENCH_LOADS": str(loads), **({"SPARKD_BENCH_DIGESTS": "1"} if self._compare else {})}
        if case.ranks > 1 and not self._cuda:
            # vLLM binds each rank to a NUMA node of its own unless it is told not to; ranks that share the cores must not spin on them.
            more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // case.ranks))}
        env = child.environment(self._plugins, ours=case.ours, more=more)
        question = {"model": str(folder), "arguments": arguments, "progress": progress}
        try:
            row.answer = dict(child.ask("tests.bench.loader_case", question, env, limit_s=LIMIT_S, log=stem.with_suffix(".log")).value)
        except ChildFailed as failed:
            row.failed = str(failed)
        row.loads = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(loads.glob("*.json"))]
        row.page_cache_bytes = sampling.files_cached_bytes([*files, *_files(cache)])
        _say(f"{case.name}: {row.failed or 'done'}" + (f"; loaded in {row.slowest('load_s'):.1f} s" if row.loads else ""))
        return row


def cases(preset: str, formats: Sequence[str], ranks: int) -> Iterator[Case]:
    """In the table's order. On a GPU, where time is short, shuffled rows for one stock way and for the first format only."""
    for form in _STOCK[preset]:
        yield Case(False, form)
        if preset == "cpu" or form.startswith("fp8"):
            yield Case(False, form, shuffled=True)
    for form in formats:
        yield Case(True, form)
        if preset == "cpu" or form == formats[0]:
            yield Case(True, form, shuffled=True)
    for form in formats:
        if form != "bf16":
            yield Case(True, form, cache="first")
            yield Case(True, form, cache="second")
    if ranks > 1:
        yield Case(False, "bf16", ranks=ranks)
        for form in formats:
            yield Case(True, form, ranks=ranks)
            if form != "bf16":
                yield from (Case(True, form, ranks=ranks, cache=cache) for cache in ("whole", "first", "second"))


def table(rows: Sequence[Row], disk_bytes_per_s: float, checkpoint_bytes: int, *, cuda: bool) -> str:
    """MiB, GB (1e9) and seconds; a dash where nothing was measured."""
    titles = ["case", "final", "anon", "mapped", "sum", "all", *(["dev final", "dev above"] if cuda else []), "cached"]
    titles += ["read GB", "of ckpt", "weights s", "GB/s", "of disk", "load s", "tok/s", "remark"]
    lines = [titles]
    for row in rows:
        first = row.loads[0] if row.loads else {}
        above = first.get("peak_above_final", {})
        read, rate = row.total("read_bytes"), row.bytes_per_s
        # Of a tensor-parallel engine each rank's share counts, and the larger one.
        most = max((load["read_bytes"] or 0 for load in row.loads), default=0)
        device = [_mib(first.get("device_final")), _mib(first.get("device_peak_above_final"))] if cuda else []
        lines.append(
            [
                row.case.name,
                _mib(first.get("parameter_bytes")),
                *(_mib(above.get(key)) for key in ("anon", "mapped", "sum")),
                _mib(_above_parameters(first) if above else None),
                *device,
                _mib(row.page_cache_bytes) if row.loads else "-",
                _number(read and read / 1e9, 2),
                f"{100 * most / checkpoint_bytes:.0f} %" if read else "-",
                _number(row.slowest("weights_s"), 2),
                _number(rate and rate / 1e9, 2),
                f"{100 * rate / disk_bytes_per_s:.0f} %" if rate and disk_bytes_per_s else "-",
                _number(row.slowest("load_s"), 2),
                _number(row.answer.get("tokens_per_s"), 1),
                row.failed or _cache_remark(row),
            ]
        )
    widths = [max(len(line[index]) for line in lines) for index in range(len(titles) - 1)]
    return "\n".join(_aligned(line, widths) for line in lines)


def bars(rows: Sequence[Row], preset: str, disk_bytes_per_s: float, checkpoint_bytes: int) -> Iterator[tuple[str, float, float, bool]]:
    """(what, value, limit, met) for every figure with a bar that these rows hold."""
    found = {row.case: row for row in rows if row.loads}
    for case, row in found.items():
        if not case.ours:
            continue
        first = row.loads[0]
        four_bit = case.form.startswith(("nvfp4", "mxfp4", "int4"))
        if case.ranks > 1 and case.cache != "first":
            most = max(load["read_bytes"] or 0 for load in row.loads) / (_quantized_bytes(found, case) if case.cache else checkpoint_bytes)
            yield f"{case.name}: bytes read per rank, of all", most, _RANK_READ_BAR, most <= _RANK_READ_BAR
            continue
        if case.cache == "second":
            before = [other.loads[0]["load_s"] for cache in (None, "first") if (other := found.get(Case(True, case.form, cache=cache)))]
            if not before or row.answer.get("cache", {}).get("source") != "cache":
                continue
            ratio = first["load_s"] / min(before)
            yield f"{case.name}: time, of the first start's", ratio, _SECOND_TIME_BAR, ratio <= _SECOND_TIME_BAR
            share = (first["read_bytes"] or 0) / _quantized_bytes(found, case)
            yield f"{case.name}: bytes read, of the quantized size", share, _SECOND_READ_BAR, share <= _SECOND_READ_BAR
            continue
        if four_bit and not case.cache:
            peak = (first["device_peak_above_final"] if preset == "h200" else _above_parameters(first)) / MIB
            yield f"{case.name}: peak above the parameters, MiB", peak, _PEAK_BAR_MIB[preset], peak <= _PEAK_BAR_MIB[preset]
        if preset == "h200" and case.ranks == 1:
            grown = max(row.page_cache_bytes, 0) / 1e9
            yield f"{case.name}: page cache left, GB", grown, _PAGE_CACHE_BAR_BYTES / 1e9, grown * 1e9 <= _PAGE_CACHE_BAR_BYTES
        if preset == "h200" and case.ranks == 1 and not case.cache:
            rate = (row.bytes_per_s or 0) / disk_bytes_per_s if disk_bytes_per_s else 0.0
            yield f"{case.name}: throughput, of the disk's", rate, _RATE_BAR, rate >= _RATE_BAR


def comparisons(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """(a sentence, equal) for every load of a format but the first, which the others are compared with rank by rank."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        if not row.loads or "digests" not in row.loads[0]:
            continue
        known = first.setdefault((row.case.form, row.case.ranks), row)
        if known is row:
            continue
        differs = None
        count = 0
        for one, other in zip(*(sorted(each.loads, key=lambda load: load["rank"]) for each in (known, row)), strict=True):
            count += len(one["digests"])
            names = [*one["digests"], *(name for name in other["digests"] if name not in one["digests"])]
            unequal = (name for name in names if one["digests"].get(name) != other["digests"].get(name))
            differs = differs or next((f"rank {one['rank']}: {name}" for name in unequal), None)
        yield f"{row.case.name}, against {known.case.name}: {differs or f'all {count} parameters and buffers'}", differs is None


def _above_parameters(load: dict[str, Any]) -> int:
    """Bytes of the peak that are no parameter, whether they went back or stayed."""
    return int(load["peak_above_before"]["sum"] - load["parameter_bytes"])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    figures = (cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True))
    return "  ".join([line[0].ljust(widths[0]), *figures, line[-1][:_REMARK]]).rstrip()


def _quantized_bytes(found: dict[Case, Row], case: Case) -> int:
    """The whole cache's size as its writer gave it, else what the ranks of a load hold together."""
    first = found.get(Case(True, case.form, cache="first"))
    said = first.answer.get("cache", {}).get("bytes") if first else 0
    whole = found.get(Case(True, case.form)) or first or found[case]
    return int(said or whole.total("parameter_bytes") or 1)


def _cache_remark(row: Row) -> str:
    cache = row.answer.get("cache", {})
    if not row.case.cache:
        return ""
    if cache.get("source") == "cache":
        return "read from the cache"
    return f"cache {cache.get('state')}" + (f": {cache['why']}" if cache.get("why") else "")


def _files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*.safetensors")) if folder.is_dir() else []


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / MIB:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    import torch

    gpus = torch.cuda.device_count()
    parser = Parser("tests.bench.loader", __doc__, preset="smallest", quantize="int4-g32", only="^ours int4-g32 ordered$", ranks=1)
    parser.add_argument("--preset", choices=sorted(architectures.PRESETS), default="h200" if gpus else "cpu")
    parser.add_argument("--quantize", type=formats, help="formats, separated by commas")
    parser.add_argument("--only", type=pattern, default="", help="a regular expression for the rows' names")
    parser.add_argument("--ranks", type=count, default=2 if gpus != 1 else 1, help="of the tensor-parallel rows; 1 leaves them out")
    parser.add_argument("--logs", type=new, help="folder for the engines' logs; a temporary one without")
    parser.add_argument("--compare", action="store_true", help="say whether all loads of one format hold the same, bit for bit")
    given = parser.parse_args()
    wanted_formats = given.quantize.split(",") if given.quantize else list(_OURS[given.preset])
    by_name = {case.name: case for case in cases(given.preset, wanted_formats, given.ranks)}
    wanted = [by_name[name] for name in parser.chosen(by_name, given.only)]
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        logs = given.logs or Path(temporary) / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        bench = Bench(Path(temporary), given.preset, "cuda" if gpus else "cpu", logs, compare=given.compare)
        rates = [bench.disk_rate()]
        size = sum(os.path.getsize(path) for path in _files(bench.checkpoint(False)))
        for case in wanted:
            bench.run(case)
        rates.append(bench.disk_rate())
        told = " and ".join(f"{rate / 1e9:.2f}" for rate in rates)
        print(f"checkpoint {size / 1e9:.2f} GB ({size / GIB:.2f} GiB); disk, O_DIRECT: {told} GB/s")
        print("final, anon, mapped, sum, all, dev, cached: MiB; anon, mapped, sum and dev above: peak above final")
        print("all: peak above the start, less the parameters; cached: pages of the files\n")
        print(table(bench.rows, max(rates), size, cuda=bool(gpus)), end="\n\n")
        missed = 0
        for what, value, limit, met in bars(bench.rows, given.preset, max(rates), size):
            print(f"{'met   ' if met else 'MISSED'}  {what}: {value:.2f}, bar {limit:.2f}")
            missed += not met
        for told, same in comparisons(bench.rows):
            print(f"{'equal ' if same else 'DIFFERS'}  {told}")
            missed += not same
    if given.smallest:
        return int(any(row.failed for row in bench.rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
