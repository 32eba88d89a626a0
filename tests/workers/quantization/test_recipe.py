"""Which weight gets which format: spellings, rules and their order, defaults, fused weights, architectures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import SourceQuantization
from sparkd.errors import CheckpointError, ConfigError
from tests.support.checkpoints import Shape, checkpoint_of, layered
from tests.support.facts import facts
from workers.quantization.formats import SPELLINGS
from workers.quantization.recipe import Format, QuantizationRecipe

W = (128, 128)
LLAMA = {
    "model.embed_tokens.weight": ("BF16", (512, 128)),
    **layered(
        3,
        {
            "input_layernorm.weight": (128,),
            "self_attn.q_proj.weight": W,
            "self_attn.q_proj.bias": (128,),
            "self_attn.k_proj.weight": (64, 128),
            "self_attn.v_proj.weight": (64, 128),
            "self_attn.o_proj.weight": W,
            "mlp.gate_proj.weight": (256, 128),
            "mlp.up_proj.weight": (256, 128),
            "mlp.down_proj.weight": (128, 256),
        },
    ),
    "model.norm.weight": ("BF16", (128,)),
    "lm_head.weight": ("BF16", (512, 128)),
}
EXPERTS = {f"mlp.experts.{e}.{name}_proj.weight": W for e in range(4) for name in ("gate", "up", "down")}
MOE = {**LLAMA, **layered(2, {"mlp.gate.weight": W, **EXPERTS}, "model.layers.7")}


def chosen(value: Any, tensors: Mapping[str, tuple[str, Shape]] = LLAMA, **given: Any) -> dict[str, str]:
    """Module -> spelling, the layers' prefix cut off."""
    made = QuantizationRecipe.parse(value).assign(checkpoint_of(tensors, **given))
    return {module.removeprefix("model.layers."): form.spelling for module, form in made.items()}


def of(formats: Mapping[str, str], pattern: str) -> set[str]:
    """The formats of the modules that match; `-` for one that has none is not told."""
    return {spelling for module, spelling in formats.items() if re.search(pattern, module)}


# Formats


def test_a_spelling_is_read_back() -> None:
    assert [Format.parse(spelling).spelling for spelling in SPELLINGS] == list(SPELLINGS)
    assert [Format.parse(f" {spelling.upper().replace('-', '_')} ").spelling for spelling in SPELLINGS] == list(SPELLINGS)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("int4", Format("int4", 128)),
        ("nf4", Format("nf4", 64)),
        ("fp8_block", Format("fp8_block")),
        ({"format": "int4", "group_size": 64}, Format("int4", 64)),
    ],
)
def test_what_a_format_may_be(value: Any, form: Format) -> None:
    assert Format.parse(value) == form


def test_precision_is_ordered_by_the_error_of_each_format() -> None:
    formats = [Format.parse(spelling) for spelling in SPELLINGS]
    ordered = sorted(formats, key=lambda form: form.precision)

    least_precise = ["nvfp4-a4", "mxfp4", "int4-g128", "nf4-g512", "nf4-g256", "int4-g64"]
    four_bits = [*least_precise, "nf4-g128", "nf4-g64", "int4-g32", "nvfp4", "nf4-g32"]
    assert [form.spelling for form in ordered] == [*four_bits, "fp8-block", "fp8", "bf16"]


# Bytes of a weight [256, 1536].
NBYTES = {
    "nvfp4": 256 * 1536 // 2 + 256 * 1536 // 16 + 4,
    "nvfp4-a4": 256 * 1536 // 2 + 256 * 1536 // 16 + 4 + 4,
    "mxfp4": 256 * 1536 // 2 + 256 * 1536 // 32,
    "int4-g32": 256 * 1536 // 2 + 2 * 256 * 48 + 16,
    "int4-g64": 256 * 1536 // 2 + 2 * 256 * 24 + 16,
    "int4-g128": 256 * 1536 // 2 + 2 * 256 * 12 + 16,
    "nf4-g32": 256 * 1536 // 2 + 2 * 256 * 48,
    "nf4-g64": 256 * 1536 // 2 + 2 * 256 * 24,
    "nf4-g128": 256 * 1536 // 2 + 2 * 256 * 12,
    "nf4-g256": 256 * 1536 // 2 + 2 * 256 * 6,
    "nf4-g512": 256 * 1536 // 2 + 2 * 256 * 3,
    "fp8": 256 * 1536 + 4 * 256,
    "fp8-block": 256 * 1536 + 4 * 2 * 12,
    "bf16": 2 * 256 * 1536,
}


def test_the_bytes_of_a_weight() -> None:
    assert {spelling: Format.parse(spelling).nbytes(256, 1536) for spelling in SPELLINGS} == NBYTES


# Defaults


def test_a_format_is_for_every_projection_and_nothing_else() -> None:
    formats = chosen("nvfp4")

    assert set(formats.values()) == {"nvfp4"}
    assert {re.sub(r"^\d+", "*", module) for module in formats} == {
        *(f"*.self_attn.{name}_proj" for name in "qkvo"),
        *(f"*.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert len(formats) == 3 * 7


@pytest.mark.parametrize("value", ["bf16", None, {"keep": ["q_proj"]}, {"layers": {"o_proj": "bf16"}}])
def test_plain_loading_quantizes_nothing(value: Any) -> None:
    read = QuantizationRecipe.parse(value)

    assert not read.quantizes
    assert read.assign(checkpoint_of(LLAMA)) == {}
    assert read.assign(checkpoint_of({"a.0.b.weight": ("F8_E4M3", W)}, quantization=SourceQuantization("fp8_block"))) == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "quantized"),
    [
        ((64, 64), "BF16", True),
        ((64, 64), "F8_E4M3", True),
        ((63, 4096), "BF16", False),
        ((4096, 48), "BF16", False),
        ((64, 64), "U8", False),
        ((4, 64, 64), "BF16", False),
    ],
)
def test_what_can_be_quantized_at_all(shape: Shape, dtype: str, quantized: bool) -> None:
    assert bool(chosen("nvfp4", {"model.layers.0.self_attn.o_proj.weight": (dtype, shape)})) == quantized


# Rules


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("o_proj", r"o_proj$"),
        ("[!o]_proj", r"\.[qkv]_proj$"),
        ("layers.[1-2].mlp", r"^[12]\.mlp"),
        ("*.mlp.*", r"\.mlp\."),
        ("layers.?.*.down_proj", r"down_proj$"),
        ("all", r""),
        ("class:attention", r"self_attn"),
    ],
)
def test_what_a_pattern_matches(pattern: str, hit: str) -> None:
    every = chosen("mxfp4")
    formats = chosen({"format": "mxfp4", "layers": {pattern: "nvfp4"}})

    assert {module for module, spelling in formats.items() if spelling == "nvfp4"} == {module for module in every if re.search(hit, module)}


@pytest.mark.parametrize("pattern", ["proj", "layers.*.o_proj"])
def test_whole_components_only_and_what_matches_nothing_is_told(pattern: str) -> None:
    made = QuantizationRecipe.parse({"format": "mxfp4", "layers": {pattern: "nvfp4"}}).assign(checkpoint_of(LLAMA))

    assert {form.name for form in made.values()} == {"mxfp4"}
    assert [*map(facts, made.adjustments)] == [f"quantize.layers[0].match {pattern}"]


@pytest.mark.parametrize(
    ("layers", "format_of_o_proj_0"),
    [
        ({"o_proj": "fp8", "layers.0": "mxfp4"}, "mxfp4"),  # more components
        ({"self_attn": "mxfp4", "o_proj": "fp8"}, "mxfp4"),  # more characters
        ({"o_proj": "mxfp4", "*.o_proj": "fp8"}, "fp8"),
        ({"o_proj": "fp8", "all": "mxfp4"}, "fp8"),
        ({"all": "mxfp4", "class:attention": "fp8"}, "fp8"),
        ([{"match": "all", "format": "mxfp4", "priority": 1}, {"match": "layers.0.self_attn.o_proj", "format": "fp8"}], "mxfp4"),
        ([{"match": ["o_proj", "q_proj"], "format": "fp8"}], "fp8"),
    ],
)
def test_which_of_two_rules_holds(layers: Any, format_of_o_proj_0: str) -> None:
    assert chosen({"format": "nvfp4", "layers": layers})["0.self_attn.o_proj"] == format_of_o_proj_0


def test_every_rule_that_is_refused_is_told_at_once() -> None:
    layers = [{"match": "o_proj", "format": "fp88"}, {"match": "re:x", "format": "fp8"}, {"match": "q_proj", "format": "fp8"}]

    with pytest.raises(ConfigError) as raised:
        QuantizationRecipe.parse({"format": "nvfp5", "layers": layers, "keep": ["a..b"]})
    places = ["quantize.format", "quantize.layers[0]", "quantize.layers[1].match", "quantize.keep"]
    assert [part.partition(": ")[0] for part in raised.value.message.split("; ") if part.startswith("quantize.")] == places


def test_keep_is_a_rule_that_comes_last() -> None:
    formats = chosen({"format": "nvfp4", "layers": [{"match": "o_proj", "format": "fp8"}], "keep": ["o_proj", "layers.1"]})

    assert of(formats, "o_proj") == set() and of(formats, r"^1\.") == set() and len(formats) == 2 * 6
    assert of(chosen({"format": "nvfp4", "layers": [{"match": "o_proj", "format": "fp8", "priority": 1}], "keep": "o_proj"}), "o_proj") == {
        "fp8"
    }


def test_the_group_size_of_the_mapping_is_for_every_int4_without_its_own() -> None:
    formats = chosen({"format": "int4", "group_size": 64, "layers": {"o_proj": "int4", "down_proj": "int4-g32", "gate_proj": "fp8"}})

    assert {of(formats, name).pop() for name in ("q_proj", "o_proj")} == {"int4-g64"}
    assert of(formats, "down_proj") == {"int4-g32"}


@pytest.mark.parametrize(("rule", "hit"), [("lm_head", True), ("class:lm_head", True), ("all", False), ("lm_*", False)])
def test_what_is_kept_is_touched_only_by_a_rule_that_names_it(rule: str, hit: bool) -> None:
    assert ("lm_head" in chosen({"format": "nvfp4", "layers": {rule: "fp8"}})) == hit


KEPT = {
    "model.visual.blocks.0.attn.qkv.weight": "visual",
    "model.layers.0.mixer.x_proj.weight": "x_proj",
    "model.layers.0.self_attn.indexer.wq_b.weight": "indexer",
}


@pytest.mark.parametrize(("name", "part"), KEPT.items())
def test_what_keeps_its_precision_by_default(name: str, part: str) -> None:
    module = name.removesuffix(".weight")
    tensors = {name: ("BF16", W)}
    leaf = module.rpartition(".")[2]

    assert QuantizationRecipe.parse("nvfp4").assign(checkpoint_of(tensors)) == {}
    assert QuantizationRecipe.parse({"layers": {"all": "nvfp4"}}).assign(checkpoint_of(tensors)) == {}
    assert list(QuantizationRecipe.parse({"layers": {part: "fp8"}}).assign(checkpoint_of(tensors))) == [module]
    if part not in (leaf, "indexer"):
        assert QuantizationRecipe.parse({"layers": {leaf: "fp8"}}).assign(checkpoint_of(tensors)) == {}


@pytest.mark.parametrize(
    ("name", "rule", "kind"),
    [
        ("model.embed_tokens.weight", "embed_tokens", "embedding"),
        ("model.layers.0.mlp.router.weight", "class:router", "router"),
    ],
)
def test_what_vllm_cannot_quantize_stays_and_is_told(name: str, rule: str, kind: str) -> None:
    made = QuantizationRecipe.parse({"layers": {rule: "fp8"}}).assign(checkpoint_of({name: ("BF16", W)}))

    assert made == {} and f"class {kind}," in made.adjustments[0]


@pytest.mark.parametrize(
    ("model_type", "kept", "quantized", "told"),
    [
        ("bloom", ["self_attention.query_key_value"], ["self_attention.dense"], "BloomForCausalLM"),
        ("nemotron_h", [], ["mixer.in_proj", "mixer.out_proj"], None),
    ],
)
def test_what_a_model_class_has_in_no_quantized_form_is_kept_and_told(
    model_type: str, kept: list[str], quantized: list[str], told: str | None
) -> None:
    tensors = layered(2, {f"{name}.weight": W for name in (*kept, *quantized)})
    checkpoint = checkpoint_of(tensors, config={"model_type": model_type})

    for value in ("int4-g32", {"format": "fp8", "layers": dict.fromkeys(kept, "nvfp4")}):
        made = QuantizationRecipe.parse(value).assign(checkpoint)
        assert set(made) == {f"model.layers.{layer}.{name}" for layer in range(2) for name in quantized}
        assert [told in sentence for sentence in made.adjustments] == [True] if told else made.adjustments == ()


# What vLLM fuses


def test_fused_weights_get_the_format_of_the_rule_with_the_highest_priority() -> None:
    layers = [{"match": "q_proj", "format": "mxfp4", "priority": 5}, {"match": "k_proj", "format": "fp8"}]
    made = QuantizationRecipe.parse({"format": "nvfp4", "layers": layers}).assign(checkpoint_of(LLAMA))

    assert {form.name for module, form in made.items() if re.search("[qkv]_proj", module)} == {"mxfp4"}
    assert {form.name for module, form in made.items() if "o_proj" in module} == {"nvfp4"}
    assert len(made.adjustments) == 1


@pytest.mark.parametrize(
    ("layers", "held"),
    [
        ({"q_proj": "mxfp4", "k_proj": "fp8"}, {"fp8"}),  # the more precise
        ({"q_proj": "mxfp4"}, {"mxfp4"}),  # a rule against the default
        ({"q_proj": "mxfp4", "v_proj": "bf16"}, set()),  # kept
    ],
)
def test_fused_weights_of_one_priority(layers: dict[str, str], held: set[str]) -> None:
    assert of(chosen({"format": "nvfp4", "layers": layers}), "[qkv]_proj") == held


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"),
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ],
)
def test_what_is_fused(names: tuple[str, str]) -> None:
    packed = names[0].endswith("experts.gate_up_proj")
    tensors = {f"model.layers.0.{n}{'' if packed else '.weight'}": ("BF16", (2, *W) if packed else W) for n in names}
    first, second = (re.sub(r"experts\.\d+", "experts.*", name) for name in names)
    for rules in ({first: "fp8", second: "int4"}, {second: "fp8"}):
        made = QuantizationRecipe.parse({"format": "nvfp4", "layers": rules}).assign(checkpoint_of(tensors))
        assert [form.name for form in made.values()] == ["fp8", "fp8"]
        assert len(made.adjustments) == 1


def test_one_that_cannot_be_quantized_keeps_its_siblings_back() -> None:
    tensors = {**LLAMA, **layered(3, {"self_attn.k_proj.weight": (32, 128), "self_attn.v_proj.weight": (32, 128)})}
    made = QuantizationRecipe.parse({"format": "nvfp4", "layers": {"q_proj": "fp8"}}).assign(checkpoint_of(tensors))

    assert not [module for module in made if re.search("[qkv]_proj", module)] and len(made) == 3 * 4
    assert len(made.adjustments) == 1


def test_a_layer_is_by_itself() -> None:
    formats = chosen({"format": "nvfp4", "layers": {"layers.0.self_attn.q_proj": "fp8"}})

    assert of(formats, r"^0.*[qkv]_proj") == {"fp8"} and of(formats, r"^[12].*[qkv]_proj") == {"nvfp4"}


def test_all_experts_of_a_layer_have_one_format() -> None:
    formats = chosen({"format": "nvfp4", "layers": {"experts.*.down_proj": "fp8", "layers.1.mlp.experts": "mxfp4"}}, MOE)

    assert of(formats, r"^7\.0.*experts") == {"fp8"}
    assert of(chosen({"layers": {"moe": "mxfp4"}}, MOE), r"experts") == {"mxfp4"}
    assert of(chosen({"layers": {"moe": "mxfp4"}}, MOE), r"self_attn|mlp\.(up|down)") == set()


def test_a_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quantize\.layers\[0\]\.match: .*glob"):
        QuantizationRecipe.parse({"format": "mxfp4", "layers": {r"re:.*\.o_proj$": "nvfp4"}})
    with pytest.raises(ConfigError, match=r"^quantize\.keep: .*glob"):
        QuantizationRecipe.parse({"keep": ["re:(a+)+b"]})


# What cannot be read (each fault, word for word: tests/golden/loader.txt)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"format": "nf5"}, "quantize.format"),
        ({"layers": [{"match": [3], "format": "fp8"}]}, "quantize.layers[0].match"),
        ({"layers": {"mtp.**.o_proj": "fp8"}}, "quantize.layers[0].match"),
        ({"keep": 3}, "quantize.keep"),
        (4, "quantize"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_sentence_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationRecipe.parse(value)

    assert caught.value.message.startswith(place) and "\n" not in caught.value.message
    assert caught.value.param == "quantize"


patterns = st.sampled_from(
    ["all", "moe", "o_proj", "q_proj", "layers.0.*", "*.mlp.*", "class:mlp", "*down*", "lm_head", "experts.*.up_proj", "*"]
)
rules = st.lists(
    st.fixed_dictionaries({"match": patterns, "format": st.sampled_from(SPELLINGS)}, optional={"priority": st.integers(-3, 3)}), max_size=5
)


# Whole blocks of 128 rows, and no head: what fp8-block does where they are not is told apart below.
WHOLE = {
    name: (dtype, W if shape[-1] == 128 and len(shape) == 2 else shape) for name, (dtype, shape) in MOE.items() if name != "lm_head.weight"
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPELLINGS), rules, st.lists(patterns, max_size=2))
def test_fused_weights_always_agree(form: str, layers: list[dict[str, Any]], keep: list[str]) -> None:
    read = QuantizationRecipe.parse({"format": form, "layers": layers, "keep": keep})
    made = read.assign(checkpoint_of(WHOLE))
    again = QuantizationRecipe.parse(json.loads(json.dumps(read.canonical())))

    assert again == read and again.canonical() == read.canonical() and again.assign(checkpoint_of(WHOLE)) == made
    groups: dict[str, set[Format | None]] = {}
    for name in WHOLE:
        module = name.removesuffix(".weight")
        if re.search(r"experts|[qkv]_proj$|(gate|up)_proj$", module):
            groups.setdefault(re.sub(r"experts\..*|[qkv]_proj$|(gate|up)_proj$", "", module), set()).add(made.get(module))
    assert all(len(group) == 1 for group in groups.values())
    assert not any(found.keeps for found in made.values())


def test_the_canonical_form_is_fixed() -> None:
    """It is part of cache keys and compile hashes: a change makes every kept model be quantized again."""
    assert QuantizationRecipe.parse("int4").canonical() == {"format": "int4-g128", "layers": []}
    value = {"format": "nvfp4", "layers": [{"match": ["o_proj", "q_proj"], "format": "FP8_block", "priority": 2}], "keep": "layers.0"}
    assert QuantizationRecipe.parse(value).canonical() == {
        "format": "nvfp4",
        "layers": [
            {"match": "o_proj", "format": "fp8-block", "priority": 2},
            {"match": "q_proj", "format": "fp8-block", "priority": 2},
            {"match": "layers.0", "format": "bf16", "priority": 0},
        ],
    }


# Blocks of 128x128 that do not fit

ODD = layered(
    2,
    {
        "self_attn.q_proj.weight": (576, 576),
        "self_attn.k_proj.weight": (192, 576),
        "self_attn.v_proj.weight": (192, 576),
        "self_attn.o_proj.weight": (576, 576),
        "mlp.gate_proj.weight": (1536, 576),
        "mlp.up_proj.weight": (1536, 576),
        "mlp.down_proj.weight": (576, 1536),
    },
)


def test_a_fused_matrix_that_is_not_made_of_blocks_gets_fp8_and_is_told() -> None:
    made = QuantizationRecipe.parse("fp8-block").assign(checkpoint_of(ODD))
    formats = {module: form.spelling for module, form in made.items()}

    assert of(formats, "[qkv]_proj") == {"fp8"}
    assert of(formats, "(o|gate|up|down)_proj") == {"fp8-block"}  # rows and columns may end inside a block
    assert len(made.adjustments) == 1


@pytest.mark.parametrize(
    ("shapes", "config", "fits"),
    [
        ({"a.0.q_proj": W, "a.0.k_proj": W, "a.0.v_proj": (64, 128)}, {}, True),  # nothing is below the last one
        ({"a.0.q_proj": W, "a.0.k_proj": (64, 128), "a.0.v_proj": W}, {}, False),
        ({"a.0.gate_proj": (192, 128), "a.0.up_proj": (192, 128)}, {}, False),
        ({"a.0.gate_up_proj": (384, 128)}, {}, False),
        ({"a.0.qkv_proj": (384, 128)}, {"num_attention_heads": 2, "hidden_size": 256}, False),
        ({"a.0.qkv_proj": (384, 128)}, {"num_attention_heads": 2, "head_dim": 64}, True),
        ({"a.0.mlp.experts.0.gate_proj": (192, 128), "a.0.mlp.experts.0.down_proj": (128, 192)}, {}, False),
    ],
)
def test_where_blocks_fit(shapes: Mapping[str, Shape], config: Mapping[str, Any], fits: bool) -> None:
    made = QuantizationRecipe.parse("fp8-block").assign(
        checkpoint_of({f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}, config)
    )

    assert {form.spelling for form in made.values()} == {"fp8-block" if fits else "fp8"}
    assert len(made) == len(shapes) and len(made.adjustments) == (0 if fits else 1)


@pytest.mark.parametrize("rule", ["self_attn.k_proj", "class:attention"])
def test_blocks_that_a_rule_names_are_an_error_where_they_do_not_fit(rule: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        QuantizationRecipe.parse({"layers": {rule: "fp8-block"}}).assign(checkpoint_of(ODD))
    assert (caught.value.file, caught.value.tensor) == ("/model/model.safetensors", "model.layers.0.self_attn.q_proj.weight")


# Sources that are quantized already


@pytest.mark.parametrize("method", ["mxfp4", "other"])
def test_a_quantized_checkpoint_passes_through(method: str) -> None:
    made = QuantizationRecipe.parse("nvfp4").assign(checkpoint_of(LLAMA, quantization=SourceQuantization(method)))

    assert made == {}
    (adjustment,) = made.adjustments
    assert f"({method})" in adjustment


@pytest.mark.parametrize(("method", "own"), [("fp8_tensor", "fp8"), ("fp8_channel", "fp8"), ("fp8_block", "fp8-block")])
def test_an_fp8_weight_that_is_kept_stays_fp8(method: str, own: str) -> None:
    tensors = {name: ("F8_E4M3" if "_proj.weight" in name else dtype, shape) for name, (dtype, shape) in LLAMA.items()}
    tensors["model.layers.0.self_attn.indexer.wk.weight"] = ("F8_E4M3", W)
    tensors["model.visual.blocks.0.attn.proj.weight"] = ("F8_E4M3", W)
    formats = chosen({"format": "nvfp4", "keep": ["o_proj"]}, tensors, quantization=SourceQuantization(method))

    assert of(formats, "o_proj") == {own} and of(formats, "q_proj|down_proj") == {"nvfp4"}
    assert of(formats, "indexer|visual|lm_head") == set()


@pytest.mark.parametrize(("name", "shape"), [("mlp.experts.gate_up_proj", (4, *W)), ("mlp.input_linear.weight", (4, *W))])
def test_packed_experts_in_fp8_that_nobody_can_undo_are_refused(name: str, shape: tuple[int, ...]) -> None:
    tensors = {f"model.layers.0.{name}": ("F8_E4M3", shape)}
    with pytest.raises(CheckpointError) as caught:
        QuantizationRecipe.parse("nvfp4").assign(checkpoint_of(tensors, quantization=SourceQuantization("fp8_block")))
    assert caught.value.tensor == f"model.layers.0.{name}"


def test_packed_experts_in_fp8_are_weights_like_others() -> None:
    tensors = {"model.layers.0.self_attn.o_proj.weight": ("BF16", W)}
    for which in ("gate_up_proj", "down_proj"):
        tensors |= {f"model.layers.0.mlp.experts.{which}": ("F8_E4M3", (4, *W)), f"model.layers.0.mlp.experts.{which}_scale": ("F32", (4,))}
    for value, own in (("nvfp4", "nvfp4"), ({"format": "nvfp4", "keep": ["experts"]}, "fp8")):
        formats = chosen(value, tensors, quantization=SourceQuantization("fp8_tensor"))
        assert of(formats, "experts") == {own} and len(formats) == 3


def test_a_model_of_which_nothing_can_be_quantized_is_served_unchanged() -> None:
    made = QuantizationRecipe.parse("nvfp4").assign(checkpoint_of({"h.0.mlp.c_fc.weight": ("BF16", W)}, {"model_type": "gpt2"}))

    assert made == {} and len(made.adjustments) == 1


# Architectures: what is quantized of each, by published names


MLP = {f"{name}_proj.weight": W for name in ("gate", "up", "down")}
ARCHITECTURES: dict[str, tuple[dict[str, tuple[str, Shape]], set[str], set[str]]] = {
    "Qwen3.5": (
        layered(
            2,
            {
                **{f"linear_attn.in_proj_{part}.weight": W for part in ("qkv", "z", "a", "b")},
                "mlp.experts.gate_up_proj": (4, 256, 128),
                "mlp.experts.down_proj": (4, 128, 128),
                "mlp.gate.weight": W,
                "mlp.shared_expert_gate.weight": (1, 128),
            },
            "model.language_model.layers",
        )
        | layered(1, EXPERTS, "mtp.layers")
        | {"mtp.fc.weight": ("BF16", W), "model.visual.blocks.0.attn.qkv.weight": ("BF16", W)},
        {"in_proj_qkv", "in_proj_z", "gate_up_proj", "gate_proj", "up_proj", "down_proj"},
        {"in_proj_a", "in_proj_b", "gate", "shared_expert_gate", "fc", "qkv"},
    ),
    "Nemotron-H": (
        layered(
            2,
            {
                "mixer.in_proj.weight": W,
                "mixer.out_proj.weight": W,
                "mixer.conv1d.weight": (128, 1, 4),
                "mixer.D": (64,),
                "mixer.gate.weight": W,
                "mixer.experts.0.up_proj.weight": W,
                "mixer.experts.0.down_proj.weight": W,
                "mixer.shared_experts.up_proj.weight": W,
                "mixer.fc1_latent_proj.weight": W,
            },
            "backbone.layers",
        )
        | {"backbone.embeddings.weight": ("BF16", W)},
        {"in_proj", "out_proj", "up_proj", "down_proj", "fc1_latent_proj"},
        {"conv1d", "D", "gate", "embeddings"},
    ),
    "DeepSeek": (
        layered(
            2,
            {
                **{f"self_attn.{name}.weight": W for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")},
                "self_attn.indexer.wk.weight": W,
                "mlp.gate.weight": W,
                "mlp.gate.e_score_correction_bias": (64,),
                **{f"mlp.shared_experts.{name}": shape for name, shape in MLP.items()},
                **EXPERTS,
            },
        )
        | {
            "model.layers.2.eh_proj.weight": ("BF16", W),
            "model.layers.2.shared_head.head.weight": ("BF16", W),
            "model.layers.2.embed_tokens.weight": ("BF16", W),
        },
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {"kv_b_proj", "wk", "gate", "e_score_correction_bias", "eh_proj", "head", "embed_tokens"},
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_quantized_of_an_architecture(name: str) -> None:
    tensors, quantized, kept = ARCHITECTURES[name]
    made = QuantizationRecipe.parse("int4-g64").assign(checkpoint_of(tensors))
    leaves = {each.removesuffix(".weight").rpartition(".")[2] for each in tensors}

    assert quantized | kept == leaves
    assert {module.rpartition(".")[2] for module in made} == quantized
    assert {each.spelling for each in made.values()} == {"int4-g64"}
    assert made.adjustments == ()
    assert {f"{module}.weight" if f"{module}.weight" in tensors else module for module in made} <= set(tensors)
