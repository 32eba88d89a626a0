"""What sparkd replaces of a vLLM in whose process it runs: every such place is known here, and docs/kv-cache.md names it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from workers.vllm.load.repack import _BY_EXPERT

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/kv-cache.md").read_text().partition("## What is replaced in vLLM")[2].partition("\n## ")[0]

# Functions and methods of vLLM's, and what it remembers: (file, how it is assigned) -> the names that docs/kv-cache.md has for it.
REPLACED = {
    ("workers/plugin.py", "engine_args.create_model_config"): ("EngineArgs.create_model_config",),
    ("workers/vllm/ray/engine.py", "ray.util.get_current_placement_group"): ("get_current_placement_group",),
    ("workers/vllm/load/repack.py", "setattr(module, name, ours)"): tuple(name for name, *_ in _BY_EXPERT),
    ("workers/vllm/kv/prompt_logprobs.py", "runner._get_prompt_logprobs_dict"): ("_get_prompt_logprobs_dict",),
    ("workers/vllm/kv/prompt_logprobs.py", "setattr(sys.modules[function.__module__], _V2, rows_at_a_time(function))"): (
        "compute_prompt_logprobs_with_chunking",
    ),
    ("workers/vllm/kv/prompt_logprobs.py", "runner.model"): ("model",),
    ("workers/vllm/kv/prompt_logprobs.py", "runner.sampler"): ("sampler",),
    ("workers/vllm/kv/cpu.py", "self.cache_config.kv_cache_memory_bytes"): ("kv_cache_memory_bytes",),
    ("workers/vllm/kv/cpu.py", "runner.intermediate_tensors"): ("intermediate_tensors",),
    ("workers/vllm/kv/stock_worker.py", "cache.kv_cache_memory_bytes"): ("kv_cache_memory_bytes",),
    ("workers/kv/start_gate.py", "cache_config.gpu_memory_utilization"): ("gpu_memory_utilization",),
    ("workers/vllm/kv/costs.py", "cache_config.num_gpu_blocks_override"): ("num_gpu_blocks_override",),
    ("workers/vllm/kv/rehearsal.py", "runner.cache_config.num_gpu_blocks"): ("num_gpu_blocks",),
    ("workers/vllm/kv/rehearsal.py", "setattr(holder, name, value)"): (
        *("max_num_tokens", "max_num_batched_tokens", "max_num_seqs", "max_num_encoder_input_tokens", "encoder_cache_size"),
        *("mm_max_items_per_batch", "skip_mm_profiling"),
    ),
    ("workers/vllm/load/config.py", "engine_args.hf_overrides"): ("hf_overrides",),
}
# Of errors, functions and tensors of our own, of layers that our own methods make, of copies, and of libc.
OWN = {
    ("workers/quantization/formats.py", "error.explanation"),  # of our own error
    ("workers/vllm/kv/costs.py", "shorter.model_config"),  # of a copy of the configuration
    ("workers/vllm/kv/stock_worker.py", "config.parallel_config.worker_cls"),  # of another one
    ("workers/vllm/kv/prompt_logprobs.py", "pieces.sparkd_stock"),
    ("workers/vllm/load/packed_layers.py", "layer.input_global_scale"),
    ("workers/vllm/load/packed_layers.py", "layer.input_size_per_partition"),
    ("workers/vllm/load/packed_layers.py", "layer.logical_widths"),
    ("workers/vllm/load/packed_layers.py", "layer.output_size_per_partition"),
    ("workers/vllm/load/packed_layers.py", "layer.weight_block_size"),
    ("workers/vllm/load/packed_layers.py", "layer.weight_global_scale"),
    ("workers/vllm/load/packed_layers.py", "setattr(bias, key, value)"),
    ("workers/vllm/load/packed_layers.py", "setattr(parameter, key, value)"),
    ("workers/vllm/load/loader.py", "plain.load_format"),
    ("workers/vllm/load/loader.py", "plain.model_loader_extra_config"),
    ("workers/vllm/load/method.py", "layer.scheme"),
    ("workers/vllm/load/repack.py", "in_place.sparkd_stock"),
    ("workers/vllm/load/repack.py", "setattr(self._layer, name, value)"),
    ("workers/files/direct_file.py", "libc.fallocate.argtypes"),
}
# A question about a model is answered in a child of its own, which serves nothing.
FOLDERS = ("cache", "files", "kv", "load", "quantization", "vllm/kv", "vllm/load", "vllm/ray")
INSIDE = [ROOT / "workers/plugin.py", ROOT / "workers/vllm/headless.py"]
INSIDE += [path for folder in FOLDERS for path in sorted((ROOT / "workers" / folder).rglob("*.py"))]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def fields() -> set[str]:
    """The attributes that our own classes declare, or set of themselves."""
    nodes = [node for path in INSIDE for node in nodes_of(path)]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_store(node) and is_self(node.value)}
    declared = (line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body if isinstance(line, ast.AnnAssign))
    return found | {line.target.id for line in declared if isinstance(line.target, ast.Name)}


def assigned(path: Path) -> Iterator[tuple[str, str]]:
    """(how, name) of every attribute that is set of anything but the module's own `self`; name "": it is not said there."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and is_store(node) and not is_self(node.value):
            yield ast.unparse(node), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__") and not is_self(node.args[0]):
            yield ast.unparse(node), ""


def test_every_attribute_that_is_set_of_somebody_elses_is_known() -> None:
    found = {(str(path.relative_to(ROOT)), how): name for path in INSIDE for how, name in assigned(path)}
    ours, known = fields(), set(REPLACED) | OWN

    unknown = {place for place, name in found.items() if place not in known and name not in ours}
    assert unknown == set(), "is it vLLM's? then REPLACED and docs/kv-cache.md's `What is replaced in vLLM` name it, else OWN does"
    assert known - found.keys() == set(), "it is set no longer"


def test_the_readme_names_all_of_them() -> None:
    assert sorted({name for names in REPLACED.values() for name in names if f"`{name}`" not in SECTION}) == []
