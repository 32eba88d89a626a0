"""Builds a model in the vLLM beside this Python on the meta device, from its configuration alone, and describes the result.

One process describes one model: vLLM keeps much of a model in globals. Every rank of a pipeline is built in turn, the first of its tensor
ranks, as the others are like it. `process_weights_after_loading` does not run: parameters are as a checkpoint fills them. Weights that vLLM
quantizes itself are counted as they become.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from workers.vllm.ask import cuda_stand_in
from workers.vllm.ask.cuda_stand_in import AbsentPackage, without_streams
from workers.vllm.kv.costs import block_bytes_of, groups_of, longest_bytes_of
from workers.vllm.symbols import symbol

# Longer sentences are pydantic's list of all that a union did not match.
_LONGEST = 4000
# A tensor of more elements that is no parameter is a table of sines; smaller ones are read back by some classes (torch.linspace, .item()).
_SMALL = 4096


# The shortest length for which the answer has a request's share of the cache; the other lengths lie between it and the longest.
_SHORTEST = 1024
# The errors of a class of vLLM that will not have a model. Any other error, and one of these out of torch, tells of this process.
_WORDS = (ValueError, RuntimeError, AssertionError)
# With it the classes of transformers refuse a config.json.
_STRICT = "StrictDataclassError"
_OURS = ("meta_model.py", "cuda_stand_in.py")
# It gets no tokenizer and no hub with a draft that is not here, no tensor has values, and no code of the model's own is run.
_WITHHELD = re.compile(r"tokenizer|repository ID|huggingface\.co|meta tensor|trust_remote_code|custom code|auto_map", re.IGNORECASE)
# Where a stand-in takes a GPU's place, sentences of a class about kernels and packages are about the wrong machine, and so are those about
# the sizes of a cache's pages, which follow from the kernel that was chosen.
_KERNELS = re.compile(r"backend|kernel|cuda|deepgemm|flashinfer|flash_?attention|is not (installed|available)|page.?size", re.IGNORECASE)
# How vLLM's configuration asks which of its classes loads a draft, their modules and names; any other draft is loaded by their base.
_PROPOSERS = (
    ("uses_draft_model", "draft_model", "DraftModelProposer"),
    ("use_gemma4_mtp", "gemma4", "Gemma4Proposer"),
    ("use_step3p5_mtp", "step3p5", "Step3p5MTPProposer"),
    ("use_dflash", "dflash", "DFlashProposer"),
)
# The size of a weight that vLLM itself quantizes, bytes an element with the scales of its blocks: by the name of its method, whose
# kernels do not run without a weight.
_ONLINE = {"Fp8": 1.0, "Int8": 1.0, "Mxfp8": 1 + 1 / 32, "Mxfp4": 1 / 2 + 1 / 32, "Nvfp4": 1 / 2 + 1 / 16}
_OWN_CLASS = '"auto_map"'
_inspected: list[BaseException] = []


class ModelNotBuilt(Exception):
    """The model was not built. step: `arguments`, `config`, `model`, `cache` or `sizes`. No start of an engine takes the last step."""

    def __init__(self, step: str, error: BaseException) -> None:
        super().__init__(str(error))
        cause = _inspected.pop() if _inspected else error
        where = traceback.extract_tb(cause.__traceback__)[-1:]
        message = _sentence(cause) or (f"{where[0].line} ({Path(where[0].filename).name}:{where[0].lineno})" if where else "")
        certain = step == "arguments" or (
            (isinstance(cause, _WORDS) or any(each.__name__ == _STRICT for each in type(cause).__mro__))
            and not isinstance(cause.__cause__, ImportError)
            and step != "sizes"
            and not _WITHHELD.search(message)
            and not (cuda_stand_in.stands and _KERNELS.search(message))
            and not (where and ("/torch/" in where[0].filename or Path(where[0].filename).name in _OURS))
        )
        self.refusal = {"step": step, "type": type(cause).__name__, "message": message, "certain": certain}


def prepare() -> None:
    """Once in a process, before it forks: classes of images and sound are there without torchvision and torchaudio, and vLLM looks at its
    own classes here, not in a child of its own, which takes as long as its import. Raises ImportError or AttributeError where this release
    is made otherwise."""
    sys.meta_path += [AbsentPackage(name) for name in ("torchvision", "torchaudio") if importlib.util.find_spec(name) is None]
    without_streams()
    registry = symbol("registry")

    def inspect(self: Any) -> Any:
        try:
            return registry._ModelInfo.from_model_cls(self.load_model_cls())
        except Exception as error:
            _inspected.append(error)  # vLLM only writes it to its log
            raise

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of workers.vllm.ask.model_answer without its `vllm`, `platform` and `seconds`."""
    answer: dict[str, Any] = {"refusal": None, "stages": [], "cache": None}
    caches: list[dict[str, Any]] = []
    try:
        for rank in range(int(question.get("pipeline_parallel", 1))):
            with _step("config"):
                config = _config(question)
                answer |= _resolved(config)
            with _step("model"):
                _take_place(config, rank * config.parallel_config.tensor_parallel_size)
                models = _built(config)
            with _step("cache"):
                specs, layers = _cache(config)
            caches.append(specs)
            answer["stages"].append({"rank": rank, "layers": layers, **_tensors(models)})
        answer |= _resolved(config)
        with _step("sizes"):
            answer["cache"] = _pool(config, caches)
    except ModelNotBuilt as refused:
        # A class of the model's own, which does not run here, may have read what vLLM could not.
        own = refused.refusal["step"] == "config" and _OWN_CLASS in _text(Path(question["folder"], "config.json"))
        answer["refusal"] = {**refused.refusal, "certain": refused.refusal["certain"] and not own}
    return answer


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except ModelNotBuilt:
        raise
    except (Exception, SystemExit) as error:
        raise ModelNotBuilt(name, error) from error


def _config(question: Mapping[str, Any]) -> Any:
    engine_args = symbol("EngineArgs")
    flexible: Any = symbol("FlexibleArgumentParser")

    class Parser(flexible):
        def error(self, message: str) -> NoReturn:
            raise ModelNotBuilt("arguments", ValueError(message))

        def parse_known_args(self, *where: Any) -> Any:
            """Without the front end's flags, which an engine's parser does not know."""
            return super().parse_known_args(*where)[0], []

    parser = engine_args.add_cli_args(Parser(add_help=False))
    given: argparse.Namespace
    sizes = {"--tensor-parallel-size": question.get("tensor_parallel", 1), "--pipeline-parallel-size": question.get("pipeline_parallel", 1)}
    own = ["--model", question["folder"], *(str(word) for pair in sizes.items() for word in pair)]
    # By it alone vLLM reads underscores, `--flag.key` and -O3.
    given = parser.parse_args([*question.get("args", ()), *own])
    arguments = engine_args.from_cli_args(given)
    arguments.enforce_eager = True
    arguments.skip_tokenizer_init = True
    arguments.disable_log_stats = True
    if arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1:
        # Ranks that no GPU of this machine has.
        arguments.distributed_executor_backend = "external_launcher"
    if str(arguments.load_format) != "spark_stream":
        arguments.load_format = "dummy"
    return arguments.create_engine_config(symbol("UsageContext").OPENAI_API_SERVER)


def _take_place(config: Any, rank: int) -> None:
    """This process is that rank of its world: vLLM's own sums give its groups, none of which has a connection."""
    parallel_state: Any = symbol("parallel_state")
    coordinator: Any = parallel_state.GroupCoordinator

    class Group(coordinator):
        def __init__(self, group_ranks: Sequence[Sequence[int]]) -> None:
            self.unique_name = "described"
            self.rank = self.local_rank = rank
            self.local_rank = self.device_index = 0
            self.group_ranks = group_ranks
            self.ranks = list(next(ranks for ranks in group_ranks if rank in ranks))
            self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
            self.device = torch.device("meta")
            self.cpu_group = self.device_group = torch.distributed.group.WORLD
            self.torch_distributed_backend = "fake"
            self.device_communicator = self.mq_broadcaster = None
            self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False

        def destroy(self) -> None: ...

    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    sizes = config.parallel_config
    world = sizes.world_size
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state._WORLD = Group([range(world)])
    parallel_state._NODE_COUNT = 1
    parallel_state.init_model_parallel_group = lambda group_ranks, *_, **__: Group(group_ranks)
    with symbol("set_current_vllm_config")(config):
        parallel_state.initialize_model_parallel(sizes.tensor_parallel_size, sizes.pipeline_parallel_size)


def _built(config: Any) -> list[tuple[str, torch.nn.Module]]:
    """(what for, model): the model and, on the last rank of a pipeline, the draft model that vLLM loads beside it."""
    get_layers_from_vllm_config = symbol("get_layers_from_vllm_config")
    set_current_vllm_config = symbol("set_current_vllm_config")
    get_pp_group = symbol("get_pp_group")
    AttentionLayerBase = symbol("AttentionLayerBase")
    initialize_model = symbol("initialize_model")

    models = []
    with set_current_vllm_config(config), _meta(config.model_config.dtype):
        models.append(("model", initialize_model(vllm_config=config)))
    draft = _draft_of(config)
    if draft is not None and get_pp_group().is_last_rank:
        with set_current_vllm_config(config), _meta(draft.dtype):
            proposer = _proposer(config)
            target_layers = set(get_layers_from_vllm_config(config, AttentionLayerBase))
            own = proposer._create_draft_vllm_config() if hasattr(proposer, "_create_draft_vllm_config") else config
            # A model of its own is built as any other; the rest are built on this one's configuration.
            whole = own.model_config is draft and config.speculative_config.method == "draft_model"
            place = {"prefix": "draft_model"} if whole else {"model_config": draft}
            proposer.model = initialize_model(vllm_config=own, **place)
            if config.speculative_config.method != "mtp":  # whose layers are in the model's own files
                _note_own_weights(proposer.model, draft.model)
            _share(models[0][1], proposer)
            if hasattr(proposer, "_setup_gemma4_kv_sharing"):
                proposer._setup_gemma4_kv_sharing(target_layers)
            models.append(("draft", proposer.model))
    return models


def _proposer(config: Any) -> Any:
    """vLLM's own loader of the draft, as its model runner chooses it, without the buffers that it would begin with."""
    SpecDecodeBaseProposer = symbol("SpecDecodeBaseProposer")

    speculative = config.speculative_config
    kind = SpecDecodeBaseProposer
    for chosen, module, name in _PROPOSERS:
        if getattr(speculative, chosen, bool)():
            kind = getattr(importlib.import_module(f"vllm.v1.spec_decode.{module}"), name)
    proposer = kind.__new__(kind)
    proposer.vllm_config, proposer.speculative_config = config, speculative
    proposer.draft_model_config, proposer.use_local_argmax_reduction = speculative.draft_model_config, False
    if speculative.method == "dflash":
        dflash_has_any_non_causal = symbol("dflash_has_any_non_causal")

        proposer.dflash_causal = not dflash_has_any_non_causal(speculative.draft_model_config.hf_config)
    return proposer


def _note_own_weights(draft: Any, folder: str) -> None:
    """A draft's class learns from the names of its weights while it loads which of them it has and which it takes from the model."""
    from safetensors import safe_open

    process_eagle_weight = symbol("process_eagle_weight")

    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                process_eagle_weight(draft, name)


def _share(model: Any, proposer: Any) -> None:
    """The draft gives up what it takes from the model, as vLLM's proposer decides without a weight: what it would only share where weights
    are equal stays counted."""
    supports_multimodal = symbol("supports_multimodal")

    target = model.get_language_model() if supports_multimodal(model) else model
    for name in ("_maybe_share_embeddings", "_maybe_share_lm_head"):
        with contextlib.suppress(AttributeError, RuntimeError):
            getattr(proposer, name)(target)


def _draft_of(config: Any) -> Any:
    speculative = config.speculative_config
    if speculative is None or speculative.method in ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states"):
        return None
    return speculative.draft_model_config


@contextlib.contextmanager
def _meta(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _MetaMode():
            yield
    finally:
        torch.set_default_dtype(before)


_SIZED = {torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.tensor, torch.as_tensor, torch.eye, torch.logspace}
_EMPTY = {torch.empty, torch.rand, torch.randn, torch.randint, torch.empty_strided}


class _MetaMode(TorchFunctionMode):
    """Creates tensors without memory, on any device that a class names. A small tensor that a class may read back is on the CPU; combined
    with a tensor without memory, its result has none either."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY or func in _SIZED:
            kwargs.pop("pin_memory", None)
        if func in _EMPTY:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in _SIZED:
            if any(isinstance(one, torch.Tensor) and one.is_meta for one in args):
                return func(*args, **{**kwargs, "device": "meta"})
            sized = func(*args, **{**kwargs, "device": "meta"})
            return func(*args, **{**kwargs, "device": "cpu"}) if sized.numel() <= _SMALL else sized
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.to, torch.nn.Module.to):
            args = tuple("meta" if _is_device(one) else one for one in args)
            if "device" in kwargs:
                kwargs["device"] = "meta"
        elif isinstance(kwargs.get("device"), (str, int, torch.device)):
            kwargs["device"] = "meta"
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
                raise
            args, kwargs = tree_map(_on_meta, (args, kwargs))
            return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "meta"))


def _on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _cache(config: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(vLLM's spec of each layer that keeps something, the same in words)."""
    get_layers_from_vllm_config = symbol("get_layers_from_vllm_config")
    set_current_vllm_config = symbol("set_current_vllm_config")
    AttentionLayerBase = symbol("AttentionLayerBase")
    current_platform = symbol("current_platform")

    specs: dict[str, Any] = {}
    with set_current_vllm_config(config):
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        for name, layer in layers.items():
            reads_another = getattr(layer, "kv_sharing_target_layer_name", None)
            if not reads_another and (spec := layer.get_kv_cache_spec(config)):
                specs[name] = _customized(layer, spec)
    return specs, [_worded(name, spec) for name, spec in specs.items()]


def _customized(layer: Any, spec: Any) -> Any:
    """Customize a layer's cache specification like the model runner."""
    if not isinstance(spec, symbol("AttentionSpec")):
        return spec
    return symbol("customize_attention_spec")(layer.get_attn_backend(), spec)


def _worded(name: str, spec: Any) -> dict[str, Any]:
    """A layer, see workers.vllm.ask.model_answer."""
    MambaSpec = symbol("MambaSpec")

    page = int(spec.page_size_bytes)
    worded = {"name": name, "spec": type(spec).__name__, "block": int(spec.block_size), "page_bytes": page}
    if isinstance(spec, MambaSpec):
        own = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return worded | {"state_bytes": own}
    return worded | {
        "token_bytes": page / spec.block_size,
        "window": getattr(spec, "sliding_window", None),
        "chunk": getattr(spec, "attention_chunk_size", None),
    }


def _pool(config: Any, caches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How vLLM's block pool holds them, see workers.vllm.ask.model_answer."""
    set_current_vllm_config = symbol("set_current_vllm_config")

    merged = {name: spec for cache in caches for name, spec in cache.items()}
    if not merged:
        return {"groups": [], "stages": [{"block_bytes": 0, "requests": []} for _ in caches]}
    with set_current_vllm_config(config):
        with _step("cache"):
            _settle_layout(config, merged)
            groups = groups_of(config, merged)
        stages = [_stage_of(config, groups, cache) for cache in caches]
    worded = [
        {
            "spec": type(group.kv_cache_spec).__name__,
            "block": int(group.kv_cache_spec.block_size),
            "page_bytes": int(group.kv_cache_spec.page_size_bytes),
            "layers": list(group.layer_names),
        }
        for group in groups
    ]
    return {"groups": worded, "stages": stages}


def _stage_of(config: Any, groups: Any, cache: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a stage of the pipeline, see workers.vllm.ask.model_answer."""
    own = [group for group in symbol("_project_kv_cache_groups_to_worker")(groups, cache) if group.layer_names]
    if not own:
        return {"block_bytes": 0, "requests": []}
    return {"block_bytes": block_bytes_of(config, own), "requests": _requests(config, own)}


def _requests(config: Any, groups: Any) -> list[list[int]]:
    """[[tokens, bytes that one request of so many takes]], up to the longest."""
    longest = config.model_config.max_model_len
    lengths = [1]
    while max(lengths[-1] * 2, _SHORTEST) < longest:
        lengths.append(max(lengths[-1] * 2, _SHORTEST))
    rows = []
    try:
        for length in (*lengths, longest):
            config.model_config.max_model_len = length
            rows.append([length, longest_bytes_of(config, groups)])
    finally:
        config.model_config.max_model_len = longest
    return rows


def _settle_layout(config: Any, specs: Mapping[str, Any]) -> None:
    """Resolve the cache layout like the engine core before it makes groups."""
    layouts = symbol("get_supported_kv_cache_layouts")(symbol("get_current_attn_backends")(config))
    symbol("resolve_kv_cache_layout")(config, [[layout.name for layout in layouts]], list(specs.values()))


def _tensors(models: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, Any]:
    rows: list[list[Any]] = []
    totals = {"parameters": 0, "buffers": 0}
    seen: set[int] = set()
    quantized = {id(tensor): size for _, model in models for tensor, size in _quantized_later(model)}
    for purpose, model in models:
        for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
            for name, tensor in named:
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if kind == "parameters":
                    rows.append([purpose, name, list(tensor.shape), _name(tensor.dtype)])
                totals[kind] += quantized.get(id(tensor), tensor.numel() * tensor.element_size())
    return {"parameters": rows, "parameter_bytes": totals["parameters"], "buffer_bytes": totals["buffers"]}


def _quantized_later(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int]]:
    """(weight, its bytes once vLLM has quantized it): of a model that is stored otherwise and quantized layer by layer while it loads."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        width = next((size for name, size in _ONLINE.items() if type(method).__name__.startswith(name)), None)
        if width is not None and getattr(method, "uses_meta_device", False):
            own = module.named_parameters(recurse=False)
            yield from ((tensor, int(tensor.numel() * width)) for name, tensor in own if name.endswith("weight"))


def _resolved(config: Any) -> dict[str, Any]:
    model, quantization = config.model_config, config.quant_config
    return {
        "max_model_len": int(model.max_model_len),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": None if quantization is None else str(quantization.get_name()),
        "vocabulary": _read(lambda: int(model.get_vocab_size())),
        "layers": _read(lambda: int(model.get_total_num_hidden_layers())),
        "hidden": _read(lambda: int(model.get_hidden_size())),
        "heads": _read(lambda: int(model.model_arch_config.total_num_attention_heads)),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
    }


def _read(get: Callable[[], Any]) -> Any:
    """None where this release keeps it elsewhere, or does not know it of this model."""
    try:
        return get()
    except Exception:  # noqa: BLE001 - a plan has its own figure
        return None


def _text(path: Path) -> str:
    """Empty where it is not there."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _sentence(error: BaseException) -> str:
    errors = getattr(error, "errors", None)
    found = _read(lambda: str(errors()[0]["msg"])) if callable(errors) else None
    text = (found or str(error)).removeprefix("Value error, ").strip()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
