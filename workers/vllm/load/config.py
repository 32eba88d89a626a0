"""Reads the loader's settings, and writes vLLM's configuration from them: the quantization_config of the checkpoint that vLLM will receive.

The description is that of compressed-tensors, as config.json carries it for any vLLM. Importing this module imports no vLLM.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.checkpoint import VISION_PARTS, Checkpoint, TensorRef, read_checkpoint, tensor_class
from sparkd.errors import CheckpointError, SparkdError
from workers.cache.store import has_entry
from workers.load.progress import ProgressFile
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.formats import FORMATS, Format
from workers.quantization.packed import in_vllm, is_interleaved, packed_of
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.symbols import symbol

NAME = "spark"  # of the quantization method

KEYS = ("quantize", "cache_dir", "cache_limit_bytes", "progress", "enable_weights_track")

BLOCK = 128
# vLLM's gpt-oss takes some parts of its experts one at a time (models/gpt_oss.py, _get_streamed_expert_info), and on a GPU only the integer
# method of compressed-tensors has parameters for their biases.
_KEEP = "add 'experts' to `keep`"

_WRITTEN = tuple(form for form in FORMATS.values() if not form.keeps)
# Parts of a layer that some of vLLM's models call otherwise than their checkpoints (gpt_oss.py; granitemoehybrid.py, falcon_h1.py,
# zamba2.py); their mappings pass patterns by.
_RENAMED = {"self_attn": "(self_)?attn", "mamba": "(mamba|mixer)"}
# Modules outside the layers that one of vLLM's models has elsewhere than its mapping says (gemma3n.py: `self_decoder`).
_MOVED = ("per_layer_model_projection", "altup_projections")

# The names that vLLM's models give a vision tower, its projector, and a part of it that they put beside it, whatever its checkpoint does
# (lightonocr.py, minicpmv4_6.py, opencua.py, phi4mm.py, pixtral.py).
_TOWERS = r"re:(.*\.)?(visual|vision_(tower|encoder|language_adapter)|vpm|(vit_)?merger|multi_modal_projector)\..*"

logger = logging.getLogger("vllm.sparkd.stream")


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The loader's own settings.

    cache_dir: folder of quantized checkpoints, None for no cache.
    progress: file for the load's progress.
    enable_weights_track: False loads a model although the checkpoint lacks weights, as for vLLM's setting of the same name.
    """

    recipe: QuantizationRecipe
    cache_dir: str | None = None
    cache_limit_bytes: int | None = None
    progress: str | None = None
    enable_weights_track: bool = True

    @classmethod
    def parse(cls, raw: Any) -> LoaderSettings:
        """Parse the settings. Raises CheckpointError with the name of a key that is unknown or has a wrong value."""
        if not isinstance(raw, Mapping):
            raise CheckpointError("--model-loader-extra-config must be a JSON object", cure='For instance {"quantize": "nvfp4"}')
        if unknown := sorted(set(raw) - set(KEYS)):
            raise CheckpointError(f"the load format spark_stream has no setting {unknown[0]!r}", cure=f"It has {', '.join(KEYS)}")
        settings = {key: value for key, value in raw.items() if value is not None}
        recipe = QuantizationRecipe.parse(settings.pop("quantize", None))
        for key, kind, what in (
            ("cache_dir", str, "a folder"),
            ("progress", str, "a file"),
            ("cache_limit_bytes", int, "a number of bytes"),
            ("enable_weights_track", bool, "true or false"),
        ):
            if key not in settings:
                continue
            value = settings[key]
            is_of_kind = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
            if not is_of_kind or (isinstance(value, int) and kind is int and value <= 0):
                problem = f"the setting {key!r} of spark_stream must be {what}, not {value!r}"
                raise CheckpointError(problem, cure="Correct --model-loader-extra-config")
        return cls(recipe=recipe, **settings)

    def may_be_cached(self, model: str) -> bool:
        """Whether the cache has an entry for this model; only `find` checks that it is valid."""
        return self.cache_dir is not None and has_entry(self.cache_dir, model, self.recipe.canonical())


def describe(engine_args: Any) -> None:
    """Write the quantization that the loader will produce into `engine_args.hf_overrides`.

    A checkpoint that is quantized already, or a recipe that quantizes nothing, changes nothing, except that on a CPU our kernels serve a
    checkpoint in one of our formats. Raises ValueError with the reason if the checkpoint cannot be loaded.
    """
    checkpoint = None
    try:
        settings = LoaderSettings.parse(engine_args.model_loader_extra_config or {})
        checkpoint = read_checkpoint(
            local_folder(engine_args.model, getattr(engine_args, "revision", None), getattr(engine_args, "download_dir", None))
        )
        formats = settings.recipe.assign(checkpoint)
        VirtualCheckpoint(checkpoint, formats)
        refuse_unserved(checkpoint, formats, getattr(engine_args, "tensor_parallel_size", 1))
        described = quantization_config(formats, linear_modules(checkpoint))
        if not described and engine_args.quantization is None and _is_cpu():
            described = _quantized_elsewhere(checkpoint)
    except SparkdError as error:
        extra_config = engine_args.model_loader_extra_config
        if isinstance(extra_config, Mapping) and isinstance(path := extra_config.get("progress"), str):
            # An unreadable file may be readable once its download ends. A fault in tensors that were read will last.
            ProgressFile(path).failed(error.message, lasting=checkpoint is not None)
        raise ValueError(error.message) from None
    for sentence in formats.adjustments:
        logger.info("sparkd: %s", sentence)
    if not described:
        return
    if engine_args.quantization not in (None, NAME):
        raise ValueError(
            f"--quantization {engine_args.quantization} and the loader's `quantize` contradict each other: leave one of them out."
        )
    described["quant_method"] = NAME
    engine_args.hf_overrides = {**(engine_args.hf_overrides or {}), "quantization_config": described}


def _quantized_elsewhere(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's own configuration, if our CPU kernels serve it, as vLLM's may not (no AMX, no AVX-512); else {}."""
    details = checkpoint.quantization.details if checkpoint.quantization is not None else {}
    return dict(details) if in_our_formats(details) else {}


def local_folder(model: str, revision: str | None, download_dir: str | None) -> str:
    """The checkpoint's folder. huggingface_hub fetches a Hub id, or finds it in its cache when offline."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return str(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=["*.safetensors", "*.json"],
                ignore_patterns=["consolidated*", "original/*"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{model!r} is neither a folder nor a model that can be fetched ({type(error).__name__})",
            cure="Check the name, the network and HF_HUB_OFFLINE",
        ) from error


def refuse_unserved(checkpoint: Checkpoint, formats: Mapping[str, Format], tensor_parallel_size: int) -> None:
    """Raises CheckpointError for the first matrix or set of experts whose format vLLM could not take."""
    _refuse_torn_blocks(checkpoint, formats)
    wanted: dict[Format, str] = {}
    for module, form in formats.items():
        packed = packed_of(module)
        if packed is not None and not form.keeps and is_interleaved(checkpoint, packed.experts):
            wanted.setdefault(form, module)
    for form, module in wanted.items():
        if (problem := _unserved(form, tensor_parallel_size)) is not None:
            raise CheckpointError(problem[0], file=checkpoint.tensors[module].path, tensor=module, cure=problem[1])


def _refuse_torn_blocks(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> None:
    """vLLM's kernels for FP8 in blocks cut the activations into groups of 128 (per_token_group_quant_fp8); its CPU has another way."""
    for module, form in formats.items():
        ref = checkpoint.tensors.get(f"{module}.weight")
        if form.spelling == "fp8-block" and ref is not None and len(ref.shape) == 2 and ref.shape[1] % BLOCK and not _is_cpu():
            raise CheckpointError(
                f"K={ref.shape[1]} is not divisible by {BLOCK}, and vLLM's fp8-block kernels on a GPU need that",
                file=ref.path,
                tensor=ref.name,
                cure="Use fp8, or give that layer another format",
            )


def _unserved(form: Format, tensor_parallel_size: int) -> tuple[str, str] | None:
    """(reason, cure), or None where this vLLM takes the format."""
    if form.family.has_divisor and "w13_weight_global_scale" not in symbol("gpt_oss_streamed"):
        return (
            f"vLLM's gpt-oss has no place for the second scale of {form.spelling} experts",
            f"Give them another format with `layers: {{experts: mxfp4}}`, or {_KEEP}",
        )
    if _is_cpu():
        if form.name == "fp8" and tensor_parallel_size > 1:
            return (
                "vLLM's gpt-oss cuts the scale of fp8 experts between tensor-parallel ranks, though each needs the whole",
                f"Give them another format with `layers: {{experts: fp8-block}}`, or {_KEEP}",
            )
        return None
    if form.name != "int4":
        return (f"vLLM's {form.spelling} experts have no biases on a GPU, and gpt-oss's do", f"Use int4-g32, or {_KEEP}")
    return None


def _is_cpu() -> bool:
    return bool(symbol("current_platform").is_cpu())


def quantization_config(assignments: Mapping[str, Format], all_linear_modules: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for a checkpoint whose modules have these formats.

    assignments: module path -> Format, quantized modules only (a `bf16` counts as not quantized).
    all_linear_modules: the module path of every weight of two or more dimensions that vLLM may build as a linear layer or as experts,
        quantized or not; embeddings do no harm.

    Both in the checkpoint's own names. One format for all gives one group with the target "Linear", several give a group each, with
    regexes. An empty dict where nothing is quantized. Raises CheckpointError for a format that compressed-tensors cannot say.
    """
    quantized = {in_vllm(module): chosen for module, chosen in assignments.items() if chosen.name != "bf16"}
    if not quantized:
        return {}
    # A head that shares the embedding's weight is not in the checkpoint, and transformers would quantize it as it does every Linear.
    universe = list(dict.fromkeys([*map(in_vllm, all_linear_modules), *quantized, "lm_head"]))
    for value, key in _values_of_keys(universe).items():
        universe.append(value)
        if key in quantized:
            quantized[value] = quantized[key]
    groups: dict[Format, list[str]] = {}
    for module, chosen in quantized.items():
        groups.setdefault(chosen, []).append(module)
    # The order of the groups follows from the formats, so that equal recipes give equal files.
    ordered = sorted(groups.items(), key=lambda item: item[0].spelling)
    mixed = len(ordered) > 1
    config_groups = {
        f"group_{index}": {
            "targets": patterns(modules, universe) if mixed else ["Linear"],
            **_scheme(chosen),
            "format": chosen.family.compression,
        }
        for index, (chosen, modules) in enumerate(ordered)
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision" if mixed else ordered[0][0].family.compression,
        "config_groups": config_groups,
        "ignore": patterns([module for module in universe if module not in quantized], universe, towers=True),
        "kv_cache_scheme": None,
    }


def _values_of_keys(modules: Iterable[str]) -> dict[str, str]:
    """Module of the values that vLLM has for layers whose keys are their values too (gemma4.py, `attention_k_eq_v`) -> that of the keys."""
    names = frozenset(modules)
    keys = (module for module in names if module.endswith(".self_attn.k_proj"))
    values = {f"{key.removesuffix('k_proj')}v_proj": key for key in sorted(keys)}
    return {value: key for value, key in values.items() if value not in names}


def in_our_formats(described: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's own description says nothing that `quantization_config` would not say: formats, activations, no more.

    False too for a quantized KV cache, sparsity, rotations and reordered columns, whose tensors only stock vLLM takes.
    """
    groups = described.get("config_groups")
    if described.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return False
    if any(described.get(key) for key in ("kv_cache_scheme", "sparsity_config", "transform_config")):
        return False
    return all(
        isinstance(group, Mapping) and any(_says(group, group.get("format") or described.get("format"), form) for form in _WRITTEN)
        for group in groups.values()
    )


def linear_modules(checkpoint: Checkpoint) -> list[str]:
    """Every module of the checkpoint that may be a linear layer or a set of experts to vLLM."""
    ends = (".weight", "experts.gate_up_proj", "experts.down_proj")
    return [_beside(name, ref) for name, ref in checkpoint.tensors.items() if len(ref.shape) >= 2 and name.endswith(ends)]


def _beside(name: str, ref: TensorRef) -> str:
    """A module's path; for packed experts in a layout that is not known the one below which vLLM has any layer's experts."""
    module = name.removesuffix(".weight")
    parent, _, leaf = module.rpartition(".")
    unknown = len(ref.shape) == 3 and packed_of(name) is None and "experts" not in name.split(".")
    return f"{parent}.experts.{leaf}" if unknown and tensor_class(name, ref.shape) == "expert" else module


def patterns(modules: Iterable[str], universe: Iterable[str], *, towers: bool = False) -> list[str]:
    """Names and `re:` patterns that match exactly `modules` among `universe`, as few as its layers allow.

    Patterns leave the front of a path open, because vLLM renames it (a language model inside a multimodal one, `backbone` to `model`) and
    translates plain names only (CompressedTensorsConfig.apply_vllm_mapper). Experts stored as one packed parameter match under the
    per-expert names that vLLM asks for (`experts.0.gate_proj`). towers: a part of the model that is wanted whole (`visual`) becomes one
    pattern, which also covers the layers that vLLM fuses or names otherwise in it.
    """
    wanted = dict.fromkeys(modules)
    others = [module for module in universe if module not in wanted]
    result: dict[str, None] = {}
    tails: dict[str, list[str]] = {}
    taken = {part for other in others for part in other.split(".")}
    for module in wanted:
        tower = next((part for part in _front(module) if part not in taken), None) if towers else None
        if tower is not None:
            result[rf"re:(.*\.)?{re.escape(tower)}\..*"] = None
            if tower in VISION_PARTS and VISION_PARTS.isdisjoint(taken):
                result[_TOWERS] = None
        else:
            tails.setdefault(_tail(module), []).append(module)
    for tail, members in tails.items():
        result |= dict.fromkeys(_tail_patterns(tail, members, others))
    return list(result)


def matches(module: str, pattern: str) -> bool:
    """Whether one entry of `targets` or `ignore` means this module, as vLLM's is_equal_or_regex_match does."""
    return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module


def _tail_patterns(tail: str, members: list[str], others: list[str]) -> list[str]:
    """The shortest description of modules with one tail that fits no other: every layer, those of one part, listed layers, their names."""
    if _index_of(members[0]) is None:
        # vLLM's own path of the head has a prefix in a multimodal model, and its mapping leaves names without a dot alone.
        return [rf"re:(.*\.)?{re.escape(_moved(name))}$" if "." not in name or _moved(name) != name else name for name in members]
    everywhere = rf"re:(.*\.)?\d+\.{tail}$"
    if not any(matches(other, everywhere) for other in others):
        return [everywhere]
    by_front: dict[tuple[str, ...], list[str]] = {}
    for member in members:
        by_front.setdefault(tuple(_front(member)), []).append(member)
    return [pattern for front, some in by_front.items() for pattern in _front_patterns(front, tail, some, others)]


def _moved(module: str) -> str:
    """A module's path from the part on that vLLM has elsewhere."""
    parts = module.split(".")
    return next((".".join(parts[at:]) for at, part in enumerate(parts) if part in _MOVED), module)


def _front_patterns(front: tuple[str, ...], tail: str, members: list[str], others: list[str]) -> list[str]:
    """The same for modules whose paths agree before the layer's number."""
    layers = "|".join(member.split(".")[len(front)] for member in members)
    stem = rf"(.*\.)?{re.escape(front[-1])}\." if front else ""
    candidates = [
        *(rf"re:(.*\.)?{re.escape(part)}\.(.*\.)?\d+\.{tail}$" for part in front),
        rf"re:{stem}({layers})\.{tail}$",
        *(rf"re:(.*\.)?{re.escape(part)}\.(.*\.)?({layers})\.{tail}$" for part in front[:-1]),
    ]
    return next(([candidate] for candidate in candidates if not any(matches(other, candidate) for other in others)), members)


def _tail(module: str) -> str:
    """The part behind the layer's number, as a regex in which further numbers (experts) are any number."""
    position = _index_of(module)
    if position is None:
        return module
    parts = module.split(".")[position + 1 :]
    if "experts" in parts[:-1] and not parts[parts.index("experts") + 1].isdigit():
        parts = parts[: parts.index("experts") + 1]
        return r"\.".join(map(re.escape, parts)) + r"\..*"
    return r"\.".join(r"\d+" if part.isdigit() else _RENAMED.get(part, re.escape(part)) for part in parts)


def _front(module: str) -> list[str]:
    """The parts before the layer's number, or before the module's own name."""
    return module.split(".")[: _index_of(module)] if _index_of(module) is not None else module.split(".")[:-1]


def _index_of(module: str) -> int | None:
    """Where the layer's number stands among the dotted parts; None for a module outside the layers, or where nothing follows it."""
    parts = module.split(".")
    return next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), None)


def _scheme(chosen: Format) -> dict[str, Any]:
    """weights and input_activations of a group, fields of compressed_tensors.quantization.QuantizationArgs."""
    family = chosen.family
    weights = {"num_bits": family.bits, "symmetric": True, "dynamic": False, **family.weights}
    weights |= {"group_size": chosen.group} if chosen.group is not None else {}
    return {"weights": weights, "input_activations": None if family.inputs is None else dict(family.inputs)}


def format_of(scheme: Mapping[str, Any]) -> Format:
    """The weight format that a scheme of compressed-tensors describes, as `quantization_config` wrote it."""
    stated = {part: args and args.model_dump(mode="json") for part, args in scheme.items() if part in ("weights", "input_activations")}
    return next(form for form in _WRITTEN if all(_agree(stated.get(part), wanted) for part, wanted in _scheme(form).items()))


def _says(group: Mapping[str, Any], compression: Any, chosen: Format) -> bool:
    """Whether a group of a description is this format's. Fields that hold nothing, or only say how scales were found, are no difference."""
    wanted = _scheme(chosen)
    weights = group.get("weights")
    return (
        compression == chosen.family.compression
        and _agree(weights, wanted["weights"])
        and not (weights or {}).get("actorder")
        and _agree(group.get("input_activations"), wanted["input_activations"])
        and not group.get("output_activations")
    )


def _agree(stated: Any, wanted: Mapping[str, Any] | None) -> bool:
    if wanted is None or not isinstance(stated, Mapping):
        return wanted is None and not stated
    # Older checkpoints do not name the scales' dtype, nor that a weight's scales stand still.
    implied = {"scale_dtype": wanted.get("scale_dtype"), "dynamic": False}
    return all((implied.get(key) if stated.get(key) is None else stated[key]) == value for key, value in wanted.items())
