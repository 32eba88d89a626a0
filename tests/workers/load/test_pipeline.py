from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.pipelines import pipeline_of
from workers.cache.layout import lay_out, neighbours
from workers.cache.load_session import LoadSession
from workers.cache.writer import CODES
from workers.load.formats import global_scale, quantizer
from workers.load.pipeline import Pipeline
from workers.load.progress import ProgressFile
from workers.load.read_plan import Run, steps
from workers.load.reader import Reader
from workers.load.trace import Trace, expert_families, inferred_targets, phantoms
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.recipe import QuantizationRecipe

CPU = torch.device("cpu")
HIDDEN, INTER, EXPERTS = 128, 256, 4
READER = partial(Reader, block_bytes=64 * 1024, blocks=4, threads=2, pin=False)


def random_weights(*, packed: bool = False, inter: int = INTER) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    made: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.randn(512, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64)):
            made[f"{at}.self_attn.{name}.weight"] = torch.randn(rows, HIDDEN) * (1 + len(name))
        made[f"{at}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, 256)
        made[f"{at}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("gate_proj", (inter, HIDDEN)), ("up_proj", (inter, HIDDEN)), ("down_proj", (HIDDEN, inter))):
                made[f"{at}.mlp.experts.{expert}.{name}.weight"] = torch.randn(*shape) * (1 + expert)
        if packed:
            parts = [
                [made.pop(f"{at}.mlp.experts.{e}.{name}.weight") for e in range(EXPERTS)] for name in ("gate_proj", "up_proj", "down_proj")
            ]
            made[f"{at}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u in zip(parts[0], parts[1], strict=True)])
            made[f"{at}.mlp.experts.down_proj"] = torch.stack(parts[2])
    return {name: tensor.to(torch.bfloat16) for name, tensor in made.items()}


def written(folder: Path, weights: dict[str, torch.Tensor], *, order: Callable[[list[str]], list[str]] = sorted, shards: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    names = order(list(weights))
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: weights[name].contiguous() for name in mine}, folder / file)
        index |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": HIDDEN}))
    return folder


def virtual_in(folder: Path, quantize: str | dict) -> VirtualCheckpoint:
    checkpoint = read_checkpoint(str(folder))
    return VirtualCheckpoint(checkpoint, QuantizationRecipe.parse(quantize).assign(checkpoint))


def loaded(folder: Path, quantize: str | dict, **kwargs) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline_of(virtual_in(folder, quantize), CPU, READER, **kwargs).tensors()}


def expected(weights: dict[str, torch.Tensor], name: str, form, fused: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    weight = weights[f"{name}.weight"]
    if form.name != "nvfp4":
        return quantizer(form).quantize(weight)
    largest = max(float(weights[f"{one}.weight"].abs().max()) for one in (name, *fused))
    return quantizer(form).quantize(weight, global_scale=global_scale(torch.tensor(largest)))


BATCHES = pytest.mark.parametrize("batch_bytes", [0, 200_000, 2**30], ids=["alone", "few together", "all together"])


@pytest.mark.parametrize(
    ("quantize", "batch_bytes", "shuffled"),
    [
        ("nvfp4", 0, False),
        ("nvfp4", 200_000, True),
        ("nvfp4", 2**30, True),
        ("mxfp4", 2**30, False),
        ("int4-g32", 200_000, False),
        ("fp8", 2**30, True),
        ("fp8-block", 2**30, False),
    ],
)
def test_every_weight_comes_quantized_and_everything_else_as_it_is(tmp_path, quantize, batch_bytes, shuffled):
    weights = random_weights()
    folder = written(tmp_path / "m", weights, order=lambda names: sorted(names, key=lambda name: name[::-1] if shuffled else name))
    got = loaded(folder, quantize, batch_bytes=batch_bytes)
    form, formats = QuantizationRecipe.parse(quantize).default, QuantizationRecipe.parse(quantize).assign(read_checkpoint(str(folder)))
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(got[name], weights[name])
    attention = "model.layers.0.self_attn"
    for name, fused in (
        (f"{attention}.q_proj", [f"{attention}.k_proj", f"{attention}.v_proj"]),
        (f"{attention}.o_proj", []),
        ("model.layers.1.mlp.experts.3.up_proj", ["model.layers.1.mlp.experts.3.gate_proj"]),
        ("model.layers.1.mlp.experts.2.down_proj", []),
    ):
        for suffix, tensor in expected(weights, name, formats[name], fused).items():
            if suffix == "weight_shape":
                continue
            assert torch.equal(got[f"{name}.{suffix}"].view(torch.uint8), tensor.view(torch.uint8)), (name, suffix)
    assert len(got) == 2 + 2 * (1 + (4 + 3 * EXPERTS) * len(quantizer(form).parts(INTER, HIDDEN).keys() - {"weight_shape"}))


def test_fused_weights_at_the_same_offset_of_two_shards_are_two_weights(tmp_path):
    """With a shard for each tensor all of them begin behind headers of about the same length."""
    weights = random_weights()
    together = loaded(written(tmp_path / "one", weights, shards=1), "nvfp4", batch_bytes=10**9)
    same_tensors(loaded(written(tmp_path / "each", weights, shards=len(weights)), "nvfp4", batch_bytes=10**9), together)


def test_plain_loading_is_the_checkpoint_itself(tmp_path):
    weights = random_weights()
    got = loaded(written(tmp_path / "m", weights), "bf16")
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[name], weights[name]) for name in weights)


def same_tensors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))] == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("quantize", "inter", "batch_bytes"),
    [("nvfp4", INTER, 2**30), ("int4-g64", INTER, 0), ("mxfp4", HIDDEN // 2, 200_000)],
    ids=["together", "alone", "a square block, which stands as its sibling does"],
)
def test_packed_experts_come_one_by_one(tmp_path, quantize, inter, transposed, batch_bytes):
    one_by_one = loaded(written(tmp_path / "a", random_weights(inter=inter)), quantize)
    packed = random_weights(packed=True, inter=inter)
    if transposed:
        packed = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in packed.items()}
    same_tensors(loaded(written(tmp_path / "b", packed), quantize, batch_bytes=batch_bytes), one_by_one)


@pytest.mark.parametrize(("quantize", "batch_bytes"), [("nvfp4", 2**30), ("int4-g32", 0)])
def test_granites_experts_come_under_the_names_that_vllm_takes(tmp_path, quantize, batch_bytes):
    """Square blocks too: these stand as torch's linear layers do."""

    def renamed(weights: dict[str, torch.Tensor], *names: tuple[str, str]) -> dict[str, torch.Tensor]:
        for old, new in (*names, (".mlp.", ".block_sparse_moe.")):
            weights = {name.replace(old, new): weight for name, weight in weights.items()}
        return weights

    one_by_one = loaded(written(tmp_path / "a", renamed(random_weights(inter=HIDDEN // 2))), quantize)
    names = (("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"))
    packed = renamed(random_weights(packed=True, inter=HIDDEN // 2), *names)
    assert packed["model.layers.0.block_sparse_moe.input_linear.weight"].shape == (EXPERTS, HIDDEN, HIDDEN)
    same_tensors(loaded(written(tmp_path / "b", packed), quantize, batch_bytes=batch_bytes), one_by_one)


class Rank:
    """What vLLM's weight loaders do, for one of two ranks: columns of some, rows of others, all of the rest."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.taken: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name.startswith("model.layers.1."):
                continue  # another stage's
            if tensor.dim() == 2 and tensor.numel() > 2 and ("down_proj" in name or "o_proj" in name):
                part = tensor.chunk(2, dim=1)[self.rank] if tensor.shape[1] > 1 else tensor
            elif tensor.dim() == 2 and tensor.numel() > 2 and "_proj" in name:
                part = tensor.chunk(2, dim=0)[self.rank]
            else:
                part = tensor
            self.taken[name] = torch.zeros(part.shape, dtype=part.dtype)
            self.taken[name].copy_(part)

    def regions(self, virtual: VirtualCheckpoint) -> dict:
        """What it takes of each tensor, as the loader finds it."""
        trace = Trace()
        self.load_weights(phantoms(((one.name, one.shape, one.dtype) for one in virtual.outputs()), CPU, trace))
        return {name: traced.region for name, traced in trace.tensors.items()}


@pytest.mark.parametrize(
    ("quantize", "rank", "batch_bytes"), [("mxfp4", 0, 2**30), ("mxfp4", 1, 0), ("int4-g32", 1, 200_000), ("fp8", 1, 2**30), ("bf16", 1, 0)]
)
def test_a_rank_gets_its_part_and_reads_less(tmp_path, quantize, rank, batch_bytes):
    weights = random_weights()
    folder = written(tmp_path / "m", weights)
    virtual = virtual_in(folder, quantize)
    regions = Rank(rank).regions(virtual)
    sliced = pipeline_of(virtual, CPU, READER, regions=regions, batch_bytes=batch_bytes)
    everything = pipeline_of(virtual, CPU, READER)
    one, whole = Rank(rank), Rank(rank)
    one.load_weights(sliced.tensors())
    whole.load_weights(everything.tensors())
    same_tensors(one.taken, whole.taken)
    assert sliced.bytes_total < 0.5 * everything.bytes_total


def test_nvfp4_of_a_slice_stands_for_the_same_weights(tmp_path):
    weights = random_weights()
    virtual = virtual_in(written(tmp_path / "m", weights), "nvfp4")
    rank = Rank(1)
    rank.load_weights(pipeline_of(virtual, CPU, READER, regions=Rank(1).regions(virtual)).tensors())
    form = quantizer(QuantizationRecipe.parse("nvfp4").default)
    name = "model.layers.0.mlp.experts.2.up_proj"
    parts = {suffix: rank.taken[f"{name}.{suffix}"] for suffix in ("weight_packed", "weight_scale", "weight_global_scale")}
    source = weights[f"{name}.weight"][INTER // 2 :].float()
    error = (form.dequantize(parts, torch.float32) - source).norm() / source.norm()
    assert float(error) < 0.085


def test_a_large_tensor_goes_straight_into_its_parameter(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.load.pipeline.STREAMED_BYTES", 64 * 1024)
    weights = random_weights()
    name = "model.embed_tokens.weight"
    virtual = VirtualCheckpoint(read_checkpoint(str(written(tmp_path / "m", weights))), {})

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return pipeline_of(virtual, CPU, READER, once={name}).tensors()

    whole, cast = torch.zeros(512, HIDDEN, dtype=torch.bfloat16), torch.zeros(20, HIDDEN)
    for at, tensor in tensors():
        if at == name:
            whole.copy_(tensor)
    for at, tensor in tensors():
        if at == name:
            cast.copy_(tensor.narrow(0, 3, 20))
    assert torch.equal(whole, weights[name])
    assert torch.equal(cast, weights[name][3:23].float())
    assert sorted(at for at, _ in tensors()) == sorted(weights), "a tensor without a copy is read past"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "in another dtype"])
@pytest.mark.parametrize("first", [0, 200])
def test_a_sink_gets_the_rows_of_a_large_tensor_that_are_read(tmp_path, monkeypatch, first, dtype):
    """A rank takes rows from `first` on, and its cache has these alone."""
    monkeypatch.setattr("workers.load.pipeline.STREAMED_BYTES", 64 * 1024)
    weights = random_weights()
    name = "model.embed_tokens.weight"
    virtual = VirtualCheckpoint(read_checkpoint(str(written(tmp_path / "m", weights))), {})
    regions = {one.name: None for one in virtual.outputs()} | {name: ((first, 512), (0, HIDDEN))}
    came = torch.zeros((512 - first) * HIDDEN * 2, dtype=torch.uint8)

    class Sink:
        def add_chunk(self, of: str, start_byte: int, view: torch.Tensor) -> None:
            assert of == name
            came[start_byte : start_byte + view.numel()] = view

    for _, tensor in pipeline_of(virtual, CPU, READER, once={name}, regions=regions, sink=Sink()).tensors():
        torch.zeros(512 - first, HIDDEN, dtype=dtype).copy_(tensor[first:])
    assert torch.equal(came.view(torch.bfloat16).view(-1, HIDDEN), weights[name][first:])


def test_a_group_that_does_not_divide_is_named_before_anything_is_read(tmp_path):
    weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 96, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: .*up_proj\.weight: K=96.*128"):
        loaded(written(tmp_path / "m", weights, shards=1), "int4-g128")


@BATCHES
def test_progress_is_told_unit_by_unit(tmp_path, batch_bytes):
    seen: list[tuple[int, int]] = []

    class Watch:
        def advance(self, bytes_done: int, units_done: int) -> None:
            seen.append((bytes_done, units_done))

    virtual = virtual_in(written(tmp_path / "m", random_weights()), "mxfp4")
    pipeline = pipeline_of(virtual, CPU, READER, watcher=Watch(), batch_bytes=batch_bytes)
    for _ in pipeline.tensors():
        pass
    assert seen == sorted(seen)
    assert seen[-1] == (pipeline.bytes_total, pipeline.units_total)
    assert pipeline.bytes_total == virtual.checkpoint.total_bytes


class Fused:
    """A layer's experts as vLLM holds them, for one of `ranks`: gate and up behind each other in one parameter, half of the rows each."""

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        self.ranks = ranks
        self.rank = rank
        self.memory: dict[str, torch.Tensor] = {}
        self.handed: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name.endswith(".weight_shape"):
                continue  # which no kernel reads
            self.handed.append(name)
            layer, found, rest = name.partition(".experts.")
            if not found:
                self._into(name, tensor.shape, tensor.dtype).copy_(tensor)
                continue
            number, matrix, part = rest.split(".")
            scalar = tensor.numel() <= 2
            axis = 1 if matrix == "down_proj" else 0
            mine = tensor if scalar or tensor.shape[axis] == 1 else tensor.chunk(self.ranks, dim=axis)[self.rank]
            if matrix == "down_proj":
                self._into(f"{layer}.w2.{part}", (EXPERTS, *mine.shape), mine.dtype)[int(number)].copy_(mine)
            else:
                whole = self._into(f"{layer}.w13.{part}", (EXPERTS, 2, *mine.shape), mine.dtype)
                whole[int(number), int(matrix == "up_proj")].copy_(mine)

    def _into(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memory.setdefault(name, torch.zeros(shape, dtype=dtype))

    def load(self, pipeline: Pipeline) -> Fused:
        self.handed.clear()
        self.load_weights(pipeline.tensors())
        return self

    def asked(self, virtual: VirtualCheckpoint) -> dict:
        """A Pipeline's arguments for this model, as the loader finds them."""
        trace = self.trace(virtual)
        return {"regions": {name: one.region for name, one in trace.tensors.items()}, "direct_targets": trace.direct_targets}

    def trace(self, virtual: VirtualCheckpoint) -> Trace:
        trace = Trace()
        found = expert_families(virtual.outputs())
        skipped = {name for family in found for number, name in family.names.items() if number not in family.traced}
        self.load_weights(phantoms(((o.name, o.shape, o.dtype) for o in virtual.outputs() if o.name not in skipped), CPU, trace))
        trace.direct_targets = inferred_targets(found, trace.tensors)
        return trace


def same_memory(got: Fused, want: Fused) -> None:
    same_tensors(got.memory, want.memory)


@pytest.mark.parametrize(
    ("quantize", "ranks", "rank", "batch_bytes"),
    [
        ("nvfp4", 1, 0, 2**30),
        ("nvfp4", 2, 1, 2**30),
        ("int4-g32", 2, 1, 0),
        ("fp8", 1, 0, 2**30),
        ("bf16", 2, 1, 2**30),
    ],
)
def test_experts_are_placed_where_the_model_would_have_put_them(tmp_path, monkeypatch, quantize, ranks, rank, batch_bytes):
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 9)
    virtual = virtual_in(written(tmp_path / "m", random_weights()), quantize)
    arguments = Fused(ranks, rank).asked(virtual)
    want = Fused(ranks, rank).load(pipeline_of(virtual, CPU, READER, regions=arguments["regions"]))
    got = Fused(ranks, rank)
    arguments = got.asked(virtual)
    direct_targets = set(arguments["direct_targets"])
    got.load(pipeline_of(virtual, CPU, READER, **arguments, batch_bytes=batch_bytes))
    same_memory(got, want)
    assert not set(got.handed) & direct_targets
    assert arguments["direct_targets"] == {}, "a place holds memory"


def laid_out(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these tensors beside `folder`/m, as a quantized cache lays them out."""
    kept = {name: tensor for name, tensor in tensors.items() if "weight_shape" not in name}
    (shard,) = lay_out(neighbours({name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in kept.items()}))
    cache = folder / "cache"
    cache.mkdir()
    with open(cache / "model.safetensors", "wb") as file:
        file.write(shard.header)
        for tensor in shard.tensors:
            file.write(kept[tensor.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (cache / "config.json").write_text((folder / "m" / "config.json").read_text())
    return cache


@pytest.mark.parametrize("quantize", ["nvfp4", "fp8"])
def test_neighbours_in_the_file_and_in_the_parameter_are_one_copy(tmp_path, monkeypatch, quantize):
    """A quantized cache read by the model for which its tensors stand in order: the second start."""
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 9)
    virtual = virtual_in(written(tmp_path / "m", random_weights(), shards=1), quantize)
    first = {name: tensor.clone() for name, tensor in pipeline_of(virtual, CPU, READER).tensors()}
    cache = laid_out(tmp_path, first)
    stored = VirtualCheckpoint(read_checkpoint(str(cache)), {})
    got, want = Fused(), Fused().load(pipeline_of(virtual, CPU, READER))
    arguments = got.asked(stored)
    pipeline = pipeline_of(stored, CPU, READER, **arguments)
    runs = [step for step in steps(pipeline._plans, 0, arguments["direct_targets"]) if isinstance(step, Run)]
    placed = len(arguments["direct_targets"])
    got.load(pipeline)
    same_memory(got, want)
    parts = placed // (2 * 3 * (EXPERTS - 3))
    # For each layer: down, and gate with up, in every part; the first, second and last expert are handed to the model.
    assert len(runs) == 2 * 2 * parts
    assert sum(len(run.plans) for run in runs) == placed


@pytest.mark.parametrize("quantize", ["nvfp4", "int4-g32"])
def test_a_ranks_own_cache_goes_where_its_parts_belong(tmp_path, monkeypatch, quantize):
    """What a rank keeps are parts; the model's loader wants tensors whole, so parts that have one place go there without it."""
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 9)
    virtual = virtual_in(written(tmp_path / "m", random_weights(), shards=1), quantize)
    trace = Fused(2, 1).trace(virtual)
    first = LoadSession(virtual, CPU, READER, trace, torch.bfloat16, ProgressFile(None))
    sink_layout = first.pipeline.sink_layout()
    parts: dict[str, torch.Tensor] = {}

    class Keep:
        def add(self, names: Sequence[str], stacked: torch.Tensor) -> None:
            parts.update((name, tensor.clone()) for name, tensor in zip(names, stacked, strict=True))

        def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
            raise AssertionError(name)

    first.pipeline.sink = Keep()
    want = Fused(2, 1)
    want.load_weights(first.tensors())
    cache = laid_out(tmp_path, parts)
    cached = SimpleNamespace(checkpoint=read_checkpoint(str(cache)), folder=str(cache), close=lambda: None)

    got = Fused(2, 1)
    trace = got.trace(virtual)
    second = LoadSession(virtual, CPU, READER, trace, torch.bfloat16, ProgressFile(None))
    second.read_own(cached, sink_layout)
    trace.forget_targets()
    got.handed.clear()
    got.load_weights(second.tensors())
    whole = Fused(2, 1).load(pipeline_of(virtual, CPU, READER, regions=Fused(2, 1).asked(virtual)["regions"]))
    same_memory(got, whole)
    in_part = {name for name, one in sink_layout.items() if not one.is_whole and "weight_shape" not in name}
    assert in_part
    assert not in_part & set(got.handed), "no part was made whole for the model's loader"
