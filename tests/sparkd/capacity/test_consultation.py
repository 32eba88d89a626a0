"""Which questions stand for a plan, and what is made of the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity.advice import outgrown
from sparkd.capacity.evidence import MOST_QUESTIONS, Consultation, Evidence
from sparkd.capacity.headers import draft_folder
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.placed_entry import ask_vllm, placed_entry
from sparkd.capacity.requirement import requirement_of
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import read_checkpoint
from sparkd.checkpoint.quantization import SourceQuantization
from sparkd.checkpoint.shape import shape_of
from sparkd.config.config import Config, parse_model
from sparkd.config.engine_args import engine_args
from sparkd.errors import EngineError
from sparkd.hardware import KNOWN, SPARK, Hardware
from sparkd.units import GIB
from sparkd.vllm.ask.answers import OWN, ModelAnswer, ModelQuestion, ModelRefusal
from tests.sparkd.capacity.test_evidence import FULL, answer
from tests.support import published_headers
from tests.support.accounts import account, needed_gib, needing, option, options, too_large
from tests.support.checkpoints import dense, write
from tests.support.facts import lacking
from tests.support.inventories import CONFIGS
from tests.support.plans import planned as plan
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe
from workers.vllm.ask.model_question import DRAFT

FP8 = QuantizationRecipe.parse("fp8")
ODD = ModelRefusal("config", "ValueError", "9 heads are odd.", True)


class Vllm:
    """It answers what it was given, and notes what it was asked."""

    def __init__(self, *answers: ModelAnswer | None) -> None:
        self.asked: list[ModelQuestion] = []
        self._answers = answers

    def __call__(self, questions: Sequence[ModelQuestion]) -> Sequence[ModelAnswer | None]:
        self.asked += questions
        return [self._answers[min(number, len(self._answers) - 1)] for number in range(len(questions))]


FACTS = {"platform": "cuda", "entrypoint": "e", "vllm": "0.32.0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = dense()
    return Path(write(tmp_path / "m", shape, tensors_of(shape)))


def test_a_question_says_what_changes_a_models_memory_and_runs_none_of_its_code(folder: Path) -> None:
    vllm = Vllm(answer(FULL, blocks=1))
    flags = ["--max-model-len", "4096", "--kv-cache-dtype", "fp8", "--trust-remote-code", "--max-num-seqs=4", "--kv-offloading-size", "4"]
    Consultation(vllm, read_checkpoint(str(folder)), flags, {"A": "b"}, SPARK).ask([(AS_IT_IS, 2, 1), (FP8, 2, 1)])
    stored, fp8 = vllm.asked
    assert stored.args == ("--kv-cache-dtype", "fp8") and stored.env == {"A": "b"} and stored.folder == folder
    assert (stored.tensor_parallel, stored.pipeline_parallel, stored.platform) == (2, 1, "cuda:12.1")
    assert json.loads(fp8.args[-1])["quantize"] == FP8.canonical() and "spark_stream" in fp8.args
    Consultation(vllm, read_checkpoint(str(folder)), [], {}, KNOWN["h200"]).ask([(AS_IT_IS, 1, 1)])
    Consultation(vllm, read_checkpoint(str(folder)), [], {}, replace(SPARK, platform="cpu")).ask([(AS_IT_IS, 1, 1)])
    assert [each.platform for each in vllm.asked[2:]] == ["cuda:9.0", OWN]


def test_a_draft_of_the_hub_is_asked_about_where_it_lies(folder: Path, tmp_path: Path) -> None:
    """The process that is asked has not got the engine's place of downloads."""
    snapshot = tmp_path / "hub/models--o--draft/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (refs := tmp_path / "hub/models--o--draft/refs").mkdir()
    (refs / "main").write_text("a" * 40)
    here, elsewhere = {"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HUB_CACHE": str(tmp_path)}
    for env, commit, place in (
        (here, None, str(snapshot)),
        (here, "a" * 40, str(snapshot)),
        (here, "b", "o/draft"),
        (elsewhere, None, "o/draft"),
    ):
        vllm = Vllm(answer(FULL, blocks=1))
        draft = json.dumps({"model": "o/draft", "revision": commit, "num_speculative_tokens": 2, "method": "eagle"})
        spec = parse_model("m", {"model": str(folder), "extra_args": ["--speculative-config", draft]}, over_admin=False)
        args = engine_args(spec, env)
        Consultation(vllm, read_checkpoint(str(folder)), args.flags, env, SPARK, None, draft_folder(args)).ask([(AS_IT_IS, 1, 1)])
        assert json.loads(vllm.asked[0].args[1])["model"] == place


def test_a_draft_on_a_hub_goes_with_the_question(folder: Path) -> None:
    """Only its headers were read, and the process that is asked fetches nothing."""
    draft = replace(read_checkpoint(str(folder)), folder="hf://o/draft@0")
    words = "--speculative-config", json.dumps({"model": "o/draft", "revision": "r", "num_speculative_tokens": 2, "method": "eagle"})
    for headers, model in ((draft, DRAFT), (replace(draft, folder=str(folder)), "o/draft"), (None, "o/draft")):
        vllm = Vllm(answer(FULL, blocks=1))
        Consultation(vllm, read_checkpoint(str(folder)), words, {"HF_HUB_CACHE": "/none"}, SPARK, headers).ask([(AS_IT_IS, 1, 1)])
        config = json.loads(vllm.asked[0].args[1])
        assert (config["model"], vllm.asked[0].draft) == (model, draft if headers is draft else None)
        assert ("revision" in config) is (headers is not draft)


@pytest.mark.parametrize(
    ("keys", "reply", "counted"),
    [
        ({"extra_args": ["--hf-overrides", "{}"]}, answer(FULL, blocks=1), True),
        ({"extra_args": ["--hf-overrides", "{}"]}, answer(FULL, groups=False), False),
        ({"extra_args": ["--kv-offloading-size", "4"]}, answer(FULL, blocks=1), False),
    ],
)
def test_vllms_answer_accounts_for_what_no_formula_has(folder: Path, keys: dict[str, Any], reply: ModelAnswer, counted: bool) -> None:
    """And then no whole machine is reserved."""
    spec = parse_model("m", {"model": str(folder), "kv_cache": {"sequences": 1}, "max_model_len": 4096, **keys}, over_admin=False)
    assert account(spec, SPARK, {}) is None
    found = account(spec, SPARK, {}, Evidence(ask=Vllm(reply)))
    assert (found is not None) is counted and (found is None or found.kv.least == 257 * 1000)
    reserved = [needed_gib(spec, "cuda", 121.6, {}, 118.0, known) for known in (None, found)]
    assert reserved[0] == 112 and (reserved[1] < 20) is counted


def test_a_model_elsewhere_is_asked_about_by_its_headers_in_any_format(folder: Path) -> None:
    vllm = Vllm(answer(FULL, blocks=1))
    checkpoint = replace(read_checkpoint(str(folder)), folder="hf://owner/name@0")
    consultation = Consultation(vllm, checkpoint, [], {}, SPARK)
    consultation.ask([(AS_IT_IS, 1, 1), (FP8, 1, 1)])
    stored, fp8 = vllm.asked
    assert stored.folder is None and json.loads(stored.files["config.json"]) == checkpoint.config and list(stored.files) == ["config.json"]
    assert fp8.tensors == stored.tensors == tuple(checkpoint.tensors.values())
    assert json.loads(fp8.args[-1])["quantize"] == FP8.canonical()
    exact = consultation.exact(FP8, Serving(4096))
    assert exact is not None and exact.layout is not None and exact.weight_bytes == 1000


def test_what_vllm_refuses_of_a_stored_format_refuses_no_other(folder: Path) -> None:
    plain = read_checkpoint(str(folder))
    quantized = replace(plain, quantization=SourceQuantization("fp8_block"))
    for checkpoint, refusal in ((plain, "9 heads are odd"), (quantized, None)):
        consultation = Consultation(Vllm(replace(answer(), refusal=ODD)), checkpoint, [], {}, SPARK)
        consultation.ask([(AS_IT_IS, 1, 1)])
        stored, other = consultation.exact(AS_IT_IS, Serving(4096)), consultation.exact(QuantizationRecipe.parse("int4"), Serving(4096))
        assert stored is not None and stored.refusal == "9 heads are odd"
        assert (None if other is None else other.refusal) == refusal


def test_a_quantization_that_config_json_is_silent_about_goes_with_the_question(folder: Path) -> None:
    vllm = Vllm(answer(FULL, blocks=1))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}')
    checkpoint = replace(read_checkpoint(str(folder)), folder="hf://owner/name@0")
    Consultation(vllm, checkpoint, [], {}, SPARK).ask([(AS_IT_IS, 1, 1)])
    modelopt = json.loads(vllm.asked[0].files["hf_quant_config.json"])
    assert modelopt["quantization"] == {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    assert modelopt["producer"] == {"name": "modelopt"}


def test_a_plan_is_exact_where_vllm_answered_and_says_so(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    known = inventory(checkpoint, shape_of(checkpoint.config))
    (guess,) = options(known, quantize="bf16", ways=[(1, 1)])
    vllm = Vllm(replace(answer(FULL, blocks=1), facts={"max_model_len": 2048}))
    (exact,) = options(known, quantize="bf16", ways=[(1, 1)], evidence=Evidence(ask=vllm))
    assert guess.footprint is not None and guess.footprint.sureness == "guess"
    assert exact.footprint is not None and exact.footprint.sureness == "exact"
    assert exact.footprint.parts["weights"] == 1000 and exact.footprint.kv.per_token == 1000 / 16
    assert exact.serving.max_model_len == 2048


def test_an_entry_may_be_longer_than_vllm_takes_a_longrope_by_itself(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    known = inventory(checkpoint, shape_of(checkpoint.config))
    shorter = Evidence(ask=Vllm(replace(answer(FULL, blocks=1), facts={"max_model_len": 2048})))
    for length, fits in ((4096, True), (known.shape.max_len, True), (known.shape.max_len + 1, False)):
        (option,) = options(known, quantize="bf16", ways=[(1, 1)], evidence=shorter, max_model_len=length)
        assert (option.fits, option.cause) == (fits, None if fits else "length")


def test_a_split_that_vllm_refuses_cannot_be_and_one_that_it_takes_can(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    known = inventory(checkpoint, shape_of(checkpoint.config))
    for reply, reason in ((replace(answer(), refusal=ODD), "9 heads are odd"), (answer(FULL, blocks=1), None)):
        # Three ranks are none of a power of two heads, as far as the formulas know.
        (option,) = options(known, quantize="bf16", ways=[(3, 1)], evidence=Evidence(ask=Vllm(reply)))
        assert option.reason == reason


def test_what_vllm_has_refused_is_not_placed(folder: Path) -> None:
    """Its start would end in the same words, minutes later."""
    spec = parse_model("m", {"model": str(folder), "max_model_len": 4096}, over_admin=False)
    found = option(spec, SPARK, {}, Evidence(ask=Vllm(replace(answer(), refusal=ODD))))
    assert (too_large(needing(spec, "cuda", 1, found), 100) or "").startswith("vLLM refuses this model: 9 heads are odd. ")


@pytest.mark.parametrize(("certain", "reason", "sureness"), [(True, "its pages are odd", None), (False, None, "guess")])
def test_what_vllm_says_of_the_cache_is_told(folder: Path, certain: bool, reason: str | None, sureness: str | None) -> None:
    """Where vLLM will not start, the plan refuses; otherwise the sentence stands beside the numbers."""
    stopped = replace(answer(FULL, groups=False), refusal=ModelRefusal("cache", "ValueError", "its pages are odd.", certain))
    found = plan(folder, quantize="bf16", ask=Vllm(stopped))
    (option,) = found["options"]
    assert option["reason"] == reason and (option["footprint"] or {}).get("sureness") == sureness
    assert any("its pages are odd" in note for note in found["notes"]) is (not certain)


def test_what_the_configuration_does_not_say_vllm_tells_and_without_both_the_plan_does_not_know(tmp_path: Path) -> None:
    config = dense(architectures=["NobodysForCausalLM"], num_hidden_layers=None, hidden_size=None, max_position_embeddings=None)
    path = str(write(tmp_path / "m", config, [("model.embed.weight", (512, 512), "BF16")]))
    refused = plan(path, quantize="bf16")
    assert refused["choice"] is None and refused["refusal"]["cause"] == "uncounted"
    assert lacking(refused["refusal"]["message"], "num_hidden_layers", "memory_gib") == []
    facts = {"max_model_len": 2048, "layers": 3, "hidden": 512, "heads": 8}
    vllm = Vllm(replace(answer(FULL, blocks=1), facts=facts))
    found = plan(path, max_model_len=4096, quantize="bf16", ask=vllm)
    (option,) = found["options"]
    assert (found["layers"], option["footprint"]["sureness"], option["max_model_len"]) == (3, "exact", 4096)
    spec = parse_model("m", {"model": path}, over_admin=False)
    assert account(spec, SPARK, {}) is None and account(spec, SPARK, {}, Evidence(ask=vllm)) is not None


def test_without_vllms_answer_no_number_lacks_its_mark() -> None:
    """Of every held configuration, in every format, on one node and on two."""
    names = sorted(path.stem for path in CONFIGS.glob("*.json") if not path.stem.endswith(("hf_quant_config", "-assistant")))
    assert len(names) > 20
    for name in names:
        checkpoint = published_headers.checkpoint_of(name)
        options = plan("owner/name", checkpoint=checkpoint, nodes=2)["options"]
        counted = [option["footprint"]["sureness"] for option in options if option["footprint"] is not None]
        assert counted and set(counted) == {"guess"}, name


@pytest.mark.parametrize("more", [{"num_attention_heads": None}, {"max_position_embeddings": None}])
def test_a_guess_names_what_the_configuration_does_not_tell(tmp_path: Path, more: dict[str, Any]) -> None:
    path = str(write(tmp_path / "m", dense(head_dim=64, **more), tensors_of(dense())))
    (word,) = more
    for ask, sureness in (({}, "guess"), ({"ask": Vllm(answer(FULL, blocks=1))}, "exact")):
        found = plan(path, quantize="bf16", **ask)
        assert found["options"][0]["footprint"]["sureness"] == sureness
        assert any(word in note for note in found["notes"]) is (sureness == "guess")


def test_a_plan_that_vllm_has_answered_in_part_does_not_say_that_vllm_gave_no_answer(tmp_path: Path) -> None:
    path = str(write(tmp_path / "m", dense(head_dim=64, layer_types=["retention"] * 4), tensors_of(dense())))
    found = plan(
        path,
        ask=lambda asks: [answer(FULL, blocks=1) if number == 0 else None for number, _ in enumerate(asks)],
    )
    assert {option["footprint"]["sureness"] for option in found["options"]} == {"exact", "guess"}
    assert not any("retention" in note or "layer_types" in note for note in found["notes"])


def test_a_guess_tells_why_vllm_that_was_asked_gave_no_answer(tmp_path: Path) -> None:
    doubt = ModelRefusal("model", "KeyError", "the kernel of\nretention" + " x" * 1000, False)
    vllm = Vllm(replace(answer(FULL, blocks=1), refusal=doubt))
    config = dense(layer_types=["retention"] * 4)
    path = str(write(tmp_path / "m", config, tensors_of(config)))
    quoted = [note for note in plan(path, quantize="bf16", ask=vllm)["notes"] if "retention x" in note]
    assert len(quoted) == 1 and len(quoted[0]) < 500
    assert not any("asked" in note for note in plan(path, quantize="bf16")["notes"])


def test_a_guess_refuses_no_more_than_the_weights_and_reserves_what_the_node_lends(tmp_path: Path) -> None:
    config = dense(max_position_embeddings=1 << 24)
    path = str(write(tmp_path / "m", config, tensors_of(config)))
    spec = parse_model("m", {"model": path, "memory_gib": 8, "kv_cache": {"sequences": 1}}, over_admin=False)
    guess = account(spec, SPARK, {})
    assert guess is not None and guess.cache is not None and guess.sureness == "guess" and guess.least > 60 * GIB > guess.surely
    assert not outgrown(guess, 8)
    free = spec.model_copy(update={"memory_gib": "auto"})
    assert needed_gib(free, "cuda", 119, {}, 100, guess) == -(-(guess.fixed + guess.cache) // GIB)
    assert needed_gib(free, "cuda", 119, {}, 30, guess) == 30


@pytest.mark.parametrize(
    ("keys", "asks"),
    [
        ({"max_model_len": "auto"}, True),
        ({"kv_cache": {"sequences": 1}}, True),
        ({"kv_cache": {"sequences": 1}, "memory_gib": 20}, False),
        ({"kv_cache": "auto"}, False),
    ],
)
def test_a_load_asks_vllm_where_its_answer_decides_something_and_an_estimate_counts_where_it_cannot_be_asked(
    folder: Path, tmp_path: Path, keys: dict[str, Any], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm(answer(FULL, blocks=1))
    monkeypatch.setattr("sparkd.capacity.placed_entry.ask", lambda questions, runtime: vllm(questions))
    monkeypatch.setattr("sparkd.capacity.placed_entry.full_version_in", lambda _: "0.32.0")
    spec, config = parse_model("m", {"model": str(folder), **keys}, over_admin=False), Config(state_dir=tmp_path)
    runtime = NodeRuntime(FACTS, "node")
    ask_vllm(placed_entry(spec, config, runtime), (1, 1))
    assert bool(vllm.asked) is asks
    asked = list(vllm.asked)
    monkeypatch.setattr("sparkd.capacity.placed_entry.kept_answers", lambda questions, runtime: vllm(questions))
    need = requirement_of(placed_entry(spec, config, runtime), 100.0, 100.0)
    assert not asks or (need.known is not None and need.known.sureness == "exact")
    assert not asks or all(question in asked for question in vllm.asked), "the answers are those that a placement looks up"

    def fails(*_: Any, **__: Any) -> None:
        raise EngineError("The vLLM of this runtime gave no answer about a model.")

    monkeypatch.setattr("sparkd.capacity.placed_entry.ask", fails)
    ask_vllm(placed_entry(spec, config, runtime), (1, 1))


def test_no_question_is_asked_twice_and_not_more_than_a_plan_shows(folder: Path) -> None:
    vllm = Vllm(answer(FULL, blocks=1))
    consultation = Consultation(vllm, read_checkpoint(str(folder)), [], {}, SPARK)
    consultation.ask([(AS_IT_IS, ranks, 1) for ranks in range(1, 40)])
    consultation.ask([(AS_IT_IS, ranks, 1) for ranks in range(1, 9)])
    assert len(vllm.asked) == len({question.tensor_parallel for question in vllm.asked}) == MOST_QUESTIONS
    assert (consultation.answered, consultation.unanswered) == (True, 0)


def test_a_vllm_that_cannot_be_asked_leaves_the_formulas_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise EngineError("The vLLM of this runtime gave no answer about a model.")

    monkeypatch.setattr("sparkd.vllm.ask.model.ask", fails)
    assert exit_code(["--json", "plan", str(folder)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["choice"]["footprint"]["sureness"] == "guess" and any("vLLM" in note and "no answer" in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("hardware", "platform", "taken"),
    [
        (SPARK, "cuda:12.1", True),
        (SPARK, "cpu", False),
        (SPARK, "cuda:9.0", False),
        (replace(SPARK, name="node"), "cuda:9.0", True),
    ],
)
def test_an_answer_about_another_device_says_nothing(folder: Path, hardware: Hardware, platform: str, taken: bool) -> None:
    for reply in (answer(FULL, blocks=1), replace(answer(), refusal=ODD)):
        consultation = Consultation(Vllm(replace(reply, platform=platform)), read_checkpoint(str(folder)), [], {}, hardware)
        consultation.ask([(AS_IT_IS, 1, 1)])
        assert consultation.exact(AS_IT_IS, Serving(4096)).decides is taken
