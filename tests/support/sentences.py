"""Owns which functions take a sentence of ours apart to find out what it means: reasons, classes and numbers are there for that.

A name says that it holds a sentence (`message`, `reason`, `told` ..), and so does `str(error)`. To cut, strip or search one counts.
Words that other programs print have no other form: the functions that read those are in OTHERS_WORDS.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

_SENTENCE = re.compile(
    r"(sentence|message|reason|condition|why|trouble|text_of|refusal|told|cause|detail|explanation|fault|doubt|remark|note|problem|complaint)s?$"
)
_ERROR = re.compile(r"(error|exc|exception|err|broken)$")
_CUTS = frozenset(
    {
        *("partition", "rpartition", "split", "rsplit", "splitlines", "replace", "removeprefix", "removesuffix", "startswith", "endswith"),
        *("strip", "lstrip", "rstrip", "find", "rfind", "index", "count"),
    }
)
_SEARCHES = frozenset({"match", "search", "fullmatch", "findall", "finditer", "sub", "subn"})

# Full name of a function -> whose words it reads, or why it takes no meaning out of them.
OTHERS_WORDS: Mapping[str, str] = {
    "sparkd.__main__._usage": "typer's complaint, put on one line",
    "sparkd.capacity.fit.doubt_in_short": "vLLM's, cut to one line",
    "sparkd.capacity.vllm_figures.exact_of": "vLLM's, put on one line",
    "sparkd.cluster.ray_connection.RayLink._init": "Ray's, of which the first line is shown",
    "sparkd.cli.plan_run.write_containers": "a comment in a file, put on one line",
    "sparkd.doctor.fixes.apply": "those of the program that was run",
    "sparkd.errors.clause": "the one place that takes the full stop off a sentence, so that it can be a part of another",
    "sparkd.gateway.body._plain": "msgspec's",
    "sparkd.recipes.importer._text": "a comment of several lines in a file, each with its #",
    "sparkd.schema.overlay._explain": "pydantic's, whose choices stand in quotes",
    "sparkd.schema.refusal.expected": "pydantic's",
    "sparkd.schema.yaml_file._without": "hides values out of the environment, which may be secrets, in whatever is shown",
    "sparkd.schema.yaml_file._without_quotes": "PyYAML's, which quote what may be a secret",
    "workers.agent.nccl_rate.main": "torch's, of which the first line is shown",
    "workers.engine.meta_model.ModelNotBuilt.__init__": "vLLM's and torch's: which of them are certain",
    "workers.engine.meta_model._sentence": "pydantic's, out of vLLM",
    "workers.engine.model_answer.main": "vLLM's, put on one line",
    "workers.engine.model_question.conversation": "vLLM's, in which a folder of our own making is named as the reader knows it",
    "workers.engine.parse_args._Checks.serving": "argparse's",
    "workers.host.bounded_child.ask": "those of the program that was run",
    "workers.kv.cuda._refusals": "torch's",
    "workers.stream.vllm.load_errors.ended": "torch's, of which the first line is shown",
    "workers.stream.vllm.load_errors.is_out_of_memory": "torch's",
}


def parsers_of(functions: Iterable[tuple[str, ast.AST]]) -> dict[str, list[str]]:
    """By full name of a function, what it does to a sentence of ours."""
    found = {full: list(_cuts(node)) for full, node in functions if full not in OTHERS_WORDS}
    return {full: cuts for full, cuts in sorted(found.items()) if cuts}


def _cuts(function: ast.AST) -> Iterable[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in _CUTS and (held := _sentence(node.func.value)):
                yield f"{held}.{name}"
            elif name in _SEARCHES and (held := next(filter(None, map(_sentence, node.args)), None)):
                yield f"{name}({held})"
        elif isinstance(node, ast.Compare) and (held := _searched(node)):
            yield f"in {held}"


def _searched(node: ast.Compare) -> str | None:
    """A text that is looked for in a sentence. Names of several sentences, and `told`, hold other things as often."""
    if not isinstance(node.ops[0], ast.In | ast.NotIn) or not isinstance(node.left, ast.Constant):
        return None
    held = _sentence(node.comparators[0])
    return held if held != "told" and not (held or "").endswith("s") else None


def _sentence(value: ast.expr) -> str | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "str" and value.args:
        argument = value.args[0]
        name = argument.id if isinstance(argument, ast.Name) else argument.attr if isinstance(argument, ast.Attribute) else ""
        return f"str({name})" if _ERROR.match(name) or _SENTENCE.match(name) else None
    if isinstance(value, ast.BoolOp):
        return next(filter(None, map(_sentence, value.values)), None)
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))) if _SENTENCE.match(name):
            return name
    return None
