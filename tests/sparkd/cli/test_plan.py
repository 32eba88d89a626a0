"""`sparkd plan` as it is typed: a real folder, no daemon, no GPU; what it prints, what it answers as JSON, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.config.config import load_config
from tests.sparkd.vllm.ask.test_model import Engine, answer
from tests.support.checkpoints import mixture, write
from tests.support.daemon_process import ROOT
from tests.support.facts import lacking
from tests.support.published_tensors import tensors_of
from workers.kv.settings import VARIABLE
from workers.quantization.recipe import QuantizationRecipe

PARTS = {"weights", "kv", "peak", "graphs", "context", "processes"}


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKD_STATE_DIR", str(tmp_path / "state"))


def model(folder: Path, **more: Any) -> Path:
    config = mixture(**more)
    return write(folder, config, tensors_of(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "tiny-moe", max_position_embeddings=4096)


def planned(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    assert exit_code(["--json", "plan", "--quick", *map(str, argv)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: object, columns: int = 200, code: int = 0) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert exit_code(["plan", "--quick", *map(str, argv)]) == code
    return capsys.readouterr().out


def test_the_entry_is_one_that_sparkd_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--quantize", "nvfp4", "--seqs", "4", "--margin", "2.5", "--kv-dtype", "fp8", "--batch", "2048")
    out = drawn(capsys, monkeypatch, folder, *options)
    file = tmp_path / "sparkd.yaml"
    file.write_text(entry_of(out))
    spec = load_config(file, environ={}).models["tiny-moe"]

    assert (spec.model, spec.max_model_len, spec.max_num_batched_tokens, spec.max_num_seqs) == (str(folder), 4096, 2048, 4)
    assert (spec.kv_cache, spec.kv_margin_gib, spec.kv_cache_dtype) == ({"sequences": 4}, 2.5, "fp8")
    assert spec.quantize == QuantizationRecipe.parse("nvfp4")
    flags = spec.vllm_flags()
    assert all(re.search(rf"{flag}(?: |$)", out) for flag in flags if flag.startswith("--"))
    assert lacking(out, "4 requests") == []


def test_a_number_of_requests_that_is_asked_for_is_in_the_entry_also_where_it_is_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the entry's cache would be all that is left, and not the one that was planned."""
    choice = planned(capsys, folder, "--seqs", "1")["choice"]
    assert choice["config"]["kv_cache"] == {"sequences": 1}
    assert json.loads(choice["ranks"][0]["environment"][VARIABLE])["sequences"] == 1
    choice = planned(capsys, folder)["choice"]
    assert "kv_cache" not in choice["config"] and "sequences" not in json.loads(choice["ranks"][0]["environment"][VARIABLE])


def test_json_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, folder, "--nodes", "2", "--ctx", "2048", "--seqs", "3", "--quantize", "int4-g32")

    assert found["asked"] == {"nodes": 2, "requests": 3, "max_model_len": 2048, "speculative": None}
    assert {(one["tensor_parallel"], one["pipeline_parallel"]) for one in found["options"]} == {(1, 1), (2, 1), (1, 2)}
    for option in found["options"]:
        parts = option["footprint"]
        assert option["fits"] and option["reason"] is None and option["format"] == "int4-g32" and option["max_model_len"] == 2048
        assert sum(parts[name] for name in PARTS) == parts["total"]
        assert (
            parts["free"] == parts["memory"] - parts["system"] - parts["margin"] - parts["total"] - parts["upper"]
            and parts["withheld"] == 0
        )
        assert sum(parts["by_class"].values()) <= parts["weights"]
        assert parts["kv_bytes_per_request"] == parts["kv_bytes_per_token"] * 2048
    choice = found["choice"]
    assert {key: choice[key] for key in found["options"][0]} == found["options"][0]
    assert choice["config"]["quantize"] == "int4-g32" and len(choice["ranks"]) == choice["nodes"]
    assert choice["reserved_gib"] == -(-(choice["footprint"]["total"] + choice["footprint"]["upper"]) // (1 << 30))


def test_two_nodes_have_two_bars_and_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that one of them does not hold."""
    file = tmp_path / "linked.yaml"
    file.write_text(f"memory_bytes: {15 * 2**29}\nsystem_bytes: 0\n")
    folder = model(tmp_path / "tiny-moe", num_hidden_layers=48, num_experts=16, hidden_size=1024, moe_intermediate_size=1024)
    out = drawn(capsys, monkeypatch, folder, "--nodes", "2", "--hardware", file, "--quantize", "bf16", "--margin", "0", "--ctx", "1024")

    assert re.search(r"^on 2 x linked with", out, re.MULTILINE)
    assert len(re.findall(r"^node [01]  S?", out, re.MULTILINE)) == 2
    commands = re.findall(
        r"^# node (\d)\n.*--tensor-parallel-size 2 --nnodes 2 --node-rank (\d) --master-addr HEAD.*?( --headless)? --max", out, re.MULTILINE
    )
    assert [(node, rank, bool(headless)) for node, rank, headless in commands] == [("0", "0", False), ("1", "1", True)]
    assert "    tensor_parallel: 2\n" in out


def test_nothing_fits(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(f"memory_bytes: {2**30}\nsystem_bytes: 0\n")
    out = drawn(capsys, monkeypatch, folder, "--hardware", small, code=4)

    assert "In sparkd.yaml" not in out
    assert exit_code(["plan", "--quick", "--json", str(folder), "--hardware", str(small)]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] is None and all(one["reason"] for one in found["options"])
    assert found["refusal"]["cause"] == "memory"
    assert exit_code(["plan", "--quick", "--json", str(folder), "--ctx", "5000"]) == 4
    assert json.loads(capsys.readouterr().out)["refusal"]["cause"] != "memory"


def entry_of(out: str) -> str:
    """The lines for sparkd.yaml that a plan shows."""
    shown = re.search(r"^models:\n(?:  .*\n)+", out, re.MULTILINE)
    assert shown is not None, out
    return shown[0]


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"tensor_parallel": 3}, "split"),
        ({"quantize": "int4-g128", "model": "narrow"}, "format"),
        ({"kv_cache": {"bytes": "1MiB"}}, "cache"),
        ({"memory_gib": 1}, "memory"),
    ],
)
def test_a_refusal_names_its_cause(
    keys: dict[str, Any], cause: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = model(tmp_path / "narrow", hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"models": {"m": {"model": str(folder), **keys, **({"model": str(narrow)} if "model" in keys else {})}}}))

    assert exit_code(["plan", "--quick", "--json", "m", "--config", str(file)]) == 4
    assert json.loads(capsys.readouterr().out)["refusal"]["cause"] == cause


def test_a_name_that_would_steer_the_terminal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path / "a\x1b[31m[red]b")

    assert exit_code(["plan", "--quick", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and err.count("\n") == 1


def test_what_a_configuration_holds_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = drawn(capsys, monkeypatch, model(tmp_path / "m", architectures=["\x1b[31m[red]"]))

    assert "\x1b" not in out and "m: [31m[red], 4 layers" in out


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["MODEL", "--seqs", "1k"], "--seqs 1k"),
        (["owner/model"], "owner/model"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    argv: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert exit_code(["plan", "--quick", *(str(folder) if word == "MODEL" else word for word in argv)]) == 2

    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert name in err


def test_a_plan_loads_no_engine(folder: Path) -> None:
    code = "import sys, sparkd.__main__ as m; m.exit_code(['plan', '--quick', '--json', sys.argv[1]]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True)

    heavy = {"torch", "vllm", "numpy", "transformers", "ray", "fastapi", "huggingface_hub"}
    assert heavy.isdisjoint(done.stderr.split())
    assert json.loads(done.stdout)["choice"]["format"] == "as stored"


def test_the_command_names_the_folders_that_a_start_here_would_use(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, runtime = tmp_path / "state", str(tmp_path / "venv/bin/python")
    (tmp_path / "sparkd.yaml").write_text(f"state_dir: {state}\nengine: {{runtime: {runtime}}}\nmodels: {{}}\n")
    found = planned(capsys, folder, "--quantize", "fp8", "--config", tmp_path / "sparkd.yaml")
    (rank,) = found["choice"]["ranks"]
    loader = json.loads(rank["command"][rank["command"].index("--model-loader-extra-config") + 1])
    profiles = json.loads(rank["environment"][VARIABLE])["profiles"]
    assert (loader["cache_dir"], profiles) == (f"{state}/quantized", f"{state}/kv-profiles")
    assert rank["command"][0] == runtime and found["vllm"]["runtime"] == runtime


def test_a_terminal_shows_the_guess_until_vllm_has_spoken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    engine.says(spark=[{"question": 0, "answer": answer()}])
    (tmp_path / "sparkd.yaml").write_text(f"state_dir: {tmp_path}\nengine: {{runtime: {engine.python}}}\nmodels: {{}}\n")
    argv = ["plan", str(folder), "--quantize", "bf16", "--config", str(tmp_path / "sparkd.yaml")]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert exit_code(argv) == 0
    guess, erased, final = re.split(r"(\x1b\[\d+A\x1b\[J)", capsys.readouterr().out)
    assert "was not asked about it" in guess and "answered" in final and "In sparkd.yaml" not in guess
    assert erased.startswith(f"\x1b[{guess.count(chr(10))}A")
    # The answer is kept: nothing is drawn twice.
    assert exit_code(argv) == 0
    assert "\x1b[J" not in capsys.readouterr().out


def test_a_plan_says_whose_vllm_it_asked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--quick reads kept answers alone."""
    engine = Engine(tmp_path)
    (tmp_path / "sparkd.yaml").write_text(f"state_dir: {tmp_path}\nengine: {{runtime: {engine.python}}}\nmodels: {{}}\n")
    options = folder, "--quantize", "bf16", "--config", tmp_path / "sparkd.yaml"
    assert planned(capsys, *options)["vllm"] == {"runtime": str(engine.python), "version": "0.32.0", "answered": False, "unanswered": 1}
    engine.says(spark=[{"question": 0, "answer": answer()}])
    assert exit_code(["--json", "plan", *map(str, options)]) == 0
    assert json.loads(capsys.readouterr().out)["vllm"]["answered"] is True
    assert planned(capsys, *options)["vllm"]["answered"] is True
    (tmp_path / "sparkd.yaml").write_text(f"engine: {{runtime: {tmp_path / 'none/bin/python'}}}\nmodels: {{}}\n")
    none = {"runtime": str(tmp_path / "none/bin/python"), "version": None, "answered": False, "unanswered": 0}
    assert planned(capsys, *options)["vllm"] == none
