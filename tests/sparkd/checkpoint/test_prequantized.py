"""Checkpoints that hold a model quantized already: which count as the same model, and how a plan offers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.checkpoint import read_checkpoint
from sparkd.checkpoint.prequantized import is_quantized_name, prequantized
from sparkd.config.config import parse_model
from sparkd.hardware import SPARK
from sparkd.units import GIB
from tests.support.accounts import account, resolved
from tests.support.checkpoints import dense, write
from tests.support.facts import lacking
from tests.support.published_tensors import tensors_of

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("name", "of", "same"),
    [
        ("Qwen3-8B-NVFP4", "Qwen3-8B", True),
        ("qwen3-8b_fp8-dynamic", "Qwen3-8B", True),
        ("Qwen3-8B", "Qwen3-8B", False),
        ("Qwen3-8B-Instruct-FP8", "Qwen3-8B", False),
        ("My-Qwen3-8B-FP8", "Qwen3-8B", False),
    ],
)
def test_which_names_are_the_models_own(name: str, of: str, same: bool) -> None:
    assert is_quantized_name(name, of) is same


def checkpoint(folder: Path, *, packed: bool = True, **more: Any) -> Path:
    """packed: with AWQ's words in the configuration, and a quarter of the bytes."""
    config = dense(**({"quantization_config": AWQ} if packed else {}), **more)
    found = [
        (f"{name.removesuffix('weight')}qweight", (shape[1], shape[0] // 8), "I32") if packed and "proj" in name else (name, shape, kind)
        for name, shape, kind, _ in tensors_of(config)
    ]
    return write(folder, config, found)


def snapshot(cache: Path, hub_id: str, *, base: str = "", **more: Any) -> Path:
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    made = checkpoint(folder / "snapshots" / "c0ffee", **more)
    if base:
        (made / "README.md").write_text(f"---\nlicense: mit\n{base}\n---\n# base_model: else/where\n")
    return made


def names(source: str, folder: Path, cache: Path) -> list[str]:
    return [
        Path(name).name if name.startswith("/") else name
        for name, _ in prequantized(source, read_checkpoint(folder), {"HF_HUB_CACHE": str(cache)})
    ]


def test_beside_a_folder(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", packed=False)
    checkpoint(tmp_path / "m-AWQ")
    checkpoint(tmp_path / "m-FP8", packed=False)  # its name alone quantizes nothing
    checkpoint(tmp_path / "m-Int4", vocab_size=2048)
    checkpoint(tmp_path / "m-Coder-AWQ")
    (tmp_path / "m-GPTQ").mkdir()
    (tmp_path / "m-NVFP4").write_text("")

    assert names(str(model), model, tmp_path / "hub") == ["m-AWQ"]
    assert names(str(tmp_path / "m-AWQ"), tmp_path / "m-AWQ", tmp_path) == []


@pytest.mark.parametrize(
    ("base", "found"),
    [
        ("", False),
        ("base_model: meta/m", True),
    ],
)
def test_another_owners_card_has_to_name_the_model(tmp_path: Path, base: str, found: bool) -> None:
    model = snapshot(tmp_path, "meta/m", packed=False)
    snapshot(tmp_path, "meta/m-awq")
    snapshot(tmp_path, "maker/m-AWQ", base=base)
    snapshot(tmp_path, "meta/m-chat-AWQ")

    assert names("meta/m", model, tmp_path) == [*(["maker/m-AWQ"] if found else []), "meta/m-awq"]
    assert names("meta/none", model, tmp_path / "none") == []


def test_half_a_download_is_not_offered(tmp_path: Path) -> None:
    model = snapshot(tmp_path, "meta/m", packed=False)
    (snapshot(tmp_path, "meta/m-awq") / "model.safetensors").unlink()

    assert names("meta/m", model, tmp_path) == []


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SPARKD_CONFIG", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint(tmp_path / "m-AWQ", hidden_size=4096, num_hidden_layers=8)
    return checkpoint(tmp_path / "m", packed=False, hidden_size=4096, num_hidden_layers=8)


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    exit_code(["plan", "--quick", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_takes_it_where_the_stored_model_does_not_fit_and_names_it_in_any_case(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = [[("as stored", None), ("fp8", None)], [("as stored", "awq"), ("fp8", None)]]
    file, room = tmp_path / "machine.yaml", 1 << 40
    for best, name in enumerate((f"{model}", f"{model}-AWQ")):
        file.write_text(f"memory_bytes: {room}\nsystem_bytes: 0\nunified: false\n")
        found = planned(capsys, str(model), "--ctx", "256", "--batch", "16", "--margin", "0", "--hardware", str(file))
        assert [(one["format"], one["prequantized"]) for one in found["options"][:2]] == formats[best]
        assert found["choice"]["model"] == name
        assert any(lacking(note, f"{model}-AWQ") == [] for note in found["notes"])
        room = found["options"][0]["footprint"]["total"] - (64 << 20)


@pytest.mark.parametrize("nodes", [1, 2])
def test_auto_takes_it_before_anything_is_quantized_where_there_is_one_node(
    nodes: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon and the plan of the entry alike."""
    keys = {"model": str(model), "max_model_len": 256, "max_num_batched_tokens": 16, "kv_margin_gib": 0}
    auto = parse_model("m", {**keys, "quantize": "auto"}, over_admin=False)
    stored, awq = (account(auto.model_copy(update={"model": f"{model}{end}", "quantize": None}), SPARK, {}) for end in ("", "-AWQ"))
    assert stored is not None and awq is not None
    room = (stored.least + awq.least) // 2
    assert awq.least < room < stored.least
    for free, expected in ((room, f"{model}-AWQ"), (2 * stored.least, str(model))):
        taken = resolved(auto, SPARK, {}, free, beside=nodes == 1)
        assert (taken.model, taken.quantize is None) == ((expected, True) if nodes == 1 or free > room else (str(model), False))
        # Trust in code belongs to the model that the entry names.
        trusting = auto.model_copy(update={"trust_remote_code": True})
        assert resolved(trusting, SPARK, {}, free, beside=nodes == 1).model == str(model)

    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"models": {"m": {**keys, "quantize": "auto"}}}))
    (tmp_path / "spark.yaml").write_text(f"memory_bytes: {room}\nsystem_bytes: 0\n")
    found = planned(capsys, "m", "--config", str(file), "--hardware", str(tmp_path / "spark.yaml"), "--nodes", str(nodes))
    assert (found["choice"]["model"], found["choice"]["config"].get("model")) == (
        (f"{model}-AWQ", f"{model}-AWQ") if nodes == 1 else (str(model), None)
    )
    assert found["choice"]["model"] in found["choice"]["ranks"][0]["command"]


def test_a_copy_is_not_taken_where_the_stored_model_fits(model: Path) -> None:
    keys = {"model": str(model), "max_model_len": 256, "max_num_batched_tokens": 16}
    auto = parse_model("m", {**keys, "quantize": "auto"}, over_admin=False)
    assert resolved(auto, SPARK, {}, 100 * GIB).model == str(model)
