"""Owns which of vLLM's parsers read a model's tool calls and its reasoning, by its family and its chat template. Never reads a file.

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
    """tool, reasoning: names of vLLM's parsers, None for none. nearest: the tool parser to try where there is none."""

    tool: str | None = None
    reasoning: str | None = None
    nearest: str | None = None


def of_handle(fields: Mapping[str, str | None] | None) -> Parsers | None:
    """fields: those that a rank's handle has; None where they say nothing of tools."""
    if fields is None or "tool" not in fields:
        return None
    return Parsers(fields["tool"], fields.get("reasoning"), fields.get("nearest"))


@dataclass(frozen=True, slots=True)
class Rule:
    """names: of the parser in vLLM's releases, the preferred one first. families: patterns of model_type. markers: all stand in the
    template. coded: the release renders prompts in its own code, so the checkpoint needs no template."""

    names: tuple[str, ...]
    families: tuple[str, ...] = ("*",)
    markers: tuple[str, ...] = ()
    coded: bool = False

    def holds(self, family: str, template: str) -> bool:
        known = any(fnmatchcase(family, pattern) for pattern in self.families)
        return known and all(marker in template for marker in self.markers)


# DeepSeek's bars are not those of ASCII.
_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
# The first that holds counts.
TOOL_RULES = (
    Rule(("openai",), ("gpt_oss",), coded=True),
    Rule(("deepseek_v41",), ("deepseek_v41*",), coded=True),
    Rule(("deepseek_v4",), ("deepseek_v4*",), coded=True),
    Rule(("deepseek_v32",), ("deepseek_v32",), coded=True),
    Rule(("step3p5",), ("step3p5*",), ("<tool_call>",)),
    Rule(("mimo",), ("mimo_v2*",), ("<tool_call>",)),
    Rule(("minimax_m3",), ("minimax_m3*",), ("tool_call",)),
    Rule(("minimax_m2",), markers=("<minimax:tool_call>",)),
    Rule(("kimi_k2",), markers=("<|tool_calls_section_begin|>",)),
    Rule(("deepseek_v3",), markers=(_DEEPSEEK, "```json")),
    Rule(("deepseek_v31",), markers=(_DEEPSEEK,)),
    Rule(("seed_oss",), markers=("<seed:tool_call>",)),
    Rule(("longcat",), markers=("<longcat_tool_call>",)),
    Rule(("gemma4",), markers=("<|tool_call>",)),
    Rule(("functiongemma",), markers=("<start_function_call>",)),
    Rule(("apertus",), markers=("<|tools_prefix|>",)),
    Rule(("lfm2",), markers=("<|tool_call_start|>",)),
    Rule(("internlm",), markers=("<|plugin|>", "<|action_start|>")),
    Rule(("cohere_command3",), markers=("<|START_ACTION|>",)),
    Rule(("mistral",), markers=("[TOOL_CALLS]",)),
    Rule(("granite-20b-fc",), markers=("<|function_call_library|>",)),
    Rule(("granite",), ("granite*",), ("<|tool_call|>",)),
    Rule(("phi4_mini_json",), markers=("functools[",)),
    Rule(("phi4_mini_json",), ("phi3", "phi4*"), ("<|tool|>",)),
    Rule(("glm47", "glm45"), markers=("<arg_key>", "<tool_call>{function-name}<arg_key>")),
    Rule(("glm45", "glm47"), markers=("<arg_key>",)),
    Rule(("olmo3",), markers=("<function_calls>", "<functions>")),
    Rule(("hunyuan_a13b",), ("hunyuan*",), ("<tool_calls>",)),
    Rule(("jamba",), ("jamba*",), ("<tool_calls>",)),
    Rule(("qwen3_coder", "qwen3_xml"), markers=("<tool_call>", "<function=", "<parameter=")),
    Rule(("ernie45",), ("ernie4_5*",), ("<tool_call>",)),
    Rule(("granite4", "hermes"), ("granite*",), ("<tool_call>",)),
    Rule(("hermes",), markers=("<tool_call>", "arguments")),
    Rule(("llama4_json",), ("llama4*",), ('"parameters": dictionary',)),
    Rule(("llama3_json",), markers=('"parameters": dictionary',)),
    Rule(("llama4_pythonic",), ("llama4*",), ("func_name1(",)),
    Rule(("pythonic",), markers=("func_name1(",)),
)

REASONING_RULES = (
    Rule(("openai_gptoss",), ("gpt_oss",), coded=True),
    Rule(("deepseek_v41",), ("deepseek_v41*",), coded=True),
    Rule(("deepseek_v4",), ("deepseek_v4*",), coded=True),
    Rule(("deepseek_v3",), ("deepseek_v32",), coded=True),
    Rule(("deepseek_v3",), ("deepseek_v3",), ("</think>", "thinking")),
    Rule(("deepseek_r1",), ("deepseek_v3",), ("</think>",)),
    Rule(("gemma4",), ("gemma4*",), ("<|think|>",)),
    Rule(("nemotron_v3",), ("nemotron_h*",), ("<think>",)),
    Rule(("step3p5",), ("step3p5*",), ("<think>",)),
    Rule(("mimo",), ("mimo_v2*",), ("<think>",)),
    Rule(("minimax_m3",), ("minimax_m3*",), ("think",)),
    Rule(("minimax_m2",), ("minimax*",), ("<think>",)),
    Rule(("kimi_k2",), ("kimi_k2*",), ("<think>",)),
    Rule(("seed_oss",), markers=("<seed:think>",)),
    Rule(("qwen3",), ("qwen3*",), ("<think>", "enable_thinking")),
    Rule(("glm45", "glm47"), ("glm*",), ("<think>", "enable_thinking")),
    Rule(("hunyuan_a13b",), ("hunyuan*",), ("<think>", "enable_thinking")),
    Rule(("ernie45",), ("ernie4_5*",), ("<think>",)),
    Rule(("cohere_command3",), ("cohere*",), ("<|START_THINKING|>", "reasoning")),
    Rule(("granite",), ("granite*",), ("Here is my thought process",)),
    Rule(("mistral",), markers=("[THINK]",)),
)
# For a template that opens the thought itself, so that every answer begins with one. The rules above come first.
_ALWAYS = (
    Rule(("qwen3",), ("qwen3*",)),
    Rule(("olmo3",), ("olmo3*",)),
    Rule(("deepseek_r1",)),
)


def chosen(
    config: Mapping[str, Any],
    template: str | None,
    tools: Collection[str] | None = None,
    reasonings: Collection[str] | None = None,
) -> Parsers:
    """config: of config.json. template: the chat template, None where there is none. tools, reasonings: the parsers that the vLLM has, None
    where nobody knows them: then every name counts as known."""
    families, text = _families(config), template or ""
    tool = _name(_tool_rule(families, text), tools)
    reasoning = _name(_reasoning_rule(families, text, reasonings), reasonings)
    return Parsers(tool, reasoning, None if tool is not None else nearest(families[0], tools))


def origins(config: Mapping[str, Any], template: str | None, reasonings: Collection[str] | None = None) -> tuple[str | None, str | None]:
    """The reason for the tool parser and for the reasoning parser that `chosen` chooses: FAMILY, TEMPLATE, or None where no rule holds."""
    families, text = _families(config), template or ""
    rules = _tool_rule(families, text), _reasoning_rule(families, text, reasonings)
    tool, reasoning = (None if rule is None else FAMILY if rule.coded else TEMPLATE for rule in rules)
    return tool, reasoning


def _tool_rule(families: tuple[str, ...], template: str) -> Rule | None:
    return _first(TOOL_RULES, families, template, rendered=bool(_TOOLS.search(template)))


def _reasoning_rule(families: tuple[str, ...], template: str, known: Collection[str] | None) -> Rule | None:
    rule = _first(REASONING_RULES, families, template, rendered=bool(template))
    if _name(rule, known) is None and opens_thought(template):
        return _first(_ALWAYS, families, template, rendered=True)
    return rule


def opens_thought(template: str) -> bool:
    """Whether what the template puts before every answer is the beginning of a thought."""
    _, marker, tail = template.rpartition("add_generation_prompt")
    return bool(marker) and "<think>" in tail and "</think>" not in tail and "thinking" not in tail


def nearest(family: str, known: Collection[str] | None) -> str:
    """The name that is most like the family's, the usual one where none is."""
    names = sorted({name for rule in TOOL_RULES for name in rule.names} if known is None else known)
    return nearest_word(family, names, _NEAR) or USUAL


def _families(config: Mapping[str, Any]) -> tuple[str, ...]:
    """model_type, and that of the text model inside one for several media."""
    inner = config.get("text_config")
    kinds = [config.get("model_type"), inner.get("model_type") if isinstance(inner, Mapping) else None]
    return tuple(name for name in kinds if isinstance(name, str)) or ("",)


def _first(rules: Collection[Rule], families: tuple[str, ...], template: str, *, rendered: bool) -> Rule | None:
    for rule in rules:
        if (rendered or rule.coded) and any(rule.holds(family, template) for family in families):
            return rule
    return None


def _name(rule: Rule | None, known: Collection[str] | None) -> str | None:
    """The preferred name of those that the vLLM has."""
    return next((name for name in rule.names if known is None or name in known), None) if rule is not None else None
