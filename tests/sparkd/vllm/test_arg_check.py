"""What is told of a model's flags before its engine starts, held against vLLM's own parser."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sparkd.capacity.placed_entry import refused_flags
from sparkd.cli.config_check import check
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import StartId
from sparkd.config.config import Config, parse_model
from sparkd.config.recipe_check import resolve
from sparkd.errors import EngineError, RankError
from sparkd.recipes import admin_flags
from sparkd.vllm.arg_check import RefusedArg
from sparkd.vllm.ask import cache as answer_cache
from sparkd.vllm.ask import parser as parser_answers
from sparkd.vllm.ask.parser import refused
from sparkd.vllm.installed import full_version_in
from tests.sparkd.recipes.test_merge import BOOK, OURS
from tests.support.facts import lacking
from workers.vllm.ask import parse_args

# (flag, a part of vLLM's sentence), a line for each way in which one is refused.
REFUSED: dict[str, tuple[str, str]] = {
    "-max-num-seqs 8": ("-max-num-seqs", "unrecognized"),
    "--max-model-length 8192": ("--max-model-length", "unrecognized"),
    "--max-mod 8192": ("--max-mod", "--max-model-len"),
    "--tool-call-parser hermess": ("--tool-call-parser", "hermes?"),
    "--reasoning-parser qwen4": ("--reasoning-parser", "qwen3?"),
    "--max-num-seqs --enforce-eager": ("--max-num-seqs", "expected one"),
    "--enforce-eager=true": ("--enforce-eager", "ignored explicit"),
    "--enforce-eager 8": ("--enforce-eager", "unrecognized argument behind"),
    "--max-num-seqs 8.5": ("--max-num-seqs", "invalid int"),
    "--dtype bfloat": ("--dtype", "'bfloat16'"),
    "--compilation-config 7": ("--compilation-config", "object"),
    """--compilation-config '{"bakend": "eager"}'""": ("--compilation-config", "bakend"),
    """--kernel-config '{"moe_backend":"marln"}'""": ("--kernel-config", "'marlin'"),
    """--kv-transfer-config '{"a":1'""": ("--kv-transfer-config", "line 1 column"),
}
SECRET = "hf_secret"
SECRETS = [
    *(["--max-num-seqs", SECRET], ["--dtype", SECRET], [f"--hf-tokn={SECRET}"], ["--hf-tokn", SECRET], [f"--enforce-eager={SECRET}"]),
    *(["--hf-overrides", text.replace("%s", SECRET)] for text in ("{%s}", '{"a": "%s", %s}', '{"a": "%s"}}')),
    *(["--attention-config.backend", SECRET], ["--cudagraph-capture-sizes", "1", SECRET], ["--max-model-len", "8", SECRET]),
    *(["--lora-modules", text.replace("%s", SECRET)] for text in ('["%s', '{"nam": "%s"}')),
    *(["--kernel-config", f'{{"moe_backend": "{SECRET}"}}'], [f"--enable={SECRET}"]),
]
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


def test_what_vllm_refuses_is_told_before_it_starts_in_its_own_words() -> None:
    for refusals, (flag, words) in zip(refusals_of(*map(shlex.split, REFUSED)), REFUSED.values(), strict=True):
        (refusal,) = refusals
        assert refusal.flag == flag and words in refusal.reason
        assert lacking(refusal.note(VERSION), flag or "arguments", f"vLLM {VERSION}", words) == []


def test_every_flag_that_vllm_does_not_have_is_named_at_once() -> None:
    (refusals,) = refusals_of(["--max-num-seq-s", "8", "--seed", "1", "--enforce_eagr"])
    assert [(refusal.flag, refusal.is_unknown) for refusal in refusals] == [("--max-num-seq-s", True), ("--enforce-eagr", True)]


def test_a_value_is_never_shown() -> None:
    for refusals in refusals_of(*SECRETS):
        (refusal,) = refusals
        assert SECRET.lower() not in refusal.note(VERSION).lower()


def test_the_parser_of_vllm_takes_every_recipe() -> None:
    refused = parse_args.parse([["--model", model.model, *model.vllm_flags()] for model in (resolve(name, BOOK) for name in OURS)])

    assert [(name, refusals) for name, refusals in zip(OURS, refused, strict=True) if refusals] == []


def test_another_parser_than_the_one_here_is_not_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = RefusedArg("--flag-of-a-plugin", "unrecognized argument")
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, **__: [(unknown,)] * len(lines))
    args = ["--flag-of-a-plugin", "1"]
    assert refused(args, {"HF_HOME": "/x"}, None, tmp_path, ask=False)
    for name in ("VLLM_PLUGINS", "PYTHONPATH"):
        assert not refused(args, {name: "mine"}, None, tmp_path, ask=False)


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "_unkept", {})


ENTRY = "models:\n  m:\n    model: o/m\n    extra_args: [--max-num-seq-s, '8', --enforce-eagr]\n    {}\n"


def test_a_check_finds_it_and_a_load_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM is not asked for the second: an answer was kept, in the daemon's own folder first, and a chosen length is no new question. A
    line tells of the first asking, which is one for all models."""
    asked: list[list[str]] = []

    def answer(_: Path, lines: list[list[str]]) -> tuple[str, list[tuple[RefusedArg, ...]]]:
        asked.extend(lines)
        wrong = ("--max-num-seq-s", "--enforce-eagr", "float99")
        return VERSION, [tuple(RefusedArg(arg, "unrecognized argument") for arg in line if arg in wrong) for line in lines]

    monkeypatch.setattr(parser_answers, "asked", answer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {state}\n" + ENTRY.format("") + "  n: {model: o/n, dtype: float99}\n")
    problems = [problem for problem in check(file, {}) if problem.message.startswith("models.m: ")]
    assert capsys.readouterr().err.count("\n") == 1 and check(file, {}) and capsys.readouterr().err == ""
    assert {(problem.severity, problem.line) for problem in problems} == {("error", 5)} and len(asked) == 2

    monkeypatch.setattr(answer_cache, "_unkept", {})
    config = Config(state_dir=state)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seq-s", "8", "--enforce-eagr"]}, over_admin=False)
    refused = refused_flags(spec, config, VERSION)
    assert [f"models.m: {each}" for each in refused] == [problem.message for problem in problems] and len(refused) == 2
    assert refused_flags(spec, config, "0.1.0") == (), "another node's vLLM may know it"
    for length in (None, 4096):
        by_keys = parse_model("m", {"model": "o/m", "dtype": "float99", "max_model_len": length}, over_admin=False)
        assert len(refused_flags(by_keys, config, VERSION)) == (1 if length is None else 0), "a flag more is another question"
    stub = parse_model("m", {"model": "o/m", "entrypoint": "tests.stub", "extra_args": ["--enforce-eagr"]}, over_admin=False)
    assert refused_flags(stub, config, VERSION) == ()
    assert len(asked) == 2


async def test_a_load_ends_before_anything_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.guard.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    unknown = RefusedArg("--max-num-seq-s", "unrecognized argument")
    monkeypatch.setattr(parser_answers, "answers", lambda lines, *_, ask, **__: [(unknown,) if ask else None for _ in lines])
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max_num_seq_s=8"]}, over_admin=False)
    with pytest.raises(RankError) as caught:
        await cluster.placer.place(spec)
    assert lacking(caught.value.message, "m", f"--max-num-seq-s: vLLM {VERSION}") == []


def test_a_load_fails_while_the_parser_is_silent_and_a_check_tells_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(parser_answers, "asked", silent)
    monkeypatch.setattr(parser_answers, "kept", lambda *_: None)
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--stream-interval=9"]}, over_admin=False)
    with pytest.raises(EngineError, match="asked again: no space left") as caught:
        refused_flags(spec, Config(state_dir=tmp_path), VERSION, ask=True)
    assert caught.value.reason == "ParserSilent"
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"state_dir: {tmp_path}\nmodels: {{m: {{model: o/m, extra_args: ['--stream-interval=9']}}}}\n")
    messages = {problem.message: problem.severity for problem in check(file, {}) if "parser gave no answer" in problem.message}
    assert list(messages.values()) == ["warning"]


async def test_a_load_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are judged where the model is placed, and not again at the start."""
    cluster = Cluster(Config(state_dir=tmp_path, runtime_dir=tmp_path), {})
    cluster._here.guard.stop()
    monkeypatch.setattr("sparkd.cluster.placer.is_absent", lambda *_: False)
    here = {"platform": "cpu", "entrypoint": "vllm.entrypoints.openai.api_server", "vllm": VERSION}
    monkeypatch.setattr(cluster._here, "runtime", lambda _: here)
    looked: list[str] = []

    def answer(lines: list[list[str]], *_: object, **__: object) -> list[tuple[RefusedArg, ...]]:
        looked.append("asked")
        return [() for _ in lines]

    monkeypatch.setattr(parser_answers, "answers", answer)

    monkeypatch.setattr(cluster.reservations, "reserve_one", lambda *_: "n")
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--max-num-seqs=8"], "memory_gib": 1}, over_admin=False)
    placement = await cluster.placer.place(spec)

    async def clear(*_: object) -> None:
        raise RankError("far enough")

    monkeypatch.setattr(cluster.launcher, "_prepare_nodes", clear)
    with pytest.raises(RankError, match="far enough"):
        await cluster.launcher.start(placement, spec, StartId("m-1", 1, ""))
    assert looked == ["asked"]
