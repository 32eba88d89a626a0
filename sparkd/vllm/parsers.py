"""Chooses vLLM's parsers of a model's tool calls and of its reasoning, by its family and its chat templates.

The names are those of `--tool-call-parser` and `--reasoning-parser`. The rules come from vLLM 0.32.0, docs/features/tool_calling.md and
reasoning_outputs.md, from the patterns of its Rust front end (rust/src/chat/src/parser), and from the built-in recipes. A template tells
the model in which format to call, so its markers decide; the family decides where two formats share their markers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sparkd.nearest import nearest as nearest_word

# The name with which an entry asks for no parser.
OFF = "none"
USUAL = "hermes"
# Either decides a choice.
FAMILY, TEMPLATE = "family", "template"
_TOOLS = re.compile(r"\btools\b")
_NEAR = 0.5


@dataclass(frozen=True, slots=True)
class Parsers:
    """The names of vLLM's parsers for a model, None for none. nearest: the tool parser to try where there is none."""

    tool: str | None = None
    reasoning: str | None = None
    nearest: str | None = None


def of_handle(fields: Mapping[str, str | None] | None) -> Parsers | None:
    """fields: those that a rank's handle has; None where they say nothing of tools."""
    if fields is None or "tool" not in fields:
        return None
    return Parsers(fields["tool"], fields.get("reasoning"), fields.get("nearest"))


@dataclass(frozen=True, slots=True)
class ParserRule:
    """A parser and what its models have in common.

    name: of the parser in vLLM.
    families: patterns of model_type.
    markers: all stand in the template.
    coded: vLLM renders prompts in its own code, so the checkpoint needs no template.
    """

    name: str
    families: tuple[str, ...] = ("*",)
    markers: tuple[str, ...] = ()
    coded: bool = False

    @property
    def origin(self) -> str:
        """The reason for the choice: FAMILY or TEMPLATE."""
        return FAMILY if self.coded else TEMPLATE

    def holds(self, family: str, template: str) -> bool:
        known = any(fnmatchcase(family, pattern) for pattern in self.families)
        return known and all(marker in template for marker in self.markers)


# DeepSeek's bars are not those of ASCII.
_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
# The first that holds counts.
TOOL_RULES = (
    ParserRule("openai", ("gpt_oss",), coded=True),
    ParserRule("deepseek_v41", ("deepseek_v41*",), coded=True),
    ParserRule("deepseek_v4", ("deepseek_v4*",), coded=True),
    ParserRule("deepseek_v32", ("deepseek_v32",), coded=True),
    ParserRule("step3p5", ("step3p5*",), ("<tool_call>",)),
    ParserRule("mimo", ("mimo_v2*",), ("<tool_call>",)),
    ParserRule("minimax_m3", ("minimax_m3*",), ("tool_call",)),
    ParserRule("minimax_m2", markers=("<minimax:tool_call>",)),
    ParserRule("kimi_k2", markers=("<|tool_calls_section_begin|>",)),
    ParserRule("deepseek_v3", markers=(_DEEPSEEK, "```json")),
    ParserRule("deepseek_v31", markers=(_DEEPSEEK,)),
    ParserRule("seed_oss", markers=("<seed:tool_call>",)),
    ParserRule("longcat", markers=("<longcat_tool_call>",)),
    ParserRule("gemma4", markers=("<|tool_call>",)),
    ParserRule("functiongemma", markers=("<start_function_call>",)),
    ParserRule("apertus", markers=("<|tools_prefix|>",)),
    ParserRule("lfm2", markers=("<|tool_call_start|>",)),
    ParserRule("internlm", markers=("<|plugin|>", "<|action_start|>")),
    ParserRule("cohere_command3", markers=("<|START_ACTION|>",)),
    ParserRule("mistral", markers=("[TOOL_CALLS]",)),
    ParserRule("granite-20b-fc", markers=("<|function_call_library|>",)),
    ParserRule("granite", ("granite*",), ("<|tool_call|>",)),
    ParserRule("phi4_mini_json", markers=("functools[",)),
    ParserRule("phi4_mini_json", ("phi3", "phi4*"), ("<|tool|>",)),
    ParserRule("glm47", markers=("<arg_key>", "<tool_call>{function-name}<arg_key>")),
    ParserRule("glm45", markers=("<arg_key>",)),
    ParserRule("olmo3", markers=("<function_calls>", "<functions>")),
    ParserRule("hunyuan_a13b", ("hunyuan*",), ("<tool_calls>",)),
    ParserRule("jamba", ("jamba*",), ("<tool_calls>",)),
    ParserRule("qwen3_coder", markers=("<tool_call>", "<function=", "<parameter=")),
    ParserRule("ernie45", ("ernie4_5*",), ("<tool_call>",)),
    ParserRule("granite4", ("granite*",), ("<tool_call>",)),
    ParserRule("hermes", markers=("<tool_call>", "arguments")),
    ParserRule("llama4_json", ("llama4*",), ('"parameters": dictionary',)),
    ParserRule("llama3_json", markers=('"parameters": dictionary',)),
    ParserRule("llama4_pythonic", ("llama4*",), ("func_name1(",)),
    ParserRule("pythonic", markers=("func_name1(",)),
)

REASONING_RULES = (
    ParserRule("openai_gptoss", ("gpt_oss",), coded=True),
    ParserRule("deepseek_v41", ("deepseek_v41*",), coded=True),
    ParserRule("deepseek_v4", ("deepseek_v4*",), coded=True),
    ParserRule("deepseek_v3", ("deepseek_v32",), coded=True),
    ParserRule("deepseek_v3", ("deepseek_v3",), ("</think>", "thinking")),
    ParserRule("deepseek_r1", ("deepseek_v3",), ("</think>",)),
    ParserRule("gemma4", ("gemma4*",), ("<|think|>",)),
    ParserRule("nemotron_v3", ("nemotron_h*",), ("<think>",)),
    ParserRule("step3p5", ("step3p5*",), ("<think>",)),
    ParserRule("mimo", ("mimo_v2*",), ("<think>",)),
    ParserRule("minimax_m3", ("minimax_m3*",), ("think",)),
    ParserRule("minimax_m2", ("minimax*",), ("<think>",)),
    ParserRule("kimi_k2", ("kimi_k2*",), ("<think>",)),
    ParserRule("seed_oss", markers=("<seed:think>",)),
    ParserRule("qwen3", ("qwen3*",), ("<think>", "enable_thinking")),
    ParserRule("glm45", ("glm*",), ("<think>", "enable_thinking")),
    ParserRule("hunyuan_a13b", ("hunyuan*",), ("<think>", "enable_thinking")),
    ParserRule("ernie45", ("ernie4_5*",), ("<think>",)),
    ParserRule("cohere_command3", ("cohere*",), ("<|START_THINKING|>", "reasoning")),
    ParserRule("granite", ("granite*",), ("Here is my thought process",)),
    ParserRule("mistral", markers=("[THINK]",)),
)
# For a template that opens the thought itself, so that every answer begins with one. The rules above come first.
_ALWAYS = (
    ParserRule("qwen3", ("qwen3*",)),
    ParserRule("olmo3", ("olmo3*",)),
    ParserRule("deepseek_r1"),
)


def chosen(config: Mapping[str, Any], with_tools: str | None, without_tools: str | None) -> Parsers:
    """The parsers for a model.

    config: config.json. with_tools, without_tools: the templates by which vLLM renders a chat that brings tools and one that does not.
    """
    tool, reasoning = rules_of(config, with_tools, without_tools)
    return Parsers(
        None if tool is None else tool.name,
        None if reasoning is None else reasoning.name,
        nearest(_families(config)[0]) if tool is None else None,
    )


def rules_of(config: Mapping[str, Any], with_tools: str | None, without_tools: str | None) -> tuple[ParserRule | None, ParserRule | None]:
    """The rules for the tool parser and for the reasoning parser; None where no rule holds. Parameters: see `chosen`."""
    families, tools, plain = _families(config), with_tools or "", without_tools or ""
    tool = _first(TOOL_RULES, families, tools, rendered=bool(_TOOLS.search(tools)))
    reasoning = _first(REASONING_RULES, families, plain, rendered=bool(plain))
    if reasoning is None and opens_thought(plain):
        reasoning = _first(_ALWAYS, families, plain, rendered=True)
    return tool, reasoning


def opens_thought(template: str) -> bool:
    """Whether what the template puts before every answer is the beginning of a thought."""
    _, marker, tail = template.rpartition("add_generation_prompt")
    return bool(marker) and "<think>" in tail and "</think>" not in tail and "thinking" not in tail


def nearest(family: str) -> str:
    """The name that is most like the family's, the usual one where none is."""
    return nearest_word(family, sorted({rule.name for rule in TOOL_RULES}), _NEAR) or USUAL


def _families(config: Mapping[str, Any]) -> tuple[str, ...]:
    """model_type, and that of the text model inside one for several media."""
    inner = config.get("text_config")
    kinds = [config.get("model_type"), inner.get("model_type") if isinstance(inner, Mapping) else None]
    return tuple(name for name in kinds if isinstance(name, str)) or ("",)


def _first(rules: Collection[ParserRule], families: tuple[str, ...], template: str, *, rendered: bool) -> ParserRule | None:
    for rule in rules:
        if (rendered or rule.coded) and any(rule.holds(family, template) for family in families):
            return rule
    return None
