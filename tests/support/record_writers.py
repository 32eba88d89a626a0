"""Which modules assign to the values of a model's record."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.daemon_process import ROOT

# By value of the record that is an object of its own, the module that has its class, which alone may change it.
OWNERS = {"queue": "sparkd.control.request_queue", "observed": "sparkd.control.observed"}


def record_writers() -> dict[str, set[str]]:
    """By value of a model's record, the modules with an assignment to it through a name that ends with `record`."""
    writers: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "sparkd").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "record." in text else ():
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            base = node.value
            if isinstance(base, ast.Name) and base.id.endswith("record"):
                writers[node.attr].add(module)
            elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id.endswith("record"):
                writers[f"{base.attr}.{node.attr}"] |= {module, OWNERS.get(base.attr, module)}
    return writers
