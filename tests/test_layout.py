"""What holds for the whole repository: sizes, imports, words that may stand nowhere, and that README and docs name what there is."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparkd import metrics
from sparkd.__main__ import command_line
from sparkd.admin.app import PREFIX, admin_app
from sparkd.errors import SparkdError
from sparkd.gateway.routes import EXACT
from tests.support.inner_imports import imports_of, modules, needless
from workers.quantization.formats import SPELLINGS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
API = (ROOT / "docs/api.md").read_text()
MODULES = sorted([*ROOT.glob("sparkd/**/*.py"), *ROOT.glob("workers/**/*.py")])
SENTENCES = sorted([*MODULES, *ROOT.glob("deploy/**/*.py")])
LINES = 600
METHODS, PARAMETERS = 12, 8
# What asyncio, uvicorn and httptools call on a protocol of theirs is the interface of the base, not of the class.
_CALLBACKS = {*dir(HttpToolsProtocol), "on_chunk_header", "on_chunk_complete", "on_header"}


def tracked() -> list[Path]:
    """Every file that git knows and that is there."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_answers_one_question(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES, "past this a second noun has moved in: give it its own file"
    assert ast.get_docstring(ast.parse(text)), "what does it own, and what does it never do?"


def test_a_class_has_few_methods_and_a_function_few_parameters() -> None:
    """A value is kept in one frozen object rather than in nine parameters. A kernel of Triton's takes numbers alone, a verb its flags, an
    operator of torch what its schema says."""
    found = set()
    for path in MODULES:
        place = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        operators = {operator for node in ast.walk(tree) if (operator := _operator_of(node))}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and len(_methods(node)) > METHODS:
                found.add(f"{place}: {node.name}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(_parameters(node)) > PARAMETERS:
                a_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
                if not a_kernel and node.name not in operators and not (place.startswith("sparkd/cli/") and not node.name.startswith("_")):
                    found.add(f"{place}: {node.name}")

    assert found == set()


def _operator_of(node: ast.AST) -> str | None:
    """The function that a call of torch.library.Library.impl makes an operator of torch."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "LIBRARY.impl":
        return ast.unparse(node.args[1])
    return None


def _methods(node: ast.ClassDef) -> set[str]:
    """Public ones that the class adds: no property, and nothing that its base calls."""
    inherited = _CALLBACKS if any(ast.unparse(base).endswith("Protocol") for base in node.bases) else set()
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_")]
    return {part.name for part in methods if not any(_is_property(decorator) for decorator in part.decorator_list)} - inherited


def _is_property(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).endswith(("property", ".setter"))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    names = [part.arg for part in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [part.arg for part in (arguments.vararg, arguments.kwarg) if part is not None]
    return [name for name in names if name not in ("self", "cls")]


# A sentence that begins like this has lost its subject, and one about nobody or somebody hides the actor.
_VAGUE_BEGINNING = re.compile(r"(?:^|[.!?:;]\s+|\n\s*\n\s*|\n\s*[*-] )(?:Of|Who|What|Whose)\b.{0,60}")
_VAGUE_ACTOR = re.compile(r"\b(?:nobody|somebody)\b.{0,60}", re.IGNORECASE)


def test_a_sentence_names_its_subject() -> None:
    vague = []
    for path in SENTENCES:
        text = path.read_text(encoding="utf-8")
        if re.search(r"\b(?:Of|Who|What|Whose|[Nn]obody|[Ss]omebody)\b", text):
            prose = "\n\n".join(_prose(text))
            found = [*_VAGUE_BEGINNING.finditer(prose), *_VAGUE_ACTOR.finditer(prose)]
            vague += [f"{path.relative_to(ROOT)}: {words[0].strip()}" for words in found]

    assert not vague, "name the actor: the daemon, the loader, vLLM, the client, the operator"


def _prose(text: str) -> Iterator[str]:
    """The docstrings of a module, and its comments; lines of a comment that follow each other are one text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            yield docstring
    lines, last = list[str](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(lines)
                lines.clear()
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(lines)


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "core", "helpers", "helper", "managers", "manager", "misc"}

    assert not [path for path in tracked() if drawers & {*path.relative_to(ROOT).parent.parts, path.stem}]


def test_a_url_put_together_from_the_host_header_decides_nothing() -> None:
    """CVE-2026-48710, CVE-2026-49468: the path comes from the scope alone."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not (node.value.id == "request" and node.attr in ("url", "base_url", "url_for")), f"{path}:{node.lineno}"


def test_nothing_is_put_off_or_left_out() -> None:
    put_off = re.compile(r"\b(TODO|FIXME|NotImplementedError|xfail)\b|(pytest|mark)\.skip")
    for path in (path for path in tracked() if path.suffix == ".py" and path.name != Path(__file__).name):
        assert not put_off.search(path.read_text()), path


def test_no_path_of_this_checkout_is_written_down() -> None:
    """Where somebody built this is nobody's business. The parent, because a clone may be called as the project is."""
    home = f"{ROOT.parent}/"
    if home.count("/") > 2:
        for path in tracked():
            assert home not in path.read_text(errors="replace"), path


# What an import costs


def imported_by(statement: str) -> set[str]:
    """The top-level packages that are loaded after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_the_command_line_loads_neither_engine_nor_ray_nor_server() -> None:
    loaded = imported_by("import sparkd.__main__ as m; m.command_line()")

    assert "typer" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "ray", "fastapi", "starlette", "uvicorn"}


def test_a_plan_that_asks_nothing_loads_no_library() -> None:
    loaded = imported_by("from sparkd.cli import plan_run, plan_fast")

    assert "sparkd" in loaded
    assert not loaded & {"typer", "rich", "pydantic", "yaml", "httpx", "numpy", "huggingface_hub"}


def test_the_daemon_loads_no_engine_and_ray_only_when_it_connects() -> None:
    loaded = imported_by("import sparkd.daemon.daemon")

    assert "uvicorn" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "ray"}


@pytest.mark.parametrize("module", ["workers.agent.actor", "workers.rank.lifecycle", "workers.rank.shim"])
def test_what_runs_on_a_node_needs_the_standard_library_only(module: str) -> None:
    loaded = imported_by(f"import {module}")

    assert {"workers", "sparkd"} <= loaded
    site = imported_by("pass")
    assert not {name for name in loaded - site if name not in sys.stdlib_module_names} - {"workers", "sparkd"}


# By module, the module of ours that one of its functions imports, and why: no library is saved by it.
INNER = {
    ("sparkd.capacity.plan_for_node", "sparkd.fabric.environment"): "most plans are of one node: 60 ms less on a busy machine",
    ("sparkd.capacity.plan_report", "sparkd.fabric.environment"): "as above",
    ("sparkd.config.memory", "workers.guard.policy"): "5 % of the time that a configuration's import takes, for the daemon alone",
    ("sparkd.recipes.expand", "sparkd.recipes.speculation"): "7 % of the same, for entries that speculate",
    ("sparkd.schema.quantize", "workers.quantization.recipe"): "34 modules, 90 ms on a busy machine, for entries with `quantize` alone",
    ("sparkd.schema.quantize", "workers.quantization.variables"): "as above",
    ("workers.agent", "workers.agent.actor"): "only by the name under which Ray keeps the class of an earlier agent",
    ("workers.engine.model_answer", "workers.engine.cuda_stand_in"): "only where there is no GPU",
    ("workers.kv", "workers.kv.stock_worker"): "only by the class's name, which vLLM asks for",
    ("workers.stream.vllm.method", "workers.stream.vllm.cpu_linear"): "only on a CPU: it needs what vLLM has there alone",
    ("workers.stream.vllm.method", "workers.stream.vllm.cpu_moe"): "as above",
}


def test_an_import_inside_a_function_makes_a_library_optional() -> None:
    """Else it belongs to the top of the file, where a reader and the linter of layers look."""
    found = {(module, target): line for module, line, target in needless(modules())}

    assert {key: line for key, line in found.items() if key not in INNER} == {}
    assert INNER.keys() - found.keys() == set(), "these need no exception any more"


def test_what_counts_as_an_import_that_saves_nothing() -> None:
    inner = "".join(f"    {line}\n" for line in ("from c import y", "from d import z", "from b import w", "import os"))
    every = {
        "a": imports_of(f"import json\nfrom b import x\ndef f():\n{inner}"),
        "b": imports_of("import re"),
        "c": imports_of("from b import x"),
        "d": imports_of("def g(): pass\nimport numpy"),
    }
    assert set(needless(every)) == {("a", 4, "c"), ("a", 6, "b")}


# README and docs


def test_the_documents_name_every_verb() -> None:
    for command in command_line().registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        assert re.search(rf"`(?:sparkd )?{name}\b", DOCUMENTS), f"docs/commands.md does not name the verb {name}"


def named_in(text: str) -> set[str]:
    """Metric names, `a_{b,c}_d` as two of them."""
    found = set(re.findall(r"sparkd_\w+", text))
    for start, middle, end in re.findall(r"(sparkd_\w+)\{([\w,]+)\}(\w+)", text):
        found |= {f"{start}{each}{end}" for each in middle.split(",")}
    return found


def test_the_documents_name_every_metric_and_none_that_is_not_there() -> None:
    suffixes = {"counter": "_total", "info": "_info"}
    families = {family.name + suffixes.get(family.type, "") for family in metrics.REGISTRY.collect()}
    families = {name for name in families if not name.startswith("process_")}  # those of Prometheus's own clients
    named = named_in(DOCUMENTS)

    assert families - named == set(), "docs/api.md does not name these metrics"
    unknown = {name for name in named if not any(family.startswith(name) for family in families)}
    assert unknown == set(), "README.md or docs name metrics that sparkd/metrics.py does not define"


@pytest.mark.parametrize("path", [*EXACT, "/v1/models/{name}", "/v1/responses/{id}"])
def test_the_documents_name_every_route(path: str) -> None:
    last = path.rpartition("/")[2]
    named = rf"(?<![\w/]){re.escape(path)}(?![\w/])|`/?{last}`" if last else re.escape(path)
    assert path == "/" or re.search(named, API), f"docs/api.md does not name {path}"


def test_the_documents_name_every_route_of_the_admin_api() -> None:
    document: FastAPI = admin_app(*[SimpleNamespace(boundary=None, want=None)] * 4)  # type: ignore[arg-type]
    rows = [row.split(" | ")[0] for row in API.splitlines() if row.startswith(f"| `{PREFIX}/")]
    for path in document.openapi()["paths"]:
        first, *rest = path.removeprefix(f"{PREFIX}/").split("/")
        of_first = [row for row in rows if re.search(rf"`(?:{PREFIX}/)?{first}\b", row)]
        parts = [part for part in rest if not part.startswith("{")]
        named = any(all(re.search(rf"/{part}\b", row) for part in parts) for row in of_first)
        assert named, f"docs/api.md has no row of its table that names {path}"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_documents_name_every_format(spelling: str) -> None:
    assert f"`{spelling}`" in (ROOT / "docs/configuration.md").read_text(), f"docs/configuration.md does not name {spelling}"


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = set(re.findall(r"\b[A-Z]\w+", (sys.modules["sparkd.errors"].__doc__ or "").partition("*")[2]))

    def names(of: type[SparkdError]) -> set[str]:
        return {of.__name__, *(name for each in of.__subclasses__() if each.__module__ == "sparkd.errors" for name in names(each))}

    assert names(SparkdError) <= drawn
