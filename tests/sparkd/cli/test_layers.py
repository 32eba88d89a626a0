"""`sparkd ls --layers`: the list of a checkpoint's layers, what a recipe makes of it, and where MODEL may lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity.layers import LayerListing, layers_of
from sparkd.checkpoint import SourceQuantization
from sparkd.checkpoint.source import snapshot_of
from sparkd.cli import config_file
from sparkd.cli.layers import listing_of
from sparkd.errors import ConfigError, Unavailable, UnknownModel
from tests.support.checkpoints import checkpoint_of, layered, write_folder
from tests.support.daemon_process import free_port
from tests.support.facts import lacking
from workers.quantization.recipe import QuantizationRecipe

W = (256, 384)
DENSE = {
    "model.embed_tokens.weight": ("BF16", (512, 384)),
    **layered(2, {"self_attn.o_proj.weight": W, "input_layernorm.weight": (384,), "mlp.down_proj.weight": (384, 256)}),
}
COLUMNS = ("name", "class", "count", "shape", "dtype", "bytes", "format", "result_bytes", "refused")


def rows(found: LayerListing) -> list[tuple[Any, ...]]:
    shown = [{**layer, "shape": tuple(layer["shape"])} for layer in found.to_json()["layers"]]
    return [tuple(layer[column] for column in COLUMNS[:-1]) for layer in shown]


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(config_file, "CONFIG_PATH", tmp_path / "no-sparkd.yaml")


def test_alike_tensors_are_one_row() -> None:
    found = layers_of(checkpoint_of(DENSE), QuantizationRecipe.parse({"format": "nvfp4", "layers": {"layers.1.mlp": "fp8"}}))

    count, norm, half = 256 * 384, 384 * 2, 256 * 384 * 2
    assert rows(found) == [
        ("model.embed_tokens.weight", "embedding", 1, (512, 384), "BF16", 512 * 768, None, 512 * 768),
        ("model.layers.*.self_attn.o_proj.weight", "attention", 2, W, "BF16", 2 * half, "nvfp4", 2 * (count // 2 + count // 16 + 4)),
        ("model.layers.*.input_layernorm.weight", "norm", 2, (384,), "BF16", 2 * norm, None, 2 * norm),
        ("model.layers.*.mlp.down_proj.weight", "mlp", 1, (384, 256), "BF16", half, "nvfp4", count // 2 + count // 16 + 4),
        ("model.layers.*.mlp.down_proj.weight", "mlp", 1, (384, 256), "BF16", half, "fp8", count + 4 * 384),
    ]
    assert found.bytes == checkpoint_of(DENSE).total_bytes
    assert found.result_bytes == sum(row[-1] for row in rows(found))
    assert found.quantize == {"format": "nvfp4", "layers": [{"match": "layers.1.mlp", "format": "fp8", "priority": 0}]}


def test_experts_are_one_row_and_packed_ones_count_as_many() -> None:
    single = layered(2, {f"mlp.experts.{e}.{name}_proj.weight": W for e in range(3) for name in ("gate", "up")})
    assert [row[:3] for row in rows(layers_of(checkpoint_of(single), QuantizationRecipe.parse("mxfp4")))] == [
        ("model.layers.*.mlp.experts.*.gate_proj.weight", "expert", 6),
        ("model.layers.*.mlp.experts.*.up_proj.weight", "expert", 6),
    ]
    # The model's width tells which way round the blocks stand: rows, and so the scales of a row, are 2 x 256 and 384.
    gate, down = 2 * 3 * (256 * 384 + 4 * 256), 3 * (384 * 256 + 4 * 384)
    for config in ({"hidden_size": 384}, {"text_config": {"hidden_size": 384}}):
        for shapes in (((3, 512, 384), (3, 384, 256)), ((3, 384, 512), (3, 256, 384))):
            packed = layered(1, dict(zip(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), shapes, strict=True)))
            assert [row[-1] for row in rows(layers_of(checkpoint_of(packed, config), QuantizationRecipe.parse("fp8")))] == [gate, down]


def test_the_scales_of_an_fp8_source_go_with_its_weights() -> None:
    tensors = layered(2, {"self_attn.o_proj.weight": W}, dtype="F8_E4M3") | layered(
        2, {"self_attn.o_proj.weight_scale_inv": (2, 3)}, dtype="F32"
    )
    source = checkpoint_of(tensors, quantization=SourceQuantization("fp8_block"))
    found, plain = layers_of(source, QuantizationRecipe.parse("int4")), layers_of(source, QuantizationRecipe.parse("bf16"))

    assert [(row[0].rpartition(".")[2], row[-2], row[-1]) for row in rows(found)] == [
        ("weight", "int4-g128", 2 * (256 * 192 + 2 * 256 * 3 + 16)),
        ("weight_scale_inv", "int4-g128", 0),
    ]
    assert found.quantization == "fp8_block"
    assert plain.result_bytes == plain.bytes == source.total_bytes


def test_columns_that_do_not_divide_are_told() -> None:
    made = checkpoint_of(layered(3, {"mlp.down_proj.weight": (64, 576), "mlp.up_proj.weight": (64, 512)}))
    found = layers_of(made, QuantizationRecipe.parse("int4"))

    (note,) = found.notes
    assert lacking(note, "int4-g128", "128 columns", "576", "3 weights", "int4-g64", "int4-g32") == []
    # Nothing becomes of them, nor of all together.
    assert [(layer.format, layer.refused, layer.result_bytes is None) for layer in found.layers] == [
        (None, "int4-g128", True), ("int4-g128", None, False)
    ]  # fmt: skip
    assert found.result_bytes is None and layers_of(made, QuantizationRecipe.parse("int4-g64")).result_bytes is not None


# Where MODEL lies


def nobody(_name: str) -> dict[str, Any]:
    raise Unavailable("No sparkd answers.")


def daemon_with(alias: str, **resolved: Any) -> Callable[[str], dict[str, Any]]:
    def settings(name: str) -> dict[str, Any]:
        if name != alias:
            raise UnknownModel(name, [alias])
        return {"resolved": {"revision": None, "quantize": None, "dtype": None, **resolved}}

    return settings


def find(
    model: str, quantize: str | None = None, config: Path | None = None, environ: dict[str, str] | None = None, ask: Any = nobody
) -> LayerListing:
    return listing_of(model, quantize, config, environ or {}, ask)


def formats(found: LayerListing) -> set[str | None]:
    return {layer.format for layer in found.layers if layer.kind in ("attention", "mlp")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", {"model.safetensors": DENSE})


def test_a_folder_needs_nothing_else(model: Path) -> None:
    assert find(str(model)).folder == str(model)
    assert formats(find(str(model))) == {None}
    assert formats(find(str(model), "nvfp4")) == {"nvfp4"}
    assert formats(find(str(model), "{format: int4, group_size: 64, layers: {o_proj: fp8}}")) == {"int4-g64", "fp8"}
    assert formats(find(str(model), '{"layers": [{"match": "o_proj", "format": "fp8"}]}')) == {"fp8", None}


def test_best_needs_a_size_and_is_then_a_mix_of_it(model: Path, tmp_path: Path) -> None:
    size = 0.8 * sum(layer.bytes for layer in find(str(model)).layers) / (1 << 30)
    config = tmp_path / "sparkd.yaml"
    config.write_text(f"models:\n  small: {{model: {model}, quantize: {{format: best, gib: {size}}}}}\n")
    for found in (find(str(model), f"{{format: best, gib: {size}}}"), find("small", config=config)):
        assert sum(layer.result_bytes or 0 for layer in found.layers) <= size * (1 << 30)
        assert formats(found) != {None}
    with pytest.raises(ConfigError, match="gib"):
        find(str(model), "best")
    with pytest.raises(ConfigError, match="gib"):
        find(str(model), "{format: best, gib: 1.0e-6}")


def test_a_configured_name_brings_its_recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "sparkd.yaml"
    text = f"models:\n  small:\n    model: {model}\n    aliases: [tiny]\n    quantize: {{format: nvfp4, layers: {{o_proj: fp8}}}}\n"
    config.write_text(text + f"  plain:\n    model: {model}\n")

    assert formats(find("small", config=config)) == formats(find("tiny", config=config)) == {"nvfp4", "fp8"}
    assert formats(find("small", "int4", config=config)) == {"int4-g128"}
    assert formats(find("plain", config=config)) == {None}
    assert formats(find("small", environ={"SPARKD_CONFIG": str(config)})) == {"nvfp4", "fp8"}
    monkeypatch.setattr(config_file, "CONFIG_PATH", config)
    assert formats(find("small")) == {"nvfp4", "fp8"}
    with pytest.raises(ConfigError, match=rf"\bother in {config}\b"):
        find("other")


def test_a_name_that_only_the_daemon_knows(model: Path) -> None:
    plain, quantized = daemon_with("b", model=str(model)), daemon_with("b", model=str(model), quantize={"format": "nvfp4"})

    assert find("b", ask=plain).folder == str(model)
    assert formats(find("b", ask=plain)) == {None}
    assert formats(find("b", ask=quantized)) == {"nvfp4"}
    assert formats(find("b", "fp8", ask=quantized)) == {"fp8"}
    with pytest.raises(ConfigError, match=r"called c\b"):
        find("c", ask=plain)


def test_a_system_file_that_this_user_may_not_read_is_left_to_the_daemon(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sparkd.yaml").write_text(f"models: {{small: {{model: {model}, quantize: nvfp4}}}}\n")
    monkeypatch.setattr(config_file, "CONFIG_PATH", tmp_path / "sparkd.yaml")
    assert formats(find("small")) == {"nvfp4"}
    # As for another user; tests may run as root, who reads anything.
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path / "sparkd.yaml"))
    assert formats(find("small", ask=daemon_with("small", model=str(model), quantize={"format": "fp8"}))) == {"fp8"}
    with pytest.raises(ConfigError, match=r"small .*sparkd\.yaml"):
        find("small")


def test_a_hub_id_is_looked_for_in_the_local_cache(tmp_path: Path) -> None:
    home = tmp_path / "hub" / "models--owner--name"
    folder = write_folder(home / "snapshots" / "abc", {"model.safetensors": DENSE})
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")

    assert find("owner/name", environ={"HF_HUB_CACHE": str(tmp_path / "hub")}).folder == str(folder)
    assert snapshot_of("owner/name", None, {"HF_HOME": str(tmp_path)}) == folder
    assert snapshot_of("owner/name", "abc", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == folder
    assert snapshot_of("owner/name", "v2", {"HF_HUB_CACHE": str(tmp_path / "hub")}) is None
    assert snapshot_of("owner/other", None, {"XDG_CACHE_HOME": str(tmp_path)}) is None


# The command line


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = exit_code(["ls", "--url", f"127.0.0.1:{free_port()}", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, ["--layers", str(model), "--quantize", "nvfp4", "--json"])

    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["quantize"] == {"format": "nvfp4", "layers": []}
    assert set(told["layers"][0]) == set(COLUMNS) and told["count"] == 7
    assert run(capsys, ["--layers", str(model)])[1].startswith("NAME")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layers", "owner/none"], ["owner/none", "HF_HUB_OFFLINE"]),
        (["--layers", "MODEL", "--quantize", "{formt: nvfp4}"], ["'formt'"]),
        (["--quantize", "nvfp4"], ["--layers MODEL"]),
        (["--layers", "MODEL", "--config", "/none.yaml"], []),
        (["--layers", "name", "--config", "/none.yaml"], ["/none.yaml"]),
    ],
)
def test_what_goes_wrong_is_one_sentence(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: list[str]) -> None:
    code, out, err = run(capsys, [str(model) if argument == "MODEL" else argument for argument in arguments])

    assert code == (2 if told else 0)
    assert lacking(err, *told) == [] and err.count("\n") == (1 if told else 0)
    assert bool(out) == (not told)
