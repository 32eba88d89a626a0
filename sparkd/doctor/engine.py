"""The doctor's findings on the vLLM of one Python: which symbols that sparkd uses it lacks, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sparkd.fabric.checks import OK, WARN, Finding
from sparkd.vllm.installed import full_version_in
from sparkd.vllm.missing_symbols import missing_in
from workers.vllm.symbols import SUPPORTED


def findings(node: str, runtime: Path | None) -> Iterator[Finding]:
    """runtime: its interpreter, None for sparkd's own."""
    version, about = full_version_in(runtime), "vLLM" if runtime is None else f"vLLM of {runtime}"
    if version is None:
        yield Finding("engine", WARN, node, about, "not installed", "Set engine.runtime to the Python of an environment that has vLLM.")
        return
    missing = missing_in(runtime)
    for without, names in missing.items():
        cure = f"Install vLLM {' or '.join(SUPPORTED)}. Until then: {without}."
        yield Finding("engine", WARN, node, about, f"{version} lacks {', '.join(names)}", cure)
    if not missing:
        yield Finding("engine", OK, node, about, f"{version} has all that sparkd uses")
