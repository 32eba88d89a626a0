"""The rules of the whole repository: sizes, imports, words that may stand nowhere, and that README and docs name what there is."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparkd import metrics
from sparkd.__main__ import command_line
from sparkd.admin.app import admin_app
from sparkd.errors import SparkdError
from sparkd.gateway.routes import ADMIN_ROOT, EXACT
from tests.support.admin_parts import parts_of
from workers.quantization.formats import SPELLINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = "\n".join(path.read_text() for path in PAGES)
API = (ROOT / "docs/api.md").read_text()
MODULES = sorted([*ROOT.glob("sparkd/**/*.py"), *ROOT.glob("workers/**/*.py")])
SENTENCES = sorted([*MODULES, *ROOT.glob("deploy/**/*.py")])
LINES = 600
METHODS, PARAMETERS = 12, 8
# What asyncio, uvicorn and httptools call on a protocol of theirs is the interface of the base, not of the class.
_CALLBACKS = {*dir(HttpToolsProtocol), "on_chunk_header", "on_chunk_complete", "on_header"}


def tracked() -> list[Path]:
    """Every file that git knows and that is there."""
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_a_module_answers_one_question() -> None:
    assert len(MODULES) > 200
    long = [path for path in MODULES if len(path.read_text().splitlines()) > LINES]
    assert not long, "past this a second noun has moved in: give it its own file"
    assert not [path for path in MODULES if not ast.get_docstring(tree_of(path))], "what does it own?"


def test_a_class_has_few_methods_and_a_function_few_parameters() -> None:
    """A value is kept in one frozen object rather than in nine parameters. A kernel of Triton's takes numbers alone, a verb its flags, an
    operator of torch what its schema says."""
    found = set()
    for path in MODULES:
        place = str(path.relative_to(ROOT))
        nodes = list(ast.walk(tree_of(path)))
        operators = {operator for node in nodes if (operator := _operator_of(node))}
        for node in nodes:
            if isinstance(node, ast.ClassDef) and len(_methods(node)) > METHODS:
                found.add(f"{place}: {node.name}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(_parameters(node)) > PARAMETERS:
                a_kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
                if not a_kernel and node.name not in operators and not (place.startswith("sparkd/cli/") and not node.name.startswith("_")):
                    found.add(f"{place}: {node.name}")

    assert found == set()


def _operator_of(node: ast.AST) -> str | None:
    """The function that a call of torch.library.Library.impl makes an operator of torch."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "impl":
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
            prose = "\n\n".join(_prose(path, text))
            found = [*_VAGUE_BEGINNING.finditer(prose), *_VAGUE_ACTOR.finditer(prose)]
            vague += [f"{path.relative_to(ROOT)}: {words[0].strip()}" for words in found]

    assert not vague, "name the actor: the daemon, the loader, vLLM, the client, the operator"


def _prose(path: Path, text: str) -> Iterator[str]:
    """The docstrings of a module, and its comments; lines of a comment that follow each other are one text."""
    for node in ast.walk(tree_of(path)):
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
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not (node.value.id == "request" and node.attr in ("url", "base_url", "url_for")), f"{path}:{node.lineno}"


# Files of /proc/PID that the kernel takes from a process's memory, what psutil calls them, and programs that read them.
_OF_MEMORY = re.compile(r"(?:^|/)(cmdline|environ|s?maps|numa_maps|smaps_rollup|pagemap|map_files|auxv|mem)$")
_OF_MEMORY_BY_PSUTIL = {"cmdline", "environ", "memory_maps", "memory_full_info", "open_files"}
_READERS = {"ps", "fuser", "lsof", "pgrep", "pkill"}
# A rank's own, by its guard on a thread that nothing waits for: no other file of /proc shows memory whose descriptor is closed.
_MAY_READ = {"workers/rank/shared_memory.py: /maps"}


def test_no_process_is_known_by_what_the_kernel_takes_from_its_memory() -> None:
    """A process that a driver holds keeps its readers waiting for ever; `stat`, `status` and `fd` do not."""
    assert set(_readings('a = f"/proc/{p}/environ"; b = d / "maps"; c = {"environ": 1}["environ"]')) == {"/environ", "maps"}
    assert set(_readings('psutil.Process(p).cmdline(); run(["ps", "-ef"]); app.command("ps")')) == {".cmdline", "ps"}
    found = {f"{path.relative_to(ROOT)}: {what}" for path in MODULES for what in _readings(path.read_text(encoding="utf-8"))}

    assert found == _MAY_READ


def _readings(text: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(text)))
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    keys |= {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if _OF_MEMORY.search(text) and id(node) not in keys and text != "proc/cmdline":
                yield text  # the one that is excepted is the kernel's own
            case ast.Call(func=ast.Attribute(attr=name)) if name in _OF_MEMORY_BY_PSUTIL:
                yield f".{name}"
            case ast.List(elts=[ast.Constant(value=name), *_]) | ast.Tuple(elts=[ast.Constant(value=name), *_]) if name in _READERS:
                yield name


# A test that passes in silence where something is missing says less than one that is skipped and names it.
_MISSING = "GPU|Triton|CUDA|chromium|promtool|npm|package index|nft|systemd|cgroup|namespaces|PSI|root|kernel|machine"


def test_nothing_is_put_off_and_a_test_is_skipped_for_missing_hardware_or_tools_alone() -> None:
    put_off = re.compile(r"\b(TODO|FIXME|NotImplementedError|xfail)\b")
    files = [path for path in tracked() if path.suffix == ".py" and path.name != Path(__file__).name]
    assert not [path for path in files if put_off.search(path.read_text()) or _skips_in_silence(path.read_text())]
    assert _skips_in_silence('pytest.skip("slow")') and not _skips_in_silence('pytest.skip("Triton is not installed")')


def _skips_in_silence(text: str) -> bool:
    """Whether a skip names nothing that the machine may lack."""
    skips = re.finditer(r"(?:pytest|mark)\.skip(?:if)?\b(.{,240})", text, re.DOTALL)
    return any(not re.search(rf"\b(?:{_MISSING})\b", skip[1]) for skip in skips)


def test_no_path_of_this_checkout_is_written_down() -> None:
    """Where somebody built this is nobody's business."""
    home = re.compile(rf"{re.escape(str(ROOT))}(?![\w.-])")
    assert home.search(f"cd {ROOT}/sparkd") and not [path for path in tracked() if home.search(path.read_text(errors="replace"))]


# Each loads at least what those before it load, and may load more. By what is started: what it never loads, and a package that it does.
_STANDARD_LIBRARY_ONLY = "import workers.agent.actor, workers.rank.lifecycle, workers.rank.shim"
IMPORTS = {
    "import sparkd.__main__ as m; m.command_line()": (
        "typer",
        {"torch", "transformers", "numpy", "ray", "fastapi", "starlette", "uvicorn"},
    ),
    "import sparkd.daemon.daemon": ("uvicorn", {"torch", "vllm", "transformers", "numpy", "ray"}),
}


def test_no_program_loads_more_than_it_needs() -> None:
    """A node needs the standard library alone, and neither verbs nor daemon an engine or Ray."""
    steps = ["pass", _STANDARD_LIBRARY_ONLY, *IMPORTS]
    code = "import json, sys\n" + "".join(f"{step}\nprint(json.dumps([*sys.modules]))\n" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    site, on_a_node, *others = ({name.partition(".")[0] for name in json.loads(line)} for line in done.stdout.splitlines())

    assert {name for name in on_a_node - site if name not in sys.stdlib_module_names} == {"workers", "sparkd"}
    for loaded, (step, (needed, never)) in zip(others, IMPORTS.items(), strict=True):
        assert needed in loaded
        assert not loaded & never, step


# README and docs


def test_a_link_to_a_file_leads_there() -> None:
    links = [
        (page, link)
        for page in (*PAGES, ROOT / "tests/README.md")
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in link
    ]

    assert len(links) > 100
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def test_every_test_that_holds_a_promise_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", (ROOT / "tests/README.md").read_text())

    assert len(named) > 40
    assert not [f"{file}::{name}" for file, name in named if name.split("::")[-1] not in _tests_of(ROOT / file)]


@cache
def _tests_of(path: Path) -> set[str]:
    return (
        {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if path.exists()
        else set()
    )


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


def test_the_documents_name_every_route() -> None:
    for path in (*EXACT, "/v1/models/{name}", "/v1/responses/{id}"):
        last = path.rpartition("/")[2]
        named = rf"(?<![\w/]){re.escape(path)}(?![\w/])|`/?{last}`" if last else re.escape(path)
        assert path == "/" or re.search(named, API), f"docs/api.md does not name {path}"


def test_the_documents_name_every_route_of_the_admin_api() -> None:
    document: FastAPI = admin_app(*[SimpleNamespace(boundary=None, want=None)] * 4, parts_of())  # type: ignore[arg-type]
    rows = [row.split(" | ")[0] for row in API.splitlines() if row.startswith(f"| `{ADMIN_ROOT}/")]
    for path in document.openapi()["paths"]:
        first, *rest = path.removeprefix(f"{ADMIN_ROOT}/").split("/")
        of_first = [row for row in rows if re.search(rf"`(?:{ADMIN_ROOT}/)?{first}\b", row)]
        parts = [part for part in rest if not part.startswith("{")]
        named = any(all(re.search(rf"/{part}\b", row) for part in parts) for row in of_first)
        assert named, f"docs/api.md has no row of its table that names {path}"


def test_the_documents_name_every_format() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert [spelling for spelling in SPELLINGS if f"`{spelling}`" not in page] == []


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = set(re.findall(r"\b[A-Z]\w+", (sys.modules["sparkd.errors"].__doc__ or "").partition("*")[2]))

    def names(of: type[SparkdError]) -> set[str]:
        return {of.__name__, *(name for each in of.__subclasses__() if each.__module__ == "sparkd.errors" for name in names(each))}

    assert names(SparkdError) <= drawn
