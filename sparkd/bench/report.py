"""The report of one or more results: one HTML file with the page's own scripts and the figures inside. It asks no host for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from sparkd.bench.compare import compare
from sparkd.bench.result import BenchResult
from sparkd.bench.tables import tables
from sparkd.web.files import STATIC

ENTRY = "app/report.js"
_SHOWN = ("Loads", "Quality", "Cells without", "Formats without")
# The address in `from ADDRESS` or `import ADDRESS`, also of a minified module.
_IMPORT = re.compile(r"""((?:\bfrom|\bimport)\s*)["'](\.[^"']+)["']""")


def html(results: Sequence[BenchResult]) -> str:
    """The whole file. Two results are compared as well, the second against the first."""
    title = f"Bench: {', '.join(dict.fromkeys(result.subject.model for result in results))}" if results else "Bench"
    figures = {
        "title": title,
        "comparison": asdict(compare(results[0], results[1])) if len(results) == 2 else None,
        "benches": [{"result": result.model_dump(mode="json"), "tables": _tables(result)} for result in results],
    }
    style = (STATIC / "style.css").read_text("utf-8") + (STATIC / "vendor/uplot.css").read_text("utf-8")
    modules = json.dumps({"imports": _modules()})
    start = f'import "{ENTRY}";'
    scripts = f"data: {_hash(modules)} {_hash(start)}"
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {scripts}; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
<script type="importmap">{modules}</script>
</head>
<body>
<main id="report"><p class="boot">This report needs JavaScript modules. The command line shows the same: sparkd bench show.</p></main>
<script type="application/json" id="figures">{_inside_html(figures)}</script>
<script type="module">{start}</script>
</body>
</html>
"""


def _tables(result: BenchResult) -> list[dict[str, Any]]:
    """Those that the page's own components do not show."""
    return [{"title": title, "head": head, "rows": rows} for title, head, rows in tables(result) if not title.startswith(_SHOWN)]


def _modules() -> dict[str, str]:
    """Each module that the report needs as a `data:` address, by its path below the page's folder, by which others import it."""
    modules, waiting = dict[str, str](), [ENTRY]
    while waiting:
        name = waiting.pop()
        if name in modules:
            continue

        def renamed(found: re.Match[str], name: str = name) -> str:
            target = (STATIC / name).parent.joinpath(found[2]).resolve().relative_to(STATIC.resolve()).as_posix()
            waiting.append(target)
            return f'{found[1]}"{target}"'

        text = _IMPORT.sub(renamed, (STATIC / name).read_text("utf-8"))
        modules[name] = f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
    return modules


def _inside_html(value: object) -> str:
    """JSON that no text in it can end: `</script>` and `<!--` need a `<` (HTML 13.2.5.4)."""
    return json.dumps(value).replace("<", "\\u003c")


def _hash(text: str) -> str:
    """By which a content security policy allows an inline style or script (CSP 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
