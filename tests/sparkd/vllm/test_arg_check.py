"""What is told of a model's flags before its engine starts, held against vLLM's own parser."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sparkd.capacity.requirement import said_to
from sparkd.cli.config_check import check
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import StartId
from sparkd.config.config import Config, parse_model
from sparkd.config.recipe_check import checked
from sparkd.errors import RankError
from sparkd.inquiry import parser_answers
from sparkd.inquiry.parser_answers import answers, refused
from sparkd.recipes import admin_flags
from sparkd.vllm.arg_check import RefusedArg, unspeculative
from sparkd.vllm.installed import full_version_in
from tests.sparkd.recipes.test_expand import BOOK, OURS
from tests.support.accounts import needing
from tests.support.facts import lacking
from tests.support.parser_batch import refuse_nothing
from workers.engine import parse_args

FLAGS = [
    spelling[2:]
    for line in (Path(__file__).parents[2] / "fixtures" / "vllm-flags-0.32.0.txt").read_text().splitlines()
    for spelling in line.split()[1:]
    # Those that print and end, or read a file, are left out.
    if spelling.startswith("--") and not line.startswith("#") and spelling not in ("--help", "--config", "--no-help")
]
# vLLM's own warnings are not ours.
in_this_process = pytest.mark.filterwarnings("ignore")

# A line for each way in which vLLM's parser reads a flag.
TAKEN = [
    "--max_model_len 8192",
    "--max-model-le=8192",
    "--max-model-len ' 8K '",
    "--kv-cache-memory-bytes None",
    "--seed -1",
    "--no_enforce_eager",
    "-O3",
    "-q fp8 -asc 1 -ep",
    "--compilation_config.mode=3",
    "--compilation-config.cudagraph_capture_sizes+ 1,2,4",
    """--compilation-config '{"mode": 3}' --compilation-config.backend inductor""",
    """'--hf-overrides={"rope_theta": 1.5}'""",
    "--served-model-name a b c --lora-modules a=b c=d",
    "--chat-template '--odd name'",
    "--moe-backend MARLIN --tokenizer-mode mistral --logits-processors a.b:C",
    "--mamba-ssu-algorithm None",
    "--hf-overrides text",
    """--kv-transfer-config '{"kv_connector_extra_config": {"cpu_bytes_to_use": 80m}}'""",
    """--compilation-config '{"cudagraph_mode":"full_and_piecewise"}' --attention-config.backend=triton_attn""",
    """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
]
# (flag, kind, the nearest), a line for each way in which one is refused.
REFUSED: dict[str, tuple[str, str, str | None]] = {
    "-max-num-seqs 8": ("max-num-seqs", "short", "max-num-seqs"),
    "--max_model_length=8192": ("max-model-length", "unknown", "max-model-len"),
    "--no-enforce-eagr": ("no-enforce-eagr", "unknown", "no-enforce-eager"),
    """'--hf-override-it={"a": 1}'""": ("hf-override-it", "unknown", "hf-overrides"),
    "--qqqq": ("qqqq", "unknown", None),
    "--enable": ("enable", "several", None),
    "--max-num-seqs --enforce-eager": ("max-num-seqs", "missing", None),
    "--enforce-eager=true": ("enforce-eager", "none", None),
    "--enforce-eager 8": ("enforce-eager", "surplus", None),
    "--max-num-se 8 9": ("max-num-se", "surplus", None),
    "--max-num-seqs=8.5": ("max-num-seqs", "number", None),
    "--max-model-len 1.5K": ("max-model-len", "number", None),
    "--dty bfloat": ("dtype", "choice", "float"),
    "--spec-method ngrm": ("spec-method", "choice", "ngram"),
    "--compilation-config 7": ("compilation-config", "map", None),
    """--compilation-config '{"bakend": "eager"}'""": ("compilation-config", "key", "backend"),
    """--compilation-config '{"mode": 3'""": ("compilation-config", "json", None),
    """--hf-over '{"a": 1,}'""": ("hf-overrides", "json", None),
    # What the class behind a flag refuses, and its parser takes as text.
    "--attention-config.backend FLASHINFR": ("attention-config", "choice", "FLASHINFER"),
    """--kernel-config '{"moe_backend":"marln"}'""": ("kernel-config", "choice", "marlin"),
    "--tokenizer-mode mistrl": ("tokenizer-mode", "choice", "mistral"),
    "--limit-mm-per-prompt 1": ("limit-mm-per-prompt", "map", None),
    "--allowed-origins 1": ("allowed-origins", "list", None),
    "--middleware x": ("middleware", "qualified", None),
    """--hf-overrides '{"rope_theta":1'""": ("hf-overrides", "json", None),
}
SECRET = "hf_secret"
SECRETS = [
    *(["--max-num-seqs", SECRET], ["--dtype", SECRET], [f"--hf-tokn={SECRET}"], ["--hf-tokn", SECRET], [f"--enforce-eager={SECRET}"]),
    *(["--hf-overrides", text.replace("%s", SECRET)] for text in ("{%s}", '{"a": "%s", %s}', '{"a": "%s"}}')),
    *(["--attention-config.backend", SECRET], ["--lora-modules", f'["{SECRET}'], ["--kernel-config", f'{{"moe_backend": "{SECRET}"}}']),
]
SEVERAL = ["--max-num-seq-s", "8", "--seed", "many", "--enforce-eagr", "--dtype", "bfloat"]
VERSION = full_version_in(None) or ""


def refusals_of(*lines: list[str]) -> list[list[RefusedArg]]:
    """What the installed vLLM refuses of each line, asked in this process."""
    return [[RefusedArg.of(each) for each in refusals] for refusals in parse_args.parse(lines)]


class Ended(Exception):
    """vLLM's parser refuses the line."""


def own_parser() -> Any:
    parser = parse_args.parser_here()

    def error(message: str) -> NoReturn:
        raise Ended(message)

    parser.error = error
    return parser


def takes(parser: Any, line: list[str]) -> bool:
    try:
        parser.parse_args(["m", *line])
    except (Exception, SystemExit):  # noqa: BLE001 - validators raise what they like
        return False
    return True


@in_this_process
def test_what_an_added_model_may_bring_takes_as_many_values_as_it_is_listed_with() -> None:
    actions = own_parser()._actions
    values = {spelling[2:]: 1 if action.nargs is None else action.nargs for action in actions for spelling in action.option_strings}
    for name in sorted(admin_flags.SWITCHES | admin_flags.VALUES | admin_flags.MAPPINGS | admin_flags.LISTS):
        if name in admin_flags.LISTS:
            assert values[name] not in (0, 1), name
        else:
            assert values[name] == (0 if name in admin_flags.SWITCHES else 1), name
        assert values.get(f"no-{name}", 0) == 0, name


@in_this_process
def test_a_form_that_vllm_takes_is_passed() -> None:
    lines, parser = [shlex.split(line) for line in TAKEN], own_parser()
    assert [line for line in lines if not takes(parser, line)] == []
    assert [refusals for refusals in refusals_of(*lines) if refusals] == []


@in_this_process
def test_what_vllm_refuses_is_told_before_it_starts() -> None:
    found = refusals_of(*map(shlex.split, REFUSED))
    assert [[(one.flag, one.kind, one.near) for one in refusals] for refusals in found] == [[refusal] for refusal in REFUSED.values()]


@pytest.mark.parametrize(("flag", "kind", "near"), sorted(set(REFUSED.values()), key=str))
def test_a_note_names_the_flag_and_the_nearest(flag: str, kind: str, near: str | None) -> None:
    note = RefusedArg(flag, kind, ("one", "two"), near, "key", "").note(VERSION)
    assert note.name == flag and (kind == "short" or note.startswith(f"--{flag}: "))
    assert near is None or near in note.reason


@in_this_process
def test_all_mistakes_of_a_line_are_told_at_once() -> None:
    (refusals,) = refusals_of(SEVERAL)
    assert sorted(refusal.flag for refusal in refusals) == ["dtype", "enforce-eagr", "max-num-seq-s", "seed"]


@in_this_process
def test_a_value_is_never_shown() -> None:
    for refusals in refusals_of(*SECRETS):
        (refusal,) = refusals
        assert SECRET not in repr(refusal) and SECRET not in refusal.note(VERSION)


@in_this_process
def test_the_parser_of_vllm_takes_every_recipe_in_every_profile_with_every_method() -> None:
    resolved = [each for name in OURS for each in checked(BOOK.find(name), BOOK).resolved]
    wrong = ("--no-such-flag", "--enable-auto-tool-choice --tool-call-parser nobodys", "--reasoning-parser nobodys")
    said = parse_args.parse([*(each.line for each in resolved), *(["--model", "x", *line.split()] for line in wrong)], serve=True)

    assert len(resolved) > 400
    assert [(str(each.choice), message) for each, message in zip(resolved, said, strict=False) if message] == []
    assert all(said[len(resolved) :])


def every_flag_in_wrong_ways() -> list[list[str]]:
    lines: list[list[str]] = []
    for flag in FLAGS:
        values = ("zz", "{1", '{"a": 1,}', "1.5k", "-1")
        lines += [[f"--{flag}"], [f"--{flag}=1"], *([f"--{flag}", value] for value in values)]
        lines += [[f"--{flag[:-2]}", "1"], [f"--{flag}x", "1"], [f"--{flag[1:]}"], [f"--{flag}.key", "1"]]
        lines += [[f"--{flag.replace('-', '_')}=a b"], ["--seed", f"--{flag[:-1]}q=a b"]]
    return lines


@pytest.mark.rest
@in_this_process
def test_every_line_that_the_parser_refuses_is_refused_and_beside_them_only_what_a_class_refuses() -> None:
    lines, parser = every_flag_in_wrong_ways(), own_parser()
    refused_by_parser = {tuple(line) for line in lines if not takes(parser, line)}
    told = {tuple(line): refusals for line, refusals in zip(lines, refusals_of(*lines), strict=True) if refusals}
    assert len(lines) > 3000 and len(told) > 1000
    assert refused_by_parser - told.keys() == set()
    kinds = {refusal.kind for line in told.keys() - refused_by_parser for refusal in told[line]}
    assert kinds <= {"choice", "map", "list", "qualified", "json", "surplus"}
    assert all(refusal.flag for refusals in told.values() for refusal in refusals), "the flag at fault is named"


@in_this_process
def test_a_draft_that_vllms_own_class_refuses_is_told_before_and_no_other() -> None:
    """Without the model: what that decides is not foretold."""
    from vllm.config.speculative import SpeculativeConfig

    def vllm_takes(config: dict[str, Any]) -> bool:
        try:
            SpeculativeConfig(**config)
        except Exception:  # noqa: BLE001
            return False
        return True

    methods = ("ngram", "ngram_gpu", "suffix", "mtp", "eagle", "medusa", "dflash", "draft_model", "custom_class", "new")
    parts: list[list[dict[str, Any]]] = [
        [{}, *({"method": one} for one in methods)],
        [{}, *({"num_speculative_tokens": one} for one in (None, 0, 4, 4.0, 0.5, "4", [1]))],
        [{}, {"model": None}, {"model": "ngram"}],
        [{}, *({"prompt_lookup_min": least, "prompt_lookup_max": most} for least, most in ((2, 5), (5, 2), (1, 0)))],
        [{}, {"tensor_parallel_size": 2}],
    ]
    configs = [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*parts)]
    refused = 0
    for config in configs:
        told, taken = list(unspeculative(["--seed", "1", "--speculative-config", json.dumps(config)], {}, VERSION)), vllm_takes(config)
        assert not (told and taken), (config, told)
        refused += len(told)
        if config.get("method") in (None, "ngram") and set(config) <= {"method", "num_speculative_tokens"}:
            assert bool(told) is not taken, (config, told)
    assert refused > len(configs) / 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("""--speculative-config '{"method": "ngram"}'""", "num_speculative_tokens"),
        ("""--speculative_config='{"method": "eagle3", "num-speculative-tokens": 3}'""", "method eagle3 needs"),
        ("""--speculative-config '{"num_speculative_tokens": 3}'""", "a draft:"),
        ("""--speculative-config '{"method": "ngram"}' --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""", None),
        ("""--speculative-config '{"method": "ngram"}' --spec-tokens 3""", None),
        ("""--speculative-config '{"method": "mtp", "model": "/draft"}'""", None),
        ("""--speculative-config '{"method": "ngrm", "num_speculative_tokens": 3}'""", "ngram?"),
        (
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "promt_lookup_max": 4}'""",
            "prompt_lookup_max?",
        ),
        (f"--speculative-config {'[' * 5000}", None),
    ],
)
def test_a_draft_that_cannot_be_is_found_by_a_check_and_a_load(
    line: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_nothing(monkeypatch)
    file, args = tmp_path / "sparkd.yaml", shlex.split(line)
    file.write_text(json.dumps({"state_dir": str(tmp_path), "models": {"m": {"model": "o/m", "extra_args": args}}}))
    found = [problem.message for problem in check(file, {}) if "--speculative-config: " in problem.message]
    spec = parse_model("m", {"model": "o/m", "extra_args": args}, over_admin=False)
    refused = said_to(spec, Config(state_dir=tmp_path), VERSION).refused
    assert (len(found), len(refused)) == ((0, 0) if told is None else (1, 1))
    if told is not None:
        assert refused[0].startswith("--speculative-config: ") and told in refused[0] and found[0].endswith(refused[0])


@pytest.mark.parametrize(("version", "judged"), [("0.25.1", False), ("0.26.0", True), ("0.32.0+cpu", True), ("0.33.0", False)])
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


@pytest.mark.rest
def test_what_a_plugin_adds_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_plugin.py").write_text(PLUGIN)
    (tmp_path / "its_plugin-1.0.dist-info").mkdir()
    (tmp_path / "its_plugin-1.0.dist-info" / "METADATA").write_text("Name: its-plugin\nVersion: 1.0\n")
    (tmp_path / "its_plugin-1.0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\nits = its_plugin:register\n")
    # As if it were installed: PYTHONPATH of this process reaches no child, as it reaches no engine.
    monkeypatch.setattr(parser_answers, "inherited_environment", lambda environ: {**environ, "PYTHONPATH": str(tmp_path)})
    taken, wrong = answers([["--flag-of-a-plugin", "1"], ["--flag-of-a-plugin", "x"]], None, [tmp_path / "kept"], ask=True)
    assert taken == () and wrong is not None and [refusal.kind for refusal in wrong] == ["number"]


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_answers, "_answered", {})
    monkeypatch.setattr(parser_answers, "_silent", set())


ENTRY = "models:\n  m:\n    model: o/m\n    extra_args: [--max-num-seq-s, '8', --enforce-eagr]\n    {}\n"


def test_a_check_finds_it_and_a_load_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM is not asked for the second: an answer was kept, in the daemon's own folder first, and a chosen length is no new question. A
    line tells of the first asking, which is one for all models."""
    asked: list[list[str]] = []

    def said(_: Path, lines: list[list[str]]) -> list[tuple[str, tuple[RefusedArg, ...]]]:
        asked.extend(lines)
        wrong = {"--max-num-seq-s": "max-num-seqs", "--enforce-eagr": "enforce-eager", "float99": "float"}
        found = [tuple(RefusedArg(arg[2:], "unknown", (), wrong[arg], "", "") for arg in line if arg in wrong) for line in lines]
        return [(json.dumps([asdict(one) for one in refusals]), refusals) for refusals in found]

    monkeypatch.setattr(parser_answers, "_asked", said)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\n" + ENTRY.format("") + "  n: {model: o/n, dtype: float99}\n")
    problems = [problem for problem in check(file, {}) if problem.message.startswith("models.m: ")]
    assert capsys.readouterr().err.count("\n") == 1 and check(file, {}) and capsys.readouterr().err == ""
    assert {(problem.severity, problem.line) for problem in problems} == {("error", 5)} and len(asked) == 2

    monkeypatch.setattr(parser_answers, "_answered", {})
    config = Config(state_dir=state)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seq-s", "8", "--enforce-eagr"]}, over_admin=False)
    refused = said_to(spec, config, VERSION).refused
    assert [f"models.m: {each}" for each in refused] == [problem.message for problem in problems] and len(refused) == 2
    assert said_to(spec, config, "0.1.0").refused == (), "another node's vLLM may know it"
    for length in (None, 4096):
        by_keys = parse_model("m", {"model": "o/m", "dtype": "float99", "max_model_len": length}, over_admin=False)
        assert len(said_to(by_keys, config, VERSION).refused) == (1 if length is None else 0), "a flag more is another question"
    stub = parse_model("m", {"model": "o/m", "entrypoint": "workers.stub", "extra_args": ["--enforce-eagr"]}, over_admin=False)
    assert said_to(stub, config, VERSION).refused == ()
    assert len(asked) == 2


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
