"""A folder's checkpoint: which files count, what is missing or doubled, and how it is quantized already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import INDEX, MAX_LACKING, lacking_weights, read_checkpoint
from sparkd.checkpoint.quantization import SourceQuantization, source_quantization
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted
from tests.support.checkpoints import Shape, checkpoint_of, write_folder, write_shard
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S

ROOT = Path(__file__).resolve().parents[3]
A = {"model.layers.0.mlp.up_proj.weight": ("BF16", (4, 4)), "model.norm.weight": ("F32", (4,))}
B = {"lm_head.weight": ("BF16", (8, 4))}
SECOND = "model-00002-of-00002.safetensors"
SHARDS = {"model-00001-of-00002.safetensors": A, SECOND: B}


def test_a_checkpoint_of_one_file(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": A}, {"model_type": "llama", "hidden_size": 4})
    found = read_checkpoint(tmp_path)

    assert found.folder == str(tmp_path)
    assert found.config == {"model_type": "llama", "hidden_size": 4}
    assert list(found.tensors) == list(A)
    assert found.total_bytes == 4 * 4 * 2 + 4 * 4
    assert found.quantization is None
    assert [shard.path for shard in found.shards] == [str(tmp_path / "model.safetensors")]


@pytest.mark.parametrize("index", [True, False])
def test_tensors_come_shard_by_shard(tmp_path: Path, index: bool) -> None:
    found = read_checkpoint(write_folder(tmp_path, dict(reversed(SHARDS.items())), index=index))

    assert list(found.tensors) == [*A, *B]
    assert [Path(shard.path).name for shard in found.shards] == sorted(SHARDS)


def test_files_that_the_index_does_not_name_do_not_count(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS, index=True)
    write_shard(tmp_path / "model-00003-of-00002.safetensors", {"stray": ("BF16", (1,))})
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")

    assert "stray" not in read_checkpoint(tmp_path).tensors


def test_mistrals_second_copy_does_not_count(tmp_path: Path) -> None:
    write_folder(tmp_path, {"consolidated-00001.safetensors": {"wq": ("BF16", (1,))}, "model-1.safetensors": A})
    assert list(read_checkpoint(tmp_path).tensors) == list(A)

    (tmp_path / "model-1.safetensors").unlink()
    assert list(read_checkpoint(tmp_path).tensors) == ["wq"]


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs = write_folder(tmp_path / "blobs", SHARDS, index=True)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)

    found = read_checkpoint(snapshot)
    assert list(found.tensors) == [*A, *B]
    assert all(tensor.path.startswith(str(snapshot)) for tensor in found.tensors.values())


def _index(folder: Path, value: Any) -> None:
    (folder / INDEX).write_text(value if isinstance(value, str) else json.dumps(value))


def _remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _dangling(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").symlink_to(folder / "blobs" / "123")


@pytest.mark.parametrize(
    ("break_it", "file", "tensor", "facts"),
    [
        (_remove("config.json"), "", None, ["config.json"]),
        (_remove(*SHARDS, INDEX), "", None, ["no weights"]),
        (lambda f: [_remove(*SHARDS, INDEX)(f), (f / "pytorch_model.bin").touch(), (f / "m.gguf").touch()], "", None, ["*.bin", "*.gguf"]),
        (_remove(SECOND), SECOND, None, ["not there"]),
        (_dangling, SECOND, None, ["links to"]),
        (lambda f: os.truncate(f / SECOND, 150), SECOND, "lm_head.weight", ["cut off"]),
        (lambda f: (f / "config.json").write_text("{"), "config.json", None, ["JSON", "line 1"]),
        (lambda f: (f / "config.json").write_text('{"a":' * 50_000), "config.json", None, ["nested"]),
        (lambda f: os.truncate(f / "config.json", 33 << 20), "config.json", None, ["32 MiB"]),
        (lambda f: (f / "hf_quant_config.json").write_text("3"), "hf_quant_config.json", None, ["JSON object"]),
        (lambda f: _index(f, {}), INDEX, None, ["weight_map"]),
        (lambda f: _index(f, {"weight_map": {"t": "../x.safetensors"}}), INDEX, "t", ["weight_map", "../x.safetensors"]),
        (lambda f: _index(f, {"weight_map": {"t": "/etc/passwd"}}), INDEX, "t", ["weight_map", "/etc/passwd"]),
        (lambda f: _index(f, {"weight_map": {"t": "a\0b"}}), INDEX, "t", ["weight_map", "'a\\x00b'"]),
        (lambda f: [_remove(INDEX)(f), write_shard(f / "other.safetensors", B)], "other.safetensors", "lm_head.weight", [SECOND]),
        (lambda f: [_remove(INDEX, *SHARDS)(f), write_shard(f / "model.safetensors", {})], "", None, ["no tensor"]),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_file_its_tensor_and_a_cure(
    tmp_path: Path, break_it: Callable[[Path], object], file: str, tensor: str | None, facts: list[str]
) -> None:
    write_folder(tmp_path, SHARDS, index=True)
    break_it(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)

    error = caught.value
    assert (error.file, error.tensor, lacking(error.problem, *facts)) == (str(tmp_path / file), tensor, [])
    assert error.message.startswith(str(tmp_path)) and error.cure
    assert "\n" not in error.message


@pytest.mark.parametrize(("folder", "told"), [("none", "No such file"), ("file", "Not a directory")])
def test_what_is_no_folder(tmp_path: Path, folder: str, told: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=told):
        read_checkpoint(f"{tmp_path}/{folder}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
quant_keys = st.sampled_from(
    ["quant_method", "quant_algo", "quantization", "weight_block_size", "config_groups", "format", "group_0", "weights", "strategy", "type"]
)
quant_words = st.sampled_from(
    ["fp8", "modelopt", "compressed-tensors", "float-quantized", "FP8", "NVFP4", "float", "block", "awq", 8, [128, 128]]
)
quant_values = st.recursive(quant_words | json_values, lambda inner: st.dictionaries(quant_keys, inner, max_size=4), max_leaves=10)


@settings(max_examples=60, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(["quantization_config", "compression_config", "text_config"]), quant_values, max_size=2),
    index=json_values | st.dictionaries(st.just("weight_map"), json_values),
    extra=quant_values,
)
def test_any_json_in_the_other_files(tmp_path_factory: pytest.TempPathFactory, config: Any, index: Any, extra: Any) -> None:
    folder = write_folder(tmp_path_factory.getbasetemp() / "any", {"model.safetensors": A}, config)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "hf_quant_config.json").write_text(json.dumps(extra))
    for file in (None, INDEX, "hf_quant_config.json"):
        if file is not None:
            (folder / file).unlink()
        try:
            read_checkpoint(folder)
        except CheckpointError as error:
            assert error.message.startswith(str(folder))
        else:
            assert file is not None or isinstance(index, dict)


# How it is quantized already

FP8 = "F8_E4M3"


def fp8(scale: tuple[str, Shape], n: int = 256, k: int = 384, suffix: str = "weight_scale") -> dict[str, tuple[str, Shape]]:
    return {"model.layers.0.mlp.up_proj.weight": (FP8, (n, k)), f"model.layers.0.mlp.up_proj.{suffix}": scale}


def compressed(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {f"group_{i}": g for i, g in enumerate(groups)}}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **more}}


INTEGERS = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}


@pytest.mark.parametrize(
    ("config", "tensors", "method"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(("BF16", (2, 3)), suffix="weight_scale_inv"), "fp8_block"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, {}, "other"),
        ({"quant_method": "fp8"}, fp8(("F32", (1,))), "fp8_tensor"),
        ({"quant_method": "fbgemm_fp8"}, fp8(("F32", (256, 1))), "fp8_channel"),
        ({"quant_method": "fp8"}, fp8(("F32", (7, 7))), "other"),
        (compressed("float-quantized", floats("channel")), {}, "fp8_channel"),
        (compressed("float-quantized", floats("tensor")), {}, "fp8_tensor"),
        (compressed("float-quantized", floats("block", block_structure=[128, 128])), {}, "fp8_block"),
        (compressed("float-quantized", floats("channel"), floats("tensor")), {}, "compressed-tensors"),
        (compressed("nvfp4-pack-quantized", {"weights": {"num_bits": 4}}), {}, "nvfp4"),
        (compressed("nvfp4-pack-quantized", {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 4}}), {}, "nvfp4-a4"),
        (compressed("mxfp4-pack-quantized", {"weights": {"num_bits": 4}}), {}, "mxfp4"),
        (compressed("pack-quantized", INTEGERS), {}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8(("F32", ())), "fp8_tensor"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8(("F32", (2, 3))), "fp8_block"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, {}, "modelopt_mixed"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, {}, "nvfp4"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, {}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, {}, "awq"),
        ({"something": 1}, {}, "other"),
    ],
)
def test_what_the_configuration_says(config: dict[str, Any], tensors: dict[str, tuple[str, Shape]], method: str) -> None:
    found = source_quantization({"quantization_config": config}, None, checkpoint_of(tensors).tensors)

    assert found is not None
    assert (found.method, found.details) == (method, config)
    assert found.requantizable == method.startswith("fp8_")


@pytest.mark.parametrize(
    ("config", "modelopt", "method"),
    [
        ({"compression_config": compressed("nvfp4-pack-quantized", {})}, None, "nvfp4"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, None, "awq"),
        ({}, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "gptq"}}, {"quantization": {"quant_algo": "FP8"}}, "gptq"),
        ({"quantization_config": None}, None, None),
    ],
)
def test_where_it_may_be_said(config: dict[str, Any], modelopt: dict[str, Any] | None, method: str | None) -> None:
    found = source_quantization(config, modelopt, checkpoint_of(A).tensors)

    assert (found.method if found else None) == method


FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    ("config", "modelopt", "kv_dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FP8_CACHE}, None, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, None, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, None, "auto"),
        ({**compressed("nvfp4-pack-quantized", {}), "kv_cache_scheme": FP8_CACHE}, None, "fp8"),
        ({**compressed("nvfp4-pack-quantized", {}), "kv_cache_scheme": None}, None, "auto"),
        (None, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "fp8"),
    ],
)
def test_which_cache_a_checkpoint_asks_for(config: dict[str, Any] | None, modelopt: dict[str, Any] | None, kv_dtype: str) -> None:
    found = source_quantization({"quantization_config": config}, modelopt, checkpoint_of(A).tensors)

    assert found is not None and found.kv_dtype == kv_dtype


def test_fp8_that_nothing_speaks_of_is_told_by_its_scales() -> None:
    scaled = checkpoint_of(fp8(("F32", (2, 3)), suffix="weight_scale_inv"))
    bare = checkpoint_of({"model.layers.0.mlp.up_proj.weight": (FP8, (64, 64))})

    assert source_quantization({}, None, scaled.tensors) == SourceQuantization("fp8_block")
    assert source_quantization({}, None, bare.tensors) is None


def test_reading_needs_the_standard_library_only() -> None:
    code = "import sparkd.checkpoint, workers.quantization.recipe, sys, json; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"], capture_output=True, timeout=HUNG_S
    )

    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not {name for name in loaded if name not in sys.stdlib_module_names} - {"sparkd", "workers", "__main__", "__mp_main__"}


@pytest.mark.parametrize(("constant", "layout"), [("NaN", "plain"), ("-Infinity", "parsed")])
def test_numbers_that_python_writes_are_read_in_a_publishers_json(tmp_path: Path, constant: str, layout: str) -> None:
    write_folder(tmp_path, SHARDS, index=True)
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "time_step_limit": [0.0, {constant}]}}')
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    escape = {"plain": "", "parsed": "\\u0041"}[layout]  # an escape anywhere: the index is not split at its quotation marks
    (tmp_path / INDEX).write_text(f'{{"metadata": {{"note": "{escape}", "loss": {constant}}}, "weight_map": {json.dumps(index)}}}')
    (tmp_path / "hf_quant_config.json").write_text(f'{{"producer": {constant}}}')

    found = read_checkpoint(tmp_path)

    assert str(found.config["time_step_limit"][1]) == str(float(constant))
    assert list(found.tensors) == [*A, *B]


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["model-00002-of-00003.safetensors"], ["model-00001-of-00003.safetensors", "1 more"]),
        (["a-00001-of-00001.safetensors", "b-00001-of-00002.safetensors"], ["b-00002-of-00002.safetensors"]),
        (["p-00001-of-99999.safetensors"], ["p-00002-of-99999.safetensors"]),
    ],
)
def test_half_a_download_without_an_index_is_no_model(tmp_path: Path, files: list[str], missing: list[str]) -> None:
    write_folder(tmp_path, {name: {f"{name}.weight": ("BF16", (4, 4))} for name in files})

    with pytest.raises(CheckpointIncomplete) as caught:
        read_checkpoint(tmp_path)

    assert all(name in caught.value.message for name in missing)
    assert caught.value.file == str(tmp_path)


def test_names_that_promise_very_many_files_make_no_list_of_them() -> None:
    names = [f"{name}-00001-of-99999.safetensors" for name in range(100)]

    assert len(lacking_weights(names, lambda _: b"")) <= len(names) + MAX_LACKING


@pytest.mark.parametrize(
    ("others", "kind", "named"),
    [
        ([], CheckpointIncomplete, "Download"),
        (["q4.gguf"], CheckpointUncounted, "q4.gguf"),
    ],
)
def test_a_folder_without_a_configuration_is_told_what_may_be_meant(
    tmp_path: Path, others: list[str], kind: type[CheckpointError], named: str
) -> None:
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)

    assert type(caught.value) is kind
    assert named in (caught.value.cure or "") + caught.value.problem
    assert f"{tmp_path}." not in f"{caught.value.cure}.", "who gave the folder is not told to give it"
