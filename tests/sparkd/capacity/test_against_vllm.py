"""What a plan counts, held against vLLM's own functions without an engine: caches, states, rotary tables, stages, heads, the command."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from sparkd.capacity.fit import FitRequest, choose
from sparkd.capacity.kv_cache import BLOCK_TOKENS, LATENT_BLOCK_TOKENS, Serving, stages_of
from sparkd.capacity.parallelism import refusal
from sparkd.capacity.plan_report import Site, how_of, to_json
from sparkd.capacity.speculative import Drafting
from sparkd.checkpoint.quantization import source_quantization
from sparkd.hardware import Hardware, hardware_of
from sparkd.models.shape import Attention, Mixer, RecurrentState, Shape, shape_of
from tests.support.accounts import kv_cost
from tests.support.checkpoints import dense, mixture, tensors_of
from tests.support.facts import lacking
from tests.support.inventories import CONFIGS, known
from workers.quantization.recipe import QuantizationRecipe

with warnings.catch_warnings():
    # What vLLM and torch deprecate among themselves is not ours.
    warnings.simplefilter("ignore")
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.utils import get_pp_indices
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

MUCH = 1 << 60
DTYPES = {"float32": torch.float32, None: torch.bfloat16}
PER_KIND = 40
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
LATENT = Attention(1, 576, 0, latent=True)
KINDS = ("full", "window", "windows", "sizes", "wild", "gemma4", "delta_net", "mamba", "latent")


class Backend:
    """An attention kernel of blocks of 16."""

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]


class OnePlatform(Platform):
    @classmethod
    def _find_non_ssm_backends(cls, vllm_config: Any) -> list[Any]:
        return [Backend]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """vLLM warns of padding and of uneven stages."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def vllm_config(serving: Serving) -> Any:
    """What the functions read of a VllmConfig, the number of batches in flight by its own property."""
    scheduler = SimpleNamespace(
        disable_hybrid_kv_cache_manager=False,
        async_scheduling=serving.batches_in_flight == 2,
        max_num_batched_tokens=serving.max_num_batched_tokens,
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, tensor_parallel_size=serving.tensor_parallel, pipeline_parallel_size=serving.pipeline_parallel
    )
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        mamba_cache_mode="align" if serving.prefix_caching else "none",
        cache_dtype=serving.kv_dtype,
        block_size=0,
        mamba_block_size=None,
        mamba_page_size_padded=None,
    )
    model = SimpleNamespace(
        max_model_len=serving.max_model_len, original_max_model_len=None, dtype=torch.bfloat16, use_mla=False, architecture="X"
    )
    made = SimpleNamespace(
        scheduler_config=scheduler,
        parallel_config=parallel,
        cache_config=cache,
        model_config=model,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        use_v2_model_runner=True,
    )
    made.max_concurrent_batches = VllmConfig.max_concurrent_batches.fget(made)  # type: ignore[attr-defined]
    made.max_in_flight_tokens = VllmConfig.max_in_flight_tokens.fget(made)  # type: ignore[attr-defined]
    return made


def state_spec(one: RecurrentState, serving: Serving, block: int = -1, padded: int | None = None) -> Any:
    ranks, kept = serving.tensor_parallel, serving.speculative_tokens
    of = MambaStateShapeCalculator
    checkpoints = 0
    if one.groups:
        # As vllm/model_executor/layers/mamba/mamba_mixer2.py, get_kv_cache_spec, has it.
        checkpoints = 1
        shapes = of.mamba2_state_shape(ranks, one.channels, one.groups, one.heads, one.rows, one.group_size, one.taps + 1, kept)
    else:
        shapes = of.gated_delta_net_state_shape(ranks, one.key_heads, one.heads, one.columns, one.rows, one.taps + 1, kept)
    dtypes = (torch.bfloat16, DTYPES[one.matrix_dtype])
    blocks = {"num_speculative_blocks": kept, "num_prefill_checkpoint_blocks": checkpoints}
    return MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=padded, **blocks)


def attention_spec(one: Attention, serving: Serving, block: int) -> Any:
    heads = max(1, one.heads // serving.tensor_parallel)
    plain = {"block_size": block, "head_size": one.key_dim, "dtype": torch.float8_e4m3fn if serving.kv_dtype == "fp8" else torch.bfloat16}
    if one.latent:
        return MLAAttentionSpec(num_kv_heads=1, **plain)
    if one.window:
        return SlidingWindowSpec(num_kv_heads=heads, head_size_v=one.value_dim, sliding_window=one.window, **plain)
    return FullAttentionSpec(num_kv_heads=heads, head_size_v=one.value_dim, **plain)


def aligned(config: Any, attention: Attention, state: RecurrentState, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block and page of a hybrid model, set in the configuration by vLLM's own alignment."""
    spec = state_spec(state, serving)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _config: spec.shapes, get_mamba_state_dtype_from_config=lambda _config: spec.dtypes
    )
    monkeypatch.setattr(type(ModelRegistry), "resolve_model_cls", lambda *_arguments, **_options: (model, "X"))
    config.model_config.use_mla = attention.latent
    config.model_config.get_num_kv_heads = lambda _parallel: max(1, attention.heads // serving.tensor_parallel)
    config.model_config.get_head_size = lambda: attention.key_dim
    OnePlatform._align_hybrid_block_size(config, Backend)


def counted_by_vllm(shape: Shape, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(bytes of a block, blocks of a request)."""
    config = vllm_config(serving)
    attentions = [one for one in shape.mixers if isinstance(one, Attention)]
    states = [one for one in shape.mixers if isinstance(one, RecurrentState)]
    sizes = LATENT_BLOCK_TOKENS if any(one.latent for one in attentions) else BLOCK_TOKENS
    config.cache_config.block_size = sizes[serving.platform]
    if states and attentions:
        aligned(config, attentions[0], states[0], serving, monkeypatch)
    block, padded = config.cache_config.block_size, config.cache_config.mamba_page_size_padded
    workers: list[dict[str, KVCacheSpec]] = []
    for stage in range(serving.pipeline_parallel):
        start, end = get_pp_indices(shape.layers, stage, serving.pipeline_parallel)
        layers = list(enumerate(shape.mixers))[start:end]
        workers.append(
            {
                f"layers.{number}": state_spec(one, serving, block, padded)
                if isinstance(one, RecurrentState)
                else attention_spec(one, serving, block)
                for number, one in layers
                if one is not None
            }
        )
    whole = next((one for one in attentions if not one.window), None)
    if whole is not None:
        workers[-1] |= {f"draft.{number}": attention_spec(whole, serving, block) for number in range(serving.draft_layers)}
    made = kv_cache_utils.get_kv_cache_configs(config, workers, [MUCH] * len(workers))
    requests = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made[0])
    return MUCH // made[0].num_blocks, round(made[0].num_blocks / requests)


def model(kind: str, draw: random.Random) -> Shape:
    """Layers of one way of mixing them, as published models do or wilder."""
    heads, dim, count = draw.choice([1, 2, 4, 8]), draw.choice([64, 128, 256]), draw.randint(3, 24)
    full, window = Attention(heads, dim, dim), Attention(heads, dim, dim, window=draw.choice([17, 128, 1024]))
    key_heads, value_heads, precision = 4, draw.choice([8, 16]), draw.choice([None, "float32"])
    delta = RecurrentState((2 * key_heads + value_heads) * 128, 3, value_heads, 128, 128, key_heads=key_heads, matrix_dtype=precision)
    width = draw.choice([16, 64])
    mamba = RecurrentState(width * 64, 3, width, 64, 128, draw.choice([1, 8]), 128, matrix_dtype=precision)
    global_dim = draw.choice([256, 512, 96])
    wild = [full, window, Attention(2 * heads, dim // 2, dim // 2), replace(window, heads=2 * heads, key_dim=dim // 2, value_dim=dim // 2)]
    wild += [replace(full, value_dim=dim // 2), replace(window, window=33)]
    choices: dict[str, list[Mixer | None]] = {
        "full": [full],
        "window": [full, window, window],
        "windows": [full, window, replace(window, window=64)],
        "sizes": [full, replace(full, heads=2 * heads), Attention(heads, 96, 64)],
        "wild": draw.sample([*wild], draw.choice([2, 3])),
        "mamba": [mamba, mamba, None, full],
        "latent": [LATENT],
    }
    if kind == "delta_net":
        mixers: list[Mixer | None] = [delta if number % 4 < 3 else full for number in range(count)]
    elif kind == "gemma4":
        mixers = [window if number % 6 < 5 else Attention(draw.choice([1, heads]), global_dim, global_dim) for number in range(count)]
    else:
        mixers = [draw.choice(choices[kind]) for _ in range(count)]
    return replace(shape_of(dense()), layers=count, mixers=tuple(mixers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_costs_what_vllm_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(PER_KIND):
        draw = random.Random(f"{kind} {number}")
        shape = model(kind, draw)
        serving = Serving(
            draw.choice([1000, 4096, 65536, 131072]),
            max_num_batched_tokens=draw.choice([256, 2048, 8192]),
            tensor_parallel=draw.choice([1, 1, 2, 4]),
            pipeline_parallel=draw.choice([1, 1, 2, 3]),
            kv_dtype=draw.choice(["auto", "fp8"]),
            prefix_caching=draw.random() < 0.5,
            platform=draw.choice(["cuda", "cpu"]),
            batches_in_flight=draw.choice([1, 2]),
            speculative_tokens=draw.choice([0, 0, 2]),
            draft_layers=draw.choice([0, 0, 1]),
        )
        if not all(
            any(shape.mixers[at] for at in range(shape.layers) if stages_of(shape.layers, serving.pipeline_parallel)[at] == stage)
            for stage in range(serving.pipeline_parallel)
        ):
            continue  # vLLM has no cache at all for such a stage.

        found = kv_cost(shape, serving)
        assert (found.block_bytes, found.blocks) == counted_by_vllm(shape, serving, monkeypatch), (number, shape.mixers, serving)


@pytest.mark.parametrize(("layers", "stages"), [(10, 1), (10, 2), (11, 2), (61, 4), (62, 4), (63, 4), (3, 3), (2, 3)])
def test_stages_are_cut_where_vllm_cuts(layers: int, stages: int) -> None:
    spans = [get_pp_indices(layers, stage, stages) for stage in range(stages)]

    assert stages_of(layers, stages) == [stage for stage, (start, end) in enumerate(spans) for _ in range(start, end)]


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
SECTIONS = {"mrope_section": [16, 8, 8]}
LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("more", "calls"),
    [
        ({}, [(64, {})]),
        ({"head_dim": 128, "partial_rotary_factor": 0.25}, [(128, {"partial_rotary_factor": 0.25})]),
        ({"rope_scaling": LLAMA}, [(64, LLAMA)]),
        ({"rope_scaling": LINEAR}, [(64, LINEAR)]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, [(64, {"rope_type": "dynamic", "factor": 4.0})]),
        ({"rope_scaling": {"rope_type": "yarn", **YARN}}, [(64, {"rope_type": "yarn", **YARN})]),
        ({"rope_scaling": {"rope_type": "default", **SECTIONS}}, [(64, {"rope_type": "default", **SECTIONS})]),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, **SECTIONS}}, [(64, {"rope_type": "yarn", **YARN, **SECTIONS})]),
        (
            {"global_head_dim": 128, "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {"rope_type": "default"}}},
            [(128, PROPORTIONAL), (64, {})],
        ),
        (
            {"model_type": "gemma3_text", "head_dim": 64, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
            [(64, LINEAR), (64, {"rope_theta": 1e4})],
        ),
        (
            {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "rope_scaling": {"type": "yarn", **YARN}},
            [(32, {"rope_type": "deepseek_yarn", **YARN})],
        ),
    ],
)
def test_rotary_tables_are_as_large_as_vllms(more: dict[str, Any], calls: list[tuple[int, dict[str, Any]]]) -> None:
    """calls: (head size, parameters) of each kind of layer."""
    config = dense(max_position_embeddings=512, **more)
    shape = shape_of(config)
    with set_current_vllm_config(VllmConfig()):
        tables = [get_rope(head, 512, True, own, torch.bfloat16) for head, own in calls]

    assert shape.rotary_bytes == sum(table.cos_sin_cache.nbytes for table in tables)


def test_heads_that_do_not_divide_are_refused_where_vllm_refuses_them() -> None:
    told = set()
    for heads in (6, 8, 12):
        inventory = known(config := dense(num_attention_heads=heads, num_key_value_heads=heads, head_dim=64), tensors_of(config))
        for ranks in (1, 2, 3, 4, 5, 6, 8):
            stand_in = SimpleNamespace(
                model_arch_config=SimpleNamespace(total_num_attention_heads=heads), use_mla=False, multimodal_config=None
            )
            parallel = SimpleNamespace(
                enable_hc_sp=False,
                tensor_parallel_size=ranks,
                enable_expert_parallel=False,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
            )
            try:
                ModelConfig.verify_with_parallel_config(stand_in, parallel)  # type: ignore[arg-type]
                by_vllm = None
            except ValueError as error:
                by_vllm = str(error)
            ours = refusal(inventory.formatted(QuantizationRecipe.parse("bf16")), ranks, 1)
            assert (by_vllm is None) == (ours is None or "attention heads" not in ours)
            if by_vllm is not None:
                assert f"({heads})" in by_vllm and lacking(ours, f"{heads} attention heads", f"{ranks} ranks") == []
                told.add((heads, ranks))
    assert (6, 4) in told and (8, 3) in told and (12, 4) not in told


class Strict(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@pytest.fixture(scope="module")
def parser() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_arg_parser(Strict())


CPU_LIKE = {"memory_bytes": 64 << 30, "platform": "cpu"}


def parsed_by(parser: Any, arguments: list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.parse_args(arguments)


def test_stages_of_two_ranks_each_have_commands_that_vllm_parses(parser: Any) -> None:
    inventory, machine, wish = known(config := mixture(), tensors_of(config)), hardware_of("spark"), FitRequest(nodes=4)
    both = next(one for one in choose(inventory, machine, wish).options if (one.tensor, one.pipeline) == (2, 2))
    told = how_of("/m", both, wish, machine, Site())

    assert told["config"] is None and len(told["ranks"]) == both.nodes == 4
    for number, rank in enumerate(told["ranks"]):
        parsed = parsed_by(parser, rank["command"][3:])
        assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.nnodes, parsed.node_rank) == (2, 2, 4, number)


@pytest.mark.parametrize(
    ("hardware", "wish"),
    [
        ("spark", FitRequest()),
        ("spark", FitRequest(nodes=2, requests=4, quantize=QuantizationRecipe.parse("nvfp4"), margin_bytes=2 << 30)),
        ("spark", FitRequest(nodes=2, max_model_len=4096, eager=True, unlinked={2: "no cable"})),
        (
            "h200",
            FitRequest(
                quantize=QuantizationRecipe.parse({"format": "int4-g32", "keep": ["o_proj"]}),
                serving=Serving(0, kv_dtype="fp8", max_num_batched_tokens=2048),
            ),
        ),
        (
            "spark",
            FitRequest(
                nodes=2, drafting=Drafting("ngram", 4, args=("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'))
            ),
        ),
        ("cpu", FitRequest(quantize=QuantizationRecipe.parse("mxfp4"), serving=Serving(0, platform="cpu"))),
    ],
)
def test_every_rank_has_a_command_that_vllm_parses(hardware: str, wish: FitRequest, parser: Any, tmp_path: Path) -> None:
    machine: Hardware = replace(hardware_of("spark"), name="desk", **CPU_LIKE) if hardware == "cpu" else hardware_of(hardware)
    inventory = known(config := mixture(), tensors_of(config))
    found = json.loads(json.dumps(to_json("/m", inventory, machine, wish, choose(inventory, machine, wish))))

    for option in found["options"]:
        assert option["fits"] or option["reason"]
    choice = found["choice"]
    assert len(choice["ranks"]) == choice["nodes"]
    for number, rank in enumerate(choice["ranks"]):
        _, safe_path, dash_m, module, *arguments = rank["command"]
        assert (safe_path, dash_m, module) == ("-P", "-m", "vllm.entrypoints.openai.api_server")
        parsed = parsed_by(parser, arguments)
        assert (parsed.model, parsed.max_model_len, parsed.max_num_seqs) == ("/m", choice["max_model_len"], Serving(0).max_num_seqs)
        assert parsed.max_num_batched_tokens == wish.serving.max_num_batched_tokens
        assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size) == (choice["tensor_parallel"], choice["pipeline_parallel"])
        assert (parsed.nnodes, parsed.node_rank) == (choice["nodes"], number) and parsed.headless == (number > 0)
        assert parsed.kv_cache_dtype == wish.serving.kv_dtype and parsed.enforce_eager == (wish.eager or hardware == "cpu")
        assert parsed.worker_cls.startswith("workers.kv.Spark") and (parsed.load_format == "spark_stream") == (wish.quantize is not None)
        assert all(isinstance(value, str) for value in rank["environment"].values())


@pytest.mark.parametrize("fixture", sorted(path.stem for path in CONFIGS.glob("*.json") if "kv_cache" in path.read_text()))
def test_a_checkpoints_own_cache_is_vllms(fixture: str) -> None:
    given = json.loads((CONFIGS / f"{fixture}.json").read_text())
    details = given.get("quantization_config") or given
    found = source_quantization({"quantization_config": details}, None, {})
    said = get_kv_cache_quant_algo_string({"quant_method": "modelopt", **details})
    assert found is not None and found.kv_dtype == {"fp8_e4m3": "fp8"}.get(str(said), "auto")
