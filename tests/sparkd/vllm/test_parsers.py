"""Which parsers are chosen for which family and template, and that a key of the entry wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.embedded_model import CHAT_TEMPLATE
from sparkd.__main__ import exit_code
from sparkd.capacity.placed_entry import refused_flags
from sparkd.cli.config_check import check
from sparkd.config import parser_choice
from sparkd.config.config import load_config, parse_model
from sparkd.config.hub_check import Remote
from sparkd.config.parser_choice import ENTRY, RECIPE, UNREAD, expected, explained, in_words, with_parsers
from sparkd.errors import CheckpointError
from sparkd.vllm.arg_check import RefusedArg
from sparkd.vllm.ask import parser as parser_answers
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.parsers import _ALWAYS, FAMILY, OFF, REASONING_RULES, TEMPLATE, TOOL_RULES, Parsers, chosen
from tests.support.facts import lacking
from tests.support.parser_batch import refuse_nothing
from workers.vllm.ask import parse_args

# A template that opens a thought before every answer, as that of QwQ and of DeepSeek-R1's distillations.
THINKS = "{{ messages }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
HERMES = '{% if tools %}{{ tools }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'


# The words of each family's published templates that tell a model how to call, as in the examples of vLLM 0.32.0.
BARS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
THOUGHT = "{% if enable_thinking %}<think>{% endif %}"

QWEN3 = f"{{% if tools %}}{{{{ tools }}}}<tool_call> arguments{{% endif %}}{THOUGHT}{{{{ messages }}}}"
QWEN3_CODER = "{% if tools %}{{ tools }}<tool_call> <function=a> <parameter=b>{% endif %}{{ messages }}"


@pytest.mark.parametrize(
    ("words", "family", "tool", "reasoning"),
    [
        (f"{BARS} thinking </think>", "deepseek_v3", "deepseek_v31", "deepseek_v3"),
        ("<|tool_call> <|think|>", "gemma4", "gemma4", "gemma4"),
        ("<tool_call> arguments", "llama", "hermes", None),
        ('"parameters": dictionary of argument name and its value', "llama", "llama3_json", None),
        ("[TOOL_CALLS]", "mistral", "mistral", None),
        ("<|tool|>", "phi3", "phi4_mini_json", None),
        (f"<tool_call> arguments {THOUGHT}", "qwen3", "hermes", "qwen3"),
        (f"<tool_call> <function=a> <parameter=b> {THOUGHT}", "qwen3_5_moe", "qwen3_coder", "qwen3"),
        (f"<tool_call> <function=a> <parameter=b> {THOUGHT}", "nemotron_h", "qwen3_coder", "nemotron_v3"),
        ("[{name, arguments}]", "llama", None, None),
    ],
)
def test_words_of_published_templates(words: str, family: str, tool: str | None, reasoning: str | None) -> None:
    template = f"{{% if tools %}}{{{{ tools }}}}{words}{{% endif %}}{{{{ messages }}}}"
    found = chosen({"model_type": family}, template, template)

    assert (found.tool, found.reasoning) == (tool, reasoning)
    assert (found.nearest is None) == (tool is not None)


@pytest.mark.parametrize(
    ("family", "template", "tool", "reasoning"),
    [
        # Rendered by vLLM's own code, so that there need not be a template.
        ("gpt_oss", None, "openai", "openai_gptoss"),
        ("deepseek_v32", None, "deepseek_v32", "deepseek_v3"),
        ("llama", CHAT_TEMPLATE, "hermes", None),
        ("qwen2", THINKS, None, "deepseek_r1"),
        ("qwen3", THINKS, None, "qwen3"),
        # The model never sees the tools.
        ("llama", "{{ messages }} <tool_call> arguments", None, None),
        ("qwen3", None, None, None),
    ],
)
def test_families(family: str, template: str | None, tool: str | None, reasoning: str | None) -> None:
    found = chosen({"model_type": family}, template, template)

    assert (found.tool, found.reasoning) == (tool, reasoning)


def test_the_text_model_inside_a_larger_one_counts() -> None:
    assert chosen({"model_type": "llava", "text_config": {"model_type": "gpt_oss"}}, None, None).tool == "openai"


def test_every_name_is_known_to_the_installed_vllm() -> None:
    lines = [["--tool-call-parser", rule.name] for rule in TOOL_RULES]
    lines += [["--reasoning-parser", rule.name] for rule in (*REASONING_RULES, *_ALWAYS)]

    assert parse_args.parse(lines) == [[] for _ in lines]


NAMES = {
    "template": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
    "tokenizer": "tokenizer_config.json",
    "processor": "chat_template.json",
}


def made(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").touch()
    for name, content in files.items():
        path = folder / NAMES[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def decided(folder: Path, **keys: Any) -> tuple[str | None, str | None, Parsers, list[str]]:
    spec, parsers = with_parsers(parse_model("m", {"model": str(folder), **keys}, over_admin=False), {})
    return spec.tool_call_parser, spec.reasoning_parser, parsers, spec.vllm_flags()


@pytest.mark.parametrize(
    "files",
    [
        {"template": THINKS + HERMES},
        {"tokenizer": {"chat_template": THINKS + HERMES}},
        {"tokenizer": {"chat_template": HERMES}, "processor": {"chat_template": THINKS}},
        {"tokenizer": {"chat_template": [{"name": "default", "template": THINKS}, {"name": "tool_use", "template": HERMES}]}},
        {"tokenizer": {"chat_template": {"default": THINKS, "tool_use": HERMES}}},
        {"tokenizer": {"chat_template": QWEN3_CODER}, "template": THINKS + HERMES},
        {"tokenizer": {"chat_template": QWEN3_CODER}, "template": THINKS, "tool_use": HERMES},
    ],
)
def test_the_templates_are_those_that_vllm_takes(tmp_path: Path, files: dict[str, Any]) -> None:
    tool, reasoning, parsers, flags = decided(made(tmp_path / "m", **files))
    assert (tool, parsers.tool) == ("hermes", "hermes")
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in " ".join(flags)
    assert (reasoning, parsers.reasoning) == ("qwen3", "qwen3")


def test_a_processors_template_is_not_that_of_tools(tmp_path: Path) -> None:
    _, reasoning, parsers, _ = decided(made(tmp_path / "m", processor={"chat_template": THINKS + HERMES}))
    assert (parsers.tool, reasoning) == (None, "qwen3")


def test_the_parsers_are_expected_before_a_start_where_files_or_the_entry_tell_them(tmp_path: Path) -> None:
    def told(model: str, **keys: Any) -> Parsers | None:
        return expected(parse_model("m", {"model": model, **keys}, over_admin=False), {"HF_HUB_CACHE": str(tmp_path)})

    folder, without = made(tmp_path / "m", template=QWEN3), made(tmp_path / "n", template="{{ messages }}")
    assert told(str(folder)) == Parsers("hermes", "qwen3")
    assert told(str(without)) == Parsers(nearest="qwen3_coder")
    assert told(str(without), tool_call_parser="xlam") == Parsers("xlam")
    assert told("owner/absent") is None
    assert told("owner/absent", reasoning_parser="qwen3") is None
    assert told("owner/absent", tool_call_parser="xlam") == Parsers("xlam")
    assert told("owner/absent", tool_call_parser="none") == Parsers()


def test_files_that_are_not_all_here_do_not_tell_that_there_is_no_parser(tmp_path: Path) -> None:
    """A cache that has config.json alone: the load brings the rest, and a refusal would keep it away for ever."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    made(snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("a" * 40)
    spec = parse_model("m", {"model": "owner/name"}, over_admin=False)
    assert expected(spec, {"HF_HUB_CACHE": str(tmp_path)}) is None


def test_a_hub_that_is_silent_now_does_not_tell_that_there_is_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(name: str) -> bytes:
        raise CheckpointError("the hub does not answer")

    remote = Remote("1" * 40, ("config.json", "tokenizer_config.json"), silent)
    monkeypatch.setattr(parser_choice, "looked_at", lambda spec, env: remote)
    monkeypatch.setattr(parser_choice, "_here", lambda spec, env: None)
    assert expected(parse_model("m", {"model": "Qwen/qwen3"}, over_admin=False), {}) is None


def test_what_decides_a_parser_is_told(tmp_path: Path) -> None:
    def told(model: str, recipe: dict[str, Any] | None = None, **keys: Any) -> list[tuple[str | None, str | None]]:
        spec = parse_model("m", {"model": model, **keys}, over_admin=False)
        rows = explained(spec, {"HF_HUB_CACHE": str(tmp_path)}, recipe or {})
        assert in_words(rows)
        return [(rows[kind]["name"], rows[kind]["from"]) for kind in ("tool", "reasoning")]

    folder, coded = made(tmp_path / "m", template=QWEN3), made(tmp_path / "n")
    (coded / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    assert told(str(folder)) == [("hermes", TEMPLATE), ("qwen3", TEMPLATE)]
    assert told(str(coded)) == [("openai", FAMILY), ("openai_gptoss", FAMILY)]
    assert told(str(made(tmp_path / "o", template="{{ messages }}"))) == [(None, None), (None, None)]
    assert told("owner/absent") == [(None, UNREAD), (None, UNREAD)]
    keys = {"tool_call_parser": "xlam", "reasoning_parser": "none"}
    assert told(str(folder), **keys) == [("xlam", ENTRY), (None, ENTRY)]
    assert told("owner/absent", {"tool_call_parser": "xlam"}, **keys) == [("xlam", RECIPE), (None, ENTRY)]
    assert told(str(folder), extra_args=["--tool-call-parser", "xlam"]) == [("xlam", ENTRY), ("qwen3", TEMPLATE)]


def test_check_tells_the_parsers_of_each_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_nothing(monkeypatch)
    weightless = {"extra_args": ["--load-format", "dummy"]}
    models = {
        "own": {"model": str(made(tmp_path / "m", template=QWEN3))} | weightless,
        "laid": {"recipe": "qwen3.5-27b", "model": str(made(tmp_path / "n")), "quantize": None} | weightless,
        "other": {"model": str(tmp_path / "m"), "entrypoint": "tests.stub"},
    }
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"state_dir": str(tmp_path / "state"), "models": models}))

    assert exit_code(["check", str(file), "--json"]) == 0
    parsers = json.loads(capsys.readouterr().out)["parsers"]
    assert exit_code(["check", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ": parsers: " in line]

    assert parsers["own"] == {"tool": {"name": "hermes", "from": TEMPLATE}, "reasoning": {"name": "qwen3", "from": TEMPLATE}}
    assert parsers["laid"] == {"tool": {"name": "qwen3_coder", "from": RECIPE}, "reasoning": {"name": "qwen3", "from": RECIPE}}
    assert set(parsers) == {"own", "laid"}
    assert [line.partition(":")[0] for line in lines] == ["models.own", "models.laid"]


def test_the_entrys_key_and_flags_win(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", template=QWEN3)

    assert decided(folder, tool_call_parser="qwen3_xml", reasoning_parser="deepseek_r1")[2] == Parsers("qwen3_xml", "deepseek_r1")
    *_, parsers, flags = decided(folder, extra_args=["--tool-call-parser", "xlam", "--reasoning-parser=olmo3"])
    assert parsers == Parsers("xlam", "olmo3")
    assert flags == ["--reasoning-parser", "olmo3", "--enable-auto-tool-choice", "--tool-call-parser", "xlam"]
    tool, reasoning, parsers, flags = decided(folder, tool_call_parser="none", reasoning_parser=False)
    assert (tool, reasoning, parsers, flags) == (OFF, OFF, Parsers(nearest="hermes"), [])


def test_a_parser_that_the_vllm_does_not_have_is_told_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: Path, lines: list[list[str]]) -> tuple[str, list[tuple[RefusedArg, ...]]]:
        return "0.32.0", [tuple(map(RefusedArg.of, refusals)) for refusals in parse_args.parse(lines)]

    monkeypatch.setattr(parser_answers, "asked", answer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, file = made(tmp_path / "m"), tmp_path / "sparkd.yaml"

    def told(keys: str) -> list[str]:
        file.write_text(f"state_dir: {tmp_path}\nmodels: {{m: {{model: {folder}, {keys}}}}}")
        return [problem.message for problem in check(file, {}) if "no such parser" in problem.message]

    (tool,) = told("tool_call_parser: hermess")
    assert lacking(tool, "tool_call_parser", "hermes?") == []
    assert len(told("tool_call_parser: hermess, reasoning_parser: qwen4")) == 2
    assert len(told("extra_args: ['--tool-call-parser=hermess']")) == 1
    assert told("tool_call_parser: hermes, reasoning_parser: qwen3") == told("tool_call_parser: none") == []
    assert told("tool_call_parser: own, env: {VLLM_PLUGINS: own}") == []
    spec = parse_model("m", {"model": str(folder), "tool_call_parser": "hermess"}, over_admin=False)
    assert len(refused_flags(spec, load_config(file, environ={}), full_version_in(None))) == 1


def test_a_template_of_the_entrys_own_decides(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", template=QWEN3)
    own = tmp_path / "own.jinja"
    own.write_text(QWEN3_CODER)

    assert decided(folder, extra_args=["--chat-template", str(own)])[2].tool == "qwen3_coder"
    assert decided(folder, extra_args=["--chat-template", "{{ messages }}"])[2].tool is None


def test_damaged_files_choose_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", tokenizer="{")
    (folder / "config.json").write_text("[")

    assert decided(folder)[2].tool is None
    assert decided(tmp_path / "not there")[2] == Parsers()
