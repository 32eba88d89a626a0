"""Recipes of other launchers, imported and held against the command that those would run, flag by flag.

    python -m tests.compat.recipes FOLDER...

reads every .yaml below the folders, prints one line for each recipe that differs or is refused, then a table, and ends with 1 where a
recipe got another meaning, was imported and then refused, or was refused although its launcher starts vLLM with it. Nothing of a recipe
is ever run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparkd.config.recipe_check import RecipeUse, checked, resolve, unusable
from sparkd.errors import ConfigError
from sparkd.recipes.file import parse_recipe
from sparkd.recipes.importer import Imported, imported
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.schema import yaml_file
from sparkd.vllm.releases import READ_OFF
from tests.compat.launchers import RefusedThere, Serving, arguments, read, theirs

# What sparkd itself sees to, whatever a recipe says.
OWNED = {
    "host", "port", "uds", "api-key", "nnodes", "node-rank", "master-addr", "master-port", "headless", "distributed-executor-backend",
    "pipeline-parallel-size", "root-path", "ssl-keyfile", "ssl-certfile", "hf-token", "enable-auto-tool-choice",
}  # fmt: skip
OWNED_ENV = ("RAY_", "VLLM_RAY_", "VLLM_DP_")
NAMES = ("same", "another meaning", "imported and then refused", "refused wrongly", "refused there too", "no vLLM")


@dataclass(frozen=True)
class Verdict:
    """kind: one of NAMES. told: what differs with a word at the import, for kind same; else the reasons."""

    kind: str
    told: tuple[str, ...] = ()


def verdict(raw: bytes, name: str, nodes: int) -> Verdict | None:
    """None for what is no recipe of another launcher."""
    try:
        table = yaml.safe_load(raw)
    except yaml.YAMLError:
        return None
    if not isinstance(table, dict) or "services" in table or not ({"command", "defaults"} & set(table)):
        return None
    try:
        wanted: Serving | None = theirs(table, nodes)
        reason = ""
    except RefusedThere as refusal:
        wanted, reason = None, str(refusal)
    try:
        found = imported(raw, f"{name}.yaml", _on(table, nodes))
        if wrong := [problem.message for problem in unusable(found, name, f"{name}.yaml", READ_OFF)]:
            raise ConfigError("; ".join(wrong))
    except ConfigError as error:
        kind = "no vLLM" if reason.startswith("runtime") else "refused there too" if wanted is None else "refused wrongly"
        return Verdict(kind, (error.message,))
    file, problems = parse_recipe(name, found.text.encode(), f"{name}.yaml", AsWritten())
    book = RecipeLibrary(None, AsWritten())
    if file is not None:
        book.keep(file)
        problems = [problem for problem in checked(file, book).problems if problem.severity == "error"]
    if problems:
        return Verdict("imported and then refused", tuple(problem.message for problem in problems))
    if wanted is None:
        return Verdict("same", (f"its launcher refuses it: {reason}",))
    chosen = resolve(RecipeUse(name), book)
    args = arguments(chosen.args)
    given = Serving(chosen.model.model, args.flags, dict(chosen.env))
    if chosen.model.tensor_parallel != "auto":
        given.flags["tensor-parallel-size"] = chosen.model.tensor_parallel
    if chosen.model.served_model_name:
        given.flags["served-model-name"] = chosen.model.served_model_name[0]
    if chosen.model.memory_gib != "auto":
        given.flags["gpu-memory-utilization-gb"] = chosen.model.memory_gib
    if isinstance(chosen.model.kv_cache, dict) and "bytes" in chosen.model.kv_cache:
        given.flags["kv-cache-memory-bytes"] = chosen.model.kv_cache["bytes"]
    different = list(differences(wanted, given, table))
    silent = tuple(line for name, line in different if not _told(name, found))
    return Verdict("another meaning", silent) if silent else Verdict("same", tuple(line for _, line in different))


def _on(table: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """What a person with so many nodes gives at the import, as the import tells him to."""
    size = (table.get("defaults") or {}).get("tensor_parallel")
    solo = table.get("solo_only") is True or table.get("max_nodes") == 1
    return {"tensor_parallel": size} if nodes > 1 and isinstance(size, int) and not solo else {}


def differences(wanted: Serving, given: Serving, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(flag or variable, what their command has and what ours has)."""
    if wanted.model != given.model:
        yield "model", f"model: {wanted.model} there, {given.model} here"
    for name in sorted(wanted.flags.keys() | given.flags.keys()):
        if name in OWNED or name.startswith("data-parallel-"):
            continue
        default = 1 if name == "tensor-parallel-size" else None
        there, here = wanted.flags.get(name, default), given.flags.get(name, default)
        if name == "served-model-name":
            there, here = (value[0] if isinstance(value, list) else value for value in (there, here))
        if name == "revision" and there is None and here == table.get("model_revision"):
            continue
        if name == "tensor-parallel-size" and chosen_by_sparkd(wanted):
            continue
        if there != here and not (there in (None, False) and here in (None, False)):
            yield name, f"--{name}: {there!r} there, {here!r} here"
    for name in sorted(wanted.env.keys() | given.env.keys()):
        variables = [_value(each.env.get(name)) for each in (wanted, given)]
        if variables[0] != variables[1] and not name.startswith(OWNED_ENV):
            yield name, f"{name}: {variables[0]!r} there, {variables[1]!r} here"


def chosen_by_sparkd(wanted: Serving) -> bool:
    """A pipeline's stages are nodes, and sparkd decides how those share a model."""
    return wanted.flags.get("pipeline-parallel-size", 1) != 1


def _value(text: str | None) -> Any:
    if text is None:
        return None
    text = text.replace("${env.", "${")
    return {"True": 1, "False": 0}.get(text, read(text))


def _told(name: str, found: Imported) -> bool:
    return any(name in note or name.replace("-", "_") in note for note in found.notes)


def main(arguments_: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes there are, for version 1 (default 1)")
    parser.add_argument("--told", action="store_true", help="also what differs with a word at the import")
    options = parser.parse_args(arguments_)
    counts: Counter[str] = Counter()
    for path in sorted(path for folder in options.folders for path in folder.rglob("*.y*ml")):
        found = verdict(path.read_bytes()[: yaml_file.MAX_BYTES], path.stem, options.nodes)
        if found is None:
            continue
        counts[found.kind] += 1
        if found.kind != "same" or (options.told and found.told):
            sys.stdout.write(f"{path}: {found.kind}: {'; '.join(found.told)}\n")
    sys.stdout.writelines(f"{counts[name]:5} {name}\n" for name in NAMES)
    sys.stdout.write(f"{counts.total():5} recipes, for {options.nodes} node{'s' if options.nodes > 1 else ''}\n")
    return 1 if any(counts[name] for name in NAMES[1:4]) else 0


if __name__ == "__main__":
    sys.exit(main())
