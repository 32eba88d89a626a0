"""What is told of a model's flags before its engine starts, held against vLLM's own parser."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.requirement import said_to
from sparkd.cli.config_check import check
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import StartId
from sparkd.config.config import Config, parse_model
from sparkd.errors import RankError
from sparkd.inquiry import flag_table as vllm_table
from sparkd.inquiry.flag_table import flag_table, places, refused
from sparkd.recipes import admin_flags
from sparkd.vllm.arg_check import FlagTable, misfits, unspeculative
from tests.sparkd.vllm.test_installed import environment
from tests.support.accounts import needing

TAKEN = [
    "--max-model-len 8192",
    "--max_model_len 8192",
    "--max-model-len=8k",
    "--max-model-le 8192",
    "--max-num-seqs=8",
    "--max-num-seqs ' 8'",
    "--enforce-eager",
    "--no-enforce-eager",
    "--no_enforce_eager",
    "--no-enable-prefix-caching --seed 1",
    "-O3",
    "-O 3",
    "-O=2",
    "-cc.mode 3 --seed 1",
    "--compilation-config.mode 3",
    "--compilation_config.mode=3",
    "--compilation-conf.mode 3",
    "--hf-overrides.a.b --seed",
    "--compilation-config.cudagraph_capture_sizes+ 1,2,4",
    """--compilation-config '{"mode": 3}'""",
    """'--hf-overrides={"rope_theta": 1.5}'""",
    "--max-num-seqs --compilation-config.mode 3 8",
    "--gpu-memory-utilization .5",
    "--dtype bfloat16",
    "--kv-cache-dtype=fp8",
    "--quantization anything",
    "--load-format anything",
    "--seed -1",
    "--served-model-name a b c",
    "--chat-template '--odd=name b'",
    "--chat-template '--odd name'",
    "--lora-modules a=b c=d --seed 1",
    "--cudagraph-capture-sizes 1 2 4",
    "--limit-mm-per-prompt.image 2",
    "--moe-backend marlin",
    "--moe-backend MARLIN",
    "--mamba-ssu-algorithm None",
    "--spec-method mtp",
    "-q fp8 -asc 1 --seed 1",
    "-ep",
    "--max-model-len auto",
    "--max-model-len -1",
    "--max-model-len=1.5k",
    "--max-model-len ' 8K '",
    "--max-model-len 8_192",
    "--max-num-batched-tokens 2k",
    "--kv-cache-memory-bytes 1.5g",
    "--kv-cache-memory-bytes None",
    "--hf-overrides text",
    "--hf-overrides '[1'",
    "--hf-overrides.rope_scaling.rope_type yarn --hf-overrides.rope_scaling.factor 4.0",
    "--hf-overrides.text '{bad'",
    """--hf-overrides '{"a": NaN, "a": 1}'""",
    """--hf-overrides ' {"a": {"b": [1, 2.5e3]}} '""",
    "--speculative-config None",
    "--speculative-config ''",
    "--speculative-config 3",
    """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
    "--speculative-config.method ngram --speculative-config.num_speculative_tokens=3",
    """--kv-transfer-config '{"kv_connector_extra_config": {"cpu_bytes_to_use": 80m}}'""",
    """--compilation-config '{"mode": 3, "cudagraph_capture_sizes": [1, 2]}'""",
    """--compilation-config '{"mode": 3}' --compilation-config.backend inductor""",
    """--limit-mm-per-prompt '{"image": 1}'""",
    """--default-chat-template-kwargs '{"a": 1}'""",
    "--additional-config '{bad'",
]
REFUSED = {
    "-max-num-seqs 8": "-max-num-seqs: vLLM {} has no such flag. Did you mean --max-num-seqs?",
    "-x --seed 1": "-x: vLLM {} has no such flag. Remove it.",
    "--compilation-config 7": "--compilation-config: its value is no map of keys",
    "--moe-backend cutlas": "--moe-backend: vLLM {} does not take its value. Did you mean cutlass?",
    "--spec-method ngrm": "--spec-method: vLLM {} does not take its value. Did you mean ngram?",
    "--mamba-ssu-algorithm simpel": "--mamba-ssu-algorithm: vLLM {} does not take its value. Did you mean simple?",
    """--compilation-config '{"bakend": "eager"}'""": "--compilation-config: it has no key bakend. Did you mean backend?",
    """'--kv-transfer-config={"kv_conector": "x"}'""": "--kv-transfer-config: it has no key kv_conector. Did you mean kv_connector?",
    "--max-model-length 8192": "--max-model-length: vLLM {} has no such flag. Did you mean --max-model-len?",
    "--max_model_length=8192": "--max-model-length: vLLM {} has no such flag. Did you mean --max-model-len?",
    "--no-enforce-eagr": "--no-enforce-eagr: vLLM {} has no such flag. Did you mean --no-enforce-eager?",
    "--no-max-model-len 1": "--no-max-model-len: vLLM {} has no such flag. Did you mean --max-model-len?",
    "--compile-config.mode 3": "--compile-config: vLLM {} has no such flag. Did you mean --compilation-config?",
    "--compile-config.mode=3": "--compile-config: vLLM {} has no such flag. Did you mean --compilation-config?",
    """--hf-override-it '{"a": 1}'""": "--hf-override-it: vLLM {} has no such flag. Did you mean --hf-overrides?",
    """'--hf-override-it={"a": 1}'""": "--hf-override-it: vLLM {} has no such flag. Did you mean --hf-overrides?",
    """--enforce-eager --dtype=half '--hf-override-it={"a": 1}'""": "--hf-override-it: vLLM {} has no such flag. Did you mean",
    """--seed 1 '--hf-override-it={"a": 1}'""": "--hf-override-it: vLLM {} has no such flag. Did you mean --hf-overrides?",
    "--qqqq": "--qqqq: vLLM {} has no such flag. Remove it.",
    "--enable": "--enable: vLLM {} has --enable-",
    "--max-num-seqs eight": "--max-num-seqs: its value is no whole number. Give it one, or remove it.",
    "--max-num-seqs=8.5": "--max-num-seqs: its value is no whole number. Give it one, or remove it.",
    "--max-num-seqs": "--max-num-seqs: it needs a value. Give it one, or remove it.",
    "--max-num-seqs --enforce-eager": "--max-num-seqs: it needs a value. Give it one, or remove it.",
    "--gpu-memory-utilization most": "--gpu-memory-utilization: its value is no number. Give it one, or remove it.",
    "--dtype bfloat": "--dtype: vLLM {} does not take its value. Did you mean float?",
    "--dty bfloat": "--dtype: vLLM {} does not take its value. Did you mean float?",
    "--kv-cache-dtype=fp8_e4": "--kv-cache-dtype: vLLM {} does not take its value. Did you mean fp8_e4m3?",
    "--scheduling-policy zzzz": "--scheduling-policy: vLLM {} does not take its value. It takes ",
    "--max-model-len lots": "--max-model-len: its value is no whole number, nor one such as 8k or 8K. Give it one, or remove it.",
    "--max-model-len=8.5": "--max-model-len: its value is no whole number, nor one such as 8k or 8K.",
    "--max-model-len 1.5K": "--max-model-len: its value is no whole number, nor one such as 8k or 8K.",
    "--max-model-len 8kb": "--max-model-len: its value is no whole number, nor one such as 8k or 8K.",
    "--max-num-batched-tokens auto": "--max-num-batched-tokens: its value is no whole number, nor one such as 8k or 8K.",
    "--kv-cache-memory-bytes 2GiB": "--kv-cache-memory-bytes: its value is no whole number, nor one such as 8k or 8K.",
    "--hf-overrides '{bad}'": "--hf-overrides: its value is no JSON: expecting property name enclosed in double quotes at character 2.",
    """--hf-overrides="{'a': 1}\"""": "--hf-overrides: its value is no JSON: expecting property name enclosed in double quotes at",
    """--hf-over '{"a": 1,}'""": "--hf-overrides: its value is no JSON: ",
    """--speculative-config '{"method": "ngram"'""": "--speculative-config: its value is no JSON: expecting ',' delimiter at its end.",
    """--spec-config '{"method": "ngr'""": "--spec-config: vLLM {} has no such flag.",
    """--speculative-con '{"a": "ngr'""": "--speculative-config: its value is no JSON: unterminated string starting at character 7.",
    "--speculative-config ngram": "--speculative-config: its value is no JSON: expecting value at character 1.",
    """--compilation-config '{"mode": 3'""": "--compilation-config: its value is no JSON: expecting ',' delimiter at its end.",
    """--kv-transfer-config '{"a": 80q}'""": "--kv-transfer-config: its value is no JSON: expecting ',' delimiter at character 9.",
    """--limit-mm-per-prompt '{"image": 1'""": "--limit-mm-per-prompt: its value is no JSON: expecting ',' delimiter at its end.",
    "--default-chat-template-kwargs x": "--default-chat-template-kwargs: its value is no JSON: expecting value at character 1.",
    "--enforce-eager=true": "--enforce-eager: vLLM {} takes no value for it. Remove what follows the equals sign.",
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FlagTable:
    """Of the vLLM that is installed here, by its own parser."""
    found = flag_table(None, [tmp_path_factory.mktemp("tables")], ask=True)
    assert found is not None
    return found


def test_what_an_added_model_may_bring_takes_as_many_values_as_it_is_listed_with(table: FlagTable) -> None:
    for name in sorted(admin_flags.SWITCHES | admin_flags.VALUES | admin_flags.MAPPINGS | admin_flags.LISTS):
        takes = 0 if name in admin_flags.SWITCHES else None if name in admin_flags.LISTS else 1
        assert table.flags[name].takes == takes, name
        assert f"no-{name}" not in table.flags or takes == 0, name


PARSER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from workers.engine.flag_table import parser_here
parser = parser_here()
def error(message):
    raise ValueError(message)
parser.error = error
def said(line):
    try:
        parser.parse_args(line)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
json.dump([said(line) for line in json.load(sys.stdin)], out)
out.flush()
"""


def parsed(lines: list[list[str]]) -> list[str | None]:
    """What vLLM's parser says, null where it takes them; in a process of its own, as an engine is."""
    done = subprocess.run([sys.executable, "-c", PARSER], input=json.dumps(lines), capture_output=True, text=True, timeout=240, check=True)
    said: list[str | None] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def said(table: FlagTable) -> dict[tuple[str, ...], str | None]:
    """Every line below, every flag of vLLM's in wrong and shortened spellings, and with values, in one go."""
    lines = [shlex.split(line) for line in (*TAKEN, *REFUSED)]
    for flag in table.flags:
        if flag in ("help", "config", "no-help"):
            continue  # they print and end, or read a file
        lines += [
            [f"--{flag}"],
            [f"--{flag}=1"],
            [f"--{flag}", "zz"],
            [f"--{flag}", "{1"],
            [f"--{flag}", '{"a": 1,}'],
            [f"--{flag}", "1.5k"],
            [f"--{flag}", "-1"],
            [f"--{flag[:-2]}", "1"],
            [f"--{flag}x", "1"],
        ]
        lines += [[f"--{flag[1:]}"], [f"--{flag}.key", "1"], [f"--{flag.replace('-', '_')}=a b"], ["--seed", f"--{flag[:-1]}q=a b"]]
    answers = parsed([["m", *line] for line in lines])
    return {tuple(line): answer for line, answer in zip(lines, answers, strict=True)}


@pytest.mark.parametrize("line", TAKEN)
def test_a_form_that_vllm_takes_is_passed(line: str, table: FlagTable, said: dict[tuple[str, ...], str | None]) -> None:
    args = shlex.split(line)
    assert said[tuple(args)] is None
    assert list(misfits(args, {}, table)) == []


@pytest.mark.parametrize("line", REFUSED)
def test_what_vllm_refuses_is_told_before_it_starts(line: str, table: FlagTable, said: dict[tuple[str, ...], str | None]) -> None:
    args = shlex.split(line)
    assert said[tuple(args)] is not None
    (told,) = misfits(args, {}, table)
    assert told.startswith(REFUSED[line].format(table.version))


def refused_later(line: tuple[str, ...], table: FlagTable) -> bool:
    """Whether the parser takes any text for the flag, and the class that it fills does not."""
    written = next(word for word in line if word.startswith("--") and word != "--seed")
    flags = [table.flags[name] for name in table.named(written[2:].partition("=")[0].partition(".")[0].replace("_", "-"))]
    classes = table.named(written[2:].partition("=")[0].replace("_", "-")) & {
        "middleware", "scheduler-cls", "worker-extension-cls", "logits-processors",
    }  # fmt: skip
    return bool(classes) or any(flag.names or flag.values or flag.holds or flag.json == "class" for flag in flags)


@pytest.mark.parametrize(
    ("line", "nearest"),
    {
        "--attention-backend FLASH": "FLASH",
        "--attention-config.backend FLASHINFR": "FLASHINFER",
        "--mm-encoder-attn-backend torch": "FLASH_ATTN",
        "--mamba-backend tritn": "triton",
        "--tokenizer-mode mistrl": "mistral",
        "--optimization-level 7": "O0",
        "--compilation-config {\"cudagraph_mode\":\"FULLL\"}": "FULL",
        "--kernel-config.moe_backend marln": "marlin",
        "--structured-outputs-config {\"backend\":\"xgramar\"}": "xgrammar",
        "--kv-transfer-config {\"kv_role\":\"kv_bth\"}": "kv_both",
        "--speculative-config {\"attention_backend\":\"FLASHINFR\"}": "FLASHINFER",
        "--limit-mm-per-prompt 1": "map",
        "--default-chat-template-kwargs [1]": "map",
        "--allowed-origins 1": "list",
        "--lora-modules x": "NAME=PATH",
        "--lora-modules a=/b x": "NAME=PATH",
        "--lora-modules {\"name\":\"a\",\"pth\":\"/b\"}": "path?",
        "--lora-modules {\"name\":\"a\"}": "path is missing",
        "--middleware x": "MODULE.NAME",
        "--scheduler-cls Mine": "MODULE.NAME",
    }.items(),
)  # fmt: skip
def test_a_value_that_the_class_behind_a_flag_refuses_is_told_with_the_nearest(line: str, nearest: str, table: FlagTable) -> None:
    (told,) = misfits(line.split(" "), {}, table)
    assert told.startswith(line.partition(" ")[0].partition(".")[0]) and nearest in told, told


@pytest.mark.parametrize(
    "line",
    [
        "--attention-backend flash_attn", "--attention-backend auto", "--attention-config.backend=triton_attn",
        "--mamba-backend triton", "-O3", "--optimization-level O2", "--lora-modules a=/b c=/d", "--tokenizer-mode mistral",
        '--lora-modules {"name":"a","path":"/b","base_model_name":"c"}', "--middleware a.b.C", '--kernel-config {"moe_backend":"Marlin"}',
        '--compilation-config {"cudagraph_mode":"full_and_piecewise","mode":3}', '--allowed-origins ["*"]', "--logits-processors a.b:C",
    ],
)  # fmt: skip
def test_a_value_that_the_class_behind_a_flag_takes_is_passed(line: str, table: FlagTable) -> None:
    assert list(misfits(line.split(" "), {}, table)) == []


def test_no_flag_of_vllms_is_refused_that_its_parser_takes(table: FlagTable, said: dict[tuple[str, ...], str | None]) -> None:
    assert len(said) > 3000
    told = {line for line in said if list(misfits(line, {}, table))}
    later = {line for line in told if said[line] is None and line != ("--hf-overrides", "{1")}
    assert all(refused_later(line, table) for line in later), "its configuration refuses no other"
    assert len(told) > 1000


SPECULATES = """
import itertools, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm.config.speculative import SpeculativeConfig
def said(config):
    try:
        SpeculativeConfig(**config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
json.dump([said(config) for config in json.load(sys.stdin)], out)
out.flush()
"""


def test_a_draft_that_vllms_own_class_refuses_is_told_before_and_no_other(table: FlagTable) -> None:
    """Without the model: what that decides is not foretold."""
    methods = ("ngram", "ngram_gpu", "suffix", "mtp", "eagle", "medusa", "dflash", "draft_model", "custom_class", "qwen3_next_mtp", "new")
    parts: list[list[dict[str, Any]]] = [
        [{}, *({"method": one} for one in methods)],
        [{}, *({"num_speculative_tokens": one} for one in (None, 0, -1, 4, 4.0, 0.5, "4", True, [1], {}))],
        [{}, {"model": None}, {"model": "ngram"}],
        [{}, *({"prompt_lookup_min": least, "prompt_lookup_max": most} for least, most in ((2, 5), (5, 2), (1, 0)))],
        [{}, {"tensor_parallel_size": 2}],
    ]
    configs = [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*parts)]
    argv = [sys.executable, "-c", SPECULATES]
    done = subprocess.run(argv, input=json.dumps(configs), capture_output=True, text=True, timeout=240, check=True)
    refused = 0
    for config, answer in zip(configs, json.loads(done.stdout), strict=True):
        told = list(unspeculative(["--seed", "1", "--speculative-config", json.dumps(config)], {}, table.version))
        assert not told or answer is not None, (config, told)
        refused += len(told)
        if config.get("method") in (None, "ngram") and set(config) <= {"method", "num_speculative_tokens"}:
            assert bool(told) == (answer is not None), (config, told, answer)
    assert refused > len(configs) / 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("""--speculative-config '{"method": "ngram"}'""", "num_speculative_tokens is missing, and nothing else says how many tokens are"),
        ("""--speculative_config='{"method": "eagle3", "num-speculative-tokens": 3}'""", "method eagle3 needs a draft: name it in model"),
        ("""--speculative-config '{"num_speculative_tokens": 3}'""", "it names no method, and needs a draft: name it in model, or choose"),
        ("""--speculative-config '{"method": "ngram"}' --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""", None),
        ("""--speculative-config '{"method": "ngram"}' --speculative-config.num_speculative_tokens 3""", None),
        ("""--speculative-config '{"method": "ngram"}' --spec-tokens 3""", None),
        ("""--speculative-config '{"method": "mtp", "model": "/draft"}'""", None),
        ("""--speculative-config '{"method": "ngrm", "num_speculative_tokens": 3}'""", "this vLLM has no method ngrm. Did you mean ngram?"),
        ("""--speculative-config '{"method": "ngrm"}'""", "this vLLM has no method ngrm. Did you mean ngram?"),
        (
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "promt_lookup_max": 4}'""",
            "this vLLM has no key promt_lookup_max there. Did you mean prompt_lookup_max?",
        ),
        ("""--speculative-config '{"method": "dspark", "model": "o/d", "num-speculative-tokens": 3}'""", None),
        ("--speculative-config None", None),
        (f"--speculative-config {'[' * 5000}", None),
    ],
)
def test_a_draft_that_cannot_be_is_found_by_a_check_and_a_load(
    line: str, told: str | None, tmp_path: Path, table: FlagTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_table, "flag_table", lambda *_, **__: table)
    monkeypatch.setattr("sparkd.capacity.requirement.full_version_in", lambda _: table.version)
    file, args = tmp_path / "sparkd.yaml", shlex.split(line)
    file.write_text(json.dumps({"state_dir": str(tmp_path), "models": {"m": {"model": "o/m", "extra_args": args}}}))
    found = [problem.message for problem in check(file, {}) if "--speculative-config: " in problem.message]
    spec = parse_model("m", {"model": "o/m", "extra_args": args}, over_admin=False)
    refused = said_to(spec, Config(state_dir=tmp_path), table.version).refused
    assert (len(found), len(refused)) == ((0, 0) if told is None else (1, 1))
    if told is not None:
        assert refused[0].startswith(f"--speculative-config: {told}") and found[0].endswith(refused[0])


@pytest.mark.parametrize(
    ("version", "judged"), [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("dev", False)]
)
def test_a_release_whose_class_nobody_has_looked_at_is_not_foretold(version: str, judged: bool) -> None:
    args = ["--speculative-config", '{"method": "ngram"}']
    assert bool(list(unspeculative(args, {}, version))) == judged
    assert not list(unspeculative(args, {"VLLM_PLUGINS": "mine"}, version))


@pytest.mark.parametrize(
    "line", ["--enforce-eager 8", "--enable-prefix-caching true --seed 1", "--max-num-seqs 8 9", "--max-num-seqs=8 9", "--enforce-eager -5"]
)
def test_a_value_that_vllm_would_take_for_the_model_is_told(line: str, table: FlagTable) -> None:
    (told,) = misfits(shlex.split(line), {}, table)
    assert told.startswith(f"{line.partition(' ')[0].partition('=')[0]}: ") and "for the model" in told


def test_what_begins_as_an_override_and_is_no_json_is_refused_though_the_parser_takes_the_text(table: FlagTable) -> None:
    """The configuration does not (vllm/config/model.py, HfOverrides: a dictionary or a function)."""
    (told,) = misfits(["--hf-overrides", '{"rope_theta": 1'], {}, table)
    assert told.startswith("--hf-overrides: its value is no JSON: expecting ',' delimiter at its end. ")
    assert "--hf-overrides.KEY VALUE" in told


def test_another_parser_than_the_one_here_is_not_foretold(table: FlagTable) -> None:
    args = ["--flag-of-a-plugin", "1"]
    assert list(misfits(args, {"HF_HOME": "/x"}, table))
    for name in ("VLLM_PLUGINS", "PYTHONPATH"):
        assert not list(misfits(args, {name: "mine"}, table))


PLUGIN = """
from vllm.engine.arg_utils import EngineArgs

def register():
    add = EngineArgs.add_cli_args

    def add_ours(parser):
        parser.add_argument("--flag-of-a-plugin", type=int)
        return add(parser)

    EngineArgs.add_cli_args = staticmethod(add_ours)
"""


def test_what_a_plugin_adds_is_known(tmp_path: Path, table: FlagTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed after the table was made, too."""
    (tmp_path / "its_plugin.py").write_text(PLUGIN)
    (tmp_path / "its_plugin-1.0.dist-info").mkdir()
    (tmp_path / "its_plugin-1.0.dist-info" / "METADATA").write_text("Name: its-plugin\nVersion: 1.0\n")
    (tmp_path / "its_plugin-1.0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\nits = its_plugin:register\n")
    monkeypatch.setattr(vllm_table, "_tables", {})
    # As if it were installed: PYTHONPATH of this process reaches no child, as it reaches no engine.
    monkeypatch.setattr(vllm_table, "inherited_environment", lambda environ: {**environ, "PYTHONPATH": str(tmp_path)})
    found = flag_table(None, [tmp_path / "kept"], ask=True)
    assert found is not None
    assert found.flags.keys() - table.flags.keys() == {"flag-of-a-plugin"}
    assert list(misfits(["--flag-of-a-plugin", "1"], {}, found)) == []
    assert list(misfits(["--flag-of-a-plugin", "x"], {}, found)) != []


def test_a_value_is_never_shown(table: FlagTable) -> None:
    secret = "hf_secret"
    lines = (["--max-num-seqs", secret], ["--dtype", secret], [f"--hf-tokn={secret}"], ["--hf-tokn", secret], [f"--enforce-eager={secret}"])
    broken = ("{%s}", '{"%s}', '{"a": "%s", %s}', '{"a": "%s"}}')
    values = [["--max-model-len", secret], *(["--hf-overrides", text.replace("%s", secret)] for text in broken)]
    for line in (*lines, *values):
        (told,) = misfits(line, {}, table)
        assert secret not in told


ENTRY = "models:\n  m:\n    model: o/m\n    extra_args: [--max-num-seq-s, '8', --enforce-eagr]\n    {}\n"


def test_a_check_finds_it_and_a_load_does(
    tmp_path: Path, table: FlagTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM is not asked for the second: a table was kept, and the daemon's own folder comes first. A line tells of the first reading."""
    monkeypatch.setattr(vllm_table, "_tables", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\n" + ENTRY.format(""))
    wanted = [
        f"--max-num-seq-s: vLLM {table.version} has no such flag. Did you mean --max-num-seqs?",
        f"--enforce-eagr: vLLM {table.version} has no such flag. Did you mean --enforce-eager?",
    ]
    problems = [problem for problem in check(file, {}) if "no such flag" in problem.message]
    assert capsys.readouterr().err.count("\n") == 1 and check(file, {}) and capsys.readouterr().err == ""
    assert [problem.message for problem in problems] == [f"models.m: {each}" for each in wanted]
    assert {(problem.severity, problem.line) for problem in problems} == {("error", 5)}

    config = Config(state_dir=state)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seq-s", "8", "--enforce-eagr"]}, over_admin=False)
    assert list(said_to(spec, config, table.version).refused) == wanted
    assert said_to(spec, config, "0.1.0").refused == (), "another node's vLLM may know it"
    by_keys = parse_model("m", {"model": "o/m", "dtype": "float99"}, over_admin=False)
    assert [sentence.partition(":")[0] for sentence in said_to(by_keys, config, table.version).refused] == ["--dtype"]
    stub = parse_model("m", {"model": "o/m", "entrypoint": "workers.stub", "extra_args": ["--enforce-eagr"]}, over_admin=False)
    assert said_to(stub, config, table.version).refused == ()


async def test_a_load_ends_before_anything_is_reserved(tmp_path: Path, table: FlagTable, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.sentry.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max_num_seq_s=8"]}, over_admin=False)
    need = replace(needing(spec, "cuda", 1, None), entrypoint="vllm.entrypoints.cli.main", vllm=table.version)
    monkeypatch.setattr("sparkd.cluster.placer.requirement_of", lambda *_: need)
    with pytest.raises(RankError) as caught:
        await cluster.siting.place(spec)
    assert caught.value.message == (
        "m cannot be started by the vLLM of its runtime: "
        f"--max-num-seq-s: vLLM {table.version} has no such flag. Did you mean --max-num-seqs?"
    )


async def test_a_load_looks_the_table_up_once(tmp_path: Path, table: FlagTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its vLLM is to be told is worked out where the model is placed, and goes with the placement to the start."""
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.sentry.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    here = {"platform": "cpu", "entrypoint": "vllm.entrypoints.openai.api_server", "vllm": table.version}
    monkeypatch.setattr(cluster._here, "runtime", lambda _: here)
    looked: list[str] = []
    real = vllm_table._key
    monkeypatch.setattr(vllm_table, "_key", lambda *given: (looked.append("key"), real(*given))[1])

    async def reserve(*_: object) -> str:
        return "n"

    monkeypatch.setattr(cluster.places, "reserve_one", reserve)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seqs=8"], "memory_gib": 1}, over_admin=False)
    placement = await cluster.siting.place(spec)
    assert placement.said is not None and "--max-num-seqs=8" in placement.said.args

    async def clear(*_: object) -> None:
        raise RankError("far enough")

    monkeypatch.setattr(cluster.engines, "_clear", clear)
    with pytest.raises(RankError, match="far enough"):
        await cluster.engines.start(placement, spec, StartId("m-1", 1, ""))
    assert looked == ["key"]


# The table on disk.


def python(folder: Path, script: str, *packages: str) -> Path:
    """An environment whose interpreter is this program."""
    made = environment(folder, *(packages or ("vllm-0.32.0.dist-info",)))
    made.unlink()
    made.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{script}\n")
    made.chmod(0o755)
    return made


FLAG = {"of": 1, "takes": 1, "choices": None, "number": None, "json": None, "keys": None, "none": False, "folds": False}
SAYS = "echo '" + json.dumps({"abbreviations": True, "flags": {"--one": FLAG, "--two": FLAG | {"of": 2}}}) + "'"


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


def test_it_is_asked_once_and_again_after_something_was_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, env = tmp_path / "kept", tmp_path / "env"
    runtime = python(env, SAYS)
    assert flag_table(runtime, [kept], ask=False) is None
    assert asked(env) == 0
    for _ in range(2):
        found = flag_table(runtime, [kept], ask=True)
        assert found is not None
        assert set(found.flags) == {"one", "two"}
        monkeypatch.setattr(vllm_table, "_tables", {})  # as another process
    assert flag_table(runtime, [kept], ask=False) is not None
    assert asked(env) == 1
    (runtime.parent.parent / "lib/python3.12/site-packages/vllm_plugin-1.0.dist-info").mkdir()
    assert flag_table(runtime, [kept], ask=False) is None
    assert flag_table(runtime, [kept], ask=True) is not None
    assert asked(env) == 2


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "printf '\\\\377'",
        "echo",
        "echo {}",
        "echo '[]'",
        "echo 'null'",
        """echo '{"flags": {}, "abbreviations": 1}'""",
        "sleep 60",
    ],
)
def test_one_that_does_not_tell_costs_nothing_but_its_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(vllm_table, "TIMEOUT_S", 0.5)
    env = tmp_path / "env"
    runtime = python(env, script)
    for _ in range(2):
        assert flag_table(runtime, [tmp_path / "kept"], ask=True) is None
    assert asked(env) == 1
    assert not (tmp_path / "kept").exists()
    assert refused(["--wrong"], {}, runtime, tmp_path, ask=True) == ()


def test_a_kept_table_that_is_damaged_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, kept = tmp_path / "env", tmp_path / "kept"
    runtime = python(env, SAYS)
    flag_table(runtime, [kept], ask=True)
    (file,) = kept.iterdir()
    for text in ("", "{", "[]", '{"flags": {"--a": {}}}'):
        file.write_text(text)
        monkeypatch.setattr(vllm_table, "_tables", {})
        assert flag_table(runtime, [kept], ask=True) is not None
    assert asked(env) == 5


def test_a_folder_that_cannot_be_written_to_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = tmp_path / "env"
    (tmp_path / "file").write_text("")
    assert flag_table(python(env, SAYS), [tmp_path / "file" / "kept", tmp_path / "kept"], ask=True) is not None
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert places(tmp_path) == [tmp_path / "vllm-flags", tmp_path / "cache" / "sparkd" / "vllm-flags"]
    assert places(tmp_path / "gone") == [tmp_path / "cache" / "sparkd" / "vllm-flags"]


def test_no_vllm_is_not_asked(tmp_path: Path) -> None:
    env = tmp_path / "env"
    assert flag_table(python(env, SAYS, "numpy-2.0.dist-info"), [tmp_path], ask=True) is None
    assert asked(env) == 0
    assert os.listdir(tmp_path) == ["env"]
