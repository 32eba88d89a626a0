"""How the command line shows recipes: the list, and one with what it comes to."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from sparkd.checkpoint.source import name_of
from sparkd.render.models import say
from sparkd.render.table import Table

# Figure -> words and unit.
_FIGURES = {
    "parameters": ("parameters", ""),
    "active_parameters": ("active for a token", ""),
    "decode_tokens_per_s": ("one stream", "tokens/s"),
    "total_decode_tokens_per_s": ("all streams", "tokens/s"),
    "prefill_tokens_per_s": ("prompt", "tokens/s"),
    "ttft_s": ("first token after", "s"),
    "load_s": ("load", "s"),
    "disk_gb": ("on disk", "GB"),
    "total_gb": ("memory in all", "GB"),
    "weights_gib_per_rank": ("weights of a rank", "GiB"),
    "kv_gib": ("KV cache", "GiB"),
    "kv_tokens": ("KV cache", "tokens"),
    "kv_bytes_per_token": ("a token in the KV cache", "B"),
}


def listed(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """`sparkd recipes ls`."""
    columns = ("RECIPE", "MODEL", "NODES", "TOKENS/S", "SPECULATION")
    table = Table(*columns, right={"NODES", "TOKENS/S"}, folds={"SPECULATION"}, spare=("SPECULATION", "TOKENS/S"))
    for row in rows:
        speed = row["decode_tokens_per_s"]
        shown = "-" if speed is None else f"{speed:g}"
        table.add(row["name"], row["model"], str(row["nodes"]), shown, row["speculative"])
    table.show(console)
    console.print("TOKENS/S is the first published figure for one stream. `sparkd recipes show NAME` tells its source.", style="dim")


def registries(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """`sparkd recipes ls --registry`."""
    entries = list(rows)
    table = Table("REGISTRY", "RECIPES", "COMMIT", "OF", "FROM", right={"RECIPES"}, spare=("OF", "RECIPES"))
    for row in entries:
        table.add(row["name"], str(row["recipes"]), row["commit"][:12], row["committed"][:10], row["url"])
    if entries:
        table.show(console)
    else:
        console.print("No registry is configured. `sparkd recipes add-registry URL` adds one.", markup=False)


def of_registry(rows: Iterable[Mapping[str, str | None]], registry: Mapping[str, Any], console: Console) -> None:
    """`sparkd recipes ls --registry NAME`."""
    table = Table("RECIPE", "MODEL", "RUNTIME", spare=("RUNTIME",))
    for row in rows:
        table.add(*(row[key] or "-" for key in ("name", "model", "runtime")))
    table.show(console)
    say(console, f"{registry['url']} at {registry['commit'][:12]} of {registry['committed'][:10]}.")


def described(recipe: Mapping[str, Any], console: Console) -> None:
    """`sparkd recipes show`."""
    from sparkd.config.parser_choice import in_words

    least, most, spec = recipe["nodes"]["min"], recipe["nodes"]["max"], recipe["spec"]
    quantize = spec.get("quantize")
    facts = {
        "model": recipe["model"],
        "file": recipe["path"],
        "nodes": f"{least} to {most}" if most else f"{least} or more",
        "vLLM": f"{recipe['needs_vllm']} or newer" if recipe["needs_vllm"] else None,
        "container": recipe["container"]["image"] if recipe["container"] else None,
        "parsers": in_words(recipe["parsers"]),
        "speculation": recipe["speculative"],
    }
    settings = {
        "tensor_parallel": spec.get("tensor_parallel"),
        "quantize": quantize["format"] if isinstance(quantize, dict) else quantize,
        "kv_cache": spec.get("kv_cache"),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in recipe["env"].items()]
    lines += [f"{key}: {_yaml(value)}" for key, value in settings.items() if value]
    say(console, f"{recipe['name']}: {recipe['description']}", "bold")
    for name, fact in facts.items():
        if fact is not None:
            say(console, f"  {name:<12} {fact}")
    name = name_of(recipe["name"].partition("@")[0])
    _block(console, "In sparkd.yaml", [f"{name}:", f"  recipe: {_yaml(recipe['name'])}"])
    _block(console, "It comes to", [*lines, *_pairs(recipe["flags"])])
    _block(console, "Sampling", [f"{name}: {_flat(values)}" for name, values in recipe["sampling"].items()])
    _block(console, "Published figures", [_figure(figure) for figure in recipe["expected"]])
    _block(console, "Notes", recipe["notes"])
    _block(console, "Sources", [f"{name}: {text}" for name, text in recipe["sources"].items()])


def _block(console: Console, head: str, lines: list[str]) -> None:
    if lines:
        say(console, f"\n{head}", "bold")
    for line in lines:
        say(console, f"  {line}")


def _pairs(flags: list[str]) -> list[str]:
    """A flag and its values on a line."""
    lines: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append([word])
        else:
            lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def _figure(figure: Mapping[str, Any]) -> str:
    words, unit = _FIGURES[figure["what"]]
    value = _amount(figure["value"]) + (f" to {_amount(figure['to'])}" if "to" in figure else "")
    when = f" ({figure['when']})" if "when" in figure else ""
    return f"{words} {value}{' ' + unit if unit else ''}{when} [{figure['source']}]"


def _amount(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:g} billion"
    return f"{value:,.0f}" if value == int(value) and value >= 1000 else f"{value:g}"


def _flat(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_yaml(value)}" for name, value in values.items())


def _yaml(value: Any) -> str:
    """On one line, as it can stand behind a key of sparkd.yaml."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    # It ends a plain value so.
    return text.removesuffix("...\n").rstrip("\n")
