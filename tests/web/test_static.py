"""The page's own files: preloaded, small, and within their content security policy."""

from __future__ import annotations

import re

import pytest

from sparkd.bench.report import ENTRY
from sparkd.web.files import STATIC, PageFiles

MODULES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js"))
OWN = [name for name in MODULES if name.startswith("app/")]
MOST_TRANSFERRED_BYTES = 132_000
MOST_LINES = 600
# In a minified module, too; import("..") comes later.
_IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*["']([^"']+)["']""")


def imports_of(name: str) -> set[str]:
    """The modules that a module needs before it runs, without those that it may import later."""
    without_comments = re.sub(r"/\*.*?\*/", "", (STATIC / name).read_text(), flags=re.DOTALL)
    targets = [target for target in _IMPORT.findall(without_comments) if target[0] == "."]
    return {((STATIC / name).parent / target).resolve().relative_to(STATIC).as_posix() for target in targets}


def test_what_the_first_page_needs_is_preloaded() -> None:
    """Else a browser learns of a module only after it has read the one that imports it."""
    needed, new = set[str](), {"app/main.js"}
    while new:
        needed |= new
        new = {target for name in new for target in imports_of(name)} - needed
    index = (STATIC / "index.html").read_text()
    preloaded = re.findall(r'<link rel="modulepreload" href="\{folder\}/(.+?)">', index)
    assert preloaded == sorted(needed - {"app/main.js"})


def test_the_whole_page_is_small() -> None:
    files = PageFiles(STATIC)
    modules = [name for name in MODULES if name != ENTRY]  # of a report, which no page asks for
    names = ["/ui/", *(f"/ui/{files.digest}/{name}" for name in (*modules, "style.css", "vendor/uplot.css", "icon.svg"))]
    answers = [files.answer(name, {b"accept-encoding": b"gzip"}) for name in names]
    assert sum(len(answer.body) for answer in answers if answer) < MOST_TRANSFERRED_BYTES
    assert None not in answers


@pytest.mark.parametrize("name", OWN)
def test_a_module_keeps_the_policy(name: str) -> None:
    """No style or script in markup, nothing from elsewhere, and only modules that are there."""
    text = (STATIC / name).read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML", "eval(", "new Function", "document.write"):
        assert forbidden not in text
    assert re.search(r"\bstyle=|\bon[a-z]+=\"|https?://(?!127)", text) is None
    assert text.count("\n") <= MOST_LINES
    assert text.startswith("// "), "the first line says in one sentence what the module holds"
    assert imports_of(name) <= {*MODULES}


def test_the_index_has_no_script_or_style_of_its_own() -> None:
    index = (STATIC / "index.html").read_text()
    assert re.search(r"<script(?![^>]*src=)|<style|style=|\son[a-z]+=", index) is None
