"""Owns what tests of deploy/observability share: its rules, promtool, and which metrics a query of PromQL asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
RECORDING_RULES, ALERT_RULES = FOLDER / "recording-rules.yml", FOLDER / "alert-rules.yml"
# `make test` puts it there (deploy/promtool.sh).
OWN_PROMTOOL = ROOT / ".venv" / "bin" / "promtool"


def rules_of(file: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


ALERTS = rules_of(ALERT_RULES)
RECORDED = {rule["record"]: rule["expr"] for rule in rules_of(RECORDING_RULES)}

_KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_STRINGS = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_LABELS = re.compile(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*(?:\([^)]*\))?")
_NAME = re.compile(r"(?<![\w.:$])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])")


def metrics_of(query: str) -> set[str]:
    """The names of the metrics that a query of PromQL asks for."""
    bare = _LABELS.sub(" ", _STRINGS.sub('""', query))
    return {name for name in _NAME.findall(bare) if name.lower() not in _KEYWORDS}


# What promtool says of names that vLLM chose and that its boards ask for: a colon is kept for recording rules (its first letters are the
# mark by which its families pass), and one of its histograms is named like a counter. sparkd renames nothing.
_VLLMS_OWN = (
    re.compile(r"vllm:\S+ metric names should not contain ':'"),
    re.compile(r"""vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix"""),
)


def complaints_of(page: bytes) -> list[str]:
    """What `promtool check metrics` says of a page, without what is of vLLM's names."""
    done = subprocess.run([promtool(), "check", "metrics"], input=page, capture_output=True, check=False)
    lines = (done.stdout + done.stderr).decode().splitlines()
    assert done.returncode in (0, 3) and bool(lines) == bool(done.returncode), (done.returncode, lines)
    return [line for line in lines if not any(own.fullmatch(line) for own in _VLLMS_OWN)]


def promtool() -> str:
    path = shutil.which("promtool") or shutil.which(OWN_PROMTOOL)
    if path is None:
        pytest.skip("promtool is missing: run `make promtool`, or install the Debian package prometheus")
    return path
