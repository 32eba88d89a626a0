"""On which nodes a model goes: the fewest that hold it, linked and alike, with the reason where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.placed_entry import placed_entry
from sparkd.capacity.requirement import Placement
from sparkd.cluster import placer
from sparkd.cluster.placer import Placer
from sparkd.cluster.reservations import Reservations
from sparkd.config.config import Config, load_config, parse_model
from sparkd.errors import AgentLost, DoesNotFit, LoadRefused, MemoryReturns, NoRoom, RankError
from sparkd.state.memory_book import Lack
from tests.support.accounts import refuse_unloadable
from tests.support.checkpoints import layered, write
from tests.support.facts import lacking
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.signatures import LASTING

A, B, C, D = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
HEADS, LAYERS, HIDDEN, INNER, VOCAB = 32, 8, 4096, 14_336, 32_000


class FakeLink:
    """Agents that all say the same of themselves."""

    def __init__(self) -> None:
        self.without: set[str] = set()
        self.silent: set[str] = set()
        self.runtimes: dict[str, Mapping[str, Any]] = {}

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if node in self.silent:
            raise AgentLost(f"The agent of node {node} did not answer.")
        if method == "runtime":
            return self.runtimes.get(node, VLLM)
        files = None if node in self.without else {"config.json": [1, "d"]}
        return {"vllm": "0.32.0", "platform": "cpu", "plugin": "p", "files": files}


class FakeFabric:
    """Which nodes are linked: those of `teams`, each to each."""

    def __init__(self, linked: Sequence[str]) -> None:
        self.linked = linked
        self.asked: list[bool] = []

    async def team(self, nodes: Sequence[str], size: int, *, rdma: bool, linked: bool) -> tuple[tuple[str, ...], str]:
        self.asked.append(rdma)
        found = tuple(node for node in nodes if node in self.linked)
        if len(found) < size and linked:
            return (), "no cable. Plug one in"
        return (found if len(found) >= size else tuple(nodes))[:size], ""


VLLM = {"platform": "cpu", "entrypoint": "vllm.entrypoints.openai.api_server", "vllm": "0.32.0", "packages": "p"}


class Runtime:
    """This node's; trouble: why it has none."""

    trouble: RankError | None = None

    def runtime(self, _interpreter: str) -> Mapping[str, Any]:
        if self.trouble is not None:
            raise self.trouble
        return VLLM


class Scene:
    def __init__(self, tmp_path: Path, offered: Mapping[str, float], linked: Sequence[str] = (A, B, C), platform: str = "cpu") -> None:
        self.config: Config = load_config(None, flags={"state_dir": str(tmp_path / "state"), "engine.platform": platform}, environ={})
        self.fabric = FakeFabric(linked)
        self.link = FakeLink()
        self.reservations = Reservations(A, lambda: offered)
        self.here = Runtime()
        seams: Any = (self.link, self.fabric, self.reservations, lambda interpreter: self.here.runtime(interpreter))
        self.placer = Placer(lambda: self.config, *seams, lambda: list(offered), int(offered[A]))

    async def place(self, model: str, **keys: Any) -> Placement:
        keys = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 2048, "kv_cache": {"sequences": 1}} | keys
        keys = {key: value for key, value in keys.items() if value is not None}
        return await self.placer.place(parse_model("m", {"model": model, **keys}, over_admin=False))

    async def refused(self, model: str, **keys: Any) -> str:
        with pytest.raises(DoesNotFit) as caught:
            await self.place(model, **keys)
        return caught.value.message


def model_of(folder: Path, heads: int = HEADS, inner: int = INNER) -> str:
    """Some 4 GiB of weights that are holes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    rows = {"q": heads * 128, "k": heads * 32, "v": heads * 32}
    layer = {f"self_attn.{name}_proj.weight": (wide, HIDDEN) for name, wide in rows.items()}
    layer |= {"self_attn.o_proj.weight": (HIDDEN, heads * 128), "mlp.gate_proj.weight": (inner, HIDDEN)}
    layer |= {"mlp.up_proj.weight": (inner, HIDDEN), "mlp.down_proj.weight": (HIDDEN, inner)}
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (VOCAB, HIDDEN)))
    folder.mkdir(exist_ok=True)
    return str(write(folder, config, {**ends, **layered(LAYERS, layer)}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_of(tmp_path_factory.mktemp("even"))


async def test_what_one_node_holds_stays_on_one(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})
    found = await scene.place(model)

    assert (found.nodes, found.tensor, found.pipeline) == ((A,), 1, 1)
    assert (scene.reservations.reserved_gib(A), scene.reservations.reserved_gib(B)) == (found.memory_gib, 0)


async def test_a_node_without_the_runtime_leaves_a_model_to_those_that_have_it(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0, C: 20.0})
    scene.here.trouble = RankError("The runtime cannot be run.")
    placed = await scene.place(model)
    assert (placed.nodes, placed.vllm) == ((B,), "0.32.0")
    scene.reservations.release("m")
    assert (await scene.place(model, tensor_parallel=2)).nodes == (B, C)
    scene.reservations.release("m")
    scene.reservations.cordon(frozenset({B}), {}, {})
    assert (await scene.place(model)).nodes == (C,)


async def test_what_goes_to_another_node_is_counted_by_the_release_there(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0, C: 20.0})
    scene.link.runtimes = {B: VLLM | {"vllm": "0.33.0"}}
    assert (await scene.place(model)).vllm == "0.32.0", "there is room here"
    scene.reservations.release("m")
    scene.reservations.cordon(frozenset({A}), {}, {})
    placed = await scene.place(model)
    assert (placed.nodes, placed.vllm) == ((B,), "0.33.0")


async def test_a_share_is_one_of_the_memory_of_each_node_of_a_team(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 70, B: 70}, (A, B))
    scene.link.runtimes = {B: VLLM | {"mem_total_bytes": 100 << 30}}
    scene.here.runtime = lambda _interpreter: VLLM | {"mem_total_bytes": 80 << 30}  # type: ignore[method-assign]
    share = {"gpu_memory_utilization": 0.5, "kv_cache": None, "tensor_parallel": 2}
    found = await scene.place(model, **share)
    assert (found.nodes, found.memory_gib) == ((A, B), 50)

    scene.link.runtimes = {B: VLLM | {"mem_total_bytes": 160 << 30}}
    assert lacking(await scene.refused(model, **share), "0.43") == []


async def test_where_no_node_has_the_runtime_this_one_says_why(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})
    scene.here.trouble = RankError("The runtime cannot be run.")
    scene.link.silent.add(B)
    with pytest.raises(RankError) as caught:
        await scene.place(model)
    assert caught.value is scene.here.trouble


async def test_a_node_that_is_shut_takes_nothing(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20, B: 20})
    scene.reservations.cordon(frozenset({A}), {}, {})
    assert (await scene.place(model)).nodes == (B,)
    scene.reservations.release("m")
    scene.reservations.cordon(frozenset({A, B}), {}, {})
    assert lacking(await scene.refused(model), f"{A} or {B}", "`sparkd status`") == []


async def test_a_node_to_which_memory_returns_takes_what_is_free(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20, B: 20})
    scene.reservations.cordon(frozenset(), {A: 1.0}, {})
    assert (await scene.place(model)).nodes == (B,)
    scene.reservations.release("m")
    scene.reservations.cordon(frozenset(), {A: 20.0, B: 1.0}, {})
    assert (await scene.place(model)).nodes == (A,)
    scene.reservations.release("m")
    scene.reservations.cordon(frozenset(), {A: 1.0, B: 1.0}, {})
    with pytest.raises(MemoryReturns) as caught:
        await scene.place(model)
    assert (caught.value.nodes, caught.value.gib > 1) == (1, True)


@pytest.mark.parametrize(
    ("keys", "kind", "told"),
    [
        ({"quantize": "int4-g128"}, LoadRefused, ["quantize", "14272 columns", "model.layers.0.mlp.down_proj.weight"]),
        ({"quantize": "int4-g128", "tensor_parallel": 2}, LoadRefused, ["groups of 128", "int4-g64", "int4-g32"]),
    ],
)
async def test_what_an_engine_would_end_over_is_refused_before_one_starts(
    keys: dict[str, Any], kind: type[RankError], told: list[str], tmp_path: Path
) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})
    with pytest.raises(kind) as caught:
        await scene.place(model_of(tmp_path / "m", inner=INNER - 64), **keys)
    assert (type(caught.value), lacking(caught.value.message, "m", *told)) == (kind, [])
    assert kind.__name__ in LASTING and scene.reservations.book().held == {}


@pytest.mark.parametrize(
    ("offered", "keys", "lasts"),
    [
        ({A: 4.0}, {}, True),
        ({A: 20.0}, {"tensor_parallel": 2}, False),  # a node may join
        ({A: 20.0, B: 20.0}, {"tensor_parallel": 2}, False),  # a cable may be plugged in
    ],
)
async def test_only_what_an_empty_cluster_could_not_hold_is_refused_for_good(
    offered: Mapping[str, float], keys: dict[str, Any], lasts: bool, model: str, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, offered, linked=())
    with pytest.raises(DoesNotFit) as caught:
        await scene.place(model, **keys)
    assert caught.value.lasts is lasts


@pytest.mark.parametrize("keys", [{}, {"tensor_parallel": 2}])
async def test_a_length_that_the_model_lacks_has_the_reason_of_vllms_own_refusal(keys: dict[str, Any], model: str, tmp_path: Path) -> None:
    """Its name stands before the sentence wherever that is shown, so the sentence has it not."""
    with pytest.raises(DoesNotFit) as caught:
        await Scene(tmp_path, {A: 20.0, B: 20.0}).place(model, max_model_len=4097, **keys)
    error = caught.value
    assert (error.reason, error.lasts, error.reason in LASTING) == ("ContextTooLong", True, True)
    assert error.message.startswith("The requests are too long: ") and lacking(error.message, "4,097", "set max_model_len: 4096") == []


@pytest.mark.parametrize("keys", [{"quantize": "int4-g128"}, {"max_model_len": 4097}])
@pytest.mark.parametrize("model", ["o/not-here-yet", "/nowhere/at/all"])
def test_what_is_not_on_this_node_is_not_judged(keys: dict[str, Any], model: str, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path)}
    refuse_unloadable(parse_model("m", {"model": model, "env": env, **keys}, over_admin=False), Scene(tmp_path, {A: 20.0}).config)


async def test_what_one_node_does_not_hold_goes_over_the_fewest_that_do(model: str, tmp_path: Path) -> None:
    alone = (await Scene(tmp_path, {A: 20.0}).place(model)).memory_gib
    scene = Scene(tmp_path, {A: alone - 1.0, B: alone - 1.0, C: alone - 1.0})
    found = await scene.place(model)

    assert (found.nodes, found.tensor, found.pipeline) == ((A, B), 2, 1)
    assert found.memory_gib < alone - 1
    assert scene.reservations.book().held == {"m": ((A, found.memory_gib), (B, found.memory_gib))}
    assert [scene.reservations.reserved_gib(node) for node in (A, B, C)] == [found.memory_gib, found.memory_gib, 0]


async def test_auto_is_the_best_format_and_then_the_fewest_nodes(model: str, tmp_path: Path) -> None:
    alone = (await Scene(tmp_path, {A: 20.0}).place(model)).memory_gib
    room = dict.fromkeys((A, B, C), alone - 1.0)
    found = await Scene(tmp_path, room).place(model, quantize="auto", kv_margin_gib=0)
    assert (found.nodes, found.tensor) == ((A, B), 2) and found.spec is not None and found.spec.quantize is None

    for lone in (Scene(tmp_path, {A: alone - 1.0}), Scene(tmp_path, room, linked=[A])):
        found = await lone.place(model, quantize="auto", kv_margin_gib=0)
        assert found.nodes == (A,) and found.spec is not None and isinstance(found.spec.quantize, QuantizationRecipe)
    found = await Scene(tmp_path, room).place(model, quantize="auto", kv_margin_gib=0, tensor_parallel=1)
    assert found.nodes == (A,)


@pytest.mark.parametrize("which", ["without", "silent"])
async def test_a_node_that_cannot_share_a_model_keeps_it_from_no_node_that_holds_it_alone(which: str, model: str, tmp_path: Path) -> None:
    """Before the second node came it was served there; a better format is no reason to fail."""
    alone = (await Scene(tmp_path, {A: 20.0}).place(model)).memory_gib
    scene, asked = Scene(tmp_path, dict.fromkeys((A, B), alone - 1.0)), {"quantize": "auto", "kv_margin_gib": 0}
    getattr(scene.link, which).add(B)
    found = await scene.place(model, **asked)
    assert (found.nodes, found.tensor) == ((A,), 1) and found.spec is not None and isinstance(found.spec.quantize, QuantizationRecipe)
    scene.reservations.release("m")
    with pytest.raises((RankError, AgentLost), match=B):
        await scene.place(model, **asked, tensor_parallel=2)


async def test_what_has_lost_a_node_moves_to_fewer_where_its_entry_allows_it(model: str, tmp_path: Path) -> None:
    """The next try after a loss is placed anew, over the nodes that are in sight then, and over both again once the other is back."""
    alone = (await Scene(tmp_path, {A: 20.0}).place(model)).memory_gib
    offered = dict.fromkeys((A, B), alone - 1.0)
    scene = Scene(tmp_path, offered)
    asked = {"quantize": "auto", "kv_margin_gib": 0}
    assert (await scene.place(model, **asked)).nodes == (A, B)
    gone = offered.pop(B)
    scene.reservations.release("m")
    assert (await scene.place(model, **asked)).nodes == (A,)
    scene.reservations.release("m")
    assert lacking(await scene.refused(model), "GiB") == []
    assert lacking(await scene.refused(model, tensor_parallel=2), "2 nodes", "1") == []
    offered[B] = gone
    assert (await scene.place(model, **asked)).nodes == (A, B)


async def test_a_number_of_nodes_is_kept_to(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})
    assert (await scene.place(model, tensor_parallel=2)).nodes == (A, B)
    assert lacking(await scene.refused(model, tensor_parallel=4), "It needs 4 nodes", "2", A, B) == []


async def test_a_split_that_vllm_would_refuse_is_told_with_the_number_that_breaks_it(model: str, tmp_path: Path) -> None:
    told = await Scene(tmp_path, dict.fromkeys((A, B, C), 30.0)).refused(model, tensor_parallel=3)

    assert lacking(told, "It cannot be split over 3 nodes", "32 attention heads", "3 ranks") == []


async def test_where_tensor_parallelism_is_not_legal_the_layers_are_split(tmp_path: Path) -> None:
    odd = model_of(tmp_path / "odd", heads=44)
    cache = {"tokens": 100_000}
    alone = (await Scene(tmp_path, {A: 30.0}).place(odd, kv_cache=cache)).memory_gib
    found = await Scene(tmp_path, dict.fromkeys((A, B, C), alone / 2 + 1.0)).place(odd, kv_cache=cache)

    assert (found.tensor, found.pipeline, len(found.nodes)) == (1, 3, 3)


def test_four_nodes_are_two_stages_of_two_ranks_where_four_ranks_are_not_legal(tmp_path: Path) -> None:
    spec = parse_model("m", {"model": model_of(tmp_path / "odd", heads=26)}, over_admin=False)

    assert placer._ways(placed_entry(spec, Scene(tmp_path, {A: 20.0}).config, NodeRuntime(VLLM, A)), 4) == [(2, 2), (1, 4)]


async def test_nodes_without_a_cable_share_a_model_as_a_pipeline_only(model: str, tmp_path: Path) -> None:
    alone = (await Scene(tmp_path, {A: 20.0}).place(model)).memory_gib
    scene = Scene(tmp_path, {A: alone - 1.0, B: alone - 1.0}, linked=[A])

    told = await scene.refused(model, tensor_parallel=2)
    assert told.startswith("m ") and lacking(told, "2 nodes (tensor_parallel)", "no cable. Plug one in") == []
    found = await scene.place(model)
    assert (found.tensor, found.pipeline, found.nodes) == (1, 2, (A, B))


@pytest.mark.parametrize(("platform", "env", "rdma"), [("cuda", {}, True), ("cuda", {"NCCL_NET": "Socket"}, False), ("cpu", {}, False)])
async def test_rdma_is_asked_of_gpus_unless_the_operator_wants_sockets(
    platform: str, env: dict[str, str], rdma: bool, model: str, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, {A: 90.0, B: 90.0}, platform=platform)
    await scene.place(model, tensor_parallel=2, env=env)

    assert scene.fabric.asked == [rdma]


async def test_a_team_does_not_take_what_others_hold(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0, C: 20.0})
    scene.reservations.hold("other", 18, [B])

    assert (await scene.place(model, tensor_parallel=2)).nodes == (A, C)
    scene.reservations.hold("more", 18, [C])
    told = await scene.refused(model, tensor_parallel=2)
    assert lacking(told, "2 nodes", "GiB", "more", "other") == []


async def test_a_number_of_gib_is_for_each_node(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})

    assert (await scene.place(model, tensor_parallel=2, memory_gib=7)).memory_gib == 7
    assert lacking(await scene.refused(model, memory_gib=21), "21") == []


async def test_what_outgrows_its_own_number_goes_over_more_nodes_with_that_on_each(model: str, tmp_path: Path) -> None:
    """Some 4 GiB of weights, and 1.7 GiB of processes."""
    scene = Scene(tmp_path, {A: 20.0, B: 20.0})

    found = await scene.place(model, memory_gib=4.5)
    assert (found.nodes, found.tensor, found.memory_gib) == ((A, B), 2, 5)
    told = await scene.refused(model, memory_gib=4.5, tensor_parallel=1)
    assert lacking(told, "The memory is too small: its entry has memory_gib: 4.5, and it needs") == []


FOREIGN = "my.engine"


@pytest.mark.parametrize(
    ("entrypoint", "nodes"), [("auto", (B,)), ("tests.stub", (B,)), (FOREIGN, None)], ids=["vLLM", "the stub", "another engine"]
)
async def test_an_engine_that_asks_for_no_key_is_served_on_the_daemons_node_only(
    entrypoint: str, nodes: tuple[str, ...] | None, model: str, tmp_path: Path
) -> None:
    """The other node has room. It waits for room here, and a model that ends on the other node makes none for it."""
    scene = Scene(tmp_path, {A: 20.0, B: 40.0})
    scene.reservations.hold("other", 19, [A])
    if nodes:
        assert (await scene.place(model, entrypoint=entrypoint, memory_gib=9)).nodes == nodes
        return
    with pytest.raises(NoRoom) as caught:
        await scene.place(model, entrypoint=entrypoint, memory_gib=9)
    lack = Lack(caught.value.gib, caught.value.nodes, caught.value.only)

    assert (lack, scene.reservations.reserved_gib(A)) == (Lack(9, 1, A), 19)
    assert (scene.reservations.book().has_room("m", lack), scene.reservations.book().has_room("m", lack, {"other"})) == (False, True)
    scene.reservations.release("other")
    assert (await scene.place(model, entrypoint=entrypoint, memory_gib=9)).nodes == (A,)


async def test_an_engine_that_asks_for_no_key_and_is_too_large_for_the_daemons_node_is_refused_by_name(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 4.0, B: 40.0})

    assert FOREIGN in await scene.refused(model, entrypoint=FOREIGN, tensor_parallel=1)
    assert (await scene.place(model, tensor_parallel=1)).nodes == (B,)


async def test_an_engine_that_asks_for_no_key_has_its_first_rank_on_the_daemons_node(model: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {A: 20.0, B: 20.0, C: 20.0})
    assert (await scene.place(model, entrypoint=FOREIGN, tensor_parallel=2)).nodes == (A, B)
    scene.reservations.release("m")
    scene.reservations.hold("other", 19, [A])
    with pytest.raises(RankError, match=FOREIGN):
        await scene.place(model, entrypoint=FOREIGN, tensor_parallel=2)
    assert [scene.reservations.reserved_gib(node) for node in (A, B, C)] == [19, 0, 0]
    assert (await scene.place(model, tensor_parallel=2)).nodes == (B, C)
