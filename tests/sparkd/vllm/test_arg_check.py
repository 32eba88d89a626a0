"""What is told of a model's flags before its engine starts, held against vLLM's own parser."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparkd.capacity.requirement import said_to
from sparkd.cli.config_check import check
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import StartId
from sparkd.config.config import Config, parse_model
from sparkd.config.recipe_check import checked
from sparkd.errors import RankError
from sparkd.inquiry import parser_answers
from sparkd.inquiry.parser_answers import refused
from sparkd.recipes import admin_flags
from sparkd.vllm.arg_check import RefusedArg, unspeculative
from sparkd.vllm.installed import full_version_in
from tests.sparkd.recipes.test_expand import BOOK, OURS
from tests.support.accounts import needing
from tests.support.facts import lacking
from tests.support.parser_batch import refuse_nothing
from workers.vllm.ask import parse_args

# (flag, kind, the nearest), a line for each way in which one is refused.
REFUSED: dict[str, tuple[str, str, str | None]] = {
    "-max-num-seqs 8": ("max-num-seqs", "short", "max-num-seqs"),
    "--max-model-length 8192": ("max-model-length", "unknown", "max-model-len"),
    "--qqqq": ("qqqq", "unknown", None),
    "--enable": ("enable", "several", None),
    "--max-num-seqs --enforce-eager": ("max-num-seqs", "missing", None),
    "--enforce-eager=true": ("enforce-eager", "none", None),
    "--enforce-eager 8": ("enforce-eager", "surplus", None),
    "--max-num-seqs 8.5": ("max-num-seqs", "number", None),
    "--dtype bfloat": ("dtype", "choice", "float"),
    "--compilation-config 7": ("compilation-config", "map", None),
    """--compilation-config '{"bakend": "eager"}'""": ("compilation-config", "key", "backend"),
    """--hf-overrides '{"rope_theta":1'""": ("hf-overrides", "json", None),
    # What the class behind a flag refuses, and its parser takes as text.
    """--kernel-config '{"moe_backend":"marln"}'""": ("kernel-config", "choice", "marlin"),
    "--allowed-origins 1": ("allowed-origins", "list", None),
    "--middleware x": ("middleware", "qualified", None),
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


def test_what_an_added_model_may_bring_takes_as_many_values_as_it_is_listed_with() -> None:
    actions = parse_args.parser_here()._actions
    values = {spelling[2:]: 1 if action.nargs is None else action.nargs for action in actions for spelling in action.option_strings}
    for name in sorted(admin_flags.SWITCHES | admin_flags.VALUES | admin_flags.MAPPINGS | admin_flags.LISTS):
        if name in admin_flags.LISTS:
            assert values[name] not in (0, 1), name
        else:
            assert values[name] == (0 if name in admin_flags.SWITCHES else 1), name
        assert values.get(f"no-{name}", 0) == 0, name


def test_what_vllm_refuses_is_told_before_it_starts() -> None:
    found = refusals_of(*map(shlex.split, REFUSED))
    assert [[(one.flag, one.kind, one.near) for one in refusals] for refusals in found] == [[refusal] for refusal in REFUSED.values()]


def test_all_mistakes_of_a_line_are_told_at_once() -> None:
    (refusals,) = refusals_of(SEVERAL)
    assert sorted(refusal.flag for refusal in refusals) == ["dtype", "enforce-eagr", "max-num-seq-s", "seed"]


def test_a_value_is_never_shown() -> None:
    for refusals in refusals_of(*SECRETS):
        (refusal,) = refusals
        assert SECRET not in repr(refusal) and SECRET not in refusal.note(VERSION)


def test_the_parser_of_vllm_takes_every_recipe_in_every_profile_with_every_method() -> None:
    resolved = [each for name in OURS for each in checked(BOOK.find(name), BOOK).resolved]
    wrong = ("--no-such-flag", "--enable-auto-tool-choice --tool-call-parser nobodys", "--reasoning-parser nobodys")
    said = parse_args.parse([*(each.line for each in resolved), *(["--model", "x", *line.split()] for line in wrong)], serve=True)

    assert len(resolved) > 400
    assert [(str(each.choice), message) for each, message in zip(resolved, said, strict=False) if message] == []
    assert all(said[len(resolved) :])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("""--speculative-config '{"method": "ngram"}'""", "num_speculative_tokens"),
        ("""--speculative-config '{"method": "eagle3", "num_speculative_tokens": 3}'""", "method eagle3 needs"),
        ("""--speculative-config '{"num_speculative_tokens": 3}'""", "a draft:"),
        ("""--speculative-config '{"method": "ngrm", "num_speculative_tokens": 3}'""", "ngram?"),
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
    stub = parse_model("m", {"model": "o/m", "entrypoint": "tests.stub", "extra_args": ["--enforce-eagr"]}, over_admin=False)
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
