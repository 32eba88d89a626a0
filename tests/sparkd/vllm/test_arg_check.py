"""What is told of a model's flags before its engine starts, held against vLLM's own parser."""

from __future__ import annotations

import itertools
import json
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
from sparkd.inquiry import parser_answers
from sparkd.inquiry.parser_answers import answers, refused
from sparkd.recipes import admin_flags
from sparkd.vllm.arg_check import RefusedArg, unspeculative
from sparkd.vllm.flag_note import FlagNote
from sparkd.vllm.installed import full_version_in
from tests.support.accounts import needing
from tests.support.facts import lacking

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
    "--compilation-config 7": "--compilation-config: its value is not a map of keys",
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
    "--max-num-seqs eight": "--max-num-seqs: its value is not a whole number. Give it one, or remove it.",
    "--max-num-seqs=8.5": "--max-num-seqs: its value is not a whole number. Give it one, or remove it.",
    "--max-num-seqs": "--max-num-seqs: it needs a value. Give it one, or remove it.",
    "--max-num-seqs --enforce-eager": "--max-num-seqs: it needs a value. Give it one, or remove it.",
    "--gpu-memory-utilization most": "--gpu-memory-utilization: its value is not a number.",
    "--dtype bfloat": "--dtype: vLLM {} does not take its value. Did you mean float?",
    "--dty bfloat": "--dtype: vLLM {} does not take its value. Did you mean float?",
    "--kv-cache-dtype=fp8_e4": "--kv-cache-dtype: vLLM {} does not take its value. Did you mean fp8_e4m3?",
    "--scheduling-policy zzzz": "--scheduling-policy: vLLM {} does not take its value. It takes ",
    "--max-model-len lots": "--max-model-len: its value is not a whole number, nor one such as 8k or 8K. Give it one, or remove it.",
    "--max-model-len=8.5": "--max-model-len: its value is not a whole number, nor one such as 8k or 8K.",
    "--max-model-len 1.5K": "--max-model-len: its value is not a whole number, nor one such as 8k or 8K.",
    "--max-model-len 8kb": "--max-model-len: its value is not a whole number, nor one such as 8k or 8K.",
    "--max-num-batched-tokens auto": "--max-num-batched-tokens: its value is not a whole number, nor one such as 8k or 8K.",
    "--kv-cache-memory-bytes 2GiB": "--kv-cache-memory-bytes: its value is not a whole number, nor one such as 8k or 8K.",
    "--hf-overrides '{bad}'": "--hf-overrides: its value is not JSON: expecting property name enclosed in double quotes at character 2.",
    """--hf-overrides="{'a': 1}\"""": "--hf-overrides: its value is not JSON: expecting property name enclosed in double quotes at",
    """--hf-over '{"a": 1,}'""": "--hf-overrides: its value is not JSON: ",
    """--speculative-config '{"method": "ngram"'""": "--speculative-config: its value is not JSON: expecting ',' delimiter at its end.",
    """--spec-config '{"method": "ngr'""": "--spec-config: vLLM {} has no such flag.",
    """--speculative-con '{"a": "ngr'""": "--speculative-config: its value is not JSON: unterminated string starting at character 7.",
    "--speculative-config ngram": "--speculative-config: its value is not JSON: expecting value at character 1.",
    """--compilation-config '{"mode": 3'""": "--compilation-config: its value is not JSON: EOF while parsing an object at",
    """--kv-transfer-config '{"a": 80q}'""": "--kv-transfer-config: its value is not JSON: expected `,` or `}` at line 1 column 9.",
    """--limit-mm-per-prompt '{"image": 1'""": "--limit-mm-per-prompt: its value is not JSON: expecting ',' delimiter at its end.",
    "--default-chat-template-kwargs x": "--default-chat-template-kwargs: its value is not JSON: expecting value at character 1.",
    "--enforce-eager=true": "--enforce-eager: vLLM {} takes no value for it. Remove the equals sign and the text after it.",
}


LATER = {
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
    "--lora-modules x": "not JSON",
    "--lora-modules a=/b x": "not JSON",
    "--lora-modules {\"name\":\"a\",\"pth\":\"/b\"}": "'pth'",
    "--lora-modules {\"name\":\"a\"}": "'path'",
    "--middleware x": "MODULE.NAME",
    "--scheduler-cls Mine": "MODULE.NAME",
    # The configuration refuses what the parser takes as text (vllm/config/model.py, HfOverrides: a dictionary or a function).
    "--hf-overrides {\"rope_theta\":1": "expecting ',' delimiter at its end",
    # vLLM would take these values for the model.
    "--enforce-eager 8": "it takes no value, and vLLM would read the next one as the model",
    "--enable-prefix-caching true --seed 1": "it takes no value, and",
    "--max-num-seqs 8 9": "it takes one value, and",
    "--max-num-seqs=8 9": "it takes one value, and",
    "--max-num-se 8 9": "it takes one value, and",
    "--enforce-eager -5": "it takes no value, and",
}  # fmt: skip
PASSED_LATER = [
    "--attention-backend flash_attn", "--attention-backend auto", "--attention-config.backend=triton_attn",
    "--mamba-backend triton", "-O3", "--optimization-level O2", "--lora-modules a=/b c=/d", "--tokenizer-mode mistral",
    '--lora-modules {"name":"a","path":"/b","base_model_name":"c"}', "--middleware a.b.C", '--kernel-config {"moe_backend":"Marlin"}',
    '--compilation-config {"cudagraph_mode":"full_and_piecewise","mode":3}', '--allowed-origins ["*"]', "--logits-processors a.b:C",
]  # fmt: skip
SECRET = "hf_secret"
SECRETS = [
    *(["--max-num-seqs", SECRET], ["--dtype", SECRET], [f"--hf-tokn={SECRET}"], ["--hf-tokn", SECRET], [f"--enforce-eager={SECRET}"]),
    ["--max-model-len", SECRET],
    *(["--hf-overrides", text.replace("%s", SECRET)] for text in ("{%s}", '{"%s}', '{"a": "%s", %s}', '{"a": "%s"}}')),
    *(["--attention-config.backend", SECRET], ["--lora-modules", f'["{SECRET}'], ["--kernel-config", f'{{"moe_backend": "{SECRET}"}}']),
]
SEVERAL = ["--max-num-seq-s", "8", "--seed", "many", "--enforce-eagr", "--dtype", "bfloat"]
FLAGS = [
    spelling[2:]
    for line in (Path(__file__).parents[2] / "fixtures" / "vllm-flags-0.32.0.txt").read_text().splitlines()
    for spelling in line.split()[1:]
    if spelling.startswith("--") and not line.startswith("#")
]
VERSION = full_version_in(None) or ""


def every_flag_in_wrong_ways() -> list[list[str]]:
    lines: list[list[str]] = []
    for flag in FLAGS:
        if flag in ("help", "config", "no-help"):
            continue  # they print and end, or read a file
        values = ("zz", "{1", '{"a": 1,}', "1.5k", "-1")
        lines += [[f"--{flag}"], [f"--{flag}=1"], *([f"--{flag}", value] for value in values)]
        lines += [[f"--{flag[:-2]}", "1"], [f"--{flag}x", "1"], [f"--{flag[1:]}"], [f"--{flag}.key", "1"]]
        lines += [[f"--{flag.replace('-', '_')}=a b"], ["--seed", f"--{flag[:-1]}q=a b"]]
    return lines


LINES = [
    *(shlex.split(line) for line in (*TAKEN, *REFUSED)),
    *(line.split(" ") for line in (*LATER, *PASSED_LATER)),
    *SECRETS,
    SEVERAL,
    *every_flag_in_wrong_ways(),
]


@pytest.fixture(scope="module")
def refusals() -> dict[tuple[str, ...], tuple[RefusedArg, ...]]:
    """Of every line above, by the vLLM that is installed here, in one go."""
    found = parser_answers._asked(Path(sys.executable), LINES)
    assert found is not None
    return {tuple(line): refused for line, (_, refused) in zip(LINES, found, strict=True)}


RefusedArgs = dict[tuple[str, ...], tuple[RefusedArg, ...]]


def notes(refusals: RefusedArgs, line: list[str]) -> list[FlagNote]:
    return [refusal.note(VERSION) for refusal in refusals[tuple(line)]]


PARSER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from workers.engine.parse_args import parser_here
parser = parser_here()
def error(message):
    raise ValueError(message)
parser.error = error
def said(line):
    try:
        parser.parse_args(line)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
takes = {spelling[2:]: 1 if action.nargs is None else action.nargs for action in parser._actions for spelling in action.option_strings}
json.dump([[said(line) for line in json.load(sys.stdin)], takes], out)
out.flush()
"""


@pytest.fixture(scope="module")
def parsed() -> tuple[dict[tuple[str, ...], str | None], dict[str, Any]]:
    """(what vLLM's own parser says of every line, null where it takes it; how many values each flag takes, as argparse counts them)."""
    request = json.dumps([["m", *line] for line in LINES])
    done = subprocess.run([sys.executable, "-c", PARSER], input=request, capture_output=True, text=True, timeout=240, check=True)
    said, takes = json.loads(done.stdout)
    return {tuple(line): answer for line, answer in zip(LINES, said, strict=True)}, takes


def test_what_an_added_model_may_bring_takes_as_many_values_as_it_is_listed_with(parsed: tuple[Any, dict[str, Any]]) -> None:
    takes = parsed[1]
    for name in sorted(admin_flags.SWITCHES | admin_flags.VALUES | admin_flags.MAPPINGS | admin_flags.LISTS):
        if name in admin_flags.LISTS:
            assert takes[name] not in (0, 1), name
        else:
            assert takes[name] == (0 if name in admin_flags.SWITCHES else 1), name
        assert f"no-{name}" not in takes or takes[name] == 0, name


@pytest.mark.parametrize("line", TAKEN)
def test_a_form_that_vllm_takes_is_passed(line: str, refusals: RefusedArgs, parsed: tuple[dict[tuple[str, ...], Any], Any]) -> None:
    args = shlex.split(line)
    assert parsed[0][tuple(args)] is None
    assert notes(refusals, args) == []


@pytest.mark.parametrize("line", REFUSED)
def test_what_vllm_refuses_is_told_before_it_starts(
    line: str, refusals: RefusedArgs, parsed: tuple[dict[tuple[str, ...], Any], Any]
) -> None:
    args = shlex.split(line)
    assert parsed[0][tuple(args)] is not None
    (told,) = notes(refusals, args)
    assert told.startswith(REFUSED[line].replace("vLLM {}", f"vLLM {VERSION}"))


@pytest.mark.parametrize(("line", "nearest"), LATER.items())
def test_a_value_that_the_class_behind_a_flag_refuses_is_told_with_the_nearest(line: str, nearest: str, refusals: RefusedArgs) -> None:
    (told,) = notes(refusals, line.split(" "))
    assert told.startswith(line.partition(" ")[0].partition(".")[0].partition("=")[0]) and nearest in told, told


@pytest.mark.parametrize("line", PASSED_LATER)
def test_a_value_that_the_class_behind_a_flag_takes_is_passed(line: str, refusals: RefusedArgs) -> None:
    assert notes(refusals, line.split(" ")) == []


def test_all_mistakes_of_a_line_are_told_at_once(refusals: RefusedArgs) -> None:
    assert sorted(refusal.flag for refusal in refusals[tuple(SEVERAL)]) == ["dtype", "enforce-eagr", "max-num-seq-s", "seed"]


def test_every_line_that_the_parser_refuses_is_refused_and_beside_them_only_what_a_class_refuses(
    refusals: RefusedArgs, parsed: tuple[dict[tuple[str, ...], Any], Any]
) -> None:
    said = parsed[0]
    assert len(said) > 3000
    refused_by_parser = {line for line in said if said[line] is not None}
    told = {line for line in said if refusals[line]}
    assert refused_by_parser - told == set()
    assert {refusal.kind for line in told - refused_by_parser for refusal in refusals[line]} <= {
        "choice",
        "map",
        "list",
        "qualified",
        "json",
    }
    assert len(told) > 1000
    assert all(refusal.flag for line in told for refusal in refusals[line]), "the flag at fault is named"


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


def test_a_draft_that_vllms_own_class_refuses_is_told_before_and_no_other() -> None:
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
        told = list(unspeculative(["--seed", "1", "--speculative-config", json.dumps(config)], {}, VERSION))
        assert not told or answer is not None, (config, told)
        refused += len(told)
        if config.get("method") in (None, "ngram") and set(config) <= {"method", "num_speculative_tokens"}:
            assert bool(told) == (answer is not None), (config, told, answer)
    assert refused > len(configs) / 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("""--speculative-config '{"method": "ngram"}'""", "num_speculative_tokens"),
        ("""--speculative_config='{"method": "eagle3", "num-speculative-tokens": 3}'""", "method eagle3 needs"),
        ("""--speculative-config '{"num_speculative_tokens": 3}'""", "a draft:"),
        ("""--speculative-config '{"method": "ngram"}' --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""", None),
        ("""--speculative-config '{"method": "ngram"}' --speculative-config.num_speculative_tokens 3""", None),
        ("""--speculative-config '{"method": "ngram"}' --spec-tokens 3""", None),
        ("""--speculative-config '{"method": "mtp", "model": "/draft"}'""", None),
        ("""--speculative-config '{"method": "ngrm", "num_speculative_tokens": 3}'""", "ngram?"),
        ("""--speculative-config '{"method": "ngrm"}'""", "ngram?"),
        (
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "promt_lookup_max": 4}'""",
            "prompt_lookup_max?",
        ),
        ("""--speculative-config '{"method": "dspark", "model": "o/d", "num-speculative-tokens": 3}'""", None),
        ("--speculative-config None", None),
        (f"--speculative-config {'[' * 5000}", None),
    ],
)
def test_a_draft_that_cannot_be_is_found_by_a_check_and_a_load(
    line: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, **__: [()] * len(lines))
    file, args = tmp_path / "sparkd.yaml", shlex.split(line)
    file.write_text(json.dumps({"state_dir": str(tmp_path), "models": {"m": {"model": "o/m", "extra_args": args}}}))
    found = [problem.message for problem in check(file, {}) if "--speculative-config: " in problem.message]
    spec = parse_model("m", {"model": "o/m", "extra_args": args}, over_admin=False)
    refused = said_to(spec, Config(state_dir=tmp_path), VERSION).refused
    assert (len(found), len(refused)) == ((0, 0) if told is None else (1, 1))
    if told is not None:
        assert refused[0].startswith("--speculative-config: ") and told in refused[0] and found[0].endswith(refused[0])


@pytest.mark.parametrize(
    ("version", "judged"), [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("dev", False)]
)
def test_a_release_whose_class_nobody_has_looked_at_is_not_foretold(version: str, judged: bool) -> None:
    args = ["--speculative-config", '{"method": "ngram"}']
    assert bool(list(unspeculative(args, {}, version))) == judged
    assert not list(unspeculative(args, {"VLLM_PLUGINS": "mine"}, version))


def test_another_parser_than_the_one_here_is_not_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = RefusedArg("flag-of-a-plugin", "unknown", (), None, "", "")
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, **__: [(unknown,)] * len(lines))
    args = ["--flag-of-a-plugin", "1"]
    assert refused(args, {"HF_HOME": "/x"}, None, tmp_path, ask=False)
    for name in ("VLLM_PLUGINS", "PYTHONPATH"):
        assert not refused(args, {name: "mine"}, None, tmp_path, ask=False)


PLUGIN = """
from vllm.engine.arg_utils import EngineArgs

def register():
    add = EngineArgs.add_cli_args

    def add_ours(parser):
        parser.add_argument("--flag-of-a-plugin", type=int)
        return add(parser)

    EngineArgs.add_cli_args = staticmethod(add_ours)
"""


def test_what_a_plugin_adds_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_plugin.py").write_text(PLUGIN)
    (tmp_path / "its_plugin-1.0.dist-info").mkdir()
    (tmp_path / "its_plugin-1.0.dist-info" / "METADATA").write_text("Name: its-plugin\nVersion: 1.0\n")
    (tmp_path / "its_plugin-1.0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\nits = its_plugin:register\n")
    # As if it were installed: PYTHONPATH of this process reaches no child, as it reaches no engine.
    monkeypatch.setattr(parser_answers, "inherited_environment", lambda environ: {**environ, "PYTHONPATH": str(tmp_path)})
    taken, wrong = answers([["--flag-of-a-plugin", "1"], ["--flag-of-a-plugin", "x"]], None, [tmp_path / "kept"], ask=True)
    assert taken == () and wrong is not None and [refusal.kind for refusal in wrong] == ["number"]


def test_a_value_is_never_shown(refusals: RefusedArgs) -> None:
    for line in SECRETS:
        (refusal,) = refusals[tuple(line)]
        assert SECRET not in repr(refusal) and SECRET not in refusal.note(VERSION)


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_answers, "_answered", {})
    monkeypatch.setattr(parser_answers, "_silent", set())


ENTRY = "models:\n  m:\n    model: o/m\n    extra_args: [--max-num-seq-s, '8', --enforce-eagr]\n    {}\n"


def test_a_check_finds_it_and_a_load_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM is not asked for the second: an answer was kept, in the daemon's own folder first, and a chosen length is no new question. A
    line tells of the first asking, which is one for all models."""
    monkeypatch.setattr(parser_answers, "_answered", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\n" + ENTRY.format("") + "  n: {model: o/n, dtype: float99}\n")
    wanted = [
        f"--max-num-seq-s: vLLM {VERSION} has no such flag. Did you mean --max-num-seqs?",
        f"--enforce-eagr: vLLM {VERSION} has no such flag. Did you mean --enforce-eager?",
    ]
    problems = [problem for problem in check(file, {}) if "no such flag" in problem.message]
    assert capsys.readouterr().err.count("\n") == 1 and check(file, {}) and capsys.readouterr().err == ""
    assert [problem.message for problem in problems] == [f"models.m: {each}" for each in wanted]
    assert {(problem.severity, problem.line) for problem in problems} == {("error", 5)}

    monkeypatch.setattr(parser_answers, "_answered", {})
    config = Config(state_dir=state)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seq-s", "8", "--enforce-eagr"]}, over_admin=False)
    assert list(said_to(spec, config, VERSION).refused) == wanted
    assert said_to(spec, config, "0.1.0").refused == (), "another node's vLLM may know it"
    for length in (None, 4096):
        by_keys = parse_model("m", {"model": "o/m", "dtype": "float99", "max_model_len": length}, over_admin=False)
        refusals = [sentence.partition(":")[0] for sentence in said_to(by_keys, config, VERSION).refused]
        assert refusals == (["--dtype"] if length is None else []), "a flag more is another question"
    stub = parse_model("m", {"model": "o/m", "entrypoint": "workers.stub", "extra_args": ["--enforce-eagr"]}, over_admin=False)
    assert said_to(stub, config, VERSION).refused == ()


async def test_a_load_ends_before_anything_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.sentry.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    unknown = RefusedArg("max-num-seq-s", "unknown", (), "max-num-seqs", "", "")
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, ask, **__: [(unknown,) if ask else None for _ in lines])
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max_num_seq_s=8"]}, over_admin=False)
    need = replace(needing(spec, "cuda", 1, None), entrypoint="vllm.entrypoints.cli.main", vllm=VERSION)
    monkeypatch.setattr("sparkd.cluster.placer.requirement_of", lambda *_: need)
    with pytest.raises(RankError) as caught:
        await cluster.siting.place(spec)
    assert lacking(caught.value.message, "m", f"--max-num-seq-s: vLLM {VERSION}", "--max-num-seqs") == []


async def test_a_load_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its vLLM is to be told is worked out where the model is placed, and goes with the placement to the start."""
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.sentry.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    here = {"platform": "cpu", "entrypoint": "vllm.entrypoints.openai.api_server", "vllm": VERSION}
    monkeypatch.setattr(cluster._here, "runtime", lambda _: here)
    looked: list[str] = []

    def answer(lines: list[list[str]], *_: object, **__: object) -> list[tuple[RefusedArg, ...]]:
        looked.append("asked")
        return [() for _ in lines]

    monkeypatch.setattr(parser_answers, "answers", answer)

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
    assert looked == ["asked"]
